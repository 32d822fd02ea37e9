"""One machine of a laboratory: a network, mounts and a host name of its own, and the processes that run in them.

Machines share the root file system, the kernel and the numbering of processes with the real machine.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
from oracles.interpreters import Interpreter

HOLDER = Path(__file__).with_name("machine.sh")
COMMAND_SECONDS = 60


class Started:
    """A process that a test started on a machine; its output goes to files.

    Attributes:
        pid: of the process itself, as every machine and the test see it.
    """

    def __init__(self, process: "subprocess.Popen[bytes] | Interpreter", outputs: tuple[Path, Path]) -> None:
        self._process, self._outputs = process, outputs
        self.pid, self.kill = process.pid, process.kill  # nsenter and env replace themselves by the command

    @property
    def stdout(self) -> str:
        return self._outputs[0].read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return self._outputs[1].read_text(errors="replace")

    @property
    def running(self) -> bool:
        """Whether it has not ended yet; a stopped process runs."""
        return self._process.poll() is None

    def wait(self, seconds: float) -> int:
        """Returns the exit status, -n after signal n; still running after so many seconds fails the test."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.pid} still runs after {seconds} s\n{self.stdout}\n{self.stderr}") from None

    def children(self) -> list[psutil.Process]:
        """Returns its descendants, parents first."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.pid).children(recursive=True) if self.running else []
        return []

    def end(self) -> None:
        """Ends it with its descendants."""
        for child in self.children():
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        self.kill()


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
            [*enter, "unshare", "--mount", "--net", "--uts", "sh", str(HOLDER), name],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True, text=True,
        )  # fmt: skip
        self.name, self.pid = name, self._holder.pid
        answer = self._holder.stdout.readline()
        assert answer == "ready\n", f"machine {name} does not start: {answer}{self._holder.stdout.read()}"

    def spawn(self, argv: Sequence[str], environment: Mapping[str, str], output: Path, cwd: Path) -> Started:
        """Starts a command on this machine: Python's own with torch imported."""
        outputs = output.with_suffix(".out"), output.with_suffix(".err")
        with outputs[0].open("wb") as out, outputs[1].open("wb") as err:
            process = (
                Interpreter(argv[1:], cwd=cwd, env=environment, outputs=outputs, namespaces_of=self.pid)
                if argv[0] == sys.executable
                else subprocess.Popen(self._command(argv, cwd), env=environment, stdin=subprocess.DEVNULL, stdout=out,
                                      stderr=err, start_new_session=True)
            )  # fmt: skip
        return Started(process, outputs)

    def _command(self, argv: Sequence[str], cwd: Path = Path("/")) -> list[str]:
        return ["nsenter", "--target", str(self.pid), "--mount", "--net", "--uts", "env", f"--chdir={cwd}", *argv]

    def run(self, *argv: str | Path) -> str:
        """Runs a short command on this machine and returns its output.

        Raises:
            RuntimeError: it fails; with its output.
        """
        done = subprocess.run(
            self._command([str(word) for word in argv]), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, timeout=COMMAND_SECONDS, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{self.name}: {' '.join(map(str, argv))}: status {done.returncode}\n{done.stdout}")
        return done.stdout

    def seen_from_here(self, path: Path) -> Path:
        """Returns the path under which the test itself sees a file of this machine."""
        return Path(f"/proc/{self.pid}/root") / path.relative_to("/")

    def processes(self) -> list[int]:
        """Returns the ids of all living processes of this machine, but for the one that holds it."""
        namespace = os.readlink(f"/proc/{self.pid}/ns/net")
        running = []
        for pid in psutil.pids():
            with contextlib.suppress(OSError):  # it ended meanwhile, or is a zombie
                running += [pid] if os.readlink(f"/proc/{pid}/ns/net") == namespace and pid != self.pid else []
        return running

    def end_all(self) -> None:
        """SIGKILL to every process of this machine until none is left."""
        while running := self.processes():
            for pid in running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.005)

    def close(self) -> None:
        """Ends every process; the namespaces and what is mounted only there end with the last one."""
        try:
            self._holder.communicate(timeout=COMMAND_SECONDS)  # closes its standard input
        finally:
            self._holder.kill()
