"""Every format against the live network with every feature type, real networks and missing features."""

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import reagent_lite
from reagent_lite.errors import BundleError
from reagent_lite.export.content import SampleRows
from reagent_lite.export.formats import FORMATS, ExportFormat
from reagent_lite.export.predictor import DiscretePredictor, ParametricPredictor, Predictor
from reagent_lite.export.tolerance import Tolerance
from reagent_lite.export.writer import check_batches, check_file, check_live, graph_inputs
from reagent_lite.models.preprocessor import Preprocessor
from reagent_lite.models.q_networks import NetworkSettings, build_q_network
from reagent_lite.models.restrictions import LikelyInTheLog
from reagent_lite.models.value_heads import CategoricalHead, QuantileHead, ScalarHead, Scorer
from reagent_lite.rl.policies import EpsilonGreedy, Softmax, TargetPolicy
from reagent_lite.types import FeatureSpec, FeatureType, NormalizationSpec, SourceSpec

SOFTMAX, EXPLORING = Softmax(0.01), EpsilonGreedy(0.05)
TIGHT = Tolerance(atol=1e-5, rtol=0.0, ratio_different=0.0)
FEATURES = (
    FeatureSpec(feature_id=10, feature_type=FeatureType.BINARY),
    FeatureSpec(feature_id=11, feature_type=FeatureType.PROBABILITY),
    FeatureSpec(feature_id=12, feature_type=FeatureType.CONTINUOUS, mean=1.0, stddev=2.0),
    FeatureSpec(feature_id=13, feature_type=FeatureType.BOXCOX, boxcox_lambda=0.5, boxcox_shift=1.0, mean=0.5),
    FeatureSpec(feature_id=14, feature_type=FeatureType.ENUM, possible_values=(12.0, 4.0, 2.0)),
    FeatureSpec(feature_id=15, feature_type=FeatureType.QUANTILE, quantiles=(0.0, 0.8, 1.0)),
    FeatureSpec(feature_id=16, feature_type=FeatureType.CONTINUOUS_ACTION, min_value=-1.0, max_value=3.0),
    FeatureSpec(feature_id=17, feature_type=FeatureType.DISCRETE_ACTION),
    FeatureSpec(feature_id=18, feature_type=FeatureType.DO_NOT_PREPROCESS),
    FeatureSpec(feature_id=19, feature_type=FeatureType.CLIP_LOG),
)
SPEC = NormalizationSpec(FEATURES)


class MeanOfOutputs(nn.Module):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.needs_candidate_list = network.needs_candidate_list

    def forward(self, state: Tensor, mask: Tensor, features: Tensor | None) -> Tensor:
        return self.network(state, mask, features).mean(2)  # type: ignore[no-any-return]


def scorer(**source: object) -> nn.Module:
    spec = SourceSpec(num_state_features=SPEC.width, **source)  # type: ignore[arg-type]
    torch.manual_seed(0)
    settings = NetworkSettings(hidden=(16, 8), activations=("relu", "tanh"), dueling=True, batch_norm=True, outputs=2)
    return MeanOfOutputs(build_q_network(spec, settings))


def discrete(policy: TargetPolicy = SOFTMAX) -> Predictor:
    return DiscretePredictor(
        Preprocessor(SPEC),
        scorer(action_names=("a", "b", "c")),
        state_feature_ids=SPEC.feature_ids,
        action_names=("a", "b", "c"),
        policy=policy,
    )


def parametric(policy: TargetPolicy = EXPLORING) -> Predictor:
    return ParametricPredictor(
        Preprocessor(SPEC),
        Preprocessor(SPEC),
        scorer(num_action_features=SPEC.width),
        state_feature_ids=SPEC.feature_ids,
        action_feature_ids=SPEC.feature_ids,
        policy=policy,
    )


def restricted_discrete() -> Predictor:
    return restricted(discrete(EXPLORING), action_names=("a", "b", "c"))


def restricted_parametric() -> Predictor:
    return restricted(parametric(EpsilonGreedy()), num_action_features=SPEC.width)


def restricted(predictor: Predictor, **source: object) -> Predictor:
    spec = SourceSpec(num_state_features=SPEC.width, **source)  # type: ignore[arg-type]
    imitator = build_q_network(spec, NetworkSettings(hidden=(16,), activations=("relu",), batch_norm=True))
    predictor.restriction = LikelyInTheLog(imitator, 0.4)
    return predictor


