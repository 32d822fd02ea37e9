"""Models for evaluation: the loss by hand, exact values on the gridworld, candidates like named actions."""

import dataclasses

import pytest
import torch
from helpers.batches import make_batch, random_batch, uniform
from torch import Tensor, nn

from reagent_lite.algorithms.reward_and_q_models import (
    EarlyStopping,
    LevelCorrection,
    RewardAndQModels,
    build_reward_and_q_models,
    fit_reward_and_q_models,
)
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


def heads_of(reward: Tensor, value: Tensor, gamma: float = 0.5) -> RewardAndQModels:
    return RewardAndQModels(
        Table(reward), Table(value), gamma=gamma, target_update_rate=0.5, num_outcomes=reward.shape[2]
    )


def test_loss_by_hand():
    eye = torch.eye(2)
    batch = make_batch(eye, eye.flip(0), [0, 1], [1.0, 2.0], weight=torch.tensor([0.25, 0.75]),
                       steps=torch.tensor([2.0, 1.0]), bootstrap=torch.tensor([1.0, 0.0]))  # fmt: skip
    heads = heads_of(torch.tensor([[[3.0], [0]], [[0], [4]]]), torch.tensor([[[10.0], [20]], [[30], [40]]]))
    loss, metrics = heads(batch, torch.tensor([[0.25, 0.75], [1.0, 0.0]]))
    # rewards: .25 (3 - 1)^2 + .75 (4 - 2)^2 = 4
    # row 0: 1 + .5^2 (.25 * 30 + .75 * 40) = 10.375 against 10; row 1 ends: 2 against 40
    expected = 0.25 * 0.375**2 + 0.75 * 38**2
    assert {**metrics, "loss": loss.detach()} == pytest.approx(
        {"reward_loss": 4, "value_loss": expected, "loss": 4 + expected}
    )


def test_target_is_not_differentiated_and_follows_after_a_step():
    heads = heads_of(torch.zeros(2, 2, 1), torch.ones(2, 2, 1))
    batch = make_batch(torch.eye(2), torch.eye(2), [0, 1], [1.0, 2.0])
    heads(batch, torch.full((2, 2), 0.5))[0].backward()
    assert heads.target_network.table.grad is None
    heads.value_network.table.data += 2
    # the target network's 1 follows, not the online network's 3: (1 + .5 - 3)^2 and (2 + .5 - 3)^2
    assert heads(batch, torch.full((2, 2), 0.5))[1]["value_loss"].item() == pytest.approx((1.5**2 + 0.5**2) / 2)
    heads.after_step()
    assert heads.target_network.table.unique().tolist() == [2.0]  # 1 + .5 * (3 - 1)


def test_a_shift_removes_the_mean_residual():
    """Two states that lead to each other, gamma 0.5: residuals 1 + .5 * 2 - 0 and 3 + .5 * 0 - 2 in units of 1."""
    heads = heads_of(torch.tensor([[[4.0], [0]], [[0], [8]]]), torch.zeros(2, 2, 1))
    heads.target_network.table.data[1] = 2
    heads.value_network.table.data.fill_(7)
    batch = make_batch(torch.eye(2), torch.eye(2).flip(0), [0, 1], [1.0, 3.0], weight=torch.tensor([0.25, 0.75]))
    policy = torch.full((2, 2), 0.5)
    sums = heads.residual_sums(batch, policy)
    assert sums.tolist() == [1, 0.5, 0.25 * 2 + 0.75 * 1, 0.25 * (1 - 4) + 0.75 * (3 - 8)]
    heads.shift(sums)
    # 1.25 / .5: by how much both change until a shift of 1 by the target, which is .5 of it, is no longer behind
    assert [table.unique().tolist() for table in (heads.target_network.table, heads.value_network.table)] == [
        [2.5, 4.5],
        [9.5],
    ]
    assert heads.reward_network.table[:, 0, 0].tolist() == [4 - 4.5, -4.5]
    assert heads.residual_sums(batch, policy)[2:].tolist() == pytest.approx([0, 0], abs=1e-6)


@pytest.mark.parametrize("features", [0, 2])
def test_a_shift_reaches_the_value_of_an_endless_reward(features: int):
    """Gamma 0.99 and a reward of 1: 100, after one shift of networks that say 0 in units of 100 rewards."""
    spec = SourceSpec(num_state_features=3, num_action_features=features, action_names=() if features else ("a", "b"))
    torch.manual_seed(0)
    heads = build_reward_and_q_models(spec, SETTINGS, gamma=0.99, target_update_rate=0.1)
    heads.value_scale.fill_(100)
    *_, last_weight, _ = heads.target_network.parameters()
    last_weight.zero_()
    batch = dataclasses.replace(
        random_batch(8, 3, 2, seed=0, num_features=features),
        reward=torch.ones(8),
        steps=torch.ones(8),
        bootstrap=torch.ones(8),
        metrics=torch.zeros(8, 0),
    )
    policy = uniform(batch.next_state, batch.next_actions)
    correct = LevelCorrection(heads, lambda: heads.residual_sums(batch, policy), every=2)

    correct(1)
    assert not heads.predict(batch.state, batch.actions)[1].any()
    correct(2)
    values = heads.predict(batch.state, batch.actions)[1]
    torch.testing.assert_close(values, 100 * batch.actions.mask.unsqueeze(2).float(), rtol=1e-4, atol=0)


