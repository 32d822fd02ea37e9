"""Both Tag worlds against the plain loops of oracles/tag.py, with 1 to 100 agents."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from oracles.tag import Continuous, Gridworld
from sim.conftest import environments

from reagent_lite.config.environment import EnvironmentConfig
from reagent_lite.errors import SimulationError
from reagent_lite.sim.env import VectorEnv


def draw(env: VectorEnv) -> np.ndarray[Any, Any]:
    env.act(None, epsilon=torch.ones(1))
    return env.action.numpy().reshape(env.num_envs, -1)


# of 20 games each: 10^4 steps in all where there is time; a minute with 100 agents
ALL = 500
every_pace = pytest.mark.parametrize("rounds", [40, pytest.param(ALL, marks=pytest.mark.slow)])


@every_pace
@pytest.mark.parametrize(
    "parameters",
    [
        {"num_taggers": 10},  # the defaults: 11 agents
        {"num_taggers": 0, "grid_length": 3},
        {"num_taggers": 4, "grid_length": 4, "episode_length": 10, "use_full_observation": 0},
        {"num_taggers": 20, "grid_length": 8, "episode_length": 40, "wall_hit_penalty": 0.3, "use_full_observation": 0},
        {"num_taggers": 99, "grid_length": 20, "tag_penalty_for_runner": 3.5},
    ],
)
def test_gridworld_equals_the_oracle(parameters: dict[str, float], rounds: int) -> None:
    """Games run freely: positions are whole numbers, so that nothing can drift."""
    games = [Gridworld(**parameters) for _ in range(20)]
    env = environments("tag_gridworld", len(games), seed=4, parameters=parameters)
    tags = 0
    for game in games:
        game.reset()
    assert np.array_equal(env.observation.numpy(), np.concatenate([game.observe() for game in games]))
    for _ in range(rounds):
        actions = draw(env)
        env.step()
        for n, game in enumerate(games):
            rewards, tagged = game.step(actions[n].tolist())
            assert env.reward.view(20, -1)[n].tolist() == rewards.tolist()
            assert np.array_equal(env.next_observation.view(20, len(rewards), -1)[n], game.observe())
            assert env.ended[n] == (1 if tagged else 2 * (game.steps == game.episode_length))
            tags += tagged
            if env.ended[n]:
                game.reset()
    assert (tags > 0) == (parameters["num_taggers"] > 0)


def test_places_where_the_gridworld_starts() -> None:
    parameters = {"num_taggers": 4, "grid_length": 4, "episode_length": 10}
    given = EnvironmentConfig(
        env="tag_gridworld", env_parameters=parameters | {f"starting_location_{axis}": [0, 0, 0, 0, 1] for axis in "xy"}
    ).env_parameters
    for constants, start in ((parameters, [2, 2, 2, 2, 0]), (given, [0, 0, 0, 0, 1])):
        env = environments("tag_gridworld", 1, parameters=constants)
        assert env.field("x").flatten().tolist() == env.field("y").flatten().tolist() == start
        assert env.spec.agent_types == (0, 0, 0, 0, 1)
    for name in ("starting_location_x[5]", "grid_length[0]"):
        with pytest.raises(SimulationError, match=r"starting_location_x \(a list of 5\), .*got '" + re.escape(name)):
            environments("tag_gridworld", 1, parameters=parameters | {name: 1})


@every_pace
@pytest.mark.parametrize("parameters", [
    {"grid_length": 3},
    {"num_taggers": 0, "num_runners": 1},
    {"num_taggers": 2, "num_runners": 3, "tagging_distance": 0.1, "edge_hit_penalty": -0.1, "episode_length": 30,
     "step_penalty_for_tagger": -0.01, "step_reward_for_runner": 0.02, "skill_level_runner": 0.8},
    {"num_taggers": 5, "num_runners": 12, "tagging_distance": 0.05, "runner_exits_game_after_tagged": 0,
     "use_full_observation": 0, "num_other_agents_observed": 20, "num_turn_levels": 1, "num_acceleration_levels": 3},
    {"num_taggers": 4, "num_runners": 16, "tagging_distance": 0.08, "use_full_observation": 0, "episode_length": 60},
    {"num_taggers": 5, "num_runners": 95, "tagging_distance": 0.03, "episode_length": 50, "max_turn": 7.0},
    {"num_taggers": 5, "num_runners": 95, "tagging_distance": 0.02, "use_full_observation": 0},
])  # fmt: skip
def test_continuous_takes_the_steps_of_the_oracle(parameters: dict[str, float], rounds: int) -> None:
    """Each step from the kernel's own state; what lies within 1e-5 of a threshold may fall on either side."""
    game = Continuous(**parameters)  # type: ignore[arg-type]
    N = game.num_agents
    num = 20 if N < 50 or rounds == ALL else 2
    env = environments("tag_continuous", num, seed=2, parameters=parameters)
    assert env.spec.agent_types == (0,) * game.num_taggers + (1,) * game.num_runners
    compared = tags = 0
    for _ in range(rounds):
        names = {"x": "x", "y": "y", "v": "speed", "theta": "direction", "a": "acceleration", "playing": "playing"}
        before = {own: env.field(name).view(N, num).numpy().copy() for own, name in names.items()}
        # views, which show what the step leads to
        present = {own: env.field(name).view(N, num).numpy() for own, name in names.items() if own != "playing"}
        steps = env.step_count.tolist()
        actions = draw(env)
        env.step()
        after, rewards = env.next_observation.numpy().reshape((num, N, -1)), env.reward.numpy().reshape(num, N)
        left = env.row_terminated.numpy().reshape(num, N)
        for n in range(num):
            start = {
                own: values[:, n].astype(bool if own == "playing" else np.float32) for own, values in before.items()
            }
            vars(game).update(start, steps=steps[n], near_threshold=False)
            moved = None if env.ended[n] else {own: values[:, n] for own, values in present.items()}
            seen, rewarded, over = game.step(actions[n].tolist(), moved)
            if game.near_threshold:
                continue
            compared += 1
            # a direction of 0 and one of 2 pi are the same
            gaps = np.abs(seen - after[n])
            if moved is not None or game.use_full_observation:
                assert np.minimum(gaps, np.abs(1 - gaps) if N > 1 else gaps).max() < 1e-6
            assert np.abs(rewarded - rewards[n]).max() < 1e-6
            assert env.ended[n] == (1 if over else 2 * (game.steps == game.episode_length))
            assert (left[n] == (over | ~game.playing)).all()
            tags += int((rewarded[game.is_tagger] > 0.5).sum())
    assert compared > 0.8 * num * rounds
    assert (tags > 0) == (game.num_taggers > 0)
