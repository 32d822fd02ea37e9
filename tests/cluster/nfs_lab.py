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

MACHINES = Path(__file__).with_name("nfs_machines.sh")
PROGRAMS = {"LINUX": "linux.uml", "BUSYBOX": "busybox"}


@functools.cache
def lacking() -> list[str]:
    """Names the programs that this machine lacks, or what keeps user-mode Linux from running on it."""
    if missing := [program for program in PROGRAMS.values() if shutil.which(program) is None]:
        return missing
    try:
        run_on_two_machines("exit 0", 30)
    except AssertionError as error:
        if panic := re.search(r"userspace - ptrace set fp regs failed.*", str(error)):
            return [f"a processor whose registers user-mode Linux has room for, as AMX's are not ({panic[0]})"]
    return []


def run_on_two_machines(job: str, seconds: float, memory: str = "1200M") -> list[str]:
    """Boots both machines, runs a shell script on each, and returns everything that each printed.

    Args:
        job: run by sh in the shared folder, at the same time on both, with NODE (0 or 1), SHARED (the folder), ADDRESS
            (own), FIRST (node 0's), IF (network interface, for GLOO_SOCKET_IFNAME and tc) and OUT (a writable folder
            of the real machine, the same for both).
        seconds: for everything, booting included (3 s; `import torch` takes 4.4 s inside, a first C++ error 8 s).
        memory: of each machine.

    Raises:
        AssertionError: a machine did not come to the job's end in time, or to another than 0; with all output.
    """
    with tempfile.TemporaryDirectory(prefix="nfs_lab_") as folder:
        lab = Path(folder)
        (lab / "memory").mkdir()
        (lab / "job.sh").write_text(job)
        programs = {name: shutil.which(program) or "" for name, program in PROGRAMS.items()}
        environment = {
            **programs,
            "PATH": os.environ["PATH"],
            "MODULES": str(max(Path("/usr/lib/uml/modules").iterdir())),
            "MEMORY": memory,
            "OPTIONS": "vers=4.2",
        }
        # two would measure each other, and want 5 GB
        alone = ["flock", f"--wait={5 * seconds:g}", f"{tempfile.gettempdir()}/reagent_lite_nfs_lab.lock"]
        limit = ["timeout", "--signal=KILL", str(seconds)]  # holds even where the test itself is killed
        apart = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child"]
        subprocess.run([*alone, *limit, *apart, "sh", str(MACHINES), folder], env=environment, check=False)
        said = "".join(f"\n== {file.name}\n{file.read_text(errors='replace')}" for file in sorted(lab.glob("[01].*")))
        assert {file.name: int(file.read_text()) for file in lab.glob("[01].status")} == {
            "0.status": 0,
            "1.status": 0,
        }, said
        return [(lab / f"{node}.output").read_text(errors="replace") for node in (0, 1)]