def test_scales_from_sums():
    heads = heads_of(torch.zeros(2, 2, 2), torch.zeros(2, 2, 2), gamma=0.5)
    state = torch.eye(2)[[0, 1, 0]]
    batch = make_batch(state, state, [0, 1, 0], [3.0, 4.0, 99.0], metrics=torch.tensor([[0.0], [0.0], [7.0]]),
                       bootstrap=torch.tensor([1.0, 0.0, 1.0]), weight=torch.tensor([0.5, 0.5, 0.0]))  # fmt: skip
    sums = heads.scale_sums(batch)
    assert sums.tolist() == [2, 0.5, 7, 0, 25, 0]  # padding is left out
    heads.set_scales(sums)
    # root mean square (25 / 2)^.5; a metric that is always 0 keeps 1; mean discount .25 makes values 4 / 3 larger
    scales = torch.cat((heads.reward_scale, heads.value_scale))
    assert scales.tolist() == pytest.approx([12.5**0.5, 1, 12.5**0.5 * 4 / 3, 4 / 3])
    # networks that say 0 give the mean outcome 7 / 2, and the value of a policy that always earns it
    assert torch.cat(heads.predict(state, batch.actions), 2)[0, 0].tolist() == pytest.approx([3.5, 0, 3.5 * 4 / 3, 0])


def test_scales_change_units_and_not_the_optimum():
    eye = torch.eye(2)
    truth_reward = torch.tensor([[[6.0]], [[2.0]]])
    truth_value = torch.tensor([[[7.0]], [[2.0]]])
    heads = heads_of(truth_reward / 2 - 0.75, truth_value / 4 - 0.75)
    for buffer, value in ((heads.reward_scale, 2), (heads.value_scale, 4), (heads.mean, 0.75)):
        buffer.fill_(value)
    # state 0 -> state 1 -> end, gamma .5: q = 6 + .5 * 2 and 2
    batch = make_batch(eye, eye[[1, 1]], [0, 0], [6.0, 2.0], num_choices=1, bootstrap=torch.tensor([1.0, 0.0]))
    assert heads(batch, torch.ones(2, 1))[0].item() == pytest.approx(0, abs=1e-10)
    assert torch.equal(torch.cat(heads.predict(eye, batch.actions), 2), torch.cat((truth_reward, truth_value), 2))


def test_a_fit_ends_when_the_held_out_loss_no_longer_falls():
    """Gamma 0.5 and updates of 0.5: values have arrived after 5 * 2 / 0.5 steps, before the fewest there are."""
    heads = heads_of(torch.zeros(2, 2, 1), torch.zeros(2, 2, 1))
    heads.set_scales(torch.tensor([2.0, 1.0, 0.0, 2.0]))  # mean discount .5: a horizon of 2

    def ended_after(losses: list[float]) -> int:
        stop = EarlyStopping(heads, lambda: losses.pop(0))
        return next(step for step in range(1, 10_000) if stop(step))

    # the first look is after 1000, and five see nothing new; less than 0.1 % is nothing
    assert [ended_after([1.0] * 50), ended_after([3.0, 4.0, 5.0, 2.0, *[1.9999] * 50])] == [1500, 1300 + 500]
    heads.target_update_rate = 0.002
    assert ended_after([1.0] * 50) == 5500


def test_candidates_are_scored_like_named_actions():
    spec = SourceSpec(num_state_features=3, num_action_features=2, metric_names=("clicks",))
    heads = build_reward_and_q_models(spec, SETTINGS, gamma=0.9, target_update_rate=0.1)
    metrics = torch.randn(6, 1, generator=torch.Generator().manual_seed(1))
    batch = dataclasses.replace(random_batch(6, 3, 4, seed=0, num_features=2), metrics=metrics)
    _, metrics = heads(batch, uniform(batch.next_state, batch.next_actions))
    rewards, values = heads.predict(batch.state, batch.actions)
    assert rewards.shape == values.shape == (6, 4, 2)
    # the logged candidate's prediction out of all, against reward and metric
    outcomes = torch.stack((batch.reward, batch.metrics[:, 0]), 1)
    expected = (batch.weight * (rewards[torch.arange(6), batch.action] - outcomes).square().sum(1)).sum()
    assert metrics["reward_loss"].item() == pytest.approx(expected.item(), rel=1e-5)


def test_streams_and_dropout_of_the_q_network_are_left_out():
    heads = build_reward_and_q_models(
        SourceSpec(num_state_features=3, action_names=("a", "b")),
        dataclasses.replace(SETTINGS, dueling=True, dropout=0.5, batch_norm=True, outputs=51),
        gamma=0.9,
        target_update_rate=0.1,
    )
    assert not any(isinstance(m, nn.Dropout | BatchNorm) for m in heads.modules())
    assert heads.predict(torch.zeros(1, 3), Actions(mask=torch.ones(1, 2, dtype=torch.bool)))[0].shape == (1, 2, 1)


def test_each_batch_is_used_once():
    heads = heads_of(torch.zeros(2, 2, 1), torch.zeros(2, 2, 1))
    optimizer = torch.optim.SGD(heads.parameters(), lr=0.1)
    assert fit_reward_and_q_models(heads, [], uniform, optimizer) == {}
    batch = make_batch(torch.eye(2), torch.eye(2), [0, 1], [1.0, 1.0])
    assert set(fit_reward_and_q_models(heads, iter([batch] * 3), uniform, optimizer)) == {"reward_loss", "value_loss"}
    # w <- w - .1 * 2 * .5 (w - 1), three times: 1 - .9^3
    assert heads.reward_network.table[0, 0, 0].item() == pytest.approx(1 - 0.9**3)


def test_choices_that_are_not_allowed_have_value_zero():
    heads = heads_of(torch.ones(2, 2, 1), torch.ones(2, 2, 1))
    assert heads.predict(torch.eye(2)[:1], Actions(mask=torch.tensor([[True, False]])))[1].tolist() == [[[1], [0]]]
