"""The whole JSON of `workflows.normalize`: data, identification of its features, and reference data."""

from collections.abc import Iterator
from typing import Any, ClassVar

from reagent_lite.config.column_names import LogColumns
from reagent_lite.config.drift_limits import DriftConfig
from reagent_lite.config.embedding_config import Embeddings
from reagent_lite.config.items import ITEM_ID, WITHOUT_ITEMS, ItemId, Items, PossibleItems
from reagent_lite.config.loader import check, expand_config
from reagent_lite.config.norm_params import NormParams
from reagent_lite.config.paths import DataPath
from reagent_lite.config.section import NoEffect, Section, Seed, keys_of
from reagent_lite.config.workflow import DqnConfig, ParametricDqnConfig, WorkflowConfig, has_named_actions
from reagent_lite.errors import Problem

_OF_TRAINING = WorkflowConfig.model_fields.keys()


class NormalizeConfig(Section):
    """`python -m workflows.normalize`: finds type and statistics of every feature, and drift between two data sets.

    A training config is read as well: its data, columns, items and norm_params.
    """

    training_data_path: DataPath = ""
    """Events, transitions or the folder of a stage, in any format that training reads; a local path, a URL, or a list
    of several logs."""
    columns: LogColumns = {}
    items: Items = None
    item_id: ItemId = ITEM_ID
    possible_items: PossibleItems = None
    embeddings: Embeddings = {}
    reference_data_path: DataPath | None = None
    """Data to compare the training data with, feature by feature; absent: no drift report."""
    parametric: bool | None = None
    """Whether actions are candidates with features, which are normalized as well; absent: decided by the action
    column."""
    norm_params: NormParams = NormParams()
    """output_dir is required here: a separate folder, which this workflow creates and replaces; if it is the folder of
    the training file, the normalization files alone are written there."""
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

    @classmethod
    def tree_of(cls, tree: dict[str, Any]) -> dict[str, Any]:
        """Returns the JSON object of this workflow; of a training config, which has model_output_path, the same data.

        Raises:
            ConfigError: the training config has faults.
        """
        if "model_output_path" not in tree:
            return tree
        added = {name: value for name, value in tree.items() if name in cls.model_fields.keys() - _OF_TRAINING}
        model = DqnConfig if has_named_actions(tree) else ParametricDqnConfig
        training = expand_config(check(model, {name: value for name, value in tree.items() if name not in added}))
        data = {
            name: value
            for name, value in training["data"].items()
            if name in ("columns", "items", "item_id", "embeddings")
        }
        shared = {name: value for name, value in training.items() if name in cls.model_fields}
        return {**shared, **data, "parametric": model.parametric, **added}

    def rules(self) -> Iterator[Problem]:
        """Yields a Problem for each column that cannot be normalized."""
        columns = self.norm_params.cols_to_norm
        if self.parametric is False and columns and "state_features" not in columns:
            expected = "state_features among them while parametric is false"
            yield self.wrong("norm_params.cols_to_norm", expected, "Actions that are names have no features")
