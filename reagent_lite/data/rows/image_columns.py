"""A column of images as a matrix of bytes [n, S].

bytes of length S ─────────────────────┐
lists of S integers ───────────────────┼─► uint8 [n, S]
lists in lists, in the image's shape ──┘
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from reagent_lite.data.formats.schema import fill_nulls
from reagent_lite.data.rows.block_columns import Column, float64, is_number
from reagent_lite.data.rows.faults import Faults
from reagent_lite.data.rows.matrices import FeatureMatrix, Mask
from reagent_lite.types import Image

_LARGEST = 255


def read_images(column: Column, faults: Faults, image: Image) -> tuple[FeatureMatrix, Mask]:
    """Returns (images as features 0 to S - 1 of type uint8, 0 where null; [n] whether the row has an image).

    Args:
        column: [n] bytes, lists, fixed-size lists and tensors of Arrow, or JSON texts of lists.
        faults: the faults of the block; values that are no such image are faults.
        image: shape of the images.
    """
    array = column.array.storage if isinstance(column.array, pa.ExtensionArray) else column.array
    present = column.present
    values = np.zeros((len(array), image.size), np.uint8)
    rows = np.flatnonzero(present)
    whole = np.zeros(len(rows), bool)
    kind = array.type
    if column.text:
        whole, pixels = _from_texts(array.take(pa.array(rows)), image)
    elif pa.types.is_fixed_size_binary(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        whole, pixels = _from_bytes(array.take(pa.array(rows)), image)
    elif _is_list(kind):
        whole, pixels = _from_lists(array.take(pa.array(rows)), image)
    if whole.any():
        values[rows[whole]] = pixels
    wrong = np.zeros(len(array), bool)
    wrong[rows[~whole]] = True
    shape = " x ".join(map(str, image.shape))
    expected = (
        f"an image of {shape} integers from 0 to {_LARGEST} in {column.name}, as nested lists, as one list, or as bytes"
    )
    column.fault(faults, wrong, expected, rule=f"{column.name}_unreadable")
    return FeatureMatrix(tuple(range(image.size)), values), present


def _is_list(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _from_bytes(array: pa.Array, image: Image) -> tuple[Mask, NDArray[np.uint8]]:
    """Returns ([n] whether each value is an image, the bytes of those that are)."""
    whole: Mask = np.asarray(pc.binary_length(array)) == image.size
    kept = array.filter(pa.array(whole)).cast(pa.binary(image.size))
    data = kept.buffers()[1]
    pixels = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
    return whole, pixels[kept.offset * image.size :][: len(kept) * image.size].reshape(-1, image.size)


def _from_lists(array: pa.Array, image: Image) -> tuple[Mask, NDArray[np.uint8]]:
    """Returns the same for lists; a list of another length at any level is no image."""
    levels = 0
    kind = array.type
    while _is_list(kind):
        kind = kind.value_type
        levels += 1
    sizes = (image.size,) if levels == 1 else image.shape
    whole = np.ones(len(array), bool)
    if levels != len(sizes) or not is_number(kind) or pa.types.is_boolean(kind):
        return ~whole, np.zeros((0, image.size), np.uint8)
    flat = array
    row = np.arange(len(array))
    for size in sizes:
        whole[row[np.asarray(fill_nulls(pc.list_value_length(flat), -1)) != size]] = False
        flat = flat.filter(pa.array(whole[row])).flatten()
        row = np.repeat(row[whole[row]], size)
    if kind == pa.uint8() and not flat.null_count:
        numbers: NDArray[Any] = flat.to_numpy(zero_copy_only=False)
    else:
        numbers = float64(flat)
        whole[row[~_are_bytes(numbers)]] = False
        numbers = numbers[whole[row]]
    return whole, numbers.astype(np.uint8).reshape(-1, image.size)


def _from_texts(array: pa.Array, image: Image) -> tuple[Mask, NDArray[np.uint8]]:
    """Returns the same for JSON texts."""
    images = [_image_of(json.loads(text), image) for text in array.to_pylist()]
    kept = [pixels for pixels in images if pixels is not None]
    return np.array([pixels is not None for pixels in images], bool), np.array(kept, np.uint8).reshape(-1, image.size)


def _image_of(value: Any, image: Image) -> NDArray[np.uint8] | None:
    try:
        array = np.asarray(value)
    except ValueError:  # lists of different lengths
        return None
    if array.dtype.kind not in "iuf" or array.shape not in (image.shape, (image.size,)):
        return None
    return array.astype(np.uint8).reshape(-1) if _are_bytes(array).all() else None


def _are_bytes(numbers: NDArray[Any]) -> Mask:
    in_range: Mask = (numbers >= 0) & (numbers <= _LARGEST) & (numbers == np.floor(numbers))
    return in_range
