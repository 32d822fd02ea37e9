"""Signals that ask a run to end: heeded between two steps while it learns, at once in all its other work."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Self

from reagent_lite.errors import Preempted

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
"""What Kubernetes and most schedulers send, the terminal's Ctrl-C, and what Slurm is told to send ahead of the end."""


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
            for number in SIGNALS:
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
