"""Figures of a run: summed on the device, reduced over ranks, written by rank 0.

Meter ─► means ─► MetricsWriter ─► sinks: metrics.jsonl, TensorBoard, the trackers of tracking.py
"""

import json
import math
import os
import socket
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from reagent_lite.config.loader import Scalar
from reagent_lite.console import logger
from reagent_lite.distributed.group import Group
from reagent_lite.errors import install, lacking
from reagent_lite.whole_files import write_whole


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
        total = group.all_reduce(torch.stack(list(self._sums.values())).double())
        means = (total / (group.world_size * self._steps)).tolist()
        for value in self._sums.values():
            value.zero_()  # in place: a captured update adds to these tensors
        self._steps = 0
        return dict(zip(self._sums, means, strict=True))

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's sums since the last report and the number of their steps."""
        return {"steps": self._steps, "sums": dict(self._sums or self._saved)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores saved sums, to which the next metrics are added."""
        self._steps = int(state["steps"])
        self._sums = {}
        self._saved = dict(state.get("sums", {}))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """Outcome of a finished run.

    Attributes:
        step: number of its optimizer steps.
        decision: "ship", "do not ship" or "not enough to say".
        text: the decision with its reason and the next step.
        files: files and folders worth keeping, among them the exported model if there is one.
    """

    step: int
    decision: str
    text: str
    files: tuple[Path, ...]


class Sink:
    """Receives the figures of a run inside a `with` block; subclasses override the methods they need."""

    def write(self, step: int, scalars: Mapping[str, float | None]) -> None:
        """Receives the scalars of a step; a value that is not finite is None."""

    def conclude(self, conclusion: RunSummary) -> None:
        """Receives the outcome of the run, after its last scalars."""

    def keep(self) -> None:
        """Forces everything written so far to the disk.

        Raises:
            OSError: the disk refused the bytes; they stay in memory and are written later.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes the sink; after an error the run is not marked as finished."""


class _FileSink(Sink):
    """A file to which whole records are appended. Records that the disk refuses are kept and written before the next.

    After an error the file is opened again by name, as a file that was open when a share was unmounted stays unusable.
    """

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._file = file
        self._stream = file.open("ab", buffering=0)
        self._size = self._stream.tell()
        self._failed = False
        self._waiting = deque[bytes]()

    def keep(self) -> None:
        with self._note_errors():
            self._flush()
            os.fsync(self._stream.fileno())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):  # a finished run has already called `keep`
            self._flush()
        with suppress(OSError):
            self._stream.close()

    def _append(self, record: bytes) -> None:
        self._waiting.append(record)
        with suppress(OSError), self._note_errors():
            self._flush()

    def _flush(self) -> None:
        if self._failed:
            self._open_again()
        while self._waiting:
            record = self._waiting[0]
            written = 0
            while written < len(record):
                written += self._stream.write(record[written:])
            self._size += written
            self._waiting.popleft()

    def _open_again(self) -> None:
        stream = self._file.open("r+b", buffering=0)  # creates no file below the mount point of an unmounted share
        with suppress(OSError):
            self._stream.close()
        self._stream = stream
        self._size = min(self._size, stream.seek(0, os.SEEK_END))
        stream.truncate(self._size)
        stream.seek(self._size)
        self._failed = False

    @contextmanager
    def _note_errors(self) -> Iterator[None]:
        """Records an error of the block, and truncates a record that was only partly written."""
        try:
            yield
        except OSError:
            self._failed = True
            with suppress(OSError):
                os.ftruncate(self._stream.fileno(), self._size)
            raise


class JsonLines(_FileSink):
    """metrics.jsonl, with a line per step.

    Args:
        folder: the run's folder.
        lines: number of lines to keep; the rest of an existing file is cut off.
    """

    def __init__(self, folder: Path, *, lines: int = 0) -> None:
        file = folder / "metrics.jsonl"
        kept = file.read_bytes().splitlines(keepends=True)[:lines] if lines and file.is_file() else []
        write_whole(file, b"".join(kept))
        super().__init__(file)

    def write(self, step: int, scalars: Mapping[str, float | None]) -> None:
        """Appends a line."""
        self._append(json.dumps({"step": step, **scalars}).encode() + b"\n")


class TensorBoard(_FileSink):
    """A TensorBoard event file with scalars, hyperparameters, and the decision as text; needs the extra `report`.

    Args:
        folder: the run's folder.
        run: id of the run, the same in all its starts.
        parameters: hyperparameters by name.
        step: step at which the run continues; readers drop events of later steps, which an earlier start wrote.
    """

    def __init__(self, folder: Path, run: str, parameters: Mapping[str, Scalar], *, step: int = 0) -> None:
        # imported here: TensorBoard takes longer to import than a small run takes to train
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb

        now = time.time()
        host = socket.gethostname()
        name = f"events.out.tfevents.{int(now):010d}.{host}.{os.getpid()}.{time.monotonic_ns()}"
        super().__init__(folder / "tensorboard" / name)
        self._add(file_version="brain.Event:2")
        if step:  # readers drop events from this event's step on
            self._add(step=step + 1, session_log=SessionLog(status=SessionLog.START))
        self._add(summary=hparams_pb(parameters, trial_id=run))

    def write(self, step: int, scalars: Mapping[str, float | None]) -> None:
        """Adds an event; scalars that are not finite are left out."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items() if value is not None]
        self._add(step=step, summary=Summary(value=values))

    def conclude(self, conclusion: RunSummary) -> None:
        """Adds the decision as text."""
        from tensorboard.plugins.text.summary_v2 import text_pb

        self._add(step=conclusion.step, summary=text_pb("decision", conclusion.text))

    def _add(self, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        record = BytesIO()
        RecordWriter(record).write(Event(wall_time=time.time(), **content).SerializeToString())
        self._append(record.getvalue())


def file_sinks(
    folder: Path, run: str, parameters: Mapping[str, Scalar], *, lines: int = 0, step: int = 0
) -> Iterator[Sink]:
    """Yields the files of figures in a run's folder; without the extra `report`, logs that TensorBoard has none."""
    yield JsonLines(folder, lines=lines)
    if missing := lacking("report"):
        logger.info(f"tensorboard/ is not written: no {missing}. To have it, run: {install('report')}")
    else:
        yield TensorBoard(folder, run, parameters, step=step)


class MetricsWriter(ExitStack):
    """Writes the figures of a run to all its sinks, which its `with` block closes; ranks other than 0 have none.

    Lines that a disk refuses are kept and written later, so that a disk that is briefly full does not end the run.

    Args:
        lines: number of lines that earlier starts of the run wrote.
        figures: figures of the last epoch of these starts.

    Attributes:
        lines: number of lines of metrics.jsonl so far.
        figures: figures of the last epoch.
    """

    def __init__(self, *, lines: int = 0, figures: Mapping[str, float] | None = None) -> None:
        super().__init__()
        self.lines = lines
        self.figures = dict(figures or {})
        self._sinks: list[Sink] = []

    def add(self, sinks: Iterable[Sink]) -> None:
        """Opens sinks one after the other."""
        for sink in sinks:
            self._sinks.append(self.enter_context(sink))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Writes the scalars of a step; a value that is not finite becomes null."""
        self.lines += 1
        finite = {name: value if math.isfinite(value) else None for name, value in scalars.items()}
        for sink in self._sinks:
            sink.write(step, finite)

    def conclude(self, conclusion: RunSummary) -> None:
        """Writes the outcome of the run."""
        for sink in self._sinks:
            sink.conclude(conclusion)

    def keep(self) -> None:
        """Forces everything written so far to the disk.

        Raises:
            OSError: the disk refused the bytes; they stay in memory and are written later.
        """
        for sink in self._sinks:
            sink.keep()

    def keep_and_report(self) -> dict[str, Any]:
        """Calls `keep` and returns lines and figures for a checkpoint."""
        self.keep()
        return {"lines": self.lines, "figures": self.figures}
