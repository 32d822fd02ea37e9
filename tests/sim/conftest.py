"""Compiled environments and small compiled units, made once for all tests of this folder."""

import ctypes
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from reagent_lite.sim.compiler import KERNELS, find_compiler
from reagent_lite.sim.cpu import CpuBackend
from reagent_lite.sim.env import VectorEnv

# Counts up by 1 + action from 0 and ends at `goal`: everything it does can be worked out in one's head.
COUNTER = """
#define NUM_ACTIONS 3
#define OBSERVATION_SIZE 2
#define TIME_LIMIT 100
#define PARAMETERS(P) P(goal, 4.0f) P(worth, 1.0f)
#define STATE(FIELD, ARRAY) FIELD(int, count) ARRAY(float, past, 2) FIELD(unsigned, lot)
DECLARE_ENVIRONMENT
DEVICE void reset(State &s, Random &random) {
  s.count = 0;
  s.past[0] = s.past[1] = -1.0f;
  s.lot = draw(random);
}
DEVICE void observe(const State &s, float *observation) {
  observation[0] = float(s.count);
  observation[1] = s.past[1];
}
DEVICE float step(State &s, int action, Random &random, bool &terminated) {
  s.past[1] = s.past[0];
  s.past[0] = float(action);
  s.count += 1 + action;
  terminated = s.count >= int(goal);
  return worth * float(s.count);
}
"""
# Only actions above the count are allowed.
MASKED_COUNTER = (
    COUNTER + "#define MASKED\nDEVICE bool allowed(const State &s, int action) { return action > s.count; }\n"
)

CompileUnit = Callable[..., ctypes.CDLL]


@pytest.fixture(scope="session")
def compile_unit(tmp_path_factory: pytest.TempPathFactory) -> CompileUnit:
    """Compiles a unit that includes kernel files, and opens it."""

    def compile_it(source: str, *flags: str) -> ctypes.CDLL:
        folder = tmp_path_factory.mktemp("unit")
        file, library = folder / "unit.cpp", folder / "unit.so"
        file.write_text(source)
        exact = ("-std=c++17", "-ffp-contract=off", "-fno-math-errno", "-fopenmp-simd", "-shared", "-fPIC", "-w")
        command = (*find_compiler().command, *exact, f"-I{KERNELS}", *flags, str(file), "-o", str(library))
        subprocess.run(command, check=True)
        return ctypes.CDLL(str(library))

    return compile_it


MakeEnv = Callable[..., VectorEnv]


@pytest.fixture
def counter(tmp_path: Path) -> MakeEnv:
    """Makes reset environments of the counter above, or of another text."""

    def make(source: str = COUNTER, *, parameters: dict[str, float] | None = None, **settings: object) -> VectorEnv:
        file = tmp_path / "counter.cuh"
        file.write_text(source)
        env = VectorEnv(CpuBackend(file, parameters or {}, "exact"), **settings)  # type: ignore[arg-type]
        env.reset()
        return env

    return make
