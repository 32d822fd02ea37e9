"""The protocol of both backends and the choice between them."""

import functools
from typing import Any, Literal, Protocol

import torch

from reagent_lite.config.environment import GYMNASIUM
from reagent_lite.console import logger
from reagent_lite.errors import KernelBuildError
from reagent_lite.sim.calls import ActCall, Call, Kernel
from reagent_lite.sim.cpu import CpuBackend
from reagent_lite.sim.cuda import CudaBackend
from reagent_lite.sim.gymnasium_backend import GymnasiumBackend
from reagent_lite.sim.sources import find_environment
from reagent_lite.sim.spec import EnvSpec


class Backend(Protocol):
    """A compiled environment that runs kernels over buffers on its device.

    Attributes:
        spec: description of the environment.
        device: device on which buffers must lie.
    """

    spec: EnvSpec
    device: torch.device

    def launch(self, kernel: Kernel, call: Call | ActCall) -> None:
        """Runs one kernel over all environments of a call."""
        ...


def open_backend(
    env: str,
    *,
    backend: Literal["auto", "cuda", "cpu"],
    device: torch.device,
    parameters: dict[str, Any],
    math: Literal["exact", "fast"],
) -> Backend:
    """Returns an environment compiled for the CPU or a GPU, or an environment of Gymnasium.

    Args:
        env: name of an environment of this package, path of a `.cuh` file, or `gymnasium:` and a name.
        backend: `auto` takes CUDA if the device is a GPU; if that fails, it warns and takes the CPU.
        device: the device of the learner; the CUDA build runs on it.
        parameters: constants of the dynamics to replace, or arguments of gymnasium.make.
        math: `exact` gives the same bits on every machine.

    Raises:
        SimulationError: unknown environment or parameter.
        KernelBuildError: the compiler refuses it, or there is no compiler.
    """
    if env.startswith(GYMNASIUM):
        return GymnasiumBackend(env, parameters)
    path = find_environment(env)
    if backend == "auto" and device.type == "cuda":
        try:
            return CudaBackend(path, parameters, math, device)
        except KernelBuildError as error:
            _warn(f"environments run on the CPU: {error}")
    if backend != "cuda":
        return CpuBackend(path, parameters, math)
    return CudaBackend(path, parameters, math, device)


@functools.cache
def _warn(message: str) -> None:
    """Logs a warning once in a process, however often an environment is opened."""
    logger.warning(message)
