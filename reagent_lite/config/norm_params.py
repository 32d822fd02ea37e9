"""`norm_params`: how normalization is computed where no file is given."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from reagent_lite.config.section import Count, LocalPath, Positive, Section
from reagent_lite.errors import Problem
from reagent_lite.feature_ids import id_of
from reagent_lite.types import FeatureType


class NormParams(Section):
    """How feature types are identified and statistics are taken."""

    output_dir: LocalPath | None = None
    """Folder the computed files state_features_norm.json and action_norm.json go to; absent: model_output_path."""
    cols_to_norm: tuple[Literal["state_features", "action"], ...] = ("state_features", "action")
    """Columns to fit when their file is not given."""
    num_samples: Annotated[int, Field(ge=20)] = 100_000
    """Rows, and candidates, of the sample that shapes and quantiles are taken from; all rows give the rest."""
    max_unique_enum_values: Count = 100
    """A non-negative integer feature with at most so many values is ENUM; a category has at most so many levels."""
    quantile_size: Annotated[int, Field(ge=2)] = 20
    """QUANTILE has quantile_size + 1 quantiles."""
    quantile_k2_threshold: Positive = 1000.0
    """Above this D'Agostino-Pearson K^2 a feature is too far from normal for mean and stddev."""
    skip_box_cox: bool = False
    """Never choose BOXCOX."""
    skip_quantiles: bool = True
    """Never choose QUANTILE."""
    feature_overrides: dict[str, str] = {}
    """{feature id or name: type} for features whose type is known."""

    def rules(self) -> Iterator[Problem]:
        """Yields overrides that name no type or no feature id."""
        for feature, name in self.feature_overrides.items():
            where = f"feature_overrides.{feature}"
            try:
                id_of(feature)
            except ValueError as error:
                yield Problem(where, f"{error} as key", repr(feature))
            if name not in list(FeatureType):
                yield Problem(where, f"one of {', '.join(FeatureType)}", repr(name))
