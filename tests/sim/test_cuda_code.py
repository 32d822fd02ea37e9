"""What nvcc makes of our kernels, run on the CPU, gives the bits of the CPU build.

The PTX that nvcc makes before the assembler is executed by oracles/ptx_machine.py, which also holds every load and
store to the tensors handed in. `CudaBackend` and `VectorEnv` are the product's own; helpers/pretended_gpu.py stands in
for PyCUDA's driver and torch.cuda (test_cuda_host.py). Not shown: ptxas, the GPU, its driver, streams that run on their
own, graphs; all that is in test_cuda_gpu.py.

Two architectures, for nvcc compiles them with two generations of its optimizer: sm_90 with NVVM 7, sm_100 with NVVM 20.
"""

from pathlib import Path

import pytest
import torch
from helpers.pretended_gpu import GPU, MULTIPROCESSORS, machine, pretended_gpu
from helpers.same_bits import CORNERS, backends, play, require_same
from sim.conftest import play_at_random, written

from reagent_lite.errors import SimulationError
from reagent_lite.sim import cuda
from reagent_lite.sim.cpu import CpuBackend
from reagent_lite.sim.cuda import CudaBackend, spread_block
from reagent_lite.sim.cuda_build import find_nvcc
from reagent_lite.sim.env import VectorEnv
from reagent_lite.sim.kernel_sources import find_environment, known_environments

pytestmark = pytest.mark.skipif(find_nvcc() is None, reason="no nvcc on this machine")
HOPPER, BLACKWELL = (9, 0), (10, 0)
# three agents with nine actions: what nvcc unrolls for eleven with 121 takes ten times as long
FEWER = {
    "tag_continuous": {"num_runners": 2, "num_acceleration_levels": 2, "num_turn_levels": 2, "tagging_distance": 0.1}
}


# -- The same bits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        *((name, HOPPER) for name in (*known_environments(), "corners")),
        ("corners", BLACKWELL),
        ("gridworld", BLACKWELL),
        *(
            pytest.param(name, BLACKWELL, marks=pytest.mark.slow)
            for name in known_environments()
            if name != "gridworld"
        ),
    ],
)
def test_every_buffer_is_that_of_the_cpu_build(tmp_path: Path, name: str, capability: tuple[int, int]) -> None:
    """Corners: -0, NaN, infinities, subnormals, shifts, division, indexed arrays."""
    path = written(tmp_path, CORNERS, "corners.cuh") if name == "corners" else find_environment(name)
    with pretended_gpu(capability) as gpu:
        on_gpu, on_cpu = backends(path, FEWER.get(name))
        assert on_gpu.spec == on_cpu.spec  # env_describe
        agents = on_cpu.spec.agents
        num = 257 if agents == 1 else 24
        settings = {"num_envs": num, "first_env": 12345, "seed": 7, "stream": 3, "time_limit": 60, "parametric": True}
        envs = [VectorEnv(backend, **settings) for backend in (on_gpu, on_cpu)]
        play(envs, 300 if agents == 1 else 140)
        assert envs[0].episode.sum() >= 2 * num
        if name == "corners":
            seen = envs[0].observation.cpu()
            assert seen.isnan().any()
            assert (seen.view(torch.int32) == -(2**31)).any()
        for env in envs:
            env.observation.zero_()
            env.observe()
            env.advance(observe=False)
            env.advance()
            env.step(stay=True)
        require_same(envs, "observe")
        for env in envs:
            env.reset()
            env.act(None, epsilon=torch.ones(1, device=env.device))
            env.action[[20, 2, 23]] = 255
            env.step()
            says = "rewards of corners" if name == "corners" else rf"3 that are not, .* is {12345 + 2 // agents}"
            with pytest.raises(SimulationError, match=says):
                env.check()
        require_same(envs, "faults")
        threads = {"env_describe": 1, "env_act": num * agents, "env_reset": num, "env_step": num, "env_observe": num}
        blocks = {kernel: min(spread_block(count, MULTIPROCESSORS), count) for kernel, count in threads.items()}
        assert {note[1:] for note in gpu.notes if note[1] in threads} == {
            (kernel, -(-threads[kernel] // block), block) for kernel, block in blocks.items()
        }


WIDE = """
#include "port.cuh"
#define NUM_ACTIONS 100
#define MASKED
#define OBSERVATION_SIZE 8
#define TIME_LIMIT 20
#define STATE(FIELD, ARRAY) ARRAY(float, x, 8)
DECLARE_ENVIRONMENT
DEVICE void reset(State &s, Random &random) {
  for (int k = 0; k < 8; ++k) s.x[k] = uniform(random);
}
DEVICE void observe(const State &s, float *observation) {
  for (int k = 0; k < 8; ++k) observation[k] = s.x[k];
}
DEVICE bool allowed(const State &s, int action) { return s.x[action % 8] < 0.9f; }
DEVICE float step(State &s, int action, Random &random, bool &terminated) {
  s.x[action % 8] = uniform(random);
  terminated = s.x[0] < 0.1f;
  return s.x[action % 8];
}
"""


def test_many_choices_are_a_loop_and_rows_are_stored_in_parts_of_16_bytes(tmp_path: Path) -> None:
    file = written(tmp_path, WIDE, "wide.cuh")
    with pretended_gpu():
        play([VectorEnv(backend, num_envs=65, seed=2) for backend in backends(file)], 30)
        entries = machine(file, (), "exact", "sm_90").module.entries
        small = machine(find_environment("cartpole_v1"), (), "exact", "sm_90").module.entries
    assert len(entries["env_act"].body) < 8 * len(small["env_act"].body)  # 50 times as many choices
    assert all("st.global.v4.f32" in str(entry.body) for entry in (entries["env_step"], small["env_step"]))


@pytest.mark.parametrize("block_size", [32, 100])
def test_blocks_and_the_order_of_threads_do_not_matter(block_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "spread_block", lambda threads, multiprocessors: block_size)
    with pretended_gpu() as gpu:
        gpu.backwards = block_size == 32
        play([VectorEnv(backend, num_envs=333) for backend in backends(find_environment("recommend"))], 60)
        assert gpu.notes[-2][1:] == ("env_step", -(-333 // block_size), block_size)


# -- Fast mathematics -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cartpole_v1", "acrobot", pytest.param("pendulum", marks=pytest.mark.slow)])
def test_fused_arithmetic_differs_by_roundings_only(name: str) -> None:
    """One step from the same states; that bits differ shows that the comparisons above would notice."""
    with pretended_gpu():
        path = find_environment(name)
        fast = VectorEnv(CudaBackend(path, {}, "fast", GPU), num_envs=2000)
        exact = VectorEnv(CpuBackend(path, {}, "exact"), num_envs=2000)
        exact.reset()
        play_at_random(exact, 5)
        exact.act(None, epsilon=torch.ones(1))
        fast.load_state_dict(exact.state_dict())
        for env in (fast, exact):
            env.step()
        differences = (
            (fast.next_observation.cpu() - exact.next_observation) / exact.next_observation.abs().amax(0).clamp(min=1.0)
        ).abs()
        assert 0 < differences.max() < 2e-6  # some 16 roundings of 2^-24
        assert (differences > 0).float().mean() > 0.01
        torch.testing.assert_close(fast.reward.cpu(), exact.reward, atol=1e-5, rtol=1e-5)
