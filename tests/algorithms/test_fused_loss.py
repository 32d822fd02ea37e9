"""The loss in one call: the numbers of dqn.py, by hand, and what is left to dqn.py."""

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from oracles.batches import make_batch, random_batch
from oracles.q_losses import drawn
from torch import Tensor, nn

from reagent_lite.algorithms.dqn import DQN, DQNSettings
from reagent_lite.models.dense_kernel import missing
from reagent_lite.models.q_loss_kernel import QLossKernel, q_loss_kernel
from reagent_lite.models.q_networks import NetworkSettings, build_q_network
from reagent_lite.models.value_heads import CategoricalHead, ScalarHead
from reagent_lite.types import Actions, SourceSpec, TransitionBatch

SETTINGS = DQNSettings(gamma=0.9, target_update_rate=0.1)
SHAPE = NetworkSettings(hidden=(40, 24), activations=("relu", "relu"))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every call of the kernel."""
    if q_loss_kernel() is None:
        pytest.skip(f"no kernel: {missing()}")
    made: list[int] = []
    original = QLossKernel.__call__

    def counted(self: QLossKernel, online: Any, target: Any, rows: Any, *args: Any, **kwargs: Any) -> Any:
        made.append(len(rows.reward))
        return original(self, online, target, rows, *args, **kwargs)

    monkeypatch.setattr(QLossKernel, "__call__", counted)
    return made


def learner(
    shape: NetworkSettings = SHAPE, settings: DQNSettings = SETTINGS, head: nn.Module | None = None, *,
    choices: int = 3, features: int = 0, seed: int = 0, **kwargs: Any,
) -> DQN:  # fmt: skip
    torch.manual_seed(seed)
    names = () if features else tuple(map(str, range(choices)))
    spec = SourceSpec(num_state_features=5, num_action_features=features, action_names=names)
    head = ScalarHead() if head is None else head
    made = DQN(build_q_network(spec, replace(shape, outputs=head.outputs)), head, settings, **kwargs)
    for p in made.target_network.parameters():  # not the online network's
        p.add_(0.1 * torch.randn(p.shape))
    return made


def doubled(batch: TransitionBatch) -> TransitionBatch:
    names = ("state", "next_state", "reward", "steps", "bootstrap", "weight")
    return replace(batch, **{name: getattr(batch, name).double() for name in names})


def gradients(made: DQN) -> list[Tensor]:
    found = [p.grad for p in made.q_network.parameters()]
    return [g.clone() for g in found if g is not None]


@pytest.mark.parametrize("dueling", [False, True], ids=["plain", "dueling"])
@pytest.mark.parametrize("loss", ["mse", "huber"])
@pytest.mark.parametrize("rule", [{}, {"double": False}, {"maxq": False}], ids=["double", "max-Q", "SARSA"])
def test_the_same_as_the_loss_in_float64(rule: dict[str, bool], loss: str, dueling: bool, calls: list[int]) -> None:
    settings = DQNSettings(gamma=0.9, target_update_rate=0.1, **rule)
    boost = torch.tensor([0.5, 0.0, -2.0])
    made = learner(replace(SHAPE, dueling=dueling), settings, ScalarHead(loss), reward_boost=boost)
    batch = drawn(200, 5, 3, seed=4)
    exact = copy.deepcopy(made).double()
    value, metrics = made(batch)
    value.backward()
    assert calls == [200]
    wanted, _ = exact(doubled(batch))
    wanted.backward()
    assert calls == [200]  # float64 is left to dqn.py
    torch.testing.assert_close(value.double(), wanted, rtol=1e-5, atol=1e-6)
    assert metrics["td_loss"].item() == value.item()
    assert not metrics["td_loss"].requires_grad
    torch.testing.assert_close(made.row_losses.double(), exact.row_losses, rtol=1e-4, atol=1e-5)
    for one, two in zip(gradients(made), gradients(exact), strict=True):
        torch.testing.assert_close(one.double(), two, rtol=1e-4, atol=1e-5)


def test_three_rows_by_hand(calls: list[int]) -> None:
    # one linear layer: Q(s) = (s0 + s1, s0 - s1), the target network ten times that
    made = DQN(
        build_q_network(SourceSpec(num_state_features=2, action_names=("a", "b")),
                        NetworkSettings(hidden=(), activations=())),
        ScalarHead(), DQNSettings(gamma=0.5, target_update_rate=0.1),
    )  # fmt: skip
    weight = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    with torch.no_grad():
        made.q_network.layers[0].weight.copy_(weight)  # type: ignore[union-attr, index, operator]
        made.target_network.layers[0].weight.copy_(10 * weight)  # type: ignore[union-attr, index, operator]
    batch = make_batch(
        [[1.0, 2.0], [3.0, 1.0], [0.0, 1.0]], [[1.0, 3.0], [2.0, -1.0], [5.0, 5.0]], [0, 1, 1], [1.0, 0.0, 5.0],
        steps=torch.tensor([1.0, 2.0, 1.0]), bootstrap=torch.tensor([1.0, 1.0, 0.0]),
    )  # fmt: skip
    # targets: 1 + 1/2 * 40 = 21 (Q(s') = 4, -2), 0 + 1/4 * 30 = 7.5 (Q(s') = 1, 3), 5; Q(s, a) = 3, 2, -1
    loss, _ = made(batch)
    assert loss.item() == pytest.approx((18**2 + 5.5**2 + 6**2) / 3)
    loss.backward()
    of_weight, of_bias = gradients(made)
    # 2/3 of the errors -18, -5.5, -6 times the states: action 0 in row 0, action 1 in rows 1 and 2
    wanted = torch.tensor([[-18.0, -36.0], [-16.5, -11.5]]) * 2 / 3
    torch.testing.assert_close(of_weight, wanted)
    torch.testing.assert_close(of_bias, torch.tensor([-18.0, -11.5]) * 2 / 3)
    assert made.row_losses.tolist() == [324, 30.25, 36]
    assert calls == [3]


def test_equal_values_and_rows_without_a_choice(calls: list[int]) -> None:
    """Ties go to the lowest index, and a row with no allowed choice has value 0, as rl/td.py says."""
    made = learner(NetworkSettings(hidden=(), activations=()), choices=4)
    with torch.no_grad():
        for p in made.q_network.parameters():
            p.zero_()
        for p in made.target_network.parameters():
            p.zero_()
        made.target_network.layers[0].bias.copy_(torch.tensor([1.0, 10.0, 100.0, 1000.0]))  # type: ignore[union-attr, index, operator]
    mask = torch.tensor([[True] * 4, [False, True, False, True], [False] * 4])
    made(make_batch(torch.zeros(3, 5), torch.zeros(3, 5), [0] * 3, [0.0] * 3, next_actions=Actions(mask=mask),
                    actions=Actions(mask=torch.ones(3, 4, dtype=torch.bool))))  # fmt: skip
    torch.testing.assert_close(made.row_losses.sqrt(), torch.tensor([0.9, 9.0, 0.0]))
    assert calls == [3]


RULES = [DQNSettings(gamma=0.9, target_update_rate=0.1, **rule)
         for rule in ({}, {"double": False}, {"maxq": False})]  # fmt: skip


@pytest.mark.parametrize("dueling", [False, True], ids=["plain", "dueling"])
@pytest.mark.parametrize("settings", RULES, ids=["double", "max-Q", "SARSA"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("place", ["q_network", "target_network", "reward"])
def test_what_is_not_finite_shows(
    place: str, value: float, settings: DQNSettings, dueling: bool, calls: list[int]
) -> None:
    """In the loss, in gradients, and in as many of them as by dqn.py; where the choice is not allowed too."""
    made = learner(replace(SHAPE, dueling=dueling), settings)
    batch = drawn(100, 5, 3, seed=1)
    batch.next_actions.mask[:, 0] = False  # the first action's bias is what is spoilt
    batch.actions.mask[:, 0] = False
    with torch.no_grad():
        if place == "reward":
            batch.reward[0], batch.weight[0] = value, 0.5
        else:
            network = getattr(made, place)
            (network.advantage if dueling else network.layers)[-1].bias[0] = value
    exact = copy.deepcopy(made).double()
    loss, _ = made(batch)
    loss.backward()
    wanted, _ = exact(doubled(batch))
    wanted.backward()
    assert calls == [100]
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-5, atol=1e-6, equal_nan=True)
    for one, two in zip(gradients(made), gradients(exact), strict=True):
        torch.testing.assert_close(one.double(), two, rtol=1e-4, atol=1e-5, equal_nan=True)
    if dueling or place == "reward":  # a plain network's first action is chosen in few rows, and by no one next
        assert not loss.isfinite()


@pytest.mark.parametrize("double", [True, False], ids=["double", "max-Q"])
def test_the_first_value_that_is_not_a_number_is_chosen(double: bool, calls: list[int]) -> None:
    """As torch's argmax does; a finite one beside it would hide it."""
    made = learner(NetworkSettings(hidden=(), activations=()), DQNSettings(gamma=0.9, target_update_rate=0.1,
                                                                         double=double), choices=4)  # fmt: skip
    with torch.no_grad():
        for p in made.parameters():
            p.zero_()
        chooser = made.q_network if double else made.target_network
        chooser.layers[0].bias.copy_(torch.tensor([1.0, math.nan, 5.0, math.nan]))  # type: ignore[union-attr, index, operator]
        if double:
            made.target_network.layers[0].bias.copy_(torch.tensor([1.0, 10.0, 100.0, 1000.0]))  # type: ignore[union-attr, index, operator]
    made(make_batch(torch.zeros(1, 5), torch.zeros(1, 5), [0], [0.0], next_actions=every(1, 4), actions=every(1, 4)))
    if double:
        assert made.row_losses.item() == pytest.approx((1 - 9) ** 2)
    else:
        assert made.row_losses.isnan().all()
    assert calls == [1]


