"""Blocks of rows, as readers return them, and how far a file has been read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from reagent_lite.data.formats.files import InputFile

if TYPE_CHECKING:
    import pyarrow as pa

MOST_THREADS = 8
"""Threads that parse blocks; each holds about 60 MB of a block in its various forms."""


def num_threads() -> int:
    """Returns how many threads parse blocks: the cores this process may use, at most MOST_THREADS."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MOST_THREADS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Some rows of one file.

    Attributes:
        file: where they are from.
        file_number: its place in the input.
        table: n rows as Arrow columns.
        lines: [n] line in the file (Parquet, Arrow IPC: row), from 1.
    """

    file: InputFile
    file_number: int
    table: pa.Table
    lines: NDArray[np.int64]

    def where(self, row: int) -> str:
        """Returns "file:line" of a row of the block."""
        return self.file.location(int(self.lines[row]))


@dataclass(slots=True)
class Position:
    """How far one file has been read: stored bytes, and their sha256 once all are."""

    bytes_read: int = 0
    sha256: str = ""


Show = Callable[[int, int], None]
"""Shows progress; called with (units done, units in all)."""
Reader = Callable[[InputFile, int, Position], Iterator[Callable[[], Block]]]
"""Yields a function for each block of a file, which parses it; each is called once, in any thread and order.

Arguments are the file, its place in the input, and the position, which the reader keeps up to date. Some readers take
`columns` as well: the columns that are read, all for None; of others they keep the names.
"""
