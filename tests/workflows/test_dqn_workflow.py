"""The main job, end to end: from logged rows to a checked model."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from helpers.disks import small_disk
from helpers.logs import enum_normalization, gridworld_rows, random_rows, write_json, write_lines
from helpers.ranks import call_on_ranks
from helpers.runs import ALONE, Runner, checked, merged, metrics, over_candidates, quick, trained
from oracles import gridworld
from safetensors.torch import load_file
from scipy.special import softmax
from scipy.stats import entropy

from reagent_lite import console
from reagent_lite.distributed.group import Group
from reagent_lite.errors import BundleError, ConfigError, DataError, UnavailableError
from reagent_lite.export import load_bundle
from reagent_lite.run.learner import build_learner, build_optimization
from reagent_lite.run.logged import prepare
from reagent_lite.run.output_folder import TrainResult
from reagent_lite.run.runner import Callback, train
from reagent_lite.types import SourceSpec

REAL = Path(__file__).resolve().parents[2].parent / "shared/data/reagent2019"


def read(folder: Any, file: str) -> Any:
    """A JSON file of a folder."""
    return json.loads((Path(folder) / file).read_text())


def weights(folder: str | None) -> dict[str, torch.Tensor]:
    return load_file(Path(folder) / "weights.safetensors")


@pytest.mark.skipif(not REAL.is_dir(), reason="the 2019 file is not beside this checkout; generated logs test the same")
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_2019_config_runs_unchanged(run: Runner, tmp_path: Path, processes: int) -> None:
    tree = json.loads((REAL / "dqn.json").read_text())
    for key in ("training_data_path", "eval_data_path", "state_norm_data_path"):
        tree[key] = str(REAL / Path(tree[key]).name)
    done = run("dqn", tree, "--set", f"num_processes_per_node={processes}", "--set", "epochs=3").ok
    assert (done.outcome["steps"], done.outcome["rows"]) == (3 * -(-3470 // (512 * processes)), 3 * 3470)
    assert load_bundle(tmp_path / done.outcome["model"]).check_golden() < 1e-5
    assert "3,470 rows, 29 episodes, 29 terminal rows" in done.err


def test_an_outcome_says_what_the_run_left(run: Runner, small: dict[str, Any], tmp_path: Path) -> None:
    done = run("dqn", small).ok
    assert done.outcome["decision"].keys() == {"choice", "reason", "next"}
    assert (done.outcome["steps"], done.outcome["rows"]) == (2 * 7, 400)  # 200 rows are 6 batches of 32 and one of 8
    assert {path.name for path in (tmp_path / "out").glob("[!.]*")} == {
        "checkpoints", "config.json", "metrics.jsonl", "model", "report.html", "state_features_norm.json",
        "tensorboard",
    }  # fmt: skip
    lines = metrics(tmp_path / "out")
    assert [line["step"] for line in lines] == [7, 14, 14]
    assert lines[0]["reward/logged/mean"] == pytest.approx(np.mean([row["reward"] for row in random_rows(200)]))
    for line, tags in (
        (0, {"td_loss/mean", "actions/logged/a", "actions/model/b", "propensities/model/a/mean", "value/model/b/mean"}),
        (2, {"reward_loss/mean", "reward/model/a/mean", "CPE/Reward/Direct_Method_Reward", "CPE/Reward/MAGIC"}),
    ):
        assert tags <= lines[line].keys()
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
        write_lines(tmp_path / "clicks.jsonl", rows), tmp_path / "out", epochs=40,
        rl={"gamma": 0.0, "q_network_loss": "bce_with_logits", "temperature": 0.5},
        training={"learning_rate": 0.02, "l2_decay": 0.0},
        evaluation={"calc_cpe_in_training": False, "models": {"final_fit_passes": 1}},
    )  # fmt: skip
    assert trained(tree).scores["value/model/mean"] == pytest.approx(0.75, abs=0.05)
    predicted = load_bundle(tmp_path / "out/model").predict_rows([{"0": 1.0}, {"0": 2.0}, {"0": 3.0}])
    np.testing.assert_allclose(predicted.q, [[0.75, 0.25]] * 3, atol=0.1)
    np.testing.assert_allclose(predicted.propensities, softmax(predicted.q / 0.5, axis=1), atol=1e-5)
    document = read(tmp_path, "out/model/evaluation.json")
    assert document["scores"]["td_loss/mean"] == pytest.approx(0.5623, abs=0.01)  # entropy of 3/4
    assert not any("no better than one value" in warning for warning in document["warnings"])


STOPPING = Mock(spec=Callback, on_epoch=Mock(side_effect=RuntimeError("stopped")))


class Stopping(Callback):
    """Answers after the second epoch, and fails before the export if asked to."""

    def __init__(self, answer: Any = "stop", *, fails: bool = False) -> None:
        self.answer, self.fails = answer, fails

    def on_epoch(self, figures: Mapping[str, float]) -> Any:
        return self.answer if figures["epoch"] == 2 else None

    def on_evaluation(self, document: Mapping[str, Any]) -> None:
        if self.fails:
            raise RuntimeError("stopped")


def test_a_callback_ends_a_run_which_evaluates_and_exports(small: dict[str, Any], tmp_path: Path) -> None:
    """It learns what a run of two epochs learns; started again after a failure, it does not learn on."""
    small = merged(small, {"evaluation": {"calc_cpe_in_training": False}})
    two = trained({**small, "epochs": 2, "model_output_path": str(tmp_path / "two")})
    five = {**small, "epochs": 5}
    stopped = train(checked({**five, "model_output_path": str(tmp_path / "stopped")}), ALONE, Stopping())
    with pytest.raises(RuntimeError, match="stopped"):
        train(checked(five), ALONE, Stopping(fails=True))
    again = trained(five)
    for outcome in (stopped, again):
        assert (outcome.steps, outcome.scores) == (two.steps, two.scores)
        for file in ("weights.safetensors", "model.onnx"):
            assert Path(outcome.model, file).read_bytes() == Path(two.model, file).read_bytes()
    with pytest.raises(ConfigError, match=r'Callback.on_epoch: expected None or "stop" as its result, got True'):
        train(checked({**five, "model_output_path": str(tmp_path / "wrong")}), ALONE, Stopping(answer=True))


def steps_until_the_second_rank_stops(group: Group, config: str) -> int:
    return train(checked(json.loads(config)), group, Stopping() if group.rank == 1 else Callback()).steps


def test_any_process_ends_the_run(small: dict[str, Any], tmp_path: Path) -> None:
    config = json.dumps({**small, "epochs": 5})
    runs = call_on_ranks(steps_until_the_second_rank_stops, [config], [tmp_path], [2])
    assert [run.ok.outcome for run in runs] == [2 * 4, 2 * 4]  # 200 rows, 64 of both processes at a time


@pytest.mark.parametrize("first", [None, 32], ids=["by the rows", "given"])
def test_a_run_keeps_the_minibatch_that_followed_its_rows(
    small: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture, first: int | None
) -> None:
    """200 rows are read 64 at a time, in 4 steps an epoch; a run that began with another number goes on with that."""
    chosen = 64 if first is None else first
    small = merged(small, {"training": {"minibatch_size": None}, "checkpoint": {"every_steps": 1}})
    with pytest.raises(RuntimeError, match="stopped"):
        train(checked(merged(small, {"training": {"minibatch_size": first}})), ALONE, STOPPING)
    assert f"global minibatch {chosen} rows = 1 process x {chosen}" in caplog.text
    with pytest.raises(ConfigError, match=rf"training.minibatch_size: expected {chosen} "):
        trained(merged(small, {"training": {"minibatch_size": 100}}))
    caplog.clear()
    assert trained(small).steps == 2 * -(-200 // chosen)
    assert f"resuming from checkpoints/step_00000{-(-200 // chosen) - 1}" in caplog.text
    assert read(tmp_path, "out/model/config.json")["training"]["minibatch_size"] == chosen


def test_a_run_of_all_processes_minibatch_goes_on_where_a_default_was_saved(small: dict[str, Any]) -> None:
    """Checkpoints of before have training.minibatch_size 4096 beside data.global_minibatch_size."""
    changes = {"training": {"minibatch_size": None}, "data": {"global_minibatch_size": 100}}
    small = merged(small, changes | {"checkpoint": {"every_steps": 1}})
    with pytest.raises(RuntimeError, match="stopped"):
        train(checked(small).with_minibatch(4096), ALONE, STOPPING)
    assert trained(small).steps == 4


@pytest.mark.parametrize("algorithm", ["dqn", "crr", pytest.param("iql", marks=pytest.mark.slow)])
def test_two_processes_equal_one(run: Runner, small: dict[str, Any], algorithm: str) -> None:
    small |= {"epochs": 3, "rl": {"target_update_rate": 0.1}, "algorithm": algorithm}
    single = trained(small)
    before = weights(single.model)  # the other run has the same folder
    two = run("dqn", small, "--set", "training.minibatch_size=16", "--set", "num_processes_per_node=2")
    assert single.steps == two.ok.outcome["steps"] == 21
    torch.testing.assert_close(weights(two.outcome["model"]), before, rtol=0, atol=1e-6)


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
    data = over_candidates(tmp_path) if workflow == "parametric_dqn" else {}
    outcome = trained(merged(small, combination | data), workflow)
    bundle = load_bundle(outcome.model)
    assert bundle.check_golden() < 1e-5
    assert bundle.parametric == (workflow == "parametric_dqn")
    assert np.isfinite(outcome.scores["td_loss/mean"])


def test_keys_that_the_original_accepted_and_ignored_do_something(small: dict[str, Any]) -> None:
    rl = {"predictor_atol_check": 0.25, "predictor_rtol_check": 0.5, "ratio_different_predictions_tolerance": 0.125}
    changes: dict[str, Any] = {
        "epochs": 1, "training": {"weight_init_min_std": 5.0, "optimizer": "SGD", "learning_rate": 1e-12},
        "rainbow": {"categorical": True},
    }  # fmt: skip
    for as_zero in (True, False):
        folder = trained(merged(small, changes | {"rl": rl | {"set_missing_value_to_zero": as_zero}})).model
        absent, zero = load_bundle(folder).predict_rows([{}, {"0": 0.0, "1": 0.0, "2": 0.0}]).q
        assert np.array_equal(absent, zero) == as_zero
    assert read(folder, "golden.json")["tolerance"] == {"atol": 0.25, "rtol": 0.5, "ratio_different": 0.125}
    assert min(float(weight.std()) for name, weight in weights(folder).items() if name.endswith("weight")) > 3


@pytest.mark.parametrize(("categorical", "decay"), [(True, 0.125), (False, 0.25)])
def test_weight_decay_is_of_the_head(small: dict[str, Any], categorical: bool, decay: float) -> None:
    rainbow = {"categorical": categorical, "c51_l2_decay": 0.125}
    config = checked(merged(small, {"rainbow": rainbow, "training": {"l2_decay": 0.25}}))
    learner = build_learner(config, SourceSpec(num_state_features=3, action_names=("a", "b")), ALONE.device)
    optimizer = build_optimization(config, learner, captured=False).optimizer
    assert [group["weight_decay"] for group in optimizer.param_groups] == [decay]


@pytest.mark.parametrize(
    ("workflow", "sarsa", "epochs"),
    [
        pytest.param("dqn", False, 300, id="dqn-maxq", marks=pytest.mark.slow),
        pytest.param("dqn", True, 30, id="dqn-sarsa"),
        pytest.param("parametric_dqn", False, 150, id="parametric_dqn-maxq"),
        pytest.param("parametric_dqn", True, 30, id="parametric_dqn-sarsa", marks=pytest.mark.slow),
    ],
)
def test_gridworld_values_within_one_percent(tmp_path: Path, workflow: str, sarsa: bool, epochs: int) -> None:
    parametric = workflow == "parametric_dqn"
    log = write_lines(tmp_path / "grid.jsonl", gridworld_rows(sarsa=sarsa, parametric=parametric))
    choices = {"action_norm_data_path": str(enum_normalization(tmp_path / "action.json", "0", range(100)))}
    tree: dict[str, Any] = {
        "training_data_path": str(log),
        "state_norm_data_path": str(enum_normalization(tmp_path / "state.json", "0", range(25))),
        "model_output_path": str(tmp_path / "out"),
        "use_gpu": False,
        "epochs": epochs,
        "rl": {"gamma": 0.9, "target_update_rate": 0.1, "maxq_learning": not sarsa},
        "rainbow": {"dueling_architecture": False},
        "training": {"layers": [-1, -1], "activations": ["linear"], "minibatch_size": 1024, "l2_decay": 0.0,
                     "learning_rate": 0.05, "lr_policy": "exponential", "lr_decay": 1 - 6 / epochs},
        "evaluation": {"calc_cpe_in_training": False, "bootstrap_resamples": 100, "models": {"final_fit_passes": 1},
                       "learn_from_scored": True},
        **(choices if parametric else {"actions": list(gridworld.ACTIONS)}),
    }  # fmt: skip
    bundle = load_bundle(trained(tree, workflow).model)
    truth = gridworld.policy_q(gridworld.random_policy()) if sarsa else gridworld.optimal_q()
    allowed = gridworld.allowed()
    states = [s for s in range(25) if allowed[s].any()]
    lists = [[{"0": float(4 * s + a)} for a in np.flatnonzero(allowed[s])] for s in states] if parametric else None
    q = bundle.predict_rows([{"0": float(s)} for s in states], lists).q
    learned = q[np.arange(q.shape[1]) < allowed[states].sum(1, keepdims=True)] if parametric else q[allowed[states]]
    assert np.abs(learned / truth[allowed] - 1).max() < 0.01


def test_a_file_smaller_than_a_batch_trains_and_one_row_does_too(small: dict[str, Any], tmp_path: Path) -> None:
    rows = random_rows(30, missing=0.0)
    small["training_data_path"] = str(write_lines(tmp_path / "few.jsonl", rows))
    assert trained(merged(small, {"training": {"minibatch_size": 4096}})).steps == 2
    small["state_norm_data_path"] = str((tmp_path / "out/state_features_norm.json").rename(tmp_path / "norm.json"))
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
    # 200 rows in batches of 32, twice: 1 - 0.99^14 = 13.1 %, 1 - 0.8^14 = 96 %
    assert trained(merged(small, {"rl": {"target_update_rate": rate, "gamma": gamma}})).steps == 14
    assert ("move the target network 13.1%" in caplog.text) == ("move the target network" in caplog.text) == warned


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize(
    ("change", "parts", "anew", "refused"),
    [
        ({"rainbow": {"bcq": True}}, {"network", "behavior_cloning"}, "; the optimizer starts anew", {}),
        # the exported model has the actor alone; a model of another algorithm has outputs of another meaning
        ({"algorithm": "crr"}, {"network"}, "; the optimizer and the critic start anew",
         {"out/model": "algorithm dqn, got crr", "out": "actor"}),
    ],
    ids=["a critic", "an actor"],
)  # fmt: skip
def test_warm_start(
    small: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture,
    change: dict[str, Any], parts: set[str], anew: str, refused: dict[str, str],
) -> None:  # fmt: skip
    """From the exported model the optimizer starts anew."""
    before = weights(trained(small | change).model)
    assert {name.split(".")[0] for name in before} == parts
    assert ("| logit of the policy" in Path("out/model/MODEL_CARD.md").read_text()) == ("algorithm" in change)

    def started(path: str, anew: bool, change: dict[str, Any]) -> TrainResult:
        training = {"warm_start_model_path": path, "do_not_warm_start_optimizer": anew, "learning_rate": 1e-12,
                    "l2_decay": 0.0}  # fmt: skip
        return trained(merged(small, {"training": training, "model_output_path": "second", **change}))

    for path, from_anew, said in (("out", False, "learner and optimizer of"), ("out/model", False, anew),
                                  ("out", True, "optimizer")):  # fmt: skip
        caplog.clear()
        outcome = started(path, from_anew, change)
        assert said in caplog.text
        assert from_anew <= ("start anew" in caplog.text or "starts anew" in caplog.text)
        torch.testing.assert_close(weights(outcome.model), before, rtol=0, atol=1e-6)
    for path, got in refused.items():
        with pytest.raises(ConfigError, match=got):
            started(path, False, {})
    reordered = change | {"actions": small["actions"][::-1]}
    for path in ("out", "out/model"):
        with pytest.raises(ConfigError, match=rf"actions: expected .*, the order at {path}, got"):
            started(path, False, reordered)
    other = write_json(tmp_path / "norm.json", {i: {"feature_type": "BINARY"} for i in "012"})  # as many columns
    with pytest.raises(ConfigError, match=r"of out/model, .*, got others of state feature 0"):
        started("out/model", False, change | {"state_norm_data_path": str(other)})


def test_a_log_that_changes_in_place_is_learned_with_its_own_features(small: dict[str, Any], tmp_path: Path) -> None:
    def states(scale: int, mean: float) -> list[float]:
        same = dict.fromkeys("012", scale)
        rows = [row | {"state_features": same, "next_state_features": same} for row in random_rows(40)]
        write_lines(Path(small["training_data_path"]), rows)
        parameters = {"feature_type": "CONTINUOUS", "mean": mean, "stddev": 1}
        norm = write_json(tmp_path / "norm.json", dict.fromkeys("012", parameters))
        data = prepare(checked({**small, "state_norm_data_path": str(norm)}), ALONE).train.rows
        return data.take(torch.arange(40), torch.ones(40)).state.unique().tolist()

    assert [states(1, 0.0), states(2, 0.0), states(2, 0.5)] == [[1], [2], [1.5]]


def test_features_that_a_normalization_file_lacks_are_left_out(
    small: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    same = {"0": 5, "1": 3, "kind": "left out"}
    rows = [row | {"state_features": same, "next_state_features": same} for row in random_rows(40)]
    write_lines(Path(small["training_data_path"]), rows)
    parameters = {"feature_type": "CONTINUOUS", "mean": 2, "stddev": 1}
    small["state_norm_data_path"] = str(write_json(tmp_path / "norm.json", {"1": parameters}))
    data = prepare(checked(small), ALONE).train.rows
    assert data.take(torch.arange(40), torch.ones(40)).state.tolist() == [[1]] * 40
    assert "no parameters for 2 of 3 features, left out: 0, kind" in caplog.text


def test_a_model_folder_of_something_else_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    write_json(tmp_path / "out/model/notes.json", "mine")
    with pytest.raises(BundleError, match=r"out/model: .*an older model"):
        trained(quick(tmp_path / "nowhere.jsonl", tmp_path / "out"))


@pytest.mark.parametrize("size", ["4k", "12k", "20k", "1060k"])
def test_a_full_disk_under_the_output_folder_is_said(
    small: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: str
) -> None:
    monkeypatch.setattr(console, "_MOST_FOLDER_SECONDS", 0.1)
    with small_disk(tmp_path / "disk", size=size, files=200) as disk:
        expected = rf"expected (room in {disk}/out|a folder that can be read and written)"
        with pytest.raises((ConfigError, UnavailableError), match=expected):
            trained({**small, "model_output_path": str(disk / "out")})
        assert not (disk / "out/model").exists()


@pytest.mark.parametrize("estimated", [False, True])
def test_a_temperature_that_keeps_the_entropy_of_the_log(tmp_path: Path, estimated: bool) -> None:
    """Rows of propensity 0.8 and 0.6: mean entropy is estimated by the mean of -log of them."""
    rows = [row | {"action_probability": None if estimated else (0.8, 0.6)[number % 2]}
            for number, row in enumerate(random_rows(200))]  # fmt: skip
    tree = quick(write_lines(tmp_path / "log.jsonl", rows), tmp_path / "out", rl={"temperature": "auto"}, epochs=2)
    if estimated:
        with pytest.raises(DataError, match=r"set evaluation.propensities"):
            trained(tree)
        tree = merged(tree, {"evaluation": {"propensities": "estimate"}})
    model = trained(tree).model
    bundle, figures = load_bundle(model), read(model, "evaluation.json")["policy"]
    assert f"softmax of q at temperature {figures['temperature']:g}" in (tmp_path / "out/report.html").read_text()
    propensities = bundle.predict_rows([row["state_features"] for row in rows]).propensities
    reached = pytest.approx(entropy(propensities, axis=1).mean(), abs=1e-5)
    assert [figures["entropy"], figures["logged_entropy"]] == [reached, reached]
    assert estimated or figures["logged_entropy"] == pytest.approx(-(np.log(0.8) + np.log(0.6)) / 2, abs=1e-6)


def test_a_policy_that_is_nearly_greedy_says_so(small: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    figures = read(trained(merged(small, {"rl": {"temperature": 1e-6}})).model, "evaluation.json")["policy"]
    assert figures["notes"][0] in caplog.text
    assert re.search(r"temperature 1e-06 is nearly greedy.* 50\.0%$", figures["notes"][0])  # a log of uniform choices
