"""Fully connected layers on a CPU: forward and backward of a run of them written out.

    x ─► [linear ─► relu] ─► [linear ─► relu] ─► linear        one node of the gradient's graph instead of five

Small layers on one core are computed by our kernel (dense_kernel.py), others by the faster of torch's two libraries.

torch takes MKL for float32 products, which on AMD processors leaves AVX-512 unused; oneDNN, which is in torch as well,
does not. [m] Zen 5, one thread, 512 rows 128 -> 64: 104 against 60 us; 5120 rows: 979 against 421; 256 -> 256: 2.1
times. A call of oneDNN costs 15 us more, so small products stay with MKL. The gradient of a layer with few inputs is
computed transposed: [m] 512 rows 4 -> 128: 66 against 15 us.

The numbers are those of torch's own layers up to the order in which float32 is summed.
"""

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from reagent_lite.models.dense_kernel import DenseKernel, KernelLayers, kernel_now

# What torch's own compiler calls for a linear layer; absent where torch is built without oneDNN.
_ONEDNN: Final[Any] = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
_WIDE: Final = _ONEDNN is not None and torch.backends.cpu.get_cpu_capability() == "AVX512"
_FROM_PRODUCTS: Final = 1 << 20  # multiplications of a product from which on oneDNN is faster
_FROM_COLUMNS: Final = 16


class Run:
    """Linear layers of which each may be followed by a ReLU, as one function.

    Args:
        layers: each with whether a ReLU follows; their parameters stay the same objects from here on.

    Attributes:
        parameters: weight and bias of each layer in turn.
        kernel_layers: the same as the kernel is told of them.
    """

    def __init__(self, layers: Sequence[tuple[nn.Linear, bool]]) -> None:
        self.parameters = tuple(p for layer, _ in layers for p in (layer.weight, layer.bias))
        self._relus = tuple(relu for _, relu in layers)
        self.kernel_layers = KernelLayers(self.parameters, self._relus)

    def __call__(self, x: Tensor) -> Tensor:
        """Returns [N, outputs] for float32 x [N, inputs] on a CPU."""
        with_gradient = torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in self.parameters))
        result: Tensor
        own = self._kernel_for(x)
        if own is not None:
            if with_gradient:
                result = _ByKernel.apply(x, own, self.kernel_layers, *self.parameters)  # type: ignore[no-untyped-call]
                return result
            return own.forward(self.kernel_layers, x.contiguous(), every=False)[0]
        if with_gradient:
            result = _ByLibraries.apply(x, self._relus, *self.parameters)  # type: ignore[no-untyped-call]
            return result
        return _forward(x, self._relus, self.parameters)[-1]

    def _kernel_for(self, x: Tensor) -> DenseKernel | None:
        """Returns our kernel where it may and should compute these layers of x, as they are now."""
        own = kernel_now()
        return own if own is not None and self.kernel_layers.suit(x) else None


def runs_in(layers: Sequence[nn.Module]) -> tuple[Run | int, ...]:
    """Returns stretches of linear layers and ReLUs as runs, and the place of any other layer, which may be replaced."""
    joined: list[Run | int] = []
    stretch: list[tuple[nn.Linear, bool]] = []
    for place, layer in enumerate(layers):
        if isinstance(layer, nn.Linear):
            stretch.append((layer, False))
        elif isinstance(layer, nn.ReLU) and stretch and not stretch[-1][1]:
            stretch[-1] = (stretch[-1][0], True)
        else:
            joined += [Run(stretch)] if stretch else []
            joined.append(place)
            stretch = []
    return (*joined, *([Run(stretch)] if stretch else []))


def runs_apply(x: Tensor) -> bool:
    """Whether runs may be used for x: not while a graph is recorded for export, which has to hold plain layers."""
    return (
        x.device.type == "cpu"
        and x.dtype == torch.float32
        and not torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        and not torch.compiler.is_compiling()
    )


class _ByKernel(torch.autograd.Function):
    """The run with its gradient, by our kernel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, own: DenseKernel, layers: KernelLayers, *parameters: Tensor) -> Tensor:
        x = x.contiguous()
        outputs = own.forward(layers, x, every=True)
        ctx.kernel, ctx.layers = own, layers
        ctx.save_for_backward(x, *outputs, *parameters)  # parameters: one that is changed before backward is an error
        return outputs[-1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        count, wanted = len(ctx.layers.shapes), ctx.needs_input_grad
        x, *outputs = ctx.saved_tensors[: count + 1]
        if not ctx.layers.suit(x):
            raise RuntimeError("the layers were converted between their outputs and their gradients")
        of_x, gradients = ctx.kernel.backward(ctx.layers, x, outputs, gradient.contiguous(), of_x=wanted[0])
        return of_x, None, None, *(one if need else None for one, need in zip(gradients, wanted[3:], strict=True))


class _ByLibraries(torch.autograd.Function):
    """The run with its gradient, by torch's libraries."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, relus: tuple[bool, ...], *parameters: Tensor) -> Tensor:
        outputs = _forward(x, relus, parameters)
        ctx.relus = relus
        ctx.save_for_backward(x, *outputs, *parameters[::2])
        return outputs[-1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        relus: tuple[bool, ...] = ctx.relus
        saved, count = ctx.saved_tensors, len(relus)
        inputs, outputs, weights = saved[:count], saved[1 : count + 1], saved[count + 1 :]
        gradients: list[Tensor | None] = [None] * (2 * count)
        for i in range(count - 1, -1, -1):
            if relus[i]:
                gradient = torch.ops.aten.threshold_backward(gradient, outputs[i], 0)
            if ctx.needs_input_grad[2 + 2 * i]:
                gradients[2 * i] = _of_weight(gradient, inputs[i])
            if ctx.needs_input_grad[3 + 2 * i]:
                gradients[2 * i + 1] = gradient.sum(0)
            if i or ctx.needs_input_grad[0]:
                gradient = _product(gradient, weights[i].t())
        return gradient if ctx.needs_input_grad[0] else None, None, *gradients


def _forward(x: Tensor, relus: tuple[bool, ...], parameters: Sequence[Tensor]) -> list[Tensor]:
    outputs: list[Tensor] = []
    for i, relu in enumerate(relus):
        weight, bias = parameters[2 * i], parameters[2 * i + 1]
        if _is_wide(x.shape[0], *weight.shape):
            x = _ONEDNN(x, weight, bias, "none", [], "")
        else:
            x = torch.addmm(bias, x, weight.t())
        x = x.relu_() if relu else x  # oneDNN's own ReLU makes 0 of NaN, and a broken network would train on
        outputs.append(x)
    return outputs


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Returns a [m, k] times the transpose of b [n, k]."""
    if _is_wide(a.shape[0], *b.shape):
        product: Tensor = _ONEDNN(a, b, None, "none", [], "")
        return product
    return a @ b.t()


def _of_weight(gradient: Tensor, x: Tensor) -> Tensor:
    """Returns the gradient of a weight, gradient [N, out] transposed times x [N, in]; its longer side is contiguous."""
    if gradient.shape[1] > x.shape[1]:
        return _product(x.t(), gradient.t()).t()
    return _product(gradient.t(), x.t())


def _is_wide(rows: int, columns: int, depth: int) -> bool:
    """Whether oneDNN is the faster one for [rows, depth] times [depth, columns]."""
    return _WIDE and columns >= _FROM_COLUMNS and rows * columns * depth >= _FROM_PRODUCTS
