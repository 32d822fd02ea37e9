"""Q-networks are plain modules: they compute from their current parameters, and torch's tools work on them."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import vector_to_parameters
from torch.nn.utils.parametrizations import spectral_norm

from reagent_lite.models.q_networks import MLP, NetworkSettings, build_q_network
from reagent_lite.types import SourceSpec

ROWS = 5


@pytest.fixture(
    params=[
        (SourceSpec(num_state_features=4, **choices), dueling)  # type: ignore[arg-type]
        for choices in ({"action_names": ("a", "b")}, {"num_action_features": 3})
        for dueling in (False, True)
    ],
    ids=["discrete", "discrete dueling", "candidates", "candidates dueling"],
)
def network(request: pytest.FixtureRequest) -> nn.Module:
    spec, dueling = request.param
    torch.manual_seed(0)
    return build_q_network(spec, NetworkSettings(hidden=(8, 6), activations=("relu", "relu"), dueling=dueling))


def inputs(network: nn.Module) -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    candidates = [torch.randn(ROWS, 2, 3)] * type(network).__name__.endswith("CandidateQNetwork")
    return torch.randn(ROWS, 4), torch.ones(ROWS, 2, dtype=torch.bool), *candidates


def zeros(network: nn.Module) -> dict[str, Tensor]:
    return {name: torch.zeros_like(p) for name, p in network.named_parameters()}


def test_the_parameters_given_or_assigned_are_the_ones_used(network: nn.Module) -> None:
    x = inputs(network)
    assert network(*x).abs().max() > 0.01
    assert torch.func.functional_call(network, zeros(network), x).tolist() == [[[0.0]] * 2] * ROWS
    network.load_state_dict(zeros(network), assign=True)
    assert network(*x).tolist() == [[[0.0]] * 2] * ROWS


def test_hooks_are_called_and_spectral_norm_works(network: nn.Module) -> None:
    x = inputs(network)
    called: list[Tensor] = []
    layers = [layer for layer in network.modules() if isinstance(layer, nn.Linear)]
    for layer in layers:
        layer.register_forward_hook(lambda _, __, output: called.append(output))
    network(*x)
    assert len(called) == len(layers)
    assert called[0].min() < 0  # a layer's output, not that of the ReLU after it
    spectral_norm(layers[0])
    before = network(*x)
    layers[0].parametrizations.weight.original.data.neg_()
    assert not torch.equal(network(*x), before)


def test_gradients_of_single_rows_by_vmap(network: nn.Module) -> None:
    """vmap of grad gives each row's gradient; together they are that of all rows."""
    parameters = {name: p.detach() for name, p in network.named_parameters()}

    def value(parameters: dict[str, Tensor], *row: Tensor) -> Tensor:
        return torch.func.functional_call(network, parameters, tuple(x.unsqueeze(0) for x in row)).square().sum()

    x = inputs(network)
    per_row = torch.func.vmap(torch.func.grad(value), in_dims=(None, *[0] * len(x)))(parameters, *x)
    gradients = torch.autograd.grad(network(*x).square().sum(), list(network.parameters()))
    torch.testing.assert_close([rows.sum(0) for rows in per_row.values()], list(gradients))


def test_a_step_by_hand() -> None:
    """h = relu([1 -2; 3 1] x + [0, 1]) = relu([-3, 6]) = [0, 6]; y = [2 5] h + 1 = 31."""
    network = MLP((2, 2, 1), ("relu", "linear"), NetworkSettings(hidden=(), activations=()))
    vector_to_parameters(torch.tensor([1.0, -2.0, 3.0, 1.0, 0.0, 1.0, 2.0, 5.0, 1.0]), network.parameters())
    x = torch.tensor([[1.0, 2.0]], requires_grad=True)
    output = network(x)
    assert output.tolist() == [[31.0]]
    gradients = torch.autograd.grad(output, [*network.parameters(), x], torch.tensor([[2.0]]))
    expected = [[[0.0, 0.0], [10.0, 20.0]], [0.0, 10.0], [[0.0, 12.0]], [2.0], [[30.0, 10.0]]]
    assert [gradient.tolist() for gradient in gradients] == expected


def test_initial_weights_have_the_stated_spread() -> None:
    torch.manual_seed(0)
    spec = SourceSpec(num_state_features=400, action_names=("a", "b"))
    settings = NetworkSettings(hidden=(300,), activations=("relu",))
    first, *_, last = build_q_network(spec, settings).layers
    floor, *_ = build_q_network(spec, replace(settings, min_std=0.5)).layers
    # gain sqrt(2) of relu
    assert [first.weight.std().item(), floor.weight.std().item()] == pytest.approx([(2 / 400) ** 0.5, 0.5], rel=0.02)
    assert last.weight.std().item() == pytest.approx((1 / 300) ** 0.5, rel=0.1)
    assert not first.bias.any()
