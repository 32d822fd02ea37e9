"""The kernels' own mathematics against NumPy's float64."""

import ctypes
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray
from sim.conftest import CompileUnit

Floats = NDArray[np.float32]
Function = Callable[[Floats], Floats]
CURVES = ["sine", "cosine", "exponential", "logistic", "wrap_angle"]
NAMES = [*CURVES, "absolute", "floor_of", "square_root", "clamped", "whole"]
UNIT = """
#include "port.cuh"
using namespace reagent_lite;
static inline float clamped(float x) { return clamp(x, -1.0f, 2.0f); }
static inline float whole(float x) { return float(whole_of(x)); }
#define MAP(function)                                                   \\
  extern "C" void map_##function(const float *x, float *y, int count) { \\
    VECTORIZE                                                           \\
    for (int i = 0; i < count; ++i) y[i] = function(x[i]);              \\
  }
""" + "\n".join(f"MAP({name})" for name in NAMES)


@pytest.fixture(scope="module")
def functions(compile_unit: CompileUnit) -> dict[str, Function]:
    return open_functions(compile_unit(UNIT, "-O3", "-march=native"))


def open_functions(unit: ctypes.CDLL) -> dict[str, Function]:
    def mapped(name: str) -> Function:
        def call(x: Floats) -> Floats:
            x = np.ascontiguousarray(x, np.float32)
            y = np.empty_like(x)
            unit[f"map_{name}"](ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(y.ctypes.data), x.size)
            return y

        return call

    return {name: mapped(name) for name in NAMES}


def sweep(low: float, high: float) -> Floats:
    """A million numbers of a range, small ones and both ends among them."""
    rng = np.random.default_rng(0)
    small = rng.choice([-1, 1], 1000) * 10 ** rng.uniform(-40, 0, 1000)
    x = np.concatenate([rng.uniform(low, high, 1_000_000), np.clip(small, low, high), [low, high, 0.0, -0.0]])
    return x.astype(np.float32)


@pytest.mark.parametrize("reach", [np.pi / 4, 10.0, 1e4])
def test_sine_and_cosine(functions: dict[str, Function], reach: float) -> None:
    x = sweep(-reach, reach)
    exact = x.astype(np.float64)
    assert np.abs(functions["sine"](x) - np.sin(exact)).max() < 1e-7
    assert np.abs(functions["cosine"](x) - np.cos(exact)).max() < 1e-7


def test_sine_and_cosine_never_leave_their_range(functions: dict[str, Function]) -> None:
    x = np.concatenate([sweep(-1e9, 1e9), np.float32([3e38, -3e38])])
    for name in ("sine", "cosine"):
        assert np.abs(functions[name](x)).max() <= 1
        assert np.isnan(functions[name](np.float32([np.nan, np.inf, -np.inf]))).all()


def test_exponential(functions: dict[str, Function]) -> None:
    x = sweep(-87, 88)
    truth = np.exp(x.astype(np.float64))
    assert (np.abs(functions["exponential"](x) - truth) / truth).max() < 2e-7


def test_exponential_saturates(functions: dict[str, Function]) -> None:
    low, lowest, high, highest, nan = functions["exponential"](np.float32([-88, -np.inf, 89, np.inf, np.nan]))
    assert low == lowest == 0
    assert 2e38 < high == highest < np.inf  # e^88.3 = 2.2e38
    assert np.isnan(nan)


def test_logistic(functions: dict[str, Function]) -> None:
    x = sweep(-87, 87)
    truth = 1 / (1 + np.exp(-x.astype(np.float64)))
    assert (np.abs(functions["logistic"](x) - truth) / truth).max() < 4e-7
    assert functions["logistic"](np.float32([0, 200, np.inf])).tolist() == [0.5, 1, 1]
    assert functions["logistic"](np.float32([-200, -np.inf])).max() < 1e-38


@pytest.mark.parametrize("reach", [3.2, 100.0, 1e4])
def test_wrap_angle(functions: dict[str, Function], reach: float) -> None:
    x = sweep(-reach, reach)
    wrapped = functions["wrap_angle"](x)
    pi = np.float32(np.pi)
    assert (wrapped >= -pi).all()
    assert (wrapped < pi).all()
    gap = np.abs(wrapped - x.astype(np.float64)) % (2 * np.pi)
    assert np.minimum(gap, 2 * np.pi - gap).max() < 4e-7  # an ulp near pi is 2.4e-7
    inside = np.abs(x) < 3.14
    assert np.array_equal(wrapped[inside], x[inside])
    assert functions["wrap_angle"](np.float32([pi]))[0] == pytest.approx(-pi, abs=2.4e-7)


def test_the_rest_is_exact(functions: dict[str, Function]) -> None:
    x = sweep(-1e6, 1e6)
    assert np.array_equal(functions["absolute"](x), np.abs(x))
    assert np.array_equal(functions["floor_of"](x), np.floor(x))
    assert np.array_equal(functions["square_root"](np.abs(x)), np.sqrt(np.abs(x)))
    assert np.array_equal(functions["clamped"](x), np.clip(x, -1, 2))
    assert np.isnan(functions["clamped"](np.float32([np.nan]))).all()
    assert np.array_equal(functions["whole"](x), np.trunc(x))


def test_whole_numbers_have_one_zero_and_an_end(functions: dict[str, Function]) -> None:
    x = np.float32([0.5, -0.5, -0.0, -1.5, np.nan, 3e9, -np.inf])
    expected = np.float32([0, 0, 0, -1, 0, 2147483520, -2147483520])  # the last float before 2^31
    assert functions["whole"](x).tobytes() == expected.tobytes()


def test_same_bits_without_optimization(functions: dict[str, Function], compile_unit: CompileUnit) -> None:
    plain = open_functions(compile_unit(UNIT, "-O0"))
    for name in NAMES:
        x = sweep(0 if name == "square_root" else -1e5, 1e5)
        assert plain[name](x).tobytes() == functions[name](x).tobytes(), name
