"""The preprocessor against the contract's figures, a float64 numpy oracle, TorchScript and ONNX."""

import math
from collections.abc import Callable
from math import nan as NAN

import numpy as np
import numpy.typing as npt
import pytest
import scipy.special
import torch
from torch import Tensor

from reagent_lite.models.preprocessor import TRANSFORMS, Preprocessor
from reagent_lite.types import FeatureSpec, FeatureType, NormalizationSpec
from tests.helpers.onnx_sessions import onnx_session

# torch 2.13 deprecates TorchScript; the bundle keeps a model for the original's users
pytestmark = pytest.mark.filterwarnings(r"ignore:`torch\.jit\.:DeprecationWarning")
Floats = npt.NDArray[np.float64]


def spec_of(*features: FeatureSpec) -> NormalizationSpec:
    return NormalizationSpec.from_features({feature.feature_id: feature for feature in features})


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
            y = scipy.special.logit(np.clip(x, 1e-5, 1 - 1e-5))
        case FeatureType.CONTINUOUS:
            y = np.clip((x - f.mean) / f.stddev, -11.513, 11.513)
        case FeatureType.BOXCOX:
            z = scipy.special.boxcox(np.maximum(x + f.boxcox_shift, 1e-6), f.boxcox_lambda)
            y = np.clip((z - f.mean) / f.stddev, -11.513, 11.513)
        case FeatureType.ENUM:
            return (x[:, None] == np.array(f.possible_values)).astype(np.float64)
        case FeatureType.QUANTILE:
            y = np.interp(x, f.quantiles, np.linspace(0, 1, len(f.quantiles)))
        case FeatureType.CONTINUOUS_ACTION:
            y = np.interp(x, (f.min_value, f.max_value), (-1 + 1e-6, 1 - 1e-6))
        case FeatureType.CLIP_LOG:
            y = np.log(np.maximum(x, 1e-6))
        case _:
            y = x
    return y[:, None]


