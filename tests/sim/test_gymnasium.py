"""Environments of Gymnasium behind our buffers are those of a loop over gymnasium.make, and what is no such thing."""

from __future__ import annotations

import sys
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Sequence, flatten
from sim.conftest import environments as kernels

from reagent_lite.config.environment import EnvironmentConfig
from reagent_lite.errors import SimulationError
from reagent_lite.sim.backend import open_backend
from reagent_lite.sim.env import VectorEnv
from reagent_lite.sim.gymnasium_env import open_envs
from reagent_lite.sim.replay.ring import ReplayRing, ReplaySettings
from reagent_lite.sim.rollout import ONLY, Actor, Rollout

CPU = torch.device("cpu")
SEED, STREAM = 5, 3


class Odd(gymnasium.Env[dict[str, Any], int]):
    """Counts 10 steps; action 5 + k is allowed unless k is the count modulo 3; ends and is cut off in the same step."""

    action_space = Discrete(3, start=5)
    observation_space: ClassVar = Dict({"lot": Box(-np.inf, np.inf, (2, 2), np.float64), "count": Discrete(11)})

    def __init__(self, fails_at: int = -1, forgets_at: int = -1, mask_size: int = 3, drops: int = 0) -> None:
        self.fails_at, self.forgets_at, self.size, self.drops = fails_at, forgets_at, mask_size, drops

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        super().reset(seed=seed)
        self.count = 0
        return self.shown()

    def step(self, action: int) -> tuple[Any, float, bool, bool, Any]:
        if self.count == self.fails_at:
            raise ValueError(f"broken at {self.count}")
        assert action != 5 + self.count % 3
        self.count += 1
        observation, info = self.shown()
        return observation, 0.5 * int(action), self.count == 10, self.count == 10, info

    def shown(self) -> tuple[Any, Any]:
        mask = np.arange(self.size) != self.count % 3
        info = {} if self.count == self.forgets_at else {"action_mask": mask}
        info["shape"] = np.zeros(self.np_random.integers(1, 9))  # another one in each environment
        lot = self.np_random.normal(size=(2, 2))
        return {"count": self.count, "lot": lot.flatten()[self.drops :] if self.drops else lot}, info


class Other(gymnasium.Env[Any, Any]):
    def __init__(self, observation: Any = None, action: Any = None) -> None:
        self.observation_space = Discrete(2) if observation is None else Sequence(Discrete(2))
        self.action_space = {None: Discrete(2), 1: Box(-1, 1), 2: MultiDiscrete([2, 3])}[action]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        return 0, {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, Any]:
        return 0, 0.0, False, False, {}


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    gymnasium.register("Odd-v0", Odd, max_episode_steps=1000)
    gymnasium.register("Other-v0", Other)


def environments(name: str, num: int, first: int = 0, limit: int | None = None, **parameters: Any) -> VectorEnv:
    backend = open_backend(EnvironmentConfig(env=f"gymnasium:{name}", env_parameters=parameters), CPU)
    env = open_envs(backend, num_envs=num, first_env=first, seed=SEED, stream=STREAM, time_limit=limit)
    env.reset()
    return env


class Loop:
    """One environment by hand: what is seen, flattened, and its mask."""

    def __init__(self, name: str, number: int, limit: int | None, parameters: dict[str, Any], episode: int = 0) -> None:
        self.env = gymnasium.make(name, max_episode_steps=limit, **parameters)
        seed = np.random.SeedSequence((SEED, STREAM, number, episode)).generate_state(1)[0]
        self.seen, self.info = self.env.reset(seed=int(seed))
        self.earned, self.steps, self.episodes = 0.0, 0, episode

    def flat(self, observation: Any) -> list[float]:
        return flatten(self.env.observation_space, observation).astype(np.float32).tolist()  # type: ignore[no-any-return]

    def step(self, action: int) -> dict[str, Any]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.earned, self.steps = self.earned + float(reward), self.steps + 1
        led = {
            "next_observation": self.flat(observation), "reward": reward, "terminated": terminated,
            "truncated": truncated and not terminated, **mask("next_mask", info),
        }  # fmt: skip
        self.seen, self.info = observation, info
        if terminated or truncated:
            led |= {"last_return": self.earned, "last_length": self.steps}
            self.seen, self.info = self.env.reset()
            self.earned, self.steps, self.episodes = 0.0, 0, self.episodes + 1
        return led | {
            "observation": self.flat(self.seen), **mask("mask", self.info), "episode": self.episodes,
            "step_count": self.steps, "episode_return": self.earned,
        }  # fmt: skip


