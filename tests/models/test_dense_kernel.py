"""The kernel of small layers: every compiler and vector width, its bounds, and what happens without it."""

import importlib.util
import signal
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from oracles.native import LANES, Guarded, built, end_of_guarded, in_process
from torch import Tensor, nn

from reagent_lite.models import dense_kernel
from reagent_lite.models.dense_kernel import SWITCH, DenseKernel, KernelLayers, kernel, layer_table, missing
from reagent_lite.models.q_networks import MLP, NetworkSettings
from reagent_lite.native.compiler import zig_compiler

ROOT = Path(__file__).resolve().parents[2]
WIDTHS = [(4, 128, 64, 2), (1, 1), (17, 31, 47, 5), (16, 64, 130, 3), (33, 96, 1)]


def numbers(widths: tuple[int, ...], rows: int) -> tuple[list[Tensor], Tensor, Tensor]:
    """Parameters, rows, and the gradient of the outputs."""
    generator = torch.Generator().manual_seed(sum(widths) + rows)
    shapes = [shape for i, o in pairwise(widths) for shape in ((o, i), (o,))]
    parameters = [torch.randn(*shape, generator=generator) / shape[-1] ** 0.5 for shape in shapes]
    return (
        parameters,
        torch.randn(rows, widths[0], generator=generator),
        torch.randn(rows, widths[-1], generator=generator),
    )


