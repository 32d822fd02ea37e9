"""A good log, mutated: refused with file and line, or read as the json module and pandas read it."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.logs import Row
from helpers.transitions import check_copy
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from pyarrow.feather import read_table, write_feather

from reagent_lite.data.copy.prepared_copy import prepare_training_copy
from reagent_lite.data.logs import Log
from reagent_lite.errors import DataError

Pairs = list[tuple[str, Any]]
ACTIONS = ("left", "right")
GOOD: list[Row] = [
    {
        "mdp_id": episode,
        "sequence_number": 3 - step,
        "state_features": {"0": 0.5 + step, "age": -1.25},
        "action": ACTIONS[step % 2],
        "reward": 0.1 * step - 1,
        "next_state_features": {"0": 7.5 - step, "age": 3.0} if step else None,
        "next_action": ACTIONS[step // 2] if step else None,
        "possible_actions": [1, 1],
        "possible_next_actions": [1, int(step != 1)] if step else [0, 0],
        "propensity": 0.75,
        "time_diff": 1,
        "terminal": not step,
        "truncated": False,
        "metrics": {"x": 1.5},
        "note": "n",
    }
    for episode in ("b", "a")
    for step in range(3)
]
# cut by a limit; ended, as nothing is possible next; ended, as the next action is none
GOOD += [
    {**GOOD[1], "mdp_id": "cut", "terminal": None} | changes
    for changes in (
        {"truncated": True, "possible_next_actions": None, "next_action": None},
        {"possible_next_actions": [0, 0]},
        {"possible_next_actions": None, "next_action": "5"},
    )
]
NAMES = [*GOOD[0], "action_probability", "step"]
MAPS = ("state_features", "next_state_features", "metrics")
VALUES: list[Any] = [
    None, True, False, 0, 1, 2, -1, 0.5, 1.0, 3e38, 1e39, math.inf, math.nan, 2**53 + 1, 2**62, -(2**63), 2**64,
    10**400, "", "left", "right", "up", "0", "1", "01", "-1", "true", "NaN", "1e3", " 1", "1_0", "é", "\0", "{",
    "[1, 0]", '"', "2026-01-02", [], [0, 0], [0, 1], [1, 0], [1], [1, 1, 1], [1, 2], [1, None], [True, False],
    [1.0, 0.0], ["left"],
    ["left", "left"], ["up"], ["left", 1], [[1]], [{"0": 1.0}], {}, {"0": None}, {"0": 2, "age": 3},
    {"age": True, "0": 0.25}, {"höhe cm": 2.5}, {"-3": 1.0}, {"0": "1"}, {"01": 1.0}, {"": 1.0}, {"1.5": 1.0},
    {"0": 1e39}, {"0": math.nan}, {"0": {"1": 1.0}}, {"0": [1.0]}, {"9" * 19: 1.0}, {"x": None},
    10**309 - 1, {"0": 10**309 - 1}, [{"age": 3, "height": 1.5}], "2400-01-01", "2026-01-02T10:00:00.123456789",
]  # fmt: skip
MUTATIONS = ["set", "set", "set", "drop", "double", "swap", "rename", "row", "column", "columns"]
PIECES = [
    b"", b"{", b"}", b"[", b"]", b",", b":", b'"', b'""', b"\\", b" ", b"\r", b"\n", b"\n\n", b"null", b"NaN", b"-",
    b"0", b"e9", b"1e999", b"\xef\xbb\xbf", b"\xff", b"\\ud800", b"\0", b'"reward":1,', b"[[[[", b"true", b"\xc3\xa9",
]  # fmt: skip
KINDS = [
    pa.float16(), pa.float32(), pa.int8(), pa.uint64(), pa.decimal128(20, 3), pa.bool_(), pa.binary(), pa.null(),
    pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string()), pa.timestamp("us"),
    pa.timestamp("ns", "CET"), pa.date32(), pa.map_(pa.string(), pa.float32()), pa.map_(pa.string(), pa.string()),
    pa.large_list(pa.float64()), pa.list_(pa.int8(), 2), pa.list_(pa.bool_()), pa.timestamp("s"), pa.duration("s"),
    pa.time64("us"), pa.map_(pa.binary(), pa.float64()), pa.map_(pa.bool_(), pa.float64()),
    pa.decimal32(9, 2), pa.decimal64(18, 2), pa.decimal256(40, 3), pa.binary_view(), pa.large_binary(), pa.binary(1),
    pa.list_view(pa.float32()), pa.large_list_view(pa.int8()), pa.list_(pa.string_view()), pa.list_(pa.float64(), 2),
    pa.run_end_encoded(pa.int16(), pa.string()), pa.run_end_encoded(pa.int32(), pa.float64()), pa.date64(),
    pa.dictionary(pa.int32(), pa.large_string()), pa.dictionary(pa.int8(), pa.int64()), pa.timestamp("ms", "UTC"),
    pa.bool8(), pa.json_(), pa.map_(pa.string_view(), pa.float16()), pa.map_(pa.large_string(), pa.decimal128(9, 2)),
    pa.struct({"0": pa.float16(), "age": pa.decimal64(9, 2)}), pa.time32("s"),
]  # fmt: skip
OF_THE_LOG = (
    "rows of data",
    "one of the columns terminal",
    "each column once",
    "text in UTF-8",
    "csv, as its name says",
    "a header as the first record",
)
"""What is expected where no single line is at fault."""


@st.composite
def mutated_rows(draw: st.DrawFn) -> tuple[list[Pairs], set[int] | None]:
    """Rows as pairs of names and values; the numbers of those that were mutated, None where columns were."""
    rows, touched = [list(row.items()) for row in GOOD], set[int]()
    columns = False
    for _ in range(draw(st.integers(1, 2))):
        number = draw(st.integers(0, len(rows) - 1))
        value, name, what = (draw(st.sampled_from(choices)) for choices in (VALUES, NAMES, MUTATIONS))
        row = rows[number]
        at, other = (draw(st.integers(0, len(row) - 1)) for _ in range(2))
        swapped = {at: (row[at][0], row[other][1]), other: (row[other][0], row[at][1])}
        mutated = {
            "set": [*row[:at], (row[at][0], value), *row[at + 1 :]],
            "drop": row[:at] + row[at + 1 :] or row,
            "double": [*row, (row[at][0], value)],
            "swap": [swapped.get(index, pair) for index, pair in enumerate(row)],
            "rename": [*row[:at], (name, row[at][1]), *row[at + 1 :]],
        }
        rows[draw(st.integers(0, len(rows) - 1)) if what == "row" else number] = mutated.get(what, row)
        touched.add(number)
        columns |= what in ("row", "column", "columns")
        if what == "column":
            rows = [[(key, value if key == name else old) for key, old in each] for each in rows]
        if what == "columns":
            rows = [[pair for pair in each if pair[0] != name] for each in rows]
    return rows, None if columns else touched


@st.composite
def mutated_text(draw: st.DrawFn, text_of: Callable[[list[Pairs]], bytes]) -> tuple[bytes, set[int] | None]:
    """Mutated rows, or rows whose bytes are mutated, as text; as mutated_rows."""
    if draw(st.booleans()):
        rows, touched = draw(mutated_rows())
        return text_of(rows), touched
    text = text_of([list(row.items()) for row in GOOD])
    for _ in range(draw(st.integers(1, 2))):
        start = draw(st.integers(0, len(text) - 1))
        end = start + draw(st.sampled_from([0, 1, 1, 2, 9, 400]))
        flipped = bytes([text[start] ^ 1 << draw(st.integers(0, 5))])
        text = text[:start] + draw(st.sampled_from([flipped, flipped, text[start:end] * 2, *PIECES])) + text[end:]
    return text, None


def json_lines(rows: list[Pairs]) -> bytes:
    lines = [", ".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in row) for row in rows]
    return "".join("{" + line + "}\n" for line in lines).encode()


def spread(row: Pairs) -> Pairs:
    """States in columns of single features."""
    return [
        cell
        for name, value in row
        for cell in (
            [(f"{name}.{feature}", value.get(feature)) for feature in ("0", "age")]
            if name == "state_features" and isinstance(value, dict)
            else [(name, value)]
        )
    ]


def csv_records(rows: list[Pairs]) -> bytes:
    """Next states as JSON; the first row says what the header is."""
    file = io.StringIO()
    cells = ([json.dumps(cell) if isinstance(cell, dict | list) else cell for _, cell in spread(row)] for row in rows)
    csv.writer(file, lineterminator="\n").writerows([[name for name, _ in spread(rows[0])], *cells])
    return file.getvalue().encode()


@st.composite
def mutated_table(draw: st.DrawFn) -> pa.Table:
    """A column for each name, twice where the first row has it twice; one of them cast to another type."""
    rows, _ = draw(mutated_rows())
    maps = draw(st.sampled_from([None, pa.map_(pa.string(), pa.float64())]))
    cast, kind = draw(st.sampled_from(NAMES)), draw(st.sampled_from([None, *KINDS]))
    columns = []
    for name in dict.fromkeys(name for row in rows for name, _ in row):
        array = array_of([dict(row).get(name) for row in rows], maps if name in MAPS else None)
        array = as_kind(array, kind) if name == cast and kind is not None else array
        columns += [(name, array)] * max(1, sum(key == name for key, _ in rows[0]))
    return pa.table([array for _, array in columns], [name for name, _ in columns])


def as_kind(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """The values as another type, or as they are if Arrow does not convert them."""
    for convert in (lambda: array.cast(kind, safe=False), lambda: pa.array(array.to_pylist(), kind)):
        with contextlib.suppress(pa.ArrowException, OverflowError, TypeError, AttributeError, ValueError):
            return convert()
    return array


def array_of(values: list[Any], kind: pa.DataType | None) -> pa.Array:
    for attempt in (kind, None):
        with contextlib.suppress(pa.ArrowException, OverflowError, AttributeError):
            return pa.array(values, attempt)
    return pa.array([None if value is None else str(value) for value in values])


def read_json(file: Path) -> list[tuple[int, Row]]:
    """The rows and their lines, as the json module reads each line."""

    def once(pairs: Pairs) -> Row:
        assert len(dict(pairs)) == len(pairs)
        return dict(pairs)

    return [
        (number, json.loads(line.decode(), object_pairs_hook=once))
        for number, line in enumerate(file.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1)
        if line.strip()
    ]


def flag(cell: str) -> bool | float | None:
    return {"t": True, "f": False}.get(cell.lower()[:1]) if cell[0] in "tTfF" else float(cell)


def place(cell: str) -> Any:
    is_time = "-" in cell[1:]
    return pd.Timestamp(cell) if is_time else int(cell if cell.removeprefix("-").isdigit() else float(cell))


def number_of(cell: str) -> float:
    return float({"true": True, "false": False}.get(cell.lower(), cell))


def number_or_text(cell: str) -> float | str:
    with contextlib.suppress(ValueError):  # a text is a category
        return number_of(cell)
    return cell


OF_CELLS: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys((*MAPS, "possible_actions", "possible_next_actions"), json.loads),
    **dict.fromkeys(("terminal", "truncated"), flag),
    **dict.fromkeys(("reward", "propensity", "action_probability", "time_diff"), number_of),
    "sequence_number": place,
    "mdp_id": lambda cell: cell.strip() if re.fullmatch(r"\s*(0|-?[1-9][0-9]*)(\.0+)?\s*", cell) else cell,
}


def read_csv(file: Path) -> list[tuple[int, Row]]:
    """The records as pandas reads texts of them; an empty cell is absent, t and 1.0 are true, and true is a number."""
    # columns that are not used may have any bytes
    frame = pd.read_csv(file, dtype=str, keep_default_na=False, index_col=False, encoding_errors="replace")
    rows: list[tuple[int, Row]] = []
    for number, record in enumerate(frame.to_dict("records")):
        row: Row = {"state_features": {}} if any(str(name).startswith("state_features.") for name in record) else {}
        for name, cell in ((str(name), cell) for name, cell in record.items()):
            column, dot, feature = name.partition(".")
            if not dot or column not in MAPS:
                row[name] = OF_CELLS.get(name, str)(cell) if cell else None
            elif cell:
                row.setdefault(column, {})[feature] = number_or_text(cell)
        rows.append((number, row))
    return rows


def frame_of(table: pa.Table) -> pd.DataFrame:
    """A table as pandas has it, in Python's values where pandas lacks a type."""
    columns = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        try:
            columns[name] = column.to_pandas()
        except pa.ArrowNotImplementedError:
            columns[name] = pd.Series(column.to_pylist(), dtype=object)
    return pd.DataFrame(columns)


