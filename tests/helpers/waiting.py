"""Waiting for something that another process does."""

import time
from collections.abc import Callable

import psutil


def wait_until(condition: Callable[[], bool], message: Callable[[], str] = str, seconds: float = 60.0) -> None:
    """Returns once the condition holds; an AssertionError with the message after so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, message()
        time.sleep(0.02)


def runs(pid: int) -> bool:
    """Whether a process runs, which one that has ended and was not waited for does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