def truth(parameters: list[Tensor], x: Tensor, gradient: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Output, and gradients of x and all parameters, by numpy in float64; a ReLU between any two layers."""
    weights = [p.double().numpy() for p in parameters[::2]]
    inputs = [x.double().numpy()]
    for i, (w, b) in enumerate(zip(weights, parameters[1::2], strict=True)):
        y = inputs[-1] @ w.T + b.double().numpy()
        inputs.append(np.maximum(y, 0) if i < len(weights) - 1 else y)
    g, gradients = gradient.double().numpy(), []
    for i in range(len(weights) - 1, -1, -1):
        gradients[:0] = [torch.from_numpy(g.T @ inputs[i]), torch.from_numpy(g.sum(0))]
        g = (g @ weights[i]) * (1 if i == 0 else inputs[i] > 0)
    return torch.from_numpy(inputs[-1]), [torch.from_numpy(g), *gradients]


def require_exact(own: DenseKernel, widths: tuple[int, ...], rows: int) -> None:
    parameters, x, gradient = numbers(widths, rows)
    layers = KernelLayers(parameters, [True] * (len(widths) - 2) + [False])
    assert layers.suit(x)
    outputs = own.forward(layers, x, every=True)
    (last,) = own.forward(layers, x, every=False)
    of_x, gradients = own.backward(layers, x, outputs, gradient, of_x=True)
    assert own.backward(layers, x, outputs, gradient, of_x=False)[0] is None
    assert of_x is not None
    wanted, wanted_gradients = truth(parameters, x, gradient)
    torch.testing.assert_close(outputs[-1].double(), wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(last, outputs[-1])
    for ours, exact in zip((of_x, *gradients), wanted_gradients, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=2e-6 * max(rows, 16))


@pytest.fixture
def own() -> DenseKernel:
    found = kernel()
    if found is None:
        pytest.skip(f"no kernel: {missing()}")
    return found


@pytest.mark.parametrize("rows", [0, 1, 5, 48, 49, 512])
@pytest.mark.parametrize("widths", WIDTHS)
def test_this_machines_kernel(own: DenseKernel, widths: tuple[int, ...], rows: int) -> None:
    require_exact(own, widths, rows)


@pytest.mark.parametrize("lanes", LANES)
def test_vectors_of_every_width(tmp_path: Path, lanes: int) -> None:
    """As other processors have them: NEON four numbers, AVX eight, AVX-512 sixteen; compiled for this one."""
    own = DenseKernel(built(tmp_path, *LANES[lanes]))
    for widths in WIDTHS:
        for rows in (1, 47, 97):
            require_exact(own, widths, rows)


@pytest.mark.skipif(importlib.util.find_spec("ziglang") is None, reason="the Python package ziglang is not installed")
@pytest.mark.usefixtures("_afresh")
def test_clang_makes_it_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("REAGENT_LITE_CACHE", str(tmp_path))
    monkeypatch.setattr(dense_kernel, "find_compiler", lambda purpose: zig_compiler())
    own = kernel()
    assert own is not None, missing()
    assert len(list(tmp_path.glob("*.so"))) == 1
    for widths in WIDTHS:
        require_exact(own, widths, 97)


def test_a_row_has_the_same_bits_in_any_batch(own: DenseKernel) -> None:
    parameters, x, _ = numbers((9, 70, 33, 5), 200)
    layers = KernelLayers(parameters, [True, True, False])
    assert layers.suit(x)
    (whole,) = own.forward(layers, x, every=False)
    for begin, end in ((0, 1), (3, 9), (47, 49), (150, 200), (13, 200)):
        (part,) = own.forward(layers, x[begin:end].contiguous(), every=False)
        assert torch.equal(part, whole[begin:end])


def touch_only_what_is_handed_in(*, at_end: bool) -> None:
    """Ends by a signal where the kernel reads or writes a float too many; run in a process of its own."""
    own = kernel()
    assert own is not None
    for widths in WIDTHS:
        for rows in (1, 6, 50):
            guarded = Guarded(at_end=at_end)
            parameters, x, gradient = numbers(widths, rows)
            count = len(widths) - 1
            shapes = [(i, o, k < count - 1) for k, (i, o) in enumerate(pairwise(widths))]
            places = [guarded.copy(p) for p in parameters]
            outputs = [guarded.room(rows * o) for _, o, _ in shapes]
            gradients = [guarded.room(p.numel()) for p in parameters]
            scratch, of_x = guarded.room(own.scratch(shapes)), guarded.room(x.numel())
            table = layer_table(shapes, *([t.data_ptr() for t in tensors] for tensors in (places, outputs, gradients)))
            x, gradient = guarded.copy(x), guarded.copy(gradient)
            own._forward(table, count, x.data_ptr(), rows, scratch.data_ptr())
            own._backward(table, count, x.data_ptr(), rows, gradient.data_ptr(), of_x.data_ptr(), scratch.data_ptr())
            wanted, _ = truth(parameters, x, gradient)
            torch.testing.assert_close(outputs[-1].view(rows, -1).double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("at_end", [True, False], ids=["ends", "begins"])
@pytest.mark.usefixtures("own")
def test_memory_that_was_not_handed_in_is_not_touched(at_end: bool) -> None:
    done = end_of_guarded("test_dense_kernel", at_end=at_end)
    assert done.returncode == 0, done.stderr


def test_the_guard_is_real() -> None:
    code = "import ctypes; from oracles.native import Guarded; room = Guarded(at_end=True).room(5); "
    past = "print(ctypes.c_float.from_address(room.data_ptr() + {}).value, flush=True)"
    done = in_process(code + past.format(16) + "; " + past.format(20))
    assert (done.stdout, done.returncode) == ("0.0\n", -signal.SIGSEGV)


@pytest.fixture
def _afresh() -> Iterator[None]:
    """The kernel is looked for anew, before and after."""
    dense_kernel._loaded.cache_clear()
    yield
    dense_kernel._loaded.cache_clear()


def network_and_rows() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return MLP((4, 32, 2), ("relu", "linear"), NetworkSettings(hidden=(), activations=())), torch.randn(20, 4)


@pytest.mark.usefixtures("_afresh")
def test_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "torch")
    assert kernel() is None
    assert missing() == "REAGENT_LITE_LAYERS is torch"
    network, x = network_and_rows()
    torch.testing.assert_close(network(x), nn.Sequential(*network)(x))


@pytest.mark.usefixtures("_afresh")
def test_without_a_compiler_layers_are_torchs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert kernel() is None
    assert missing().startswith("layers of small networks on the CPU: expected a C++ compiler, got neither g++")
    network, x = network_and_rows()
    torch.testing.assert_close(network(x), nn.Sequential(*network)(x))


@pytest.mark.usefixtures("_afresh")
def test_without_a_place_for_what_is_compiled_layers_are_torchs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("REAGENT_LITE_CACHE", str(tmp_path / "file" / "cache"))
    assert kernel() is None
    assert "expected a writable folder for compiled code" in missing()
    network, x = network_and_rows()
    torch.testing.assert_close(network(x), nn.Sequential(*network)(x))


def test_several_threads_and_large_layers_are_left_to_torchs_libraries(
    own: DenseKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    original = DenseKernel.forward

    def counting(self: DenseKernel, layers: KernelLayers, x: Tensor, *, every: bool) -> list[Tensor]:
        calls.append(len(x))
        return original(self, layers, x, every=every)

    monkeypatch.setattr(DenseKernel, "forward", counting)
    network, x = network_and_rows()
    with torch.no_grad():
        network(x)
        assert calls == [20]
        torch.set_num_threads(2)
        try:
            network(x)
        finally:
            torch.set_num_threads(1)
        assert calls == [20]
    large = KernelLayers([torch.zeros(1024, 512), torch.zeros(1024)], [True])
    many = KernelLayers([torch.zeros(2, 2), torch.zeros(2)] * 33, [True] * 33)
    doubles = KernelLayers([torch.zeros(2, 2).double(), torch.zeros(2).double()], [True])
    assert [layers.suit(torch.zeros(4096, w)) for layers, w in ((large, 512), (many, 2), (doubles, 2))] == [False] * 3
    wide = KernelLayers([torch.zeros(256, 256), torch.zeros(256)], [True])  # 64 rows pay for copying 65 536 weights
    assert [wide.suit(torch.zeros(rows, 256)) for rows in (1, 63, 64, 65)] == [False, False, True, True]
    few = KernelLayers([torch.zeros(64, 256), torch.zeros(64)], [True])
    assert few.suit(torch.zeros(1, 256))
