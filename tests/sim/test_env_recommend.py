"""Recommendation: the dynamics are the oracle's."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from oracles import philox, recommend
from sim.conftest import environments

from reagent_lite.sim.env import VectorEnv

SEED, STREAM, FIRST = 12, 0, 5
KEY = (SEED, STREAM)


def users_of(env: VectorEnv) -> recommend.Users:
    columns = {name: env.field(name).numpy().T for name in recommend.Users.__slots__}
    return recommend.Users(
        **{name: column.astype(np.float64 if column.ndim == 2 else np.int64) for name, column in columns.items()}
    )


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
    np.testing.assert_array_equal(env.mask.numpy(), shown)
    np.testing.assert_allclose(env.features.numpy(), recommend.items(words) * shown[..., None], atol=2e-6)


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
        item = env.features.numpy()[np.arange(num), env.action.numpy()].astype(np.float64)
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
        assert torch.equal(env.next_features[~ended], env.features[~ended])
        assert torch.equal(env.next_mask[~ended], env.mask[~ended])
        num_ended += int(ended.sum())
    assert num_ended > 1000
    assert near < 10
    env.check()


@pytest.mark.parametrize(("most", "fewest"), [(10, 10), (4, 2), (1, 1), (300, 1)])
def test_number_of_candidates_is_a_parameter(most: int, fewest: int) -> None:
    parameters = {"num_candidates": float(most), "min_candidates": float(fewest)}
    env = environments("recommend", 400, parametric=True, parameters=parameters)
    assert env.features.shape == (400, most, 9)
    offered = env.mask.sum(1)
    assert fewest <= offered.min()
    assert offered.max() <= most
    for _ in range(3):
        env.act(None, epsilon=torch.ones(1))
        env.step()
    env.check()
