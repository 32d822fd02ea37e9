"""Models for evaluation: the loss by hand, exact values on the gridworld, candidates like named actions."""

import dataclasses

import pytest
import torch
from oracles.batches import make_batch, random_batch
from torch import Tensor, nn

from reagent_lite.algorithms.cpe_heads import CPEHeads, EarlyStopping, build_cpe_heads, fit_heads
from reagent_lite.models.q_networks import BatchNorm, NetworkSettings
from reagent_lite.types import Actions, SourceSpec

SETTINGS = NetworkSettings(hidden=(8,), activations=("relu",))


class Table(nn.Module):
    """One number per (state, choice, outcome); the state is one-hot, and candidates one-hot features."""

    needs_candidate_list = False

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(table)  # [S, K, T]

    def forward(self, state: Tensor, mask: Tensor, features: Tensor | None = None) -> Tensor:
        values = torch.einsum("bs,skt->bkt", state, self.table)
        return values if features is None else torch.einsum("bkt,bcf->bct", values, features.sum(2, keepdim=True))


def heads_of(reward: Tensor, value: Tensor, gamma: float = 0.5) -> CPEHeads:
    return CPEHeads(Table(reward), Table(value), gamma=gamma, target_update_rate=0.5, num_outcomes=reward.shape[2])


def uniform(state: Tensor, actions: Actions) -> Tensor:
    return actions.mask / actions.mask.sum(1, keepdim=True).clamp(min=1)


def test_loss_by_hand():
    eye = torch.eye(2)
    after = {"steps": torch.tensor([2.0, 1.0]), "bootstrap": torch.tensor([1.0, 0.0])}
    batch = make_batch(eye, eye.flip(0), [0, 1], [1.0, 2.0], weight=torch.tensor([0.25, 0.75]), **after)
    reward = torch.tensor([[[3.0], [0.0]], [[0.0], [4.0]]])
    value = torch.tensor([[[10.0], [20.0]], [[30.0], [40.0]]])
    propensities = torch.tensor([[0.25, 0.75], [1.0, 0.0]])
    loss, metrics = heads_of(reward, value)(batch, propensities)
    # rewards: .25 (3 - 1)^2 + .75 (4 - 2)^2
    assert metrics["reward_loss"].item() == pytest.approx(4)
    # row 0: 1 + .5^2 (.25 * 30 + .75 * 40) = 10.375 against 10; row 1 ends: 2 against 40
    expected = 0.25 * 0.375**2 + 0.75 * 38**2
    assert metrics["value_loss"].item() == pytest.approx(expected)
    assert loss.item() == pytest.approx(4 + expected)


def test_target_is_not_differentiated_and_follows_after_a_step():
    heads = heads_of(torch.zeros(2, 2, 1), torch.ones(2, 2, 1))
    batch = make_batch(torch.eye(2), torch.eye(2), [0, 1], [1.0, 2.0])
    heads(batch, torch.full((2, 2), 0.5))[0].backward()
    assert heads.target_network.table.grad is None
    with torch.no_grad():
        heads.value_network.table += 2
    # the target network's 1 follows, not the online network's 3: (1 + .5 - 3)^2 and (2 + .5 - 3)^2
    assert heads(batch, torch.full((2, 2), 0.5))[1]["value_loss"].item() == pytest.approx((1.5**2 + 0.5**2) / 2)
    heads.after_step()
    assert heads.target_network.table.unique().tolist() == [2.0]  # 1 + .5 * (3 - 1)


def test_scales_from_sums():
    heads = heads_of(torch.zeros(2, 2, 2), torch.zeros(2, 2, 2), gamma=0.5)
    state = torch.eye(2)[[0, 1, 0]]
    other = {"bootstrap": torch.tensor([1.0, 0.0, 1.0]), "weight": torch.tensor([0.5, 0.5, 0.0])}
    metrics = torch.tensor([[0.0], [0.0], [7.0]])
    batch = make_batch(state, state, [0, 1, 0], [3.0, 4.0, 99.0], metrics=metrics, **other)
    sums = heads.scale_sums(batch)
    assert sums.tolist() == [2, 0.5, 7, 0, 25, 0]  # padding is left out
    heads.set_scales(sums)
    # root mean square (25 / 2)^.5; a metric that is always 0 keeps 1; mean discount .25 makes values 4 / 3 larger
    assert heads.reward_scale.tolist() == pytest.approx([12.5**0.5, 1])
    assert heads.value_scale.tolist() == pytest.approx([12.5**0.5 * 4 / 3, 4 / 3])
    # networks that say 0 give the mean outcome 7 / 2, and the value of a policy that always earns it
    rewards, values = heads.predict(state, batch.actions)
    assert rewards[0, 0].tolist() == pytest.approx([3.5, 0])
    assert values[0, 0].tolist() == pytest.approx([3.5 * 4 / 3, 0])


