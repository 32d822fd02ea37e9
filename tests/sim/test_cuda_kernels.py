"""The kernels' own branch of env.cuh, compiled by the C++ compiler: what a GPU would compute, without one.

A few lines stand in for what CUDA adds to C++; the threads of a launch run one after another. The arithmetic is then
the CPU's, so this says nothing of nvcc; it says that both branches of the machinery do the same.
"""

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch

from reagent_lite.sim.calls import ActCall, Call, Kernel
from reagent_lite.sim.compiler import KERNELS, find_compiler
from reagent_lite.sim.cpu import CpuBackend
from reagent_lite.sim.env import VectorEnv
from reagent_lite.sim.sources import compilation_unit, find_environment, known_environments
from reagent_lite.sim.spec import EnvSpec

CUDA = """
#define __CUDACC__
#define __device__
#define __global__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
struct Index { unsigned x; };
static Index blockIdx, blockDim, threadIdx;
static inline unsigned __float_as_uint(float x) { unsigned u; __builtin_memcpy(&u, &x, 4); return u; }
static inline float __uint_as_float(unsigned u) { float x; __builtin_memcpy(&x, &u, 4); return x; }
static inline float __fsqrt_rn(float x) { return __builtin_sqrtf(x); }
static inline float floorf(float x) { return __builtin_floorf(x); }
static inline unsigned atomicAdd(unsigned *p, unsigned v) { unsigned old = *p; *p += v; return old; }
static inline unsigned atomicMax(unsigned *p, unsigned v) { unsigned old = *p; *p = v > old ? v : old; return old; }
"""
LAUNCH = """
#define LAUNCH(kernel, Arguments)                                                                     \\
  extern "C" void launch_##kernel(const reagent_lite::environment::Arguments *call, unsigned block) { \\
    blockDim.x = block;                                                                               \\
    for (blockIdx.x = 0; blockIdx.x * block < unsigned(call->num); ++blockIdx.x)                      \\
      for (threadIdx.x = 0; threadIdx.x < block; ++threadIdx.x)                                       \\
        reagent_lite::environment::kernel(*call);                                                     \\
  }
LAUNCH(env_reset, Call)
LAUNCH(env_step, Call)
LAUNCH(env_observe, Call)
LAUNCH(env_act, ActCall)
"""


class EmulatedBackend:
    """Launches the kernels on the CPU, a thread at a time."""

    def __init__(self, path: Path, folder: Path, spec: EnvSpec, block_size: int) -> None:
        self.spec, self.device, self._block_size = spec, torch.device("cpu"), block_size
        source, library = folder / "unit.cpp", folder / "unit.so"
        source.write_text(CUDA + compilation_unit(path, {}) + LAUNCH)
        flags = ("-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-w", f"-I{KERNELS}", f"-I{path.parent}")
        subprocess.run([*find_compiler().command, *flags, str(source), "-o", str(library)], check=True)
        self._library = ctypes.CDLL(str(library))

    def launch(self, kernel: Kernel, call: Call | ActCall) -> None:
        self._library[f"launch_{kernel}"](ctypes.byref(call), self._block_size)


def bits(env: VectorEnv) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in env.state_dict().items()}


@pytest.mark.parametrize("name", known_environments())
def test_the_kernels_do_what_the_cpu_build_does(name: str, tmp_path: Path) -> None:
    path = find_environment(name)
    cpu = CpuBackend(path, {}, "exact", optimization="-O1")
    envs = [
        VectorEnv(backend, num_envs=700, first_env=5, seed=1, stream=2, time_limit=23, parametric=True)
        for backend in (cpu, EmulatedBackend(path, tmp_path, cpu.spec, block_size=96))
    ]
    epsilon = torch.tensor([0.3])
    for env in envs:
        env.reset()
    for step in range(60):
        if step == 40:
            for env in envs:
                env.action.fill_(7 if env.spec.has_mask else 255)  # some or all are not allowed
                env.step()
        for env in envs:
            q = torch.sin(torch.arange(700.0 * env.spec.num_actions) * (step + 1)).view(700, -1)
            env.act(None if step % 3 == 0 else q, epsilon=epsilon, temperature=0.5 if step % 3 == 1 else 0.0)
            env.step()
        ours, theirs = map(bits, envs)
        assert ours == theirs, (step, [name for name in ours if ours[name] != theirs[name]])
    for env in envs:
        assert env.episode.sum() > 700  # autoreset was used
        env.observation.zero_()
        env.observe()
    assert bits(envs[0]) == bits(envs[1])
