"""One machine of a laboratory: a network, mounts and a host name of its own, and the processes that run in them.

Machines share the root file system, the kernel and the numbering of processes with the real machine.
"""

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from helpers.interpreters import Interpreter

COMMAND_SECONDS = 60


class Machine:
    """Namespaces held open until `close`, with everything that runs in them.

    Attributes:
        name: host name inside.
        pid: of the process that holds the namespaces.
    """

    def __init__(self, name: str, mounts_of: "Machine | None" = None) -> None:
        """Starts a machine with a loopback interface; its mounts start as a copy of another machine's, or of ours."""
        enter = [] if mounts_of is None else ["nsenter", "--target", str(mounts_of.pid), "--mount"]
        self._holder = subprocess.Popen(
            [*enter, "unshare", "--mount", "--net", "--uts", "sh", str(Path(__file__).with_name("machine.sh")), name],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True, text=True,
        )  # fmt: skip
        self.name, self.pid = name, self._holder.pid
        answer = self._holder.stdout.readline()
        assert answer == "ready\n", f"machine {name} does not start: {answer}{self._holder.stdout.read()}"

    def spawn(self, argv: Sequence[str], environment: Mapping[str, str], cwd: Path) -> Interpreter:
        """Starts a command on this machine: Python with torch imported, or what it is replaced by."""
        other = ["-c", f"import os; os.execvp({argv[0]!r}, {argv!r})"]
        return Interpreter(
            argv[1:] if argv[0] == sys.executable else other, cwd=cwd, env={"OMP_NUM_THREADS": "1", **environment},
            namespaces_of=self.pid,
        )  # fmt: skip

    def run(self, *argv: str | Path) -> str:
        """Runs a short command on this machine and returns its output.

        Raises:
            RuntimeError: it fails; with its output.
        """
        enter = ["nsenter", "--target", str(self.pid), "--mount", "--net", "--uts", "env", "--chdir=/"]
        done = subprocess.run(
            [*enter, *argv], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, timeout=COMMAND_SECONDS, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{self.name}: {' '.join(map(str, argv))}: status {done.returncode}\n{done.stdout}")
        return done.stdout

    def seen_from_here(self, path: Path) -> Path:
        """Returns the path under which the test itself sees a file of this machine."""
        return Path(f"/proc/{self.pid}/root") / path.relative_to("/")

    def end_all(self) -> None:
        """SIGKILL to every process of this machine, but for the one that holds it, until none is left."""
        holder = str(self.pid)
        search = ["pgrep", "--nslist", "net", "--ns", holder]
        while running := {*subprocess.run(search, stdout=subprocess.PIPE, text=True).stdout.split()} - {holder}:
            subprocess.run(["kill", "-KILL", *running], stderr=subprocess.DEVNULL, check=False)
            time.sleep(0.005)

    def close(self) -> None:
        """Ends every process; the namespaces and what is mounted only there end with the last one."""
        try:
            self._holder.communicate(timeout=COMMAND_SECONDS)  # closes its standard input
        finally:
            self._holder.kill()
