"""Blocks of rows, as readers return them, and the progress of reading a file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from reagent_lite.data.formats.input_files import InputFile

if TYPE_CHECKING:
    import pyarrow as pa

MOST_THREADS = 8
"""Threads that parse blocks; each holds about 60 MB of a block in its various forms."""


def num_threads() -> int:
    """Returns the number of threads that parse blocks: the cores this process may use, at most MOST_THREADS."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MOST_THREADS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Some rows of one file.

    Attributes:
        file: the file that the rows are from.
        file_number: number of the file in the input, from 0.
        table: n rows as Arrow columns.
        lines: [n] line of each row in the file (Parquet, Arrow IPC: its number), from 1.
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
    """Progress of reading one file: the stored bytes read, and the sha256 of all of them at the end."""

    bytes_read: int = 0
    sha256: str = ""


Show = Callable[[int, int], None]
"""Shows progress; called with (units done, total units)."""
Reader = Callable[[InputFile, int, Position], Iterator[Callable[[], Block]]]
"""Yields a function for each block of a file, which parses the block; it is called once, in any thread and order.

Arguments are the file, its number in the input, and the position, which the reader keeps up to date. Some readers also
take `columns`, the columns to read, or None for all; the other columns of their blocks are null.
"""