def raw(rng: np.random.Generator, *shape: int) -> np.ndarray:
    values = rng.uniform(-1, 2, size=(*shape, len(FEATURES))).astype(np.float32)
    values[..., 0] = rng.integers(0, 2, size=shape)
    values[..., 4] = rng.choice([2, 4, 12, 5], size=shape)
    values[rng.random(values.shape) < 0.2] = np.nan
    values[0, ..., 2] = np.float32(-1337.1337)
    return values


WITHOUT_PT2 = [FORMATS[name] for name in ("onnx", "torchscript", "safetensors")]  # whose export takes seconds
CASES = {
    discrete: WITHOUT_PT2,
    parametric: WITHOUT_PT2,
    restricted_discrete: WITHOUT_PT2,
    restricted_parametric: list(FORMATS.values()),
}


@pytest.fixture(scope="module", params=CASES)
def exported(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Predictor, Path, SampleRows]:
    make: Callable[[], Predictor] = request.param
    predictor = make().eval().requires_grad_(False)
    folder = tmp_path_factory.mktemp("formats")
    for entry in CASES[make]:
        entry.write(predictor, folder / entry.file)
    rng = np.random.default_rng(1)
    if predictor.parametric:
        sample = SampleRows(values=raw(rng, 40), candidates=raw(rng, 40, 5), mask=rng.random((40, 5)) < 0.7)
    else:
        sample = SampleRows(values=raw(rng, 40))
    return predictor, folder, sample


def written_in(folder: Path) -> list[ExportFormat]:
    return [entry for entry in FORMATS.values() if (folder / entry.file).exists()]


def test_every_format_equals_the_live_network(exported: tuple[Predictor, Path, SampleRows]) -> None:
    predictor, folder, sample = exported
    batches = list(check_batches(graph_inputs(predictor, sample), np.random.default_rng(2)))
    assert [len(batch[0]) for batch in batches] == [40, 1, 1000]
    for entry in written_in(folder):
        assert check_file(entry.file, entry.replay(predictor, folder / entry.file), batches, TIGHT) <= 1e-5


def test_what_is_restricted_is_restricted_somewhere_and_not_everywhere(
    exported: tuple[Predictor, Path, SampleRows],
) -> None:
    predictor, _, sample = exported
    inputs = graph_inputs(predictor, sample)
    excluded = inputs[-1] & ~predictor(*inputs)[3]
    assert excluded.any() == (predictor.threshold is not None)
    assert not excluded.all(1).any()


def test_no_file_holds_a_path_of_this_machine(exported: tuple[Predictor, Path, SampleRows]) -> None:
    _, folder, _ = exported
    here = str(Path(reagent_lite.__file__).parent).encode()
    assert [path.name for path in folder.iterdir() if here in path.read_bytes()] == []


def test_exporting_says_nothing(
    tmp_path: Path, discrete_predictor: DiscretePredictor, capfd: pytest.CaptureFixture[str]
) -> None:
    predictor = discrete_predictor.eval()
    for entry in FORMATS.values():
        entry.write(predictor, tmp_path / entry.file)
    assert capfd.readouterr() == ("", "")


def test_other_weights_are_found(exported: tuple[Predictor, Path, SampleRows]) -> None:
    predictor, folder, sample = exported
    batches = [graph_inputs(predictor, sample)]
    bias = [p for name, p in predictor.scorer.named_parameters() if ".value." in name][-1]
    bias.add_(0.01)
    try:
        for entry in written_in(folder):
            with pytest.raises(BundleError, match="Nothing was exported"):
                check_file(entry.file, entry.replay(predictor, folder / entry.file), batches, TIGHT)
    finally:
        bias.sub_(0.01)


def test_network_without_finite_q_is_refused(discrete_predictor: DiscretePredictor) -> None:
    batches = [graph_inputs(discrete_predictor, SampleRows(values=np.array([[1, 5], [1, np.inf]], dtype=np.float32)))]
    with pytest.raises(BundleError, match="q of the live network: expected finite numbers, got 3 of 6 are not"):
        check_live(discrete_predictor, batches)