def mask(name: str, info: dict[str, Any]) -> dict[str, list[bool]]:
    return {name: info["action_mask"].astype(bool).tolist()} if "action_mask" in info else {}


@pytest.mark.parametrize(
    ("name", "limit", "parameters", "first_action"),
    [
        ("CartPole-v1", 15, {}, 0),
        ("CartPole-v1", None, {"sutton_barto_reward": True}, 0),
        ("FrozenLake-v1", 6, {"is_slippery": True, "map_name": "8x8"}, 0),
        ("Taxi-v4", 7, {}, 0),
        ("Odd-v0", None, {}, 5),
    ],
    ids=["cut off", "parameters", "one-hot", "mask", "Dict, actions from 5, ended and cut off"],
)
def test_transitions_are_those_of_a_loop(
    name: str, limit: int | None, parameters: dict[str, Any], first_action: int
) -> None:
    env = environments(name, 3, 40, limit, **parameters)
    loops = [Loop(name, 40 + i, limit, parameters) for i in range(3)]
    assert env.observation.tolist() == [loop.flat(loop.seen) for loop in loops]
    assert (env.mask is not None) == ("action_mask" in loops[0].info)
    ends = {"terminated": 0, "truncated": 0}
    for _ in range(60):
        env.act(None, epsilon=torch.ones(1))
        expected = [loop.step(first_action + int(env.action[i])) for i, loop in enumerate(loops)]
        env.step()
        for i, led in enumerate(expected):
            assert {key: getattr(env, key)[i].tolist() for key in led} == led
            ends = {key: ends[key] + bool(led[key]) for key in ends}
    assert sum(ends.values()) >= 3
    assert ends["truncated"] == 0 or limit is not None
    env.check()


@pytest.mark.parametrize(("limit", "steps"), [(None, 9), (4, 4)])
def test_a_time_limit_outranks_max_episode_steps_of_env_parameters(limit: int | None, steps: int) -> None:
    env = environments("CartPole-v1", 1, limit=limit, max_episode_steps=9)
    for _ in range(steps):
        leaning = torch.stack((-env.observation[:, 2], env.observation[:, 2]), 1)
        env.act(leaning, epsilon=torch.zeros(1))
        env.step()
    assert (env.truncated.tolist(), env.last_length.tolist()) == ([True], [steps])


def test_actions_are_drawn_as_in_a_kernel() -> None:
    ours = environments("CartPole-v1", 8)
    kernel = kernels("cartpole_v1", 8, seed=SEED, stream=STREAM)
    q = torch.randn(8, 2, generator=torch.Generator().manual_seed(1))
    for settings in ({"epsilon": torch.full((1,), 0.3)}, {"epsilon": torch.zeros(1), "temperature": 0.7}):
        for env in (ours, kernel):
            env.act(q, **settings)
        assert ours.action.tolist() == kernel.action.tolist()
        assert ours.propensity.tolist() == kernel.propensity.tolist()


