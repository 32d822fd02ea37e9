"""Figures of a run: summed on the device, reduced over ranks, written by rank 0 as JSON lines and for TensorBoard."""

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from reagent_lite.distributed.group import Group


class Meter:
    """Sums of a step's metrics without waiting for the device.

    Metrics are weighted sums whose weights sum to the world size over all ranks and minibatches of a step, so the mean
    of a step is the sum over ranks and minibatches divided by the world size.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._steps = 0

    def add(self, metrics: Mapping[str, Tensor]) -> None:
        """Adds the metrics of one minibatch."""
        if not self._sums:
            self._sums = {name: value.clone() for name, value in metrics.items()}
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


class MetricsWriter:
    """metrics.jsonl and TensorBoard events in a folder; an object of another rank than 0 writes nothing.

    Args:
        folder: where the files go.
        enabled: whether this rank writes.
    """

    def __init__(self, folder: Path, *, enabled: bool) -> None:
        self._writer = None
        if enabled:
            # imported here: TensorBoard takes longer to import than a small run takes to train
            from tensorboard.summary.writer.event_file_writer import EventFileWriter

            (folder / "tensorboard").mkdir(parents=True, exist_ok=True)
            self._writer = EventFileWriter(str(folder / "tensorboard"))
            self._lines = (folder / "metrics.jsonl").open("w", encoding="utf-8")

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Writes scalars of a step: one JSON line, one event each tag; a value that is not finite becomes null."""
        if self._writer is None:
            return
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        finite = {name: value if math.isfinite(value) else None for name, value in scalars.items()}
        self._lines.write(json.dumps({"step": step, **finite}) + "\n")
        self._lines.flush()
        values = [Summary.Value(tag=name, simple_value=value) for name, value in finite.items() if value is not None]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer is not None:
            self._writer.close()
            self._lines.close()
