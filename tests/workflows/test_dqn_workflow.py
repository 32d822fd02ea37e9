"""The main job, end to end: from logged rows to a checked model."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracles import gridworld
from oracles.disks import small_disk
from oracles.logs import candidate_rows, enum_normalization, gridworld_rows, random_rows, write_lines
from oracles.runs import ALONE, Runner, checked, merged, quick, trained
from safetensors.torch import load_file

from reagent_lite.config import DqnConfig, check
from reagent_lite.errors import BundleError, CheckpointError, ConfigError, DataError
from reagent_lite.export import load_bundle
from reagent_lite.run.learner import build_learner, build_optimization
from reagent_lite.run.logged import prepare
from reagent_lite.run.train import Callback, train
from reagent_lite.types import SourceSpec

REAL = Path(__file__).resolve().parents[2].parent / "shared/data/reagent2019"


def weights(folder: str | None) -> dict[str, torch.Tensor]:
    assert folder is not None
    return load_file(Path(folder) / "weights.safetensors")


@pytest.mark.skipif(not REAL.is_dir(), reason="the 2019 file is not beside this checkout; generated logs test the same")
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_2019_config_runs_unchanged(run: Runner, tmp_path: Path, processes: int) -> None:
    tree = json.loads((REAL / "dqn.json").read_text())
    for key in ("training_data_path", "eval_data_path", "state_norm_data_path"):
        tree[key] = str(REAL / Path(tree[key]).name)
    done = run("dqn", tree, "--set", f"num_processes_per_node={processes}", "--set", "epochs=3")
    assert done.code == 0, done.err
    steps_per_epoch = -(-3470 // (512 * processes))
    assert (done.outcome["steps"], done.outcome["rows"]) == (3 * steps_per_epoch, 3 * 3470)
    assert load_bundle(tmp_path / done.outcome["model"]).check_golden() < 1e-5
    assert "3,470 rows, 29 episodes, 29 terminal rows" in done.err


def test_an_outcome_says_what_the_run_left(run: Runner, small: dict[str, Any], tmp_path: Path) -> None:
    done = run("dqn", small)
    assert done.code == 0, done.err
    assert set(done.outcome) == {
        "model", "decision", "steps", "rows", "rows_per_second", "seconds", "scores",
    }  # fmt: skip
    assert done.outcome["decision"].keys() == {"choice", "reason", "next"}
    assert (done.outcome["steps"], done.outcome["rows"]) == (2 * 7, 400)  # 200 rows are 6 batches of 32 and one of 8
    assert len(done.out.splitlines()) == 1
    out = tmp_path / "out"
    assert sorted(path.name for path in out.iterdir() if not path.name.startswith(".folder-")) == [
        ".lock", "checkpoints", "config.json", "metrics.jsonl", "model", "report.html", "state_features_norm.json",
        "tensorboard",
    ]  # fmt: skip
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [7, 14, 14]
    tags = {"td_loss/mean", "actions/logged/a", "actions/model/b", "reward/logged/mean", "propensities/logged/mean",
            "propensities/model/a/mean", "value/model/b/mean"}  # fmt: skip
    assert tags <= lines[0].keys()
    assert lines[0]["propensities/logged/mean"] == 0.5
    rewards = [row["reward"] for row in random_rows(200)]
    assert lines[0]["reward/logged/mean"] == pytest.approx(np.mean(rewards), abs=1e-6)
    assert {"reward_loss/mean", "reward/model/a/mean", "CPE/Reward/Direct_Method_Reward", "CPE/Reward/MAGIC"} <= lines[
        2
    ].keys()
    # the same again: the training copy and the model folder are used and replaced
    assert trained(small).scores == done.outcome["scores"]


def test_values_of_clicks_are_probabilities(tmp_path: Path) -> None:
    """Of four a three are clicked, of four b one; the policy is the softmax of these shares, not of their logits."""
    rows = [
        {"mdp_id": str(i), "sequence_number": 0, "state_features": {"0": 1.0 + i % 3}, "action": "ab"[i // 4 % 2],
         "reward": float(i % 4 > 0 if i // 4 % 2 == 0 else i % 4 == 0), "action_probability": 0.5,
         "possible_actions": ["a", "b"], "terminal": True}
        for i in range(600)
    ]  # fmt: skip
    tree = quick(
        write_lines(tmp_path / "clicks.jsonl", rows),
        tmp_path / "out",
        epochs=40,
        rl={"gamma": 0.0, "q_network_loss": "bce_with_logits", "temperature": 0.5},
        training={"learning_rate": 0.02, "l2_decay": 0.0},
        evaluation={"calc_cpe_in_training": False, "final_fit_passes": 1},
    )
    outcome = trained(tree)
    assert outcome.scores["value/model/mean"] == pytest.approx(0.75, abs=0.05)
    assert outcome.model is not None
    predicted = load_bundle(str(outcome.model)).predict_rows([{"0": 1.0}, {"0": 2.0}, {"0": 3.0}])
    np.testing.assert_allclose(predicted.q, [[0.75, 0.25]] * 3, atol=0.1)
    softmax = np.exp(predicted.q / 0.5) / np.exp(predicted.q / 0.5).sum(1, keepdims=True)
    np.testing.assert_allclose(predicted.propensities, softmax, atol=1e-5)
    document = json.loads((tmp_path / "out/model/evaluation.json").read_text())
    assert document["values"]["high"] == 1
    assert document["scores"]["td_loss/mean"] == pytest.approx(0.5623, abs=0.01)  # entropy of 3/4
    assert not any("learned nothing" in warning for warning in document["warnings"])


class Stopping(Callback):
    """Ends a run after its first epoch."""

    def on_epoch(self, figures: Mapping[str, float]) -> None:
        raise RuntimeError("stopped")


@pytest.mark.parametrize("first", [None, 32], ids=["by the rows", "given"])
def test_a_run_keeps_the_minibatch_that_followed_its_rows(
    small: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture, first: int | None
) -> None:
    """200 rows are read 64 at a time, in 4 steps an epoch; a run that began with another number goes on with that."""
    chosen = 64 if first is None else first
    small = merged(small, {"training": {"minibatch_size": None}, "checkpoint": {"every_steps": 1}})
    with pytest.raises(RuntimeError, match="stopped"):
        train(checked(merged(small, {"training": {"minibatch_size": first}})), ALONE, Stopping())
    assert f"global minibatch {chosen} rows = 1 process x {chosen}" in caplog.text
    with pytest.raises(ConfigError, match=rf"training.minibatch_size: expected {chosen} "):
        trained(merged(small, {"training": {"minibatch_size": 100}}))
    caplog.clear()
    assert trained(small).steps == 2 * -(-200 // chosen)
    assert f"resuming from checkpoints/step_00000{-(-200 // chosen) - 1}" in caplog.text
    for file in ("config.json", "model/config.json"):
        assert json.loads((tmp_path / "out" / file).read_text())["training"]["minibatch_size"] == chosen


def test_a_run_of_all_processes_minibatch_goes_on_where_a_default_was_saved(small: dict[str, Any]) -> None:
    """Checkpoints of before have training.minibatch_size 4096 beside data.global_minibatch_size."""
    small = merged(small, {"training": {"minibatch_size": None}, "data": {"global_minibatch_size": 100}})
    small = merged(small, {"checkpoint": {"every_steps": 1}})
    with pytest.raises(RuntimeError, match="stopped"):
        train(checked(small).with_minibatch(4096), ALONE, Stopping())
    assert trained(small).steps == 4


@pytest.mark.parametrize("algorithm", ["dqn", "crr", pytest.param("iql", marks=pytest.mark.slow)])
def test_two_processes_equal_one(run: Runner, small: dict[str, Any], algorithm: str) -> None:
    small |= {"epochs": 5, "rl": {"target_update_rate": 0.1}, "algorithm": algorithm}
    single = trained(small)
    alone = weights(single.model)
    two = run("dqn", small, "--set", "training.minibatch_size=16", "--set", "num_processes_per_node=2")
    assert two.code == 0, two.err
    assert single.steps == two.outcome["steps"] == 35
    torch.testing.assert_close(weights(two.outcome["model"]), alone, rtol=0, atol=1e-6)


COMBINATIONS: list[tuple[str, dict[str, Any]]] = [
    ("dqn", {"rainbow": {"dueling_architecture": False}}),
    ("dqn", {"rainbow": {"quantile": True, "num_atoms": 11}}),
    ("dqn", {"rl": {"maxq_learning": False, "q_network_loss": "huber"},
             "training": {"dropout_ratio": 0.1, "use_batch_norm": True}}),
    ("dqn", {"rl": {"use_seq_num_diff_as_time_diff": True},
             "training": {"optimizer": "SGD", "lr_policy": "exponential"}}),
    ("parametric_dqn", {"rainbow": {"categorical": True, "qmin": -5, "qmax": 5}}),
    ("parametric_dqn", {"rainbow": {"bcq": True}, "rl": {"cql_alpha": 0.5}}),
    ("parametric_dqn", {"rl": {"multi_steps": 3, "gamma": 0.9},
                        "training": {"minibatches_per_step": 3, "clip_grad_norm": 1.0}}),
    ("parametric_dqn", {"algorithm": "crr", "rl": {"multi_steps": 2, "q_network_loss": "huber"},
                        "training": {"use_batch_norm": True}}),
    ("parametric_dqn", {"algorithm": "iql", "iql": {"expectile": 0.9}, "rl": {"value_bounds": "rewards"},
                        "training": {"dropout_ratio": 0.1}}),
]  # fmt: skip
"""Other pairs of workflow and option are in test_resume.py, test_captured_updates.py and export/test_formats.py."""


@pytest.mark.parametrize(("workflow", "combination"), COMBINATIONS)
def test_combinations(small: dict[str, Any], tmp_path: Path, workflow: str, combination: dict[str, Any]) -> None:
    if workflow == "parametric_dqn":
        del small["actions"]
        small["training_data_path"] = str(write_lines(tmp_path / "candidates.jsonl", candidate_rows(200)))
    outcome = trained(merged(small, combination), workflow)
    bundle = load_bundle(outcome.model)
    assert bundle.check_golden() < 1e-5
    assert bundle.parametric == (workflow == "parametric_dqn")
    assert np.isfinite(outcome.scores["td_loss/mean"])


def test_keys_that_the_original_accepted_and_ignored_do_something(small: dict[str, Any]) -> None:
    tolerance = {"predictor_atol_check": 0.25, "predictor_rtol_check": 0.5,
                 "ratio_different_predictions_tolerance": 0.125}  # fmt: skip
    small["epochs"] = 1
    for as_zero in (True, False):
        rl = {**tolerance, "set_missing_value_to_zero": as_zero}
        training = {"weight_init_min_std": 5.0, "optimizer": "SGD", "learning_rate": 1e-12}
        folder = trained(merged(small, {"rl": rl, "training": training, "rainbow": {"categorical": True}})).model
        bundle = load_bundle(folder)
        absent, zero = (bundle.predict_rows([row]).q for row in ({}, {"0": 0.0, "1": 0.0, "2": 0.0}))
        assert np.array_equal(absent, zero) == as_zero
    golden = json.loads((Path(folder or "") / "golden.json").read_text())
    assert golden["tolerance"] == {"atol": 0.25, "rtol": 0.5, "ratio_different": 0.125}
    assert min(float(weight.std()) for name, weight in weights(folder).items() if name.endswith("weight")) > 3


@pytest.mark.parametrize(("categorical", "decay"), [(True, 0.125), (False, 0.25)])
def test_weight_decay_is_of_the_head(categorical: bool, decay: float) -> None:
    rainbow = {"categorical": categorical, "c51_l2_decay": 0.125}
    tree = {"model_output_path": "out", "training_data_path": "log", "actions": ["a", "b"]}
    config = check(DqnConfig, tree | {"rainbow": rainbow, "training": {"l2_decay": 0.25}})
    spec = SourceSpec(num_state_features=3, action_names=("a", "b"))
    learner = build_learner(config, spec, torch.device("cpu"))
    optimizer = build_optimization(config, learner, captured=False).optimizer
    assert [group["weight_decay"] for group in optimizer.param_groups] == [decay]


@pytest.mark.parametrize(
    ("workflow", "sarsa"),
    [
        pytest.param("dqn", False, id="dqn-maxq", marks=pytest.mark.slow),
        pytest.param("dqn", True, id="dqn-sarsa"),
        pytest.param("parametric_dqn", False, id="parametric_dqn-maxq"),
        pytest.param("parametric_dqn", True, id="parametric_dqn-sarsa", marks=pytest.mark.slow),
    ],
)
def test_gridworld_values_within_one_percent(tmp_path: Path, workflow: str, sarsa: bool) -> None:
    parametric = workflow == "parametric_dqn"
    log = write_lines(tmp_path / "grid.jsonl", gridworld_rows(sarsa=sarsa, parametric=parametric))
    tree: dict[str, Any] = {
        "training_data_path": str(log),
        "state_norm_data_path": str(enum_normalization(tmp_path / "state.json", "0", range(25))),
        "model_output_path": str(tmp_path / "out"),
        "use_gpu": False,
        "epochs": 30 if sarsa else 300,
        "rl": {"gamma": 0.9, "target_update_rate": 0.1, "maxq_learning": not sarsa},
        "rainbow": {"dueling_architecture": False},
        "training": {"layers": [-1, -1], "activations": ["linear"], "minibatch_size": 1024, "l2_decay": 0.0,
                     "learning_rate": 0.05, "lr_policy": "exponential", "lr_decay": 0.8 if sarsa else 0.98},
        "evaluation": {"calc_cpe_in_training": False, "bootstrap_resamples": 100, "final_fit_passes": 1,
                       "learn_from_scored": True},
    }  # fmt: skip
    if parametric:
        tree["action_norm_data_path"] = str(enum_normalization(tmp_path / "action.json", "0", range(100)))
    else:
        tree["actions"] = list(gridworld.ACTIONS)
    outcome = trained(tree, workflow)
    truth = gridworld.policy_q(gridworld.random_policy()) if sarsa else gridworld.optimal_q()
    allowed = gridworld.allowed()
    bundle = load_bundle(outcome.model)
    states = [s for s in range(25) if allowed[s].any()]
    maps = [{"0": float(s)} for s in states]
    if parametric:
        lists = [[{"0": float(4 * s + a)} for a in np.flatnonzero(allowed[s])] for s in states]
        prediction = bundle.predict_rows(maps, lists)
        learned = np.concatenate([prediction.q[i, : len(each)] for i, each in enumerate(lists)])
    else:
        learned = bundle.predict_rows(maps).q[allowed[states]]
    exact = truth[allowed]
    assert np.abs(learned / exact - 1).max() < 0.01


def test_a_file_smaller_than_a_batch_trains_and_one_row_does_too(small: dict[str, Any], tmp_path: Path) -> None:
    rows = random_rows(30, missing=0.0)
    small["training_data_path"] = str(write_lines(tmp_path / "few.jsonl", rows))
    assert trained(merged(small, {"training": {"minibatch_size": 4096}})).steps == 2
    norm = tmp_path / "out" / "state_features_norm.json"
    small["state_norm_data_path"] = str(norm.rename(tmp_path / "norm.json"))
    small["training_data_path"] = str(write_lines(tmp_path / "one.jsonl", rows[:1]))
    assert trained(small).rows == 2  # a row for several processes: test_shards.py


@pytest.mark.parametrize(
    ("rate", "gamma", "single", "warned"),
    [(0.01, 0.9, False, True), (0.2, 0.9, False, False), (0.01, 0.0, False, False), (0.01, 0.9, True, False)],
)
def test_a_target_network_that_hardly_moves_is_a_warning(
    small: dict[str, Any], caplog: pytest.LogCaptureFixture, rate: float, gamma: float, single: bool, warned: bool
) -> None:
    """Unless every row is terminal, so that no target is made of it."""
    ends = {"terminal": True, "next_state_features": {}, "next_action": ""} if single else {}
    write_lines(Path(small["training_data_path"]), [row | ends for row in random_rows(200)])
    steps = trained(merged(small, {"rl": {"target_update_rate": rate, "gamma": gamma}})).steps
    assert steps == 14  # 200 rows in batches of 32, twice: 1 - 0.99^14 = 13.1 %, 1 - 0.8^14 = 96 %
    assert ("move the target network 13.1%" in caplog.text) == ("move the target network" in caplog.text) == warned


def test_warm_start(small: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = trained(small | {"rainbow": {"bcq": True}})
    before = weights(first.model)
    assert {name.split(".")[0] for name in before} == {"network", "behavior_cloning"}
    still = {"rainbow": {"bcq": True}, "training": {"learning_rate": 1e-12, "l2_decay": 0.0}}
    small = merged(small, still) | {"model_output_path": str(tmp_path / "second")}
    # from the exported model the optimizer starts anew
    for path, anew, said in (
        (str(tmp_path / "out"), False, "learner and optimizer of"),
        (first.model, False, "; the optimizer starts anew"),
        (str(tmp_path / "out"), True, "; the optimizer starts anew"),
    ):
        caplog.clear()
        changes = {"warm_start_model_path": path, "do_not_warm_start_optimizer": anew}
        outcome = trained(merged(small, {"training": changes}))
        assert said in caplog.text
        torch.testing.assert_close(weights(outcome.model), before, rtol=0, atol=1e-6)


def test_warm_start_of_an_actor(small: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The exported model has the actor alone; a model of another algorithm has outputs of another meaning."""
    first = trained(small | {"algorithm": "crr"})
    before = weights(first.model)
    bundle = load_bundle(first.model)
    assert bundle.policy == {"kind": "softmax", "temperature": 1.0}
    predicted = bundle.predict_rows([{"0": 1.0}, {"1": -2.0}])
    exact = np.exp(predicted.q) / np.exp(predicted.q).sum(1, keepdims=True)  # the actor's logits
    np.testing.assert_allclose(predicted.propensities, exact, atol=1e-6)
    assert "| logit of the policy" in (Path(str(first.model)) / "MODEL_CARD.md").read_text()
    still = {"training": {"learning_rate": 1e-12, "l2_decay": 0.0}, "model_output_path": str(tmp_path / "second")}
    for path, said in (
        (str(tmp_path / "out"), "learner and optimizer of"),
        (str(first.model), "; the optimizer and the critic start anew"),
    ):
        caplog.clear()
        warm = {"algorithm": "crr", "training": {"warm_start_model_path": path}}
        outcome = trained(merged(merged(small, still), warm))
        assert said in caplog.text
        torch.testing.assert_close(weights(outcome.model), before, rtol=0, atol=1e-6)
    for path, got in (
        (str(first.model), "algorithm dqn, got crr"),
        (str(tmp_path / "out"), "actor"),
    ):
        with pytest.raises(ConfigError, match=got):
            trained(merged(small, still | {"training": {"warm_start_model_path": path}}))