def test_a_saved_rollout_goes_on_with_new_episodes_that_no_window_joins_to_the_old_ones() -> None:
    def rollout() -> Rollout:
        settings = ReplaySettings(num_envs=2, observation_size=4, num_actions=2, slots=16, gamma=1.0, n_step=3, seed=1)
        player = Actor(policy=None, epsilon=torch.ones(1), ring=ReplayRing(settings, CPU))
        return Rollout(environments("CartPole-v1", 2), {ONLY: player}, device=CPU)

    before, after = rollout(), rollout()
    before.run(5)
    assert before.env.episode.tolist() == [0, 0]
    after.rings[ONLY].load_state_dict(before.rings[ONLY].state_dict())
    after.load_state_dict(before.state_dict())
    env = after.env
    fresh = [Loop("CartPole-v1", i, None, {}, episode=1) for i in range(2)]
    assert env.observation.tolist() == [loop.flat(loop.seen) for loop in fresh]
    assert (env.episode.tolist(), env.step_count.tolist(), env.episode_return.tolist()) == ([1, 1], [0, 0], [0, 0])
    assert env.next_observation.tolist() == before.env.next_observation.tolist()
    after.run(3)
    batch = after.rings[ONLY].sample(512).batch
    steps = {tuple(state): int(span) for state, span in zip(batch.state.tolist(), batch.steps.tolist(), strict=True)}
    assert sorted(steps.values()) == sorted([3, 3, 3, 2, 1, 3] * 2)  # rows 0 to 4 of the old episodes, 5 of the new
    assert batch.bootstrap.tolist() == [1.0] * 512
    led = {tuple(state) for state in batch.next_state[batch.steps == 1].tolist()}
    assert led == set(map(tuple, before.env.next_observation.tolist()))


@pytest.mark.parametrize(
    ("name", "parameters", "says"),
    [
        ("CartPol-v1", {}, r"simulation\.env: .*NameNotFound.* 'CartPole-v1'\?"),
        ("CartPole-v7", {}, r"VersionNotFound.* 'CartPole-v\d'\?"),
        ("cart pole", {}, "Malformed environment ID"),
        ("no_such_module:Mine-v0", {}, "No module named 'no_such_module'"),
        ("shp:CartPol-v1", {}, "No module named 'shp'"),
        ("CartPole-v1", {"gravty": 9}, r"simulation\.env with env_parameters: .*'gravty'"),
        ("Other-v0", {"action": 1}, "actions of Other-v0: .* Box.*DiscretizeAction"),
        ("Other-v0", {"observation": 1}, "observations of Other-v0: .*ObservationWrapper"),
        ("Other-v0", {"action": 2}, "got MultiDiscrete.*TransformAction"),
        ("Far/Other-v0", {}, "NamespaceNotFound"),
        ("Odd-v0", {"drops": 1}, "observations of Odd-v0: .* 15 numbers, .* got 14"),
        ("Other-v0", {}, r"simulation\.time_limit: expected a number"),
        ("Odd-v0", {"mask_size": 2}, r"action_mask of Odd-v0: expected 3 values, got shape \[2\]"),
        ("Odd-v0", {"fails_at": 0}, r"reset and step of Odd-v0: .* broken at 0 \(.*test_gymnasium\.py:\d+\)"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*not within the observation space")  # Gymnasium's own checker
def test_what_is_no_environment_of_ours(name: str, parameters: dict[str, Any], says: str) -> None:
    with pytest.raises(SimulationError, match=says):
        environments(name, 2, **parameters)


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ({"fails_at": 4}, r"step of Odd-v0: .* broken at 4 \(.*\.py:\d+\)"),
        ({"forgets_at": 4}, "info of Odd-v0: expected action_mask"),
    ],
)
def test_what_an_environment_does_wrong_later(parameters: dict[str, Any], says: str) -> None:
    player = Actor(policy=None, epsilon=torch.ones(1))
    rollout = Rollout(environments("Odd-v0", 2, **parameters), {ONLY: player}, device=CPU)
    rollout.run(3)
    with pytest.raises(SimulationError, match=says):
        rollout.run(2)


def test_environments_that_were_made_are_closed_where_a_later_one_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    made, closed = list[Odd](), list[Odd]()

    class Closed(Odd):  # its own class: environments of other tests are closed whenever they are collected
        def close(self) -> None:
            closed.append(self)

    def fifth_fails(**parameters: Any) -> Odd:
        if len(made) == 4:  # one more is made for its spaces
            raise ValueError("no display")
        made.append(Closed())
        return made[-1]

    monkeypatch.setattr(gymnasium.registry["Odd-v0"], "entry_point", fifth_fails)
    with pytest.raises(SimulationError, match=r"environments of Odd-v0: .* no display"):
        environments("Odd-v0", 5)
    assert sorted(map(id, closed)) == sorted(map(id, made))


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(SimulationError, match=r"'reagent-lite\[gymnasium\]'"):
        environments("CartPole-v1", 1)
