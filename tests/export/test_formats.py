"""Every format against the live network with every feature type, real networks and missing features."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import reagent_lite
from reagent_lite.algorithms.bcq import BCQActionFilter
from reagent_lite.distributed import group
from reagent_lite.distributed.group import Group, ProcessRanks
from reagent_lite.errors import BundleError
from reagent_lite.export.bundle_content import SampleRows
from reagent_lite.export.formats import FORMATS
from reagent_lite.export.predictor import DiscretePredictor, ParametricPredictor, Predictor
from reagent_lite.export.tolerance import Tolerance
from reagent_lite.export.writer import check_batches, check_file, graph_inputs
from reagent_lite.models.preprocessor import Preprocessor
from reagent_lite.models.q_networks import NetworkSettings, build_q_network
from reagent_lite.models.value_heads import CategoricalHead, QuantileHead, ScalarHead, Scorer
from reagent_lite.rl.policies import EpsilonGreedy, Softmax
from reagent_lite.types import FeatureSpec, FeatureType, NormalizationSpec, SourceSpec

TIGHT = Tolerance(atol=1e-5, rtol=0.0, ratio_different=0.0)
SPEC = NormalizationSpec((
    FeatureSpec(feature_id=10, feature_type=FeatureType.BINARY),
    FeatureSpec(feature_id=11, feature_type=FeatureType.PROBABILITY),
    FeatureSpec(feature_id=12, feature_type=FeatureType.CONTINUOUS, mean=1.0, stddev=2.0),
    FeatureSpec(feature_id=21, feature_type=FeatureType.CONTINUOUS, mean=1e6 + 0.03, stddev=0.1),
    FeatureSpec(feature_id=13, feature_type=FeatureType.BOXCOX, boxcox_lambda=0.5, boxcox_shift=1.0, mean=0.5),
    FeatureSpec(feature_id=14, feature_type=FeatureType.ENUM, possible_values=(12.0, 4.0, 2.0)),
    FeatureSpec(feature_id=20, feature_type=FeatureType.ENUM),  # of no width
    FeatureSpec(feature_id=15, feature_type=FeatureType.QUANTILE, quantiles=(0.0, 0.8, 1.0)),
    FeatureSpec(feature_id=16, feature_type=FeatureType.CONTINUOUS_ACTION, min_value=-1.0, max_value=3.0),
    FeatureSpec(feature_id=17, feature_type=FeatureType.DISCRETE_ACTION),
    FeatureSpec(feature_id=18, feature_type=FeatureType.DO_NOT_PREPROCESS),
    FeatureSpec(feature_id=19, feature_type=FeatureType.CLIP_LOG),
))  # fmt: skip
ACTIVATIONS = ("linear", "relu", "leaky_relu", "tanh", "sigmoid", "elu", "gelu", "selu", "silu")
HEADS = {
    "scalar": (ScalarHead(), Softmax(0.01)),
    "probability": (ScalarHead("bce_with_logits"), Softmax(0.01)),
    "c51": (CategoricalHead(5, -2.0, 3.0), EpsilonGreedy(0.05)),
    "quantile": (QuantileHead(4), EpsilonGreedy()),
}
"""Each beside the policy it is tested with."""


def predictor_of(head: str, *, candidates: bool, dueling: bool, restricted: bool) -> Predictor:
    """A predictor with every activation and dropout, of candidates with batch normalization."""
    source = {"num_action_features": SPEC.width} if candidates else {"action_names": ("a", "b", "c")}
    spec = SourceSpec(num_state_features=SPEC.width, **source)  # type: ignore[arg-type]
    values, policy = HEADS[head]
    settings = NetworkSettings(
        hidden=(4,) * len(ACTIVATIONS),
        activations=ACTIVATIONS,
        dueling=dueling,
        outputs=values.outputs,
        dropout=0.5,
        batch_norm=candidates,
    )
    torch.manual_seed(0)
    parts: dict[str, Any] = {"state_feature_ids": SPEC.feature_ids, "policy": policy}
    scorer = Scorer(build_q_network(spec, settings), values)
    if restricted:
        behavior_cloning = build_q_network(spec, NetworkSettings(hidden=(16,), activations=("relu",), batch_norm=True))
        parts["restriction"] = BCQActionFilter(behavior_cloning, 0.4)
    made: Predictor = (
        ParametricPredictor(
            Preprocessor(SPEC, missing_as_zero=dueling),
            Preprocessor(SPEC, missing_as_zero=dueling),
            scorer,
            action_feature_ids=SPEC.feature_ids,
            **parts,
        )
        if candidates
        else DiscretePredictor(
            Preprocessor(SPEC, missing_as_zero=dueling), scorer, action_names=spec.action_names, **parts
        )
    )
    return made.eval().requires_grad_(False)


def raw(rng: np.random.Generator, *shape: int) -> np.ndarray:
    values = rng.uniform(-1, 2, size=(*shape, len(SPEC.features))).astype(np.float32)
    values[..., 0] = rng.integers(0, 2, size=shape)
    values[..., 5] = rng.choice([2, 4, 12, 5], size=shape)
    values[..., 3] = 1e6 + rng.integers(-16, 17, size=shape) / 16
    values[rng.random(values.shape) < 0.2] = np.nan
    values[0, ..., 2] = np.float32(-1337.1337)
    return values


def sample_of(candidates: bool) -> SampleRows:
    rng = np.random.default_rng(1)
    lists = {"candidates": raw(rng, 40, 5), "mask": rng.random((40, 5)) < 0.7} if candidates else {}
    return SampleRows(values=raw(rng, 40), **lists)


def check_files(predictor: Predictor, sample: SampleRows, folder: Path) -> None:
    """Files have the live network's values on every batch, not those of other weights, and no path of this machine."""
    batches = list(check_batches(graph_inputs(predictor, sample), np.random.default_rng(2)))
    assert [len(batch[0]) for batch in batches] == [len(sample.values), 1, 1000, 1]
    other = copy.deepcopy(predictor)
    for parameter in other.scorer.parameters():
        parameter.mul_(1.5)
    for entry in FORMATS.values():
        file = folder / entry.file
        entry.write(predictor, file)
        assert check_file(entry.file, entry.replay(predictor, file), batches, TIGHT) <= 1e-5
        with pytest.raises(BundleError, match="Nothing was exported"):
            check_file(entry.file, entry.replay(other, file), batches[:1], TIGHT)
        assert str(Path(reagent_lite.__file__).parent).encode() not in file.read_bytes()


