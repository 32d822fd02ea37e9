"""JSON lines: what Arrow's parser gives is what Python's json reads, or Python reads it; broken lines are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.event_files import problems_of, small_blocks
from helpers.logs import written
from hypothesis import example, given, settings
from hypothesis import strategies as st

from reagent_lite.data.formats.format_table import read_blocks
from reagent_lite.data.formats.input_files import list_input
from reagent_lite.data.formats.jsonl import parse_with_arrow, parse_with_python
from reagent_lite.data.formats.schema import TEXT_METADATA
from reagent_lite.data.formats.text_files import TABLE_BYTES

KNOWN = '{"m": "x", "r": 1, "s": {"0": 0.5}, "l": [1, 0], "c": [{"1": 2.0}], "e": {}}'


def without_null(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_null(inner) for name, inner in value.items() if inner is not None}
    return [without_null(inner) for inner in value] if isinstance(value, list) else value


def check(lines: list[str], *, exact: bool = False) -> None:
    """Arrow's rows, if it gives any, and Python's are those that the json module reads."""
    text = "".join(line + "\n" for line in lines).encode()
    tables = [table for table in (parse_with_arrow(text), parse_with_python(text, 1, "x")[0]) if table is not None]
    assert len(tables) == 2 or not exact
    for table in tables:
        is_text = {field.name: field.metadata == TEXT_METADATA for field in table.schema}
        rows = [{k: json.loads(v) if v and is_text[k] else v for k, v in row.items()} for row in table.to_pylist()]
        assert without_null(rows) == [without_null(json.loads(line)) for line in lines]


@pytest.mark.parametrize(
    "line",
    ["{}", KNOWN, '{"r": 2.5, "l": [], "c": []}', '{"s": {}, "c": [{}, {"1": 1}]}', '{"r": -1e-3}', '{"m": "a\\"b"}',
     '{"s": {"0": null}}', '{"s": {"0": 1, "1": 2}}', '{"new": [{"a": {"b": [true]}}]}', '{"l": [1, null]}',
     '{"r": 9007199254740993}', '{"m": "2019-12-01 00:00:00", "new": [{"y": "2019-12-01"}]}'],
)  # fmt: skip
def test_arrow_reads(line: str) -> None:
    check([KNOWN, line, KNOWN], exact=True)


@pytest.mark.parametrize(
    "line",
    ['{"m": 5}', '{"m": ["x"]}', '{"m": {"x": 1}}', '{"r": "1"}', '{"r": {}}', '{"r": true}', '{"s": 5}', '{"c": [5]}',
     '{"l": ["1"]}', '{"s": {"0": "1"}}', '{"r": 1e300}', '{"r": 123456789012345678901}',
     '{"r": 1.5, "n": 9007199254740993}\n{"n": 0.5}', '{"n": true}\n{"n": 0.5}'],
)  # fmt: skip
def test_python_reads_what_arrow_would_change_or_refuse(line: str) -> None:
    lines = [KNOWN, *line.split("\n"), KNOWN]
    assert parse_with_arrow("".join(text + "\n" for text in lines).encode()) is None
    check(lines)


values: st.SearchStrategy[Any] = st.recursive(
    st.sampled_from([None, True, 3, -(2**53) - 1, 2**64, 0.5, 1e300, "x", "1", "null", "", "2019-12-01", "é,}"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("01"), inner, max_size=2),
    max_leaves=4,
)


@settings(deadline=None)
@example(rows=[{"a": [None, True]}])
@example(rows=[{"a": [[], [None, "x"]]}, {"a": None}])
@given(rows=st.lists(st.dictionaries(st.sampled_from("abc"), values, min_size=1), min_size=1, max_size=4))
def test_both_parsers_read_what_json_reads(rows: list[dict[str, Any]]) -> None:
    check([json.dumps(row, ensure_ascii=False) for row in rows])


@pytest.mark.parametrize(
    ("line", "got"),
    [
        ('{"a": 1', "delimiter at character 8"),
        ('{"a": NaN}', "NaN, which JSON does not have"),
        ('{"a": -Infinity}', "-Infinity, which JSON does not have"),
        ("[1]", "a JSON list"),
        ('{"a": 1} {"a": 2}', "Extra data"),
        ('{"a": "\xff"}', "can't decode"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, got: str) -> None:
    small_blocks(monkeypatch, 400)
    good = ['{"a": 1}'] * 120
    problem = problems_of(written(tmp_path / "a.json", "\n".join([*good, line, *good, line, ""]).encode("latin-1")))[0]
    assert (problem.where, problem.expected) == (f"{tmp_path}/a.json:121", "one JSON object in the line")
    assert got in problem.got
    assert ("to_json(path, orient='records', lines=True)" in problem.todo) == (line[0] + line[-1] != "{}")


@pytest.mark.parametrize("extension", [".jsonl", ".csv"])
def test_sparse_rows_are_read_in_small_blocks(tmp_path: Path, extension: str) -> None:
    """Another key in every row: a table of the first 256 KB alone would take 4,500 x 4,500 numbers, 160 MB."""
    rows = 12_000
    if extension == ".csv":
        lines = ["reward,state_features", *(f'1,"{{""{row}"": 1.5}}"' for row in range(rows))]
    else:
        lines = [json.dumps({"action": "a", "reward": 1, "state_features": {str(row): 1.5}}) for row in range(rows)]
    (tmp_path / f"log{extension}").write_text("\n".join(lines))
    files = list_input(str(tmp_path / f"log{extension}"), (extension,))
    blocks = list(read_blocks(files, lambda block: (block.table.nbytes, block.lines)))
    assert max(nbytes for nbytes, _ in blocks) < 1.5 * TABLE_BYTES
    first = 2 if extension == ".csv" else 1
    numbers = np.concatenate([lines for _, lines in blocks])
    np.testing.assert_array_equal(numbers, np.arange(first, rows + first))