def read_frame(frame: pd.DataFrame) -> list[tuple[int, Row]]:
    """The rows of a table as pandas has them, NaN as absent, maps as dicts."""

    def plain(name: str, value: Any) -> Any:
        if name in MAPS and isinstance(value, list | np.ndarray) and all(isinstance(pair, tuple) for pair in value):
            return {key.decode() if isinstance(key, bytes) else key: number for key, number in value}
        if isinstance(value, np.ndarray):
            return list(value)
        return None if value is None or value is pd.NaT or (isinstance(value, float) and math.isnan(value)) else value

    return [
        (number, {str(name): plain(str(name), value) for name, value in row.items()})
        for number, row in enumerate(frame.to_dict("records"), 1)
    ]


def check(file: Path, read: Callable[[], list[tuple[int, Row]]], touched: set[int] | None, *, lines: bool) -> None:
    """`touched`: numbers of the lines that an error may name, None: any."""
    try:
        copy = prepare_training_copy(Log(str(file), actions=ACTIONS, directory=str(file.parent / "copies")))
    except DataError as error:
        problem = error.problems[0]
        where = re.fullmatch(rf"{re.escape(str(file))}(?::([1-9]\d*))?", problem.where)
        assert where is not None
        assert where[1] or problem.expected.startswith(OF_THE_LOG)
        assert not where[1] or touched is None or int(where[1]) in touched
    else:
        expected = read()
        left_out = next((note for note in copy.notes if "left out by the timeline" in note), None)
        if left_out is not None:  # without next states and next actions the rows are events
            assert not any(row.get(name) for _, row in expected for name in ("next_state_features", "next_action"))
            assert f"of {len(expected)} events left out" in left_out
            assert {*copy.origin_line.tolist()} < {line for line, _ in expected} or not lines
            return
        assert not lines or sorted(copy.origin_line.tolist()) == [line for line, _ in expected]
        check_copy(copy, [row for _, row in expected], ACTIONS)


