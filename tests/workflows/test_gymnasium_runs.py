"""Runs in environments of Gymnasium: trained, evaluated, simulated, resumed; roles are in test_collect_and_learn.py."""

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.played import played
from helpers.resuming import Laboratory, Tree, different, simulated
from helpers.runs import ALONE, trained

from reagent_lite.errors import SimulationError


def online(folder: Path, env: str, **simulation: Any) -> Tree:
    return simulated(folder, simulation={"env": env, **simulation}) | {"model_output_path": str(folder / "out")}


@pytest.mark.parametrize(
    ("env", "workflow", "parameters"),
    [
        ("gymnasium:FrozenLake-v1", "dqn", {"map_name": "4x4", "is_slippery": False}),
        ("gymnasium:FrozenLake-v1", "parametric_dqn", {"desc": ["SFFG", "FFFH"]}),
    ],
)
def test_a_model_is_exported_and_evaluated_where_it_played(
    tmp_path: Path, env: str, workflow: str, parameters: Tree
) -> None:
    trained(online(tmp_path, env, env_parameters=parameters), workflow)
    model = tmp_path / "out" / "model"
    evaluated = json.loads((model / "evaluation.json").read_text())["simulation"]
    assert (evaluated["env"], evaluated["env_parameters"]) == (env.removeprefix("gymnasium:"), parameters)
    _, report = played(tmp_path, model, env, 4, simulation={"env_parameters": parameters, "time_limit": 9})
    assert report["model"]["simulated"]["mean_length"] <= report["simulation"]["time_limit"] == 9


def test_resumed_runs_are_equal(tmp_path: Path) -> None:
    laboratory = Laboratory(online(tmp_path, "gymnasium:CartPole-v1", total_steps=400), ALONE, tmp_path)
    ends = laboratory.resume_twice(9)
    assert different(*ends) == []
    assert [line.get("simulation/env_steps") for line in ends[0].lines] == [256, 400, None]


def test_what_an_environment_raises_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.py").write_text(
        "import gymnasium\n"
        "from gymnasium.envs.classic_control.cartpole import CartPoleEnv\n\n"
        "class Broken(CartPoleEnv):\n"
        "    taken = 0\n\n"
        "    def step(self, action):\n"
        "        Broken.taken += 1\n"
        "        if Broken.taken > 200:\n"
        "            raise RuntimeError('the pole fell off')\n"
        "        return super().step(action)\n\n\n"
        "gymnasium.register('Broken-v0', Broken, max_episode_steps=50)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(SimulationError, match=r"Broken-v0: .*fell off \(.*broken\.py:10\)"):
        trained(online(tmp_path, "gymnasium:broken:Broken-v0"))
    assert not (tmp_path / "out" / "model").exists()
