"""A GPU that is not there, for `CudaBackend` as it is: what nvcc makes for it runs in oracles/ptx_machine.py.

PyCUDA's driver and a few functions of torch.cuda have stand-ins. Tensors "on cuda:0" lie in host memory, and nothing
else may be touched by a kernel. A launch gets the grid, the block and the bytes of arguments that a GPU would get. What
it does not show: ptxas, the driver, the asynchrony of streams, graphs.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import struct
import sys
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from oracles.ptx_machine import IllegalAccess, Machine, Region
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from reagent_lite.sim import cuda
from reagent_lite.sim.cuda_build import build_cubin

GPU = torch.device("cuda", 0)
MULTIPROCESSORS = 4
LARGEST_BLOCK = 256  # `__launch_bounds__` of the kernels, `.maxntid` in the PTX


@functools.cache
def machine(environment: Path, constants: tuple[tuple[str, float], ...], math: str, architecture: str) -> Machine:
    """What nvcc makes of an environment before the assembler, by the flags of the cubin."""
    return Machine(build_cubin(environment, dict(constants), math, architecture, "ptx").read_text())


# -- Memory -----------------------------------------------------------------------------------------------------------


class DeviceMemory(TorchFunctionMode):
    """Tensors that are asked for on cuda:0, and what is computed from them; they say that they lie there."""

    def __init__(self) -> None:
        super().__init__()
        self._held = WeakTensorKeyDictionary()

    def regions(self) -> list[Region]:
        """The memory of all such tensors that still live."""
        places = sorted({(storage.data_ptr(), storage.nbytes()) for storage in self._held.values()})
        return [Region(name="a tensor", address=address, size=size) for address, size in places if size]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.device:
            return func(*args, **kwargs)
        if func == Tensor.device.__get__:
            return GPU if args[0] in self._held else func(*args)
        was_on = any(isinstance(value, Tensor) and value in self._held for value in _flat((*args, *kwargs.values())))
        wanted = [torch.device(value).type == "cuda" for value in (*args, kwargs.get("device")) if _is_device(value)]
        result = func(*map(_host, args), **{name: _host(value) for name, value in kwargs.items()})
        is_on = any(wanted) if wanted else was_on
        if func is Tensor.cpu or (was_on and not is_on):
            return result.clone()  # a copy lies elsewhere, also where torch sees no need for one
        if is_on and func is not Tensor.numpy:
            self._held.update(
                {value: value.untyped_storage() for value in _flat((result,)) if isinstance(value, Tensor)}
            )
        return result


def _is_device(value: object) -> bool:
    return isinstance(value, torch.device) or (isinstance(value, str) and value.split(":")[0] in ("cpu", "cuda"))


def _host(value: object) -> object:
    return torch.device("cpu") if _is_device(value) else value


def _flat(values: Iterable[object]) -> Iterator[object]:
    for value in values:
        yield from _flat(value) if isinstance(value, tuple | list) else (value,)


# -- PyCUDA -----------------------------------------------------------------------------------------------------------


class DriverError(Exception):
    """pycuda.driver.Error."""


@dataclass
class Stream:
    """A stream of either library; what is asked of one is noted."""

    name: str
    notes: list[tuple[object, ...]]
    handle: int = 0x5EED

    def wait_stream(self, other: Stream) -> None:
        self.notes.append((self.name, "waits for", other.name))


@dataclass
class Function:
    """A kernel. PyCUDA packs arguments with `struct.pack` by the letters given to `prepare`."""

    gpu: PretendedGpu
    machine: Machine
    name: str
    format: str = ""

    def prepare(self, types: Any) -> None:
        self.format = "".join(types)

    def prepared_async_call(
        self, grid: tuple[int, int], block: tuple[int, int, int], stream: Stream, *given: Any
    ) -> None:
        gpu = self.gpu
        if gpu.context.push.call_count <= gpu.context.pop.call_count or stream is not gpu.stream:
            raise DriverError("cuLaunchKernel failed: invalid device context")
        assert grid == (max(grid[0], 1), 1)
        assert block == (min(max(block[0], 1), LARGEST_BLOCK), 1, 1)
        gpu.notes.append((stream.name, self.name, grid[0], block[0]))
        arguments, memory = struct.pack(self.format, *given), gpu.memory.regions()
        try:
            self.machine.launch(self.name, (grid[0], block[0]), arguments, memory, backwards=gpu.backwards)
        except IllegalAccess as error:
            raise DriverError(f"cuLaunchKernel failed: {error}") from error


@dataclass
class PretendedGpu:
    """What a test may look at and set.

    Attributes:
        memory: of the device.
        context: the primary context, which a launch needs pushed.
        notes: launches (stream, kernel, blocks, threads of a block) and waiting, as they came.
        backwards: run the threads of a launch from the last to the first.
        refused: suffixes of the files that the driver does not load.
    """

    memory: DeviceMemory = field(default_factory=DeviceMemory)
    context: Mock = field(default_factory=Mock)
    notes: list[tuple[object, ...]] = field(default_factory=list)
    backwards: bool = False
    refused: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.stream = Stream("PyCUDA's", self.notes)
        self.outside = Stream("torch's", self.notes)
        self._built: dict[Path, tuple[Path, dict[str, float], str, str]] = {}

    def build(self, path: Path, parameters: dict[str, float], math: Any, arch: str, form: Any = "cubin") -> Path:
        """`build_cubin`, and what it was asked for: a cubin's source is not to be had from itself."""
        cubin = build_cubin(path, parameters, math, arch, form)
        self._built[cubin] = (path, parameters, math, arch)
        return cubin

    def module_from_file(self, name: str) -> object:
        path, parameters, math, arch = self._built[Path(name)]
        if Path(name).suffix in self.refused:
            raise DriverError("cuModuleLoad failed: device kernel image is invalid")
        code = machine(path, tuple(parameters.items()), math, arch)
        return types.SimpleNamespace(get_function=lambda kernel: Function(self, code, kernel))

    def driver(self) -> types.SimpleNamespace:
        """The module pycuda.driver."""
        return types.SimpleNamespace(
            init=lambda: None,
            Error=DriverError,
            Device=lambda index: types.SimpleNamespace(retain_primary_context=lambda: self.context),
            Stream=lambda flags: self.stream,
            Context=types.SimpleNamespace(synchronize=lambda: self.notes.append(("waited",))),
            module_from_file=self.module_from_file,
        )


