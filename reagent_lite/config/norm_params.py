"""`norm_params`: fit of the normalization if no file is given."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from reagent_lite.config.section import Count, LocalPath, Positive, Section
from reagent_lite.errors import Problem
from reagent_lite.feature_ids import id_of
from reagent_lite.types import FeatureType


class NormParams(Section):
    """How the types of features are identified and their statistics computed."""

    output_dir: LocalPath | None = None
    """Folder of the files state_features_norm.json and action_norm.json; absent: model_output_path."""
    cols_to_norm: tuple[Literal["state_features", "action"], ...] = ("state_features", "action")
    """Columns to fit if their file is not given."""
    num_samples: Annotated[int, Field(ge=20)] = 100_000
    """Number of sampled rows, and of sampled candidates, for shapes and quantiles; other statistics use all rows."""
    min_present_values: Count = 20
    """Least number of values of a feature. Rarer ones are left out, which one warning counts, unless all are rare or
    feature_overrides names them."""
    max_unique_enum_values: Count = 100
    """Largest number of values of an ENUM feature, whose values are non-negative integers, and of levels of a
    category."""
    whole_numbers: Literal["enum", "continuous"] = "enum"
    """Type of non-negative whole numbers other than 0 and 1. enum: ENUM with at most max_unique_enum_values values.
    continuous, the default of 2026 unless max_unique_enum_values is given: of these only with at most 10 values, or if
    the 10 most frequent are 95 % of the values; others are numbers like any other, so that ages never seen have a value
    between their neighbors'."""
    quantile_size: Annotated[int, Field(ge=2)] = 20
    """QUANTILE has quantile_size + 1 quantiles."""
    quantile_k2_threshold: Positive = 1000.0
    """D'Agostino-Pearson K^2 above which mean and stddev do not describe a feature."""
    skip_box_cox: bool = False
    """Never choose BOXCOX."""
    skip_quantiles: bool = True
    """Never choose QUANTILE."""
    feature_overrides: dict[str, str] = {}
    """{feature id or name: type}; other types are identified from the data."""

    def rules(self) -> Iterator[Problem]:
        """Yields a Problem for each override with an unknown type or feature id."""
        for feature, name in self.feature_overrides.items():
            where = f"feature_overrides.{feature}"
            try:
                id_of(feature)
            except ValueError as error:
                yield Problem(where, f"{error} as key", repr(feature))
            if name not in list(FeatureType):
                yield Problem(where, f"one of {', '.join(FeatureType)}", repr(name))