def test_tolerance_is_relative_to_the_largest_live_q() -> None:
    tolerance = Tolerance(atol=1e-3, rtol=5e-5, ratio_different=0.0)
    live = np.array([0.0, -10.0], dtype=np.float32)  # limit 1e-3 + 5e-5 * 10 = 1.5e-3
    assert tolerance.compare("x", live, np.array([1.4e-3, -10.0], dtype=np.float32), "") == pytest.approx(1.4e-3)
    with pytest.raises(BundleError, match=r"1 of 2, the furthest by 0\.0016"):
        tolerance.compare("x", live, np.array([1.6e-3, -10.0], dtype=np.float32), "")
    with pytest.raises(BundleError, match="1 of 2"):
        tolerance.compare("x", live, np.array([np.nan, -10.0], dtype=np.float32), "")
    half = Tolerance(atol=0.0, rtol=0.0, ratio_different=0.5)
    assert half.compare("x", live, np.array([1.0, -10.0], dtype=np.float32), "") == 1.0


def test_sample_rows_must_fit(discrete_predictor: DiscretePredictor, parametric_predictor: ParametricPredictor) -> None:
    rows = np.zeros((2, 3), dtype=np.float32)
    with pytest.raises(BundleError, match=r"sample rows, values: expected shape \(2, 2\), got \(2, 3\)"):
        graph_inputs(discrete_predictor, SampleRows(values=rows))
    with pytest.raises(BundleError, match="at least one row with one choice, got 0 x 3"):
        graph_inputs(discrete_predictor, SampleRows(values=rows[:0, :2]))
    with pytest.raises(BundleError, match="sample rows, candidates"):
        graph_inputs(parametric_predictor, SampleRows(values=rows[:, :1]))


HEADS = {"scalar": ScalarHead(), "c51": CategoricalHead(5, -2.0, 3.0), "quantile": QuantileHead(4)}
ACTIVATIONS = ("linear", "relu", "leaky_relu", "tanh", "sigmoid", "elu", "gelu", "selu", "silu")


@pytest.mark.parametrize("policy", [SOFTMAX, EXPLORING, EpsilonGreedy()], ids=str)
@pytest.mark.parametrize("dueling", [False, True])
@pytest.mark.parametrize("candidates", [False, True])
@pytest.mark.parametrize("head", HEADS)
def test_onnx_of_every_network_head_and_policy(
    head: str, candidates: bool, dueling: bool, policy: TargetPolicy, tmp_path: Path
) -> None:
    """With every activation, dropout and batch normalization."""
    source = {"num_action_features": SPEC.width} if candidates else {"action_names": ("a", "b", "c")}
    settings = NetworkSettings(
        hidden=(4,) * len(ACTIVATIONS),
        activations=ACTIVATIONS,
        dueling=dueling,
        outputs=HEADS[head].outputs,
        dropout=0.5,
        batch_norm=candidates,
    )
    torch.manual_seed(0)
    network = build_q_network(SourceSpec(num_state_features=SPEC.width, **source), settings)  # type: ignore[arg-type]
    predictor = (parametric if candidates else discrete)(policy)
    predictor.scorer = Scorer(network, HEADS[head])
    predictor.eval().requires_grad_(False)
    rng = np.random.default_rng(1)
    sample = SampleRows(
        values=raw(rng, 40),
        candidates=raw(rng, 40, 5) if candidates else None,
        mask=rng.random((40, 5)) < 0.7 if candidates else None,
    )
    entry = FORMATS["onnx"]
    entry.write(predictor, tmp_path / entry.file)
    batches = list(check_batches(graph_inputs(predictor, sample), rng))
    assert check_file(entry.file, entry.replay(predictor, tmp_path / entry.file), batches, TIGHT) <= 1e-5


def test_a_call_that_onnx_lacks_is_named(discrete_predictor: DiscretePredictor, tmp_path: Path) -> None:
    class Odd(nn.Module):
        def forward(self, state: Tensor, mask: Tensor, features: Tensor | None) -> Tensor:
            return torch.special.i0(state).sum(1, keepdim=True).expand(-1, 3)

    predictor = copy.deepcopy(discrete_predictor)
    predictor.scorer = Odd()
    with pytest.raises(NotImplementedError, match="torch's special_i0 in a model that is exported"):
        FORMATS["onnx"].write(predictor, tmp_path / "model.onnx")
