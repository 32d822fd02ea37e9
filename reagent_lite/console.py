"""Output of a command on standard error: log with ranks, progress, and streams that outlive their terminal."""

import errno
import io
import json
import logging
import os
import stat
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Protocol, TextIO

from reagent_lite.errors import Problem, UnavailableError, printable
from reagent_lite.types import TransitionBatch

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_LINE_SECONDS = 10.0
_BRIEF_SECONDS = 2.0

logger = logging.getLogger("reagent_lite")
"""The log of a command: `info` is shown by rank 0 only, a `warning` by every rank."""
machine_logger = logger.getChild("machine")
"""The log of work for the whole machine: `info` is shown by every rank."""


class _StandardError(logging.Handler):
    """Writes to the current `sys.stderr`, which a progress bar may have replaced; names ranks other than 0.

    Attributes:
        rank: this process's rank; 0 in a single process and in the launcher.
        as_json: whether each message is a JSON object.
    """

    rank = 0
    as_json = False

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a message; unlike logging's own handlers it raises errors of writing."""
        if self.rank and record.levelno < logging.WARNING and record.name == logger.name:
            return
        if self.as_json:
            print(_json_of(record, self.rank), file=sys.stderr, flush=True)
            return
        rank = f"rank {self.rank}: " if self.rank else ""
        level = "warning: " if record.levelno == logging.WARNING else ""
        print(f"{rank}{level}{printable(record.getMessage())}", file=sys.stderr, flush=True)


def _json_of(record: logging.LogRecord, rank: int) -> str:
    """Returns a message as a JSON object in one line."""
    entry = {
        "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
        "level": record.levelname.lower(),
        "message": record.getMessage(),
        "process": record.process,
    }
    if rank:
        entry["rank"] = rank
    if record.exc_info:
        entry["traceback"] = logging.Formatter().formatException(record.exc_info)
    return json.dumps(entry)


_SHORTEST_SLEEP = 0.05
_LONGEST_SLEEP = 2.0
_FIRST_LOG_SECONDS = 10.0
_MOST_LOG_SECONDS = 3600.0
_MOST_FOLDER_SECONDS = 600.0
_HANDLER = _StandardError()


@contextmanager
def logging_to_stderr() -> Iterator[None]:
    """Shows the log of the package on standard error during the block; for commands."""
    logger.addHandler(_HANDLER)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(_HANDLER)
        logger.setLevel(logging.NOTSET)
        logger.propagate = True


def log_as(rank: int) -> None:
    """Sets the rank of this process in the log."""
    _HANDLER.rank = rank


def log_json() -> None:
    """Writes each message of this process as a JSON object in a line, also those of other libraries."""
    _HANDLER.as_json = True
    logging.getLogger().addHandler(_HANDLER)


class ShowProgress(Protocol):
    """Shows the progress of work."""

    def __call__(self, done: int, total: int, note: str = "") -> None:
        """Shows `done` of `total` units, and a note such as the current loss."""
        ...


@contextmanager
def progress(
    title: str, unit: str, *, enabled: bool = True, begin: int = 0, brief: bool = False
) -> Iterator[ShowProgress]:
    """Shows the progress of the block's work with units per second and remaining time.

    Args:
        title: name of the work.
        unit: plural of the counted unit, such as "rows".
        enabled: false on ranks that show nothing.
        begin: units done earlier, which do not count towards the speed.
        brief: whether nothing is shown for work that takes less than two seconds.
    """
    if not enabled:
        yield lambda done, total, note="": None
    elif sys.stderr.isatty() and not _under_a_bar():
        yield from _bar(title, unit, begin, brief)
    else:
        yield _lines(title, unit, begin, brief)


def with_progress(
    title: str, batches: Iterable[TransitionBatch], rows: int, *, enabled: bool = True
) -> Iterator[TransitionBatch]:
    """Yields the batches, which have `rows` rows in total, and shows the progress of the work with them."""
    with progress(title, "rows", enabled=enabled, brief=True) as show:
        done = 0
        for batch in batches:
            yield batch
            done += len(batch.reward)
            show(min(done, rows), rows)


def _under_a_bar() -> bool:
    """Whether the terminal has a progress bar, which prints the output to standard error above itself."""
    from rich.file_proxy import FileProxy

    return isinstance(sys.stderr, FileProxy)


def _lines(title: str, unit: str, begin: int, brief: bool) -> ShowProgress:
    start = last = time.monotonic()
    if brief:
        last -= _LINE_SECONDS - _BRIEF_SECONDS
    shown = -1

    def show(done: int, total: int, note: str = "") -> None:
        nonlocal last, shown
        now = time.monotonic()
        if done == shown or (now - last < _LINE_SECONDS and (done < total or (brief and shown < 0))):
            return
        last = now
        shown = done
        rate = (done - begin) / max(now - start, 1e-9)
        left = (total - done) / rate if rate else 0.0
        speed = f"{rate:,.0f} {unit}/s, {left:.0f} s left"
        machine_logger.info(f"{title}: {done:,} of {total:,} {unit}, {speed}  {note}".rstrip())

    return show


