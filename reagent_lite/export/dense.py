"""What callers hand over, checked and made dense: arrays or sparse maps in, float32 arrays with NaN for missing out.

numpy only. Every refusal says where, what was expected and what came.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reagent_lite.errors import BundleError, Problem, raise_any

FeatureMap = Mapping[str, float | None] | Mapping[int, float | None]


def numbers(where: str, given: Any, shape: tuple[int | None, ...]) -> NDArray[np.float32]:
    """Returns a float32 array.

    Args:
        where: name of the argument, for the message.
        given: anything numpy makes an array of; NaN for missing.
        shape: expected sizes, None where any is right.

    Raises:
        BundleError: for another shape and for what is no real number.
    """
    array = _array(where, given)
    if array.dtype.kind not in "fiu":
        raise BundleError(Problem(where, "real numbers, NaN where missing", f"an array of {array.dtype}"))
    _check_shape(where, array, shape)
    with np.errstate(over="ignore"):
        return array.astype(np.float32)


def flags(where: str, given: Any, shape: tuple[int | None, ...]) -> NDArray[np.bool_]:
    """Returns a bool array; arguments and errors as of `numbers`."""
    array = _array(where, given)
    if array.dtype != np.bool_:
        raise BundleError(Problem(where, "an array of bool", f"an array of {array.dtype}"))
    _check_shape(where, array, shape)
    return array


def refuse_infinity(where: str, values: NDArray[np.float32], presence: NDArray[np.bool_]) -> None:
    """Raises BundleError when a present value is infinite, or was larger than float32 holds."""
    bad = np.argwhere(np.isinf(values) & presence)
    if bad.size:
        place = f"{where}{[int(i) for i in bad[0]]}"
        raise BundleError(Problem(place, "a finite float32, or NaN where missing", f"{values[tuple(bad[0])]}"))


def from_maps(where: str, maps: Sequence[FeatureMap], feature_ids: Sequence[int]) -> NDArray[np.float32]:
    """Returns [N, F] of N sparse maps {feature id: value}; absent and null are NaN.

    Raises:
        BundleError: for an id the model does not read, and for a value that is no number; up to 20 at once.
    """
    columns = {str(feature_id): column for column, feature_id in enumerate(feature_ids)}
    dense = np.full((len(maps), len(feature_ids)), np.nan)
    problems: list[Problem] = []
    for row, sparse in enumerate(maps):
        if not isinstance(sparse, Mapping):
            problems.append(Problem(f"{where}[{row}]", "a map {feature id: number}", repr(sparse)))
            continue
        for key, value in sparse.items():
            place = f"{where}[{row}]"
            if str(key) not in columns:
                advice = "A model cannot use a feature it was not trained on: leave it out, or train with it"
                problems.append(Problem(place, f"feature ids among {_listed(columns)}", repr(key), advice))
            elif isinstance(value, bool) or not isinstance(value, int | float | np.number | None):
                problems.append(Problem(f"{place}, feature {key}", "a number or null", repr(value)))
            elif value is not None:
                dense[row, columns[str(key)]] = value
    raise_any(problems, BundleError)
    with np.errstate(over="ignore"):
        return dense.astype(np.float32)


def padded(where: str, lists: Sequence[Any], num_features: int) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Joins candidate lists of varying length.

    Returns:
        [N, K, F] with NaN in the padding, K the longest list and at least 1; and [N, K] bool, false in the padding.
    """
    arrays = [
        numbers(f"{where}[{row}]", one if len(one) else np.empty((0, num_features)), (None, num_features))
        for row, one in enumerate(lists)
    ]
    longest = max([1, *(len(array) for array in arrays)])
    values = np.full((len(arrays), longest, num_features), np.nan, dtype=np.float32)
    exists = np.zeros((len(arrays), longest), dtype=np.bool_)
    for row, array in enumerate(arrays):
        values[row, : len(array)] = array
        exists[row, : len(array)] = True
    return values, exists


def _array(where: str, given: Any) -> NDArray[Any]:
    try:
        return np.asarray(given)
    except ValueError as error:
        raise BundleError(Problem(where, "rows of equal length", str(error))) from error


def _check_shape(where: str, array: NDArray[Any], shape: tuple[int | None, ...]) -> None:
    fits = array.ndim == len(shape) and all(s is None or s == n for s, n in zip(shape, array.shape, strict=True))
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise BundleError(Problem(where, f"shape [{wanted}]", f"{list(array.shape)}"))


def _listed(columns: Mapping[str, int]) -> str:
    names = list(columns)
    return ", ".join(names[:30]) + (f" and {len(names) - 30} more" if len(names) > 30 else "")
