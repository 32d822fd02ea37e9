"""Candidate lists of parametric rows: each distinct list is stored once.

The next list of a row is usually the list of the following row, and many logs offer every row the same candidates.
Lists are equal if 128-bit hashes over (index in the list, feature id, float32 bits) of every present feature are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reagent_lite.data.copy.order import index_type
from reagent_lite.data.copy.spool import Indices, Spool, parts_of
from reagent_lite.data.rows.matrices import Lists

_LISTS_OF_A_CHUNK = 1 << 12
_SORTED_AT_ONCE = 1 << 20
_MOST_BUCKETS = 64


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
        start: [L] row of each list's first candidate in the spool of all candidates, memory-mapped.
        length: [L] number of candidates of each list, memory-mapped.
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


def share_lists(records: NDArray[np.int64], start: Spool[int], length: Spool[int]) -> SharedLists:
    """Finds equal lists.

    Args:
        records: [2 R, 4] memory-mapped records of each row's own list and of its next list, which alternate, so that
            lists are stored in the order in which they are read.
        start: empty spool for the row of each distinct list's first candidate.
        length: empty spool for the number of candidates of each distinct list.
    """
    first = _first_equal(records)
    distinct = 0
    number = np.empty(len(records), np.int32)
    for part in parts_of(len(records)):
        is_first = first[part] == np.arange(part.start, part.stop)
        number[part] = distinct + np.cumsum(is_first) - 1
        number[part] = number[first[part]]
        distinct += int(is_first.sum())
        start.append(records[part, 0][is_first])
        length.append(records[part, 1][is_first])
    return SharedLists(start.map_rows(), length.map_rows(), number[0::2], number[1::2])


def _first_equal(records: NDArray[np.int64]) -> Indices:
    """Returns [n] the index of the first record with the same hashes, by sorting a part of the hashes at a time."""
    first = np.empty(len(records), index_type(len(records)))
    for part in parts_of(len(records)):  # most lists are equal to one nearby
        first[part] = part.start + _first_rows(records[part, 2:])
    buckets = min(len(records) // _SORTED_AT_ONCE + 1, _MOST_BUCKETS)
    for bucket in range(buckets):
        in_bucket = (
            part.start
            + np.flatnonzero(
                (first[part] == np.arange(part.start, part.stop))
                & (records[part, 2].view(np.uint64) % np.uint64(buckets) == bucket)
            )
            for part in parts_of(len(records))
        )
        index = np.concatenate([np.empty(0, np.int64), *in_bucket])
        first[index] = index[_first_rows(records[index, 2:])]
    for part in parts_of(len(records)):
        first[part] = first[first[part]]
    return first


def _first_rows(hashes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns [n] the index of the first row of `hashes` [n, 2] that is equal."""
    order = np.lexsort((hashes[:, 1], hashes[:, 0]))  # equal rows stay in their order
    in_order = hashes[order]
    is_new = np.append(True, (in_order[1:] != in_order[:-1]).any(axis=1))[: len(order)]
    first = np.empty(len(order), np.int64)
    first[order] = order[is_new][np.cumsum(is_new) - 1]
    return first