def raw_rows(spec: NormalizationSpec, num_rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Random raw values that hit every branch, with a quarter absent in each of the three ways."""
    rng = np.random.default_rng(seed)
    # ends, categories and values between quantiles, of one type or another
    pool = [0.0, 1.0, 2.0, 4.0, 12.0, 13.0, 0.5, 1e-7, 0.9999999, 0.123, -500.0, 500.0, -1.7, -0.9, 0.3, 80.1,
            *(quantile for f in spec.features for quantile in f.quantiles)]  # fmt: skip
    shape = (num_rows, len(spec.features))
    values = np.where(rng.random(shape) < 0.5, rng.normal(0.5, 4.0, shape), rng.choice(pool, shape))
    absent = rng.choice(12, shape)
    values = np.select([absent == 0, absent == 1], [np.nan, -1337.1337], values).astype(np.float32)
    return torch.from_numpy(values), torch.from_numpy(absent != 2)


def expected(spec: NormalizationSpec, values: Tensor, presence: Tensor, *, missing_as_zero: bool = False) -> Floats:
    raw = values.numpy().astype(np.float64)
    known = presence.numpy() & ~np.isnan(raw) & (raw != float(np.float32(-1337.1337)))
    blocks = [oracle(f, np.where(known[:, i], raw[:, i], 0.0)) for i, f in enumerate(spec.features)]
    shown = (known | missing_as_zero).T[:, :, None]
    return np.concatenate([np.where(show, block, 0.0) for show, block in zip(shown, blocks, strict=True)], axis=1)


def boxcox(exponent: float, shift: float = 0.0) -> FeatureSpec:
    return feature(1, "BOXCOX", boxcox_lambda=exponent, boxcox_shift=shift, mean=0.0, stddev=1.0)


@pytest.mark.parametrize(
    ("features", "raw", "normalized"),
    [
        # the contract's: 40 is half of the first of two intervals, (0 + 40/80) / 2 = 0.25
        ([feature(1, "QUANTILE", quantiles=(0.0, 80.0, 100.0))], [[0], [80], [100], [-5], [500], [40], [NAN]],
         [[0], [0.5], [1], [0], [1], [0.25], [0]]),
        # (f1, f2, f3) = (12,1,15), (4,2,3), (2,3,15), (2,3,missing) in the contract: columns here are f2, f1, f3
        ([feature(1, "ENUM", possible_values=(12.0, 4.0, 2.0)), feature(2, "CONTINUOUS", mean=0.0, stddev=1.0),
          feature(3, "ENUM", possible_values=(15.0, 3.0))],
         [[1, 12, 15], [2, 4, 3], [3, 2, 15], [3, 2, NAN]],
         [[1, 1, 0, 0, 1, 0], [2, 0, 1, 0, 0, 1], [3, 0, 0, 1, 1, 0], [3, 0, 0, 1, 0, 0]]),
        ([feature(1, "DO_NOT_PREPROCESS")], [[-1337.1337], [-1337]], [[0], [-1337]]),  # the second is a value
        ([feature(1, "PROBABILITY")], [[0], [1], [0.5]], [[math.log(1e-5 / (1 - 1e-5))], [math.log((1 - 1e-5) / 1e-5)],
                                                          [0]]),
        # (5^λ - 1)/λ = log 5 + λ (log 5)^2 / 2 + O(λ^2); a float32 power loses 1e-7/λ of it
        ([boxcox(0.0)], [[5]], [[math.log(5)]]),
        ([boxcox(1e-7)], [[5]], [[math.log(5)]]),
        ([boxcox(1e-5)], [[5]], [[math.log(5) + 1e-5 * math.log(5) ** 2 / 2]]),
        ([boxcox(1.0)], [[5]], [[4]]),
        # extremes stay finite
        ([feature(1, "CONTINUOUS", mean=0.0, stddev=1e-300)], [[3e38], [0]], [[11.513], [0]]),
        ([boxcox(-10.0)], [[-3e38]], [[-11.513]]),
        ([feature(1, "QUANTILE", quantiles=(-3e38, 3e38))], [[-3e38], [3e38]], [[0], [1]]),
        # two quantiles that are one number in float32 make a step there
        ([feature(1, "QUANTILE", quantiles=(0.0, 1.0, 1.0 + 1e-12, 2.0))], [[0.5], [1], [1.5], [3e38]],
         [[1 / 6], [1 / 3], [2.5 / 3], [1]]),
        # 2^24 + 1 is rounded to 2^24: possible values that are one number have two columns
        ([feature(1, "ENUM", possible_values=(2.0**24, 3.0, 2.0**24 + 1))], [[2**24], [3], [4]],
         [[1, 0, 1], [0, 1, 0], [0, 0, 0]]),
        # an enum without values has no column
        ([feature(1, "ENUM"), feature(2, "CLIP_LOG")], [[5, 1], [5, NAN]], [[0], [0]]),
        ([feature(1, "ENUM"), feature(2, "ENUM", possible_values=(7.0,)), feature(3, "BINARY")], [[9, 3, 7]], [[1, 1]]),
        ([feature(1, "ENUM")], [[0]] * 4, [[]] * 4),
        ([], [[]] * 4, [[]] * 4),
    ],
)  # fmt: skip
def test_figures_by_hand(features: list[FeatureSpec], raw: list[list[float]], normalized: list[list[float]]) -> None:
    result = Preprocessor(spec_of(*features)).dense(torch.tensor(raw, dtype=torch.float32))
    np.testing.assert_allclose(result.numpy(), np.array(normalized), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("missing_as_zero", [False, True])
def test_every_type_equals_float64_oracle(missing_as_zero: bool) -> None:
    others = {FeatureType.EMBEDDING, FeatureType.IMAGE}  # test_embeddings.py, test_images.py
    assert set(TRANSFORMS) - others == {f.feature_type for f in EVERY_TYPE.features} == set(FeatureType) - others
    rows = raw_rows(EVERY_TYPE, 2000, seed=1)
    out = Preprocessor(EVERY_TYPE, missing_as_zero=missing_as_zero)(*rows).numpy()
    assert out.dtype == np.float32
    np.testing.assert_allclose(out, expected(EVERY_TYPE, *rows, missing_as_zero=missing_as_zero), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("missing_as_zero", [False, True])
def test_wide_enum(missing_as_zero: bool) -> None:
    """NumPy compares in float64."""
    rng = np.random.default_rng(0)
    spec = spec_of(
        feature(9, "BINARY"),
        feature(1, "ENUM", possible_values=tuple(rng.permutation(713).astype(float) - 100)),
        feature(3, "ENUM"),
        feature(2, "ENUM", possible_values=(2.5, -7.0, 0.0)),
        feature(4, "ENUM", possible_values=(5.0,)),
    )
    raw = rng.integers(-110, 700, (1024, 5)).astype(np.float32)
    raw[:, 2:] = rng.choice([2.5, -7.0, 0.0, -0.0, 5.0, 1.0, 1e30], (1024, 3))
    odd = rng.random(raw.shape) < 0.1
    raw[odd] = rng.choice([NAN, -1337.1337, math.inf, -math.inf, 0.5], odd.sum())
    rows = (torch.from_numpy(raw), torch.from_numpy(rng.random(raw.shape) < 0.9))
    result = Preprocessor(spec, missing_as_zero=missing_as_zero)(*rows).numpy()
    np.testing.assert_array_equal(result, expected(spec, *rows, missing_as_zero=missing_as_zero))


def test_spec_out_of_column_order_is_refused() -> None:
    with pytest.raises(ValueError, match="column order"):
        Preprocessor(NormalizationSpec((feature(2, "BINARY"), feature(1, "BINARY"))))


class Alone(Preprocessor):
    """A preprocessor as a whole model, which has a list of outputs."""

    def forward(self, values: Tensor, presence: Tensor) -> tuple[Tensor]:  # type: ignore[override]
        return (super().forward(values, presence),)


def exported(spec: NormalizationSpec, *, missing_as_zero: bool = False) -> Callable[[Tensor, Tensor], Floats]:
    session = onnx_session(
        Alone(spec, missing_as_zero=missing_as_zero),
        raw_rows(spec, 3, seed=0),
        inputs=dict.fromkeys(("values", "presence"), ("rows", len(spec.features))),
        outputs={"normalized": ("rows", spec.width)},
    )
    return lambda values, presence: session.run(None, {"values": values.numpy(), "presence": presence.numpy()})[0]


@pytest.mark.parametrize("missing_as_zero", [False, True])
@pytest.mark.parametrize(
    "spec",
    [EVERY_TYPE, spec_of(feature(1, "ENUM"), feature(2, "CONTINUOUS", mean=3.0, stddev=2.0))],
    ids=["every type", "an enum of no width"],
)
def test_script_and_onnx_equal_eager_with_any_number_of_rows(spec: NormalizationSpec, missing_as_zero: bool) -> None:
    eager = Preprocessor(spec, missing_as_zero=missing_as_zero)
    script = torch.jit.script(eager)
    onnx = exported(spec, missing_as_zero=missing_as_zero)
    for num_rows in (0, 1, 257):
        rows = raw_rows(spec, num_rows, seed=num_rows)
        assert torch.equal(script(*rows), eager(*rows))
        assert torch.equal(script.dense(rows[0]), eager.dense(rows[0]))
        assert onnx(*rows).shape == (num_rows, spec.width)
        np.testing.assert_allclose(onnx(*rows), eager(*rows).numpy(), rtol=1e-6, atol=1e-6)


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
    rows = (values, torch.ones(values.shape, dtype=torch.bool))
    eager = Preprocessor(spec)
    for module in (eager, torch.jit.script(eager), exported(spec)):
        np.testing.assert_allclose(np.asarray(module(*rows)), expected(spec, *rows), rtol=2e-6, atol=2e-6)


def test_state_dict_carries_parameters() -> None:
    target, source = (Preprocessor(spec_of(feature(1, "CONTINUOUS", mean=m, stddev=2.0))) for m in (1.0, 5.0))
    target.load_state_dict(source.state_dict())
    assert target.dense(torch.tensor([[9.0]])).tolist() == [[2.0]]
    assert list(target.parameters()) == []
