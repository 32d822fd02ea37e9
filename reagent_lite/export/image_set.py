"""Raw states that are images: nested lists and arrays become matrices of bytes; numpy only."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reagent_lite.errors import BundleError, Problem, raise_any
from reagent_lite.id_values import IdFeature

IMAGE = "image"
_LARGEST = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSet:
    """The bytes of images as a matrix [N, S], in place of a `feature_set.FeatureSet`.

    Attributes:
        shape: shape of an image.
        ids: [S] numbers of the bytes.
        names, levels, id_features, first_columns: as in FeatureSet; an image has no features.
    """

    shape: tuple[int, ...]
    ids: tuple[int, ...]

    @property
    def names(self) -> tuple[str, ...]:  # noqa: D102
        return (IMAGE,)

    @property
    def levels(self) -> dict[str, tuple[str, ...]]:  # noqa: D102
        return {}

    @property
    def id_features(self) -> dict[str, IdFeature]:  # noqa: D102
        return {}

    @property
    def first_columns(self) -> dict[str, int]:  # noqa: D102
        return {}

    def others(self, values: NDArray[Any]) -> dict[int, int]:
        """Returns the numbers of values without a column; no byte is one."""
        return {}

    def of_maps(self, where: str, maps: Sequence[Any], *, ignore_unknown: bool = False) -> NDArray[np.uint8]:
        """Returns images [N, S] of N nested lists or arrays of integers from 0 to 255 in the images' shape, or bytes.

        Raises:
            BundleError: another shape, or other values; up to 20 at once.
        """
        problems: list[Problem] = []
        values = np.zeros((len(maps), len(self.ids)), np.uint8)
        for row, given in enumerate(maps):
            try:
                values[row] = self._bytes(f"{where}[{row}]", given, self.shape)
            except BundleError as error:
                problems += error.problems
        raise_any(problems, BundleError)
        return values

    def of_arrays(self, where: str, given: Any) -> NDArray[np.uint8]:
        """Returns images [N, S] of an array [N, *shape] or [N, S].

        Raises:
            BundleError: another shape, or values that are no integers from 0 to 255.
        """
        is_flat = isinstance(given, np.ndarray) and given.ndim == 2 and len(self.shape) > 1
        shape = (len(given), *((len(self.ids),) if is_flat else self.shape))
        return self._bytes(where, given, shape).reshape(len(given), -1)

    def _bytes(self, where: str, given: Any, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        if isinstance(given, bytes) and len(given) == len(self.ids):
            return np.frombuffer(given, np.uint8)
        expected = f"an image of shape {list(self.shape)}, integers from 0 to {_LARGEST}"
        if isinstance(given, Mapping | str | bytes):
            got = "features" if isinstance(given, Mapping) else f"a {type(given).__name__}"
            raise BundleError(Problem(where, expected, got, "Give it as nested lists, or as an array"))
        try:
            array = np.asarray(given)
        except ValueError:
            raise BundleError(Problem(where, expected, "lists of different lengths")) from None
        if array.shape != shape:
            raise BundleError(Problem(where, expected, f"shape {list(array.shape)}"))
        if array.dtype.kind not in "iu":
            got = "values that are no integers" if array.dtype.kind in "Ob" else f"values of type {array.dtype}"
            raise BundleError(Problem(where, expected, got))
        if array.dtype != np.uint8 and array.size and not (array.min() >= 0 and array.max() <= _LARGEST):
            wrong = array[(array < 0) | (array > _LARGEST)]
            raise BundleError(Problem(where, expected, f"{wrong[0]}"))
        return array.astype(np.uint8).reshape(-1) if array.shape == self.shape else array.astype(np.uint8, copy=False)


def shape_of_image(normalization: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Returns the shape of states by their part of normalization.json, or None if they have features."""
    text = normalization.get(IMAGE, "{}")
    parameters = json.loads(text) if isinstance(text, str) else text
    shape = (parameters.get("image") or {}).get("shape")
    return None if shape is None else tuple(shape)
