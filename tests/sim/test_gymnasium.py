"""Environments of Gymnasium behind our buffers are those of a loop over gymnasium.make, and what is no such thing."""

from __future__ import annotations

import sys
from typing import Any, ClassVar
from unittest.mock import Mock, create_autospec

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Sequence
from gymnasium.wrappers import FlattenObservation
from sim.conftest import environments as kernels
from sim.conftest import play_at_random, require_buffers
from sim.replay.rings import ring_of
from torch.testing import assert_close

from reagent_lite.config.environment import EnvironmentConfig
from reagent_lite.errors import SimulationError
from reagent_lite.sim.backend import open_backend
from reagent_lite.sim.env import VectorEnv
from reagent_lite.sim.experience import ONLY, Actor, Rollout
from reagent_lite.sim.gymnasium_env import open_envs

KEY = {"seed": 5, "stream": 3}


class Odd(gymnasium.Env[dict[str, Any], int]):
    """Counts 10 steps; action 5 + k is allowed unless k is the count modulo 3; ends and is cut off in the same step.

    Whatever is given replaces an attribute.
    """

    action_space = Discrete(3, start=5)
    observation_space: ClassVar = Dict({"lot": Box(-np.inf, np.inf, (2, 2), np.float64), "count": Discrete(11)})
    fails_at = forgets_at = None  # count at which a step raises, or shows no mask
    mask_size = 3
    drops = 0  # numbers of an observation that are left out
    values = 5  # of a step
    unknown_at = None  # count at which an observation has `unknown`
    unknown = np.nan
    values_from = 0  # count from which a step has `values`
    bare = False  # whether a reset returns the observation alone

    def __init__(self, **changes: Any) -> None:
        vars(self).update(changes)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        super().reset(seed=seed)
        self.count = 0
        return self.shown()[0] if self.bare else self.shown()  # type: ignore[return-value]

    def step(self, action: int) -> tuple[Any, float, bool, bool, Any]:
        if self.count == self.fails_at:
            raise ValueError(f"broken at {self.count}")
        assert action != 5 + self.count % 3
        self.count += 1
        observation, info = self.shown()
        values = (observation, 0.5 * int(action), self.count == 10, self.count == 10, info)
        return values[-self.values :] if self.count >= self.values_from else values  # type: ignore[return-value]

    def shown(self) -> tuple[Any, Any]:
        info = {"shape": np.zeros(self.np_random.integers(1, 9))}  # another one in each environment
        if self.count != self.forgets_at:
            info["action_mask"] = np.arange(self.mask_size) != self.count % 3
        lot = self.np_random.normal(size=(2, 2))
        if self.count == self.unknown_at:
            lot[1, 0] = self.unknown
        return {"count": self.count, "lot": lot.flatten()[self.drops :] if self.drops else lot}, info


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    gymnasium.register("Odd-v0", Odd, max_episode_steps=1000)
    gymnasium.register("Other-v0", Odd)


def environments(name: str, num: int, first: int = 0, limit: int | None = None, **parameters: Any) -> VectorEnv:
    backend = open_backend(EnvironmentConfig(env=f"gymnasium:{name}", env_parameters=parameters), torch.device("cpu"))
    env = open_envs(backend, num_envs=num, first_env=first, **KEY, time_limit=limit)
    env.reset()
    return env


class Loop:
    """One environment by hand: what is seen, flattened, and its mask."""

    def __init__(self, name: str, number: int, limit: int | None = None, episode: int = 0, **parameters: Any) -> None:
        self.env = FlattenObservation(
            gymnasium.make(name, **parameters | ({"max_episode_steps": limit} if limit else {}))
        )
        self.now = self.env.reset(
            seed=int(np.random.SeedSequence((*KEY.values(), number, episode)).generate_state(1)[0])
        )
        self.episode, self.rewards = episode, list[float]()

    def step(self, action: int) -> dict[str, Any]:
        seen, reward, terminated, truncated, info = self.env.step(action)
        self.rewards.append(float(reward))
        self.now = seen, info
        led = {"reward": reward, "terminated": terminated, "truncated": truncated and not terminated,
               **self.shown("next_")}  # fmt: skip
        if terminated or truncated:
            led |= {"last_return": sum(self.rewards), "last_length": len(self.rewards)}
            self.now = self.env.reset()
            self.episode, self.rewards = self.episode + 1, []
        return led | self.shown() | {
            "episode": self.episode, "step_count": len(self.rewards), "episode_return": sum(self.rewards),
        }  # fmt: skip

    def shown(self, prefix: str = "") -> dict[str, Any]:
        observation, info = self.now
        masks = {f"{prefix}mask": info["action_mask"].astype(bool).tolist()} if "action_mask" in info else {}
        return {f"{prefix}observation": observation.astype(np.float32).tolist(), **masks}


