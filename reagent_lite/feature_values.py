"""The value of a feature: a number, the text of a category, or missing; the same in bundles and the server."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import numpy as np

from reagent_lite.categories import MOST_CHARACTERS

LARGEST = float(np.finfo(np.float32).max)
EXPECTED = "a finite float32, true or false, the text of a category, or null"
_MISSING = ("NAType", "NaTType")  # the classes of pandas.NA and pandas.NaT, which is not imported for them


def value_of(value: Any) -> float | str | None:
    """Returns the value that an object of JSON, Python, NumPy or pandas stands for.

    None, NaN, pandas.NA and pandas.NaT are missing, which is None; true and false are 1 and 0.

    Raises:
        ValueError: another object, a number that float32 does not hold, or a text of more than 200 characters; the
            message says what was expected.
    """
    if type(value) is float and -LARGEST <= value <= LARGEST:  # most values; not NaN
        return value
    if value is None or type(value).__name__ in _MISSING:
        return None
    if isinstance(value, str):
        if len(value) > MOST_CHARACTERS:
            raise ValueError(f"a string of at most {MOST_CHARACTERS} characters")
        return value
    if not isinstance(value, (bool, int, float, np.number, np.bool_, Decimal)) or isinstance(value, np.complexfloating):
        raise ValueError(EXPECTED)
    try:
        number = float(value)
    except OverflowError:
        number = float("inf")
    if number != number:
        return None
    if abs(number) > LARGEST:
        raise ValueError(EXPECTED)
    return number