def test_a_log_that_changes_in_place_is_learned_with_its_own_features(small: dict[str, Any], tmp_path: Path) -> None:
    def states(scale: int, mean: float = 0.0) -> list[float]:
        log = random_rows(40, missing=0.0)
        features = {"state_features", "next_state_features"}
        log = [
            {key: {i: scale for i in value} if key in features else value for key, value in row.items()} for row in log
        ]
        write_lines(Path(small["training_data_path"]), log)
        parameters = {"feature_type": "CONTINUOUS", "mean": mean, "stddev": 1}
        norm = tmp_path / "norm.json"
        norm.write_text(json.dumps({str(i): parameters for i in range(3)}))
        config = check(DqnConfig, {**small, "state_norm_data_path": str(norm)})
        rows = prepare(config, ALONE).train.rows
        return rows.take(torch.arange(40), torch.ones(40)).state.unique().tolist()

    assert states(1) == [1]
    assert states(2) == [2]
    (kept,) = tmp_path.rglob("normalized_state_*.npy")
    assert (kept.parent / "manifest.json").is_file()
    assert states(2, mean=0.5) == [1.5]
    assert len(list(tmp_path.rglob("normalized_state_*.npy"))) == 1


def test_a_model_folder_of_something_else_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    (tmp_path / "out" / "model").mkdir(parents=True)
    (tmp_path / "out" / "model" / "notes.txt").write_text("mine")
    tree = {"training_data_path": str(tmp_path / "nowhere.jsonl"), "model_output_path": str(tmp_path / "out"),
            "use_gpu": False, "actions": ["a", "b"]}  # fmt: skip
    with pytest.raises(BundleError, match=r"out/model: .*an older model"):
        trained(tree)