@pytest.mark.parametrize(
    ("name", "limit", "parameters", "first_action"),
    [
        ("CartPole-v1", 15, {}, 0),
        ("CartPole-v1", None, {"sutton_barto_reward": True}, 0),
        ("CartPole-v1", None, {"max_episode_steps": 9}, 0),
        ("CartPole-v1", 4, {"max_episode_steps": 9}, 0),
        ("FrozenLake-v1", 6, {"is_slippery": True, "map_name": "8x8"}, 0),
        ("Taxi-v4", 7, {}, 0),
        ("Odd-v0", None, {}, 5),
    ],
    ids=[
        "cut off",
        "parameters",
        "limit of parameters",
        "limit outranks it",
        "one-hot",
        "mask",
        "Dict, actions from 5, ended and cut off",
    ],
)
def test_transitions_are_those_of_a_loop(
    name: str, limit: int | None, parameters: dict[str, Any], first_action: int
) -> None:
    env = environments(name, 3, 40, limit, **parameters)
    loops = [Loop(name, 40 + i, limit, **parameters) for i in range(3)]
    for i, loop in enumerate(loops):
        assert {key: getattr(env, key)[i].tolist() for key in loop.shown()} == loop.shown()
    assert (env.mask is not None) == ("mask" in loops[0].shown())
    for _ in range(60):
        env.act(None, epsilon=torch.ones(1))
        expected = [loop.step(first_action + int(env.action[i])) for i, loop in enumerate(loops)]
        env.step()
        for i, led in enumerate(expected):
            assert {key: getattr(env, key)[i].tolist() for key in led} == led
    assert env.episode.sum() >= 3
    env.check()


def test_actions_are_drawn_as_in_a_kernel() -> None:
    ours = environments("CartPole-v1", 8)
    kernel = kernels("cartpole_v1", 8, **KEY)
    q = torch.randn(8, 2, generator=torch.Generator().manual_seed(1))
    for settings in ({"epsilon": torch.full((1,), 0.3)}, {"epsilon": torch.zeros(1), "temperature": 0.7}):
        for env in (ours, kernel):
            env.act(q, **settings)
        assert_close((ours.action, ours.propensity), (kernel.action, kernel.propensity), rtol=0, atol=0)


def test_a_saved_rollout_goes_on_with_new_episodes_that_no_window_joins_to_the_old_ones() -> None:
    def rollout() -> Rollout:
        ring = ring_of(num_envs=2, observation_size=4, num_actions=2, slots=16, gamma=1.0, n_step=3)
        actor = Actor(policy=None, epsilon=torch.ones(1), ring=ring)
        return Rollout(environments("CartPole-v1", 2), {ONLY: actor}, device=torch.device("cpu"))

    before, after = rollout(), rollout()
    before.run(5)
    last = before.env.next_observation.tolist()
    require_buffers(before.env, episode=[0, 0])
    after.rings[ONLY].load_state_dict(before.rings[ONLY].state_dict())
    after.load_state_dict(before.state_dict())
    fresh = [Loop("CartPole-v1", i, episode=1).shown()["observation"] for i in range(2)]
    require_buffers(after.env, observation=fresh, next_observation=last, episode=[1, 1], step_count=[0, 0],
                    episode_return=[0, 0])  # fmt: skip
    after.run(3)
    batch = after.rings[ONLY].sample(512).batch
    steps = {tuple(state): int(span) for state, span in zip(batch.state.tolist(), batch.steps.tolist(), strict=True)}
    assert sorted(steps.values()) == sorted([3, 3, 3, 2, 1, 3] * 2)  # rows 0 to 4 of the old episodes, 5 of the new
    assert batch.bootstrap.tolist() == [1.0] * 512
    assert set(map(tuple, batch.next_state[batch.steps == 1].tolist())) == set(map(tuple, last))


