"""Hashes of episodes and rows: the same in any file, format and order, on any machine."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]


def mix(values: Hashes) -> Hashes:
    """Returns values mixed by the finalizer of SplitMix64, a bijection.

    Source: Steele, Lea and Flood (2014), Fast splittable pseudorandom number generators.
    """
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def name_hashes(names: Iterable[str]) -> Hashes:
    """Returns [names] BLAKE2b of each mdp_id, 8 bytes, little endian."""
    digests = [hashlib.blake2b(name.encode(), digest_size=8).digest() for name in names]
    return np.frombuffer(b"".join(digests), "<u8")


def hashes_of_codes(codes: NDArray[np.integer], names: Sequence[str]) -> Hashes:
    """Returns [n] hashes of the names with the indices `codes` [n]; 0 for the code -1."""
    hashes: Hashes = np.append(name_hashes(names), np.uint64(0))[codes]
    return hashes


def row_hashes(episode: Hashes, sequence: NDArray[np.int64], seed: int) -> Hashes:
    """Returns [n] hashes of rows, from the hash of their mdp_id, their sequence_number and a seed."""
    offset = np.uint64(seed * 0xD1342543DE82EF95 % 2**64)
    return mix(episode + sequence.astype(np.uint64) + offset)
