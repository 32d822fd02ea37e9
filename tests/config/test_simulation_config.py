"""The `simulation` section: what it needs, what it excludes, beside data and alone."""

from typing import Any

import pytest

from reagent_lite.config import DqnConfig, ParametricDqnConfig, check, resolved
from reagent_lite.errors import ConfigError

ALONE: dict[str, Any] = {"model_output_path": "out", "simulation": {"env": "cartpole_v1"}}
BESIDE: dict[str, Any] = {
    "model_output_path": "out", "training_data_path": "log.jsonl", "actions": ["left", "right"],
    "simulation": {"env": "cartpole_v1", "share": 0.25},
}  # fmt: skip


def problems(tree: dict[str, Any], model: type[Any] = DqnConfig) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        check(model, tree)
    return {problem.where: str(problem) for problem in caught.value.problems}


def changed(tree: dict[str, Any], section: dict[str, Any] | None = None, **keys: Any) -> dict[str, Any]:
    return {**tree, **keys, "simulation": {**tree["simulation"], **(section or {})}}


def test_a_simulation_alone_needs_neither_data_nor_actions() -> None:
    assert check(DqnConfig, ALONE).simulated_share == 1.0
    assert check(ParametricDqnConfig, ALONE).simulated_share == 1.0


def test_without_either_a_path_is_asked_for() -> None:
    found = problems({"model_output_path": "out", "actions": ["a", "b"]})
    assert "Or give a simulation section" in found["training_data_path"]


def test_beside_data_the_share_counts() -> None:
    assert check(DqnConfig, BESIDE).simulated_share == 0.25
    assert check(DqnConfig, changed(BESIDE, {"share": 0})).simulated_share == 0.0


@pytest.mark.parametrize(
    ("tree", "where", "says"),
    [
        (changed(ALONE, {"env": ""}), "simulation.env", "got nothing"),
        (changed(ALONE, {"epsilon_start": 0.1, "epsilon_end": 0.2}), "simulation.epsilon_end", "at most epsilon_start"),
        (changed(ALONE, {"num_envs": 100, "replay": {"capacity": 299}}), "simulation.replay.capacity", "at least 300"),
        (changed(ALONE, {"replay": {"prioritised": True}}), "simulation.replay.prioritised", "'prioritized'"),
        (changed(ALONE, {"enviroment": "x"}), "simulation.enviroment", "unknown key"),
        (changed(ALONE, {"share": 0.5}), "simulation.share", "absent or 1"),
        # 10 000 warm-up steps are 157 of each of 64 environments, and one more to learn from
        (changed(ALONE, {"total_steps": 10_111}), "simulation.total_steps", "at least 10112"),
        (changed(ALONE, {"time_limit": 2**24 + 1}), "simulation.time_limit", "at most 16777216 steps"),
        (changed(ALONE, {"epsilon_start": 0.05}), "simulation.epsilon_start", "at least rl.epsilon (0.1)"),
        (changed(ALONE, {"exploration": "softmax", "epsilon_end": 0.0}), "simulation.epsilon_end", "softmax"),
        (changed(ALONE, {"replay": {"beta": 0.5}}), "simulation.replay.beta", "prioritized is false"),
        (changed(ALONE, data={"residency": "host"}), "data.residency", "no"),
        (changed(ALONE, norm_params={"num_samples": 5000}), "norm_params.num_samples", "logged rows"),
        (changed(ALONE, evaluation={"calc_cpe_in_training": False}), "evaluation.calc_cpe_in_training", "logged rows"),
        (changed(ALONE, evaluation={"max_episodes": 50}), "evaluation.max_episodes", "logged rows"),
        (changed(BESIDE, {"share": 0, "num_envs": 128}), "simulation.num_envs", "share is 0"),
        (changed(BESIDE, {"share": 0, "replay": {"prioritized": True}}), "simulation.replay", "share is 0"),
        (changed(ALONE, epochs=3), "epochs", "simulation.total_steps"),
        (changed(ALONE, eval_data_path="x"), "eval_data_path", "absent without training_data_path"),
        (changed(ALONE, {"backend": "cuda"}, use_gpu=False), "simulation.backend", "use_gpu is false"),
        (changed(BESIDE, {"share": None}), "simulation.share", "beside training_data_path"),
        (changed(BESIDE, {"total_steps": 50_000}), "simulation.total_steps", "absent beside training_data_path"),
        (changed(BESIDE, {"num_evaluations": 5}), "simulation.num_evaluations", "absent beside training_data_path"),
        (changed(ALONE, rl={"value_bounds": "rewards"}), "rl.value_bounds", "before it is played"),
        (changed(BESIDE, rl={"value_bounds": "rewards"}), "rl.value_bounds", "before it is played"),
        (changed(BESIDE, actions=[]), "actions", "at least two"),
        (changed(BESIDE, rl={"use_seq_num_diff_as_time_diff": True}), "rl.use_seq_num_diff_as_time_diff", "one step"),
        (changed(BESIDE, rl={"reward_boost": {"up": 1.0}}), "rl.reward_boost.up", "one of"),
    ],
)  # fmt: skip
def test_contradictions_are_named(tree: dict[str, Any], where: str, says: str) -> None:
    assert says in problems(tree)[where]


@pytest.mark.parametrize("tree", [ALONE, BESIDE, changed(BESIDE, {"share": 0.0})], ids=["alone", "beside", "judge"])
def test_a_resolved_config_reads_back_as_itself(tree: dict[str, Any]) -> None:
    config = check(DqnConfig, tree)
    assert check(DqnConfig, resolved(config)) == config


def test_time_differences_are_fine_where_the_simulation_only_judges() -> None:
    tree = changed(BESIDE, {"share": 0.0}, rl={"use_seq_num_diff_as_time_diff": True})
    assert check(DqnConfig, tree).simulated_share == 0.0