def read_mutant(name: str, log: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / name
        if isinstance(log, pa.Table):
            write, read = (pq.write_table, pq.read_table) if name == "log.parquet" else (write_feather, read_table)
            try:
                write(log, file)
            except pa.ArrowException:
                return  # Parquet has no such type
            check(file, lambda: read_frame(frame_of(read(file))), None, lines=True)
        else:
            text, touched = log
            file.write_bytes(text)
            read_text, first = (read_json, 1) if name == "log.jsonl" else (read_csv, 2)
            # the header of CSV is made of the first row
            unknown = touched is None or (name == "log.csv" and 0 in touched)
            named = None if unknown else {first + number for number in touched}
            check(file, lambda: read_text(file), named, lines=name == "log.jsonl")


def test_rows_without_next_states_are_events_of_which_some_are_left_out() -> None:
    """A mutant of seed 3: the three rows of one step of "cut" lead to no known state, and the log says so."""
    rows: list[Row] = [{**row, "next_state_features": None} for row in GOOD]
    events = [[(name, value) for name, value in row.items() if name != "next_action"] for row in rows]
    read_mutant("log.jsonl", (json_lines(events), None))


@pytest.mark.parametrize(
    ("number", "examples"), [(0, 75), *(pytest.param(number, 2500, marks=pytest.mark.slow) for number in range(1, 5))]
)
@pytest.mark.parametrize(
    ("name", "logs"),
    [
        ("log.jsonl", mutated_text(json_lines)),
        ("log.csv", mutated_text(csv_records)),
        ("log.parquet", mutated_table()),
        ("log.arrow", mutated_table()),
    ],
    ids=["jsonl", "csv", "parquet", "arrow"],
)
def test_mutants(name: str, logs: st.SearchStrategy[Any], number: int, examples: int) -> None:
    """No row is read wrongly, and what is raised is a DataError."""

    @seed(number)
    @settings(max_examples=examples, suppress_health_check=list(HealthCheck), database=None)
    @given(log=logs)
    def read(log: Any) -> None:
        read_mutant(name, log)

    read()
