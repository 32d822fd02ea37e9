"""What is wrong with a row is refused with file and line in every format that can hold it, and by every parser."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracles.event_files import write_events
from oracles.events import make

from reagent_lite.data.copy.training_copy import prepare_training_copy
from reagent_lite.data.formats.reading import read_tables
from reagent_lite.data.formats.schema import TEXT_METADATA
from reagent_lite.errors import DataError, Problem

GOOD: dict[str, Any] = {
    "mdp_id": "a",
    "sequence_number": 1,
    "state_features": {"0": 1.0},
    "action": "left",
    "reward": 1.0,
    "next_state_features": {"0": 2.0},
    "next_action": "right",
    "metrics": {"x": 1.0},
}
TEXTS = ("mdp_id", "action", "next_action")
MAPS = {name: pa.map_(pa.string(), pa.float64()) for name in ("state_features", "next_state_features", "metrics")}
BEFORE, AFTER = 2, 40
"""Good rows around the faulty one: parsers that learn have learnt, and the block goes on behind it."""
JSON, CSV, TABLES = ("log.json",), ("log.csv",), ("log.parquet", "log.arrow")


def json_lines(column: str, value: bytes) -> bytes:
    """The faulty row's value stands there as it is given: it need not be JSON."""
    good = json.dumps(GOOD).encode()
    bad = json.dumps({**GOOD, column: "@"}).encode().replace(b'"@"', value)
    return b"\n".join([good] * BEFORE + [bad] + [good] * AFTER) + b"\n"


def csv_records(column: str, value: bytes) -> bytes:
    def record(cells: dict[str, str]) -> bytes:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerow(cells.values())
        return text.getvalue().encode("utf-8", "surrogateescape")

    cells = {name: json.dumps(one) if isinstance(one, dict) else str(one) for name, one in GOOD.items()}
    cell = (value.strip(b'"') if column in TEXTS else value).decode("utf-8", "surrogateescape")
    rows = [record(cells)] * BEFORE + [record({**cells, column: cell})] + [record(cells)] * AFTER
    return ",".join(GOOD).encode() + b"\n" + b"".join(rows)


def table(column: str, value: Any) -> pa.Table:
    """The value is bytes for a text, a list of (name, number) for a map, or a number."""

    def plain(name: str, one: Any) -> Any:
        if name in MAPS:
            return [(key.encode() if isinstance(key, str) else key, number) for key, number in dict(one).items()]
        return one.encode() if isinstance(one, str) else one

    columns = {}
    for name, good in GOOD.items():
        values = [plain(name, good)] * (BEFORE + 1 + AFTER)
        if name == column:
            values[BEFORE] = value
        if name in MAPS:
            found = pa.array(values, pa.map_(pa.binary(), pa.float64()))
            keys = pa.Array.from_buffers(pa.string(), len(found.keys), found.keys.buffers())
            columns[name] = pa.MapArray.from_arrays(found.offsets, keys, found.items)
        elif name in TEXTS:
            found = pa.array(values, pa.binary())
            columns[name] = pa.Array.from_buffers(pa.string(), len(found), found.buffers())
        else:
            columns[name] = pa.array(values)
    return pa.table(columns)


def write(file: Path, column: str, text: bytes, value: Any) -> int:
    """Writes a log whose row BEFORE + 1 is faulty; returns the line of that row."""
    if file.suffix == ".json":
        file.write_bytes(json_lines(column, text))
    elif file.suffix == ".csv":
        file.write_bytes(csv_records(column, text))
        return BEFORE + 2
    elif file.suffix == ".parquet":
        pq.write_table(table(column, value), file)
    else:
        pyarrow.feather.write_feather(table(column, value), file, "uncompressed")
    return BEFORE + 1


def problem_of(file: Path, actions: tuple[str, ...] | None = ("left", "right")) -> Problem:
    with pytest.raises(DataError) as caught:
        prepare_training_copy(str(file), actions=actions)
    return caught.value.problems[0]


