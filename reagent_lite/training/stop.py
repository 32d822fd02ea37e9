"""Signals that ask a run to end. They take effect between two steps while it learns, and at once otherwise.

If the terminal is closed, only output is lost: without a SIGHUP the run continues, and with one it stops as above.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Self

from reagent_lite.distributed.worker import stop_signals
from reagent_lite.errors import Preempted


class StopSignal:
    """Handles signals inside its `with` block in the main thread; in other threads it does nothing.

    The first signal raises Preempted where it arrives, unless it is deferred. In a callback whose errors Python only
    prints (of a weak reference, of ctypes) it takes effect at the next `defer` block. An error of the block after a
    signal counts as its consequence and becomes Preempted as well: interrupted libraries raise various errors.

    Args:
        last: whether the process ends right after the block; signals are then ignored, so that its exit code is kept.

    Attributes:
        standing: state of the last checkpoint and effect of the same command, for the message.
    """

    def __init__(self, *, last: bool = False) -> None:
        self._last = last
        self.standing = "nothing was saved yet; the same command starts over"
        self._name = ""
        self._raised = False
        self._deferred = False
        self._before: dict[signal.Signals, Callable[[int, FrameType | None], object] | int | None] = {}

    @property
    def wanted(self) -> bool:
        """Whether a signal has arrived."""
        return bool(self._name)

    def preemption(self) -> Preempted:
        """Returns the error that ends the run."""
        return Preempted(self._name, self.standing)

    @contextmanager
    def defer(self) -> Iterator[None]:
        """Only records signals inside the block, which reads `wanted`; an ignored signal takes effect at its end.

        Raises:
            Preempted: a signal arrived and the block did not act on it.
        """
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False  # before `wanted` is read: a signal in between is raised by its handler
        if self.wanted:
            raise self.preemption()

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in stop_signals():
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if self._last else handler)
        if isinstance(error, Exception) and self.wanted:
            raise self.preemption() from error

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._name:
            raise KeyboardInterrupt  # a second Ctrl-C ends the process at once
        self._name = signal.Signals(number).name
        if not (self._raised or self._deferred):  # a second error would only interrupt the cleanup
            self._raised = True
            raise self.preemption()
