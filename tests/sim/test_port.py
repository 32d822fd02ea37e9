"""The kernels' own mathematics against NumPy's float64."""

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.special import expit
from sim.conftest import CompileUnit

Floats = NDArray[np.float32]
Function = Callable[[str, Floats], Floats]
NAMES = ["sine", "cosine", "exponential", "logistic", "wrap_angle", "absolute", "floor_of", "square_root", "clamped",
         "whole"]  # fmt: skip
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
def functions(compile_unit: CompileUnit) -> Function:
    return open_functions(compile_unit(UNIT, "-O3", "-march=native"))


def open_functions(unit: ctypes.CDLL) -> Function:
    def call(name: str, x: Floats) -> Floats:
        y = np.empty_like(x)
        unit[f"map_{name}"](ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(y.ctypes.data), x.size)
        return y

    return call


def sweep(low: float, high: float) -> Floats:
    """A million numbers of a range, small ones and both ends among them."""
    rng = np.random.default_rng(0)
    small = rng.choice([-1, 1], 1000) * 10 ** rng.uniform(-40, 0, 1000)
    x = np.concatenate([rng.uniform(low, high, 1_000_000), np.clip(small, low, high), [low, high, 0.0, -0.0]])
    return x.astype(np.float32)


@pytest.mark.parametrize(
    ("name", "low", "high", "truth", "relative", "tolerance"),
    [
        *((name, -reach, reach, truth, False, 1e-7)
          for name, truth in (("sine", np.sin), ("cosine", np.cos)) for reach in (np.pi / 4, 10.0, 1e4)),
        ("exponential", -87, 88, np.exp, True, 2e-7),
        ("logistic", -87, 87, expit, True, 4e-7),
        ("absolute", -1e6, 1e6, np.abs, False, 0),
        ("floor_of", -1e6, 1e6, np.floor, False, 0),
        ("square_root", 0, 1e6, np.sqrt, False, 0),
        ("clamped", -1e6, 1e6, lambda x: np.clip(x, -1, 2), False, 0),
        ("whole", -1e6, 1e6, np.trunc, False, 0),
    ],
)  # fmt: skip
def test_functions_are_numpys(
    functions: Function, name: str, low: float, high: float, truth: Any, relative: bool, tolerance: float
) -> None:
    x = sweep(low, high)
    expected = truth(x.astype(np.float64))
    error = np.abs(functions(name, x) - (expected if tolerance else expected.astype(np.float32)))
    assert (error / expected if relative else error).max() <= tolerance


@pytest.mark.parametrize(
    ("name", "inputs", "expected"),
    [
        ("sine", [np.nan, np.inf, -np.inf], [np.nan] * 3),
        ("cosine", [np.nan, np.inf, -np.inf], [np.nan] * 3),
        ("exponential", [-88, -np.inf, np.nan], [0, 0, np.nan]),
        ("logistic", [0, 200, np.inf], [0.5, 1, 1]),
        ("clamped", [np.nan], [np.nan]),
        # one zero, and an end: the last float before 2^31
        ("whole", [0.5, -0.5, -0.0, -1.5, np.nan, 3e9, -np.inf], [0, 0, 0, -1, 0, 2147483520, -2147483520]),
    ],
)
def test_functions_at_their_edges(functions: Function, name: str, inputs: list[float], expected: list[float]) -> None:
    result = functions(name, np.float32(inputs))
    np.testing.assert_array_equal(result, np.float32(expected))
    assert not np.signbit(result[result == 0]).any()


def test_functions_stay_within_their_ranges(functions: Function) -> None:
    x = np.concatenate([sweep(-1e9, 1e9), np.float32([3e38, -3e38])])
    assert np.abs([functions(name, x) for name in ("sine", "cosine")]).max() <= 1
    high, highest = functions("exponential", np.float32([89, np.inf]))
    assert 2e38 < high == highest < np.inf  # e^88.3 = 2.2e38
    assert functions("logistic", np.float32([-200, -np.inf])).max() < 1e-38


@pytest.mark.parametrize("reach", [3.2, 100.0, 1e4])
def test_wrap_angle(functions: Function, reach: float) -> None:
    x = sweep(-reach, reach)
    wrapped, pi = functions("wrap_angle", x), np.float32(np.pi)
    assert -pi <= wrapped.min() <= wrapped.max() < pi
    gap = np.abs(wrapped - x.astype(np.float64)) % (2 * np.pi)
    assert np.minimum(gap, 2 * np.pi - gap).max() < 4e-7  # an ulp near pi is 2.4e-7
    inside = np.abs(x) < 3.14
    assert np.array_equal(wrapped[inside], x[inside])
    assert functions("wrap_angle", np.float32([pi]))[0] == pytest.approx(-pi, abs=2.4e-7)


def test_same_bits_without_optimization(functions: Function, compile_unit: CompileUnit) -> None:
    plain = open_functions(compile_unit(UNIT, "-O0"))
    for name in NAMES:
        x = sweep(0 if name == "square_root" else -1e5, 1e5)
        assert plain(name, x).tobytes() == functions(name, x).tobytes(), name
