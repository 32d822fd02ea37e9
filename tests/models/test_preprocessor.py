"""The preprocessor against the contract's figures, a float64 numpy oracle, TorchScript and ONNX."""

import math
import warnings

import numpy as np
import numpy.typing as npt
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from reagent_lite.export.onnx_graph import onnx_model
from reagent_lite.models.preprocessor import TRANSFORMS, Preprocessor
from reagent_lite.types import FeatureSpec, FeatureType, NormalizationSpec

Floats = npt.NDArray[np.float64]
NAN = math.nan


def spec_of(*features: FeatureSpec) -> NormalizationSpec:
    return NormalizationSpec.ordered({feature.feature_id: feature for feature in features})


def feature(feature_id: int, name: str, **parameters: object) -> FeatureSpec:
    return FeatureSpec(feature_id=feature_id, feature_type=FeatureType(name), **parameters)  # type: ignore[arg-type]


EVERY_TYPE = spec_of(
    feature(1, "BINARY"),
    feature(20, "BINARY"),
    feature(2, "PROBABILITY"),
    feature(3, "CONTINUOUS", mean=1.5, stddev=0.25),
    feature(21, "CONTINUOUS", mean=-7.0, stddev=30.0),
    feature(4, "BOXCOX", boxcox_lambda=0.5, boxcox_shift=2.0, mean=1.0, stddev=2.0),
    feature(22, "BOXCOX", boxcox_lambda=0.0, boxcox_shift=0.5, mean=0.2, stddev=1.5),
    feature(23, "BOXCOX", boxcox_lambda=-0.3, boxcox_shift=4.0, mean=1.0, stddev=0.5),
    feature(5, "ENUM", possible_values=(12.0, 4.0, 2.0)),
    feature(24, "ENUM", possible_values=(0.0, 1.0)),
    feature(6, "QUANTILE", quantiles=(0.0, 80.0, 100.0)),
    feature(25, "QUANTILE", quantiles=(-2.0, -1.0, 0.5, 3.0, 3.25)),
    feature(7, "CONTINUOUS_ACTION", min_value=-3.0, max_value=5.0),
    feature(8, "DISCRETE_ACTION"),
    feature(9, "DO_NOT_PREPROCESS"),
    feature(10, "CLIP_LOG"),
)


def oracle(f: FeatureSpec, x: Floats) -> Floats:
    """The contract's table, one feature, float64; returns [N, width]."""
    match f.feature_type:
        case FeatureType.BINARY:
            y = np.where(x == 0, 0.0, 1.0)
        case FeatureType.PROBABILITY:
            p = np.clip(x, 1e-5, 1 - 1e-5)
            y = np.log(p / (1 - p))
        case FeatureType.CONTINUOUS:
            y = np.clip((x - f.mean) / f.stddev, -11.513, 11.513)
        case FeatureType.BOXCOX:
            z = np.maximum(x + f.boxcox_shift, 1e-6)
            z = np.log(z) if f.boxcox_lambda == 0 else (z**f.boxcox_lambda - 1) / f.boxcox_lambda
            y = np.clip((z - f.mean) / f.stddev, -11.513, 11.513)
        case FeatureType.ENUM:
            return (x[:, None] == np.array(f.possible_values)).astype(np.float64)
        case FeatureType.QUANTILE:
            y = np.interp(x, f.quantiles, np.linspace(0, 1, len(f.quantiles)))
        case FeatureType.CONTINUOUS_ACTION:
            share = (x - f.min_value) / (f.max_value - f.min_value)
            y = np.clip(-1 + 1e-6 + share * (2 - 2e-6), -1 + 1e-6, 1 - 1e-6)
        case FeatureType.CLIP_LOG:
            y = np.log(np.maximum(x, 1e-6))
        case _:
            y = x
    return y[:, None]