@pytest.mark.parametrize(
    ("head", "candidates", "dueling"),
    [
        (head, candidates, candidates == (number % 2 == 0))
        for number, head in enumerate(HEADS)
        for candidates in (False, True)
    ],
)
def test_every_format_equals_the_live_network(
    head: str, candidates: bool, dueling: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    restricted = head != "scalar"
    predictor = predictor_of(head, candidates=candidates, dueling=dueling, restricted=restricted)
    inputs = graph_inputs(predictor, sample_of(candidates))
    excluded = inputs[-1] & ~predictor(*inputs)[3]
    assert (excluded.any(), excluded.all(1).any()) == (restricted, False)
    check_files(predictor, sample_of(candidates), tmp_path)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("candidates", [False, True])
def test_batch_normalization_over_gpus_is_evaluated_and_exported(
    candidates: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process of each GPU: DistributedDataParallel itself needs one, what is done to the learner does not."""
    monkeypatch.setattr(group, "DistributedDataParallel", lambda module, **_: module)
    predictor = predictor_of("c51", candidates=candidates, dueling=False, restricted=True)
    inputs = graph_inputs(predictor, sample_of(candidates))
    alone = predictor(*inputs)
    wrapped = Group(ProcessRanks(0, 2, 0, 2), torch.device("cuda")).wrap(predictor)
    torch.testing.assert_close(wrapped(*inputs), alone, rtol=0, atol=0, equal_nan=True)
    check_files(predictor, sample_of(candidates), tmp_path)


def test_tolerance_is_relative_to_the_largest_live_q() -> None:
    tolerance = Tolerance(atol=1e-3, rtol=5e-5, ratio_different=0.0)
    live = np.array([0.0, -10.0], dtype=np.float32)  # limit 1e-3 + 5e-5 * 10 = 1.5e-3
    assert tolerance.compare("x", live, np.array([1.4e-3, -10.0], dtype=np.float32), "") == pytest.approx(1.4e-3)
    for value, words in ((1.6e-3, r"1 of 2, the furthest by 0\.0016"), (np.nan, "1 of 2")):
        with pytest.raises(BundleError, match=words):
            tolerance.compare("x", live, np.array([value, -10.0], dtype=np.float32), "")
