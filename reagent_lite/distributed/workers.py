"""The workers of one machine: start them with torchrun's variables, watch them, find the first cause, end them."""

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from reagent_lite.distributed.connections import GLOO_VARIABLE, worker_address
from reagent_lite.distributed.group import ATTEMPT_VARIABLE
from reagent_lite.distributed.membership import Membership
from reagent_lite.distributed.signs import VARIABLE as SIGN_VARIABLE
from reagent_lite.distributed.signs import Sign, read_sign
from reagent_lite.errors import PeerError, Preempted, Problem, ReagentLiteError
from reagent_lite.memory import oom_kills

_FAILURE_VARIABLE = "REAGENT_LITE_FAILURE_FILE"
_LAUNCHER_VARIABLE = "REAGENT_LITE_LAUNCHER_PID"
_STANDS = "model_stands"
_CONSEQUENCE_SECONDS = 1.0
_END_SECONDS = 15.0
_OF_A_PEER = re.compile(r"gloo|nccl|connection (closed|reset|refused)|broken pipe|socket|store", re.IGNORECASE)
_STOPPED = "Tt"  # states of /proc/<pid>/stat


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a worker ended before its work was done.

    Attributes:
        message: with rank and reason.
        exit_code: that goes with it.
        restart: whether beginning again can help; a wrong config stays wrong.
        first_hand: false where it may only follow from a peer's end, such as a closed connection.
    """

    message: str
    exit_code: int
    restart: bool
    first_hand: bool = True


class Workers:
    """Running workers of this machine.

    Args:
        command: of every worker.
        count: how many.
        membership: says their ranks and where they meet.
        folder: where they leave their reasons; the caller's to remove.
        lost_after: seconds after which a stopped worker counts as lost.
    """

    def __init__(
        self, command: list[str], count: int, membership: Membership, folder: Path, *, lost_after: float
    ) -> None:
        self._first, self._world = membership.first_rank, membership.world_size
        self._membership, self._folder, self._lost_after = membership, folder, lost_after
        self._stopped: dict[int, float] = {}
        self._oom_kills = oom_kills()
        variables = _shared_variables(membership, count)
        self._running: list[subprocess.Popen[bytes]] = []
        try:
            for local in range(count):
                self._running.append(self._start(command, variables, local))
        except OSError:
            self.end()
            raise

    def failure(self) -> Failure | None:
        """Returns the first cause once a worker has failed; being preempted is no failure."""
        codes = [worker.poll() for worker in self._running]
        reported = any(self._folder.glob("*.json"))  # its process may hang on its way out, in a library of the GPU's
        if reported or any(code not in (None, 0, Preempted.exit_code) for code in codes):
            if Preempted.exit_code in codes:  # its peers lost their connection to it
                return Failure("a process was told to end", Preempted.exit_code, restart=False)
            return self._cause()
        return self._halted()

    @property
    def signs(self) -> list[Sign | None]:
        """Latest signs in the order of ranks."""
        return [read_sign(self._folder / f"{local}.sign") for local in range(len(self._running))]

    @property
    def done(self) -> bool:
        """Whether all have ended."""
        return all(worker.poll() is not None for worker in self._running)

    @property
    def preempted(self) -> bool:
        """Whether a worker ended because it was told to, after saving."""
        return any(worker.poll() == Preempted.exit_code for worker in self._running)

    @property
    def model_stands(self) -> bool:
        """Whether rank 0 is among them and has saved what the run leads to."""
        return (self._folder / _STANDS).exists()

    def tell(self, number: int) -> None:
        """Sends a signal to all that run."""
        for worker in self._running:
            if worker.poll() is None:
                worker.send_signal(number)

    def end(self) -> None:
        """Ends all at once; what is worth keeping is on disk."""
        for worker in self._running:
            if worker.poll() is None:
                worker.kill()
        for worker in self._running:
            with suppress(subprocess.TimeoutExpired):  # held by a disk or driver that does not answer
                worker.wait(_END_SECONDS)

    def _start(self, command: list[str], variables: dict[str, str], local: int) -> "subprocess.Popen[bytes]":
        rank = self._first + local
        environment = {
            **os.environ,
            **variables,
            "RANK": str(rank),
            "LOCAL_RANK": str(local),
            _FAILURE_VARIABLE: str(self._folder / f"{local}.json"),
            SIGN_VARIABLE: str(self._folder / f"{local}.sign"),
            _LAUNCHER_VARIABLE: str(os.getpid()),
        }
        # only rank 0 keeps standard output
        return subprocess.Popen(command, env=environment, stdout=None if rank == 0 else sys.stderr.fileno())

    def _name(self, local: int) -> str:
        return self._membership.name_of(self._first + local)

    def _cause(self) -> Failure:
        """Returns the earliest reason: a worker that left none was killed, and its peers failed after it."""
        deadline = time.monotonic() + _CONSEQUENCE_SECONDS  # peers notice by themselves and leave their reasons
        while time.monotonic() < deadline and not self.done:
            if any(self._killed(local) for local in range(len(self._running))):
                break
            time.sleep(0.02)
        records = {}
        for local in range(len(self._running)):
            file = self._folder / f"{local}.json"
            if file.exists():
                records[local] = json.loads(file.read_text())
            elif self._killed(local):
                code = self._running[local].returncode
                how = f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"
                todo = ""
                if code == -signal.SIGKILL and oom_kills() > self._oom_kills:
                    how += " by the system, for the memory limit of its control group was reached"
                    todo = "Give the job more memory, or start fewer processes (num_processes_per_node)"
                problem = Problem(self._name(local), "a worker that trains to the end", f"ended by {how}", todo)
                return Failure(str(problem), PeerError.exit_code, restart=True)
        local, first = min(records.items(), key=lambda item: float(item[1]["at"]))
        code = int(first["exit_code"])
        return Failure(f"{self._name(local)}: {first['message']}", code, restart=code == PeerError.exit_code,
                       first_hand=not first["peer"])  # fmt: skip

    def _killed(self, local: int) -> bool:
        code = self._running[local].poll()
        return code not in (None, 0, Preempted.exit_code) and not (self._folder / f"{local}.json").exists()

    def _halted(self) -> Failure | None:
        """Looks for a worker that is stopped: its peers would wait for it until their timeout."""
        now = time.monotonic()
        for local, worker in enumerate(self._running):
            if worker.poll() is None and _state(worker.pid) in _STOPPED:
                since = self._stopped.setdefault(local, now)
                if now - since > self._lost_after:
                    got = f"stopped (SIGSTOP or a debugger) for {now - since:.0f} s"
                    problem = Problem(self._name(local), "a running worker", got)
                    return Failure(str(problem), PeerError.exit_code, restart=True)
            else:
                self._stopped.pop(local, None)
        return None


def is_worker() -> bool:
    """Whether our launcher started this process."""
    return _FAILURE_VARIABLE in os.environ


def end_with_parent() -> None:
    """Makes the kernel end this process when its launcher dies, so that none is left behind (Linux)."""
    if is_worker() and sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)
        if os.getppid() != int(os.environ[_LAUNCHER_VARIABLE]):  # it died while this process was still importing
            os.kill(os.getpid(), signal.SIGKILL)


def tell_model_stands() -> None:
    """Tells this worker's launcher that the model is saved: whatever fails from here on, nothing begins again."""
    if is_worker():
        (Path(os.environ[_FAILURE_VARIABLE]).parent / _STANDS).touch()


