"""JSON lines as Arrow tables: parsed by Arrow, or by Python's json if Arrow may be wrong.

    block of whole lines ─► in doubt? ─► Arrow's parser ─► rows, types and numbers as expected? ─► table
                              └────────────────────────────── otherwise ─► json, line by line ─┘

A block is in doubt if it has bytes that Arrow may misread. A column whose values have no common Arrow type (an action
that is 3 in one row and "left" in another) becomes text: strings of JSON, marked as such.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.json
from numpy.typing import NDArray

from reagent_lite.data.faults_by_kind import raise_unread
from reagent_lite.data.formats.blocks import Block, InputFile, Position
from reagent_lite.data.formats.input_files import ONE_A_LINE
from reagent_lite.data.formats.schema import TEXT_METADATA, fill_nulls, is_text
from reagent_lite.data.formats.text_files import contains, read_text
from reagent_lite.errors import MAX_PROBLEMS, DataError, Problem
from reagent_lite.strict_json import MAX_DEPTH, is_deep, parse_json

_OBJECT = re.compile(rb"\s*\{.*\}\s*")
_KEY = re.compile(rb'"((?:[^"\\]|\\.)*)"\s*:')
_EXACT_BELOW = float(1 << 53)  # integers at or above it are not exact as float64
NamedArray = tuple[pa.Field, pa.Array]
"""A column: its name with its type, and its values."""


def read_json_lines(file: InputFile, number: int, position: Position) -> Iterator[Callable[[], Block]]:
    """Reads plain or compressed JSON lines; see `blocks.Reader`.

    Raises:
        DataError: damaged compression, a line that is not a JSON object, NaN or Infinity, with file and line.
    """
    return read_text(file, position, lambda text: text.rfind(b"\n") + 1, partial(_block, file, number), _table_bytes)


def _table_bytes(text: bytes) -> int:
    """Returns the bytes of a table with a number for every key in every row."""
    return 8 * text.count(b"\n") * len({*_KEY.findall(text)})


def _block(file: InputFile, number: int, text: bytes, line: int) -> Block:
    table = parse_with_arrow(text)
    if table is not None:
        lines = np.arange(line, line + table.num_rows)
    else:
        table, lines = parse_with_python(text, line, file.path)
    block = Block(file=file, file_number=number, table=table, lines=lines)
    if table.num_rows == 1 and line == 1 and _is_table_of_pandas(table.schema):
        raise DataError(Problem(block.where(0), "one row in the line", "a whole table in one object", ONE_A_LINE))
    return block


def _is_table_of_pandas(row: pa.Schema) -> bool:
    """Whether the types of an object are those of pandas' to_json(path), by columns, split, table or index."""
    if {"data"} < {*row.names} <= {"columns", "index", "data", "schema"}:
        return True
    if len(row) < 2 or not all(pa.types.is_struct(column.type) for column in row):
        return False
    keys = {tuple(member.name for member in column.type) for column in row}
    numbers = tuple(map(str, range(len(next(iter(keys))))))
    by_columns = keys == {numbers} and len(numbers) > 1
    if "state_features" in row.names:  # of a single row they are numbers or strings
        by_columns = by_columns and all(pa.types.is_nested(value.type) for value in row.field("state_features").type)
    return by_columns or row.names == list(map(str, range(len(row))))


def parse_with_arrow(text: bytes) -> pa.Table | None:
    """Parses whole lines with Arrow; returns None if the result may be wrong."""
    if not text:
        return None
    ends = np.flatnonzero(np.frombuffer(text, np.uint8) == ord("\n")) + 1
    bounds = np.concatenate(([0], ends if text.endswith(b"\n") else np.append(ends, len(text))))
    if _in_doubt(text, bounds):
        return None
    table = _arrow_table(text, None)
    if table is not None and (dated := [field for field in table.schema if _as_string(field.type) != field.type]):
        # Arrow reads strings that look like dates as timestamps; logs mean the strings.
        table = _arrow_table(text, pa.schema([pa.field(field.name, _as_string(field.type)) for field in dated]))
    if table is None or table.num_rows != len(bounds) - 1 or len(set(table.column_names)) != table.num_columns:
        return None
    table = table.combine_chunks()
    return table if all(_is_exact(chunk) for column in table.columns for chunk in column.chunks) else None


def _in_doubt(text: bytes, bounds: NDArray[np.int64]) -> bool:
    """Whether Arrow's parser may misread the lines, or end the process.

    It may if a line is not one object, bytes are not UTF-8, a comma stands before the end of an object or list, or
    there are many levels. Two objects in one line are noticed later, by the number of rows.

    Args:
        text: whole lines.
        bounds: [n+1] byte offsets of their starts and of the end.
    """
    signs = np.frombuffer(text, np.uint8)
    lasts = bounds[1:] - 1
    for ending in b"\n\r":
        lasts = lasts - (signs[lasts] == ending)
    if (signs[bounds[:-1]] != ord("{")).any() or (signs[lasts] != ord("}")).any():
        return True
    opening = np.flatnonzero((signs | 0x20) == ord("{"))  # [ and { differ by this bit
    may_be_deep = np.flatnonzero(np.diff(np.searchsorted(opening, bounds)) > MAX_DEPTH)
    if any(is_deep(text[bounds[line] : bounds[line + 1]]) for line in may_be_deep):
        return True
    if not text.isascii():
        try:
            str(text, "utf-8")
        except UnicodeDecodeError:
            return True
    return contains(text, r",[ \t\r\n]*[\]}]")


