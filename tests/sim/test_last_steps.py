"""States of several steps in simulation by hand: what policies see, what replay stores, and a run that is resumed."""

import json
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from helpers.played import played
from helpers.resuming import Laboratory, Tree, different, simulated
from helpers.runs import ALONE, merged, trained

from reagent_lite.config import check
from reagent_lite.config.simulate_config import SimulateConfig
from reagent_lite.errors import ConfigError
from reagent_lite.export import load_bundle
from reagent_lite.sim.experience import Actor, Rollout
from reagent_lite.sim.gymnasium_backend import GymnasiumBackend
from reagent_lite.sim.gymnasium_env import open_envs
from reagent_lite.sim.replay.ring import ReplayRing, ReplaySettings
from reagent_lite.tasks.simulate import simulate


class Counter(gymnasium.Env):
    """Observes the number of its step, from 1; ends itself after 2 steps, or with action 1."""

    observation_space = gymnasium.spaces.Box(0, 99, (1,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._step = 1
        return np.array([1.0], np.float32), {}

    def step(self, action):
        self._step += 1
        return np.array([self._step], np.float32), 1.0, self._step == 3 or action == 1, False, {}


gymnasium.register("StepCounter-v0", Counter, max_episode_steps=50)
# the last three steps of an episode's first, second and third observation: 1 before each that exists
FIRST = [0, 0, 0, 0, 1, 1]
SECOND = [0, 0, 1, 1, 1, 2]
THIRD = [1, 1, 1, 2, 1, 3]


def opened(count: int, history: int = 3):
    return open_envs(GymnasiumBackend("gymnasium:StepCounter-v0", {}), num_envs=count, history=history)


@pytest.mark.parametrize("step", ["step", "advance"])
def test_a_new_episode_begins_without_the_steps_of_the_last(step: str) -> None:
    env = opened(2)
    env.reset()
    assert env.stacked.tolist() == [FIRST, FIRST]
    env.action.copy_(torch.tensor([0, 1]))  # the second environment ends
    getattr(env, step)()
    assert env.stacked.tolist() == [SECOND, FIRST]
    assert step == "advance" or env.next_stacked.tolist() == [SECOND, SECOND]
    env.action.zero_()
    getattr(env, step)()
    assert env.stacked.tolist() == [FIRST, SECOND]
    assert step == "advance" or env.next_stacked.tolist() == [THIRD, SECOND]
    env.reset()
    assert env.stacked.tolist() == [FIRST, FIRST]


def test_one_step_is_the_observation_itself() -> None:
    env = opened(2, history=1)
    assert (env.stacked is env.observation, env.next_stacked is env.next_observation) == (True, True)


def test_replay_has_the_steps_of_each_row() -> None:
    seen = []

    def policy(observation, mask, features):
        seen.append(observation.tolist())
        return torch.tensor([[1.0, 0.0]])

    env = opened(1)
    settings = ReplaySettings(num_envs=1, observation_size=6, num_actions=2, slots=4, gamma=0.9, seed=0)
    ring = ReplayRing(settings, env.device)
    rollout = Rollout(env, {"": Actor(policy=policy, epsilon=torch.zeros(1), ring=ring)}, device=env.device)
    rollout.run(4)
    assert seen == [[FIRST], [SECOND], [FIRST], [SECOND]]
    batch = ring.sample(64).batch
    rows = {(*now, *after): ended for now, after, ended in zip(
        batch.state.tolist(), batch.next_state.tolist(), batch.bootstrap.tolist(), strict=True)}  # fmt: skip
    assert rows == {(*FIRST, *SECOND): 1.0, (*SECOND, *THIRD): 0.0}


def online(folder: Path, history: int, env: str = "cartpole_v0", **simulation: object) -> Tree:
    return simulated(folder, simulation={"env": env, **simulation}) | {
        "model_output_path": str(folder / "out"), "data": {"history": history}
    }  # fmt: skip


def test_resumed_runs_in_gymnasium_are_equal(tmp_path: Path) -> None:
    laboratory = Laboratory(online(tmp_path, 3, "gymnasium:CartPole-v1", total_steps=400), ALONE, tmp_path)
    ends = laboratory.resume_twice(9)
    assert different(*ends) == []


def test_a_model_plays_where_it_learned(tmp_path: Path) -> None:
    result = trained(online(tmp_path, 3))
    bundle = load_bundle(str(result.model))
    assert (bundle.history, bundle.step_feature_ids) == (3, (0, 1, 2, 3))
    _, report = played(tmp_path, Path(str(result.model)), "cartpole_v0", 4)
    assert report["model"]["simulated"]["mean_length"] > 0
    model = {"kind": "epsilon_greedy", "epsilon": 0.0, "model": str(result.model)}
    log = tmp_path / "log.jsonl"
    simulate(check(SimulateConfig, {"env": "cartpole_v0", "use_gpu": False, "output_path": str(log), "episodes": 3,
                                    "num_envs": 2, "policy": model}))  # fmt: skip
    # the log has single steps, of which the bundle makes the states that the model acted on
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert set(rows[0]["state_features"]) == set("0123")
    steps = [[before["state_features"] for before in rows[: number + 1] if before["mdp_id"] == row["mdp_id"]]
             for number, row in enumerate(rows)]  # fmt: skip
    chosen = bundle.predict_rows(steps).greedy
    assert [bundle.action_names[index] for index in chosen] == [row["action"] for row in rows]


def test_collectors_are_refused(tmp_path: Path) -> None:
    tree = online(tmp_path, 3, mode="collect", dataset={"path": str(tmp_path / "data")})
    with pytest.raises(ConfigError, match=r"data\.history: expected 1 with simulation.mode collect"):
        trained(merged(tree, {}))
