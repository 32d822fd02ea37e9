"""Real NFSv4.2 between two machines: user-mode Linux with the kernel's own NFS client and server.

    node 0  10.98.0.1   serves a tmpfs of 64 MB and mounts it over loopback      ─┐ one network,
    node 1  10.98.0.2   mounts it                                                ─┘ of their own

The real machine's files are visible read-only at their own paths, so that its Python and the checkout work inside.
Needs root and the packages user-mode-linux and busybox-static. One laboratory at a time runs on a machine.
"""

import functools
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

MACHINES = Path(__file__).with_name("nfs_machines.sh")
PROGRAMS = {"LINUX": "linux.uml", "BUSYBOX": "busybox"}
PACKAGES = {"linux.uml": "user-mode-linux", "busybox": "busybox-static"}
MODULES = Path("/usr/lib/uml/modules")
LOCK = str(Path(tempfile.gettempdir()) / "reagent_lite_nfs_lab.lock")


class Ended(NamedTuple):
    """How the job ended on one machine: exit status and everything it printed."""

    code: int
    output: str


@functools.cache
def lacking() -> list[str]:
    """Names the packages that this machine lacks, or what keeps user-mode Linux from running on it."""
    packages = [PACKAGES[program] for program in PROGRAMS.values() if shutil.which(program) is None]
    if packages:
        return packages
    try:
        run_on_two_machines("exit 0", 30)
    except AssertionError as error:
        panic = re.search(r"userspace - ptrace set fp regs failed.*", str(error))
        if panic is not None:
            return [f"a processor whose registers user-mode Linux has room for, as AMX's are not ({panic[0]})"]
    return []


def run_on_two_machines(job: str, seconds: float, memory: str = "1200M") -> dict[int, Ended]:
    """Boots both machines, runs a shell script on each, and returns how it ended, by node.

    Args:
        job: run by sh in the shared folder, at the same time on both, with NODE (0 or 1), SHARED (the folder), ADDRESS
            (own), FIRST (node 0's), IF (network interface, for GLOO_SOCKET_IFNAME and tc) and OUT (a writable folder
            of the real machine, the same for both).
        seconds: for everything, booting included (3 s; `import torch` takes 4.4 s inside, a first C++ error 8 s).
        memory: of each machine.

    Raises:
        AssertionError: a machine did not come to the job's end in time; with its output.
    """
    with tempfile.TemporaryDirectory(prefix="nfs_lab_") as folder:
        lab = Path(folder)
        (lab / "memory").mkdir()
        (lab / "job.sh").write_text(job)
        modules = max(MODULES.iterdir())
        programs = {name: shutil.which(program) or "" for name, program in PROGRAMS.items()}
        environment = {**programs, "PATH": os.environ["PATH"], "MODULES": str(modules), "MEMORY": memory,
                       "OPTIONS": "vers=4.2"}  # fmt: skip
        alone = ["flock", f"--wait={5 * seconds:g}", LOCK]  # two would measure each other, and want 5 GB
        limit = ["timeout", "--signal=KILL", str(seconds)]  # holds even where the test itself is killed
        apart = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child"]
        subprocess.run([*alone, *limit, *apart, "sh", str(MACHINES), folder], env=environment, check=False)
        return {node: _ended(lab, node) for node in (0, 1)}


def _ended(lab: Path, node: int) -> Ended:
    status = lab / f"{node}.status"
    if not status.exists():
        files = [lab / f"{node}.{name}" for name in ("console", "boot", "output")]
        output = "".join(f"\n== {file.name}\n{file.read_text(errors='replace')}" for file in files if file.exists())
        raise AssertionError(f"node {node} did not come to the job's end{output}")
    return Ended(int(status.read_text()), (lab / f"{node}.output").read_text(errors="replace"))
