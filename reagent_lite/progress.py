"""What long work says on standard error: lines, and its progress as a bar where the terminal shows one."""

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

from reagent_lite.types import TransitionBatch

_LINE_SECONDS = 10.0
_BRIEF_SECONDS = 2.0


class Progress(Protocol):
    """Takes note of how far the work has come."""

    def __call__(self, done: int, total: int, note: str = "") -> None:
        """Shows `done` of `total` units, and a note such as the current loss."""
        ...


def log(text: str) -> None:
    """Prints a line at once."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def progress(title: str, unit: str, *, enabled: bool, begin: int = 0, brief: bool = False) -> Iterator[Progress]:
    """Shows the progress of the block's work with units per second and time left.

    Args:
        title: what is going on.
        unit: plural of what is counted, such as "rows"; "percent" has no speed.
        enabled: false on ranks that stay silent.
        begin: units done before; they say nothing about the speed.
        brief: for work that is often over at once: nothing is left of it if it takes less than two seconds.
    """
    if not enabled:
        yield lambda done, total, note="": None
    elif sys.stderr.isatty() and not _under_a_bar():
        yield from _bar(title, unit, begin, brief)
    else:
        yield _lines(title, unit, begin, brief)


def with_progress(
    title: str, batches: Iterable[TransitionBatch], rows: int, *, enabled: bool
) -> Iterator[TransitionBatch]:
    """Yields the batches, of so many rows in all, and shows how far the work with them has come."""
    with progress(title, "rows", enabled=enabled, brief=True) as show:
        done = 0
        for batch in batches:
            yield batch
            done += len(batch.reward)
            show(min(done, rows), rows)


def _under_a_bar() -> bool:
    """Whether a bar is on the terminal already: it takes what is written to standard error and prints it above."""
    from rich.file_proxy import FileProxy

    return isinstance(sys.stderr, FileProxy)


def _lines(title: str, unit: str, begin: int, brief: bool) -> Progress:
    start = last = time.monotonic()
    if brief:
        last -= _LINE_SECONDS - _BRIEF_SECONDS
    shown = -1

    def show(done: int, total: int, note: str = "") -> None:
        nonlocal last, shown
        now = time.monotonic()
        if done == shown or (now - last < _LINE_SECONDS and (done < total or (brief and shown < 0))):
            return
        last, shown = now, done
        rate = (done - begin) / max(now - start, 1e-9)
        left = (total - done) / rate if rate else 0.0
        parts = (f"{title}: {done:,} of {total:,} {unit}", _speed(rate, unit), f"{left:.0f} s left  {note}")
        log(", ".join(filter(None, parts)).rstrip())

    return show


def _speed(rate: float, unit: str) -> str:
    return "" if unit == "percent" else f"{rate:,.0f} {unit}/s"


def _bar(title: str, unit: str, begin: int, brief: bool) -> Iterator[Progress]:
    # imported here: a run without a terminal does not pay for it
    from rich.console import Console
    from rich.progress import BarColumn, ProgressColumn, Task, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task: Task) -> Text:
            seconds = task.finished_time or task.elapsed or 0.0
            average = (task.completed - begin) / max(seconds, 1e-9)  # rich's own speed needs two updates
            return Text(_speed(task.finished_speed or task.speed or average, unit))

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"),
               Rate(), TimeRemainingColumn(), TextColumn("{task.fields[note]}"))  # fmt: skip
    with Bar(*columns, console=Console(stderr=True), refresh_per_second=4, transient=brief) as bar:
        task = bar.add_task(title, total=None, completed=begin, note="", visible=False)  # until there is work to do
        yield lambda done, total, note="": bar.update(task, completed=done, total=total, note=note, visible=True)
