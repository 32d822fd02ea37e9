"""Exported models whose values are a matrix product, so that NumPy computes what they choose."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers.transitions import code_of_text
from numpy.typing import NDArray
from onnxruntime import InferenceSession
from oracles.gridworld import Array
from torch import Tensor, nn

from reagent_lite.algorithms.bcq import BCQActionFilter
from reagent_lite.data.features.normalization_files import normalization_json
from reagent_lite.export.bundle_content import BundleContent, SampleRows
from reagent_lite.export.predictor import DiscretePredictor, ParametricPredictor
from reagent_lite.export.tolerance import Tolerance
from reagent_lite.export.writer import write_bundle
from reagent_lite.feature_ids import FeatureId, stacked_width
from reagent_lite.item_table import ItemTable
from reagent_lite.models.preprocessor import Preprocessor, build_preprocessor
from reagent_lite.rl.policies import Softmax, TargetPolicy
from reagent_lite.types import FeatureSpec, FeatureType, NormalizationSpec

PLAIN = Softmax(1.0)


class Linear(nn.Module):
    """q [N, K] = W state + bias; of candidates, features (W state + bias)."""

    def __init__(self, weight: Array, bias: Array | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.as_tensor(weight).float())
        self.bias = nn.Parameter(torch.as_tensor(np.zeros(len(weight)) if bias is None else bias).float())

    def forward(self, state: Tensor, mask: Tensor, features: Tensor | None) -> Tensor:
        values = nn.functional.linear(state, self.weight, self.bias)
        return values if features is None else (features * values.unsqueeze(1)).sum(2)


class Habit(nn.Module):
    """Logits [N, K, 1] of a log that takes its choices with the same probabilities in every state."""

    def __init__(self, probabilities: Sequence[float]) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(probabilities).log())

    def forward(self, state: Tensor, mask: Tensor, features: Tensor | None = None) -> Tensor:
        return self.logits.expand(mask.shape).unsqueeze(2)


class Taste(nn.Module):
    """Logits [N, K, 1] of a log that takes a candidate as often as e to its first feature."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, state: Tensor, mask: Tensor, features: Tensor | None = None) -> Tensor:
        return features[:, :, :1] * self.scale


def raw(ids: tuple[int, ...]) -> NormalizationSpec:
    """Features as they are, in the order of ids: the first is CONTINUOUS with mean 0 and deviation 1."""
    kinds = [FeatureType.CONTINUOUS] + [FeatureType.DO_NOT_PREPROCESS] * (len(ids) - 1)
    return NormalizationSpec(
        tuple(FeatureSpec(feature_id=i, feature_type=kind) for i, kind in zip(ids, kinds, strict=True))
    )


def linear_bundle(
    folder: Path,
    weight: Array,
    names: tuple[str, ...],
    ids: tuple[int, ...],
    restriction: BCQActionFilter | None = None,
    policy: TargetPolicy = PLAIN,
    columns: dict[str, Any] | None = None,
    history: int = 1,
) -> Path:
    """Writes a model with q = weight [K, S] @ state, whose S columns are the features `ids`, or those of `history`."""
    predictor = DiscretePredictor(
        build_preprocessor(replace(raw(ids), history=history)),
        Linear(weight),
        state_feature_ids=ids,
        action_names=names,
        policy=policy,
        restriction=restriction,
    )
    about = content("dqn", SampleRows(values=sample(stacked_width(len(ids), history))), state=raw(ids))
    return write_bundle(folder, predictor, content=replace(about, config={"data": {"columns": columns or {}}}))


