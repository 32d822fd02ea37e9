"""Training in simulation: alone, beside data, on several processes, for both workflows, and what goes wrong."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.resuming import Laboratory
from helpers.runs import ALONE, Runner, Tree, absent, checked, merged, metrics, trained
from helpers.simulated import made
from oracles import gridworld

from reagent_lite.config import DqnConfig, check
from reagent_lite.data.sampling.source import LoggedSource
from reagent_lite.distributed.group import Group, ProcessRanks
from reagent_lite.errors import ReagentLiteError, SimulationError
from reagent_lite.export import load_bundle
from reagent_lite.run.environments import open_simulation
from reagent_lite.run.learner import build_learner, rollout_capture, update_capture
from reagent_lite.run.resolved import resolve
from reagent_lite.sim.experience import RolloutSource
from reagent_lite.training.capture import Captured, eager

LOGGED: Tree = {
    "training_data_path": "log.jsonl",
    "actions": ["left", "right"],
    "training": {"cuda_graph": True},
    "simulation": {"share": 0},
}


def online(tmp_path: Path, env: str, **simulation: Any) -> Tree:
    return {
        "model_output_path": str(tmp_path / "out"),
        "use_gpu": False,
        "rl": {"gamma": 0.9, "target_update_rate": 0.1, "epsilon": 0.1, "temperature": 0.1},
        "rainbow": {"dueling_architecture": False},
        "training": {"layers": [-1, 32, -1], "activations": ["relu", "linear"], "minibatch_size": 128,
                     "learning_rate": 0.005, "l2_decay": 0.0},
        "simulation": {"env": env, "num_envs": 16, "total_steps": 8000, "warmup_steps": 2000, "num_evaluations": 2,
                       "evaluation_episodes": 20, **simulation},
    }  # fmt: skip


def tags(folder: Path) -> set[str]:
    return {name for line in metrics(folder) for name in line}


def test_gridworld_online_learns_the_exact_values(tmp_path: Path) -> None:
    tree = online(tmp_path, "gridworld", total_steps=30_000, warmup_steps=10_000, epsilon_end=0.5,
                  env_parameters={"random_start": 1}, evaluation_episodes=20)  # fmt: skip
    trained(merged(tree, {
        "training": {"layers": [-1, -1], "activations": ["linear"], "learning_rate": 0.02, "lr_policy": "exponential",
                     "lr_decay": 0.2},
        "simulation": {"num_evaluations": 4, "updates_per_rollout": 2},
    }))  # fmt: skip
    bundle = load_bundle(tmp_path / "out" / "model")
    assert bundle.action_names == ("L", "R", "U", "D")
    allowed = gridworld.allowed()
    q = bundle.predict(np.eye(25, dtype=np.float32)).q
    np.testing.assert_allclose(q[allowed], gridworld.optimal_q()[allowed], rtol=0.03)


def test_outputs_of_a_simulated_run(tmp_path: Path) -> None:
    outcome = trained(online(tmp_path, "cartpole_v0", time_limit=50, pictures=True))
    out = tmp_path / "out"
    # (8000 - 2000) / 16 rollouts, one update each on 128 rows
    assert (outcome.steps, outcome.rows) == (375, 375 * 128)
    assert outcome.scores["simulation/return/lower"] <= outcome.scores["simulation/return/mean"] <= 50
    assert not absent(
        tags(out), "simulation/training_return/mean", "simulation/env_steps", "train/td_loss", "simulation/return/mean"
    )
    assert json.loads((out / "model" / "evaluation.json").read_text())["simulation"]["episodes"] == 20
    assert (out / "rollout.gif").read_bytes()[:6] == b"GIF89a"


@pytest.mark.parametrize(
    "change",
    [
        {"rl": {"multi_steps": 3}},
        {"rl": {"maxq_learning": False}},
        {"rainbow": {"quantile": True, "num_atoms": 8}},
        {"rainbow": {"categorical": True, "num_atoms": 8, "qmin": 0, "qmax": 10}},
        {"rl": {"multi_steps": 3, "reward_boost": {"left": 0.5}}},
        {"simulation": {"replay": {"prioritized": True, "capacity": 2000}}},
        {"simulation": {"exploration": "softmax"}},
        {"algorithm": "crr", "simulation": {"replay": {"prioritized": True, "capacity": 2000}}},
        {"algorithm": "iql", "rl": {"multi_steps": 2, "temperature": None}, "simulation": {"exploration": "softmax"}},
        {"training": {"minibatches_per_step": 2}},
        {"simulation": {"steps_per_rollout": 3, "updates_per_rollout": 2, "math": "fast"}},
    ],
    ids=str,
)
def test_every_option_trains(tmp_path: Path, change: Tree) -> None:
    tree = online(tmp_path, "cartpole_v0", total_steps=1000, warmup_steps=300)
    end = Laboratory(merged(tree, change), ALONE, tmp_path).run("out")
    assert end.scores["simulation/return/mean"] >= 8  # falling at once takes so long
    assert sum(line.get("simulation/episodes", 0) for line in end.lines) > 0


@pytest.mark.parametrize("algorithm", ["crr", "iql"])
def test_candidates_of_a_simulation(tmp_path: Path, algorithm: str) -> None:
    """Lists that change at every step."""
    tree = online(tmp_path, "recommend", total_steps=1000, warmup_steps=300, time_limit=20) | {"algorithm": algorithm}
    assert np.isfinite(trained(tree, "parametric_dqn").scores["simulation/return/mean"])


def test_the_run_stops_when_it_is_good_enough(tmp_path: Path) -> None:
    tree = online(tmp_path, "cartpole_v0", total_steps=10_000, num_evaluations=10, stop_at_return=5)
    assert Laboratory(tree, ALONE, tmp_path).run("out").steps == 50  # a tenth of (10 000 - 2000) / 16


def test_processes_share_environments_and_episodes(run: Runner, tmp_path: Path) -> None:
    tree = online(tmp_path, "cartpole_v0", total_steps=1000, warmup_steps=300)
    tree |= {"training": {}, "data": {"global_minibatch_size": 64}}
    alone = trained(tree)
    two = run("dqn", tree, "--set", "num_processes_per_node=2").ok
    assert two.outcome["rows"] == alone.rows
    last = metrics(tmp_path / "out")[-2]
    assert last["simulation/env_steps"] == 1000 - (1000 - 304) % 16  # all ranks' together, as is every rate
    rates = [last[f"rate/{name}_per_second"] for name in ("updates", "rows", "env_steps")]
    assert (rates[1] / rates[0], rates[2] / rates[0]) == pytest.approx((64, 16))
    # the same episodes of random actions, whoever plays them
    for tag in ("simulation/random_return/mean", "simulation/random_return/upper"):
        assert two.outcome["scores"][tag] == alone.scores[tag]


def beside_data(tmp_path: Path, share: float) -> Tree:
    """With a log of the random policy on the gridworld, in the environment's own features and names."""
    log, _ = made(tmp_path, env="gridworld", rows=1000)
    tree = online(tmp_path, "gridworld", share=share)
    for key in ("total_steps", "num_evaluations") + (("num_envs", "warmup_steps") if not share else ()):
        del tree["simulation"][key]
    return tree | {
        "training_data_path": log.log,
        "actions": list(gridworld.ACTIONS),
        "epochs": 2,
        "norm_params": {"feature_overrides": {str(i): "DO_NOT_PREPROCESS" for i in range(25)}},
        "evaluation": {"calc_cpe_in_training": False, "bootstrap_resamples": 100},
    }


