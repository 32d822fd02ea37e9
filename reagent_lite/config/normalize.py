"""The whole JSON of `workflows.normalize`: data, identification of its features, and reference data."""

from collections.abc import Iterator
from typing import ClassVar

from reagent_lite.config.columns import LogColumns
from reagent_lite.config.drift import DriftConfig
from reagent_lite.config.items import ITEM_ID, WITHOUT_ITEMS, ItemId, Items, PossibleItems
from reagent_lite.config.norm_params import NormParams
from reagent_lite.config.paths import DataPath
from reagent_lite.config.section import NoEffect, Section, Seed, keys_of
from reagent_lite.errors import Problem


class NormalizeConfig(Section):
    """`python -m workflows.normalize`: finds type and statistics of every feature, and drift between two data sets."""

    training_data_path: DataPath = ""
    """Events, transitions or the folder of a stage, in any format that training reads; a local path, a URL, or a list
    of several logs."""
    columns: LogColumns = {}
    items: Items = None
    item_id: ItemId = ITEM_ID
    possible_items: PossibleItems = None
    reference_data_path: DataPath | None = None
    """Data to compare the training data with, feature by feature; absent: no drift report."""
    parametric: bool | None = None
    """Whether actions are candidates with features, which are normalized as well; absent: decided by the action
    column."""
    norm_params: NormParams = NormParams()
    """output_dir is required here: a separate folder, which this workflow creates and replaces."""
    drift: DriftConfig = DriftConfig()
    seed: Seed = 0
    """Seed of the sample for shapes and quantiles."""

    required: ClassVar = {
        "training_data_path": ("a path",),
        "norm_params.output_dir": ("a path", "Name a new folder, such as outputs/normalization"),
        "norm_params.cols_to_norm": ("state_features, action or both",),
    }
    no_effect: ClassVar[tuple[NoEffect, ...]] = (
        NoEffect(
            lambda config: config.reference_data_path is None,
            keys_of("drift", DriftConfig),
            "its default without reference_data_path",
            "There is nothing to compare with",
        ),
        NoEffect(lambda config: config.parametric is False, ("items",), "absent while parametric is false"),
        WITHOUT_ITEMS,
    )

    def rules(self) -> Iterator[Problem]:
        """Yields columns that cannot be normalized."""
        columns = self.norm_params.cols_to_norm
        if self.parametric is False and columns and "state_features" not in columns:
            expected = "state_features among them while parametric is false"
            yield self.wrong("norm_params.cols_to_norm", expected, "Actions that are names have no features")