def report_failure(error: BaseException, message: str) -> None:
    """Leaves the reason of this worker's failure for the launcher, who prints it once; to be preempted is none."""
    if isinstance(error, Preempted):
        return
    code = error.exit_code if isinstance(error, ReagentLiteError) else PeerError.exit_code
    peer = isinstance(error, RuntimeError) and _OF_A_PEER.search(str(error)) is not None
    record = {"at": time.monotonic(), "exit_code": code, "message": message, "peer": peer}
    path = Path(os.environ[_FAILURE_VARIABLE])
    if path.exists():  # the first word counts
        return
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(record))
    temporary.replace(path)


def _shared_variables(membership: Membership, count: int) -> dict[str, str]:
    """Returns torchrun's variables that all workers of this machine share."""
    record = membership.record
    variables = {
        "WORLD_SIZE": str(membership.world_size),
        "LOCAL_WORLD_SIZE": str(count),
        "GROUP_RANK": str(membership.node),
        "GROUP_WORLD_SIZE": str(len(membership.declarations)),
        "MASTER_ADDR": record.address,
        "MASTER_PORT": str(record.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is node 0's launcher's: no worker opens one
        ATTEMPT_VARIABLE: str(record.attempt),
    }
    reach = worker_address(membership)
    if reach is not None and reach.interface:
        for name in (GLOO_VARIABLE, "NCCL_SOCKET_IFNAME"):
            variables[name] = os.environ.get(name, reach.interface)
    return variables


def _state(pid: int) -> str:
    """Returns the state letter of a process of this machine, or "" (Linux)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
