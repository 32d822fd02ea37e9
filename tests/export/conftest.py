"""Predictors whose values are computed by hand, and the bundles exported from them once per session.

The discrete one reads features 7 (BINARY, b) and 4 (CONTINUOUS, z = (x - 1) / 2), columns in that order, and gives
    q = (b + z, 2 z, 1 - b)     for actions "left", "right", "stay", and acts epsilon-greedily at epsilon 0.3.
The parametric one reads state feature 3 (s) and candidate feature 9 (f), both DO_NOT_PREPROCESS, and gives
    q_k = s + f_k - mean of f over the allowed candidates.
The restricted ones are these, for a log that takes the actions with 0.5, 0.04 and 0.46 in every state, and a candidate
as often as e^f; a choice needs 0.1 times the largest probability.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from math import nan as NAN
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.bundles import Habit, Linear, Taste, content
from torch import Tensor, nn

from reagent_lite.algorithms.bcq import BCQActionFilter
from reagent_lite.export.bundle_content import BundleContent, SampleRows
from reagent_lite.export.predictor import DiscretePredictor, ParametricPredictor, Predictor
from reagent_lite.export.tolerance import Tolerance
from reagent_lite.export.writer import write_bundle
from reagent_lite.models.preprocessor import Preprocessor
from reagent_lite.rl.policies import EpsilonGreedy, Softmax
from reagent_lite.types import FeatureSpec, FeatureType, NormalizationSpec


class CentredScorer(nn.Module):
    needs_candidate_list = True

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, state: Tensor, mask: Tensor, features: Tensor | None) -> Tensor:
        assert features is not None
        allowed = mask.to(state.dtype)
        f = features[:, :, 0] * self.scale
        return state[:, :1] + f - ((f * allowed).sum(1, keepdim=True) / allowed.sum(1, keepdim=True).clamp(min=1))


def discrete(**parts: Any) -> DiscretePredictor:
    spec = NormalizationSpec((
        FeatureSpec(feature_id=7, feature_type=FeatureType.BINARY),
        FeatureSpec(feature_id=4, feature_type=FeatureType.CONTINUOUS, mean=1.0, stddev=2.0),
    ))  # fmt: skip
    scorer = Linear(np.array([[1, 1], [0, 2], [-1, 0]]), np.array([0, 0, 1]))
    given: dict[str, Any] = {"state_feature_ids": (7, 4), "action_names": ("left", "right", "stay")}
    return DiscretePredictor(Preprocessor(spec), scorer, **{**given, "policy": EpsilonGreedy(0.3), **parts})


def parametric(**parts: Any) -> ParametricPredictor:
    state, action = (
        Preprocessor(NormalizationSpec((FeatureSpec(feature_id=number, feature_type=FeatureType.DO_NOT_PREPROCESS),)))
        for number in (3, 9)
    )
    given: dict[str, Any] = {"state_feature_ids": (3,), "action_feature_ids": (9,), "policy": EpsilonGreedy(0.3)}
    return ParametricPredictor(state, action, CentredScorer(), **{**given, **parts})


DISCRETE = replace(
    content("dqn", SampleRows(values=np.array([[1, 5], [0, NAN], [NAN, 1], [NAN, NAN], [1, -3]], dtype=np.float32))),
    normalization={"state": {"7": json.dumps({"feature_type": "BINARY"}), "4": json.dumps({"mean": 1.0})}},
    evaluation={"reward": {"value": 1.5, "lower": NAN}},
    steps=12,
    tolerance=Tolerance(atol=0.0, rtol=5e-5, ratio_different=0.0),
)
LISTS = SampleRows(
    values=np.array([[0.5], [NAN], [0.5]], dtype=np.float32),
    candidates=np.array([[[1], [2], [NAN]], [[4], [5], [6]], [[7], [NAN], [NAN]]], dtype=np.float32),
    mask=np.array([[True, True, True], [True, False, True], [True, False, False]]),
)


@pytest.fixture
def discrete_predictor() -> DiscretePredictor:
    return discrete()


@pytest.fixture
def discrete_content() -> BundleContent:
    return DISCRETE


def exported(name: str, make: Callable[..., Predictor], **parts: Any) -> Any:
    """A fixture: the folder of a predictor with these parts, written once."""
    rows = DISCRETE if make is discrete else replace(DISCRETE, workflow="parametric_dqn", sample=LISTS)

    @pytest.fixture(scope="session", name=name)
    def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
        return write_bundle(tmp_path_factory.mktemp("bundle") / "made" / "model", make(**parts), content=rows)

    return folder


discrete_folder = exported("discrete_folder", discrete)
softmax_folder = exported("softmax_folder", discrete, policy=Softmax(2.0))
restricted_folder = exported("restricted_folder", discrete, restriction=BCQActionFilter(Habit([0.5, 0.04, 0.46]), 0.1))
parametric_folder = exported("parametric_folder", parametric)
restricted_parametric_folder = exported(
    "restricted_parametric_folder", parametric, restriction=BCQActionFilter(Taste(), 0.1)
)


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[Path], Path]:
    """Copies a bundle to a place where it may be damaged."""
    return lambda folder: Path(shutil.copytree(folder, tmp_path / "copied"))
