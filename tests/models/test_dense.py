"""Runs of fully connected layers: numbers by hand, and torch's own layers in float64 as the truth."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from reagent_lite.models import dense
from reagent_lite.models.dense import Run, runs_in
from reagent_lite.models.dense_kernel import kernel, missing
from reagent_lite.models.q_networks import MLP, NetworkSettings

# rows, widths: small products; large ones; few inputs (the gradient is computed transposed); one output; no input
SHAPES = [
    (1, (3, 2)), (7, (5, 6, 2)), (512, (4, 128, 64, 2)), (600, (96, 160, 80, 1)), (4096, (12, 64, 64, 33)),
    (53, (17, 31, 47, 79, 9)), (6, (0, 5, 1)),
]  # fmt: skip


@pytest.fixture(params=["kernel", "oneDNN", "MKL alone"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are computed in each of the ways there are."""
    if request.param == "kernel":
        if kernel() is None:
            pytest.skip(f"no kernel: {missing()}")
    else:
        monkeypatch.setattr(dense, "kernel_now", lambda: None)
        monkeypatch.setattr(dense, "_WIDE", request.param == "oneDNN" and dense._ONEDNN is not None)


def mlp(widths: tuple[int, ...], activation: str = "relu", last: str = "linear", **changes: object) -> MLP:
    settings = NetworkSettings(hidden=(), activations=(), **changes)  # type: ignore[arg-type]
    return MLP(widths, (*[activation] * (len(widths) - 2), last), settings)


def forward_and_gradients(network: nn.Module, x: Tensor, weights: Tensor) -> list[Tensor]:
    """The output of x, and the gradients of its weighted sum by x and by all parameters."""
    x = x.clone().requires_grad_()
    output = network(x)
    return [output.detach(), *torch.autograd.grad((output * weights).sum(), [x, *network.parameters()])]


def exact(network: MLP, x: Tensor, weights: Tensor) -> list[Tensor]:
    """The same by torch's layers in float64, which runs leave to torch."""
    return forward_and_gradients(copy.deepcopy(network).double(), x.double(), weights.double())


@pytest.mark.usefixtures("_way")
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")  # of a layer without inputs
@pytest.mark.parametrize("last", ["linear", "relu"])
@pytest.mark.parametrize(("rows", "widths"), SHAPES)
def test_outputs_and_gradients_are_those_of_torchs_layers(rows: int, widths: tuple[int, ...], last: str) -> None:
    torch.manual_seed(0)
    network = mlp(widths, last=last)
    for parameter in network.parameters():
        parameter.data += 0.01 * torch.randn_like(parameter)
    x, weights = torch.randn(rows, widths[0]), torch.randn(rows, widths[-1])
    found = forward_and_gradients(network, x, weights)
    for ours, truth in zip(found, exact(network, x, weights), strict=True):
        # sums of n products round to a relative error that grows like the root of n
        error = 4 * math.sqrt(max(rows, *widths)) * torch.finfo(torch.float32).eps
        largest = max([1.0, *truth.abs().flatten().tolist()])
        assert bool(((ours - truth).abs() <= error * largest).all())
    with torch.no_grad():
        assert torch.equal(network(x), found[0])


@pytest.mark.usefixtures("_way")
def test_a_step_by_hand() -> None:
    """h = relu([1 -2; 3 1] x + [0, 1]) = relu([-3, 6]) = [0, 6]; y = [2 5] h + 1 = 31."""
    network = mlp((2, 2, 1))
    for parameter, values in zip(
        network.parameters(), ([[1.0, -2.0], [3.0, 1.0]], [0.0, 1.0], [[2.0, 5.0]], [1.0]), strict=True
    ):
        parameter.data = torch.tensor(values)
    x = torch.tensor([[1.0, 2.0]], requires_grad=True)
    output = network(x)
    assert output.tolist() == [[31.0]]
    output.backward(torch.tensor([[2.0]]))
    first, bias, second, offset, of_x = (
        one.grad.tolist() for one in (*network.parameters(), x) if one.grad is not None
    )
    assert second == [[0.0, 12.0]]
    assert offset == [2.0]
    assert first == [[0.0, 0.0], [10.0, 20.0]]  # 2 * 5 * x for the open unit, nothing for the closed one
    assert bias == [0.0, 10.0]
    assert of_x == [[30.0, 10.0]]


@pytest.mark.parametrize(
    "changes", [{"dropout": 0.5}, {"batch_norm": True}, {"activation": "tanh"}, {"activation": "leaky_relu"}]
)
def test_other_layers_stand_between_runs(changes: dict[str, object]) -> None:
    torch.manual_seed(0)
    network = mlp((6, 32, 32, 3), **changes)  # type: ignore[arg-type]
    x, weights = torch.randn(256, 6), torch.randn(256, 3)
    torch.manual_seed(1)
    ours = forward_and_gradients(network, x, weights)
    torch.manual_seed(1)
    plain = forward_and_gradients(nn.Sequential(*copy.deepcopy(network)), x, weights)
    for one, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_layers_that_make_a_run() -> None:
    layers = [nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 3), nn.Tanh(), nn.ReLU(), nn.Linear(3, 1), nn.ReLU(), nn.ReLU()]
    parts = runs_in(layers)
    assert [part if isinstance(part, int) else type(part) for part in parts] == [Run, 3, 4, Run, 7]


