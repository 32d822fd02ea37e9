"""Layers by the kernel of kernels/dense, compiled for this machine and called through ctypes.

The kernel takes a few dozen rows through all layers before the next ones, so that what lies between two layers stays in
the nearest cache, and one call takes the place of ten. It uses one core.

[m] `python -m tests.benchmarks.steps` has it against torch's libraries. Few rows of many weights are left to those: the
kernel copies weights into the order that it reads them in at every call, which takes some 0.6 ns a weight.
"""

import ctypes
import functools
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from reagent_lite.errors import KernelBuildError, Problem
from reagent_lite.native.compiler import KERNELS, build_library, find_compiler

SWITCH = "REAGENT_LITE_LAYERS"
"""Environment variable; with the value torch the kernel is not used."""

UNITS = ("dense.cpp", "q_loss.cpp")
"""What is compiled as one, in the folder kernels/dense."""

_SOURCES = (*UNITS, "layers.h", "product.h", "vectors.h")
_MOST_LAYERS = 32
_MOST_WEIGHTS = 1 << 18  # of a layer; [m] 512 x 1024: torch's libraries are a tenth faster
_FEW_WEIGHTS = 1 << 14  # of all layers; with so few the kernel is the faster one for any number of rows
_WEIGHTS_PER_ROW = 1 << 10  # [m] 128-512-512-20: with 320 rows as fast as torch's libraries, with 64 half as fast

_Address = ctypes.c_void_p
_Long = ctypes.c_long


