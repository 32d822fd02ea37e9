"""Recommendation: the dynamics are the oracle's, and planning pays."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from oracles import philox, recommend
from oracles.episodes import environments, first_episodes
from torch import Tensor

from reagent_lite.sim.env import VectorEnv

SEED, STREAM, FIRST = 12, 0, 5
KEY = (SEED, STREAM)
Array = NDArray[np.float64]


def users_of(env: VectorEnv) -> recommend.Users:
    def numbers(name: str) -> Array:
        return env.field(name).numpy().T.astype(np.float64)

    def counts(name: str) -> NDArray[np.int64]:
        return env.field(name).numpy().astype(np.int64)

    return recommend.Users(
        interest=numbers("interest"),
        satiation=numbers("satiation"),
        steps=counts("steps"),
        misses=counts("misses"),
        offered=counts("offered"),
    )


def features_of(env: VectorEnv) -> Tensor:
    assert env.features is not None
    return env.features


def choices_of(env: VectorEnv) -> Tensor:
    assert env.mask is not None
    return env.mask


def assert_same(ours: recommend.Users, truth: recommend.Users, rows: NDArray[np.bool_]) -> None:
    for name, value in asdict(truth).items():
        np.testing.assert_allclose(asdict(ours)[name][rows], value[rows], atol=2e-6, rtol=2e-6, err_msg=name)


def assert_offer(env: VectorEnv, ids: NDArray[np.int64]) -> None:
    """Items and mask are those of each environment's own step."""
    slots = np.arange(recommend.SLOTS)
    base = (env.step_count.numpy()[:, None] * recommend.SLOTS + slots) * 16
    episode = env.episode.numpy()[:, None]
    words = philox.draws(recommend.ITEM_WORDS, ids[:, None], episode, philox.CANDIDATES, base, KEY)
    shown = slots < users_of(env).offered[:, None]
    np.testing.assert_array_equal(choices_of(env).numpy(), shown)
    np.testing.assert_allclose(features_of(env).numpy(), recommend.items(words) * shown[..., None], atol=2e-6)


def test_sessions_step_by_step_as_the_oracle() -> None:
    num = 1000
    env = environments("recommend", num, seed=SEED, first_env=FIRST, parametric=True)
    ids = FIRST + np.arange(num)
    begun = recommend.start(philox.draws(recommend.START_WORDS, ids, 0, philox.RESET, 0, KEY))
    everyone = np.ones(num, dtype=bool)
    assert_same(users_of(env), begun, everyone)
    num_ended = near = 0
    for _ in range(70):
        assert_offer(env, ids)
        env.act(None, epsilon=torch.ones(1))
        before, episode, step = users_of(env), env.episode.numpy().copy(), env.step_count.numpy().copy()
        item = features_of(env).numpy()[np.arange(num), env.action.numpy()].astype(np.float64)
        env.step()
        words = philox.draws(recommend.STEP_WORDS, ids, episode, philox.STEP, step * 256, KEY)
        chance = recommend.click_probability(before, item)
        clicked = env.reward.numpy() == 1
        surely = np.abs(philox.uniform(words[:, 0]) - chance) > 1e-6
        assert (clicked == (philox.uniform(words[:, 0]) < chance))[surely].all()
        near += int((~surely).sum())
        after, ended = recommend.step(before, item, clicked, words)
        np.testing.assert_array_equal(env.terminated.numpy(), ended)
        assert not env.truncated.any()
        assert_same(users_of(env), after, ~ended)
        fresh = recommend.start(philox.draws(recommend.START_WORDS, ids, episode + 1, philox.RESET, 0, KEY))
        assert_same(users_of(env), fresh, ended)
        led = recommend.observation(after)
        np.testing.assert_allclose(env.next_observation.numpy(), led, atol=2e-6, rtol=2e-6)
        np.testing.assert_allclose(env.observation.numpy()[~ended], led[~ended], atol=2e-6, rtol=2e-6)
        assert env.next_features is not None
        assert env.next_mask is not None
        assert torch.equal(env.next_features[~ended], features_of(env)[~ended])
        assert torch.equal(env.next_mask[~ended], choices_of(env)[~ended])
        num_ended += int(ended.sum())
    assert num_ended > 1000
    assert near < 10
    env.check()


@pytest.mark.parametrize(("most", "fewest"), [(10, 10), (4, 2), (1, 1), (300, 1)])
def test_number_of_candidates_is_a_parameter(most: int, fewest: int) -> None:
    parameters = {"num_candidates": float(most), "min_candidates": float(fewest)}
    env = environments("recommend", 400, parametric=True, parameters=parameters)
    assert features_of(env).shape == (400, most, 9)
    offered = choices_of(env).sum(1)
    assert fewest <= offered.min()
    assert offered.max() <= most
    for _ in range(3):
        env.act(None, epsilon=torch.ones(1))
        env.step()
    env.check()


def test_a_session_ends_truly_and_a_shorter_limit_truncates() -> None:
    patient = {"hazard_per_miss": 0.0}
    whole = environments("recommend", 50, parameters=patient)
    assert whole.time_limit == 50
    cut = environments("recommend", 50, parameters=patient, time_limit=20)
    for env, length, flag in ((whole, 50, 1), (cut, 20, 2)):
        clicks = torch.zeros(50)
        for step in range(length):
            assert (env.observation[:, 16] == torch.tensor(step / 50.0)).all()
            env.act(None, epsilon=torch.ones(1))
            env.step()
            clicks += env.reward
            assert (env.ended == (flag if step == length - 1 else 0)).all()
        assert (env.next_observation[:, 16] == torch.tensor(length / 50.0)).all()
        assert (env.observation[:, 16] == 0).all()
        assert torch.equal(env.last_return, clicks)


def logit(observation: Tensor, features: Tensor) -> Tensor:
    """[N, K] of the click: what the next click alone is worth."""
    topics, quality = features[..., :8], features[..., 8]
    interest, satiation = observation[:, :8, None], observation[:, 8:16, None]
    return (topics @ (2 * interest - 1.5 * satiation)).squeeze(2) + quality


def greedy(observation: Tensor, mask: Tensor | None, features: Tensor | None) -> Tensor:
    assert features is not None
    return logit(observation, features)


def planner(observation: Tensor, mask: Tensor | None, features: Tensor | None) -> Tensor:
    """Charges an item for the topics it tires the user of.

    Shown once, topics f stay in q for 0.8 + 0.8^2 + ... = 4 steps' worth, which lowers the logits of later items g by
    1.5 f.g each. Those have about 0.25 in each of the 8 topics (unit length, neither widest nor narrowest): 1.5 |f|_1.
    """
    assert features is not None
    return logit(observation, features) - 1.5 * features[..., :8].sum(2)


def test_a_planner_earns_more_clicks_than_the_greedy_recommender() -> None:
    num = 4000
    clicks = {}
    for name, policy in (("greedy", greedy), ("planner", planner), ("random", None)):
        env = environments("recommend", num, seed=21, parametric=True)
        clicks[name] = first_episodes(env, policy).returns
    # intervals of 99.9 %
    low, high = ({name: v.mean() + k * 3.3 * v.std() / num**0.5 for name, v in clicks.items()} for k in (-1, 1))
    assert high["random"] < low["greedy"]
    assert high["greedy"] < low["planner"]
    assert clicks["planner"].mean() > 1.08 * clicks["greedy"].mean()
