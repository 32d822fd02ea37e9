"""Summaries of columns that a test writes down."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from reagent_lite.data.features.summary import ColumnSummary
from reagent_lite.data.rows.maps import FeatureMatrix


def column(*features: npt.ArrayLike, ids: Sequence[int] = (), most_distinct: int = 100) -> ColumnSummary:
    """A column of these features, from id 0 on, all rows of which are its sample."""
    values = np.stack([np.asarray(one, np.float32) for one in features], axis=1)
    matrix = FeatureMatrix(tuple(ids) or tuple(range(len(features))), values)
    return ColumnSummary.of(matrix, np.arange(len(values), dtype=np.uint64), most_distinct)
