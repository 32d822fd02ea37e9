"""Philox4x32-10 in NumPy, and what environments draw of it.

Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", 2011.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Words = NDArray[np.uint64]
LOW = np.uint64(0xFFFFFFFF)
WORD = np.uint64(32)
FACTORS = np.array((0xD2511F53, 0xCD9E8D57), dtype=np.uint64)
STEPS = np.array((0x9E3779B9, 0xBB67AE85), dtype=np.uint64)
RESET, STEP, ACT, CANDIDATES = range(4)


def philox(counter: tuple[ArrayLike, ArrayLike, ArrayLike, ArrayLike], key: tuple[int, int]) -> Words:
    """Four 32-bit words for every counter, [..., 4]; the counter's four words broadcast against each other."""
    words = np.stack(np.broadcast_arrays(*(np.asarray(word, dtype=np.uint64) for word in counter)), -1)
    keys = np.array(key, dtype=np.uint64)
    for _ in range(10):
        products = words[..., ::2] * FACTORS
        high, low = (products >> WORD)[..., ::-1] ^ words[..., 1::2] ^ keys, (products & LOW)[..., ::-1]
        words = np.stack((high, low), -1).reshape(words.shape)
        keys = (keys + STEPS) & LOW
    return words


def draws(num: int, env: ArrayLike, episode: ArrayLike, purpose: int, base: ArrayLike, key: tuple[int, int]) -> Words:
    """The first `num` words, [..., num], of environments that draw for a purpose; `base` is the last counter word."""
    blocks = np.asarray(base, dtype=np.uint64)[..., None] + np.arange(-(-num // 4), dtype=np.uint64)
    words = philox((*(np.asarray(word)[..., None] for word in (env, episode, purpose)), blocks), key)
    return words.reshape(*words.shape[:-2], -1)[..., :num]


def uniform(words: Words) -> NDArray[np.float64]:
    """In [0, 1): the upper 24 bits."""
    return (words >> np.uint64(8)) * 2.0**-24


def below(words: Words, num: int) -> NDArray[np.int64]:
    """Integers in [0, num): the upper word of word * num."""
    return ((words * np.uint64(num)) >> WORD).astype(np.int64)
