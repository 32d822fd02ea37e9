"""Normalized columns of a training copy: computed once, memory-mapped by every process of the machine.

If one-hot columns would make the matrix larger than both the raw one and 256 MiB, rows are normalized by the same
module as they are gathered instead.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from reagent_lite.data.copy.spool import write_npy
from reagent_lite.data.sampling.source import FeatureColumns, tensor_of
from reagent_lite.types import NormalizationSpec
from reagent_lite.whole_files import appearing_file

_CHUNK_BYTES = 1 << 22  # a transform takes several times as much memory
_SMALL_BYTES = 1 << 28
_CPU = torch.device("cpu")


class Reordered(nn.Module):
    """Reorders raw columns to a normalization's column order, and normalizes them.

    Args:
        ids: feature ids of the raw columns; a feature of the normalization that is not among them is missing.
        spec: the normalization's columns.
        preprocessor: forward(values, presence) in that order.
    """

    def __init__(self, ids: tuple[int, ...], spec: NormalizationSpec, preprocessor: nn.Module) -> None:
        super().__init__()
        self.preprocessor = preprocessor
        position = {feature: i for i, feature in enumerate(ids)}
        self.order = nn.Buffer(torch.tensor([position.get(i, 0) for i in spec.feature_ids], dtype=torch.int64))
        self.absent = nn.Buffer(torch.tensor([i not in position for i in spec.feature_ids]))

    def forward(self, values: Tensor, presence: Tensor) -> Tensor:
        """Returns normalized columns [N, W] for raw columns [N, F]."""
        if not values.shape[1]:
            missing = values.new_full((len(values), len(self.order)), torch.nan)
            return self.preprocessor(missing, ~missing.isnan())  # type: ignore[no-any-return]
        present = presence.index_select(1, self.order) & ~self.absent
        return self.preprocessor(values.index_select(1, self.order), present)  # type: ignore[no-any-return]


def prepare_columns(matrix: np.ndarray[Any, Any], transform: nn.Module, width: int, file: Path) -> None:
    """Writes the normalized matrix to `file`, unless the file exists or would be too large.

    The file is in the folder of the raw matrix. Files of other normalizations there are removed.

    Args:
        matrix: [N, F] float32 memory map of raw values, NaN = absent.
        transform: forward(values, presence) -> [N, width].
        width: columns after normalization.
        file: named <matrix>_<normalization>.npy; appears by rename.
    """
    if file.exists() or len(matrix) * width * 4 > max(matrix.nbytes, _SMALL_BYTES):
        return
    for other in file.parent.glob(f"{file.name.rpartition('_')[0]}_*.npy"):
        other.unlink(missing_ok=True)
    raw = open_raw_columns(matrix)

    def chunks() -> Iterator[NDArray[np.float32]]:
        for rows in torch.split(raw.values, max(_CHUNK_BYTES // max(matrix.shape[1] * 4, 1), 1)):
            with torch.no_grad():
                yield transform(rows, ~rows.isnan()).numpy()
            raw.release()

    with appearing_file(file) as out:
        write_npy(out, np.float32, (len(matrix), width), chunks())


def open_columns(
    matrix: np.ndarray[Any, Any], transform: nn.Module, width: int, file: Path, device: torch.device
) -> FeatureColumns:
    """Returns the columns that prepare_columns wrote, on a device or memory-mapped.

    If there are none, rows are normalized as they are gathered.
    """
    with suppress(FileNotFoundError):
        return _columns(np.load(file, mmap_mode="r"), width, device, None)
    return _columns(matrix, width, device, transform.to(device))


def open_raw_columns(matrix: np.ndarray[Any, Any], device: torch.device = _CPU) -> FeatureColumns:
    """Returns the columns of a training copy's matrix as they are, NaN where absent, on a device or memory-mapped."""
    return _columns(matrix, matrix.shape[1], device, None)


def _columns(
    matrix: np.ndarray[Any, Any], width: int, device: torch.device, transform: nn.Module | None
) -> FeatureColumns:
    mapped = matrix if device.type == "cpu" else None
    return FeatureColumns(values=tensor_of(matrix, device), width=width, transform=transform, mapped=mapped)