@pytest.mark.parametrize(
    ("name", "parameters", "says"),
    [
        ("CartPol-v1", {}, r"simulation\.env: .*NameNotFound.* 'CartPole-v1'\?"),
        ("CartPole-v7", {}, r"VersionNotFound.* 'CartPole-v\d'\?"),
        ("cart pole", {}, "Malformed environment ID"),
        ("no_such_module:Mine-v0", {}, "No module named 'no_such_module'"),
        ("shp:CartPol-v1", {}, "No module named 'shp'"),
        ("CartPole-v1", {"gravty": 9}, r"simulation\.env with env_parameters: .*'gravty'"),
        ("Other-v0", {"action_space": Box(-1, 1)}, "actions of Other-v0: .* Box.*DiscretizeAction"),
        ("Other-v0", {"observation_space": Sequence(Discrete(2))}, "observations of Other-v0: .*ObservationWrapper"),
        ("Other-v0", {"action_space": MultiDiscrete([2, 3])}, "got MultiDiscrete.*TransformAction"),
        ("Far/Other-v0", {}, "NamespaceNotFound"),
        ("Odd-v0", {"drops": 1}, "observations of Odd-v0: .* 15 numbers, .* got 14"),
        ("Other-v0", {}, r"simulation\.time_limit: expected a number"),
        ("Odd-v0", {"mask_size": 2}, r"action_mask of Odd-v0: expected 3 values, got shape \[2\]"),
        ("Odd-v0", {"fails_at": 4}, r"^step of Odd-v0: .* broken at 4 \(.*\.py:\d+\)"),
        ("Odd-v0", {"values": 4}, r"step of Odd-v0: .* truncated and info, got 4 values\. That of old gym"),
        ("Odd-v0", {"unknown_at": 4}, "observations of Odd-v0: .*, got nan in environment 0, at step 4 of an episode"),
        ("Odd-v0", {"unknown_at": 10}, "observations of Odd-v0: .* nan in environment 0, at step 10 of an episode"),
        ("Odd-v0", {"unknown_at": 0}, "observations of Odd-v0: .* nan in environment 0, at the start of an episode"),
        ("Odd-v0", {"unknown_at": 4, "unknown": 1e300}, r"float32 numbers, got 1e\+300 in environment 0, at step 4"),
        ("Odd-v0", {"values": 4, "values_from": 3}, r"step of Odd-v0: .*, got 4 values\. That of old gym"),
        ("Odd-v0", {"bare": True}, "reset of Odd-v0: expected observation and info, got one dict. That of old gym"),
        ("Odd-v0", {"forgets_at": 4}, "info of Odd-v0: expected action_mask"),
        ("Odd-v0", {"fails_at": 0}, r"reset and step of Odd-v0: .* broken at 0 \(.*test_gymnasium\.py:\d+\)"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*not within the observation space")  # Gymnasium's own checker
def test_what_is_no_environment_of_ours_or_goes_wrong_later(name: str, parameters: dict[str, Any], says: str) -> None:
    with pytest.raises(SimulationError, match=says):
        play_at_random(environments(name, 2, **parameters), 10)


def test_environments_that_were_made_are_closed_where_a_later_one_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [Odd(close=Mock()) for _ in range(4)]  # the first is made for its spaces
    monkeypatch.setattr(
        gymnasium.registry["Odd-v0"], "entry_point", create_autospec(Odd, side_effect=[*made, ValueError("no display")])
    )
    with pytest.raises(SimulationError, match=r"environments of Odd-v0: .* no display"):
        environments("Odd-v0", 5)
    assert all(env.close.called for env in made)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(SimulationError, match=r"'reagent-lite\[gymnasium\]'"):
        environments("CartPole-v1", 1)
