"""The CUDA build on a GPU: the CPU build is the truth, bit for bit."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Literal

import pytest
import torch
from helpers.same_bits import CORNERS, bits, play
from sim.conftest import written
from torch import Tensor

from reagent_lite.config.environment import EnvironmentConfig
from reagent_lite.errors import KernelBuildError, SimulationError
from reagent_lite.sim.backend import open_backend
from reagent_lite.sim.cpu import CpuBackend
from reagent_lite.sim.cuda import SYNCHRONIZE, CudaBackend, on_stream
from reagent_lite.sim.cuda_build import cuda_problem, driver_problem
from reagent_lite.sim.env import VectorEnv
from reagent_lite.sim.kernel_sources import find_environment, known_environments

DEVICE = torch.device("cuda", 0)
PROBLEM = driver_problem()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(PROBLEM is not None, reason=str(PROBLEM))]
Open = Callable[..., CudaBackend]


@pytest.fixture
def cuda() -> Open:
    """Opens an environment on the GPU; skips where it is not compiled and there is no nvcc."""

    def opened(name: str | Path) -> CudaBackend:
        path = name if isinstance(name, Path) else find_environment(name)
        if problem := cuda_problem(DEVICE, path):
            pytest.skip(problem)
        return CudaBackend(path, {}, "exact", DEVICE)

    return opened


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a program of its own: what it does to the context or at its end must not reach this one."""
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        cwd=Path(__file__).resolve().parents[2],
        check=False,
    )


# -- The same bits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*known_environments(), "corners"])
def test_a_gpu_computes_the_bits_of_a_cpu(cuda: Open, tmp_path: Path, name: str) -> None:
    """Actions drawn uniformly, by softmax and by epsilon-greedy, of values with NaN and infinities.

    Corners: NaN, both zeros, numbers too small to be normal, integers that wrap around.
    """
    path = written(tmp_path, CORNERS, "corners.cuh") if name == "corners" else find_environment(name)
    on_gpu, on_cpu = cuda(path), CpuBackend(path, {}, "exact")
    assert on_gpu.spec == on_cpu.spec
    settings = {"num_envs": 1000, "first_env": 12345, "seed": 7, "stream": 3, "time_limit": 150, "parametric": True}
    steps, every = (120, 1) if name == "corners" else (1000, 100)
    play([VectorEnv(backend, **settings) for backend in (on_gpu, on_cpu)], steps, every)


# -- Streams and graphs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("name", ["cartpole_v1", "recommend"])
def test_a_captured_graph_computes_the_bits_of_eager_calls(cuda: Open, name: str, inside: bool) -> None:
    """Captured on our stream, or on one that torch.cuda.graph takes: launches fork from it and join it again."""
    env = VectorEnv(cuda(name), num_envs=1000, parametric=True)
    epsilon, total = torch.full((1,), 0.5, device=DEVICE), torch.zeros(1000, device=DEVICE)

    def iteration() -> None:
        env.act(env.observation[:, : env.spec.num_actions] * 2.0, epsilon=epsilon)
        env.step()
        total.add_(env.reward)

    def outcome(step: Callable[[], None]) -> tuple[dict[str, bytes], list[float]]:
        env.load_state_dict(start)
        total.zero_()
        for _ in range(100):
            step()
        torch.cuda.synchronize()
        return bits(env), total.tolist()

    with on_stream(DEVICE if inside else torch.device("cpu")) as stream:
        env.reset()
        for _ in range(3):
            iteration()
        start = env.state_dict()
        expected = outcome(iteration)
        before, graph = bits(env), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            iteration()
        assert bits(env) == before
        assert outcome(graph.replay) == expected


def test_launches_from_any_stream_are_in_order(cuda: Open) -> None:
    """A kernel that takes long writes the actions; the step must come after it, and the reading after the step."""
    env = VectorEnv(cuda("cartpole_v1"), num_envs=4096)
    env.reset()
    start = env.state_dict()
    pushes = torch.arange(4096, device=DEVICE).remainder(2).to(torch.uint8)

    def moved() -> Tensor:
        env.load_state_dict(start)
        torch.cuda._sleep(50_000_000)  # clock cycles, some 30 ms
        env.action.copy_(pushes)
        env.step()
        return env.observation.clone()

    results = []
    for context in (nullcontext(), torch.cuda.stream(torch.cuda.Stream(DEVICE)), on_stream(DEVICE)):
        with context:
            results.append(moved())
            torch.cuda.synchronize()
    with on_stream(DEVICE), on_stream(DEVICE):
        results.append(moved())
    on_cpu = VectorEnv(CpuBackend(find_environment("cartpole_v1"), {}, "exact"), num_envs=4096)
    on_cpu.load_state_dict(start)
    on_cpu.action.copy_(pushes)
    on_cpu.step()
    assert all(torch.equal(result.cpu(), on_cpu.observation) for result in results)


