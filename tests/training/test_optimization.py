"""The optimizer's step against torch's own classes, bit by bit."""

import copy

import pytest
import torch
from torch import Tensor, nn

from reagent_lite.training.optimization import Optimization, _FusedAdam

KINDS = {
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.01, fused=True),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.02, betas=(0.8, 0.95), eps=1e-6, fused=True),
    "amsgrad": lambda groups: torch.optim.Adam(groups, lr=0.01, amsgrad=True, fused=True),
    "unfused": lambda groups: torch.optim.Adam(groups, lr=0.01),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, fused=True),
}


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(*shape, generator=generator)) for shape in ((3, 4), (3,), (2, 3), (2,))]


def groups(every: list[nn.Parameter]) -> list[dict[str, object]]:
    return [{"params": every[:2], "weight_decay": 0.1}, {"params": every[2:], "weight_decay": 0.0}]


def gradients(step: int, every: list[nn.Parameter]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(p.shape, generator=generator) for p in every]


class Twins:
    """The same parameters, stepped by us and by torch alone."""

    def __init__(self, kind: str) -> None:
        self.ours, self.torchs = parameters(), parameters()
        self.optimizer, self.reference = KINDS[kind](groups(self.ours)), KINDS[kind](groups(self.torchs))
        self.optimization = Optimization(optimizer=self.optimizer)

    def step(self, number: int, *, without: int | None = None) -> None:
        for every in (self.ours, self.torchs):
            for i, (p, gradient) in enumerate(zip(every, gradients(number, every), strict=True)):
                p.grad = None if i == without else gradient
        self.optimization.step(self.ours)
        self.reference.step()
        assert all(p.grad is None for p in self.ours)

    def require_equal(self) -> None:
        for a, b in zip(self.ours, self.torchs, strict=True):
            assert torch.equal(a, b)
        own, other = self.optimizer.state_dict(), self.reference.state_dict()
        assert own["param_groups"] == other["param_groups"]
        for index, entries in other["state"].items():
            assert own["state"][index].keys() == entries.keys()
            for name, value in entries.items():
                if value is not None:
                    assert torch.equal(own["state"][index][name], value), (index, name)


@pytest.mark.parametrize("kind", list(KINDS))
def test_steps_are_torchs(kind: str) -> None:
    twins = Twins(kind)
    for number in range(6):
        twins.step(number)
        twins.require_equal()


@pytest.mark.parametrize("kind", ["adam", "adamw"])
def test_a_schedule_moves_the_rate(kind: str) -> None:
    twins = Twins(kind)
    decays = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in (twins.optimizer, twins.reference)]
    for number in range(4):
        twins.step(number)
        for decay in decays:
            decay.step()
    twins.require_equal()
    assert twins.optimizer.param_groups[0]["lr"] == pytest.approx(KINDS[kind](parameters()).defaults["lr"] / 16)


def test_a_parameter_without_a_gradient_stays() -> None:
    twins = Twins("adam")
    for number, without in enumerate((None, None, 1, None, 1)):
        before = twins.ours[1].detach().clone()
        twins.step(number, without=without)
        assert torch.equal(before, twins.ours[1]) == (without == 1)
        twins.require_equal()


def test_a_parameter_whose_first_gradient_comes_late() -> None:
    twins = Twins("adam")
    for number, without in enumerate((2, 2, None, None)):
        twins.step(number, without=without)
        twins.require_equal()
    assert [int(state["step"]) for state in twins.optimizer.state_dict()["state"].values()] == [4, 4, 4, 2]


def test_state_that_is_loaded_is_gone_on_with() -> None:
    twins = Twins("adam")
    for number in range(3):
        twins.step(number)
    saved = [copy.deepcopy(one.state_dict()) for one in (twins.optimizer, twins.reference)]
    for number in range(3, 5):
        twins.step(number)
    for one, state in zip((twins.optimizer, twins.reference), saved, strict=True):
        one.load_state_dict(state)
    twins.step(5)
    twins.step(6)
    twins.require_equal()
    assert int(twins.optimizer.state_dict()["state"][0]["step"]) == 5


def test_a_group_that_is_added_is_moved() -> None:
    twins = Twins("adam")
    for number in range(3):
        twins.step(number)
    for every, optimizer in ((twins.ours, twins.optimizer), (twins.torchs, twins.reference)):
        every.append(nn.Parameter(torch.ones(5)))
        optimizer.add_param_group({"params": [every[-1]]})
    for number in range(3, 6):
        twins.step(number)
        twins.require_equal()
    assert not torch.equal(twins.ours[-1], torch.ones(5))


def test_what_graphs_capture_is_left_to_torch() -> None:
    twins = Twins("adam")
    twins.step(0)
    assert _FusedAdam.of(twins.optimizer) is not None
    twins.optimizer.param_groups[1]["capturable"] = True
    assert _FusedAdam.of(twins.optimizer) is None