DEEP = b'{"0":' * 20_000 + b"1" + b"}" * 20_000
TOO_DEEP, TWICE = "more than 100 objects and lists inside one another", "the key '0' twice in one object"
FAULTS: list[tuple[str, bytes, Any, tuple[str, ...], str]] = [
    ("state_features", DEEP, None, JSON + CSV, TOO_DEEP),
    ("action", b"[" * 101 + b"]" * 101, None, JSON, TOO_DEEP),
    ("further", b"[" * 20_000 + b"]" * 20_000, None, JSON, TOO_DEEP),
    ("further", b'{"]}]}]}": "]", "a": ' + b"[" * 3000 + b"]" * 3000 + b"}", None, JSON, TOO_DEEP),
    ("reward", b'1.0, "reward": 2.0', None, JSON, "the key 'reward' twice"),
    ("reward", b'1.0, "metrics": null', None, JSON, "the key 'metrics' twice"),
    ("state_features", b'{"0": 1.0, "0": 2.0}', [(b"0", 1.0), (b"0", 2.0)], JSON + CSV, TWICE),
    ("state_features", b'{"0": 1.0, "0": 2.0}', [(b"0", 1.0), (b"0", 2.0)], TABLES, "each id once"),
    ("metrics", b'{"x": 1.0, "x": null}', [(b"x", 1.0), (b"x", None)], JSON + CSV, "the key 'x' twice"),
    ("metrics", b'{"x": 1.0, "x": null}', [(b"x", 1.0), (b"x", None)], TABLES, "each id once"),
    ("mdp_id", b'"\xff"', b"\xff", (*JSON, *CSV, "log.parquet"), "UTF"),
    ("action", b'"\xc3"', b"\xc3", (*JSON, *CSV, "log.parquet"), "UTF"),
    ("metrics", b'{"\xff": 1.0}', [(b"\xff", 1.0)], (*JSON, *CSV, "log.parquet"), "UTF"),
    ("mdp_id", b'"\\ud800"', None, JSON, "\\ud800, which is half of a character"),
    ("metrics", b'{"\\udfff": 1.0}', None, JSON + CSV, "\\udfff, which is half of a character"),
    ("state_features", b'{"0": ' + b"1" * 400 + b"}", None, JSON + CSV, "an integer of 400 digits"),
    ("reward", b"1" * 400, None, JSON, "an integer of 400 digits"),
    ("reward", b"1" * 400, None, CSV, "a finite number in reward"),
    ("sequence_number", b"1" * 400, None, JSON + CSV, "integer"),
    (
        "state_features",
        b'{"%d": 1.0}' % 10**18,
        [(b"%d" % 10**18, 1.0)],
        JSON + CSV + TABLES,
        "an integer of at most 18 digits or a name that begins with a letter, got '1000000000000000000'",
    ),
    ("sequence_number", b"%d" % -(2**63), -(2**63), JSON + CSV + TABLES, "an integer within ±2^62"),
    ("sequence_number", b"%d" % 2**62, 2**62, JSON + CSV + TABLES, "an integer within ±2^62"),
    ("state_features", b'{"0": 1.0,}', None, JSON + CSV, "Expecting property name"),
    ("metrics", b'{"x": 1.0 , \t}', None, JSON + CSV, "Expecting property name"),
    ("further", b"[1,]", None, JSON, "Expecting value"),
    ("reward", b"1.0} {", None, JSON, "Extra data"),
]


@pytest.mark.parametrize(
    ("name", "column", "text", "value", "words"),
    [(name, column, text, value, words) for column, text, value, names, words in FAULTS for name in names],
    ids=lambda one: repr(one)[:30],
)
def test_a_faulty_row_is_named(tmp_path: Path, name: str, column: str, text: bytes, value: Any, words: str) -> None:
    line = write(tmp_path / name, column, text, value)
    problem = problem_of(tmp_path / name)
    assert problem.where == f"{tmp_path / name}:{line}"
    assert words.lower() in f"{problem.expected}, got {problem.got}".lower()


@pytest.mark.parametrize("start", [b"\xef\xbb\xbf", b"\x00", b"[]\x00"], ids=repr)
def test_a_line_that_does_not_begin_with_its_object_is_named(tmp_path: Path, start: bytes) -> None:
    file, good = tmp_path / "log.json", json.dumps(GOOD).encode() + b"\n"
    file.write_bytes(good * BEFORE + start + good * AFTER)
    assert problem_of(file).where == f"{file}:{BEFORE + 1}"


@pytest.mark.parametrize("name", CSV + TABLES)
@pytest.mark.parametrize("column", ["terminal", "possible_actions", "further"])
def test_a_column_twice_is_refused(tmp_path: Path, name: str, column: str) -> None:
    file = tmp_path / name
    good = table("", None)
    twice = pa.table([*good.columns, good["reward"], good["reward"]], [*good.column_names, column, column])
    if name in CSV:
        file.write_text(f"reward,{column},{column}\n1,1,1\n")
    elif name == "log.parquet":
        pq.write_table(twice, file)
    else:
        with pa.ipc.new_file(file, twice.schema) as writer:
            writer.write_table(twice)
    problem = problem_of(file)
    assert problem.where.startswith(str(file))
    assert "once" in problem.expected
    assert f"'{column}'" in problem.got


def test_text_of_arrow_files_is_utf_8(tmp_path: Path) -> None:
    write(tmp_path / "log.arrow", "mdp_id", b"", b"\xff")
    assert "UTF8" in problem_of(tmp_path / "log.arrow").got


PIECES = st.sampled_from(
    [b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b" ", b"\t", b"\r", b"\n", b"null", b"NaN", b"-", b"0", b"1e999",
     b'"0"', b'"reward"', b'"metrics":null', b"\xef\xbb\xbf", b"\xff", b"\\ud800", b"\x00", b'{"0":1}', b"[[[[[["]
)  # fmt: skip


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """Lines of a log with a few bytes taken out, put in or said twice."""
    text = json_lines("reward", b"2.5")[: 3 * len(json.dumps(GOOD)) + 3]
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(text) - 1))
        end = draw(st.sampled_from([start, start, start + 1, start + 12]))
        text = text[:start] + draw(st.one_of(PIECES, st.just(b""), st.just(text[start:end] * 2))) + text[end:]
    return text


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def read_by_python(text: bytes) -> list[Any]:
    """The rows as the json module reads them, each line by itself."""
    lines = text.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    return [json.loads(line.decode(), object_pairs_hook=once) for line in lines if line.strip()]


