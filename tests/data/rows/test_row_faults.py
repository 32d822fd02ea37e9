"""What is wrong with a row is refused with file and line in every format that can hold it, and by every parser."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.event_files import data_of, small_blocks, write_events
from helpers.events import make
from helpers.logs import Row, write_lines, written
from pyarrow.feather import write_feather

from reagent_lite.data.copy.prepared_copy import prepare_training_copy
from reagent_lite.data.logs import Log
from reagent_lite.data.tables import read_log
from reagent_lite.errors import DataError, Problem

Actions = tuple[str, ...] | None
ACTIONS: Actions = ("left", "right")
GOOD: Row = {
    "mdp_id": "a",
    "sequence_number": 1,
    "state_features": {"0": 1.0},
    "action": "left",
    "reward": 1.0,
    "next_state_features": {"0": 2.0},
    "next_action": "right",
    "metrics": {"x": 1.0},
}
MAPS = {name: pa.map_(pa.string(), pa.float64()) for name in ("state_features", "next_state_features", "metrics")}
BEFORE, AFTER = 2, 40
"""Good rows around the faulty one: parsers that learn have learnt, and the block goes on behind it."""
JSON, CSV = ("log.json",), ("log.csv",)
TABLES = ("log.parquet", "log.arrow")


def write_text(file: Path, column: str, text: bytes) -> int:
    """Writes a log whose row BEFORE + 1 is faulty, its text as given; returns the line of that row."""
    data = data_of([GOOD] * BEFORE + [{**GOOD, column: "@"}] + [GOOD] * AFTER, file.suffix[1:])
    cell = (text.strip(b'"') if column in ("mdp_id", "action", "next_action") else text).replace(b'"', b'""')
    file.write_bytes(data.replace(b'"@"', text) if file.suffix == ".json" else data.replace(b"@", b'"%s"' % cell))
    return BEFORE + 1 + (file.suffix == ".csv")


OWN = pa.table({
    name: pa.array([list(value.items()) if name in MAPS else value] * 2, MAPS.get(name)) for name, value in GOOD.items()
})  # fmt: skip


def write_table(file: Path, *columns: tuple[str, pa.Array]) -> Path:
    """Writes two good rows, with other columns in the place of theirs or beside them."""
    kept = [(name, OWN[name]) for name in OWN.column_names if name not in dict(columns)]
    table = pa.table([array for _, array in (*kept, *columns)], [name for name, _ in (*kept, *columns)])
    (pq.write_table if file.suffix == ".parquet" else write_feather)(table, file)
    return file


def texts(array: pa.Array) -> pa.Array:
    """Bytes, or maps by them, as strings, though they need not be UTF-8."""
    if isinstance(array, pa.MapArray):
        return pa.MapArray.from_arrays(array.offsets, texts(array.keys), array.items)
    return pa.Array.from_buffers(pa.string(), len(array), array.buffers())


def maps(*faulty: tuple[bytes, float | None]) -> pa.Array:
    """Two maps, the second of which is faulty."""
    return texts(pa.array([[(b"0", 1.0)], list(faulty)], pa.map_(pa.binary(), pa.float64())))


def problems_of(file: Path, actions: Actions = ACTIONS) -> tuple[Problem, ...]:
    with pytest.raises(DataError) as caught:
        prepare_training_copy(Log(str(file), actions=actions))
    return caught.value.problems


DEEP = b'{"0":' * 20_000 + b"1" + b"}" * 20_000
AN_ID = "an integer of at most 18 digits or a name that begins with a letter, got '1000000000000000000'"
NO_MAP = "an object {id: number} in "
"""Cells of CSV that are not JSON stay text."""
TOO_DEEP = "more than 100 nested objects and lists"


@pytest.mark.parametrize(("name", "column", "text", "words"), [
    (name, column, text, words) for column, text, names, words in [
        ("state_features", DEEP, JSON, TOO_DEEP),
        ("state_features", DEEP, CSV, NO_MAP),
        ("action", b"[" * 101 + b"]" * 101, JSON, TOO_DEEP),
        ("further", b'{"]}]}]}": "]", "a": ' + b"[" * 3000 + b"]" * 3000 + b"}", JSON, TOO_DEEP),
        ("reward", b'1.0, "reward": 2.0', JSON, "the key 'reward' twice"),
        ("state_features", b'{"0": 1.0, "0": 2.0}', JSON, "the key '0' twice in one object"),
        ("state_features", b'{"0": 1.0, "0": 2.0}', CSV, NO_MAP),
        ("mdp_id", b'"\xff"', JSON + CSV, "UTF"),
        ("metrics", b'{"\xff": 1.0}', JSON + CSV, "UTF"),
        ("mdp_id", b'"\\ud800"', JSON, "\\ud800, which is half of a character"),
        ("metrics", b'{"\\udfff": 1.0}', JSON, "\\udfff, which is half of a character"),
        ("metrics", b'{"\\udfff": 1.0}', CSV, NO_MAP),
        ("state_features", b'{"0": ' + b"1" * 400 + b"}", JSON, "an integer of 400 digits"),
        ("state_features", b'{"0": ' + b"1" * 400 + b"}", CSV, NO_MAP),
        ("state_features", b'{"0": 1e39}', JSON + CSV, "numbers in state_features, got inf"),
        ("next_state_features", b'{"0": -1e400}', JSON, "finite numbers in next_state_features, got -inf for '0'"),
        ("reward", b"1" * 400, JSON, "an integer of 400 digits"),
        ("reward", b"1" * 400, CSV, "a finite number in reward"),
        ("sequence_number", b"1" * 400, JSON + CSV, "integer"),
        ("state_features", b'{"%d": 1.0}' % 10**18, JSON + CSV, AN_ID),
        ("sequence_number", b"%d" % -(2**63), JSON + CSV, "an integer within ±2^62"),
        ("sequence_number", b"%d" % 2**62, JSON + CSV, "an integer within ±2^62"),
        ("metrics", b'{"x": 1.0 , \t}', JSON, "Expecting property name"),
        ("metrics", b'{"x": 1.0 , \t}', CSV, NO_MAP),
        ("further", b"[1,]", JSON, "Expecting value"),
        ("reward", b"1.0} {", JSON, "Extra data"),
    ] for name in names
], ids=lambda value: repr(value)[:30])  # fmt: skip
def test_a_faulty_row_is_named(tmp_path: Path, name: str, column: str, text: bytes, words: str) -> None:
    line = write_text(tmp_path / name, column, text)
    words = f"{tmp_path / name}:{line}: expected .*{re.escape(words)}"
    assert re.match(words, str(problems_of(tmp_path / name)[0]), re.IGNORECASE)


@pytest.mark.parametrize("start", [b"\xef\xbb\xbf", b"\x00", b"[]\x00"], ids=repr)
def test_a_line_that_does_not_begin_with_its_object_is_named(tmp_path: Path, start: bytes) -> None:
    good = json.dumps(GOOD).encode() + b"\n"
    file = written(tmp_path / "log.json", good * BEFORE + start + good * AFTER)
    assert problems_of(file)[0].where == f"{file}:{BEFORE + 1}"


@pytest.mark.parametrize("name", ["log.csv", "log.parquet", "log.arrow"])
@pytest.mark.parametrize("column", ["terminal", "possible_actions", "further"])
def test_a_column_twice_is_refused(tmp_path: Path, name: str, column: str) -> None:
    log = (
        written(tmp_path / name, f"reward,{column},{column}\n1,1,1\n")
        if name == "log.csv"
        else write_table(tmp_path / name, *[(column, pa.array([1.0, 1.0]))] * 2)
    )
    assert re.match(f"{log}.*: expected .*once.*, got .*'{column}'", str(problems_of(log)[0]))


GOOD_PARAMETRIC: Row = {
    **GOOD,
    "action": {"1": 1.0},
    "next_action": {"1": 2.0},
    "possible_actions": [{"1": 1.0}, {"1": 3.0}],
    "possible_next_actions": [{"1": 2.0}],
}


LARGEST = 10**309 - 1
"""With as many digits as JSON may have, and beyond float64."""
LISTED = "0 or 1 for each of 2 actions, or names of actions, in possible_actions"


@pytest.mark.parametrize(("parametric", "changes", "expected", "got"), [
    *((False, *fault) for fault in [
        ({"action": -1}, "an index below 2", "-1"),
        ({"action": "up"}, "one of the actions left, right", '"up"'),
        ({"action": 0.5}, "one of the actions", "0.5"),
        ({"next_action": "up"}, "an index below 2 in next_action", '"up"'),
        ({"possible_actions": [0, 1]}, "an action among possible_actions", '"left"'),
        ({"possible_actions": []}, "an action among possible_actions", '"left"'),
        ({"possible_actions": [1, 2]}, LISTED, "[1, 2]"),
        ({"possible_actions": {"0": 1}}, "in possible_actions", '{"0": 1}'),
        ({"reward": None}, "a finite number in reward", "null"),
        ({"reward": "1"}, "a number in reward", '"1"'),
        ({"reward": 1e39}, "a finite number in reward", "1e+39"),
        ({"time_diff": 1e39}, "a finite number in time_diff", "1e+39"),
        ({"propensity": 0}, "a propensity above 0 and at most 1", "0.0"),
        ({"propensity": 1.5}, "a propensity above 0 and at most 1", "1.5"),
        ({"propensity": 1e39}, "a propensity above 0 and at most 1", "1e+39"),
        ({"propensity": 0.5, "action_probability": 0.25}, "propensity and action_probability alike", "0.5 and 0.25"),
        ({"state_features": None}, "state_features", "null"),
        ({"state_features": {"0": "1"}}, "a number for '0' in state_features, as in other rows", '"1"'),
        ({"state_features": {"0": [1]}}, "an object {id: number} in state_features", '{"0": [1]}'),
        ({"state_features": {"1 speed": 1.0}}, "an integer of at most 18 digits or a name", "'1 speed'"),
        ({"next_state_features": None}, "next_state_features in a row that is not terminal", "none"),
        ({"terminal": False, "possible_next_actions": []},
         "a possible next action in a row that is not terminal", "none"),
        ({"truncated": True, "possible_next_actions": [0, 0]}, "a possible next action in a row that is not", "none"),
        ({"terminal": 2}, "true or false in terminal", "2"),
        ({"truncated": "perhaps"}, "true or false in truncated", '"perhaps"'),
        ({"metrics": {"y": "1"}}, "a number for 'y' in metrics", '"1"'),
        ({"state_features": [{"age": 3, "height": 1.5}]}, "an object {id: number} in state_features", '"age": 3'),
        ({"metrics": [{"age": 3, "height": 1.5}]}, "an object {id: number} in metrics", '[{"age": 3, "height": 1.5}]'),
        ({"reward": LARGEST}, "a finite number in reward", "inf"),
        ({"sequence_number": LARGEST}, "an integer within ±2^62 in sequence_number", "999"),
        ({"state_features": {"0": LARGEST}}, "finite numbers in state_features", "inf for '0'"),
        ({"metrics": {"x": LARGEST}}, "finite numbers in metrics", "inf for 'x'"),
        ({"terminal": LARGEST}, "true or false in terminal", "999"),
        ({"possible_actions": [1, LARGEST]}, LISTED, "[1, 999"),
        ({"metrics": {"x": 1e39}}, "finite numbers in metrics", "inf for 'x'"),
        ({"mdp_id": 1.5}, "an integer in mdp_id", "1.5"),
    ]),
    *((True, *fault) for fault in [
        ({"action": {"1": 2.0}}, "an action among possible_actions", '{"1": 2.0}'),
        ({"action": {"1": 1.0, "2": 0.0}}, "an action among possible_actions", '"2": 0.0'),
        ({"next_action": {"1": 1.0}}, "a next_action among possible_next_actions", '{"1": 1.0}'),
        ({"action": {"?": 1.0}}, "an integer of at most 18 digits or a name", "'?'"),
        ({"possible_actions": [{"1": 1.0}, None]}, "an object for every candidate in possible_actions", "null"),
        ({"possible_actions": [{"1": 1.0}, {"1": "x"}]},
         "a number for '1' in possible_actions, as in other rows", '"x"'),
        ({"possible_actions": [{"1": 1.0}, {"1": 1e39}]}, "finite numbers in possible_actions", "inf for '1'"),
        ({"possible_actions": {"1": 1.0}}, "a list of objects {id: number} in possible_actions", '{"1": 1.0}'),
        ({"terminal": False, "possible_next_actions": []},
         "a possible next action in a row that is not terminal", "none"),
    ]),
], ids=lambda value: json.dumps(value)[:40])  # fmt: skip
@pytest.mark.parametrize("by_line", [False, True])
def test_faults_of_transitions(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    parametric: bool,
    changes: Row,
    expected: str,
    got: str,
    by_line: bool,
) -> None:
    if by_line:  # a block per line: the faulty row is alone with its types
        small_blocks(monkeypatch, 16)
    file, good = tmp_path / "log.json", GOOD_PARAMETRIC if parametric else GOOD
    (problem,) = problems_of(
        write_lines(file, [good, good, {**good, **changes}, good]), None if parametric else ACTIONS
    )
    assert problem.where == f"{file}:3"
    assert by_line or (expected in problem.expected and got in problem.got)


@pytest.mark.parametrize("form", ["jsonl", "map.parquet"])
def test_an_action_is_shown_as_the_file_has_it(tmp_path: Path, form: str) -> None:
    four = {"action": {"4": 1.0}, "possible_actions": [{"4": 1.0}]}
    rows = [GOOD_PARAMETRIC | four, GOOD_PARAMETRIC | four | {"action": {"5": 1.0}}]
    assert [problem.got for problem in problems_of(write_events(rows, tmp_path / "log", form), None)] == ['{"5": 1.0}']


@pytest.mark.parametrize(("rows", "actions", "line", "expected", "todo"), [
    ([GOOD_PARAMETRIC], ACTIONS, ":1", "0 or 1 for each of 2 actions", "Maps are actions of workflows.parametric_dqn"),
    ([GOOD], None, ":1", "", "Names and indices are actions of workflows.dqn"),
    *(
        ([{f"{key}s" if key == name else key: value for key, value in GOOD.items()}], ACTIONS, ":1",
         f"a column '{name}'", f"Nearest column: '{name}s'")
        for name in ("state_features", "action", "reward")
    ),
    ([{"state_features": {"0": 1.0}, "action": 0, "reward": 1.0, "mdp_id": "a"}], ACTIONS, "",
     "one of the columns terminal, possible_next_actions, next_action", "If each row is an independent decision"),
    # an event whose episode is not named looks like this
    ([GOOD, {**GOOD, "next_state_features": None}], ACTIONS, ":2", "next_state_features in a row that is not terminal",
     ".*events: rows with mdp_id and sequence_number"),
    ([GOOD, {**GOOD, "sequence_number": None}], ACTIONS, ":2", "a sequence_number, as other rows have one", ""),
    ([{**GOOD, "action": 3, "next_action": action} for action in (3, "2", "9", 2)], ("2", "3"), ":4", "", ""),
])  # fmt: skip
def test_what_a_log_lacks(
    tmp_path: Path, rows: list[Row], actions: Actions, line: str, expected: str, todo: str
) -> None:
    problem = problems_of(write_lines(tmp_path / "log.json", rows), actions)[0]
    assert (problem.where, problem.expected[: len(expected)]) == (f"{tmp_path}/log.json{line}", expected)
    assert re.match(todo, problem.todo)


def test_one_line_for_each_kind_of_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch, 1500)
    rows = [{**GOOD, "propensity": 2.0 if number % 2 else 1.0} for number in range(60)]
    write_lines(tmp_path / "a.json", [*rows[:3], {**GOOD, "reward": None}, *rows[4:]])
    write_lines(tmp_path / "b.json", rows[:2])
    assert problems_of(tmp_path) == (
        Problem(f"{tmp_path}/a.json:2", "a propensity above 0 and at most 1",
                "2.0; 29 more rows like it: 6 (2.0), 8 (2.0) and others", "Divide probabilities in per cent by 100"),
        Problem(f"{tmp_path}/a.json:4", "a finite number in reward", "null"),
    )  # fmt: skip
    write_lines(tmp_path / "a.json", rows[:2])
    assert [problem.got for problem in problems_of(tmp_path)] == [f"2.0; 1 more row like it: {tmp_path}/b.json:2 (2.0)"]


@pytest.mark.parametrize(
    ("name", "text"), [("log.csv", "reward,action\n" + "1\n" * 30), ("log.json", "[1]\n" * 30)], ids=["csv", "json"]
)
def test_rows_that_cannot_be_read_end_the_reading(tmp_path: Path, name: str, text: str) -> None:
    assert [
        "; at least 19 more rows like it: " in problem.got for problem in problems_of(written(tmp_path / name, text))
    ] == [True]


def pairs(kind: pa.DataType, *keys: Any) -> pa.Array:
    """Two lists of pairs, whose fields stand in another order than writers have."""
    return pa.array(
        [[{"key": map_key, "value": 1.5}] for map_key in keys],
        pa.list_(pa.struct({"value": pa.float64(), "key": kind})),
    )


def by_key(kind: pa.DataType, *keys: Any) -> pa.Array:
    return pa.array([[(entry, 1.5)] for entry in keys], pa.map_(kind, pa.float64()))


@pytest.mark.parametrize(
    ("array", "ids"),
    [
        (pairs(pa.int64(), 3, 4), [3, 4]),
        (pairs(pa.string(), "3", "4"), [3, 4]),
        (by_key(pa.binary(), b"age", b"4"), [4, "age"]),
        (by_key(pa.large_binary(), "höhe".encode(), b"4"), [4, "höhe"]),
    ],
    ids=lambda value: str(getattr(value, "type", "")),
)
@pytest.mark.parametrize("file", TABLES)
def test_keys_of_maps(tmp_path: Path, file: str, array: pa.Array, ids: list[str | int]) -> None:
    write_table(tmp_path / file, ("state_features", array))
    copy = prepare_training_copy(Log(str(tmp_path / file), actions=ACTIONS))
    names = list(map(str, copy.state_ids))
    assert set(names) == {"0", *map(str, ids)}  # 0 is of the next states
    assert np.nanmax(copy.state[:2, [names.index(str(feature)) for feature in ids]], axis=1).tolist() == [1.5, 1.5]


NO_TIMES = ("reward", "mdp_id", "metrics", "possible_actions", "terminal")


@pytest.mark.parametrize("file", TABLES)
@pytest.mark.parametrize(
    ("name", "array", "expected", "got"),
    [
        ("state_features", maps((b"0", 1.0), (b"0", 2.0)), "each id once", ""),
        ("metrics", maps((b"x", 1.0), (b"x", None)), "each id once", ""),
        ("state_features", maps((b"0", 1e39)), "finite numbers in state_features", "inf"),
        ("state_features", maps((b"%d" % 10**18, 1.0)), *AN_ID.split(", got ")),
        (
            "state_features",
            pa.array([[(0, 1.0)], [(1, float("inf"))]], pa.map_(pa.int32(), pa.float64())),
            "finite",
            "inf",
        ),
        ("state_features", pa.array([None, ["y"]]), "an object {id: number} in state_features", '["y"]'),
        ("metrics", maps((b"x", float("nan"))), "metrics", "NaN"),
        ("sequence_number", pa.array([1, 2**62]), "an integer within ±2^62", ""),
        ("reward", pa.array([1.0, float("nan")]), "a finite number in reward", "nan"),
        ("reward", pa.array([None, "1"]), "a number in reward", '"1"'),
        ("propensity", pa.array([1.0, float("nan")]), "a propensity above 0 and at most 1", "nan"),
        ("possible_actions", pa.array([["left"], ["up"]]), LISTED, '["up"]'),
        ("possible_actions", pa.array([[1, 1], [1, None]]), LISTED, "[1, null]"),
        ("state_features", by_key(pa.binary(), b"0", b"\xff"), "keys in UTF-8", "\\xff"),
        ("metrics", pairs(pa.string(), "0", None), "keys in UTF-8, none of them null, in metrics", "null"),
        (
            "metrics",
            pa.array([None, [(True, 1.5)]], pa.map_(pa.bool_(), pa.float64())),
            "an object {id: number} in metrics",
            '"True"',
        ),
        (
            "metrics",
            pa.array([None, [(2.5, 1.5)]], pa.map_(pa.float64(), pa.float64())),
            "an object {id: number} in metrics",
            '"2.5"',
        ),
        (
            "state_features",
            pa.StructArray.from_arrays(
                [pa.array([None, 1.0]), pa.array([None, 2.0])], ["0", "0"], mask=pa.array([True, False])
            ),
            "each id once in state_features",
            "'0' twice",
        ),
        *((name, pa.array([None, 10**15], pa.timestamp("s")), f"in {name}", "value out of range") for name in NO_TIMES),
        *((name, pa.array([None, 10**15], pa.duration("s")), f"in {name}", "1" + "0" * 15) for name in NO_TIMES),
    ],
    ids=lambda value: str(value)[:30],
)
def test_faults_of_rows_of_tables(
    tmp_path: Path, file: str, name: str, array: pa.Array, expected: str, got: str
) -> None:
    assert re.search(
        f"{tmp_path / file}:2: expected .*{re.escape(expected)}.*, got .*{re.escape(got)}",
        "\n".join(map(str, problems_of(write_table(tmp_path / file, (name, array))))),
    )


@pytest.mark.parametrize("file", TABLES)
@pytest.mark.parametrize("column", [("mdp_id", texts(pa.array([b"a", b"\xff"]))), ("metrics", maps((b"\xff", 1.0)))])
def test_text_in_tables_is_utf_8(tmp_path: Path, file: str, column: tuple[str, pa.Array]) -> None:
    line = ":2" if file == "log.parquet" else ""
    assert re.match(f"{tmp_path}/{file}{line}.*utf", str(problems_of(write_table(tmp_path / file, column))[0]).lower())


DECISION: Row = {"mdp_id": "a", "state_features": {"0": 1.0}, "action": "left", "reward": 1.0, "terminal": True}
FORMS = ("jsonl", "map.parquet", "csv")


# CSV has texts alone
@pytest.mark.parametrize(("logged", "names", "expected", "form"), [
    (logged, names, expected, form) for logged, names, expected, forms in [
        ([1, 0, 1], ("a", "b"), [1, 0, 1], FORMS),
        ([1, 0, 1.0, "1", "b"], ("a", "b"), [1, 0, 1, 1, 1], ("jsonl",)),
        ([10, 20, 0], ("10", "20"), [0, 1, 0], FORMS),
        (["1", "2", "3"], ("1", "2", "3"), [0, 1, 2], FORMS),
        (["1", "0"], ("1", "2", "3"), "0", FORMS),
        (["02", "1"], ("01", "02", "10"), "1", FORMS),
        (["2.0", "1"], ("1.0", "2.0", "3.0"), "1", FORMS),
        ([2.0, 1.0], ("1.0", "2.0", "3.0"), "2.0", ("jsonl", "map.parquet")),
        (["a", "1", "0"], ("a", "b"), [0, 1, 0], FORMS),
        ([3, 0], ("2", "3"), [1, 0], FORMS),
        ([1, None, 0], ("a", "b"), [1, -1, 0], FORMS),
        ([0, -1, 1, None], ("0", "-1"), [0, 1, 1, -1], FORMS),
        ([10, None, 20], ("10", "20"), [0, -1, 1], FORMS),
        ([1, None, 2], ("1", "2"), [0, -1, 1], ("csv",)),
        ([3, 1], ("1", "2", "3"), "3", ("jsonl", "map.parquet")),
        (["0", 1], ("1", "0"), "1", ("jsonl",)),
        (["a", "01"], ("a", "b"), "01", FORMS),
        (["9" * 5000], ("a", "b"), "999", FORMS),
        ([True], ("a", "b"), "true", ("jsonl", "map.parquet")),
        ([2], ("a", "b"), "2", FORMS),
    ] for form in forms
], ids=lambda value: repr(value)[:30])  # fmt: skip
def test_actions_mean_the_same_in_rows_and_events(
    tmp_path: Path, logged: list[Any], names: tuple[str, ...], expected: list[int] | str, form: str
) -> None:
    """Expected are the indices, or what the first faulty row is told."""
    events = [{**DECISION, "sequence_number": number, "action": action} for number, action in enumerate(logged)]
    results = []
    for folder in (
        write_events(
            [{**event, "next_action": None, "next_state_features": None} for event in events], tmp_path / "rows", form
        ),
        write_events(events, tmp_path / "events", form),
    ):
        try:
            if folder.name == "events":
                make(tmp_path, folder, {"query": {"actions": names}})
            copy = prepare_training_copy(
                Log(tmp_path / ("train" if folder.name == "events" else "rows"), actions=names)
            )
            results.append((copy.action[np.argsort(copy.sequence)].tolist(), ""))
        except DataError as error:
            results.append((error.problems[0].got, error.problems[0].where.rpartition(":")[2]))
    assert results[0][1] == results[1][1]
    assert all(got == expected if isinstance(expected, list) else expected in got for got, _ in results)


@pytest.mark.parametrize(("names", "expected"), [(("a", "b"), [1, 0, -1, -1]), (("10", "20"), [1, 0, 1, -1])])
def test_next_actions_beside_gaps_as_pandas_writes_them(tmp_path: Path, names: Actions, expected: list[int]) -> None:
    """Integers and nothing are 1.0 and an empty cell in its CSV files; 20.0 is the name 20, or beyond the indices."""
    rows = [
        {**GOOD, "action": 1, "next_action": action, "sequence_number": n} for n, action in enumerate((1, 0, 20, None))
    ]
    write_events(rows, tmp_path / "log", "csv")
    assert "20.0" in (tmp_path / "log/events-0.csv").read_text()
    assert prepare_training_copy(Log(str(tmp_path / "log"), actions=names)).next_action.tolist() == expected


NINE_DIGITS = "2026-01-31T10:00:00.123456"


@pytest.mark.parametrize(("name", "order", "words"), [
    ("log.json", [0, "2026-01-31"], "integers in sequence_number, as in {file}:1, got a time"),
    ("log.json", ["2026-01-31", 0], "integers in sequence_number, as in {file}:2, got a time"),
    ("log.csv", [0, "2026-01-31"], "integers in sequence_number, as in {file}:2, got a time"),
    ("log.json", [f"{NINE_DIGITS}001", f"{NINE_DIGITS}9"],
     "times of an episode that differ by a microsecond, got parts of a microsecond, and 1 row with the mdp_id"),
    ("log.csv", [f"{NINE_DIGITS}001", f"{NINE_DIGITS}9"], "times of an episode that differ by a microsecond"),
    ("log.parquet", [1_001, 1_999], "times of an episode that differ by a microsecond"),
    ("log.arrow", [1_001, 1_999], "times of an episode that differ by a microsecond"),
])  # fmt: skip
@pytest.mark.parametrize("by_line", [False, True])
def test_sequence_numbers_say_one_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, order: list[Any], words: str, by_line: bool
) -> None:
    if by_line:
        small_blocks(monkeypatch, 16)
    file = tmp_path / name
    if name in TABLES:
        write_table(file, ("sequence_number", pa.array(order, pa.timestamp("ns"))), ("terminal", pa.array([True] * 2)))
    else:
        file.write_bytes(data_of([{**DECISION, "sequence_number": value} for value in order], file.suffix[1:]))
    words = words.format(file=file)
    assert words in str(problems_of(file)[0])
    with pytest.raises(DataError, match=re.escape(words)):
        make(tmp_path, file)
    if "integers" in words:
        with pytest.raises(DataError, match=re.escape(words)):
            read_log(file)


def test_parts_of_a_microsecond_are_cut_where_times_differ(tmp_path: Path) -> None:
    assert prepare_training_copy(
        Log(
            str(
                write_table(tmp_path / "log.parquet", ("sequence_number", pa.array([3_001, 1_999], pa.timestamp("ns"))))
            ),
            actions=ACTIONS,
        )
    ).sequence.tolist() == [1, 3]


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet", "arrow"])
def test_a_log_with_columns_of_its_own_is_told_what_finds_them(tmp_path: Path, form: str) -> None:
    """No standard column at all, in a file that has a header."""
    file = tmp_path / f"log.{form}"
    frame = pd.DataFrame({"country": ["DE", "FR"], "offer": ["mail", "call"], "click": [1, 0]})
    {"csv": partial(frame.to_csv, index=False), "jsonl": partial(frame.to_json, orient="records", lines=True),
     "parquet": frame.to_parquet, "arrow": frame.to_feather}[form](file)  # fmt: skip
    (problem,) = problems_of(file, ("mail", "call"))
    assert problem.expected == "the columns state_features, action, reward"
    assert problem.got == "columns click, country, offer"
    assert f"python -m workflows.inspect --data {file} --output config.json" in problem.todo
