"""A fixed random sample of rows: those of least hash, whatever the order of files, blocks and threads.

(mdp_id, sequence_number) ─► row_hashes ─► below the cut? ─► HashSample ─► Sample
                                                └──── the cut falls as better rows come ────┘
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reagent_lite.data.features.normalization import mix
from reagent_lite.data.formats.blocks import Block
from reagent_lite.data.rows.columns import Faults, Mask, column_of, integers, strings
from reagent_lite.data.rows.parametric import aligned
from reagent_lite.data.rows.transitions import FeatureMatrix

Hashes = NDArray[np.uint64]

_LINE_BITS = 40  # of a position: lines of a file, below the number of the file
_LARGEST = np.uint64(2**64 - 1)
_NEW_VALUES = 1 << 23  # of rows that wait for their places: 32 MiB


def row_hashes(block: Block, faults: Faults, seed: int) -> tuple[Hashes, int]:
    """Returns ([n] hash of each row, rows that are known by their position alone).

    The hash is SplitMix64 of sequence_number + md5(seed, mdp_id), so a row has the same in any file, format and order.
    A row without mdp_id or without sequence_number is known by the number of its file and its line.
    """
    codes, distinct = strings(column_of(block, "mdp_id"), faults)
    sequence = column_of(block, "sequence_number")
    numbers = integers(sequence, faults)
    named = (codes >= 0) & sequence.present
    bases = [_md5(f"{seed}:mdp_id:{name}") for name in distinct.to_pylist()]
    base = np.array([*bases, _md5(f"{seed}:position")], np.uint64)[np.where(named, codes, -1)]
    position = (block.file_number << _LINE_BITS) + block.lines
    key = np.where(named, numbers, position).astype(np.uint64)
    return mix(base + key), int((~named).sum())


def _md5(text: str) -> int:
    return int.from_bytes(hashlib.md5(text.encode(), usedforsecurity=False).digest()[:8], "little")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Sampled rows or candidates.

    Attributes:
        ids: of the features, ascending.
        order: [n] rows of `values` in the order of their hashes.
        places: {id: column of `values`}.
        values: [n, F], NaN where absent.
    """

    ids: tuple[int, ...]
    order: NDArray[np.int64]
    places: dict[int, int]
    values: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.order)

    def column(self, feature_id: int) -> NDArray[np.float32]:
        """Returns a feature of the sampled rows in the order of their hashes, [n]; NaN where it is in none of them."""
        if feature_id not in self.places:
            return np.full(len(self), np.nan, np.float32)
        found: NDArray[np.float32] = self.values[self.order, self.places[feature_id]]
        return found


class HashSample:
    """Keeps the `size` rows of least hash of those it is given; of equal hashes those that came first.

    Holds the sample and some rows that came since; these take the places of those that fall out.

    Attributes:
        cut: rows above this hash cannot be in the sample; it only falls, so threads may read it at any time.
    """

    def __init__(self, size: int) -> None:
        self.cut = _LARGEST
        self._size = size
        self._num_arrived = 0
        self._hashes, self._arrivals = np.empty(0, np.uint64), np.empty(0, np.int64)
        self._ids: tuple[int, ...] = ()
        self._values = np.empty((size, 0), np.float32)  # rows are used from the first
        self._new: list[tuple[Hashes, FeatureMatrix]] = []
        self._num_new = 0

    def wanted(self, hashes: Hashes) -> Mask:
        """Returns [n], whether rows of these hashes may still be in the sample."""
        return hashes <= self.cut

    def add(self, hashes: Hashes, features: FeatureMatrix) -> None:
        """Adds rows: hashes [n] and features of [n] rows, whatever their ids."""
        if not len(hashes):
            return
        self._new.append((hashes, features))
        self._num_new += len(hashes)
        if self._num_new * max(len(features.ids), 16) > _NEW_VALUES:
            self._settle()

    def finish(self) -> Sample:
        """Returns the sample."""
        self._settle()
        return Sample(
            ids=tuple(sorted(self._ids)),
            order=np.lexsort((self._arrivals, self._hashes)),
            places={one: column for column, one in enumerate(self._ids)},
            values=self._values[: len(self._hashes)],
        )

    def _settle(self) -> None:
        """Takes over the new rows that are in the sample."""
        known = len(self._hashes)
        hashes = np.concatenate([self._hashes, *(one for one, _ in self._new)])
        arrivals = np.concatenate([self._arrivals, np.arange(self._num_new) + self._num_arrived])
        kept = self._least(hashes, arrivals)
        came, total = np.flatnonzero(kept[known:]) + known, int(kept.sum())
        slots = np.concatenate((np.flatnonzero(~kept[:known]), np.arange(known, total)))  # as many as came
        self._widen(tuple(dict.fromkeys((*self._ids, *(one for _, matrix in self._new for one in matrix.ids)))), known)
        start, used = known, 0
        for _, matrix in self._new:
            rows = np.flatnonzero(kept[start : start + len(matrix.values)])
            into = slots[used : used + len(rows)]
            self._values[into] = aligned(FeatureMatrix(matrix.ids, matrix.values[rows]), self._ids)
            start, used = start + len(matrix.values), used + len(rows)
        self._hashes, self._arrivals = hashes[:total].copy(), arrivals[:total].copy()
        self._hashes[slots], self._arrivals[slots] = hashes[came], arrivals[came]
        self._num_arrived += self._num_new
        self._new, self._num_new = [], 0

    def _least(self, hashes: Hashes, arrivals: NDArray[np.int64]) -> Mask:
        """Returns [n], whether each is among the `size` least; the cut falls to the largest of these."""
        if len(hashes) < self._size:
            return np.ones(len(hashes), bool)
        self.cut = np.partition(hashes, self._size - 1)[self._size - 1]
        kept = hashes < self.cut
        # rows that tie at the cut: a log that repeats one name may have millions
        ties = np.flatnonzero(hashes == self.cut)
        kept[ties[np.argsort(arrivals[ties])][: self._size - int(kept.sum())]] = True
        return kept

    def _widen(self, ids: tuple[int, ...], known: int) -> None:
        if ids == self._ids:
            return
        values = np.empty((self._size, len(ids)), np.float32)
        values[:known] = aligned(FeatureMatrix(self._ids, self._values[:known]), ids)
        self._ids, self._values = ids, values