def bilinear_bundle(
    folder: Path,
    weight: Array,
    ids: tuple[int, ...],
    action_ids: tuple[int, ...],
    items: ItemTable | None = None,
) -> Path:
    """Writes a model of candidates, or of items, with q_k = features_k @ weight [F, S] @ state."""
    predictor = ParametricPredictor(
        Preprocessor(raw(ids)),
        Preprocessor(raw(action_ids)),
        Linear(weight),
        state_feature_ids=ids,
        action_feature_ids=action_ids,
        policy=PLAIN,
    )
    rows = SampleRows(
        values=sample(len(ids)), candidates=np.ones((4, 2, len(action_ids)), np.float32), mask=np.ones((4, 2), bool)
    )
    about = content("parametric_dqn", rows, state=raw(ids), action=raw(action_ids))
    config = {"data": {"items": "items.jsonl", "item_id": "item_id"}} if items is not None else {}
    return write_bundle(folder, predictor, content=replace(about, items=items, config=config))


CATEGORIES = NormalizationSpec(
    (
        FeatureSpec(feature_id=FeatureId("age"), feature_type=FeatureType.CONTINUOUS),
        FeatureSpec(feature_id=3, feature_type=FeatureType.ENUM, possible_values=(2.0, 5.0)),
        FeatureSpec(
            feature_id=FeatureId("country"),
            feature_type=FeatureType.ENUM,
            possible_values=(float(code_of_text("DE")), float(code_of_text("FR"))),
            levels=("DE", "FR"),
        ),
    )
)
"""Columns: age, 3 is 2, 3 is 5, country is DE, country is FR."""


def category_bundle(folder: Path, weight: Array, names: tuple[str, ...]) -> Path:
    """Writes a model with q = weight [K, 5] @ the columns of CATEGORIES."""
    predictor = DiscretePredictor(
        Preprocessor(CATEGORIES),
        Linear(weight),
        state_feature_ids=CATEGORIES.feature_ids,
        action_names=names,
        policy=PLAIN,
    )
    values = np.stack(
        (
            [0.5, -1.0, 2.0, 0.0],
            [2, 5, 7, np.nan],
            [code_of_text("DE"), code_of_text("FR"), code_of_text("US"), np.nan],
        ),
        axis=1,
    ).astype(np.float32)
    return write_bundle(folder, predictor, content=content("dqn", SampleRows(values=values), state=CATEGORIES))


def category_candidates_bundle(folder: Path) -> Path:
    """Writes a model of candidates with q_k = 1 where the candidate's country is DE, 2 where it is FR, else 0."""
    action = NormalizationSpec(CATEGORIES.features[2:])
    predictor = ParametricPredictor(
        Preprocessor(raw((7,))),
        Preprocessor(action),
        Linear(np.zeros((2, 1)), np.array([1.0, 2.0])),
        state_feature_ids=(7,),
        action_feature_ids=action.feature_ids,
        policy=PLAIN,
    )
    rows = SampleRows(
        values=sample(1),
        candidates=np.array([[[code_of_text("DE")], [code_of_text("FR")]]] * 4, np.float32),
        mask=np.ones((4, 2), bool),
    )
    return write_bundle(folder, predictor, content=content("parametric_dqn", rows, state=raw((7,)), action=action))


def graph_outputs(folder: Path, *inputs: NDArray[Any]) -> list[NDArray[Any]]:
    """Outputs of a bundle's bare graph: q, greedy choices, propensities and allowed choices."""
    session = InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    return session.run(None, dict(zip([tensor.name for tensor in session.get_inputs()], inputs, strict=True)))


def sample(columns: int) -> NDArray[np.float32]:
    return np.random.default_rng(0).normal(size=(4, columns)).astype(np.float32)


def content(workflow: str, rows: SampleRows, **columns: NormalizationSpec) -> BundleContent:
    return BundleContent(
        workflow=workflow,
        normalization={name: normalization_json(spec) for name, spec in columns.items()},
        config={},
        evaluation={},
        steps=1,
        data_hash="d" * 64,
        config_hash="c" * 64,
        versions={"torch": torch.__version__},
        git_revision=None,
        tolerance=Tolerance(atol=1e-6, rtol=5e-5, ratio_different=0.0),
        sample=rows,
    )
