"""Waiting for something that another process does."""

import time
from collections.abc import Callable
from pathlib import Path


def wait_until(condition: Callable[[], bool], message: Callable[[], str] = str, seconds: float = 60.0) -> None:
    """Returns once the condition holds; an AssertionError with the message after so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, message()
        time.sleep(0.02)


def runs(pid: int) -> bool:
    """Whether a process runs, which one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