@pytest.mark.parametrize("inside", [True, False])
def test_nothing_waits_for_the_device(cuda: Open, inside: bool) -> None:
    env = VectorEnv(cuda("cartpole_v1"), num_envs=1000)
    epsilon = torch.ones(1, device=DEVICE)
    with on_stream(DEVICE if inside else torch.device("cpu")):
        env.reset()
        env.act(None, epsilon=epsilon)
        env.step()
        torch.cuda.synchronize()
        torch.cuda._sleep(4_000_000_000)  # clock cycles, 2 s or so
        begin = time.perf_counter()
        for _ in range(10):
            env.act(None, epsilon=epsilon)
            env.step()
        queued = time.perf_counter() - begin
        torch.cuda.synchronize()
        done = time.perf_counter() - begin
    assert done > 0.5
    assert queued < 0.2 * done


# -- Errors -----------------------------------------------------------------------------------------------------------


def test_more_than_the_memory_holds_is_refused(cuda: Open) -> None:
    with pytest.raises(SimulationError, match=r"GiB free on cuda:0, got 2147483647"):
        VectorEnv(cuda("recommend"), num_envs=2**31 - 1)


def test_the_backend_is_chosen_by_the_device(cuda: Open) -> None:
    cuda("cartpole_v1")

    def chosen(backend: Literal["auto", "cuda", "cpu"], device: torch.device) -> type:
        return type(open_backend(EnvironmentConfig(env="cartpole_v1", backend=backend), device))

    cpu = torch.device("cpu")
    assert [chosen("auto", DEVICE), chosen("cuda", DEVICE), chosen("cuda", torch.device("cuda"))] == [CudaBackend] * 3
    assert [chosen("auto", cpu), chosen("cpu", cpu), chosen("cpu", DEVICE)] == [CpuBackend] * 3
    with pytest.raises(KernelBuildError, match="got cuda on cpu"):
        chosen("cuda", cpu)


FAULTY = """
import torch
from reagent_lite.sim.cuda import CudaBackend
from reagent_lite.sim.env import VectorEnv
from reagent_lite.sim.kernel_sources import find_environment

env = VectorEnv(CudaBackend(find_environment("cartpole_v1"), {}, "exact", torch.device("cuda")), num_envs=100)
env.reset()
env._call.observation = ADDRESS
try:
    env.step()
    env.reset()
    torch.cuda.synchronize()
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("address", "error"), [("16", "illegal memory access"), ("env.observation.data_ptr() + 4", "misaligned address")]
)
def test_waiting_for_every_launch_names_the_faulty_kernel(cuda: Open, address: str, error: str) -> None:
    """A row of CartPole is stored 16 bytes at once; address 16 is nobody's."""
    cuda("cartpole_v1")
    done = python(FAULTY.replace("ADDRESS", address), **{SYNCHRONIZE: "1"})
    assert re.search(
        f"SimulationError kernel env_step of cartpole_v1 on cuda:0: .* without error.*{error}", done.stdout
    )


THREADED = """
import threading
import torch
from reagent_lite.sim.cuda import CudaBackend, on_stream
from reagent_lite.sim.env import VectorEnv
from reagent_lite.sim.kernel_sources import find_environment

def run():
    device = torch.device("cuda")
    with on_stream(device):
        env = VectorEnv(CudaBackend(find_environment("cartpole_v1"), {}, "exact", device), num_envs=100)
        env.reset()
        env.act(None, epsilon=torch.ones(1, device=device))
        env.step()
        env.check()

threads = [threading.Thread(target=run) for _ in range(2)]
for thread in threads:
    thread.start()
    thread.join()
run() if FIRST else None
print("end")
"""


@pytest.mark.parametrize("first", [True, False])
def test_threads_and_the_process_end_in_peace(cuda: Open, first: bool) -> None:
    """PyCUDA aborts a thread that ends with a context pushed, and complains of contexts that it finds gone."""
    cuda("cartpole_v1")
    done = python(THREADED.replace("FIRST", str(first)))
    assert (done.returncode, done.stdout, "PyCUDA" in done.stderr) == (0, "end\n", False), done.stderr
