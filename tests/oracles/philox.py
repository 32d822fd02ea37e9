"""Philox4x32-10 in NumPy, and what environments draw of it.

Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", 2011.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Words = NDArray[np.uint64]
LOW = np.uint64(0xFFFFFFFF)
WORD = np.uint64(32)
RESET, STEP, ACT, CANDIDATES = range(4)


def philox(counter: tuple[ArrayLike, ArrayLike, ArrayLike, ArrayLike], key: tuple[int, int]) -> Words:
    """Four 32-bit words for every counter, [..., 4]; the counter's four words broadcast against each other."""
    a, b, c, d = np.broadcast_arrays(*(np.asarray(word, dtype=np.uint64) for word in counter))
    k, m = np.uint64(key[0]), np.uint64(key[1])
    for _ in range(10):
        first, second = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        a, b, c, d = (second >> WORD) ^ b ^ k, second & LOW, (first >> WORD) ^ d ^ m, first & LOW
        k, m = (k + np.uint64(0x9E3779B9)) & LOW, (m + np.uint64(0xBB67AE85)) & LOW
    return np.stack([a, b, c, d], -1)


def draws(num: int, env: ArrayLike, episode: ArrayLike, purpose: int, base: ArrayLike, key: tuple[int, int]) -> Words:
    """The first `num` words, [..., num], of environments that draw for a purpose; `base` is the last counter word."""
    blocks = [
        philox((env, episode, purpose, np.asarray(base, dtype=np.uint64) + np.uint64(block)), key)
        for block in range(-(-num // 4))
    ]
    return np.concatenate(blocks, -1)[..., :num]


def uniform(words: Words) -> NDArray[np.float64]:
    """In [0, 1): the upper 24 bits."""
    return (words >> np.uint64(8)) * 2.0**-24


def below(words: Words, num: int) -> NDArray[np.int64]:
    """Integers in [0, num): the upper word of word * num."""
    return ((words * np.uint64(num)) >> WORD).astype(np.int64)
