"""The GPU build of an environment: PyCUDA launches its kernels over torch's memory, inside torch's context.

One PyCUDA stream per device carries all launches: PyCUDA cannot launch on a stream that it did not create, while torch
can work on any. Inside `on_stream` it is torch's current stream as well, so that no stream waits for another and a CUDA
graph captures the work of both. Launches from other streams are correct as well, but cost two events each.
"""

import atexit
import ctypes
import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from reagent_lite.errors import KernelBuildError, Problem, SimulationError
from reagent_lite.sim.calls import ActCall, Call, Kernel
from reagent_lite.sim.cuda_build import architecture, build_cubin, device_problem, driver_problem, read_description
from reagent_lite.sim.kernel_sources import require_parameters
from reagent_lite.sim.spec import EnvSpec

SYNCHRONIZE = "REAGENT_LITE_CUDA_SYNC"
_WARP = 32
_LARGEST_BLOCK = 256  # also in the kernels' __launch_bounds__
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING, as torch's own streams are
_KERNELS = {"env_reset": Call, "env_step": Call, "env_observe": Call, "env_act": ActCall}


@dataclass(frozen=True, slots=True)
class _Opened:
    """PyCUDA's objects for a device, kept until the process ends.

    Attributes:
        context: the device's primary context, which torch uses.
        stream: PyCUDA's stream for all launches.
        torch_stream: the same stream for torch.
    """

    context: Any
    stream: Any
    torch_stream: torch.cuda.Stream

    @contextmanager
    def current(self) -> Iterator[None]:
        """Makes the context current for PyCUDA; a thread that ends with a context pushed aborts the process."""
        self.context.push()
        try:
            yield
        finally:
            self.context.pop()

    @contextmanager
    def order_launches(self, device: torch.device) -> Iterator[None]:
        """Orders launches after earlier work on torch's current stream and before later work on it."""
        outside = torch.cuda.current_stream(device)
        if outside == self.torch_stream:
            yield
            return
        self.torch_stream.wait_stream(outside)
        yield
        outside.wait_stream(self.torch_stream)


@contextmanager
def on_stream(device: torch.device) -> Iterator[torch.cuda.Stream | None]:
    """Makes the simulation's stream torch's current stream; the two streams wait for each other at both ends.

    Yields the stream, to pass to `torch.cuda.graph(graph, stream=...)`. On a CPU it yields None and does nothing.
    Without a working PyCUDA it yields a new stream of torch: environments are then on the CPU, updates still captured.
    """
    stream = _shared_stream(device)
    if stream is None:
        yield None
        return
    outside = torch.cuda.current_stream(device)
    stream.wait_stream(outside)
    try:
        with torch.cuda.stream(stream):
            yield stream
    finally:
        outside.wait_stream(stream)