def every(rows: int, choices: int) -> Actions:
    return Actions(mask=torch.ones(rows, choices, dtype=torch.bool))


def test_columns_in_any_layout(calls: list[int]) -> None:
    made, batch = learner(), drawn(60, 5, 3, seed=3)
    wide, long = torch.stack([batch.weight] * 2, 1), torch.stack([batch.action] * 2, 1).flatten()
    odd = replace(
        batch, state=batch.state.t().contiguous().t(), next_state=batch.next_state.repeat(1, 2)[:, :5],
        reward=batch.reward[:1].expand(60), weight=wide[:, 1], action=long[::2],
        next_action=batch.next_action[:1].expand(60),
    )  # fmt: skip
    columns = [getattr(odd, name) for name in ("state", "next_state", "reward", "weight", "action", "next_action")]
    assert not any(column.is_contiguous() for column in columns)
    plain = replace(batch, reward=odd.reward.contiguous(), next_action=odd.next_action.contiguous())
    assert made(odd)[0].item() == made(plain)[0].item()
    assert calls == [60, 60]


def test_gradients_are_scaled_added_and_handed_out_once(calls: list[int]) -> None:
    made, batch = learner(), drawn(64, 5, 3, seed=2)
    made(batch)[0].backward()
    once = gradients(made)
    loss, _ = made(batch)
    (3 * loss).backward(retain_graph=True)
    for one, four in zip(once, gradients(made), strict=True):
        torch.testing.assert_close(four, 4 * one)
    with pytest.raises(RuntimeError, match="have been handed out"):
        loss.backward()
    assert calls == [64, 64]


