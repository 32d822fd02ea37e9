"""Workers of one machine: start them, watch them, end all with the first one's reason.

The launcher owns the store the workers meet at (127.0.0.1 only) and gives them torchrun's variables, so that a worker
cannot tell this launcher from torchrun.
"""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from reagent_lite.errors import ConfigError, PeerError, Problem, ReagentLiteError

_FAILURE_VARIABLE = "REAGENT_LITE_FAILURE_FILE"
_GRACE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Processes:
    """How many processes this machine runs, and on what.

    Attributes:
        count: one per GPU, or as many CPU processes as asked for.
        device_type: "cuda" or "cpu".
        note: what the user should know about the choice, or "".
    """

    count: int
    device_type: str
    note: str = ""

    def device(self, local_rank: int) -> torch.device:
        """Returns the device of one local rank."""
        return torch.device("cuda", local_rank) if self.device_type == "cuda" else torch.device("cpu")


def choose_processes(*, use_gpu: bool, use_all: bool, explicit: int | None, gpus: int) -> Processes:
    """Returns the processes of this machine.

    Args:
        use_gpu: the config's use_gpu.
        use_all: the config's use_all_avail_gpus.
        explicit: num_processes_per_node, or None.
        gpus: GPUs found.

    Raises:
        ConfigError: where more GPU processes are asked for than there are GPUs.
    """
    if not use_gpu or not gpus:
        note = "use_gpu is true, but no GPU was found: training on the CPU" if use_gpu else ""
        return Processes(explicit or 1, "cpu", note)
    count = explicit or (gpus if use_all else 1)
    if count > gpus:
        raise ConfigError(
            Problem("num_processes_per_node", f"at most the {gpus} GPUs of this machine", str(count),
                    "Lower it, or set use_gpu to false for CPU processes")
        )  # fmt: skip
    return Processes(count, "cuda")


def launch(command: list[str], count: int) -> None:
    """Runs `count` workers of a command and waits for all of them.

    Only rank 0 keeps standard output; the others' goes to standard error.

    Raises:
        PeerError: a worker died or failed; the others have been ended and the reason is in the message.
    """
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    port = listener.getsockname()[1]
    _store = dist.TCPStore(  # type: ignore[attr-defined] # lives as long as this call: the workers are its clients
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    with tempfile.TemporaryDirectory(prefix="reagent_lite_") as folder:
        workers = [_start(command, rank, count, port, Path(folder)) for rank in range(count)]
        try:
            failed = _first_failure(workers)
        except BaseException:
            _end(workers)
            raise
        if failed is None:
            return
        _end(workers)
        raise _reason(workers, Path(folder))


class WorkerError(PeerError):
    """A worker failed for a reason of its own; carries the exit code of that reason."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(())
        self.args = (message,)
        self.exit_code = exit_code


def is_worker() -> bool:
    """Whether our launcher started this process."""
    return _FAILURE_VARIABLE in os.environ


def end_with_parent() -> None:
    """Makes the kernel end this process when its launcher dies, so that none is left behind (Linux)."""
    if is_worker() and sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)


def report_failure(error: BaseException, message: str) -> None:
    """Leaves the reason of this worker's failure for the launcher, who prints it once."""
    code = error.exit_code if isinstance(error, ReagentLiteError) else PeerError.exit_code
    record = {"at": time.monotonic(), "exit_code": code, "message": message}
    path = Path(os.environ[_FAILURE_VARIABLE])
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(record))
    temporary.replace(path)


def _start(command: list[str], rank: int, count: int, port: int, folder: Path) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is ours: no worker opens one
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        _FAILURE_VARIABLE: str(folder / f"{rank}.json"),
    }
    return subprocess.Popen(command, env=environment, stdout=None if rank == 0 else sys.stderr.fileno())


def _first_failure(workers: list[subprocess.Popen[bytes]]) -> int | None:
    while True:
        codes = [worker.poll() for worker in workers]
        for rank, code in enumerate(codes):
            if code:
                return rank
        if all(code == 0 for code in codes):
            return None
        time.sleep(0.02)


def _end(workers: list[subprocess.Popen[bytes]]) -> None:
    """Lets peers notice by themselves for a moment, then asks, then insists."""
    deadline = time.monotonic() + _GRACE_SECONDS
    for ask in (None, subprocess.Popen.terminate, subprocess.Popen.kill):
        for worker in workers:
            if ask is not None and worker.poll() is None:
                ask(worker)
        limit = min(deadline, time.monotonic() + 1.0) if ask is None else time.monotonic() + _GRACE_SECONDS
        while time.monotonic() < limit and any(worker.poll() is None for worker in workers):
            time.sleep(0.02)


def _reason(workers: list[subprocess.Popen[bytes]], folder: Path) -> ReagentLiteError:
    """Returns the earliest failure: a worker that left no record was killed, and its peers failed after it."""
    records = {}
    for rank, worker in enumerate(workers):
        file = folder / f"{rank}.json"
        if file.exists():
            records[rank] = json.loads(file.read_text())
        elif worker.returncode not in (0, -signal.SIGTERM):
            how = f"signal {-worker.returncode}" if worker.returncode < 0 else f"exit code {worker.returncode}"
            return PeerError(
                Problem(f"rank {rank} of {len(workers)}", "a worker that trains to the end", f"ended by {how}",
                        "All other ranks were ended")
            )  # fmt: skip
    rank, first = min(records.items(), key=lambda item: float(item[1]["at"]))
    return WorkerError(f"rank {rank} of {len(workers)}: {first['message']}", int(first["exit_code"]))
