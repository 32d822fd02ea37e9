"""Hashes of states and of lists of candidates, to compare rows of different copies."""

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reagent_lite.data.copy.training_copy import TrainingCopy
from reagent_lite.data.rows.hashes import Hashes
from reagent_lite.data.rows.matrices import FeatureMatrix, Lists

_LISTS_AT_ONCE = 1 << 16
_VALUES_AT_ONCE = 1 << 22  # some 30 MB; longer blocks are slower


def choices_hashes(copy: TrainingCopy) -> Hashes:
    """Returns a hash of each list of candidates, [L]."""
    ends = copy.list_offsets[1:]
    hashes = np.zeros(len(ends), np.uint64)
    most = min(_LISTS_AT_ONCE, max(_VALUES_AT_ONCE // max(len(copy.action_ids), 1), 1))
    begin = 0
    while begin < len(ends):
        first = int(copy.list_offsets[begin])
        end = max(begin + 1, int(np.searchsorted(ends, first + most, side="right")))
        lengths = np.diff(copy.list_offsets[begin : end + 1])
        hashes[begin:end] = hashes_of(copy.action_ids, copy.candidates[first : int(ends[end - 1])], lengths)
        begin = end
    return hashes


def hashes_of(ids: tuple[int, ...], values: NDArray[Any], lengths: NDArray[np.int64]) -> Hashes:
    """Returns a hash of each run of rows, [n]; a state is a run of one row. Runs of images have one row."""
    if values.dtype == np.uint8:
        digests = [hashlib.blake2b(row, digest_size=8).digest() for row in np.ascontiguousarray(values)]
        return np.frombuffer(b"".join(digests), np.uint64)
    return Lists(lengths, FeatureMatrix(ids, values)).hashes()[0]
