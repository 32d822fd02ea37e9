"""Signals that ask a run to end: heeded between two steps while it learns, at once in all its other work.

Where the terminal goes, with or without a signal, what the run says is lost and the run is not.
"""

import errno
import io
import os
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Self, TextIO

from reagent_lite.distributed.signals import heeded
from reagent_lite.errors import Preempted

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class StopSignal:
    """Listens inside its `with` block, in the main thread; elsewhere Python delivers no signals and nothing happens.

    Attributes:
        standing: what the same command would continue from, for the message.
    """

    def __init__(self) -> None:
        self.standing = "nothing was saved yet; the same command begins anew"
        self._name = ""
        self._deferred = False
        self._before: dict[signal.Signals, Callable[[int, FrameType | None], object] | int | None] = {}

    @property
    def wanted(self) -> bool:
        """Whether a signal came."""
        return bool(self._name)

    def preempted(self) -> Preempted:
        """Returns the error that ends the run."""
        return Preempted(self._name, self.standing)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Only notes signals inside the block, whose work asks `wanted`; what was not heeded counts when it ends.

        Raises:
            Preempted: a signal came and nobody heeded it.
        """
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False  # first this, then the question: a signal in between is raised by its handler
        if self.wanted:
            raise self.preempted()

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in heeded():
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._name:
            raise KeyboardInterrupt  # whoever presses Ctrl-C again does not want to wait
        self._name = signal.Signals(number).name
        if not self._deferred:
            raise self.preempted()


@contextmanager
def outliving_terminal() -> Iterator[None]:
    """Makes standard output and standard error swallow what is written to a terminal, or a pipe, that is gone."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_outliving(stream, number) for number, stream in enumerate(before, start=1))
    try:
        yield
    finally:
        if sys.stdout is not None:
            sys.stdout.flush()
        sys.stdout, sys.stderr = before


def _outliving(stream: TextIO, number: int) -> TextIO:
    try:
        # None where the caller closed it; a disk that fails is no terminal that is gone
        if stream is None or stream.fileno() != number or stat.S_ISREG(os.fstat(number).st_mode):
            return stream
    except OSError:  # no file at all
        return stream
    stream.flush()
    file = io.BufferedWriter(_Outliving(number, "wb", closefd=False))
    return io.TextIOWrapper(file, encoding=stream.encoding, errors=stream.errors, line_buffering=True)


class _Outliving(io.FileIO):
    """A file whose descriptor leads nowhere once its reader is gone."""

    def write(self, data: "ReadableBuffer", /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in (errno.EIO, errno.EPIPE):
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return super().write(data)