@pytest.mark.parametrize("size", ["4k", "12k", "20k", "1060k"])
def test_a_full_disk_under_the_output_folder_is_said(small: dict[str, Any], tmp_path: Path, size: str) -> None:
    with small_disk(tmp_path / "disk", size=size, files=200) as disk:
        with pytest.raises((ConfigError, CheckpointError)) as caught:
            trained({**small, "model_output_path": str(disk / "out")})
        (problem,) = caught.value.problems
        assert problem.expected in (f"room in {disk}/out", "free space on a working disk")
        assert not (disk / "out/model").exists()


def entropy_of(propensities: np.ndarray) -> float:
    """Returns the mean entropy of rows of probabilities, in nats."""
    return float(-(propensities * np.log(np.where(propensities > 0, propensities, 1))).sum(1).mean())


@pytest.mark.parametrize("estimated", [False, True])
def test_a_temperature_that_keeps_the_entropy_of_the_log(tmp_path: Path, estimated: bool) -> None:
    """Rows of propensity 0.8 and 0.6: mean entropy is estimated by the mean of -log of them."""
    rows = random_rows(200)
    for number, row in enumerate(rows):
        row["action_probability"] = None if estimated else (0.8, 0.6)[number % 2]
    log = write_lines(tmp_path / "log.jsonl", rows)
    tree = quick(log, tmp_path / "out", rl={"temperature": "auto"}, epochs=2,
                 evaluation={"propensities": "estimate" if estimated else "logged"})  # fmt: skip
    outcome = trained(tree)
    assert isinstance(outcome.model, str)
    bundle = load_bundle(outcome.model)
    figures = json.loads((Path(outcome.model) / "evaluation.json").read_text())["policy"]
    config = json.loads((Path(outcome.model) / "config.json").read_text())
    temperature = bundle.policy["temperature"]
    assert temperature == figures["temperature"] == config["rl"]["temperature"]
    assert f"softmax of q at temperature {temperature:g}" in (tmp_path / "out" / "report.html").read_text()
    propensities = bundle.predict_rows([row["state_features"] for row in rows]).propensities
    assert entropy_of(propensities) == pytest.approx(figures["entropy"], abs=1e-5)
    assert figures["entropy"] == pytest.approx(figures["logged_entropy"], abs=1e-5)
    if not estimated:
        assert figures["logged_entropy"] == pytest.approx(-(np.log(0.8) + np.log(0.6)) / 2, abs=1e-6)
    (checkpoint,) = (tmp_path / "out" / "checkpoints").glob("step_*")
    saved = {
        name: value for name, value in load_file(checkpoint / "evaluators.safetensors").items() if "temperature" in name
    }
    assert [float(value) for value in saved.values()] == [temperature]


def test_a_temperature_for_a_log_without_propensities_is_refused(tmp_path: Path) -> None:
    rows = [{**row, "action_probability": None} for row in random_rows(50)]
    log = write_lines(tmp_path / "log.jsonl", rows)
    with pytest.raises(DataError, match=r"set evaluation.propensities"):
        trained(quick(log, tmp_path / "out", rl={"temperature": "auto"}))


def test_a_policy_that_is_nearly_greedy_says_so(small: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    outcome = trained(merged(small, {"rl": {"temperature": 1e-6}}))
    figures = json.loads((Path(str(outcome.model)) / "evaluation.json").read_text())["policy"]
    (note,) = figures["notes"]
    assert note in caplog.text
    assert "temperature 1e-06 is nearly greedy" in note
    assert note.endswith("50.0%")  # a log of uniform choices is nothing to keep to
    assert figures["logged_entropy"] == pytest.approx(np.log(2), abs=1e-6)  # as every propensity is a half
