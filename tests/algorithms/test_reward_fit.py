"""Reward models on rewards whose means are known: what they choose, and when they grow trees."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from reagent_lite.algorithms.reward_fit import FOLDS, RewardFit, RewardRows, TreeSettings, fit_rewards
from reagent_lite.models.reward_models import RewardModel, build_reward_model
from reagent_lite.types import SourceSpec

TREES = TreeSettings(most=60, depth=4, leaves=8, shrinkage=0.1, threads=1, seed=0)
NAMED = SourceSpec(num_state_features=3, action_names=("a", "b", "c"))
LISTS = SourceSpec(num_state_features=2, num_action_features=2)


def decisions(count: int, mean: Tensor, state: Tensor, action: Tensor, noise: float, **columns: Tensor) -> RewardRows:
    random = torch.Generator().manual_seed(1)
    reward = mean + noise * torch.randn(count, generator=random)
    fold = torch.randint(0, FOLDS, (count,), generator=random)
    return RewardRows(state=state, chosen=columns.get("chosen"), action=action, reward=reward.double(), fold=fold)


def named(means: Tensor, state: Tensor, noise: float, share: float = 1 / 3) -> tuple[RewardModel, RewardFit]:
    """Fits a model to rewards with means [n, 3]; action c has a share of the rows."""
    random = torch.Generator().manual_seed(2)
    chances = torch.tensor([(1 - share) / 2, (1 - share) / 2, share]).expand(len(state), -1)
    action = torch.multinomial(chances, 1, generator=random).squeeze(1)
    mean = means.gather(1, action.unsqueeze(1)).squeeze(1)
    model = build_reward_model(NAMED)
    return model, fit_rewards(model, decisions(len(state), mean, state, action, noise), TREES)


def states(count: int, width: int = 3) -> Tensor:
    return torch.rand(count, width, generator=torch.Generator().manual_seed(0)) * 2 - 1


def values(model: RewardModel, state: Tensor, features: Tensor | None = None) -> Tensor:
    with torch.no_grad():
        return model(state, torch.ones(len(state), 1), features).squeeze(2)


def test_lines_are_found_exactly_without_trees() -> None:
    state = states(900)
    means = torch.stack((state[:, 0], -state[:, 1] + 1, 2 * state[:, 2]), 1)
    model, fit = named(means, state, noise=0.0)
    torch.testing.assert_close(values(model, state), means, rtol=0, atol=0.01)
    assert fit.linear < 1e-4 < 0.1 < fit.constant


def test_noise_is_a_constant() -> None:
    state = states(600)
    model, fit = named(torch.full((600, 3), 2.0), state, noise=1.0)
    assert fit.trees == 0
    torch.testing.assert_close(values(model, state), torch.full((600, 3), 2.0), rtol=0, atol=0.15)


def test_products_need_trees() -> None:
    state = states(6000)
    product = (state[:, 0] * state[:, 1]).sign()
    means = torch.stack((product, -product, torch.full_like(product, 0.2)), 1)
    model, fit = named(means, state, noise=1.0)
    chosen = means.gather(1, values(model, state).argmax(1, keepdim=True))
    assert fit.trees > 10
    assert fit.model < 0.7 * fit.linear
    assert chosen.mean() > 0.95 * means.amax(1).mean()


def test_an_action_of_few_rows_has_what_all_share() -> None:
    """c is b, but has five rows: its own line would be noise; what a and b share is known."""
    state = states(3000)
    means = torch.stack((3 * state[:, 0] - 1, 3 * state[:, 0], 3 * state[:, 0]), 1)
    model, _ = named(means, state, noise=1.0, share=0.002)
    assert (values(model, state)[:, 2] - means[:, 2]).abs().mean() < 0.6


def test_an_action_that_was_never_taken_has_the_shared_value() -> None:
    state = states(300)
    model, _ = named(state[:, :1].expand(-1, 3), state, noise=0.1, share=0.0)
    torch.testing.assert_close(values(model, state)[:, 2], state[:, 0], rtol=0, atol=0.1)


def test_one_value_of_all_rewards() -> None:
    model, fit = named(torch.full((60, 3), 7.0), states(60), noise=0.0)
    assert (fit.trees, fit.constant) == (0, pytest.approx(0, abs=1e-9))
    torch.testing.assert_close(values(model, states(60)), torch.full((60, 3), 7.0))


@pytest.mark.parametrize("threshold", [False, True], ids=["bilinear", "thresholds"])
def test_candidates(threshold: bool) -> None:
    """What a candidate earns depends on state and candidate together; the model ranks lists that it has not seen."""
    random = torch.Generator().manual_seed(3)
    state = states(6000, 2)
    chosen = torch.rand(6000, 2, generator=random) * 2 - 1

    def mean_of(state: Tensor, item: Tensor) -> Tensor:
        product = state[..., 0] * item[..., 0]
        return (product > 0).float() if threshold else 2 * product + item[..., 1]

    model = build_reward_model(LISTS)
    rows = decisions(6000, mean_of(state, chosen), state, torch.zeros(6000).long(), 0.5, chosen=chosen)
    fit = fit_rewards(model, rows, TREES)
    lists = torch.rand(1000, 5, 2, generator=random) * 2 - 1
    means = mean_of(states(1000, 2).unsqueeze(1).expand(-1, 5, -1), lists)
    best = means.gather(1, values(model, states(1000, 2), lists).argmax(1, keepdim=True))
    assert best.mean() > 0.95 * means.amax(1).mean()
    assert (fit.trees > 0) is threshold


def test_the_same_rows_give_the_same_model() -> None:
    state = states(1500)
    product = (state[:, :1] * state[:, 1:2]).sign().expand(-1, 3)
    first, second = (named(product, state, noise=0.5)[0].state_dict() for _ in range(2))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_errors_of_unseen_rows_count_every_action() -> None:
    """Forty actions with the same step: a further sample, which the model has not seen, has the error it states."""
    random = torch.Generator().manual_seed(4)
    spec = SourceSpec(num_state_features=2, action_names=tuple(map(str, range(40))))

    def sample(count: int) -> RewardRows:
        state = torch.rand(count, 2, generator=random) * 2 - 1
        action = torch.randint(0, 40, (count,), generator=random)
        mean = (state[:, 0] * state[:, 1]).sign()
        reward = mean + 0.3 * torch.randn(count, generator=random)
        fold = torch.randint(0, FOLDS, (count,), generator=random)
        return RewardRows(state=state, chosen=None, action=action, reward=reward.double(), fold=fold)

    model = build_reward_model(spec)
    fit = fit_rewards(model, sample(16_000), TREES)
    further = sample(16_000)
    predicted = values(model, further.state).gather(1, further.action.unsqueeze(1)).squeeze(1)
    assert fit.model == pytest.approx(float((further.reward - predicted).square().mean()), rel=0.25)


def test_equal_rewards_have_no_trees_of_rounding_errors() -> None:
    state = states(600)
    _, fit = named(torch.full((600, 3), 3.7), state, noise=0.0)
    assert fit.trees == 0


def test_events_have_the_weights_of_a_logistic_regression() -> None:
    """Log-odds are lines; a price is paid or not, and the expected price lies between."""
    random = torch.Generator().manual_seed(5)
    state = 3 * states(30_000)
    odds = torch.stack((state[:, 0] - 2, -state[:, 1], state[:, 2] + 1), 1)
    action = torch.randint(0, 3, (30_000,), generator=random)
    paid = torch.rand(30_000, generator=random) < odds.sigmoid().gather(1, action.unsqueeze(1)).squeeze(1)
    fold = torch.randint(0, FOLDS, (30_000,), generator=random)
    model = build_reward_model(NAMED)
    rows = RewardRows(state=state, chosen=None, action=action, reward=5 + 20.0 * paid.double(), fold=fold)
    fit = fit_rewards(model, rows, TREES)
    assert fit.trees == 0
    torch.testing.assert_close(values(model, state), 5 + 20 * odds.sigmoid(), rtol=0, atol=1.0)


def test_an_event_that_never_occurs_for_an_action() -> None:
    state = states(900)
    action = torch.arange(900) % 3
    reward = ((action == 1) & (torch.arange(900) % 2 == 0)).double()
    model = build_reward_model(NAMED)
    fit_rewards(
        model,
        RewardRows(state=state, chosen=None, action=action, reward=reward, fold=torch.arange(900) // 3 % FOLDS),
        TREES,
    )
    predicted = values(model, state)
    assert predicted.isfinite().all()
    assert (predicted.argmax(1) == 1).all()


@pytest.mark.parametrize("events", [False, True])
def test_two_categories_that_count_together(events: bool) -> None:
    """Six by five levels with an effect of each pair and action, which neither lines nor trees of 4,000 rows learn."""
    random = torch.Generator().manual_seed(6)
    level = torch.stack(
        (torch.randint(0, 6, (4000,), generator=random), torch.randint(0, 5, (4000,), generator=random))
    )
    state = torch.cat([torch.nn.functional.one_hot(codes).float() for codes in level], 1)
    effect = torch.randn(6, 5, 3, generator=random)[level[0], level[1]]
    means = (2 * effect).sigmoid() if events else effect
    action = torch.randint(0, 3, (4000,), generator=random)
    mean = means.gather(1, action.unsqueeze(1)).squeeze(1)
    noise = torch.rand(4000, generator=random)
    reward = (noise < mean) if events else mean + 3 * (noise - 0.5)
    fold = torch.randint(0, FOLDS, (4000,), generator=random)
    model = build_reward_model(SourceSpec(num_state_features=11, action_names=("a", "b", "c")))
    fit = fit_rewards(
        model, RewardRows(state=state, chosen=None, action=action, reward=reward.double(), fold=fold), TREES
    )
    chosen = means.gather(1, values(model, state).argmax(1, keepdim=True)).mean()
    assert fit.products == 30
    assert chosen > means.mean() + 0.95 * (means.amax(1).mean() - means.mean())


def test_actions_are_shrunk_towards_their_mean_and_not_that_of_rows() -> None:
    """One action has nearly all rows and another line; a rare action is like the ninety-nine others."""
    random = torch.Generator().manual_seed(7)
    state = states(12_000, 2)
    action = torch.where(
        torch.rand(12_000, generator=random) < 0.8, 0, torch.randint(1, 100, (12_000,), generator=random)
    )
    common = (action == 0).float()
    mean = common * (5 + state[:, 0]) + (1 - common) * (1 + state[:, 1])
    model = build_reward_model(SourceSpec(num_state_features=2, action_names=tuple(map(str, range(100)))))
    fit_rewards(model, decisions(12_000, mean, state, action, 1.0), TREES)
    error = values(model, state)[:, 1:] - (1 + state[:, 1:])
    assert error.abs().mean() < 0.2


@pytest.mark.parametrize("events", [False, True])
def test_a_row_of_weight_w_is_w_rows(events: bool) -> None:
    """Of the same fold; LightGBM's least rows of a leaf count rows, so that few rows grow no trees."""
    random = torch.Generator().manual_seed(3)
    state = states(120)
    action = torch.randint(0, 3, (120,), generator=random)
    reward = state[:, 0].double() + torch.randn(120, generator=random).double()
    if events:
        reward = (reward > 0).double()
    weight = torch.randint(1, 4, (120,), generator=random)
    fold = torch.randint(0, FOLDS, (120,), generator=random)
    rows = RewardRows(state=state, chosen=None, action=action, reward=reward, fold=fold, weight=weight.double())
    times = torch.arange(120).repeat_interleave(weight)
    repeated = RewardRows(state=state[times], chosen=None, action=action[times], reward=reward[times], fold=fold[times])
    once, often = build_reward_model(NAMED), build_reward_model(NAMED)
    fit = fit_rewards(once, rows, TREES)
    expected = fit_rewards(often, repeated, TREES)
    assert (fit.constant, fit.linear) == pytest.approx((expected.constant, expected.linear), rel=1e-9)
    torch.testing.assert_close(values(once, state), values(often, state), rtol=0, atol=1e-6)
    alike = fit_rewards(build_reward_model(NAMED), replace(rows, weight=None), TREES)
    assert abs(alike.linear - fit.linear) > 1e-4
