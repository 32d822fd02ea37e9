"""Categories: features whose values are texts.

A text is stored as its code, a float32 made of its hash. Machines, shards and services therefore agree without a table,
and matrices of features stay numeric. Fitting the normalization chooses the levels: the strings that get a one-hot
column each. All other strings count as other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from reagent_lite.types import MISSING_VALUE

MOST_CHARACTERS = 200
"""Most characters of a level: longer text is prose, not a category."""
_CODE_BITS = 30
_SMALLEST = 64 << 23
"""Bits of the smallest code, 2^-63; the largest is below 2^65, so that no code is 0, infinite or denormal."""
SMALLEST_CODE = 2.0**-63
"""The smallest code."""


def code_of(text: str) -> float:
    """Returns the float32 code of a text: 30 bits of the BLAKE2b hash of its UTF-8, as a positive number.

    Among features with 100 levels, one in 200 000 has two levels with the same code.
    """
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=4).digest()
    bits = (int.from_bytes(digest) >> (32 - _CODE_BITS)) + _SMALLEST
    return float(np.uint32(bits).view(np.float32))


def codes_of(texts: Iterable[str]) -> NDArray[np.float32]:
    """Returns the codes [n] of n texts."""
    return np.array([code_of(text) for text in texts], np.float32)


def is_other(values: NDArray[np.float32], possible: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Returns whether each value [n] of a one-hot feature is present and not a possible value."""
    other: NDArray[np.bool_] = ~np.isin(values, possible) & ~np.isnan(values) & (values != np.float32(MISSING_VALUE))
    return other