def _bar(title: str, unit: str, begin: int, brief: bool) -> Iterator[ShowProgress]:
    # imported here: only needed with a terminal
    from rich.console import Console
    from rich.progress import BarColumn, ProgressColumn, Task, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task: Task) -> Text:
            seconds = task.finished_time or task.elapsed or 0.0
            average = (task.completed - begin) / max(seconds, 1e-9)  # rich's own speed needs two updates
            return Text(f"{task.finished_speed or task.speed or average:,.0f} {unit}/s")

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        Rate(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Bar(*columns, console=Console(stderr=True), refresh_per_second=4, transient=brief) as bar:
        task = bar.add_task(title, total=None, completed=begin, note="", visible=False)  # until the first update
        yield lambda done, total, note="": bar.update(task, completed=done, total=total, note=note, visible=True)


@contextmanager
def outliving_terminal() -> Iterator[None]:
    """Discards standard output and standard error if there is no reader, as with a closed terminal or pipe."""
    before = sys.stdout, sys.stderr
    for number, stream in enumerate(before, start=1):
        if stream is None:  # closed by the caller, as by `2>&-`: the next open file would get its number
            _occupy(number)
    sys.stdout, sys.stderr = (_outliving(stream, number) for number, stream in enumerate(before, start=1))
    try:
        yield
    finally:
        for old, stream in zip(before, (sys.stdout, sys.stderr), strict=True):
            if old is None:
                stream.close()
            else:
                stream.flush()
        sys.stdout, sys.stderr = before


def _outliving(stream: TextIO | None, number: int) -> TextIO:
    if stream is None:
        return open(os.devnull, "w")
    try:
        if stream.fileno() != number or stat.S_ISREG(os.fstat(number).st_mode):  # a failing disk must raise its error
            return stream
    except OSError:  # not a file
        return stream
    stream.flush()
    file = io.BufferedWriter(_Outliving(number, "wb", closefd=False))
    return io.TextIOWrapper(file, encoding=stream.encoding, errors=stream.errors, line_buffering=True)


def _occupy(number: int) -> None:
    """Opens os.devnull with a descriptor's number, for this process and its children, unless it is in use."""
    with suppress(OSError):
        os.fstat(number)
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    if nowhere != number:
        os.dup2(nowhere, number)
        os.close(nowhere)
    os.set_inheritable(number, True)


class _Outliving(io.FileIO):
    """A file whose descriptor becomes os.devnull once its reader is gone."""

    def write(self, data: "ReadableBuffer", /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            # EBADF: a library has the descriptor, open for reading
            if error.errno not in (errno.EIO, errno.EPIPE, errno.EBADF):
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return super().write(data)


class Waiting:
    """Sleeps between two checks of a condition, and logs the reason at intervals that grow to an hour.

    Args:
        quiet_seconds: seconds before the first message.
    """

    def __init__(self, quiet_seconds: float = _FIRST_LOG_SECONDS) -> None:
        self._quiet_seconds = quiet_seconds
        self._begin("")

    def _begin(self, key: str) -> None:
        self._key = key
        self._pause = _SHORTEST_SLEEP
        self._since = time.monotonic()
        self._logs_after = self._quiet_seconds

    @property
    def seconds(self) -> float:
        """Seconds since the first check."""
        return time.monotonic() - self._since

    def sleep(self, reason: str, key: str = "") -> None:
        """Sleeps a little longer than the last time, at most two seconds; another key restarts the wait.

        Args:
            reason: why the caller waits, as a sentence without its full stop.
            key: config key of a folder that can no longer be used, which is waited for at most ten minutes; "" for any
                other reason, which has no limit.

        Raises:
            UnavailableError: the folder could not be used for ten minutes.
        """
        if key != self._key:
            self._begin(key)
        waited = self.seconds
        if key and waited >= _MOST_FOLDER_SECONDS:
            expected = f"a folder that can be read and written within {_MOST_FOLDER_SECONDS:g} s"
            todo = "Mount its share, or make room on it, and run the same command again"
            raise UnavailableError(Problem(key, expected, reason, todo))
        if waited >= self._logs_after:
            logger.info(f"{reason}; waited {waited:,.0f} s so far")
            self._logs_after = waited + min(max(self._logs_after, _FIRST_LOG_SECONDS), _MOST_LOG_SECONDS)
        time.sleep(self._pause)
        self._pause = min(1.5 * self._pause, _LONGEST_SLEEP)
