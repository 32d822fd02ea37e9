"""Figures of a run: summed on the device, reduced over ranks, written by rank 0 as JSON lines and for TensorBoard."""

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

import torch
from torch import Tensor

from reagent_lite.distributed.group import Group
from reagent_lite.files import write_whole


class Meter:
    """Sums of a step's metrics without waiting for the device.

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
        """Returns the mean over all steps and ranks since the last call, and starts anew. Every rank calls it."""
        if not self._steps:
            return {}
        total = group.sum(torch.stack(list(self._sums.values())).double())
        means = (total / (group.world_size * self._steps)).tolist()
        for value in self._sums.values():
            value.zero_()  # in place: a captured update adds to these very tensors
        self._steps = 0
        return dict(zip(self._sums, means, strict=True))

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's sums since the last report, and the steps they are of."""
        return {"steps": self._steps, "sums": dict(self._sums or self._saved)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from saved sums; the next metrics are added to them."""
        self._steps, self._sums, self._saved = int(state["steps"]), {}, dict(state.get("sums", {}))


class MetricsWriter:
    """metrics.jsonl and TensorBoard events in a folder; an object of another rank than 0 writes nothing.

    Args:
        folder: where the files go.
        enabled: whether this rank writes.
        lines: of metrics.jsonl that stay; what follows them is cut off.

    Attributes:
        lines: of metrics.jsonl so far.
    """

    def __init__(self, folder: Path, *, enabled: bool, lines: int = 0) -> None:
        self._writer = None
        self.lines = lines
        if enabled:
            # imported here: TensorBoard takes longer to import than a small run takes to train
            from tensorboard.summary.writer.event_file_writer import EventFileWriter

            (folder / "tensorboard").mkdir(parents=True, exist_ok=True)
            self._writer = EventFileWriter(str(folder / "tensorboard"))
            self._lines = _first_lines(folder / "metrics.jsonl", lines)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Writes scalars of a step: one JSON line, one event each tag; a value that is not finite becomes null."""
        self.lines += 1
        if self._writer is None:
            return
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        finite = {name: value if math.isfinite(value) else None for name, value in scalars.items()}
        self._lines.write(json.dumps({"step": step, **finite}) + "\n")
        self._lines.flush()
        values = [Summary.Value(tag=name, simple_value=value) for name, value in finite.items() if value is not None]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def forget_after(self, step: int) -> None:
        """Makes TensorBoard drop what an earlier start of the run wrote of later steps than this one."""
        if self._writer is None or step == 0:
            return
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        log = SessionLog(status=SessionLog.START)  # its readers drop what they have from the event's step on
        self._writer.add_event(Event(wall_time=time.time(), step=step + 1, session_log=log))

    def kept(self) -> int:
        """Puts everything written so far onto the disk and returns the lines, which a checkpoint then counts on."""
        if self._writer is not None:
            self._writer.flush()
            os.fsync(self._lines.fileno())
        return self.lines

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer is not None:
            self._writer.close()
            self._lines.close()


def _first_lines(file: Path, count: int) -> TextIO:
    """Opens a file for writing after its first `count` lines; what follows them is cut off."""
    kept = b""
    if count and file.is_file():
        kept = b"".join(file.read_bytes().splitlines(keepends=True)[:count])
    write_whole(file, kept)
    return file.open("a", encoding="utf-8")
