"""Large requests, whose work is done in a thread so that others are answered meanwhile."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from reagent_lite.errors import Problem
from reagent_lite.serving.refusals import TRY_LATER, RefusedError

LARGE_BYTES = 32_000
"""Size of a body from which it is parsed in the thread."""
LARGE_CHOICES = 4096
"""Number of choices in all rows of a request from which it is predicted in the thread, as many at a time."""
MOST_CHOICES_OF_REQUEST = 250_000
"""Largest number of choices in all rows of a request, unless one row has more."""
_MOST_WAITING = 16  # each has a body in memory, parsed

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


class LargeRequests:
    """The thread of a worker for large requests, one after another."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "large requests")
        self._waiting = 0

    async def run(self, work: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        """Returns the result of `work`.

        Raises:
            RefusedError: too many large requests wait.
        """
        if self._waiting >= _MOST_WAITING:
            expected = f"at most {_MOST_WAITING} large requests at once"
            raise RefusedError(503, Problem("large requests", expected, "more", TRY_LATER))
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: work(*args, **kwargs))
        finally:
            self._waiting -= 1