def raw_rows(spec: NormalizationSpec, num_rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Random raw values that hit every branch, with a quarter absent in each of the three ways."""
    rng = np.random.default_rng(seed)
    columns = []
    for f in spec.features:
        x = rng.normal(0.5, 4.0, num_rows)
        if f.feature_type is FeatureType.PROBABILITY:
            x = rng.choice([0.0, 1.0, 0.5, 1e-7, 0.9999999, 0.123], num_rows)
        elif f.feature_type in (FeatureType.ENUM, FeatureType.BINARY):
            x = rng.choice([0.0, 1.0, 2.0, 4.0, 12.0, 13.0], num_rows)
        elif f.feature_type is FeatureType.QUANTILE:
            x = rng.choice([*f.quantiles, -500.0, 500.0, f.quantiles[0] + 0.3, f.quantiles[1] + 0.1], num_rows)
        columns.append(x)
    values = np.stack(columns, axis=1).astype(np.float32)
    absent = rng.choice(12, values.shape)
    values[absent == 0] = np.nan
    values[absent == 1] = -1337.1337
    return torch.from_numpy(values), torch.from_numpy(absent != 2)


def expected(spec: NormalizationSpec, values: Tensor, presence: Tensor, *, missing_as_zero: bool = False) -> Floats:
    raw = values.numpy().astype(np.float64)
    sentinel = float(np.float32(-1337.1337))
    known = presence.numpy() & ~np.isnan(raw) & (raw != sentinel)
    blocks = []
    for column, f in enumerate(spec.features):
        block = oracle(f, np.where(known[:, column], raw[:, column], 0.0))
        blocks.append(block if missing_as_zero else np.where(known[:, column, None], block, 0.0))
    return np.concatenate(blocks, axis=1)


def normalized(f: FeatureSpec, *values: float) -> list[list[float]]:
    rows: list[list[float]] = Preprocessor(spec_of(f)).dense(torch.tensor([[v] for v in values])).tolist()
    return rows


def test_contract_quantile_figures() -> None:
    rows = normalized(feature(1, "QUANTILE", quantiles=(0.0, 80.0, 100.0)), 0.0, 80.0, 100.0, -5.0, 500.0, 40.0, NAN)
    # 40 is half of the first of two intervals: (0 + 40/80) / 2 = 0.25
    assert rows == [[0.0], [0.5], [1.0], [0.0], [1.0], [0.25], [0.0]]


def test_contract_enum_continuous_enum_figures() -> None:
    spec = spec_of(
        feature(1, "ENUM", possible_values=(12.0, 4.0, 2.0)),
        feature(2, "CONTINUOUS", mean=0.0, stddev=1.0),
        feature(3, "ENUM", possible_values=(15.0, 3.0)),
    )
    assert spec.feature_ids == (2, 1, 3)
    # The contract gives (f1, f2, f3) = (12,1,15), (4,2,3), (2,3,15), (2,3,missing): columns here are f2, f1, f3.
    raw = torch.tensor([[1.0, 12.0, 15.0], [2.0, 4.0, 3.0], [3.0, 2.0, 15.0], [3.0, 2.0, NAN]])
    assert Preprocessor(spec).dense(raw).tolist() == [
        [1, 1, 0, 0, 1, 0],
        [2, 0, 1, 0, 0, 1],
        [3, 0, 0, 1, 1, 0],
        [3, 0, 0, 1, 0, 0],
    ]


@pytest.mark.parametrize("missing_as_zero", [False, True])
def test_every_type_equals_float64_oracle(missing_as_zero: bool) -> None:
    assert set(TRANSFORMS) == {f.feature_type for f in EVERY_TYPE.features} == set(FeatureType)
    values, presence = raw_rows(EVERY_TYPE, 2000, seed=1)
    out = Preprocessor(EVERY_TYPE, missing_as_zero=missing_as_zero)(values, presence)
    assert out.dtype == torch.float32
    assert out.shape == (2000, EVERY_TYPE.width)
    want = expected(EVERY_TYPE, values, presence, missing_as_zero=missing_as_zero)
    np.testing.assert_allclose(out.numpy(), want, rtol=2e-6, atol=2e-6)


def test_missing_is_zero_and_may_be_raw_zero() -> None:
    f = feature(1, "CONTINUOUS", mean=2.0, stddev=4.0)
    module = Preprocessor(spec_of(f), missing_as_zero=True)
    assert module.dense(torch.tensor([[NAN], [0.0], [-1337.1337], [6.0]])).tolist() == [[-0.5], [-0.5], [-0.5], [1.0]]
    enum = Preprocessor(spec_of(feature(1, "ENUM", possible_values=(3.0, 0.0))), missing_as_zero=True)
    assert enum.dense(torch.tensor([[NAN]])).tolist() == [[0.0, 1.0]]
    assert normalized(feature(1, "DO_NOT_PREPROCESS"), -1337.1337, -1337.0) == [
        [0.0],
        [-1337.0],
    ]  # the second is a value


def test_probability_is_symmetric_and_exact_at_the_ends() -> None:
    (at_zero,), (at_one,), (at_half,) = normalized(feature(1, "PROBABILITY"), 0.0, 1.0, 0.5)
    assert at_zero == pytest.approx(math.log(1e-5 / (1 - 1e-5)), abs=1e-6)
    assert at_one == -at_zero
    assert at_half == 0.0


def test_boxcox_small_lambda_is_continuous_with_log() -> None:
    def at(exponent: float) -> float:
        return normalized(feature(1, "BOXCOX", boxcox_lambda=exponent, boxcox_shift=0.0, mean=0.0, stddev=1.0), 5.0)[0][
            0
        ]

    # (5^λ - 1)/λ = log 5 + λ (log 5)^2 / 2 + O(λ^2); a float32 power loses 1e-7/λ of it.
    assert at(0.0) == pytest.approx(math.log(5), rel=1e-6)
    assert at(1e-7) == pytest.approx(math.log(5), rel=1e-6)
    assert at(1e-5) == pytest.approx(math.log(5) + 1e-5 * math.log(5) ** 2 / 2, rel=1e-6)
    assert at(1.0) == pytest.approx(4.0, rel=1e-6)


def test_extremes_stay_finite() -> None:
    huge = 3e38
    assert normalized(feature(1, "CONTINUOUS", mean=0.0, stddev=1e-300), huge, 0.0) == [[pytest.approx(11.513)], [0.0]]
    assert normalized(feature(1, "BOXCOX", boxcox_lambda=-10.0, mean=0.0, stddev=1.0), -huge) == [
        [pytest.approx(-11.513)]
    ]
    # Two quantiles that are one number in float32 make a step there.
    close = feature(1, "QUANTILE", quantiles=(0.0, 1.0, 1.0 + 1e-12, 2.0))
    np.testing.assert_allclose(normalized(close, 0.5, 1.0, 1.5, huge), [[1 / 6], [1 / 3], [2.5 / 3], [1.0]], rtol=1e-6)
    assert normalized(feature(1, "QUANTILE", quantiles=(-huge, huge)), -huge, huge) == [[0.0], [1.0]]


def test_zero_width_enum_and_absent_types() -> None:
    spec = spec_of(feature(1, "ENUM"), feature(2, "CLIP_LOG"))
    assert spec.feature_ids == (1, 2)
    assert Preprocessor(spec).dense(torch.tensor([[5.0, 1.0], [5.0, NAN]])).tolist() == [[0.0], [0.0]]
    mixed = spec_of(feature(1, "ENUM"), feature(2, "ENUM", possible_values=(7.0,)), feature(3, "BINARY"))
    assert Preprocessor(mixed).dense(torch.tensor([[9.0, 3.0, 7.0]])).tolist() == [[1.0, 1.0]]
    assert Preprocessor(NormalizationSpec(())).dense(torch.zeros(4, 0)).shape == (4, 0)
    assert Preprocessor(spec_of(feature(1, "ENUM"))).dense(torch.zeros(4, 1)).shape == (4, 0)


def test_wide_enum() -> None:
    """NumPy compares in float64."""
    rng = np.random.default_rng(0)
    wide = tuple(rng.permutation(713).astype(float) - 100)
    spec = spec_of(
        feature(9, "BINARY"),
        feature(1, "ENUM", possible_values=wide),
        feature(3, "ENUM"),
        feature(2, "ENUM", possible_values=(2.5, -7.0, 0.0)),
        feature(4, "ENUM", possible_values=(5.0,)),
    )
    raw = rng.integers(-110, 700, (1024, 5)).astype(np.float32)
    raw[:, 2:] = rng.choice([2.5, -7.0, 0.0, -0.0, 5.0, 1.0, 1e30], (1024, 3))
    odd = rng.random(raw.shape) < 0.1
    raw[odd] = rng.choice([NAN, -1337.1337, math.inf, -math.inf, 0.5], odd.sum())
    values, presence = torch.from_numpy(raw), torch.from_numpy(rng.random(raw.shape) < 0.9)
    for missing_as_zero in (False, True):
        module = Preprocessor(spec, missing_as_zero=missing_as_zero)
        want = expected(spec, values, presence, missing_as_zero=missing_as_zero)
        np.testing.assert_array_equal(module(values, presence).numpy(), want)


def test_possible_values_that_are_one_number_in_float32_have_two_columns() -> None:
    """2^24 + 1 is rounded to 2^24."""
    assert normalized(feature(1, "ENUM", possible_values=(2.0**24, 3.0, 2.0**24 + 1)), 2.0**24, 3.0, 4.0) == [
        [1, 0, 1], [0, 1, 0], [0, 0, 0],
    ]  # fmt: skip


def test_spec_out_of_column_order_is_refused() -> None:
    with pytest.raises(ValueError, match="column order"):
        Preprocessor(NormalizationSpec((feature(2, "BINARY"), feature(1, "BINARY"))))


def scripted(module: Preprocessor) -> torch.jit.ScriptModule:
    with warnings.catch_warnings():
        # torch 2.13 deprecates TorchScript; the bundle keeps a model for the original's users.
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")
        script: torch.jit.ScriptModule = torch.jit.script(module)
    return script


class Alone(nn.Module):
    """A module as a whole model, which has a list of outputs."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, values: Tensor, presence: Tensor) -> tuple[Tensor]:
        return (self.module(values, presence),)


def exported(module: Preprocessor, spec: NormalizationSpec) -> onnxruntime.InferenceSession:
    axes = ("rows", len(spec.features))
    model = onnx_model(
        Alone(module),
        raw_rows(spec, 3, seed=0),
        inputs={"values": axes, "presence": axes},
        outputs={"normalized": ("rows", spec.width)},
    )
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


ZERO_WIDTH = spec_of(feature(1, "ENUM"), feature(2, "CONTINUOUS", mean=3.0, stddev=2.0))


@pytest.mark.parametrize("missing_as_zero", [False, True])
@pytest.mark.parametrize("spec", [EVERY_TYPE, ZERO_WIDTH], ids=["every type", "an enum of no width"])
def test_script_and_onnx_equal_eager_with_any_number_of_rows(spec: NormalizationSpec, missing_as_zero: bool) -> None:
    eager = Preprocessor(spec, missing_as_zero=missing_as_zero)
    script, session = scripted(eager), exported(eager, spec)
    for num_rows in (0, 1, 257):
        values, presence = raw_rows(spec, num_rows, seed=num_rows)
        want = eager(values, presence).numpy()
        np.testing.assert_array_equal(script(values, presence).numpy(), want)
        np.testing.assert_array_equal(script.dense(values).numpy(), eager.dense(values).numpy())
        (got,) = session.run(None, {"values": values.numpy(), "presence": presence.numpy()})
        assert got.shape == (num_rows, spec.width)
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


def test_features_far_from_zero_keep_their_digits() -> None:
    """Mean 10^6 and deviation 0.1: what float32 input can tell apart, multiples of 1/16, is exact to float32."""
    spec = spec_of(
        feature(1, "CONTINUOUS", mean=1e6 + 0.03, stddev=0.1),
        feature(2, "BOXCOX", boxcox_lambda=0.5, boxcox_shift=0.97 - 1e6, mean=0.1, stddev=0.2),
        feature(3, "QUANTILE", quantiles=(1e6 - 0.59, 1e6 - 0.03, 1e6 + 0.03, 1e6 + 0.61)),
        feature(4, "CONTINUOUS_ACTION", min_value=1e6 - 0.59, max_value=1e6 + 0.61),
    )
    values = (1e6 + torch.arange(-16, 17) / 16).unsqueeze(1).repeat(1, 4)
    values[[0, 1, 2], :] = torch.tensor([NAN, -1337.1337, 0.0]).unsqueeze(1)
    presence = torch.ones(values.shape, dtype=torch.bool)
    eager = Preprocessor(spec)
    want = expected(spec, values, presence)
    np.testing.assert_allclose(eager(values, presence).numpy(), want, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(scripted(eager)(values, presence).numpy(), want, rtol=2e-6, atol=2e-6)
    (got,) = exported(eager, spec).run(None, {"values": values.numpy(), "presence": presence.numpy()})
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6)


def test_state_dict_carries_parameters() -> None:
    f, g = (feature(1, "CONTINUOUS", mean=m, stddev=2.0) for m in (1.0, 5.0))
    target = Preprocessor(spec_of(f))
    target.load_state_dict(Preprocessor(spec_of(g)).state_dict())
    assert target.dense(torch.tensor([[9.0]])).tolist() == [[2.0]]
    assert list(target.parameters()) == []
