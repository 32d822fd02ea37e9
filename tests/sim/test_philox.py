"""Random numbers of the kernels: the published answers, and an independent Philox."""

import ctypes

import numpy as np
import pytest
from oracles import philox as oracle
from sim.conftest import CompileUnit

UNIT = """
#include "philox.cuh"
using namespace reagent_lite;
extern "C" void block(const unsigned *in, unsigned *out) {
  Words words = philox(Words{in[0], in[1], in[2], in[3]}, in[4], in[5]);
  out[0] = words.x; out[1] = words.y; out[2] = words.z; out[3] = words.w;
}
extern "C" void sequence(int count, unsigned *out) {
  Random random = random_for(1u, 2u, 3u, 4u, 5u, FOR_STEP, 5u << 8);
  for (int i = 0; i < count; ++i) out[i] = draw(random);
}
extern "C" void numbers(int count, float *uniforms, float *ranged, int *integers, int *coins) {
  Random a = random_for(7u, 0u, 0u, 0u, 0u, FOR_RESET, 0u), b = a, c = a, d = a;
  for (int i = 0; i < count; ++i) {
    uniforms[i] = uniform(a);
    ranged[i] = uniform(b, -2.0f, 6.0f);
    integers[i] = below(c, 10);
    coins[i] = bernoulli(d, 0.25f);
  }
}
"""
# Random123's known answers of philox4x32-10: counter, key, result.


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.fixture(scope="module", params=["-O0", "-O3"])
def unit(compile_unit: CompileUnit, request: pytest.FixtureRequest) -> ctypes.CDLL:
    return compile_unit(UNIT, request.param)


@pytest.mark.parametrize(
    ("counter", "key", "result"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_known_answers(unit: ctypes.CDLL, counter: str, key: str, result: str) -> None:
    out = (ctypes.c_uint32 * 4)()
    unit.block((ctypes.c_uint32 * 6)(*words(counter), *words(key)), out)
    assert list(out) == oracle.philox(tuple(words(counter)), tuple(words(key))).tolist() == words(result)


def test_a_sequence_goes_through_blocks_of_four_words(unit: ctypes.CDLL) -> None:
    out = (ctypes.c_uint32 * 11)()
    unit.sequence(11, out)
    assert list(out) == oracle.draws(11, 3, 4, oracle.STEP, 5 << 8, (1, 2)).tolist()


def test_numbers_made_of_words(unit: ctypes.CDLL) -> None:
    count = 50_000
    floats, ranged, integers, coins = arrays = [
        (kind * count)() for kind in (*[ctypes.c_float] * 2, *[ctypes.c_int] * 2)
    ]
    unit.numbers(count, *arrays)
    drawn = oracle.draws(count, 0, 0, oracle.RESET, 0, (7, 0))
    uniforms = oracle.uniform(drawn)
    assert np.array_equal(floats, uniforms)
    assert np.array_equal(ranged, np.float32(-2) + uniforms.astype(np.float32) * np.float32(8))
    assert np.array_equal(integers, oracle.below(drawn, 10))
    assert np.array_equal(coins, uniforms < 0.25)
