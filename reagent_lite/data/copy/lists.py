"""Candidate lists of parametric rows: each distinct list is stored once.

The next list of a row is usually the list of the following row, and many logs offer every row the same candidates.
Lists are equal if 128-bit hashes over (index in the list, feature id, float32 bits) of every present feature are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reagent_lite.data.rows.matrices import Lists

_LISTS_OF_A_CHUNK = 1 << 12


def list_records(lists: Lists, offset: int) -> NDArray[np.int64]:
    """Returns [n, 4] of each list: the row of its first candidate, its length, and its two hashes.

    Args:
        lists: the lists of a block.
        offset: row of the block's first candidate among all.
    """
    starts = np.cumsum(lists.lengths) - lists.lengths + offset
    first, second = lists.hashes()
    return np.stack((starts, lists.lengths, first.view(np.int64), second.view(np.int64)), axis=1)


@dataclass(frozen=True, slots=True)
class SharedLists:
    """Distinct lists in the order of their first use.

    Attributes:
        start: [L] row of each list's first candidate in the spool of all candidates.
        length: [L] number of candidates of each list.
        now, after: [R] int32, numbers of each row's list and of its next list.
    """

    start: NDArray[np.int64]
    length: NDArray[np.int64]
    now: NDArray[np.int32]
    after: NDArray[np.int32]

    def candidates(self) -> Iterator[NDArray[np.int64]]:
        """Yields the rows of all lists' candidates, in chunks of whole lists."""
        for at in range(0, len(self.length), _LISTS_OF_A_CHUNK):
            length = self.length[at : at + _LISTS_OF_A_CHUNK]
            first = self.start[at : at + _LISTS_OF_A_CHUNK] - (np.cumsum(length) - length)
            yield np.repeat(first, length) + np.arange(int(length.sum()))


def share_lists(now: NDArray[np.int64], after: NDArray[np.int64]) -> SharedLists:
    """Finds equal lists among the [R, 4] records of rows' own and next lists.

    Own and next lists alternate, so that lists are stored in the order in which they are read.
    """
    import pyarrow as pa

    from reagent_lite.data.formats.schema import to_numpy

    both = np.stack((now, after), axis=1).reshape(-1, 4)
    hashes = pa.py_buffer(np.ascontiguousarray(both[:, 2:]))
    keys = pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), len(both), [None, hashes])
    number = to_numpy(keys.dictionary_encode().indices)  # counted up in the order of first use
    _, first_use = np.unique(number, return_index=True)
    return SharedLists(both[first_use, 0], both[first_use, 1], number[0::2], number[1::2])
