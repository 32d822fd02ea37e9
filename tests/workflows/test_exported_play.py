"""The returns that training reports are those of the policy as exported: the bundle plays the same episodes again."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracles.simulated import made

from reagent_lite.config import DqnConfig, ParametricDqnConfig, WorkflowConfig, check
from reagent_lite.config.evaluate import EvaluateConfig
from reagent_lite.distributed.group import Group, Place
from reagent_lite.evaluation.returns import estimate, play
from reagent_lite.export import load_bundle
from reagent_lite.rl.policies import policy_of
from reagent_lite.run.environments import FINAL, open_simulation
from reagent_lite.run.train import train
from workflows.evaluate import evaluate
from workflows.simulate import BundlePolicy

ALONE = Group(Place(), torch.device("cpu"))
EPISODES = 12


def small(folder: Path, env: str, **keys: Any) -> dict[str, Any]:
    return {
        "model_output_path": str(folder / "out"),
        "use_gpu": False,
        "rl": {"gamma": 0.9, "epsilon": 0.1},
        "training": {"layers": [-1, 16, -1], "activations": ["relu", "linear"], "minibatch_size": 64},
        "evaluation": {"bootstrap_resamples": 200},
        "simulation": {"env": env, "num_envs": 16, "total_steps": 3000, "warmup_steps": 1000, "num_evaluations": 1,
                       "evaluation_episodes": EPISODES},
        **keys,
    }  # fmt: skip


def normalization(folder: Path, size: int, **spec: Any) -> str:
    file = folder / f"norm_{size}.json"
    one = json.dumps({"feature_type": "CONTINUOUS", "mean": 0.1, "stddev": 0.5, **spec})
    file.write_text(json.dumps({str(i): one for i in range(size)}))
    return str(file)


def replayed(config: WorkflowConfig, model: str, *, parametric: bool) -> dict[str, float]:
    """Figures of the exported model on the final episodes of a run."""
    simulation = open_simulation(config, ALONE)
    env = simulation.envs(0, EPISODES, stream=FINAL)
    bundle = load_bundle(model)
    policy = policy_of(bundle.policy)
    values = BundlePolicy(bundle, env.spec)
    result = play(env, values, gamma=0.9, epsilon=policy.epsilon, temperature=policy.temperature)
    settings = {"level": 0.95, "resamples": 200, "seed": config.seed}
    total, discounted = estimate(result.total, **settings), estimate(result.discounted, **settings)
    return {
        "simulation/return/mean": total.value,
        "simulation/return/lower": total.low,
        "simulation/discounted_return/mean": discounted.value,
        "simulation/discounted_return/upper": discounted.high,
        "simulation/length/mean": float(result.length.double().mean()),
    }


def test_named_actions(tmp_path: Path) -> None:
    """Normalized features: q of bundle and network differ in the last digits alone."""
    tree = small(tmp_path, "cartpole_v0", state_norm_data_path=normalization(tmp_path, 4))
    config = check(DqnConfig, tree)
    trained = train(config, ALONE)
    assert trained.model is not None
    found = replayed(config, trained.model, parametric=False)
    assert {name: trained.scores[name] for name in found} == pytest.approx(found, abs=1e-9)
    kept = json.loads((Path(trained.model) / "evaluation.json").read_text())
    assert {name: kept["scores"][name] for name in found} == pytest.approx(found, abs=1e-9)
    assert kept["simulated"]["return"]["value"] == kept["scores"]["simulation/return/mean"]
    difference = kept["simulated"]["return"]["value"] - kept["simulation"]["random"]["return"]["value"]
    assert kept["simulation"]["difference_to_random"]["return"]["value"] == pytest.approx(difference)


def test_one_policy_is_evaluated_played_and_exported(tmp_path: Path) -> None:
    """Epsilon-greedy at 0.3: with two actions the other one has 0.15 in the figures, the graph, `act` and the page."""
    made(tmp_path, rows=600)
    tree = small(tmp_path, "cartpole_v0", training_data_path=str(tmp_path / "log.jsonl"), actions=["left", "right"])
    tree |= {"rl": {"gamma": 0.9, "softmax_policy": 0, "epsilon": 0.3}, "epochs": 1}
    tree["simulation"] = {"env": "cartpole_v0", "share": 0, "evaluation_episodes": EPISODES}
    tree["evaluation"] |= {"final_fit_passes": 1}
    config = check(DqnConfig, tree)
    trained = train(config, ALONE)
    found = replayed(config, str(trained.model), parametric=False)
    assert {name: trained.scores[name] for name in found} == pytest.approx(found, abs=1e-9)
    bundle = load_bundle(str(trained.model))
    assert bundle.policy == {"kind": "epsilon_greedy", "epsilon": 0.3}
    prediction = bundle.predict(np.zeros((4, 4)))
    assert sorted(prediction.propensities[0]) == pytest.approx([0.15, 0.85])
    _, propensity = bundle.act(np.zeros((4, 4)), rng=np.random.default_rng(0))
    assert set(np.round(propensity, 6)) <= {0.15, 0.85}
    figures = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    (shares,) = [one for one in figures if "actions/model/left" in one]
    assert shares["propensities/model/left/mean"] == pytest.approx(0.15 + 0.7 * shares["actions/model/left"])
    outcome = evaluate(check(EvaluateConfig, {
        "model": str(trained.model), "data_path": str(tmp_path / "log.jsonl"), "gamma": 0.9,
        "output_path": str(tmp_path / "e.json"), "evaluation": {"final_fit_passes": 1, "bootstrap_resamples": 100},
    }))  # fmt: skip
    judged = json.loads(Path(outcome.report).read_text())["model"]
    assert judged["policy"] == "epsilon-greedy at epsilon 0.3"
    assert min(one["policy"] for one in judged["actions"].values()) >= 0.15
    for file in (tmp_path / "out" / "report.html", Path(str(trained.model)) / "MODEL_CARD.md", Path(outcome.page)):
        assert "psilon-greedy at epsilon 0.3" in file.read_text()


def test_masked_actions(tmp_path: Path) -> None:
    tree = small(tmp_path, "gridworld")
    tree["simulation"]["time_limit"] = 60
    config = check(DqnConfig, tree)
    trained = train(config, ALONE)
    assert trained.model is not None
    found = replayed(config, trained.model, parametric=False)
    assert {name: trained.scores[name] for name in found} == pytest.approx(found, abs=1e-9)


def test_candidates(tmp_path: Path) -> None:
    config = check(ParametricDqnConfig, small(tmp_path, "recommend"))
    trained = train(config, ALONE)
    assert trained.model is not None
    found = replayed(config, trained.model, parametric=True)
    assert {name: trained.scores[name] for name in found} == pytest.approx(found, abs=1e-9)


def test_a_restricted_policy_learned_from_a_log(tmp_path: Path) -> None:
    """BCQ on rows of random actions, judged in simulation as well."""
    made(tmp_path, rows=600)
    tree = small(tmp_path, "cartpole_v0", training_data_path=str(tmp_path / "log.jsonl"), actions=["left", "right"])
    tree["simulation"] = {"env": "cartpole_v0", "share": 0, "evaluation_episodes": EPISODES}
    tree["evaluation"] |= {"calc_cpe_in_training": False, "final_fit_passes": 1}
    tree |= {"epochs": 1, "rainbow": {"bcq": True, "bcq_drop_threshold": 0.9}}
    config = check(DqnConfig, tree)
    trained = train(config, ALONE)
    assert trained.model is not None
    found = replayed(config, trained.model, parametric=False)
    assert {name: trained.scores[name] for name in found} == pytest.approx(found, abs=1e-9)
