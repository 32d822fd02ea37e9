"""The protocol of both backends and the choice between them."""

import functools
from typing import Protocol

import torch

from reagent_lite.config.environment import EnvironmentConfig
from reagent_lite.console import logger
from reagent_lite.errors import KernelBuildError
from reagent_lite.sim.calls import ActCall, Call, Kernel
from reagent_lite.sim.cpu import CpuBackend
from reagent_lite.sim.cuda import CudaBackend
from reagent_lite.sim.gymnasium_backend import GymnasiumBackend
from reagent_lite.sim.kernel_sources import find_environment
from reagent_lite.sim.spec import EnvSpec


class Backend(Protocol):
    """An environment that runs kernels over buffers on its device.

    Attributes:
        spec: description of the environment.
        device: device on which buffers must lie.
    """

    spec: EnvSpec
    device: torch.device

    def launch(self, kernel: Kernel, call: Call | ActCall) -> None:
        """Runs one kernel over all environments of a call."""
        ...


def open_backend(settings: EnvironmentConfig, device: torch.device) -> Backend:
    """Returns an environment compiled for the CPU or a GPU, or an environment of Gymnasium.

    Args:
        settings: the environment; backend `auto` uses CUDA if the device is a GPU, and if that fails, warns and uses
            the CPU.
        device: the device of the learner; the CUDA build runs on it.

    Raises:
        SimulationError: unknown environment or parameter.
        KernelBuildError: the environment does not compile, or there is no compiler.
    """
    if settings.in_python:
        return GymnasiumBackend(settings.env, settings.env_parameters)
    path = find_environment(settings.env)
    if settings.backend == "auto" and device.type == "cuda":
        try:
            return CudaBackend(path, settings.env_parameters, settings.math, device)
        except KernelBuildError as error:
            _warn(f"environments run on the CPU: {error}")
    if settings.backend != "cuda":
        return CpuBackend(path, settings.env_parameters, settings.math)
    return CudaBackend(path, settings.env_parameters, settings.math, device)


@functools.cache
def _warn(message: str) -> None:
    """Logs a warning once in a process, however often an environment is opened."""
    logger.warning(message)