def test_a_layer_that_was_replaced_is_the_one_that_is_used() -> None:
    """As the conversion to batch normalization over all processes replaces them."""
    network = nn.SyncBatchNorm.convert_sync_batchnorm(mlp((4, 8, 2), batch_norm=True))
    assert isinstance(network[0], nn.SyncBatchNorm)
    network[0].running_mean += 3.0
    network = copy.deepcopy(network).eval()
    x = torch.randn(64, 4)
    torch.testing.assert_close(network(x), nn.Sequential(*network)(x))


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["x", "0.weight", "0.bias", "2.weight", "4.bias"])
def test_what_is_not_finite_is_not_lost(where: str, value: float) -> None:
    """A network that has broken must be seen to have."""
    network, x = mlp((128, 256, 256, 64)), torch.randn(512, 128)
    tensor = x if where == "x" else network.get_parameter(where).data
    tensor.view(-1)[0] = value
    plain = nn.Sequential(*copy.deepcopy(network))
    assert not plain(x).isfinite().all()
    assert torch.equal(network(x).isfinite(), plain(x).isfinite())


@pytest.mark.usefixtures("_way")
def test_frozen_layers_get_no_gradient() -> None:
    network = mlp((3, 4, 2))
    network[0].requires_grad_(False)
    network(torch.randn(5, 3)).sum().backward()
    assert [parameter.grad is None for parameter in network.parameters()] == [True, True, False, False]
    network[2].weight.requires_grad_(False)
    network(torch.randn(5, 3)).sum().backward()
    assert network[2].bias.grad.tolist() == [10.0, 10.0]  # of five rows, twice
    network.requires_grad_(False)
    assert not network(torch.randn(5, 3)).requires_grad


@pytest.mark.usefixtures("_way")
def test_a_copy_has_runs_of_its_own() -> None:
    """The target network is a copy: what is learned must not move it."""
    network, x = mlp((3, 4, 2)), torch.randn(5, 3)
    twin = copy.deepcopy(network)
    before = twin(x)
    assert torch.equal(before, network(x))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
    assert torch.equal(twin(x), before)
    assert not network(x).any()
    assert list(network.state_dict()) == ["0.weight", "0.bias", "2.weight", "2.bias"]


@pytest.mark.usefixtures("_way")
def test_rows_that_are_not_contiguous() -> None:
    torch.manual_seed(0)
    network = mlp((6, 32, 3))
    for x in (torch.randn(6, 50).t(), torch.randn(50, 12)[:, ::2], torch.randn(1, 6).expand(50, 6)):
        weights = torch.randn(3, 50).t()
        for ours, truth in zip(forward_and_gradients(network, x, weights), exact(network, x, weights), strict=True):
            torch.testing.assert_close(ours.double(), truth, rtol=1e-5, atol=1e-5)
        with torch.no_grad():
            assert torch.equal(network(x), network(x.contiguous()))


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("shape", [(4,), (5, 3, 4), (6, 3), (6, 7), (0, 3)])
def test_rows_of_another_width_are_an_error(shape: tuple[int, ...]) -> None:
    network = mlp((4, 8, 2))
    for x in (torch.zeros(shape), torch.zeros(shape, requires_grad=True)):
        with pytest.raises(RuntimeError), torch.set_grad_enabled(x.requires_grad):
            network(x)


@pytest.mark.usefixtures("_way")
def test_layers_that_were_converted_are_used_as_they_are_now() -> None:
    network, x = mlp((3, 40, 2)), torch.randn(5, 3)
    before = network(x)
    network.double().float()
    assert torch.equal(network(x), before)
    for parameter in network.parameters():
        parameter.data = torch.zeros_like(parameter)
    assert not network(x).any()
    plain = nn.Sequential(*network)
    network[0].weight.data = torch.randn(3, 40).t()  # of another layout
    network[2].weight.data = torch.randn(2, 40)
    torch.testing.assert_close(network(x), plain(x))
    square = mlp((5, 5, 5))
    square[0].weight.data = square[0].weight.data.t()  # of another layout in the same place
    torch.testing.assert_close(square(torch.ones(2, 5)), nn.Sequential(*square)(torch.ones(2, 5)))
    square[2].weight.data, square[2].bias.data = square[2].weight.data[:3], square[2].bias.data[:3]  # fewer outputs
    torch.testing.assert_close(square(torch.ones(2, 5)), nn.Sequential(*square)(torch.ones(2, 5)))


@pytest.mark.usefixtures("_way")
def test_layers_that_change_before_their_gradients_are_an_error() -> None:
    network = mlp((3, 4, 2))
    output = network(torch.randn(5, 3))
    with torch.no_grad():
        network[2].weight += 1.0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@pytest.mark.usefixtures("_way")
def test_layers_that_are_converted_before_their_gradients_are_an_error() -> None:
    network = mlp((3, 4, 2))
    output = network(torch.randn(5, 3))
    network.double()
    with pytest.raises(RuntimeError):
        output.sum().backward()


def test_a_recorded_graph_has_plain_layers() -> None:
    network, x = mlp((8, 256, 64, 2)), torch.randn(512, 8)
    with pytest.warns(DeprecationWarning, match="trace"):
        traced = torch.jit.trace(network, (x,))  # type: ignore[no-untyped-call]
    graph = str(traced.inlined_graph)
    assert graph.count("aten::linear") == 3
    assert "mkldnn" not in graph
    exported = torch.export.export(network, (x,))
    assert sum("linear" in str(node.target) for node in exported.graph.nodes if node.op == "call_function") == 3
    torch.testing.assert_close(traced(x), network(x), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("_way")
def test_no_rows() -> None:
    network = mlp((3, 4, 2))
    output = network(torch.zeros(0, 3))
    assert output.shape == (0, 2)
    output.sum().backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in network.parameters())
