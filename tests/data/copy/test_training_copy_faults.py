"""Every fault of a log is refused with its file, its line, what was expected and what came instead."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from reagent_lite.data.copy.training_copy import prepare_training_copy
from reagent_lite.data.formats import text_files
from reagent_lite.errors import DataError, Problem

ACTIONS: tuple[str, ...] | None = ("left", "right")
GOOD: dict[str, Any] = {
    "state_features": {"0": 1.0},
    "action": 0,
    "reward": 1.0,
    "next_state_features": {"0": 2.0},
    "next_action": 1,
    "possible_actions": [1, 1],
    "possible_next_actions": [1, 1],
}
GOOD_PARAMETRIC: dict[str, Any] = {
    **GOOD,
    "action": {"1": 1.0},
    "next_action": {"1": 2.0},
    "possible_actions": [{"1": 1.0}, {"1": 3.0}],
    "possible_next_actions": [{"1": 2.0}],
}


def problems_of(path: Path, actions: tuple[str, ...] | None) -> tuple[Problem, ...]:
    with pytest.raises(DataError) as caught:
        prepare_training_copy(str(path), actions=actions)
    return caught.value.problems


def problem_in_line_three(
    folder: Path, base: dict[str, Any], changes: dict[str, Any], actions: tuple[str, ...] | None
) -> Problem:
    """Writes two good rows, one with the changes, one good row; returns the only problem, which must be of line 3."""
    bad = {**base, **changes}
    file = folder / "log.json"
    file.write_text("".join(json.dumps(one) + "\n" for one in (base, base, bad, base)))
    problems = problems_of(file, actions)
    assert [problem.where for problem in problems] == [f"{file}:3"]
    return problems[0]


LISTED = "0 or 1 for each of 2 actions, or names of actions, in possible_actions"
DISCRETE_FAULTS: list[tuple[dict[str, Any], str, str]] = [
    ({"action": 2}, "one of the actions left, right, or an index below 2", "2"),
    ({"action": -1}, "an index below 2", "-1"),
    ({"action": "up"}, "one of the actions left, right", '"up"'),
    ({"action": ""}, "one of the actions left, right", '""'),
    ({"action": 0.5}, "one of the actions", "0.5"),
    ({"action": True}, "one of the actions", "true"),
    ({"action": [1]}, "one of the actions", "[1]"),
    ({"next_action": "up"}, "an index below 2 in next_action", '"up"'),
    ({"next_action": -1}, "an index below 2 in next_action", "-1"),
    ({"possible_actions": [0, 1]}, "an action among possible_actions", "0"),
    ({"possible_actions": []}, "an action among possible_actions", "0"),
    ({"possible_actions": [1]}, LISTED, "[1]"),
    ({"possible_actions": [1, 2]}, LISTED, "[1, 2]"),
    ({"possible_actions": ["left", "up"]}, LISTED, '["left", "up"]'),
    ({"possible_actions": {"0": 1}}, "in possible_actions", '{"0": 1}'),
    ({"possible_actions": 1}, "in possible_actions", "1"),
    ({"reward": None}, "a finite number in reward", "null"),
    ({"reward": "1"}, "a number in reward", '"1"'),
    ({"reward": 1e39}, "a finite number in reward", "1e+39"),
    ({"reward": [1.0]}, "a number in reward", "[1.0]"),
    ({"time_diff": 1e39}, "a finite number in time_diff", "1e+39"),
    ({"propensity": 0}, "a propensity above 0 and at most 1", "0.0"),
    ({"propensity": 1.5}, "a propensity above 0 and at most 1", "1.5"),
    ({"propensity": 1e39}, "a propensity above 0 and at most 1", "1e+39"),
    ({"propensity": 1e-60}, "a propensity above 0 and at most 1", "1e-60"),
    ({"propensity": 0.5, "action_probability": 0.25}, "propensity and action_probability alike", "0.5 and 0.25"),
    ({"state_features": None}, "state_features", "null"),
    ({"state_features": {"0": 1e39}}, "finite numbers in state_features", "inf for '0' as float32"),
    ({"state_features": {"0": "1"}}, "an object {id: number} in state_features", '{"0": "1"}'),
    ({"state_features": [1.0]}, "an object {id: number} in state_features", "[1.0]"),
    ({"state_features": 1.0}, "an object {id: number} in state_features", "1.0"),
    ({"state_features": {"1 speed": 1.0}}, "an integer of at most 18 digits or a name", "'1 speed'"),
    ({"next_state_features": {"1.5": 1.0}}, "an integer of at most 18 digits or a name", "'1.5'"),
    ({"next_state_features": {"01": 1.0}}, "an integer of at most 18 digits or a name", "'01'"),
    ({"next_state_features": None}, "next_state_features in a row that is not terminal", "none"),
    ({"next_state_features": {}}, "next_state_features in a row that is not terminal", "none"),
    ({"terminal": False, "possible_next_actions": []}, "a possible next action in a row that is not terminal", "none"),
    ({"truncated": True, "possible_next_actions": [0, 0]}, "a possible next action in a row that is not", "none"),
    ({"terminal": 2}, "true or false in terminal", "2"),
    ({"truncated": "yes"}, "true or false in truncated", '"yes"'),
    ({"metrics": {"x": "1"}}, "a number for 'x' in metrics", '"1"'),
    ({"metrics": {"x": 1e39}}, "finite numbers in metrics", "inf for 'x'"),
    ({"mdp_id": 1.5}, "an integer in mdp_id", "1.5"),
    ({"mdp_id": {"a": 1}}, "mdp_id", '{"a": 1}'),
]


@pytest.mark.parametrize(("changes", "expected", "got"), DISCRETE_FAULTS, ids=lambda one: json.dumps(one)[:40])
@pytest.mark.parametrize("by_line", [False, True])
def test_faults_of_discrete_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], expected: str, got: str, by_line: bool
) -> None:
    if by_line:  # a block per line: the faulty row is alone with its types
        monkeypatch.setattr(text_files, "FIRST_BLOCK_BYTES", 16)
        monkeypatch.setattr(text_files, "BLOCK_BYTES", 16)
    problem = problem_in_line_three(tmp_path, GOOD, changes, ACTIONS)
    if not by_line:
        assert expected in problem.expected
        assert got in problem.got


PARAMETRIC_FAULTS: list[tuple[dict[str, Any], str, str]] = [
    ({"action": {"1": 2.0}}, "an action among possible_actions", '{"1": 2.0}'),
    ({"action": {}}, "an action among possible_actions", "{"),
    ({"action": {"1": 1.0, "2": 0.0}}, "an action among possible_actions", '"2": 0.0'),
    ({"next_action": {"1": 1.0}}, "a next_action among possible_next_actions", '{"1": 1.0}'),
    ({"action": 0}, "an object {id: number} in action", "0"),
    ({"action": {"?": 1.0}}, "an integer of at most 18 digits or a name", "'?'"),
    ({"possible_actions": [{"1": 1.0}, None]}, "an object for every candidate in possible_actions", "null"),
    ({"possible_actions": [{"1": 1.0}, {"1": "x"}]}, "an object {id: number} in possible_actions", '{"1": "x"}'),
    ({"possible_actions": [{"1": 1.0}, {"1": 1e39}]}, "finite numbers in possible_actions", "inf for '1'"),
    ({"possible_actions": {"1": 1.0}}, "a list of objects {id: number} in possible_actions", '{"1": 1.0}'),
    ({"terminal": False, "possible_next_actions": []}, "a possible next action in a row that is not terminal", "none"),
]


@pytest.mark.parametrize(("changes", "expected", "got"), PARAMETRIC_FAULTS, ids=lambda one: json.dumps(one)[:40])
def test_faults_of_parametric_rows(tmp_path: Path, changes: dict[str, Any], expected: str, got: str) -> None:
    problem = problem_in_line_three(tmp_path, GOOD_PARAMETRIC, changes, None)
    assert expected in problem.expected
    assert got in problem.got


def test_an_action_is_shown_as_the_file_has_it(tmp_path: Path) -> None:
    file, action = tmp_path / "log.json", {"5": 1.0}
    rows = [
        {**GOOD_PARAMETRIC, "action": {"4": 1.0}, "possible_actions": [{"4": 1.0}]},
        {**GOOD_PARAMETRIC, "action": action, "possible_actions": [{"4": 1.0}]},
    ]
    file.write_text("".join(json.dumps(one) + "\n" for one in rows))
    assert [problem.got for problem in problems_of(file, None)] == ['{"5": 1.0}']
    of = {dict: pa.map_(pa.string(), pa.float64()), list: pa.list_(pa.map_(pa.string(), pa.float64()))}
    schema = pa.schema([(name, of.get(type(value), pa.float64())) for name, value in GOOD_PARAMETRIC.items()])
    table = pa.Table.from_pylist(rows, schema)
    pq.write_table(table, tmp_path / "log.parquet")
    assert [problem.got for problem in problems_of(tmp_path / "log.parquet", None)] == ['{"5": 1.0}']


def test_the_other_workflow_is_named(tmp_path: Path) -> None:
    file = tmp_path / "log.json"
    file.write_text(json.dumps(GOOD_PARAMETRIC) + "\n")
    assert problems_of(file, ACTIONS)[0].todo.startswith("Maps are actions of workflows.parametric_dqn")
    file.write_text(json.dumps(GOOD) + "\n")
    assert problems_of(file, None)[0].todo.startswith("Names and indices are actions of workflows.dqn")


@pytest.mark.parametrize("missing", ["state_features", "action", "reward"])
def test_a_missing_column_is_named_with_the_nearest(tmp_path: Path, missing: str) -> None:
    file = tmp_path / "log.json"
    file.write_text(json.dumps({f"{k}s" if k == missing else k: v for k, v in GOOD.items()}) + "\n")
    problem = problems_of(file, ACTIONS)[0]
    assert problem.where == f"{file}:1"
    assert problem.expected == f"a column '{missing}'"
    assert problem.todo == f"Nearest column: '{missing}s'"


def test_a_log_must_say_where_episodes_end(tmp_path: Path) -> None:
    file = tmp_path / "log.json"
    file.write_text(json.dumps({"state_features": {"0": 1.0}, "action": 0, "reward": 1.0}) + "\n")
    problem = problems_of(file, ACTIONS)[0]
    assert problem.where == str(file)
    assert problem.expected.startswith("one of the columns terminal, possible_next_actions, next_action")


def test_some_rows_without_sequence_number_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "log.json"
    rows = [{**GOOD, "mdp_id": "a", "sequence_number": 1}, {**GOOD, "mdp_id": "a"}]
    file.write_text("".join(json.dumps(one) + "\n" for one in rows))
    assert problems_of(file, ACTIONS) == (Problem(f"{file}:2", "a sequence_number, as other rows have one", "none"),)


def test_twenty_faults_are_shown_and_all_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "FIRST_BLOCK_BYTES", 1500)
    monkeypatch.setattr(text_files, "BLOCK_BYTES", 1500)
    file = tmp_path / "log.json"
    rows = [{**GOOD, "propensity": 2.0 if number % 2 else 1.0} for number in range(60)]
    file.write_text("".join(json.dumps(one) + "\n" for one in rows))
    problems = problems_of(file, ACTIONS)
    assert [problem.where for problem in problems[:20]] == [f"{file}:{2 * number + 2}" for number in range(20)]
    assert problems[20] == Problem(str(file), "rows without fault", "30 rows with one, 10 more than shown")
    assert len(problems) == 21


def test_numbers_too_large_for_json_readers_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "log.json"
    file.write_text(json.dumps(GOOD) + "\n" + json.dumps(GOOD).replace("2.0", "-1e400") + "\n")
    assert problems_of(file, ACTIONS) == (
        Problem(f"{file}:2", "finite numbers in next_state_features", "-inf for '0' as float32"),
    )


def test_faults_name_their_shard(tmp_path: Path) -> None:
    for name, reward in (("a.json", 1.0), ("b.json", None)):
        (tmp_path / name).write_text((json.dumps({**GOOD, "reward": reward}) + "\n") * 2)
    assert [problem.where for problem in problems_of(tmp_path, ACTIONS)] == [
        f"{tmp_path}/b.json:1",
        f"{tmp_path}/b.json:2",
    ]


PARQUET_FAULTS: list[tuple[str, pa.Array, str, str]] = [
    ("reward", pa.array([1.0, float("nan")]), "a finite number in reward", "nan"),
    ("reward", pa.array([1.0, float("inf")]), "a finite number in reward", "inf"),
    ("propensity", pa.array([1.0, float("nan")]), "a propensity above 0 and at most 1", "nan"),
    ("metrics", pa.array([[("x", 1.0)], [("x", float("nan"))]], pa.map_(pa.string(), pa.float64())), "metrics", "NaN"),
    ("state_features", pa.array([[(0, 1.0)], [(1, float("inf"))]], pa.map_(pa.int32(), pa.float64())), "finite", "inf"),
    ("state_features", pa.array([["x"], ["y"]][1:] * 2), "an object {id: number} in state_features", '["y"]'),
    ("reward", pa.array([None, "1"]), "a number in reward", '"1"'),
    ("possible_actions", pa.array([["left"], ["up"]]), LISTED, '["up"]'),
    ("possible_actions", pa.array([[1, 1], [1, None]]), LISTED, "[1, null]"),
]


@pytest.mark.parametrize(("name", "array", "expected", "got"), PARQUET_FAULTS)
def test_faults_of_parquet_rows(tmp_path: Path, name: str, array: pa.Array, expected: str, got: str) -> None:
    features = pa.array([[(0, 1.0)]] * 2, pa.map_(pa.int32(), pa.float64()))
    columns = {
        "state_features": features,
        "next_state_features": features,
        "action": pa.array([0, 0]),
        "next_action": pa.array([1, 1]),
        "reward": pa.array([1.0, 1.0]),
    }
    file = tmp_path / "log.parquet"
    pq.write_table(pa.table({**columns, name: array}), file)
    problems = [problem for problem in problems_of(file, ACTIONS) if problem.where == f"{file}:2"]
    assert expected in problems[0].expected
    assert got in problems[0].got