def _shared_stream(device: torch.device) -> torch.cuda.Stream | None:
    if device.type != "cuda":
        return None
    try:
        return _open(_index(device)).torch_stream
    except KernelBuildError:
        return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class CudaBackend:
    """An environment compiled for a GPU; one thread per environment or agent, and no launch waits for the device.

    The environment variable REAGENT_LITE_CUDA_SYNC=1 makes every launch wait, so that an error names its kernel.

    Attributes:
        spec: description of the environment.
        device: the GPU.
    """

    def __init__(
        self, path: Path, parameters: dict[str, float], math: Literal["exact", "fast"], device: torch.device
    ) -> None:
        """Compiles the environment, or loads it from the cache.

        Args:
            path: file of the environment.
            parameters: constants of its dynamics to replace.
            math: `exact` gives the same bits as the CPU; `fast` may join a multiplication and an addition.
            device: the GPU; without an index, the current GPU.

        Raises:
            KernelBuildError: no GPU, no PyCUDA, no nvcc, a GPU too old, or nvcc refuses the source.
            SimulationError: the environment does not have a given parameter.
        """
        cuda = _driver()
        if device.type != "cuda":
            advice = "Set use_gpu to true, or simulate on the CPU"
            raise KernelBuildError(Problem("simulation.backend", "a run on a GPU", f"cuda on {device}", advice))
        self.device = torch.device("cuda", _index(device))
        problem = device_problem(self.device)
        if problem is not None:
            raise KernelBuildError(problem)
        self._driver_error: type[Exception] = cuda.Error
        self._synchronize = cuda.Context.synchronize if os.environ.get(SYNCHRONIZE, "0") not in ("", "0") else None
        self._multiprocessors = torch.cuda.get_device_properties(self.device).multi_processor_count
        self._name = path.stem
        self._opened = _open(self.device.index)
        build = functools.partial(build_cubin, path, parameters, math, architecture(self.device))
        cubin = build()
        try:
            module = _load(cubin, self.device.index)
        except KernelBuildError as error:  # code of an nvcc that is newer than the driver; PTX may still load
            try:
                module = _load(build("ptx"), self.device.index)
            except KernelBuildError:
                raise error from None
        with self._opened.current():
            self._kernels = {name: module.get_function(name) for name in (*_KERNELS, "env_describe")}
            for name, arguments in _KERNELS.items():
                self._kernels[name].prepare((f"{ctypes.sizeof(arguments)}s",))
            self._kernels["env_describe"].prepare("PPPP")
        self.spec = self._measure(EnvSpec.parse(self._name, read_description(cubin)))
        require_parameters(parameters, self.spec)

    def launch(self, kernel: Kernel, call: Call | ActCall) -> None:
        """Runs one kernel over all environments of a call."""
        if kernel == "env_act":
            self._launch(kernel, call.num * self.spec.agents, bytes(call))
        elif self.spec.threads_per_env > 1:
            self._launch(kernel, call.num * self.spec.threads_per_env, bytes(call), block=self.spec.threads_per_env)
        else:
            self._launch(kernel, call.num, bytes(call))

    def _launch(self, name: str, threads: int, *arguments: bytes | int, block: int = 0) -> None:
        block = block or min(spread_block(threads, self._multiprocessors), threads)
        grid = -(-threads // block)
        try:
            with self._opened.order_launches(self.device), self._opened.current():
                self._kernels[name].prepared_async_call((grid, 1), (block, 1, 1), self._opened.stream, *arguments)
                if self._synchronize and not torch.cuda.is_current_stream_capturing():
                    self._synchronize()
        except self._driver_error as error:
            advice = (
                "" if self._synchronize else f"An earlier kernel may be at fault: set {SYNCHRONIZE}=1 to find out which"
            )
            where = f"kernel {name} of {self._name} on {self.device}"
            raise SimulationError(Problem(where, "a launch without error", str(error), advice)) from error

    def _measure(self, spec: EnvSpec) -> EnvSpec:
        """Returns the spec with parameters and action features as reported by the kernel."""
        parameters = torch.zeros(len(spec.parameters), device=self.device)
        features = torch.zeros(spec.num_actions, spec.action_feature_size, device=self.device)
        types = torch.zeros(spec.agents, dtype=torch.int32, device=self.device)
        observed = torch.zeros(1, dtype=torch.int32, device=self.device)
        outputs = (parameters, features, types, observed)
        self._launch("env_describe", 1, *(tensor.data_ptr() for tensor in outputs))
        return spec.with_measurements(parameters.tolist(), features.cpu(), types.tolist(), int(observed))


def spread_block(threads: int, multiprocessors: int) -> int:
    """Returns the number of threads per block, a multiple of a warp and at most 256, that uses all multiprocessors."""
    warps = -(-threads // (_WARP * multiprocessors))
    return _WARP * min(warps, _LARGEST_BLOCK // _WARP)


def _driver() -> Any:
    problem = driver_problem()
    if problem is not None:
        raise KernelBuildError(problem)
    try:
        # A PyCUDA that was built on a machine without a driver does not link to the driver's library.
        ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
        import pycuda.driver

        pycuda.driver.init()
    except Exception as error:  # a package built elsewhere may raise anything
        advice = "Build it again with this machine's CUDA toolkit: pip install --force-reinstall --no-cache-dir pycuda"
        raise KernelBuildError(Problem("simulation on a GPU", "a PyCUDA that loads", str(error), advice)) from error
    return pycuda.driver


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


@functools.cache
def _open(index: int) -> _Opened:
    cuda = _driver()
    torch.zeros(1, device=f"cuda:{index}")  # torch makes the context that PyCUDA joins
    context = cuda.Device(index).retain_primary_context()
    atexit.register(context.detach)  # otherwise PyCUDA's destructor would detach it like a context of its own
    context.push()
    try:
        stream = cuda.Stream(_NON_BLOCKING)
    finally:
        context.pop()
    shared = torch.cuda.ExternalStream(stream.handle, device=index)  # type: ignore[no-untyped-call]
    return _Opened(context, stream, shared)


@functools.cache
def _load(code: Path, index: int) -> Any:
    """Loads a module that is never unloaded: that would wait for the device, and captured graphs use its kernels."""
    cuda = _driver()
    with _open(index).current():
        try:
            return cuda.module_from_file(str(code))
        except cuda.Error as error:
            advice = "Delete the file and try again; if that does not help, update the GPU's driver"
            raise KernelBuildError(
                Problem(str(code), "machine code that this driver accepts", str(error), advice)
            ) from error