def without_null(value: Any) -> Any:
    """The value without keys that are null, numbers as float32 has them at most: all that a column keeps."""
    if isinstance(value, dict):
        return {name: without_null(one) for name, one in value.items() if one is not None}
    if isinstance(value, list):
        return [without_null(one) for one in value]
    return float(value) if isinstance(value, int | float) else value


def rows_of(file: Path) -> Iterator[Any]:
    for found in read_tables(str(file)):
        is_text = {one.name: one.metadata == TEXT_METADATA for one in found.schema}
        for row in found.to_pylist():
            values = {k: json.loads(v) if is_text[k] and v is not None else v for k, v in row.items()}
            yield without_null(values)


def check_lines(file: Path, text: bytes) -> None:
    file.write_bytes(text)
    try:
        found = list(rows_of(file))
    except DataError as error:
        places = {problem.where.removeprefix(str(file)) for problem in error.problems}
        assert "" not in places or not text.strip()
    else:
        assert found == without_null(read_by_python(text))


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(text=mutated())
def test_lines_are_refused_or_read_as_python_reads_them(tmp_path: Path, text: bytes) -> None:
    check_lines(tmp_path / "log.json", text)


@pytest.mark.slow
@settings(max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck))
@given(text=mutated())
def test_many_lines_are_refused_or_read_as_python_reads_them(tmp_path: Path, text: bytes) -> None:
    check_lines(tmp_path / "log.json", text)


def actions_of(file: Path, actions: tuple[str, ...]) -> list[int]:
    copy = prepare_training_copy(str(file), actions=actions)
    order = np.argsort(copy.sequence)
    return [int(one) for one in copy.action[order]]


FORMS, LINES = ("jsonl", "map.parquet", "csv"), ("jsonl",)
LOGGED: list[tuple[list[Any], tuple[str, ...], list[int] | str, tuple[str, ...]]] = [
    ([1, 0, 1], ("a", "b"), [1, 0, 1], FORMS),
    ([1, 0, 1.0, "1", "b"], ("a", "b"), [1, 0, 1, 1, 1], LINES),
    ([10, 20, 0], ("10", "20"), [0, 1, 0], FORMS),
    (["1", "2", "3", "0"], ("1", "2", "3"), [0, 1, 2, 0], FORMS),
    ([3, 1], ("1", "2", "3"), "3", ("jsonl", "map.parquet")),
    (["0", 1], ("1", "0"), "1", LINES),
    (["a", "01"], ("a", "b"), "01", FORMS),
    (["9" * 5000], ("a", "b"), "999", FORMS),
    ([True], ("a", "b"), "true", ("jsonl", "map.parquet")),
    ([2], ("a", "b"), "2", FORMS),
]
"""Values of `action`, the names, and the indices or what the first faulty row is told; CSV has texts alone."""


@pytest.mark.parametrize(
    ("logged", "names", "found", "form"),
    [(logged, names, found, form) for logged, names, found, forms in LOGGED for form in forms],
    ids=lambda one: repr(one)[:30],
)
def test_actions_mean_the_same_in_rows_and_events(
    tmp_path: Path, logged: list[Any], names: tuple[str, ...], found: list[int] | str, form: str
) -> None:
    rows = [{**GOOD, "sequence_number": number, "action": one} for number, one in enumerate(logged)]
    for row in rows:
        row |= {"state_features": {"0": 1.0}, "terminal": True, "next_action": None, "next_state_features": None}
    events = [{name: one for name, one in row.items() if not name.startswith("next_")} for row in rows]
    write_events(rows, tmp_path / "rows", form)
    write_events(events, tmp_path / "events", form)
    if isinstance(found, list):
        assert actions_of(tmp_path / "rows", names) == found
        make(tmp_path, tmp_path / "events", {"query": {"actions": names}})
        assert actions_of(tmp_path / "train", names) == found
        return
    problem = problem_of(tmp_path / "rows", names)
    with pytest.raises(DataError) as caught:
        make(tmp_path, tmp_path / "events", {"query": {"actions": names}})
    same = caught.value.problems[0]
    assert same.where.rpartition(":")[2] == problem.where.rpartition(":")[2]
    assert found in problem.got
    assert found in same.got


def test_a_next_action_that_may_be_none_or_a_name_is_refused(tmp_path: Path) -> None:
    rows = [{**GOOD, "action": 3, "next_action": one} for one in (3, "2", "9", 2)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    problem = problem_of(tmp_path / "rows.jsonl", ("2", "3"))
    assert (problem.where, problem.got) == (f"{tmp_path}/rows.jsonl:4", "2")
