"""The returns that training reports are those of the policy as exported: the bundle plays the same episodes again."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracles.runs import ALONE
from oracles.simulated import made

from reagent_lite.config import DqnConfig, ParametricDqnConfig, WorkflowConfig, check
from reagent_lite.config.evaluate import EvaluateConfig
from reagent_lite.evaluation.returns import play
from reagent_lite.export import load_bundle
from reagent_lite.export.choices import Choices
from reagent_lite.rl.policies import policy_of
from reagent_lite.run.environments import FINAL, open_simulation
from reagent_lite.run.publish import Outcome
from reagent_lite.run.train import train
from reagent_lite.sim.rollout import Actor
from reagent_lite.tasks.evaluate import evaluate

EPISODES = 12


def small(folder: Path, env: str, **keys: Any) -> dict[str, Any]:
    return {
        "model_output_path": str(folder / "out"),
        "use_gpu": False,
        "rl": {"gamma": 0.9, "epsilon": 0.1},
        "training": {"layers": [-1, 16, -1], "activations": ["relu", "linear"], "minibatch_size": 64},
        "simulation": {"env": env, "num_envs": 16, "total_steps": 1500, "warmup_steps": 500, "num_evaluations": 1,
                       "evaluation_episodes": EPISODES},
        **keys,
    }  # fmt: skip


def normalization(folder: Path, size: int) -> str:
    file = folder / f"norm_{size}.json"
    parameters = json.dumps({"feature_type": "CONTINUOUS", "mean": 0.1, "stddev": 0.5})
    file.write_text(json.dumps({str(i): parameters for i in range(size)}))
    return str(file)


def replayed(config: WorkflowConfig, model: str) -> dict[str, float]:
    """Figures of the exported model on the final episodes of a run."""
    simulation = open_simulation(config, ALONE)
    env = simulation.envs(0, EPISODES, stream=FINAL)
    bundle = load_bundle(model)
    policy = policy_of(bundle.policy)
    player = Actor(policy=Choices.in_simulation(bundle, env.spec).values, epsilon=torch.tensor([policy.epsilon]),
                    temperature=policy.temperature)  # fmt: skip
    (table,) = play(env, [player], gamma=0.9)
    total, discounted, length = table[:3].mean(1).tolist()
    return {
        "simulation/return/mean": total,
        "simulation/discounted_return/mean": discounted,
        "simulation/length/mean": length,
    }


def check_played(config: WorkflowConfig) -> Outcome:
    """Trains, and compares the figures of the run with those of the exported model."""
    trained = train(config, ALONE)
    assert trained.model is not None
    figures = replayed(config, trained.model)
    assert {name: trained.scores[name] for name in figures} == pytest.approx(figures, abs=1e-9)
    return trained


def test_named_actions(tmp_path: Path) -> None:
    """Normalized features: q of bundle and network differ in the last digits alone."""
    tree = small(tmp_path, "cartpole_v0", state_norm_data_path=normalization(tmp_path, 4))
    trained = check_played(check(DqnConfig, tree))
    kept = json.loads((Path(str(trained.model)) / "evaluation.json").read_text())
    simulated = {name: value for name, value in trained.scores.items() if name.startswith("simulation/")}
    assert {name: kept["scores"][name] for name in simulated} == pytest.approx(simulated, abs=1e-9)
    assert kept["simulated"]["return"]["value"] == kept["scores"]["simulation/return/mean"]
    difference = kept["simulated"]["return"]["value"] - kept["simulation"]["random"]["return"]["value"]
    assert kept["simulation"]["difference_to_random"]["return"]["value"] == pytest.approx(difference)


@pytest.mark.parametrize(("kind", "env"), [(DqnConfig, "gridworld"), (ParametricDqnConfig, "recommend")])
def test_masked_actions_and_candidates(tmp_path: Path, kind: type[WorkflowConfig], env: str) -> None:
    tree = small(tmp_path, env)
    tree["simulation"]["time_limit"] = 60
    bundle = load_bundle(str(check_played(check(kind, tree)).model))
    assert bundle.parametric == (kind is ParametricDqnConfig)
    assert len(bundle.action_feature_ids) == (9 if bundle.parametric else 0)


def from_a_log(folder: Path, **keys: Any) -> dict[str, Any]:
    """A config that learns from rows of random actions, and plays for its evaluation alone."""
    made(folder, rows=600)
    tree = small(folder, "cartpole_v0", training_data_path=str(folder / "log.jsonl"), actions=["left", "right"])
    simulation = {"env": "cartpole_v0", "share": 0, "evaluation_episodes": EPISODES}
    return tree | {"epochs": 1, "simulation": simulation, **keys}


def test_a_restricted_policy_learned_from_a_log(tmp_path: Path) -> None:
    evaluation = {"bootstrap_resamples": 200, "calc_cpe_in_training": False, "final_fit_passes": 1}
    bcq = {"bcq": True, "bcq_drop_threshold": 0.9}
    check_played(check(DqnConfig, from_a_log(tmp_path, evaluation=evaluation, rainbow=bcq)))


def test_one_policy_is_evaluated_played_and_exported(tmp_path: Path) -> None:
    """Epsilon-greedy at 0.3: with two actions the other one has 0.15 in the figures, the graph, `act` and the page."""
    rl = {"gamma": 0.9, "softmax_policy": 0, "epsilon": 0.3}
    evaluation = {"bootstrap_resamples": 200, "final_fit_passes": 1}
    trained = check_played(check(DqnConfig, from_a_log(tmp_path, rl=rl, evaluation=evaluation)))
    bundle = load_bundle(str(trained.model))
    assert bundle.policy == {"kind": "epsilon_greedy", "epsilon": 0.3}
    prediction = bundle.predict(np.zeros((4, 4)))
    assert sorted(prediction.propensities[0]) == pytest.approx([0.15, 0.85])
    _, propensity = bundle.act(np.zeros((4, 4)), rng=np.random.default_rng(0))
    assert set(np.round(propensity, 6)) <= {0.15, 0.85}
    figures = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    (shares,) = [line for line in figures if "actions/model/left" in line]
    assert shares["propensities/model/left/mean"] == pytest.approx(0.15 + 0.7 * shares["actions/model/left"])
    outcome = evaluate(check(EvaluateConfig, {
        "model": str(trained.model), "data_path": str(tmp_path / "log.jsonl"), "gamma": 0.9,
        "output_path": str(tmp_path / "e.json"), "evaluation": {"final_fit_passes": 1, "bootstrap_resamples": 100},
    }))  # fmt: skip
    evaluated = json.loads(Path(outcome.report).read_text())["model"]
    assert evaluated["policy"] == "epsilon-greedy at epsilon 0.3"
    assert min(shares["policy"] for shares in evaluated["actions"].values()) >= 0.15
    for file in (tmp_path / "out" / "report.html", Path(str(trained.model)) / "MODEL_CARD.md", Path(outcome.page)):
        assert "psilon-greedy at epsilon 0.3" in file.read_text()
