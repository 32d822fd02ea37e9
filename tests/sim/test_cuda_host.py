"""`CudaBackend` calls what nvcc makes of our kernels rightly: arguments, memory, blocks, streams, contexts.

The product's own `CudaBackend`, `VectorEnv` and `Rollout`; helpers/pretended_gpu.py stands in for PyCUDA's driver and
torch.cuda and executes the PTX. What that does not show is in its first lines and tested on a GPU by test_cuda_gpu.py.
"""

import os
import re
import sys
from pathlib import Path

import pytest
import torch
from helpers.pretended_gpu import GPU, pretended_gpu
from helpers.same_bits import backends
from sim.conftest import written
from sim.replay.rings import ring_of
from torch.testing import assert_close

from reagent_lite.config.environment import EnvironmentConfig
from reagent_lite.errors import SimulationError
from reagent_lite.sim import backend
from reagent_lite.sim.backend import Backend, open_backend
from reagent_lite.sim.compiler import find_compiler
from reagent_lite.sim.cpu import CpuBackend
from reagent_lite.sim.cuda import SYNCHRONIZE, CudaBackend, on_stream, spread_block
from reagent_lite.sim.cuda_build import find_nvcc
from reagent_lite.sim.env import VectorEnv
from reagent_lite.sim.experience import ONLY, Actor, Rollout
from reagent_lite.sim.kernel_sources import find_environment

pytestmark = pytest.mark.skipif(find_nvcc() is None, reason="no nvcc on this machine")


# -- Memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "error"),
    [(16, "writes 16 bytes at address 0x10"), (None, "at byte 4 of a tensor, .*, a misaligned address")],
)
def test_a_row_at_an_address_that_is_no_multiple_of_its_size(address: int | None, error: str) -> None:
    """What a GPU calls an illegal memory access, and a misaligned address."""
    with pretended_gpu():
        env = VectorEnv(CudaBackend(find_environment("cartpole_v1"), {}, "exact", GPU), num_envs=100)
        env.reset()
        env._call.observation = address or env.observation.data_ptr() + 4
        with pytest.raises(SimulationError, match=rf"kernel env_step of cartpole_v1 on cuda:0: .* {error}"):
            env.step()


# -- The host's side --------------------------------------------------------------------------------------------------


def test_launches_are_ordered_and_leave_no_context_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = ("PyCUDA's", "waits for", "torch's"), ("torch's", "waits for", "PyCUDA's")
    with pretended_gpu() as gpu:
        env = VectorEnv(CudaBackend(find_environment("cartpole_v1"), {}, "exact", GPU), num_envs=600)
        env.reset()
        assert gpu.notes[-3:] == [before, ("PyCUDA's", "env_reset", 4, 160), after]  # 5 warps on 4 multiprocessors
        with monkeypatch.context() as inside:  # as inside on_stream
            inside.setattr(torch.cuda, "current_stream", lambda device=None: gpu.stream)
            env.step()
        assert gpu.notes[-2:] == [after, ("PyCUDA's", "env_step", 4, 160)]
        monkeypatch.setenv(SYNCHRONIZE, "1")
        VectorEnv(CudaBackend(find_environment("cartpole_v1"), {}, "exact", GPU), num_envs=5).reset()
        assert gpu.notes[-4:] == [before, ("PyCUDA's", "env_reset", 1, 5), ("waited",), after]
        assert gpu.context.push.call_count == gpu.context.pop.call_count
    with on_stream(torch.device("cpu")) as stream:  # nothing of it is left
        assert stream is None


@pytest.mark.parametrize(
    ("threads", "multiprocessors", "block"),
    [(1, 132, 32), (4224, 132, 32), (4225, 132, 64), (2**20, 132, 256), (33_792, 132, 256), (600, 4, 160)],
)
def test_blocks_are_as_small_as_multiprocessors_need(threads: int, multiprocessors: int, block: int) -> None:
    assert spread_block(threads, multiprocessors) == block


def test_a_rollout_fills_the_same_replay() -> None:
    """Environments on a GPU, the ring on the host: what is learned from is the same."""
    drawn = []
    with pretended_gpu():
        for backend in backends(find_environment("cartpole_v1")):
            ring = ring_of(num_envs=33, observation_size=4, num_actions=2, slots=64, gamma=0.9)
            env = VectorEnv(backend, num_envs=33, seed=5, time_limit=30)
            rollout = Rollout(
                env,
                {
                    ONLY: Actor(
                        policy=lambda seen, *_: seen[:, 1:3], epsilon=torch.ones(1, device=env.device), ring=ring
                    )
                },
                device=torch.device("cpu"),
            )
            rollout.explore(0.5)
            rollout.run(60)
            batch = ring.sample(500).batch
            drawn.append((batch.state, batch.action, batch.reward, batch.next_state, batch.propensity, batch.bootstrap))
            assert rollout.take_finished()[0] >= 66  # episodes of at most 30 steps, 33 environments, 60 steps
    assert_close(drawn[0], drawn[1], rtol=0, atol=0)


# -- What "auto" does where something is amiss ------------------------------------------------------------------------


def auto() -> Backend:
    backend._warn.cache_clear()
    return open_backend(EnvironmentConfig(env="cartpole_v1"), GPU)


@pytest.mark.parametrize(
    ("refused", "chosen", "says"),
    [
        ((".cubin",), CudaBackend, ""),
        (
            (".cubin", ".ptx"),
            CpuBackend,
            r"environments run on the CPU: .*\.cubin: expected machine code.* image is invalid.*",
        ),
    ],
)
def test_a_driver_that_refuses_machine_code_is_given_the_text_and_one_that_refuses_both_leaves_the_cpu(
    caplog: pytest.LogCaptureFixture, refused: tuple[str, ...], chosen: type[Backend], says: str
) -> None:
    with pretended_gpu() as gpu:
        gpu.refused = refused
        opened = auto()
        assert isinstance(opened, chosen)
        VectorEnv(opened, num_envs=100).reset()
    assert re.fullmatch(says, "\n".join(caplog.messages))


def test_a_pycuda_that_cannot_be_imported_leaves_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As one that was built with a newer toolkit than the driver's."""
    written(tmp_path, "", "pycuda/__init__.py")
    written(tmp_path, "raise ImportError('undefined symbol: cuDevSmResourceSplit')", "pycuda/driver.py")
    with pretended_gpu():
        monkeypatch.delitem(sys.modules, "pycuda")
        monkeypatch.delitem(sys.modules, "pycuda.driver")
        monkeypatch.syspath_prepend(str(tmp_path))
        assert isinstance(auto(), CpuBackend)
        assert isinstance(open_backend(EnvironmentConfig(env="cartpole_v1"), GPU), CpuBackend)
    (message,) = caplog.messages  # once, however many are opened
    assert "expected a PyCUDA that loads, got undefined symbol: cuDevSmResourceSplit" in message


@pytest.mark.usefixtures("empty_cache")
def test_an_nvcc_without_a_host_compiler_leaves_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nvcc looks for gcc; the CPU's library comes from clang++ here."""
    program = f'#!/bin/sh\nPATH="{os.environ["PATH"]}" exec {find_compiler().command[0]} "$@"\n'
    written(tmp_path, program, "clang++").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pretended_gpu():
        assert isinstance(auto(), CpuBackend)
    (message,) = caplog.messages
    assert re.search(r"expected g\+\+ on the PATH.*install g\+\+, or simulate on the CPU", message, re.DOTALL)
