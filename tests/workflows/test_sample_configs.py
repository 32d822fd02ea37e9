"""The configs that ship run as they are, and reach the scores that the README claims."""

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.runs import ROOT, merged, trained

from reagent_lite.config import DqnConfig, ParametricDqnConfig, check, expand_config, leaves, load_config
from reagent_lite.config.compare_config import CompareConfig
from reagent_lite.config.convert_config import ConvertConfig
from reagent_lite.config.evaluate_config import EvaluateConfig
from reagent_lite.config.inspect_config import InspectConfig
from reagent_lite.config.normalize_config import NormalizeConfig
from reagent_lite.config.rollout_config import RolloutConfig
from reagent_lite.config.score_config import ScoreConfig
from reagent_lite.config.serve_config import ServeConfig
from reagent_lite.config.shard_config import ShardConfig
from reagent_lite.config.simulate_config import SimulateConfig
from reagent_lite.config.timeline_config import TimelineConfig
from reagent_lite.tasks.simulate import simulate

# as all paths of the configs are relative
pytestmark = pytest.mark.usefixtures("inside")
CONFIGS = sorted(
    file for file in (ROOT / "configs").rglob("*.json") if not any(part.startswith(".") for part in file.parts)
)
WRITTEN = {"output_path", "log", "model_output_path", "timeline.outputTableName", "timeline.evalTableName",
           "norm_params.output_dir", "simulation.dataset.path"}  # fmt: skip


def tree(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "configs" / name).read_text())


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: str(file.relative_to(ROOT)))
def test_every_config_is_accepted_by_one_workflow(file: Path) -> None:
    kind = {"simulate": SimulateConfig, "simulate_candidates": SimulateConfig, "dqn": DqnConfig,
            "normalize": NormalizeConfig, "inspect": InspectConfig, "convert": ConvertConfig, "shard": ShardConfig,
            "timeline": TimelineConfig, "evaluate": EvaluateConfig, "score": ScoreConfig, "serve": ServeConfig,
            "rollout": RolloutConfig, "compare": CompareConfig, "two_models": ServeConfig,
            "collect": DqnConfig, "learn": DqnConfig, "gridworld": DqnConfig,
            "online": ParametricDqnConfig if file.parent.name == "recommend" else DqnConfig}  # fmt: skip
    Path("configs").symlink_to(ROOT / "configs")  # which a comparison reads
    config = load_config(kind.get(file.stem, ParametricDqnConfig), str(file))
    if isinstance(config, ShardConfig):
        return  # its places are a share and a disk of the machine's own, to be fitted
    values = leaves(expand_config(config))
    written = [values[key] for key in WRITTEN & values.keys() if values[key]]
    assert written
    assert all(path.startswith("outputs/") for path in written)  # which git ignores


@pytest.mark.parametrize(
    ("log", "workflow", "config"),
    [
        ("cartpole/simulate.json", "dqn", "cartpole/dqn.json"),
        pytest.param("cartpole/simulate_candidates.json", "parametric_dqn", "cartpole/parametric_dqn.json",
                     marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_cartpole_from_thirty_thousand_random_transitions(log: str, workflow: str, config: str) -> None:
    """190 of 200 from random actions, which earn 22."""
    simulate(check(SimulateConfig, tree(log)))
    done = trained(tree(config), workflow)
    assert done.scores["simulation/return/mean"] >= 190
    assert done.scores["simulation/random_return/mean"] == pytest.approx(22.2, abs=4)


@pytest.mark.parametrize(
    ("workflow", "config", "seed"),
    [("dqn", "cartpole/online.json", 0)]
    + [pytest.param("dqn", "cartpole/online.json", seed, marks=pytest.mark.slow) for seed in (1, 2)]
    + [
        pytest.param("parametric_dqn", "cartpole/online_parametric.json", seed, marks=pytest.mark.slow)
        for seed in (0, 1, 2)
    ],
)
def test_cartpole_is_solved_online(workflow: str, config: str, seed: int) -> None:
    """Gymnasium's threshold for CartPole-v1: 475 over 100 episodes, here on episodes that stopped nothing."""
    assert trained(tree(config) | {"seed": seed}, workflow).scores["simulation/return/mean"] >= 475


def test_an_environment_of_ones_own() -> None:
    """Always forward takes 9 / 0.8 steps on average: 0.99 - 0.01 * 10.25 = 0.8875, deviation 0.0168 an episode."""
    config = tree("own_environment/online.json")
    config["simulation"]["env"] = str(ROOT / config["simulation"]["env"])
    assert trained(config).scores["simulation/return/mean"] == pytest.approx(0.8875, abs=4 * 0.0168 / 200**0.5)


@pytest.mark.slow
def test_a_planning_recommender_beats_a_greedy_one() -> None:
    """The environment's point: who maximises the next click satiates the user."""
    config = merged(tree("recommend/online.json"), {"simulation": {"evaluation_episodes": 5000}})
    planner, greedy = (trained(merged(config, rl), "parametric_dqn").scores for rl in ({}, {"rl": {"gamma": 0.0}}))
    assert planner["simulation/return/lower"] > greedy["simulation/return/upper"]


@pytest.mark.slow
def test_taggers_learn_to_catch(tmp_path: Path) -> None:
    """Random taggers need 53 to 58 steps and catch four runners of five; half of the config's run is enough."""
    config = tree("tag/gridworld.json")
    config["simulation"] |= {"policies": {"runner": "random"}, "total_steps": 80_000}
    trained(config | {"model_output_path": str(tmp_path / "out"), "use_gpu": False})
    evaluation = json.loads((tmp_path / "out/tagger/evaluation.json").read_text())
    assert evaluation["agents"]["terminated_share"] >= 0.97
    assert evaluation["simulated"]["mean_length"] < evaluation["simulation"]["random"]["mean_length"] / 2
    assert evaluation["simulated"]["return"]["low"] > evaluation["simulation"]["random"]["return"]["high"]
