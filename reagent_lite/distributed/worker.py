"""Communication of a worker with its launcher: signals, and files with the worker's progress and failure.

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
_ERROR_VARIABLE = "REAGENT_LITE_ERROR_FILE"
_MODEL_SAVED = "model_saved"
_PROGRESS = struct.Struct("=qqdd")
_CAUSED_BY_A_PEER = re.compile(r"gloo|nccl|connection (closed|reset|refused)|broken pipe|socket|store", re.IGNORECASE)


def stop_signals() -> tuple[signal.Signals, ...]:
    """Returns STOP_SIGNALS, without SIGHUP if it is ignored: a run under nohup must outlive its terminal."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return tuple(number for number in STOP_SIGNALS if not (ignored and number == signal.SIGHUP))


class WorkerProgress(BaseModel):
    """A worker's progress.

    Attributes:
        collectives: number of collectives it has entered.
        step: number of optimizer steps it has done.
        silent: seconds since this report.
        limit: current timeout of collectives in seconds.
    """

    model_config = ConfigDict(frozen=True)

    collectives: int
    step: int
    silent: float
    limit: float


def awaited_ranks(ranks: Sequence[WorkerProgress | None]) -> list[tuple[int, WorkerProgress]]:
    """Returns the ranks that the others have waited for too long.

    Args:
        ranks: progress of each rank, in order; None if it has not reported yet.
    """
    reported = [(rank, progress) for rank, progress in enumerate(ranks) if progress is not None]
    entered = {progress.collectives for _, progress in reported}
    if len(entered) < 2:
        return []
    # a rank that was just killed is behind as well, but has not been silent for long
    return [
        (rank, progress)
        for rank, progress in reported
        if progress.collectives == min(entered) and progress.silent > progress.limit / 2
    ]


class ProgressReport:
    """Writes a worker's progress to a file for this package's launcher; does nothing under another launcher.

    Args:
        limit: see WorkerProgress.
    """

    def __init__(self, limit: float) -> None:
        self._collectives = 0
        self._step = 0
        self._limit = limit
        self._file: int | None = None
        if is_worker():
            self._file = os.open(_report_file("progress"), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def enter_collective(self, step: int | None = None) -> None:
        """Reports that this worker enters a collective after `step` optimizer steps; None keeps the last number."""
        self._collectives += 1
        self._step = self._step if step is None else step
        self._write()

    def set_limit(self, seconds: float) -> None:
        """Reports a new timeout of collectives."""
        self._limit = seconds
        self._write()

    def _write(self) -> None:
        if self._file is not None:
            os.pwrite(self._file, _PROGRESS.pack(self._collectives, self._step, time.monotonic(), self._limit), 0)


def is_worker() -> bool:
    """Whether this package's launcher started this process."""
    return _FOLDER_VARIABLE in os.environ


def ending_with_me() -> dict[str, str]:
    """Returns the variables of a process that ends with this one if it calls `end_with_parent`."""
    return {_LAUNCHER_VARIABLE: str(os.getpid())}


def end_with_parent() -> None:
    """Makes the kernel end this process when the process that started it with `ending_with_me` dies (Linux)."""
    if _LAUNCHER_VARIABLE in os.environ and sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)
        if os.getppid() != int(os.environ[_LAUNCHER_VARIABLE]):  # it died while this process was still importing
            os.kill(os.getpid(), signal.SIGKILL)


def writing_error_to(path: Path) -> dict[str, str]:
    """Returns the variable of a command that writes the error which ends it to a file as well."""
    return {_ERROR_VARIABLE: str(path)}


def write_error(message: str) -> None:
    """Writes the error that ends this command for the process that asked for it by `writing_error_to`."""
    if _ERROR_VARIABLE in os.environ:
        Path(os.environ[_ERROR_VARIABLE]).write_text(message)


def report_model_saved() -> None:
    """Reports that the model is saved, so that no later failure restarts the run."""
    if is_worker():
        (Path(os.environ[_FOLDER_VARIABLE]) / _MODEL_SAVED).touch()


def report_failure(error: BaseException, message: str) -> None:
    """Reports to the launcher why this worker fails; the launcher prints the earliest report.

    Preemption is not a failure.
    """
    path = _report_file("json")
    if isinstance(error, Preempted) or path.exists():
        return
    code = error.exit_code if isinstance(error, ReagentLiteError) else PeerError.exit_code
    peer = isinstance(error, RuntimeError) and _CAUSED_BY_A_PEER.search(str(error)) is not None
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps({"at": time.monotonic(), "exit_code": code, "message": message, "peer": peer}))
    temporary.replace(path)


def _report_file(suffix: str) -> Path:
    return Path(os.environ[_FOLDER_VARIABLE], f"{os.environ['LOCAL_RANK']}.{suffix}")


class Reports:
    """Reports of a machine's workers, read by their launcher.

    Args:
        folder: folder of the report files.
        count: number of workers.
    """

    def __init__(self, folder: Path, count: int) -> None:
        self._folder = folder
        self._count = count
        self.variables = {_FOLDER_VARIABLE: str(folder), **ending_with_me()}

    @property
    def model_saved(self) -> bool:
        """Whether rank 0 is one of these workers and has saved the model."""
        return (self._folder / _MODEL_SAVED).exists()

    @property
    def failures(self) -> dict[int, dict[str, Any]]:
        """Failures by local rank."""
        files = {local: self._folder / f"{local}.json" for local in range(self._count)}
        return {local: json.loads(file.read_text()) for local, file in files.items() if file.exists()}

    @property
    def progress(self) -> list[WorkerProgress | None]:
        """Each worker's progress, by this machine's clock; None before its first report."""
        return [self._progress(self._folder / f"{local}.progress") for local in range(self._count)]

    def _progress(self, file: Path) -> WorkerProgress | None:
        try:
            collectives, step, at, limit = _PROGRESS.unpack(file.read_bytes())
        except (OSError, struct.error):
            return None
        return WorkerProgress(collectives=collectives, step=step, silent=time.monotonic() - at, limit=limit)
