"""Summaries of columns, and normalizations, that a test writes down."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from reagent_lite.data.features.summary import ColumnSummary
from reagent_lite.data.rows.matrices import FeatureMatrix
from reagent_lite.types import FeatureSpec, NormalizationSpec


def spec_of(*features: FeatureSpec) -> NormalizationSpec:
    return NormalizationSpec.from_features({feature.feature_id: feature for feature in features})


def column(*features: npt.ArrayLike, ids: Sequence[int] = (), sampled: slice = slice(None)) -> ColumnSummary:
    """A column of these features, by default with the ids 0, 1, ... and with all rows in its sample."""
    values = np.stack([np.asarray(row, np.float32) for row in features], axis=1)
    ids, hashes = tuple(ids) or tuple(range(len(features))), np.arange(len(values), dtype=np.uint64)
    return replace(
        ColumnSummary.of(FeatureMatrix(ids, values), hashes, 100),
        hashes=hashes[sampled],
        sample=(FeatureMatrix(ids, values[sampled]),),
    )
