"""What a laboratory needs: tests ask for it by fixture and are skipped with the reason where it is missing."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from cluster import nfs_lab, slurm_lab
from cluster.hosts import Hosts, cluster_of
from cluster.training import Job, Make, parts, rows_of_a_log

NAMESPACES = ["unshare", "--mount", "--net", "--uts", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]


def lacking(*programs: str) -> list[str]:
    """Names what this machine lacks of root, of the right to make namespaces, and of programs."""
    if os.geteuid() != 0:
        return ["root"]
    missing = [program for program in ("unshare", "nsenter", "ip", "pgrep", *programs) if shutil.which(program) is None]
    if not missing and subprocess.run(NAMESPACES, capture_output=True, check=False).returncode:
        missing.append("the right to make namespaces and to mount (CAP_SYS_ADMIN)")
    return missing


def needing(name: str, *programs: str, more: Callable[[], list[str]] = list) -> Any:
    """A fixture that skips where something is missing."""

    @pytest.fixture(scope="session", name=name)
    def check() -> None:
        if missing := lacking(*programs) + more():
            pytest.skip(f"this machine lacks {', '.join(missing)}; .ci/run names the packages")

    return check


need_hosts = needing("need_hosts")
need_gluster = needing(
    "need_gluster",
    "glusterd",
    "gluster",
    "mount.glusterfs",
    "pkill",
    more=lambda: [] if Path("/dev/fuse").exists() else ["/dev/fuse"],
)
need_faketime = needing("need_faketime", "faketime")
need_nfs = needing("need_nfs", more=nfs_lab.lacking)  # two machines with a kernel of their own
need_slurm = needing("need_slurm", *slurm_lab.PROGRAMS)


@pytest.fixture(scope="module")
def two_hosts(need_gluster: None) -> Iterator[Hosts]:
    """Two hosts that share 64 MB by GlusterFS, for all tests of a file; each test leaves them healed."""
    with cluster_of(2) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A log of CartPole."""
    return rows_of_a_log(tmp_path_factory.mktemp("log"), 700)


@pytest.fixture
def job(two_hosts: Hosts, lines: list[str]) -> Iterator[Make]:
    """job(**changes to the config) -> Job with half of the log on each host, which ends with the test."""
    with ExitStack() as stack:
        yield lambda **changes: stack.enter_context(closing(Job(two_hosts, parts(lines, 2), **changes)))
    for host in two_hosts:
        host.heal()
