"""Candidate lists of parametric rows: each distinct list is stored once.

The next list of a row is mostly the list of the row after it, and many logs offer every row the same candidates. Lists
are found equal by 128 bits of hash over (place in the list, feature id, float32 bits) of every present feature.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from reagent_lite.data.copy.spool import ColumnSpool, MatrixSpool, NpyWriter
from reagent_lite.data.rows.hashes import Hashes, mix
from reagent_lite.data.rows.transitions import Lists

N = TypeVar("N", np.int64, np.uint64)


def list_hashes(lists: Lists) -> tuple[Hashes, Hashes]:
    """Returns two independent [n] uint64 hashes of each list; the order of columns does not matter."""
    ids = np.array(lists.features.ids, np.int64).view(np.uint64)
    starts = np.cumsum(lists.lengths) - lists.lengths
    place = (np.arange(int(lists.lengths.sum())) - np.repeat(starts, lists.lengths)).astype(np.uint64)
    values = lists.features.values
    first, second = mix(place), mix(place ^ np.uint64(0xA5A5A5A5A5A5A5A5))
    for index, one in enumerate(mix(ids)):
        column = np.ascontiguousarray(values[:, index])
        cell = mix(column.view(np.uint32).astype(np.uint64) + one)
        cell[np.isnan(column)] = 0
        first += cell
        second += cell * (one | np.uint64(1))
    return _sums(mix(first), lists.lengths), _sums(mix(second), lists.lengths)


def _sums(values: Hashes, lengths: NDArray[np.int64]) -> Hashes:
    """[n] wrapping sums over consecutive runs of `values`, mixed with the runs' lengths."""
    running = np.concatenate((np.zeros(1, np.uint64), np.cumsum(values, dtype=np.uint64)))
    ends = np.cumsum(lengths)
    return mix((running[ends] - running[ends - lengths]) ^ lengths.astype(np.uint64))


@dataclass(frozen=True, slots=True, kw_only=True)
class ListTable:
    """Lists of one side (now or next) of all rows: place in the candidate spool, length, and hashes; each [R]."""

    start: NDArray[np.int64]
    length: NDArray[np.int64]
    first: Hashes
    second: Hashes


class ListSpool:
    """The lists of one side, appended block by block; candidates of both sides share a matrix."""

    def __init__(self, columns: dict[str, ColumnSpool], candidates: MatrixSpool[int]) -> None:
        self._columns = columns
        self._candidates = candidates

    def append(self, lists: Lists) -> None:
        """Adds the lists of a block."""
        starts = np.cumsum(lists.lengths) - lists.lengths + self._candidates.num_rows
        self._candidates.append(lists.features.ids, lists.features.values)
        first, second = list_hashes(lists)
        for name, values in (("start", starts), ("length", lists.lengths), ("first", first), ("second", second)):
            self._columns[name].append(values)

    def take(self, order: NDArray[np.int64]) -> ListTable:
        """Returns the lists of all rows in the given order."""
        taken = {name: column.take()[order] for name, column in self._columns.items()}
        return ListTable(**taken)


@dataclass(frozen=True, slots=True)
class SharedLists:
    """Distinct lists in the order of their first use: where and how long; and the list of each row on both sides."""

    start: NDArray[np.int64]
    length: NDArray[np.int64]
    now: NDArray[np.int32]
    after: NDArray[np.int32]


def share(now: ListTable, after: ListTable) -> SharedLists:
    """Finds equal lists; rows' own and next lists alternate, so that lists lie in the order they are read."""

    def both(one: NDArray[N], other: NDArray[N]) -> NDArray[N]:
        return np.stack((one, other), axis=1).reshape(-1)

    second, length = both(now.second, after.second), both(now.length, after.length)
    _, first_use, number = np.unique(both(now.first, after.first), return_index=True, return_inverse=True)
    use = first_use[number]
    # Equal by 64 bits and different by the other 64: a list of its own.
    apart = (second != second[use]) | (length != length[use])
    use[apart] = np.flatnonzero(apart)
    uses, lists = np.unique(use, return_inverse=True)
    start = both(now.start, after.start)
    return SharedLists(
        start[uses],
        length[uses],
        lists[0::2].astype(np.int32),
        lists[1::2].astype(np.int32),
    )


def write_candidates(shared: SharedLists, candidates: MatrixSpool[int], writer: NpyWriter) -> None:
    """Writes the features of all distinct lists, in chunks of whole lists."""
    reader = candidates.reader()
    ends = np.cumsum(shared.length)
    begin = 0
    while begin < len(ends):
        base = ends[begin] - shared.length[begin]
        end = max(begin + 1, int(np.searchsorted(ends, base + reader.chunk_rows(), side="right")))
        length = shared.length[begin:end]
        shift = np.repeat(shared.start[begin:end] - (ends[begin:end] - length - base), length)
        writer.append(reader.gather(np.arange(int(length.sum())) + shift))
        begin = end
    reader.close()
