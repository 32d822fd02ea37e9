"""A worker process and its launcher: signals, and files in which the worker reports its progress and why it failed.

All ranks enter the same collectives in the same order, so the others wait for the rank that has entered the fewest.
"""

import ctypes
import json
import os
import re
import signal
import struct
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from reagent_lite.errors import PeerError, Preempted, ReagentLiteError

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2, signal.SIGHUP)
"""Sent by Kubernetes and most schedulers, by Ctrl-C, by Slurm as configured here, and by a lost terminal."""

_FOLDER_VARIABLE = "REAGENT_LITE_WORKER_FOLDER"
_LAUNCHER_VARIABLE = "REAGENT_LITE_LAUNCHER_PID"
_MODEL_SAVED = "model_saved"
_PROGRESS = struct.Struct("=qqdd")
_OF_A_PEER = re.compile(r"gloo|nccl|connection (closed|reset|refused)|broken pipe|socket|store", re.IGNORECASE)


def stop_signals() -> tuple[signal.Signals, ...]:
    """Returns STOP_SIGNALS, without SIGHUP where it is ignored: a run under nohup is to outlive its terminal."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return tuple(number for number in STOP_SIGNALS if not (ignored and number == signal.SIGHUP))


class Progress(BaseModel):
    """How far a worker is.

    Attributes:
        collectives: how many it has entered.
        step: optimizer steps it has done.
        silent: seconds since it reported this.
        limit: seconds for which ranks wait for each other now.
    """

    model_config = ConfigDict(frozen=True)

    collectives: int
    step: int
    silent: float
    limit: float


def awaited_ranks(ranks: Sequence[Progress | None]) -> list[tuple[int, Progress]]:
    """Returns the ranks that the others have waited for too long.

    Args:
        ranks: in order; None for one that has not reported yet.
    """
    known = [(rank, one) for rank, one in enumerate(ranks) if one is not None]
    entered = {one.collectives for _, one in known}
    if len(entered) < 2:
        return []
    # a rank that was just killed is behind as well, and not silent for long
    return [(rank, one) for rank, one in known if one.collectives == min(entered) and one.silent > one.limit / 2]


class ProgressReport:
    """Writes a worker's progress to a file for our launcher; does nothing under another launcher.

    Args:
        limit: as in Progress.
    """

    def __init__(self, limit: float) -> None:
        self._collectives = 0
        self._step = 0
        self._limit = limit
        self._file: int | None = None
        if is_worker():
            self._file = os.open(_own_file("progress"), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def enter_collective(self, step: int | None = None) -> None:
        """Reports that this worker enters a collective, after so many optimizer steps; None: as many as before."""
        self._collectives += 1
        self._step = self._step if step is None else step
        self._write()

    def set_limit(self, seconds: float) -> None:
        """Reports how long ranks wait for each other from here on."""
        self._limit = seconds
        self._write()

    def _write(self) -> None:
        if self._file is not None:
            os.pwrite(self._file, _PROGRESS.pack(self._collectives, self._step, time.monotonic(), self._limit), 0)


def is_worker() -> bool:
    """Whether our launcher started this process."""
    return _FOLDER_VARIABLE in os.environ


def end_with_parent() -> None:
    """Makes the kernel end this process when its launcher dies, so that none is left behind (Linux)."""
    if is_worker() and sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)
        if os.getppid() != int(os.environ[_LAUNCHER_VARIABLE]):  # it died while this process was still importing
            os.kill(os.getpid(), signal.SIGKILL)


def report_model_saved() -> None:
    """Reports that the model is saved: whatever fails from here on, nothing begins again."""
    if is_worker():
        (Path(os.environ[_FOLDER_VARIABLE]) / _MODEL_SAVED).touch()


def report_failure(error: BaseException, message: str) -> None:
    """Reports why this worker fails to its launcher, which prints it once; the first report counts.

    Being preempted is no failure.
    """
    path = _own_file("json")
    if isinstance(error, Preempted) or path.exists():
        return
    code = error.exit_code if isinstance(error, ReagentLiteError) else PeerError.exit_code
    peer = isinstance(error, RuntimeError) and _OF_A_PEER.search(str(error)) is not None
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps({"at": time.monotonic(), "exit_code": code, "message": message, "peer": peer}))
    temporary.replace(path)


def _own_file(kind: str) -> Path:
    return Path(os.environ[_FOLDER_VARIABLE], f"{os.environ['LOCAL_RANK']}.{kind}")


class Reports:
    """What the workers of a machine report, as their launcher reads it.

    Args:
        folder: for their files.
        count: workers.
    """

    def __init__(self, folder: Path, count: int) -> None:
        self._folder = folder
        self._count = count
        self.variables = {_FOLDER_VARIABLE: str(folder), _LAUNCHER_VARIABLE: str(os.getpid())}

    @property
    def model_saved(self) -> bool:
        """Whether rank 0 is among them and has saved what the run leads to."""
        return (self._folder / _MODEL_SAVED).exists()

    @property
    def failures(self) -> dict[int, dict[str, Any]]:
        """Returns the failures by local rank."""
        files = {local: self._folder / f"{local}.json" for local in range(self._count)}
        return {local: json.loads(file.read_text()) for local, file in files.items() if file.exists()}

    @property
    def progress(self) -> list[Progress | None]:
        """Returns each worker's progress by the clock of this machine; None before its first report."""
        return [self._progress(self._folder / f"{local}.progress") for local in range(self._count)]

    def _progress(self, file: Path) -> Progress | None:
        try:
            collectives, step, at, limit = _PROGRESS.unpack(file.read_bytes())
        except (OSError, struct.error):
            return None
        return Progress(collectives=collectives, step=step, silent=time.monotonic() - at, limit=limit)
