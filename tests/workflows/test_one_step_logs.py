"""Logs of single decisions: without mdp_id, sequence_number and terminal, from any format to a policy and its value."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from helpers.commands import normalized
from helpers.events import make
from helpers.logs import write_lines
from helpers.runs import Runner, quick, trained

import reagent_lite
from reagent_lite.config.shard_config import ShardConfig
from reagent_lite.data.copy.prepared_copy import prepare_training_copy
from reagent_lite.data.logs import Log
from reagent_lite.errors import DataError, NoRowsError
from reagent_lite.tasks.shard import shard

ALONE = "each row is an independent decision, as no column says what follows one; a discount (gamma) has no effect"


def rows(count: int = 200, *, parametric: bool = False) -> list[dict[str, Any]]:
    """Action a earns the feature x, action b 1 - x; b is logged in three of ten rows."""
    rng = np.random.default_rng(0)
    choices: list[Any] = [{"is_b": 0.0}, {"is_b": 1.0}] if parametric else ["a", "b"]
    return [
        {"state_features": {"x": x}, "action": choices[is_b], "reward": 1 - x if is_b else x,
         "action_probability": 0.3 if is_b else 0.7, "possible_actions": choices}
        for x, is_b in zip(rng.random(count).round(4).tolist(), (rng.random(count) < 0.3).astype(int), strict=True)
    ]  # fmt: skip


@pytest.mark.parametrize("parametric", [False, True])
def test_each_row_is_an_episode_of_one_decision(parametric: bool, tmp_path: Path) -> None:
    log = rows(40, parametric=parametric)
    file = write_lines(tmp_path / "log.jsonl", log)
    copy = prepare_training_copy(
        Log(str(file), actions=None if parametric else ("a", "b"), directory=str(tmp_path / "c"))
    )
    assert list(zip(copy.state[:, 0], copy.reward, copy.action, strict=True)) == [
        (np.float32(row["state_features"]["x"]), np.float32(row["reward"]), row["action_probability"] == 0.3)
        for row in log
    ]
    assert (copy.bootstrap.sum(), copy.counts["episodes"], copy.counts["terminal_rows"]) == (0, 40, 40)
    assert copy.notes == (ALONE,)


@pytest.mark.usefixtures("caches")
def test_a_policy_its_value_and_scores_from_a_frame(tmp_path: Path) -> None:
    log = rows(600)
    frame = pd.DataFrame(log).assign(x=[row["state_features"]["x"] for row in log]).drop(columns="state_features")
    columns = {"state_features": ["x"]}
    tree = quick(Path(), tmp_path / "out", epochs=30, training={"learning_rate": 0.01, "l2_decay": 0.0})
    model = reagent_lite.train(tree | {"training_data_path": "", "data": {"columns": columns}}, frame).model
    decided = reagent_lite.load_bundle(model).predict_rows([{"x": 0.1}, {"x": 0.9}])
    assert decided.greedy.tolist() == [1, 0]  # b earns 0.9 at 0.1, a earns 0.9 at 0.9

    evaluated = reagent_lite.evaluate(
        "uniform", frame, config={"columns": columns, "actions": ["a", "b"], "output_path": tmp_path / "e.json",
                                  "evaluation": {"models": {"final_fit_passes": 1}}},
    )  # fmt: skip
    by_hand = np.mean([0.5 / row["action_probability"] * row["reward"] for row in log])
    # heads are fitted to half of the rows, the others are scored; the mean of 600 is within its sampling error
    assert evaluated.scores["CPE/Reward/IPS_Reward"] == pytest.approx(by_hand, abs=0.1)


def test_the_reason_names_the_segment_that_the_log_hardly_tries(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    country = rng.choice(["AT", "CH", "DE"], 2000, p=[0.02, 0.49, 0.49])
    segment = country == "AT"
    log = pd.DataFrame({
        "country": country, "x": rng.random(2000), "action": "a", "reward": (rng.random(2000) < 0.2).astype(float),
        "action_probability": np.where(segment, 0.999, 1.0), "wanted": np.where(segment, 0.0, 1.0),
    })  # fmt: skip
    config = {
        "columns": {"state_features": ["country", "x"]},
        "actions": ["a", "b"],
        "output_path": tmp_path / "e.json",
    }
    decision = reagent_lite.evaluate("column:wanted", log, config=config).decision
    share = segment.mean()
    rows = float(f"{5 / 0.001 / share:.2g}")
    assert decision["choice"] == "not enough to say"
    assert (
        f"{100 * share:.3g}% of the policy's decisions, those with country AT, are hardly tried by the log "
        f"({segment.sum() * 0.001:.3g} tries expected in 2,000 rows, 5 would take {rows:,.0f} rows)"
    ) in decision["reason"]


def test_timeline_makes_transitions_that_train_alike(tmp_path: Path, run: Runner) -> None:
    file = write_lines(tmp_path / "log.jsonl", rows())
    made = run("timeline", {"timeline": {"inputTableName": str(file), "outputTableName": str(tmp_path / "t"),
                                         "evalTableName": str(tmp_path / "e"), "eval_percent": 25}})  # fmt: skip
    assert (made.code, ALONE in made.err) == (0, True), made.err
    assert made.outcome["train_rows"] + made.outcome["eval_rows"] == 200
    files = [file for folder in ("t", "e") for file in (tmp_path / folder).glob("*.parquet")]
    written = [row for file in files for row in pq.read_table(file).to_pylist()]
    assert {row["mdp_id"] for row in written} == {f"log.jsonl:{line}" for line in range(1, 201)}
    assert {(row["terminal"], row["time_diff"], row["next_action"]) for row in written} == {(True, 0, None)}
    assert trained(quick(tmp_path / "t", tmp_path / "out")).rows == made.outcome["train_rows"]


def test_normalization_and_shards(tmp_path: Path) -> None:
    file = str(write_lines(tmp_path / "log.jsonl", rows()))
    outcome = normalized(file, tmp_path / "n")
    assert (outcome.rows, outcome.types) == (200, {"state_features": {"PROBABILITY": 1}})
    parts = [
        shard(ShardConfig(data_path=file, num_nodes=2, node_index=node, output_path=str(tmp_path / str(node))))
        for node in range(2)
    ]
    assert (sum(part.rows for part in parts), min(part.rows for part in parts) > 0) == (200, True)
    assert trained(quick(tmp_path / "0", tmp_path / "out")).rows == parts[0].rows


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"mdp_id": str}, DataError, "leave out mdp_id"),
        ({"sequence_number": int}, DataError, "leave out sequence_number"),
        ({"time_diff": lambda i: 1}, DataError, "leave out time_diff"),
        # each row is an episode of its own name, and none says how it ended; then all were cut without a next state
        ({"mdp_id": str, "sequence_number": lambda i: 0}, NoRowsError, "20 last of an .*addTerminalStateRow"),
        ({"mdp_id": str, "sequence_number": lambda i: 0, "truncated": lambda i: True}, NoRowsError,
         "20 truncated .* next_state_features"),
    ],
)  # fmt: skip
def test_columns_that_say_too_little_of_episodes_are_refused(
    changes: dict[str, Callable[[int], Any]], error: Any, message: str, tmp_path: Path
) -> None:
    log = [{**row, **{name: value(i) for name, value in changes.items()}} for i, row in enumerate(rows(20))]
    file = write_lines(tmp_path / "log.jsonl", log)
    with pytest.raises(error, match=message):
        prepare_training_copy(Log(str(file), actions=("a", "b"), directory=str(tmp_path / "c")))


def test_some_rows_of_episodes_and_some_without(tmp_path: Path) -> None:
    write_lines(tmp_path / "in/0.jsonl", [{**row, "mdp_id": "m", "sequence_number": 0, "terminal": True}
                                          for row in rows(1)])  # fmt: skip
    write_lines(tmp_path / "in/1.jsonl", rows(2))
    with pytest.raises(DataError, match=r"1\.jsonl:1: expected columns mdp_id and sequence_number"):
        make(tmp_path, tmp_path / "in")


def test_users_are_the_units_of_intervals_if_they_are_episodes_without_a_discount(tmp_path: Path) -> None:
    """How wide intervals are then is tested in evaluation/test_regimes.py."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({
        "state_features": [{"x": 1.0}] * 1000, "possible_actions": [["a", "b"]] * 1000,
        "action": rng.choice(["a", "b"], 1000), "action_probability": 0.5,
        "reward": np.repeat(rng.normal(size=100), 10), "same": 0.5,
    })  # fmt: skip
    config = {"actions": ["a", "b"], "output_path": str(tmp_path / "report.json")}
    alone = reagent_lite.evaluate("column:same", frame, config=config)
    users = frame.assign(mdp_id=np.repeat(np.arange(100), 10).astype(str), sequence_number=range(1000))
    settings = {**config, "gamma": 0, "timeline": {"addTerminalStateRow": True}}
    for evaluated, episodes in ((alone, 1000), (reagent_lite.evaluate("column:same", users, config=settings), 100)):
        assert (evaluated.rows, evaluated.episodes) == (1000, episodes)
        assert " a decision, " in evaluated.decision["reason"]
