"""CSV files as blocks: a header, then a record for each row; a feature map is a JSON cell or a column per feature.

    block of whole records ─► cells as strings, by Arrow's parser ─► values of each column's kind

    mdp_id,sequence_number,state_features,action,reward              JSON cells: "{""0"": 0.5}"
    mdp_id,sequence_number,state_features.0,action.0,reward          a column per feature; an empty cell is absent

The kind of a column does not depend on the values in a block: mdp_id and discrete actions are strings, so the action 1
is the action named "1" if there is one, else the action with index 1. A cell that is not a value of its column's kind
stays a string, which is a fault of the row when the column is read, as in JSON lines. Records are those of RFC 4180: a
quotation mark opens a cell only at its start and closes it only at its end; inside a cell it is doubled. A newline ends
a record if an even number of quotation marks precedes it, so the line of every record is known.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
from numpy.typing import NDArray

from reagent_lite.config.column_names import MAPS, TRAINING_COLUMNS, ColumnKind, CsvFormat, kind_of_column
from reagent_lite.data.faults_by_kind import raise_unread
from reagent_lite.data.formats.blocks import Block, ColumnNames, InputFile, Position
from reagent_lite.data.formats.input_files import OTHER_ENCODING
from reagent_lite.data.formats.jsonl import (
    NamedArray,
    array_of_values,
    in_one_column,
    parse_with_arrow,
    table_of_columns,
)
from reagent_lite.data.formats.schema import find_distinct, in_one_piece, take_or_null, valid_rows
from reagent_lite.data.formats.text_files import contains, read_text
from reagent_lite.errors import DataError, Problem
from reagent_lite.strict_json import parse_json

_JSON_KINDS = ("features", "metrics", "actions")
_ABSENT = ("NA", "N/A", "null", "NULL", "None")
_WORDS = {
    **dict.fromkeys(("true", "True", "TRUE"), 1.0),
    **dict.fromkeys(("false", "False", "FALSE"), 0.0),
    **dict.fromkeys(_ABSENT, float("nan")),
}
"""Words in columns of numbers: 1 and 0, as in other formats, and absent values, which are strings among strings."""
_FLAGS = {"1.0": True, "t": True, "0.0": False, "f": False, "true": True, "false": False, "1": True, "0": False}
"""Flags: pandas writes 1.0 if a column has gaps, PostgreSQL writes t."""
_WHOLE = re.compile(r"\s*([-+]?[0-9]+)(?:\.0*)?\s*")
"""An integer; pandas writes 3.0 if a column has gaps."""
_DIGIT = re.compile("[0-9]")
_VALUE = re.compile(r"[-+]?[0-9][0-9.,eE+-]*|[\[{].*")  # a number or JSON, which no header has
DELIMITERS = ",;\t|"
_RECORDS = {sign: rf'\A(?:(?:"(?:[^"]|"")*"|[^"{sign}\r\n]*)(?:[{sign}]|\r?(?:\n|\z)))*\z' for sign in DELIMITERS}
_WHOLE_CELLS = {
    sign: re.compile(rf'(?:(?:"(?:[^"]|"")*+"|[^"{sign}\r\n]*+)(?:[{sign}]|\r?\n))*+'.encode()) for sign in DELIMITERS
}
_DECIMAL_COMMA = r"^\s*([-+]?[0-9]+),([0-9]+)\s*$"
NULLS = ("", r"\N")
"""Cells without a value; databases export null as the second."""

Offsets = NDArray[np.int64]


def read_csv(
    file: InputFile, number: int, position: Position, columns: Collection[str] | None = TRAINING_COLUMNS
) -> Iterator[Callable[[], Block]]:
    """Reads plain or compressed CSV in UTF-8, with a header; see `blocks.Reader`.

    Cells are separated by the sign of DELIMITERS that gives the header the most cells, unless `columns.csv` names it.
    If that is not a comma, numbers may have decimal commas; see CsvFormat for more. Columns other than the
    standard ones are strings.

    Raises:
        DataError: damaged compression, no header, a name twice, or malformed records, with file and line.
    """
    return read_text(file, position, _end_of_records, _CsvParser(file, number, columns).parse)


@dataclass(frozen=True, slots=True, kw_only=True)
class _HeaderCell:
    """A column of the file.

    Attributes:
        name: name in the header.
        field: name of the standard column.
        feature: the feature of the map `field` that the column holds; "" if the column is not a part of a map.
        kind: the kind of its cells.
        is_raw: whether its values are read from their text later, see raw_values.py.
        read: whether it is read; if not, the block has it without values.
    """

    name: str
    field: str
    feature: str
    kind: ColumnKind
    is_raw: bool
    read: bool


@dataclass(slots=True)
class _CsvParser:
    """Parses blocks of one file, the first of which has the header."""

    file: InputFile
    number: int
    columns: Collection[str] | None
    header: tuple[_HeaderCell, ...] = ()
    delimiter: str = ""

    def parse(self, text: bytes, line: int) -> Block:
        """Returns the rows of whole records, the first of which begins in `line`."""
        path = self.file.path
        lines, starts, stops = _records(text, line)
        if not self.delimiter:
            self.delimiter = self.file.csv.delimiter or delimiter_of(text[starts[0] : stops[0]] if len(lines) else b"")
        _require_records(text, line, path, self.delimiter)
        rows = text
        if not self.header and len(lines):
            first = text[starts[0] : stops[0] + 1]
            self.header = _header(first, self.delimiter, f"{path}:{lines[0]}", self.columns, self.file.columns)
            lines = lines[1:]
            rows = text[stops[0] + 1 :]
        elif not self.header and line > 1:
            raise DataError(Problem(f"{path}:{line}", "a header as the first record", "blank lines"))
        try:
            cells = _cells(rows, self.header, self.delimiter, self.file.csv)
        except pa.ArrowInvalid:
            _require_utf_8(text, line, path)
            _require_as_many_cells(rows, lines, self.header, self.delimiter, self.file)
            raise
        whole = [cell for cell in self.header if not cell.feature]
        maps = dict.fromkeys(cell.field for cell in self.header if cell.feature and cell.read)
        columns = [typed_cells(cell.name, cells[cell.name], cell.kind) for cell in whole if cell.read]
        columns += [_map_column(field, self.header, cells) for field in maps]
        columns += [(pa.field(cell.name, pa.null()), pa.nulls(len(lines))) for cell in whole if not cell.read]
        return Block(file=self.file, file_number=self.number, table=table_of_columns(columns), lines=lines)


def _end_of_records(text: bytes) -> int:
    """Returns the offset after the last newline that ends a record; 0 if there is none."""
    marks = text.count(b'"')
    end = len(text)
    while (at := text.rfind(b"\n", 0, end)) >= 0:
        marks -= text.count(b'"', at, end)
        if marks % 2 == 0:
            return at + 1
        end = at
    return 0


def _records(text: bytes, line: int) -> tuple[Offsets, Offsets, Offsets]:
    """Returns (line, offset, offset of the final newline) of each record; blank lines are left out."""
    data = np.frombuffer(text, np.uint8)
    marks = np.flatnonzero(data == ord('"'))
    newlines = np.flatnonzero(data == ord("\n"))
    ends = newlines[np.searchsorted(marks, newlines) % 2 == 0]
    starts = np.concatenate(([0], ends + 1))
    stops = np.concatenate((ends, [len(text)]))
    returned = (stops > starts) & (data[np.maximum(stops - 1, 0)] == ord("\r"))
    filled = stops - returned > starts
    return line + np.searchsorted(newlines, starts[filled]), starts[filled], stops[filled]


def delimiter_of(header: bytes) -> str:
    """Returns the sign that separates the cells of a header, a comma if several give as many cells."""
    text = header.decode(errors="replace")
    try:
        return max(DELIMITERS, key=lambda sign: len(next(csv.reader([text], delimiter=sign), [])))
    except csv.Error:  # a carriage return outside of quotation marks, which `_require_records` refuses
        return ","


def _require_records(text: bytes, line: int, path: str, delimiter: str) -> None:
    """Checks that quotation marks enclose whole cells, and that outside of them no carriage return stands alone.

    Raises:
        DataError: with the line in which the first other cell begins.
    """
    if contains(text, _RECORDS[delimiter]):
        return
    matched = _WHOLE_CELLS[delimiter].match(text)
    start = 0 if matched is None else matched.end()
    expected = "quotation marks around whole cells, doubled inside them, and lines that end by a newline"
    got = f"a cell that begins {text[start : start + 40].decode(errors='replace')!r}"
    raise DataError(Problem(f"{path}:{_line_of(text, start, line)}", expected, got))


def _header(
    record: bytes, delimiter: str, where: str, columns: Collection[str] | None, own_names: ColumnNames | None
) -> tuple[_HeaderCell, ...]:
    try:
        cells = next(csv.reader([record.decode()], delimiter=delimiter))
    except UnicodeDecodeError as error:
        todo = f"Write the file as UTF-8{OTHER_ENCODING.format('cp1252')}"
        raise DataError(Problem(where, "a header in UTF-8", str(error), todo)) from error
    # pandas writes its row labels as a column without a name
    names = [name or f"Unnamed: {index}" for index, name in enumerate(cells)]
    header = []
    problems = []
    for name in names:
        column, dot, feature = name.partition(".")
        meaning = name if own_names is None else own_names.meaning(name)
        is_part = bool(dot) and column in MAPS
        if is_part and not feature:
            problems.append(Problem(where, f"a feature's id or name after {name!r}", "none"))
        field = column if is_part else meaning
        # a user's own column of one feature is joined to its map later, see rows/column_mapping.py
        is_own_feature = meaning != name and "." in meaning
        of_map = (name if is_part else meaning).partition(".")[0] if is_part or is_own_feature else ""
        kind = kind_of_column(field)
        if of_map:
            kind = "number" if of_map == "metrics" else "value"
        is_raw = own_names is not None and name in own_names.raw
        header.append(
            _HeaderCell(
                name=name,
                field=field,
                feature=feature if is_part else "",
                kind="any" if is_raw else kind,
                is_raw=is_raw,
                read=columns is None or (field if is_part else name) in columns,
            )
        )
    problems += [
        Problem(where, "a header that names each column once", f"{name!r} {names.count(name)} times")
        for name in sorted({name for name in names if names.count(name) > 1})
    ]
    parts = {cell.field: cell.name for cell in reversed(header) if cell.feature}
    problems += [
        Problem(where, f"{field} once", f"a column {field!r} and a column {part!r}", "Keep one")
        for field, part in sorted(parts.items())
        if field in names
    ]
    values = [name for name in names if _VALUE.fullmatch(name)]
    if values and own_names is None and not {cell.field for cell in header} & set(TRAINING_COLUMNS):
        expected = "a header with the names of the columns"
        problems.append(Problem(where, expected, f"a value, {values[0][:60]!r}", "Write the header as the first line"))
    if problems:
        raise DataError(problems)
    return tuple(header)


def _cells(
    text: bytes,
    header: tuple[_HeaderCell, ...],
    delimiter: str,
    written: CsvFormat,
    invalid: Callable[[pa.csv.InvalidRow], str] | None = None,
) -> dict[str, pa.Array]:
    """Returns the cells of the columns to read, as strings; null if empty.

    Args:
        text: whole records, without the header.
        header: the columns.
        delimiter: the sign between cells; if it is not a comma and no decimal mark is given, decimal commas become
            points.
        written: how the file is written.
        invalid: called with each record that has another number of cells than the header.

    Raises:
        ArrowInvalid: there is such a record and no `invalid`, or text that is not UTF-8.
    """
    if not header:
        return {}
    names = [cell.name for cell in header]
    read = pa.csv.ReadOptions(use_threads=False, column_names=names, block_size=len(text) + 2)
    parse = pa.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True, invalid_row_handler=invalid)
    convert = pa.csv.ConvertOptions(
        column_types=dict.fromkeys(names, pa.string()),
        include_columns=[cell.name for cell in header if cell.read],
        null_values=[*NULLS, *written.null],
        strings_can_be_null=True,
        quoted_strings_can_be_null=True,
    )
    # Arrow drops a byte order mark at the start of its input; after a newline it is part of the first cell
    cells = pa.csv.read_csv(pa.BufferReader(b"\n" + text), read, parse, convert)
    columns = {name: in_one_piece(cells.column(name)) for name in cells.column_names}
    if written.decimal is not None:
        plain = {cell.name for cell in header if cell.kind in _NUMBERS or not (cell.field or cell.is_raw)}
        return {
            name: _with_points(column, written.decimal) if name in plain else column for name, column in columns.items()
        }
    if delimiter == ",":
        return columns
    return {name: pc.replace_substring_regex(column, _DECIMAL_COMMA, r"\1.\2") for name, column in columns.items()}


def _with_points(cells: pa.Array, decimal: str) -> pa.Array:
    """Returns cells in which numbers have a decimal point and no marks between groups of digits."""
    group = rf"[{',' if decimal == '.' else '.'} '\x{{a0}}\x{{202f}}\x{{2019}}]"
    number = rf"^\s*[-+]?([0-9]+|[0-9]{{1,3}}({group}[0-9]{{3}})+)([{decimal}][0-9]+)?\s*$"
    without = pc.replace_substring_regex(cells, group, "")
    with_points = without if decimal == "." else pc.replace_substring(without, ",", ".")
    return pc.if_else(pc.match_substring_regex(cells, number), with_points, cells)


def _require_as_many_cells(
    text: bytes, lines: Offsets, header: tuple[_HeaderCell, ...], delimiter: str, file: InputFile
) -> None:
    problems: list[Problem] = []

    def note(row: pa.csv.InvalidRow) -> str:
        expected = f"{row.expected_columns} cells, as the header has"
        problems.append(Problem(f"{file.path}:{lines[row.number - 1]}", expected, str(row.actual_columns)))
        return "skip"

    _cells(text, header, delimiter, file.csv, note)
    raise_unread(problems)


def _require_utf_8(text: bytes, line: int, path: str) -> None:
    try:
        text.decode()
    except UnicodeDecodeError as error:
        where = f"{path}:{_line_of(text, error.start, line)}"
        todo = f"Write the file as UTF-8{OTHER_ENCODING.format('cp1252')}"
        raise DataError(Problem(where, "text in UTF-8", str(error), todo)) from None


def _line_of(text: bytes, offset: int, line: int) -> int:
    """Returns the line of an offset in a text that begins in `line`."""
    return line + text.count(b"\n", 0, offset)


def typed_cells(name: str, cells: pa.Array, kind: ColumnKind) -> NamedArray:
    """Returns cells of text as values of a kind; a cell of another kind stays a string.

    Actions that begin with a brace are JSON.
    """
    if kind in _JSON_KINDS:
        return _json_cells(name, cells, json_cell)
    if kind == "action" and pc.any(pc.match_substring_regex(cells, r"^\s*\{"), min_count=0).as_py():
        return _json_cells(name, cells, lambda cell: json_cell(cell) if cell.lstrip().startswith("{") else cell)
    if kind not in _NUMBERS:
        return pa.field(name, cells.type), cells
    of_kind, value_of = _NUMBERS[kind]
    try:
        return pa.field(name, of_kind), cells.cast(of_kind)
    except pa.ArrowInvalid:
        return _by_distinct(name, cells, value_of, words=kind == "value")


def _by_distinct(name: str, cells: pa.Array, value_of: Callable[[str], Any], *, words: bool = False) -> NamedArray:
    """Returns cells as values; each distinct cell is read once.

    Args:
        name: name of the column.
        cells: the cells, as strings.
        value_of: returns the value of a cell.
        words: whether to read them by `words_as_texts`.
    """
    distinct, codes = find_distinct(cells)
    texts = distinct.to_pylist()
    read = [value_of(text) for text in texts]
    if words:
        read = words_as_texts(read, texts)
    field, values = array_of_values(name, read)
    return field, take_or_null(values, codes)


def words_as_texts(values: list[Any], cells: Sequence[str]) -> list[Any]:
    """Returns the values of cells; if some are strings, those of cells without a digit are strings too: true, nan."""
    if not any(isinstance(value, str) for value in values):
        return values
    return [value if _DIGIT.search(cell) else cell for value, cell in zip(values, cells, strict=True)]


def _json_cells(name: str, cells: pa.Array, value_of: Callable[[str], Any]) -> NamedArray:
    documents = pc.binary_join_element_wise("{" + json.dumps(name) + ":", pc.fill_null(cells, "null"), "}\n", "")
    table = parse_with_arrow("".join(documents.to_pylist()).encode())
    # a cell that closes the object around it and opens another one would add a name or a row
    if table is not None and table.column_names == [name] and table.num_rows == len(cells):
        return table.schema.field(0), in_one_piece(table.column(0))
    return _by_distinct(name, cells, value_of)


def json_cell(cell: str) -> Any:
    """Returns the value of a cell that is JSON, or the cell itself if it is not."""
    try:
        return parse_json(cell.encode())
    except ValueError:
        return cell


def _number(cell: str) -> float | str:
    if cell in _WORDS:
        return _WORDS[cell]
    try:
        return float(cell) if cell.isascii() and "_" not in cell else cell  # Python also reads 1_000 and other digits
    except ValueError:
        return cell


def _integer(cell: str) -> int | str:
    digits = _WHOLE.fullmatch(cell)
    return int(digits[1]) if digits else cell


def _flag(cell: str) -> bool | str:
    return _FLAGS.get(cell.strip().lower(), cell)


_NUMBERS: dict[str, tuple[pa.DataType, Callable[[str], Any]]] = {
    "number": (pa.float64(), _number),
    "value": (pa.float64(), _number),
    "integer": (pa.int64(), _integer),
    "order": (pa.int64(), _integer),
    "flag": (pa.bool_(), _flag),
}
"""Arrow type of each kind of numbers, and the function that reads a cell which Arrow does not cast to it."""


def _map_column(field: str, header: tuple[_HeaderCell, ...], cells: dict[str, pa.Array]) -> NamedArray:
    """Returns the maps of a field that is spread over columns.

    A row with empty cells only has no map, except in state_features: a state without any known feature is a state.
    """
    parts = [cell for cell in header if cell.feature and cell.field == field]
    of_feature = {cell.feature: typed_cells(cell.feature, cells[cell.name], cell.kind) for cell in parts}
    present = np.logical_or.reduce([valid_rows(cells[cell.name]) for cell in parts])
    return in_one_column(field, of_feature, present | (field == "state_features"))
