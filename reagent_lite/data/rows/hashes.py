"""Hashes of episodes and rows: the same in any file, format and order, on any machine."""

import hashlib
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]


def mix(values: Hashes) -> Hashes:
    """Returns the finalizer of SplitMix64, a bijection (Steele, Lea and Flood 2014, Fast splittable PRNGs)."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def name_hashes(names: Iterable[str]) -> Hashes:
    """Returns [names] BLAKE2b of each mdp_id, 8 bytes, little endian."""
    digests = [hashlib.blake2b(name.encode(), digest_size=8).digest() for name in names]
    return np.frombuffer(b"".join(digests), "<u8")


def row_hashes(episode: Hashes, sequence: NDArray[np.int64], seed: int) -> Hashes:
    """Returns [n] hashes of rows, by the hash of their mdp_id and their sequence_number; another seed gives others."""
    offset = np.uint64(seed * 0xD1342543DE82EF95 % 2**64)
    return mix(episode + sequence.astype(np.uint64) + offset)
