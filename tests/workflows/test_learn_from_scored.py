"""Episodes that a policy is scored on and learns from; rewards are pure noise, so that no policy is better."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.bundles import linear_bundle
from helpers.commands import evaluated
from helpers.logs import write_lines
from helpers.runs import ALONE, trained

from reagent_lite.config import DqnConfig, check
from reagent_lite.errors import DataError
from reagent_lite.evaluation.exported_model import ExportedModel
from reagent_lite.run.logged import prepare

ROWS = 1500


@pytest.fixture
def noise(tmp_path: Path) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    rows = [
        {"mdp_id": str(number), "sequence_number": 0, "state_features": dict(zip("0123456789", state, strict=True)),
         "action": "ab"[rng.integers(2)], "reward": rng.normal(), "action_probability": 0.5, "terminal": True,
         "possible_actions": ["a", "b"]}
        for number, state in enumerate(rng.normal(size=(ROWS, 10)).tolist())
    ]  # fmt: skip
    return {
        "training_data_path": str(write_lines(tmp_path / "log.jsonl", rows)),
        "model_output_path": str(tmp_path / "out"),
        "actions": ["a", "b"], "epochs": 10, "rl": {"gamma": 0.0},
        "training": {"layers": [-1, 64, 64, -1], "activations": ["relu", "relu", "linear"], "minibatch_size": 64},
        "evaluation": {"calc_cpe_in_training": False, "models": {"final_fit_passes": 4}, "bootstrap_resamples": 200},
    }  # fmt: skip


def decision(tree: dict[str, Any], learn: bool) -> dict[str, str]:
    trained({**tree, "evaluation": {**tree["evaluation"], "learn_from_scored": learn}})
    return json.loads(Path(tree["model_output_path"], "model", "evaluation.json").read_text())["decision"]


def test_noise_is_no_reason_to_ship(noise: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    out = noise["model_output_path"]
    flattered = decision(noise, True)
    assert (flattered["choice"], "which flatters it" in flattered["reason"]) == ("not enough to say", True)
    assert "learn_from_scored" in flattered["next"]
    assert caplog.text.count("Estimates may flatter it") == 1
    assert_evaluations_agree(Path(noise["training_data_path"]), Path(out) / "model")
    caplog.clear()
    honest = decision({**noise, "model_output_path": f"{out}2"}, False)
    assert (honest["choice"], "flatter" in honest["reason"] + caplog.text) == ("not enough to say", False)
    warm = {**noise["training"], "warm_start_model_path": out}
    decision({**noise, "training": warm, "epochs": 1, "model_output_path": f"{out}3"}, False)
    assert caplog.text.count("may flatter it if that run learned from scored episodes") == 1


def assert_evaluations_agree(log: Path, model: Path) -> None:
    """The log is known under another name and in another order, and flatters the model as the other one, too."""
    copy = log.with_name("copy.jsonl")
    copy.write_text("".join(sorted(log.read_text().splitlines(keepends=True), reverse=True)))
    other = linear_bundle(log.with_name("other"), np.eye(2), ("a", "b"), (0, 1))
    keys = {"gamma": 0.0, "evaluation": {"bootstrap_resamples": 200, "models": {"final_fit_passes": 1}}}
    for first, against, whose in ((model, other, "policy"), (other, model, "other policy")):
        outcome, _ = evaluated(first, str(copy), log.with_name("report.json"), against=str(against), **keys)
        assert outcome.decision["choice"] == "not enough to say"
        assert f"but the {whose} has learned from scored episodes" in outcome.decision["reason"]
    exported = ExportedModel.load("model", str(model))
    alone = replace(exported, config={**exported.config, "simulation": {"share": 1.0}})
    assert not alone.learned_from(exported.bundle.manifest["data_hash"])


@pytest.mark.parametrize(
    ("rename", "named"), [("{:03}", True), ("eval-{}", True), ("", False)], ids=["leading zeros", "prefix", "no ids"]
)
def test_eval_episodes_are_found_in_the_training_data_by_their_rows(
    noise: dict[str, Any], rename: str, named: bool, tmp_path: Path
) -> None:
    """Of 40 eval episodes 30 are in the training data under other ids, in another order."""
    rows = [json.loads(line) for line in Path(noise["training_data_path"]).read_text().splitlines()]
    known = [{**row, "mdp_id": rename.format(int(row["mdp_id"]))} for row in rows[29::-1]]
    new = [{**row, "mdp_id": f"new{row['mdp_id']}", "reward": row["reward"] + 1} for row in rows[30:40]]
    held_out = known + new
    if not named:
        held_out = [{name: value for name, value in row.items() if name != "mdp_id"} for row in held_out]
    tree = noise | {"eval_data_path": str(write_lines(tmp_path / "eval.jsonl", held_out))}
    data = prepare(check(DqnConfig, tree), ALONE)
    assert any("30 of 40 eval episodes are in the training data" in note for note in data.scored.notes)
    assert data.seen
    write_lines(tmp_path / "eval.jsonl", new)
    data = prepare(check(DqnConfig, tree), ALONE)
    assert (data.scored.notes, data.seen) == ((), False)


def test_equal_episodes_of_a_log_with_few_states_are_chance(noise: dict[str, Any], tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    rows = [
        {"mdp_id": str(n), "sequence_number": 0, "state_features": {"0": int(rng.integers(20))}, "action": "a",
         "reward": int(rng.integers(2)), "action_probability": 0.5, "terminal": True, "possible_actions": ["a", "b"]}
        for n in range(300)
    ]  # fmt: skip
    paths = {
        "training_data_path": str(write_lines(tmp_path / "few.jsonl", rows[:200])),
        "eval_data_path": str(write_lines(tmp_path / "eval.jsonl", rows[200:])),
    }
    assert not prepare(check(DqnConfig, noise | paths), ALONE).scored.repeats


@pytest.mark.parametrize("given", [False, True], ids=["a share", "the same file as eval data"])
def test_no_row_of_a_scored_episode_is_learned_from_unless_eval_data_are_given(
    noise: dict[str, Any], given: bool
) -> None:
    tree = noise | ({"eval_data_path": noise["training_data_path"]} if given else {})
    default, seen, apart = (
        prepare(check(DqnConfig, {**tree, "evaluation": evaluation}), ALONE)
        for evaluation in ({}, {"learn_from_scored": True}, {"learn_from_scored": False})
    )
    assert [(data.seen, data.learned.count == ROWS) for data in (default, seen, apart)] == [
        (given, given), (True, True), (False, False),
    ]  # fmt: skip
    assert seen.scored.hashes.tolist() == apart.scored.hashes.tolist()
    # the log is evaluated only
    assert not prepare(check(DqnConfig, {**tree, "simulation": {"env": "cartpole_v0", "share": 1.0}}), ALONE).seen
    learned = apart.learned.usable.numpy()
    assert apart.counts == (len(learned),)
    assert sorted([*learned, *apart.scored.numbers]) == list(range(ROWS))


def test_nothing_is_left_to_learn_from(noise: dict[str, Any]) -> None:
    tree = {**noise, "evaluation": {"learn_from_scored": False, "held_out_share": 0.9999}}
    todo = "Give more episodes.*eval_data_path.*evaluation.learn_from_scored to true"
    with pytest.raises(DataError, match=f"episodes that are not scored.*{todo}"):
        prepare(check(DqnConfig, tree), ALONE)


@pytest.mark.parametrize("given", [False, True], ids=["a share", "the same file as eval data"])
def test_a_log_with_too_few_episodes_to_score_one(
    noise: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture, given: bool
) -> None:
    """All rows are learned from, as no hash of an episode falls into a share so small."""
    tree = noise | ({"eval_data_path": noise["training_data_path"]} if given else {})
    honest = {"learn_from_scored": False, "held_out_share": 1e-9, "models": {"final_fit_passes": 1}}
    assert trained({**tree, "epochs": 1, "evaluation": {**noise["evaluation"], **honest}}).rows == ROWS
    (warning,) = (line for line in caplog.messages if "no episode is scored" in line)
    assert "evaluation.held_out_share (now 1e-09)" in warning
    decided = json.loads((tmp_path / "out/model/evaluation.json").read_text())["decision"]
    assert (decided["choice"], "no episodes could be scored" in decided["reason"]) == ("not enough to say", True)