def test_data_and_simulation_together(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert {"simulation/return/mean", "td_loss/mean"} <= set(trained(beside_data(tmp_path, 0.25)).scores)
    assert "simulation/env_steps" in tags(tmp_path / "out")
    assert "32 of them simulated" in caplog.text
    evaluation = json.loads((tmp_path / "out" / "model" / "evaluation.json").read_text())
    assert set(evaluation) == {
        "scores",
        "cpe",
        "simulated",
        "simulation",
        "policy",
        "decision",
        "warnings",
        "explanation",
    }


@pytest.mark.parametrize(("share", "kind", "episodes"), [(0.0, LoggedSource, None), (1.0, RolloutSource, 0)])
def test_a_simulation_that_is_all_or_nothing_beside_data(
    tmp_path: Path, share: float, kind: type, episodes: int | None
) -> None:
    source = resolve(check(DqnConfig, beside_data(tmp_path, share)), ALONE).open_source()
    stream = source.stream(build_learner(source.config, source.spec, ALONE.device))
    assert isinstance(stream.source, kind)
    # as many rows a step as the log alone would give, or full minibatches of simulated ones
    assert (stream.plan.rows_of_step(0), stream.figures().get("simulation/episodes")) == (128, episodes)


@pytest.mark.parametrize(
    ("change", "actions", "says"),
    [
        ({"env": "cartpole"}, (), "cartpole_v1"),
        ({"env": "recommend"}, (), "workflows.parametric_dqn"),
        ({"env_parameters": {"gravitation": 9.0}}, (), "gravity"),
        ({"num_envs": 1 << 30, "replay": {"capacity": 1 << 40}, "total_steps": 1 << 40}, (), "GiB"),
        ({"replay": {"capacity": 1 << 40}}, (), "simulation.replay.capacity"),
        ({"backend": "cuda"}, (), "use_gpu is false"),
        ({}, ("a", "b", "c"), "2 names"),
        ({}, ("right", "left"), "the order of cartpole_v1"),
    ],
)
def test_bad_simulations_end_with_a_sentence(tmp_path: Path, change: Tree, actions: tuple[str, ...], says: str) -> None:
    with pytest.raises(ReagentLiteError, match=says) as error:
        trained(merged(online(tmp_path, "cartpole_v1"), {"simulation": change, "actions": actions or None}))
    assert error.value.exit_code == 2
    assert not (tmp_path / "out" / "model").exists()


def test_rewards_that_a_cross_entropy_cannot_take_are_refused(tmp_path: Path) -> None:
    tree = online(tmp_path, "pendulum", total_steps=3000, warmup_steps=1000)
    tree["rl"] |= {"gamma": 0, "q_network_loss": "bce_with_logits"}
    with pytest.raises(SimulationError, match=r"rewards of pendulum: .* from 0 to 1"):
        trained(tree)
    tree["simulation"]["env"] = "recommend"  # a click is 0 or 1
    # (3000 - 63 * 16) / 16: all that is left after the warm-up
    assert trained(tree, "parametric_dqn").steps == 124


@pytest.mark.parametrize(
    ("device", "math", "precision"), [("cuda", "fast", "high"), ("cuda", "exact", "highest"), ("cpu", "fast", "medium")]
)
def test_fast_mathematics_let_torch_use_tf32_on_a_gpu(
    tmp_path: Path,
    device: str,
    math: str,
    precision: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    set_to = ["medium"]
    monkeypatch.setattr(torch, "set_float32_matmul_precision", set_to.append)
    config = checked(online(tmp_path, "cartpole_v1", math=math, backend="cpu"), "dqn")
    open_simulation(config, Group(ProcessRanks(), torch.device(device)))
    assert (set_to[-1], "use TF32" in caplog.text) == (precision, precision == "high")


@pytest.mark.parametrize(
    ("changes", "world", "updates", "rollouts"),
    [
        ({}, 1, True, True),
        ({}, 4, False, True),  # an update has collectives, a rollout none
        ({**LOGGED, "training": {}, "simulation": {"share": 0.5}}, 1, False, True),
        ({"training": {"optimizer": "SGD"}}, 1, False, True),
        ({"simulation": {"cuda_graph": False}}, 1, False, False),
        ({"training": {"use_batch_norm": True}}, 1, True, True),
        (LOGGED, 1, True, True),
        (merged(LOGGED, {"training": {"minibatches_per_step": 2}}), 1, False, True),
        (merged(LOGGED, {"training": {"cuda_graph": False}}), 1, False, False),
    ],
    ids=["alone", "4 processes", "beside data", "no capturable optimizer", "not wanted", "batch norm", "logged",
         "logged in parts", "logged, not wanted"],
)  # fmt: skip
def test_what_is_replayed_as_a_graph(changes: Tree, world: int, updates: bool, rollouts: bool) -> None:
    gpu = torch.device("cuda", 0)
    tree = merged({"model_output_path": "out", "simulation": {"env": "cartpole_v1"}}, changes)
    config, group = check(DqnConfig, tree), Group(ProcessRanks(0, world, 0, world), gpu)
    assert (update_capture(config, group) is not eager, rollout_capture(config, gpu) is Captured) == (updates, rollouts)
    assert rollout_capture(config, torch.device("cpu")) is eager
