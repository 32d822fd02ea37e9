"""Recommendation: the dynamics are the oracle's."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from oracles import philox, recommend
from oracles.recommend import Integers
from sim.conftest import environments, play_at_random
from torch import Tensor

from reagent_lite.sim.env import VectorEnv

KEY = (12, 3)  # seed and stream


def users_of(env: VectorEnv) -> recommend.Users:
    columns = {name: env.field(name).numpy().T for name in recommend.Users.__slots__}
    return recommend.Users(
        **{name: column.astype(np.float64 if column.ndim == 2 else np.int64) for name, column in columns.items()}
    )


def assert_same(ours: recommend.Users, truth: recommend.Users, rows: NDArray[np.bool_]) -> None:
    for name, value in asdict(truth).items():
        np.testing.assert_allclose(getattr(ours, name)[rows], value[rows], atol=2e-6, rtol=2e-6, err_msg=name)


def assert_offer(mask: Tensor, features: Tensor, offered: Integers, *draw: Integers) -> None:
    """Items and mask are those of each environment's own step; draw: ids, episodes and steps."""
    ids, episode, step = (numbers[:, None] for numbers in draw)
    slots = np.arange(recommend.SLOTS)
    base = (step * recommend.SLOTS + slots) * 16
    words = philox.draws(recommend.ITEM_WORDS, ids, episode, philox.CANDIDATES, base, KEY)
    shown = slots < offered[:, None]
    np.testing.assert_array_equal(mask.numpy(), shown)
    np.testing.assert_allclose(features.numpy(), recommend.items(words) * shown[..., None], atol=2e-6)


def test_sessions_step_by_step_as_the_oracle() -> None:
    num = 1000
    env = environments("recommend", num, seed=KEY[0], stream=KEY[1], first_env=5, parametric=True)
    ids = 5 + np.arange(num)
    assert_same(
        users_of(env),
        recommend.start(philox.draws(recommend.START_WORDS, ids, 0, philox.RESET, 0, KEY)),
        np.ones(num, dtype=bool),
    )
    near = 0
    for _ in range(70):
        before, episode, step = users_of(env), env.episode.numpy().copy(), env.step_count.numpy().copy()
        assert_offer(env.mask, env.features, before.offered, ids, episode, step)
        env.act(None, epsilon=torch.ones(1))
        item = env.features.numpy()[np.arange(num), env.action.numpy()].astype(np.float64)
        env.step()
        words = philox.draws(recommend.STEP_WORDS, ids, episode, philox.STEP, step * 256, KEY)
        margin = recommend.click_probability(before, item) - philox.uniform(words[:, 0])
        clicked = env.reward.numpy() == 1
        near += int((np.abs(margin) <= 1e-6).sum())
        assert (clicked == (margin > 0))[np.abs(margin) > 1e-6].all()
        after, ended = recommend.step(before, item, clicked, words)
        np.testing.assert_array_equal(env.terminated.numpy(), ended)
        assert not env.truncated.any()
        assert_same(users_of(env), after, ~ended)
        words = philox.draws(recommend.START_WORDS, ids, episode + 1, philox.RESET, 0, KEY)
        assert_same(users_of(env), recommend.start(words), ended)
        led = recommend.observation(after)
        np.testing.assert_allclose(env.next_observation.numpy(), led, atol=2e-6, rtol=2e-6)
        np.testing.assert_allclose(env.observation.numpy()[~ended], led[~ended], atol=2e-6, rtol=2e-6)
        assert_offer(env.next_mask, env.next_features, after.offered, ids, episode, step + 1)
    assert env.episode.sum() > 1000
    assert near < 10
    env.check()


@pytest.mark.parametrize(("most", "fewest"), [(10, 10), (4, 2), (1, 1), (300, 1)])
def test_number_of_candidates_is_a_parameter(most: int, fewest: int) -> None:
    env = environments(
        "recommend", 400, parametric=True, parameters={"num_candidates": float(most), "min_candidates": float(fewest)}
    )
    assert env.features.shape == (400, most, 9)
    offered = env.mask.sum(1)
    assert fewest <= offered.min() <= offered.max() <= most
    play_at_random(env, 3)
    env.check()