def test_scales_change_units_and_not_the_optimum():
    eye = torch.eye(2)
    truth_reward, truth_value = torch.tensor([[[6.0]], [[2.0]]]), torch.tensor([[[7.0]], [[2.0]]])
    heads = heads_of(truth_reward / 2, truth_value / 4)
    heads.reward_scale.fill_(2)
    heads.value_scale.fill_(4)
    heads.mean.fill_(0.75)
    with torch.no_grad():
        for network in (heads.reward_network, heads.value_network, heads.target_network):
            network.table -= 0.75
    # state 0 -> state 1 -> end, gamma .5: q = 6 + .5 * 2 and 2
    batch = make_batch(eye, eye[[1, 1]], [0, 0], [6.0, 2.0], num_choices=1, bootstrap=torch.tensor([1.0, 0.0]))
    assert heads(batch, torch.ones(2, 1))[0].item() == pytest.approx(0, abs=1e-10)
    rewards, values = heads.predict(eye, Actions(mask=torch.ones(2, 1, dtype=torch.bool)))
    assert torch.equal(rewards, truth_reward)
    assert torch.equal(values, truth_value)


def test_a_fit_ends_when_the_held_out_loss_no_longer_falls():
    """Gamma 0.5 and updates of 0.5: values have arrived after 5 * 2 / 0.5 steps, before the fewest there are."""
    heads = heads_of(torch.zeros(2, 2, 1), torch.zeros(2, 2, 1))
    heads.set_scales(torch.tensor([2.0, 1.0, 0.0, 2.0]))  # mean discount .5: a horizon of 2

    def ended_after(losses: list[float]) -> int:
        stop = EarlyStopping(heads, lambda: losses.pop(0))
        return next(step for step in range(1, 10_000) if stop(step))

    assert ended_after([1.0] * 50) == 1500  # the first look is after 1000, and five see nothing new
    assert ended_after([3.0, 4.0, 5.0, 2.0, *[1.9999] * 50]) == 1300 + 500  # less than 0.1 % is nothing
    heads.target_update_rate = 0.002
    assert ended_after([1.0] * 50) == 5500


def test_candidates_are_scored_like_named_actions():
    spec = SourceSpec(num_state_features=3, num_action_features=2, metric_names=("clicks",))
    heads = build_cpe_heads(spec, SETTINGS, gamma=0.9, target_update_rate=0.1)
    batch = random_batch(6, 3, 4, seed=0, num_features=2)
    batch = dataclasses.replace(batch, metrics=torch.randn(6, 1, generator=torch.Generator().manual_seed(1)))
    loss, metrics = heads(batch, uniform(batch.next_state, batch.next_actions))
    rewards, values = heads.predict(batch.state, batch.actions)
    assert rewards.shape == values.shape == (6, 4, 2)
    # the logged candidate's prediction out of all, against reward and metric
    outcomes = torch.stack((batch.reward, batch.metrics[:, 0]), 1)
    expected = (batch.weight * (rewards[torch.arange(6), batch.action] - outcomes).square().sum(1)).sum()
    assert metrics["reward_loss"].item() == pytest.approx(expected.item(), rel=1e-5)
    assert loss.item() == pytest.approx((metrics["reward_loss"] + metrics["value_loss"]).item(), rel=1e-6)


def test_streams_and_dropout_of_the_q_network_are_left_out():
    spec = SourceSpec(num_state_features=3, action_names=("a", "b"))
    settings = dataclasses.replace(SETTINGS, dueling=True, dropout=0.5, batch_norm=True, outputs=51)
    heads = build_cpe_heads(spec, settings, gamma=0.9, target_update_rate=0.1)
    assert not any(isinstance(m, nn.Dropout | BatchNorm) for m in heads.modules())
    rewards, _ = heads.predict(torch.zeros(1, 3), Actions(mask=torch.ones(1, 2, dtype=torch.bool)))
    assert rewards.shape == (1, 2, 1)


def test_each_batch_is_used_once():
    heads = heads_of(torch.zeros(2, 2, 1), torch.zeros(2, 2, 1))
    assert fit_heads(heads, [], uniform, torch.optim.SGD(heads.parameters(), lr=0.1)) == {}
    taken = 0

    def batches() -> object:
        nonlocal taken
        while taken < 3:
            taken += 1
            yield make_batch(torch.eye(2), torch.eye(2), [0, 1], [1.0, 1.0])

    before = heads.reward_network.table.clone()
    losses = fit_heads(heads, batches(), uniform, torch.optim.SGD(heads.parameters(), lr=0.1))
    assert taken == 3
    assert set(losses) == {"reward_loss", "value_loss"}
    # w <- w - .1 * 2 * .5 (w - 1), three times: 1 - .9^3
    assert (heads.reward_network.table - before)[0, 0, 0].item() == pytest.approx(1 - 0.9**3)


def test_choices_that_are_not_allowed_have_value_zero():
    heads = heads_of(torch.ones(2, 2, 1), torch.ones(2, 2, 1))
    actions = Actions(mask=torch.tensor([[True, False]]))
    assert heads.predict(torch.eye(2)[:1], actions)[1][0, :, 0].tolist() == [1, 0]
