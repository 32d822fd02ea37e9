"""How far each worker of a machine is: the worker writes a few numbers into a file, its launcher reads them.

All ranks enter the same collectives in the same order, so the others wait for the rank that has entered the fewest.
"""

import mmap
import os
import struct
import time
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

VARIABLE = "REAGENT_LITE_SIGN_FILE"
_NUMBERS = struct.Struct("=qqdd")


class Sign(BaseModel):
    """One worker's latest sign.

    Attributes:
        calls: collectives it has entered.
        step: optimizer steps it has done.
        silent: seconds since it wrote this.
        limit: seconds for which ranks wait for each other now.
    """

    model_config = ConfigDict(frozen=True)

    calls: int
    step: int
    silent: float
    limit: float


class SignFile:
    """Where this worker writes; nothing happens where no launcher of ours reads it.

    Args:
        limit: as in Sign.
    """

    def __init__(self, limit: float) -> None:
        self._calls, self._step, self._limit = 0, 0, limit
        self._memory: mmap.mmap | None = None
        if VARIABLE in os.environ:
            with open(os.environ[VARIABLE], "w+b") as stream:
                stream.truncate(_NUMBERS.size)
                self._memory = mmap.mmap(stream.fileno(), _NUMBERS.size)

    def entering(self, step: int | None = None) -> None:
        """Says that this worker enters a collective, after so many optimizer steps; None: as many as before."""
        self._calls += 1
        self._step = self._step if step is None else step
        self._write()

    def wait_at_most(self, seconds: float) -> None:
        """Says how long ranks wait for each other from here on."""
        self._limit = seconds
        self._write()

    def _write(self) -> None:
        if self._memory is not None:
            _NUMBERS.pack_into(self._memory, 0, self._calls, self._step, time.monotonic(), self._limit)


def read_sign(file: Path) -> Sign | None:
    """Returns the sign of a worker of this machine, whose clock both use; None before its first one."""
    try:
        calls, step, at, limit = _NUMBERS.unpack(file.read_bytes())
    except (OSError, struct.error):
        return None
    return Sign(calls=calls, step=step, silent=time.monotonic() - at, limit=limit) if at else None


def awaited(signs: Sequence[Sign | None]) -> list[int]:
    """Returns the ranks that the others have waited for too long, by their signs in the order of ranks."""
    known = {rank: sign for rank, sign in enumerate(signs) if sign is not None}
    entered = {sign.calls for sign in known.values()}
    if len(entered) < 2:
        return []
    # a rank that was just killed is behind as well, and not silent for long
    return [rank for rank, one in known.items() if one.calls == min(entered) and one.silent > one.limit / 2]
