"""The whole JSON of `workflows.normalize`: data, how to identify its features, and what to compare it with."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from reagent_lite.config.columns import Columns, column_problems
from reagent_lite.config.drift import DriftConfig
from reagent_lite.config.norm_params import NormParams
from reagent_lite.config.section import Section
from reagent_lite.errors import Problem


class NormalizeConfig(Section):
    """`python -m workflows.normalize`: type and statistics of every feature, and drift between two data sets."""

    training_data_path: str = ""
    """Events, transitions or a stage's folder, in any format that training reads; local path or URL."""
    columns: Columns = {}
    """The log's own names for columns of the contract, as data.columns of training."""
    reference_data_path: str | None = None
    """Data that the training data is compared with, feature by feature; absent: no drift report."""
    parametric: bool | None = None
    """Whether actions are candidates with features, which are normalized too; absent: as the action column is."""
    norm_params: NormParams = NormParams()
    """output_dir is a folder of its own, which this workflow makes and replaces."""
    drift: DriftConfig = DriftConfig()
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Of the sample that shapes and quantiles are judged on."""

    def problems(self, path: str = "") -> Iterator[Problem]:
        """Yields everything wrong beyond single keys, in this section and below."""
        yield from column_problems("columns", self.columns)
        if not self.training_data_path:
            yield Problem("training_data_path", "a path", "nothing")
        where, folder = "norm_params.output_dir", self.norm_params.output_dir
        if not folder:
            yield Problem(where, "a path", "nothing", "A folder of its own, such as outputs/normalization")
        columns = self.norm_params.cols_to_norm
        if not columns:
            yield Problem("norm_params.cols_to_norm", "state_features, action or both", "[]")
        elif self.parametric is False and "state_features" not in columns:
            yield Problem("norm_params.cols_to_norm", "state_features among them while parametric is false",
                          str(list(columns)), "Actions that are names have no features")  # fmt: skip
        if self.reference_data_path is None:
            for key in self.drift.changed:
                yield Problem(f"drift.{key}", "its default without reference_data_path", str(getattr(self.drift, key)),
                              "There is nothing to compare with")  # fmt: skip
        yield from self.norm_params.problems("norm_params")
        yield from self.drift.problems("drift")
