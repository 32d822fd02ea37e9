"""Blocks of whole lines of a file, in memory that is used again.

stored bytes ─► pieces ─► hashed, searched for newlines ─► blocks up to the last newline ─► parsed ─► memory given back
                          while they are in the cache      what is left begins the next one
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from reagent_lite.data.formats.files import Fill
from reagent_lite.errors import DataError, Problem

# [m] 97 MB, three threads on 2 cores: 0.285 s by half a megabyte, 0.307 s by a quarter; a cache of 2 MB holds both
# the bytes and what is found in them.
PIECE_BYTES = 1 << 19
_MARK = b"\xef\xbb\xbf"
_NEWLINE = ord("\n")

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """Whole lines of a file.

    Attributes:
        text: their bytes; the last line of a file may lack its newline.
        bounds: [n+1] byte offsets of the starts of n lines, and of the text's end.
        first: line in the file of the first one, from 1.
        give_back: called once, when nothing looks at `text` any more: others are read into its memory then.
    """

    text: memoryview
    bounds: NDArray[np.int64]
    first: int
    give_back: Callable[[], None]


@dataclass(slots=True)
class LineReader:
    """Cuts the bytes of a file into blocks of whole lines.

    Attributes:
        fill: gives the bytes.
        path: named in errors.
        longest: bytes without a newline that are too many.
    """

    fill: Fill
    path: str
    longest: int
    # [m] Of 97 MB the 20 000 page faults of a new object for each block take 0.05 s of the processor's time. Numpy asks
    # the system for large pages, the mmap module does not.
    _free: deque[Bytes] = field(default_factory=deque)
    _memory: Bytes = field(default_factory=lambda: np.empty(0, np.uint8))
    _size: int = 0

    def blocks(self, wanted: Callable[[], int]) -> Iterator[Lines]:
        """Yields the file's lines in blocks.

        Args:
            wanted: asked before a block is read; it has at most so many bytes, or as many as make a line.

        Raises:
            DataError: damaged compression, a line that is too long.
        """
        line, left, going = 1, self._memory, True
        while going:
            most = wanted()
            self._take(most, left)
            starts, going = self._read(most)
            end = int(starts[-1]) if going else self._size
            if line == 1 and self._memory[: self._size][: len(_MARK)].tobytes() == _MARK:
                starts[0] = len(_MARK)
            if starts[0] == end:
                return
            left = self._memory[end : self._size].copy()
            bounds = np.append(starts, end) if starts[-1] < end else starts
            yield Lines(
                text=self._memory[bounds[0] : end].data,
                bounds=bounds - bounds[0],
                first=line,
                give_back=partial(self._free.append, self._memory),
            )
            line += len(bounds) - 1

    def _read(self, most: int) -> tuple[NDArray[np.int64], bool]:
        """Reads until there are enough bytes and a newline: returns where lines start, and whether the file goes on."""
        starts = [np.zeros(1, np.int64)]
        while self._size < most or len(starts) == 1:
            if self._size > self.longest + most:
                got = f"no newline in {self._size} bytes"
                raise DataError(Problem(self.path, "one JSON object per line", got))
            size = min(most - self._size if self._size < most else most, PIECE_BYTES)
            if self._size + size > len(self._memory):
                self._take(2 * (self._size + size), self._memory[: self._size])
            piece = self._memory[self._size : self._size + size]
            found = self.fill(piece.data)
            if not found:
                return np.concatenate(starts), False
            new = np.flatnonzero(piece[:found] == _NEWLINE)
            if len(new):
                starts.append(new + (self._size + 1))
            self._size += found
        return np.concatenate(starts), True

    def _take(self, size: int, content: Bytes) -> None:
        """Takes memory of at least `size` bytes that begins with `content`."""
        size = max(size, len(content))
        memory = next((one for one in self._used() if len(one) >= size), None)
        self._memory = np.empty(size, np.uint8) if memory is None else memory
        self._memory[: len(content)] = content
        self._size = len(content)

    def _used(self) -> Iterator[Bytes]:
        """Yields memory that was given back; what is too small is dropped."""
        while self._free:
            yield self._free.pop()