def _arrow_table(text: bytes, schema: pa.Schema | None) -> pa.Table | None:
    read = pa.json.ReadOptions(use_threads=False, block_size=len(text) + 1)
    parse = pa.json.ParseOptions(explicit_schema=schema, newlines_in_values=False)
    try:
        table = pa.json.read_json(pa.BufferReader(text), read_options=read, parse_options=parse)
        table.validate()  # Arrow 26 loses a null that begins the first list of a column
        return table
    except (pa.ArrowException, UnicodeDecodeError):
        return None


def _as_string(kind: pa.DataType) -> pa.DataType:
    """Returns a type with strings in place of times."""
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(child.name, _as_string(child.type)) for child in kind])
    if pa.types.is_list(kind):
        return pa.list_(_as_string(kind.value_type))
    return pa.string() if pa.types.is_temporal(kind) else kind


def _is_exact(array: pa.Array) -> bool:
    """Whether all numbers are finite, and none can be an integer that float64 has rounded."""
    if pa.types.is_struct(array.type):
        return all(_is_exact(child) for child in array.flatten())
    if pa.types.is_list(array.type):
        return _is_exact(array.flatten())
    return not pa.types.is_floating(array.type) or bool((np.abs(fill_nulls(array, 0)) < _EXACT_BELOW).all())


def parse_with_python(text: bytes, first_line: int, path: str) -> tuple[pa.Table, NDArray[np.int64]]:
    """Parses whole lines with the json module; returns the rows and their lines, without blank lines.

    Raises:
        DataError: lines that are not JSON objects.
    """
    rows: list[dict[str, Any]] = []
    lines: list[int] = []
    problems: list[Problem] = []
    for line, content in enumerate(text.split(b"\n"), first_line):
        if not content.strip():
            continue
        try:
            row = parse_json(content)
            if not isinstance(row, dict):
                raise ValueError(f"a JSON {type(row).__name__}")
        except ValueError as error:
            got = f"{error}; it starts {content[:40].decode(errors='replace')!r}"
            todo = "" if _OBJECT.fullmatch(content) else ONE_A_LINE
            if content.strip() in (b"{", b"[{"):
                got = "the first line of an object over several lines"
            problems.append(Problem(f"{path}:{line}", "one JSON object in the line", got, todo))
            if len(problems) == MAX_PROBLEMS:
                break
            continue
        rows.append(row)
        lines.append(line)
    raise_unread(problems)
    names = dict.fromkeys(name for row in rows for name in row)
    columns = [array_of_values(name, [row.get(name) for row in rows]) for name in names]
    # An Arrow table without columns has no rows. Rows that are all {} are no log, but errors should count them.
    table = table_of_columns(columns) if columns else pa.table({"": pa.nulls(len(rows))})
    return table, np.array(lines, np.int64)


def table_of_columns(columns: Sequence[NamedArray]) -> pa.Table:
    """Returns the table of fields and their arrays."""
    return pa.table([array for _, array in columns], pa.schema([field for field, _ in columns]))


def array_of_values(name: str, values: list[Any]) -> NamedArray:
    """Returns JSON values as a column of their common Arrow type, or as text if they have none."""
    kinds = {type(value) for value in values} - {type(None)}
    # Arrow would read true as 1.0 if there is also a 0.5
    if bool not in kinds or len(kinds) == 1:
        try:
            array = pa.array(values)
            return pa.field(name, array.type), array
        except (pa.ArrowException, OverflowError):
            pass
    texts = pa.array([None if value is None else json.dumps(value) for value in values], pa.string())
    return pa.field(name, texts.type, metadata=TEXT_METADATA), texts


def in_one_column(name: str, parts: Mapping[str, NamedArray], present: NDArray[np.bool_]) -> NamedArray:
    """Returns the columns of single features as one column of maps, null where `present` [n] is false."""
    arrays = [array for _, array in parts.values()]
    if texts := [feature for feature, (field, _) in parts.items() if is_text(field)]:
        rows = pa.table(arrays, list(parts)).to_pylist()
        for row in rows:
            row |= {feature: json.loads(row[feature]) for feature in texts if row[feature] is not None}
        return array_of_values(
            name, [row if has_map else None for row, has_map in zip(rows, present.tolist(), strict=True)]
        )
    struct = pa.StructArray.from_arrays(arrays, list(parts), mask=pa.array(~present))
    return pa.field(name, struct.type), struct
