"""What a laboratory needs: tests ask for it by fixture and are skipped with the reason where it is missing."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import nfs_lab, slurm_lab
from cluster.hosts import Hosts
from cluster.training import Job, parts, rows_of_a_log

NAMESPACES = ["unshare", "--mount", "--net", "--uts", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]


def lacking(*programs: str) -> list[str]:
    """Names what this machine lacks of root, of the right to make namespaces, and of programs."""
    if os.geteuid() != 0:
        return ["root"]
    missing = [program for program in ("unshare", "nsenter", "ip", *programs) if shutil.which(program) is None]
    if not missing and subprocess.run(NAMESPACES, capture_output=True, check=False).returncode:
        missing.append("the right to make namespaces and to mount (CAP_SYS_ADMIN)")
    return missing


def skip_without(missing: list[str], packages: str = ".ci/run names the packages") -> None:
    if missing:
        pytest.skip(f"this machine lacks {', '.join(missing)}; {packages}")


@pytest.fixture(scope="session")
def need_hosts() -> None:
    """Skips where machines cannot be made."""
    skip_without(lacking())


@pytest.fixture(scope="session")
def need_gluster() -> None:
    """Skips where hosts cannot share a folder by GlusterFS."""
    missing = lacking("glusterd", "gluster", "mount.glusterfs", "pkill")
    skip_without(missing if Path("/dev/fuse").exists() else [*missing, "/dev/fuse"])


@pytest.fixture(scope="module")
def two_hosts(need_gluster: None) -> Iterator[Hosts]:
    """Two hosts that share 64 MB by GlusterFS, for all tests of a file; each test leaves them healed."""
    with Hosts(2) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A log of CartPole."""
    return rows_of_a_log(tmp_path_factory.mktemp("log"), 700)


@pytest.fixture
def job(two_hosts: Hosts, lines: list[str]) -> Iterator[Callable[..., Job]]:
    """job(shards=half of the log each, **changes to the config) -> Job, which ends with the test."""
    jobs: list[Job] = []

    def make(shards: list[list[str]] | None = None, **changes: Any) -> Job:
        jobs.append(Job(two_hosts, shards or parts(lines, 2), **changes))
        return jobs[-1]

    yield make
    for one in jobs:
        one.end()
    for host in two_hosts:
        host.heal()


@pytest.fixture(scope="session")
def need_faketime() -> None:
    """Skips where a process's clock cannot be set."""
    skip_without(lacking("faketime"))


@pytest.fixture(scope="session")
def need_nfs() -> None:
    """Skips where two machines with a kernel of their own cannot be started."""
    skip_without(lacking() or nfs_lab.lacking())


@pytest.fixture(scope="session")
def need_slurm() -> None:
    """Skips where no Slurm can be started."""
    skip_without(lacking(*slurm_lab.PROGRAMS), f"Debian's packages: {slurm_lab.PACKAGES}")
