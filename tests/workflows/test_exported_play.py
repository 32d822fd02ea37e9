"""The returns that training reports are those of the policy as exported: the bundle plays the same episodes again."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.runs import ALONE, checked, merged, metrics, trained
from helpers.simulated import made

from reagent_lite.config import check
from reagent_lite.config.evaluate_config import EvaluateConfig
from reagent_lite.evaluation.returns import play
from reagent_lite.export import Bundle, load_bundle
from reagent_lite.export.choices import Choices
from reagent_lite.rl.policies import policy_of
from reagent_lite.run.environments import FINAL, open_simulation
from reagent_lite.run.output_folder import TrainResult
from reagent_lite.sim.experience import Actor
from reagent_lite.tasks.evaluate import evaluate

EPISODES = 12


def tree(folder: Path, env: str, **keys: Any) -> dict[str, Any]:
    return merged({
        "model_output_path": str(folder / "out"), "use_gpu": False, "rl": {"gamma": 0.9, "epsilon": 0.1},
        "training": {"layers": [-1, 16, -1], "activations": ["relu", "linear"], "minibatch_size": 64},
        "simulation": {"env": env, "num_envs": 16, "total_steps": 1500, "warmup_steps": 500, "num_evaluations": 1,
                       "evaluation_episodes": EPISODES},
    }, keys)  # fmt: skip


def played(given: dict[str, Any], workflow: str = "dqn") -> tuple[TrainResult, Bundle]:
    """Trains, and compares the figures of the run with those of the exported model on its final episodes."""
    outcome, config = trained(given, workflow), checked(given, workflow)
    env, bundle = open_simulation(config, ALONE).envs(0, EPISODES, stream=FINAL), load_bundle(outcome.model)
    policy = policy_of(bundle.policy)
    player = Actor(policy=Choices.in_simulation(bundle, env.spec).values, epsilon=torch.tensor([policy.epsilon]),
                    temperature=policy.temperature)  # fmt: skip
    (table,) = play(env, [player], gamma=0.9)
    figures = zip(("return", "discounted_return", "length"), table[:3].mean(1).tolist(), strict=True)
    expected = {f"simulation/{name}/mean": value for name, value in figures}
    assert {name: outcome.scores[name] for name in expected} == pytest.approx(expected, abs=1e-9)
    return outcome, bundle


def test_named_actions(tmp_path: Path) -> None:
    """Normalized features: q of bundle and network differ in the last digits alone."""
    parameters = json.dumps({"feature_type": "CONTINUOUS", "mean": 0.1, "stddev": 0.5})
    (tmp_path / "norm.json").write_text(json.dumps(dict.fromkeys("0123", parameters)))
    outcome, _ = played(tree(tmp_path, "cartpole_v0", state_norm_data_path=str(tmp_path / "norm.json")))
    kept = json.loads((tmp_path / "out/model/evaluation.json").read_text())
    earned, random = (each["return"]["value"] for each in (kept["simulated"], kept["simulation"]["random"]))
    assert earned == kept["scores"]["simulation/return/mean"] == outcome.scores["simulation/return/mean"]
    assert kept["simulation"]["difference_to_random"]["return"]["value"] == pytest.approx(earned - random)


@pytest.mark.parametrize(("workflow", "env"), [("dqn", "gridworld"), ("parametric_dqn", "recommend")])
def test_masked_actions_and_candidates(tmp_path: Path, workflow: str, env: str) -> None:
    played(tree(tmp_path, env, simulation={"time_limit": 60}), workflow)


def from_a_log(folder: Path, **keys: Any) -> dict[str, Any]:
    """A config that learns from rows of random actions, and plays for its evaluation alone."""
    made(folder, rows=600)
    log = {"training_data_path": str(folder / "log.jsonl"), "actions": ["left", "right"], "epochs": 1}
    simulation = {"env": "cartpole_v0", "share": 0, "evaluation_episodes": EPISODES}
    evaluation = {"bootstrap_resamples": 200, "models": {"final_fit_passes": 1}}
    return tree(folder, "cartpole_v0", **keys) | log | {"simulation": simulation, "evaluation": evaluation}


def test_a_restricted_policy_learned_from_a_log(tmp_path: Path) -> None:
    played(from_a_log(tmp_path, rainbow={"bcq": True, "bcq_drop_threshold": 0.9}))


def test_one_policy_is_evaluated_played_and_exported(tmp_path: Path) -> None:
    """Epsilon-greedy at 0.3: with two actions the other one has 0.15 in the figures, the graph, `act` and the page."""
    outcome, bundle = played(from_a_log(tmp_path, rl={"gamma": 0.9, "softmax_policy": 0, "epsilon": 0.3}))
    assert bundle.policy == {"kind": "epsilon_greedy", "epsilon": 0.3}
    assert sorted(bundle.predict(np.zeros((4, 4))).propensities[0]) == pytest.approx([0.15, 0.85])
    (shares,) = [line for line in metrics(tmp_path / "out") if "actions/model/left" in line]
    assert shares["propensities/model/left/mean"] == pytest.approx(0.15 + 0.7 * shares["actions/model/left"])
    alone = evaluate(check(EvaluateConfig, {
        "model": str(outcome.model), "data_path": str(tmp_path / "log.jsonl"), "gamma": 0.9,
        "output_path": str(tmp_path / "e.json"),
        "evaluation": {"models": {"final_fit_passes": 1}, "bootstrap_resamples": 100},
    }))  # fmt: skip
    for file in (tmp_path / "out/report.html", tmp_path / "out/model/MODEL_CARD.md", alone.page, alone.report):
        assert "psilon-greedy at epsilon 0.3" in Path(file).read_text()