def test_a_copy_has_layers_of_its_own(calls: list[int]) -> None:
    made, batch = learner(), drawn(64, 5, 3, seed=2)
    before = made(batch)[0].item()
    twin = copy.deepcopy(made)
    with torch.no_grad():
        for p in twin.parameters():
            p.add_(1.0)
    assert twin(batch)[0].item() != before
    assert made(batch)[0].item() == before
    made.double()
    made.float()
    assert made(batch)[0].item() == pytest.approx(before, rel=1e-6)
    assert calls == [64] * 4


def test_steps_learn_what_steps_without_it_learn(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [drawn(64, 5, 3, seed=seed) for seed in range(100)]
    twins = [learner(replace(SHAPE, dueling=True)) for _ in range(2)]
    for made, kernel in zip(twins, (True, False), strict=True):
        if not kernel:
            monkeypatch.setattr("reagent_lite.algorithms.fused_loss.q_loss_kernel", lambda: None)
        optimizer = torch.optim.SGD(made.q_network.parameters(), lr=0.01)
        for batch in batches:
            optimizer.zero_grad()
            made(batch)[0].backward()
            optimizer.step()
            made.after_step()
    assert len(calls) == 100
    for one, two in zip(*(made.parameters() for made in twins), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=2e-5)


LEFT: dict[str, Any] = {
    "cross-entropy": lambda: learner(head=ScalarHead("bce_with_logits")),
    "C51": lambda: learner(head=CategoricalHead(11, -5.0, 5.0)),
    "CQL": lambda: learner(settings=DQNSettings(gamma=0.9, target_update_rate=0.1, cql_alpha=0.5)),
    "BCQ": lambda: learner(imitator=learner().q_network),
    "dropout": lambda: learner(replace(SHAPE, dropout=0.5)),
    "batch norm": lambda: learner(replace(SHAPE, batch_norm=True)),
    "tanh": lambda: learner(replace(SHAPE, activations=("relu", "tanh"))),
    "no trunk": lambda: learner(NetworkSettings(hidden=(), activations=(), dueling=True)),
    "large layers": lambda: learner(NetworkSettings(hidden=(1024, 512), activations=("relu",) * 2)),
    "candidates": lambda: learner(features=2),
}


@pytest.mark.parametrize("kind", LEFT)
def test_what_is_left_to_the_loss_in_parts(kind: str, calls: list[int]) -> None:
    made = LEFT[kind]()
    batch = drawn(60, 5, 3, seed=3)
    if kind == "candidates":
        batch = random_batch(60, 5, 3, seed=3, num_features=2)
    if kind == "cross-entropy":
        batch.reward[:] = 0
        batch.bootstrap[:] = 0
    made(batch)[0].backward()
    assert calls == []
    assert all(g.isfinite().all() for g in gradients(made))


@pytest.mark.parametrize("dueling", [False, True], ids=["plain", "dueling"])
def test_padding_is_not_computed(dueling: bool) -> None:
    """By neither of the learner's networks: one of three candidates is there."""
    made = learner(replace(SHAPE, dueling=dueling), features=2)
    batch = random_batch(60, 5, 3, seed=3, num_features=2)
    for actions in (batch.actions, batch.next_actions):
        actions.mask[:, 1:] = False
    rows = []
    for network in (made.q_network, made.target_network):
        part = network.advantage if hasattr(network, "advantage") else network.layers  # type: ignore[union-attr]
        part.register_forward_hook(lambda module, given, result: rows.append(len(given[0])))  # type: ignore[union-attr]
    made(batch)[0].backward()
    made.judge(batch)
    assert set(rows) == {60}


def test_batches_that_are_left_to_the_loss_in_parts(calls: list[int]) -> None:
    made, batch = learner(), drawn(60, 5, 3, seed=3)
    wanted = made(batch)[0].item()
    assert calls == [60]
    with torch.no_grad():
        assert made(batch)[0].item() == pytest.approx(wanted, rel=1e-6)
    torch.set_num_threads(2)
    try:
        assert made(batch)[0].item() == pytest.approx(wanted, rel=1e-6)
    finally:
        torch.set_num_threads(1)
    states = batch.state.clone().requires_grad_()
    made(replace(batch, state=states))[0].backward()
    assert states.grad is not None
    assert states.grad.abs().sum() > 0
    made.q_network.layers[0].weight.requires_grad_(False)  # type: ignore[union-attr, index]
    assert made(batch)[0].item() == pytest.approx(wanted, rel=1e-6)
    assert calls == [60]


@pytest.mark.parametrize("name", ["reward", "weight", "steps", "action", "next_state", "mask", "next mask"])
def test_columns_of_another_length_are_an_error_of_torchs(name: str, calls: list[int]) -> None:
    """Never memory beyond their end."""
    made, batch = learner(), drawn(60, 5, 3, seed=3)
    short = drawn(30, 5, 3, seed=3)
    names = {"mask": "actions", "next mask": "next_actions"}
    wrong = replace(batch, **{names.get(name, name): getattr(short, names.get(name, name))})
    if name == "mask":  # a plain network does not look at it
        assert made(wrong)[0].item() == pytest.approx(made(batch)[0].item(), rel=1e-6)
        assert calls == [60]
        return
    with pytest.raises((RuntimeError, IndexError, UserWarning)):  # warnings are errors here
        made(wrong)
    assert calls == []


@pytest.mark.parametrize("name", ["reward", "weight", "next_state", "boost"])
def test_columns_of_another_type_are_left_to_torch(name: str, calls: list[int]) -> None:
    """Which refuses them; read as the kernel's types they would be any numbers."""
    made, batch = learner(), drawn(60, 5, 3, seed=3)
    if name == "boost":
        made = learner(reward_boost=torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
    else:
        batch = replace(batch, **{name: getattr(batch, name).double()})
    with pytest.raises(RuntimeError):
        made(batch)
    assert calls == []


def test_columns_of_a_type_that_torch_takes(calls: list[int]) -> None:
    made, batch = learner(), drawn(60, 5, 3, seed=3)
    wanted = made(batch)[0].item()
    for name, kind in (("steps", torch.int64), ("bootstrap", torch.int64), ("action", torch.int32)):
        assert made(replace(batch, **{name: getattr(batch, name).to(kind)}))[0].item() == pytest.approx(wanted)
    assert calls == [60]


@pytest.mark.parametrize("name", ["reward", "weight", "actions", "next_actions"])
def test_columns_elsewhere_are_left_to_torch(name: str, calls: list[int]) -> None:
    """Their addresses are nothing to read from."""
    made, batch = learner(replace(SHAPE, dueling=True)), drawn(60, 5, 3, seed=3)
    with pytest.raises((RuntimeError, NotImplementedError)):
        made(replace(batch, **{name: getattr(batch, name).to(torch.device("meta"))}))[0].item()
    assert calls == []


@pytest.mark.parametrize("name", ["reward", "weight"])
def test_gradients_of_columns_are_left_to_torch(name: str, calls: list[int]) -> None:
    made, batch = learner(), drawn(60, 5, 3, seed=3)
    column = getattr(batch, name).clone().requires_grad_()
    made(replace(batch, **{name: column}))[0].backward()
    assert column.grad is not None
    assert column.grad.abs().sum() > 0
    assert calls == []


def test_an_action_beyond_the_last_is_an_error(calls: list[int]) -> None:
    made, batch = learner(), drawn(60, 5, 3, seed=3)
    batch.action[7] = 3
    with pytest.raises(IndexError, match="row 7 of the batch: action 3"):
        made(batch)
    assert calls == [60]