@contextmanager
def pretended_gpu(capability: tuple[int, int] = (9, 0)) -> Iterator[PretendedGpu]:
    """Makes torch and PyCUDA find a GPU; CudaBackend then computes on the CPU what nvcc makes for it."""
    gpu = PretendedGpu()
    package = types.SimpleNamespace(__spec__=importlib.machinery.ModuleSpec("pycuda", None), driver=gpu.driver())
    open_library = ctypes.CDLL
    of_torch = {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "get_device_capability": lambda device=None: capability,
        "get_device_name": lambda device=None: "none",
        "get_device_properties": lambda device=None: types.SimpleNamespace(multi_processor_count=MULTIPROCESSORS),
        "mem_get_info": lambda device=None: (2**34, 2**34),
        "is_current_stream_capturing": lambda: False,
        "current_stream": lambda device=None: gpu.outside,
        "ExternalStream": lambda handle, device: gpu.stream,
    }
    # what a real GPU has open stays so
    of_backend = {name: functools.cache(getattr(cuda, name).__wrapped__) for name in ("_open", "_load")}
    with (
        pytest.MonkeyPatch.context() as modules,
        patch.multiple(torch.cuda, **of_torch),
        patch.object(torch.version, "cuda", "13.0"),
        patch.multiple(cuda, build_cubin=gpu.build, **of_backend),
        patch.object(cuda.atexit, "register"),
        patch.object(
            ctypes, "CDLL", lambda name, **mode: None if name == "libcuda.so.1" else open_library(name, **mode)
        ),
        gpu.memory,
    ):
        modules.setitem(sys.modules, "pycuda", package)
        modules.setitem(sys.modules, "pycuda.driver", package.driver)
        yield gpu