class DenseKernel:
    """The compiled functions. They run without Python's lock and keep nothing between two calls.

    Attributes:
        library: q_loss_kernel.py has more of it.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self._scratch = library.dense_scratch
        self._scratch.argtypes, self._scratch.restype = (_Address, _Long), _Long
        self._forward = library.dense_forward
        self._forward.argtypes, self._forward.restype = (_Address, _Long, _Address, _Long, _Address), None
        self._backward = library.dense_backward
        self._backward.argtypes = (_Address, _Long, _Address, _Long, _Address, _Address, _Address)
        self._backward.restype = None

    def scratch(self, shapes: Sequence[tuple[int, int, bool]]) -> int:
        """Returns the floats of scratch memory of a call."""
        none = [0] * (2 * len(shapes))
        return int(self._scratch(layer_table(shapes, none, none[::2], none), len(shapes)))

    def forward(self, layers: "KernelLayers", x: Tensor, *, every: bool) -> list[Tensor]:
        """Returns the last layer's output, or every layer's.

        Args:
            layers: that suit x.
            x: [N, inputs] float32 on the CPU, contiguous.
            every: whether gradients will be wanted.
        """
        rows, count = x.shape[0], len(layers.shapes)
        outputs = [x.new_empty(rows, shape[1]) for shape in (layers.shapes if every else layers.shapes[-1:])]
        places = [output.data_ptr() for output in outputs]
        table = layer_table(layers.shapes, layers.addresses(), [0] * (count - len(places)) + places, layers.nowhere)
        scratch = x.new_empty(layers.scratch(self))
        self._forward(table, count, x.data_ptr(), rows, scratch.data_ptr())
        return outputs

    def backward(
        self, layers: "KernelLayers", x: Tensor, outputs: Sequence[Tensor], gradient: Tensor, *, of_x: bool
    ) -> tuple[Tensor | None, list[Tensor]]:
        """Returns the gradient of x, where it is wanted, and those of all parameters.

        Args:
            layers: as given to forward.
            x: as given to forward.
            outputs: of every layer.
            gradient: [N, outputs] of the last one's, contiguous.
            of_x: whether that of x is wanted.
        """
        gradients = [x.new_empty(shape) for shape in layers.parameter_shapes]
        places = [one.data_ptr() for one in gradients]
        table = layer_table(layers.shapes, layers.addresses(), [output.data_ptr() for output in outputs], places)
        scratch, of_input = x.new_empty(layers.scratch(self)), torch.empty_like(x) if of_x else None
        self._backward(
            table, len(layers.shapes), x.data_ptr(), x.shape[0], gradient.data_ptr(),
            None if of_input is None else of_input.data_ptr(), scratch.data_ptr(),
        )  # fmt: skip
        return of_input, gradients


class KernelLayers:
    """Linear layers, each with or without a ReLU after it, as the kernel is told of them.

    Args:
        parameters: weight [outputs, inputs] and bias [outputs] of each layer in turn.
        relus: whether a ReLU follows.

    Attributes:
        shapes: inputs, outputs and ReLU of each layer.
    """

    def __init__(self, parameters: Sequence[Tensor], relus: Sequence[bool]) -> None:
        self._parameters = parameters
        weights = parameters[::2]
        self.shapes = [(w.shape[1], w.shape[0], relu) for w, relu in zip(weights, relus, strict=True)]
        self.parameter_shapes = [p.shape for p in parameters]
        self.nowhere = [0] * len(parameters)
        self._small = len(relus) <= _MOST_LAYERS and all(w.numel() <= _MOST_WEIGHTS for w in weights)
        every = sum(w.numel() for w in weights)
        self._fewest_rows = 0 if every <= _FEW_WEIGHTS else every // _WEIGHTS_PER_ROW
        self._scratch = 0

    def suit(self, x: Tensor) -> bool:
        """Whether the kernel may and should compute these layers of x, as they are now: modules can be converted."""
        return (
            self._small
            and x.dim() == 2
            and x.shape[1] == self.shapes[0][0]
            and x.shape[0] >= self._fewest_rows
            and all(
                p.shape == shape and p.dtype == torch.float32 and p.is_cpu and p.is_contiguous()
                for p, shape in zip(self._parameters, self.parameter_shapes, strict=True)
            )
        )

    def addresses(self) -> list[int]:
        """Returns where the parameters are."""
        return [p.data_ptr() for p in self._parameters]

    def scratch(self, own: DenseKernel) -> int:
        """Returns the floats of scratch memory that a call needs."""
        self._scratch = self._scratch or own.scratch(self.shapes)
        return self._scratch


def kernel() -> DenseKernel | None:
    """Returns the kernel, compiled where it is not yet, or None where `missing` says why."""
    loaded = _loaded()
    return loaded if isinstance(loaded, DenseKernel) else None


def kernel_now() -> DenseKernel | None:
    """Returns the kernel where torch has one thread, as the kernel has."""
    return kernel() if torch.get_num_threads() == 1 else None


def missing() -> str:
    """Returns why there is no kernel, or nothing where there is one."""
    loaded = _loaded()
    return "" if isinstance(loaded, DenseKernel) else loaded


@functools.cache
def _loaded() -> DenseKernel | str:
    if os.environ.get(SWITCH, "") == "torch":
        return f"{SWITCH} is torch"
    folder = KERNELS / "dense"
    try:
        texts = [(folder / name).read_text(encoding="utf-8") for name in _SOURCES]
        library = build_library(
            "".join(f'#include "{folder / unit}"\n' for unit in UNITS),
            texts,
            compiler=find_compiler("layers of small networks on the CPU"),
            flags=("-O3", "-ffp-contract=fast"),
            folders=(folder,),
            explained=_refused,
        )
        return DenseKernel(ctypes.CDLL(str(library)))
    except (KernelBuildError, OSError) as error:
        return str(error)


def _refused(message: str) -> KernelBuildError:
    return KernelBuildError(Problem(str(KERNELS / "dense"), "sources that compile", f"from the compiler:\n{message}\n"))


def layer_table(
    shapes: Sequence[tuple[int, int, bool]],
    parameters: Sequence[int],
    outputs: Sequence[int],
    gradients: Sequence[int],
) -> ctypes.Array[_Long]:
    """Returns the layers as kernels/dense/layers.h declares them: eight words each."""
    words: list[int] = []
    for i, (shape, output) in enumerate(zip(shapes, outputs, strict=True)):
        words += (*shape, *parameters[2 * i : 2 * i + 2], output, *gradients[2 * i : 2 * i + 2])
    return (_Long * len(words))(*words)
