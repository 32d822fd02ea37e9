"""Figures of a run: summed on the device, reduced over ranks, written by rank 0 as JSON lines and for TensorBoard."""

import json
import math
import os
import socket
import time
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from reagent_lite.distributed.group import Group
from reagent_lite.files import write_whole


class Meter:
    """Sums metrics over steps without waiting for the device.

    Metrics are weighted sums whose weights sum to the world size over all ranks and minibatches of a step, so the mean
    of a step is the sum over ranks and minibatches divided by the world size.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._saved: dict[str, Tensor] = {}
        self._steps = 0

    def add(self, metrics: Mapping[str, Tensor]) -> None:
        """Adds the metrics of one minibatch."""
        if not self._sums:
            self._sums = {
                name: value + self._saved[name].to(value.device) if name in self._saved else value.clone()
                for name, value in metrics.items()
            }
        else:
            for name, value in metrics.items():
                self._sums[name] += value

    def step(self) -> None:
        """Counts an optimizer step."""
        self._steps += 1

    def means(self, group: Group) -> dict[str, float]:
        """Returns the mean over all steps and ranks since the last call and resets the sums; every rank calls it."""
        if not self._steps:
            return {}
        total = group.sum(torch.stack(list(self._sums.values())).double())
        means = (total / (group.world_size * self._steps)).tolist()
        for value in self._sums.values():
            value.zero_()  # in place: a captured update adds to these very tensors
        self._steps = 0
        return dict(zip(self._sums, means, strict=True))

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's sums since the last report and the number of their steps."""
        return {"steps": self._steps, "sums": dict(self._sums or self._saved)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores saved sums, to which the next metrics are added."""
        self._steps, self._sums, self._saved = int(state["steps"]), {}, dict(state.get("sums", {}))


class _PatientFile:
    """A file that grows. Bytes that a full disk refuses are kept and written before the next ones."""

    def __init__(self, file: Path) -> None:
        self._stream = file.open("ab", buffering=0)
        self._waiting = b""

    def write(self, data: bytes) -> None:
        """Appends bytes; a failure of the disk raises nothing."""
        self._waiting += data
        with suppress(OSError):
            self._write()

    def keep(self) -> None:
        """Writes and syncs all bytes, or raises OSError."""
        self._write()
        os.fsync(self._stream.fileno())

    def close(self) -> None:
        """Writes the bytes that are left, or raises OSError."""
        with self._stream:
            self._write()

    def _write(self) -> None:
        while self._waiting:
            self._waiting = self._waiting[self._stream.write(self._waiting) :]


class MetricsWriter:
    """Writes metrics.jsonl and TensorBoard events; on a rank other than 0 it writes nothing.

    Lines that the disk refuses are kept and written later, so that a disk that is full for a moment ends no run.

    Args:
        folder: where the files go.
        enabled: whether this rank writes.
        lines: number of lines of metrics.jsonl to keep; the rest is cut off.
        figures: see the attribute.

    Attributes:
        lines: number of lines of metrics.jsonl so far.
        figures: figures of the last epoch.

    Raises:
        OSError: the files cannot be opened; when the block ends: some lines could not be written.
    """

    def __init__(
        self, folder: Path, *, enabled: bool, lines: int = 0, figures: Mapping[str, float] | None = None
    ) -> None:
        self._files: tuple[_PatientFile, ...] = ()
        self.lines, self.figures = lines, dict(figures or {})
        if enabled:
            # imported here: TensorBoard takes longer to import than a small run takes to train
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.summary.writer.record_writer import RecordWriter

            (folder / "tensorboard").mkdir(parents=True, exist_ok=True)
            now, host = time.time(), socket.gethostname()
            name = f"events.out.tfevents.{int(now):010d}.{host}.{os.getpid()}.{time.monotonic_ns()}"
            _keep_first_lines(folder / "metrics.jsonl", lines)
            self._files = _PatientFile(folder / "metrics.jsonl"), _PatientFile(folder / "tensorboard" / name)
            self._records = RecordWriter(self._files[1])
            self._add(Event(wall_time=now, file_version="brain.Event:2"))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Writes the scalars of a step as one JSON line and one event; a value that is not finite becomes null."""
        self.lines += 1
        if not self._files:
            return
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        finite = {name: value if math.isfinite(value) else None for name, value in scalars.items()}
        self._files[0].write(json.dumps({"step": step, **finite}).encode() + b"\n")
        values = [Summary.Value(tag=name, simple_value=value) for name, value in finite.items() if value is not None]
        self._add(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def forget_after(self, step: int) -> None:
        """Makes TensorBoard drop events of later steps, which an earlier start of the run wrote."""
        if not self._files or step == 0:
            return
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        log = SessionLog(status=SessionLog.START)  # its readers drop what they have from the event's step on
        self._add(Event(wall_time=time.time(), step=step + 1, session_log=log))

    def _add(self, event: Any) -> None:
        self._records.write(event.SerializeToString())

    def reported(self) -> dict[str, Any]:
        """Syncs everything written so far and returns what a checkpoint keeps: lines and figures.

        Raises:
            OSError: the disk refused the bytes; they are kept.
        """
        for file in self._files:
            file.keep()
        return {"lines": self.lines, "figures": self.figures}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError) if error is not None else nullcontext(), ExitStack() as stack:  # the first error counts
            for file in self._files:
                stack.callback(file.close)


def _keep_first_lines(file: Path, count: int) -> None:
    """Cuts off what follows a file's first `count` lines."""
    kept = b""
    if count and file.is_file():
        kept = b"".join(file.read_bytes().splitlines(keepends=True)[:count])
    write_whole(file, kept)
