"""CSV files as blocks: a header, a row a record, feature maps as JSON cells or as columns of their own.

    block of whole records ─► cells by Arrow's parser, types given ─► JSON cells by that of JSON lines
                              by Python where a block is not as expected, which names every fault

    mdp_id,sequence_number,state_features,action,reward              JSON cells: "{""0"": 0.5}"
    mdp_id,sequence_number,state_features.0,action.0,reward          a column a feature; an empty cell is absent

The type of a column never depends on what a block holds: mdp_id and discrete actions are strings, so an action 1 is the
name "1" if there is one, and else the index. Records are those of RFC 4180: a quotation mark opens a cell only
at the cell's start and closes it only at its end; inside it is doubled. A newline ends a record where an even number of
marks stands before it, so the line of every record is known.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
from numpy.typing import NDArray

from reagent_lite.config.columns import MAPS, TRAINING_COLUMNS, kind_of
from reagent_lite.data.faults_by_kind import raise_unread
from reagent_lite.data.formats.blocks import Block, Position
from reagent_lite.data.formats.files import InputFile, OwnNames
from reagent_lite.data.formats.jsonl import EXACT_BELOW, column_of, parse_with_arrow, table_of_columns
from reagent_lite.data.formats.schema import INTEGER_OR_TIME, in_one_piece, microseconds_of, valid_rows
from reagent_lite.data.formats.text_files import BYTE_ORDER_MARK, contains, read_text
from reagent_lite.errors import MAX_PROBLEMS, DataError, Problem
from reagent_lite.strict_json import parse_json

_TYPES = {"number": pa.float64(), "flag": pa.bool_(), "order": pa.int64(), "integer": pa.int64()}
WORDS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
"""Words that count as 1 and 0 in columns of numbers, as in other formats."""
# pandas writes 1.0 where a column has gaps, PostgreSQL writes t.
_FLAGS = {**WORDS, "1": True, "1.0": True, "t": True, "0": False, "0.0": False, "f": False}
_JSON = """Write {"0": 0.5} or ["left", "right"] as json.dumps does; Python's own text of a dict or list is not JSON"""
_NUMERALS = "Write numbers as 1234.5, and leave cells without one empty"
_RECORDS = r'\A(?:(?:"(?:[^"]|"")*"|[^",\r\n]*)(?:,|\r?(?:\n|\z)))*\z'
_CELL = re.compile(rb'(?:"((?:[^"]|"")*+)"|([^",\r\n]*+))(,|\r?(?:\n|\Z))')
_QUOTED = re.compile(rb'"(?:[^"]|"")*+"')

Column = tuple[pa.Field, pa.Array]
Lines = NDArray[np.int64]


def read_csv(
    file: InputFile, number: int, position: Position, columns: Collection[str] | None = TRAINING_COLUMNS
) -> Iterator[Callable[[], Block]]:
    """Reads plain or compressed CSV in UTF-8, separated by commas, with a header; see `blocks.Reader`.

    Columns that no log has are strings.

    Raises:
        DataError: damaged compression, no header, a name twice, or what is wrong with a row, with file and line.
    """
    return read_text(file, position, _end_of_records, _CsvParser(file, number, columns).parse)


@dataclass(frozen=True, slots=True, kw_only=True)
class _HeaderCell:
    """What a column of the file is.

    Attributes:
        name: in the header.
        field: the contract's name of it.
        feature: the feature of the map `field`, where the column holds one number of a map; "" else.
        kind: the kind of its cells.
        read: whether it is read; else only its name is kept.
    """

    name: str
    field: str
    feature: str
    kind: pa.DataType
    read: bool


@dataclass(slots=True)
class _CsvParser:
    """Parses blocks of one file, the first of which has the header."""

    file: InputFile
    number: int
    columns: Collection[str] | None
    header: tuple[_HeaderCell, ...] = ()

    def parse(self, text: bytes, line: int) -> Block:
        """Returns the rows of whole records, the first of which begins in `line`."""
        path = self.file.path
        if not self.header:
            if (first := next(_records(text, line, path), None)) is not None:
                at, cells, end = first
                self.header = _header(cells, f"{path}:{at}", self.columns, self.file.columns)
                text, line = text[end:], line + text.count(b"\n", 0, end)
            elif line > 1:
                raise DataError(Problem(f"{path}:{line}", "a header as the first record", "blank lines"))
        cells, lines = _by_arrow(text, line, self.header) or _by_python(text, line, self.header, path)
        columns: list[Column] = []
        for one in self.header:
            if one.read and not one.feature:
                columns.append(_plain_column(one, cells, lines, path))
        for field in dict.fromkeys(one.field for one in self.header if one.read and one.feature):
            columns.append(_map_column([one for one in self.header if one.field == field and one.feature], cells))
        unread = [one for one in self.header if not one.read and not one.feature]
        columns += [(pa.field(one.name, pa.null()), pa.nulls(len(lines))) for one in unread]
        return Block(file=self.file, file_number=self.number, table=table_of_columns(columns), lines=lines)


def _end_of_records(text: bytes) -> int:
    """Returns the offset behind the last newline that ends a record, 0 where there is none."""
    marks, end = text.count(b'"'), len(text)
    while (at := text.rfind(b"\n", 0, end)) >= 0:
        marks -= text.count(b'"', at, end)
        if marks % 2 == 0:
            return at + 1
        end = at
    return 0


def _records(text: bytes, line: int, path: str) -> Iterator[tuple[int, list[bytes], int]]:
    """Yields (line, cells, offset behind the end) of each record but blank lines.

    Raises:
        DataError: quotation marks that neither open nor close a cell, carriage returns alone outside quoted cells.
    """
    at = 0
    while at < len(text):
        start, cells, separator = at, list[bytes](), b","
        while separator == b",":
            match = _CELL.match(text, at)
            if match is None:
                raise DataError(_no_cell(text, at, line + text.count(b"\n", start, at), path))
            cells.append(match[2] if match[1] is None else match[1].replace(b'""', b'"'))
            at, separator = match.end(), match[3]
        if text[start : at - len(separator)]:
            yield line, cells, at
        line += text.count(b"\n", start, at)


def _no_cell(text: bytes, start: int, begins: int, path: str) -> Problem:
    """Returns what is wrong with the cell that begins at an offset, in line `begins`."""
    at = start
    if text.startswith(b'"', start):
        quoted = _QUOTED.match(text, start)
        if quoted is None:
            got = "a file that ends inside the quoted cell that begins here"
            return Problem(f"{path}:{begins}", "quoted cells that end", got, "Copy the file again")
        at = quoted.end() - 1
    else:
        while text[at] not in b'"\r':
            at += 1
    here = begins + text.count(b"\n", start, at)
    if text.startswith(b"\r", at):
        # other readers of CSV end a record there
        todo = "End lines by a newline, with or without a carriage return, and quote cells that have one"
        return Problem(f"{path}:{here}", "lines that end by a newline", "a carriage return alone", todo)
    shown = text[max(0, at - 20) : at + 20].decode(errors="replace")
    of_cell = "" if begins == here else f", of a cell that begins in line {begins}"
    expected = "quotation marks around whole cells, doubled inside them"
    return Problem(f"{path}:{here}", expected, f"one in the middle of {shown!r}{of_cell}")


def _header(
    record: list[bytes], where: str, columns: Collection[str] | None, own: OwnNames | None
) -> tuple[_HeaderCell, ...]:
    try:
        cells = [cell.decode() for cell in record]
    except UnicodeDecodeError as error:
        raise DataError(Problem(where, "a header in UTF-8", str(error), "Write the file as UTF-8")) from error
    # pandas writes its row labels as a column without a name
    names = [name or f"Unnamed: {index}" for index, name in enumerate(cells)]
    found = []
    problems = []
    for name in names:
        column, dot, feature = name.partition(".")
        meaning = name if own is None else own.meaning(name)
        is_part = bool(dot) and column in MAPS
        if is_part and not feature:
            problems.append(Problem(where, f"a feature's id or name after {name!r}", "none"))
        field = column if is_part else meaning
        # a user's own column of one feature is put into its map with the others, see rows/own_columns.py
        number = is_part or (meaning != name and "." in meaning)
        found.append(
            _HeaderCell(
                name=name,
                field=field,
                feature=feature if is_part else "",
                kind=_TYPES.get("number" if number else kind_of(field), pa.string()),
                read=columns is None or (field if is_part else name) in columns,
            )
        )
    for name in sorted({name for name in names if names.count(name) > 1}):
        problems.append(Problem(where, "a header that names each column once", f"{name!r} {names.count(name)} times"))
    for field in sorted({one.field for one in found if one.feature} & set(names)):
        part = next(one.name for one in found if one.feature and one.field == field)
        problems.append(Problem(where, f"{field} once", f"a column {field!r} and a column {part!r}", "Keep one"))
    known = {one.field.partition(".")[0] for one in found if one.field != one.name or one.field in TRAINING_COLUMNS}
    separated = any(one in cells[0] for one in ";\t|")
    # a log with names of its own is told which of them are missing
    if not known & set(TRAINING_COLUMNS) and (separated or own is None):
        todo = "Separate cells by commas" if separated else "Write it as the first line"
        expected = "a header with names of columns like state_features"
        problems.append(Problem(where, expected, repr(cells[0][:60]), todo))
    if problems:
        raise DataError(problems)
    return tuple(found)


def _by_arrow(text: bytes, line: int, header: tuple[_HeaderCell, ...]) -> tuple[pa.Table, Lines] | None:
    """Returns the columns that are read, and the line of each record; None where Arrow may read something else."""
    if text.startswith(BYTE_ORDER_MARK) or not contains(text, _RECORDS):
        return None  # Arrow leaves out a mark, and only at a file's start it is not part of a cell
    data = np.frombuffer(text, np.uint8)
    marks, newlines = np.flatnonzero(data == ord('"')), np.flatnonzero(data == ord("\n"))
    ends = newlines[np.searchsorted(marks, newlines) % 2 == 0]
    starts, stops = np.concatenate(([0], ends + 1)), np.concatenate((ends, [len(text)]))
    returned = (stops > starts) & (data[np.maximum(stops - 1, 0)] == ord("\r")) if text else np.array([False])
    lines = line + np.searchsorted(newlines, starts[stops - returned > starts])
    read = pa.csv.ReadOptions(use_threads=False, column_names=[one.name for one in header], block_size=len(text) + 1)
    convert = pa.csv.ConvertOptions(
        column_types={one.name: one.kind for one in header},
        include_columns=[one.name for one in header if one.read],
        null_values=[""],
        strings_can_be_null=True,
        quoted_strings_can_be_null=True,
        true_values=[word for word, true in _FLAGS.items() if true],
        false_values=[word for word, true in _FLAGS.items() if not true],
    )
    try:
        cells = pa.csv.read_csv(pa.BufferReader(text), read, pa.csv.ParseOptions(newlines_in_values=True), convert)
    except pa.ArrowException:
        return None
    return (cells, lines) if cells.num_rows == len(lines) else None


def _by_python(text: bytes, line: int, header: tuple[_HeaderCell, ...], path: str) -> tuple[pa.Table, Lines]:
    """Returns the columns that are read, cell by cell, and the line of each record.

    Raises:
        DataError: naming cells that are not what their column holds.
    """
    values: dict[str, list[Any]] = {one.name: [] for one in header if one.read}
    lines: list[int] = []
    problems: list[Problem] = []
    for at, cells, _ in _records(text, line, path):
        where = f"{path}:{at}"
        lines.append(at)
        if len(cells) != len(header):
            problems.append(Problem(where, f"{len(header)} cells, as the header has", str(len(cells))))
        for one, cell in zip(header, cells, strict=False):
            try:
                value = _value_of(cell.decode(), one) if cell and one.read else None
            except UnicodeDecodeError as error:
                problems.append(Problem(where, "UTF-8", str(error), "Write the file as UTF-8"))
            except ValueError as error:
                todo = _NUMERALS if pa.types.is_floating(one.kind) else ""
                got = repr(cell[:60].decode(errors="replace"))
                problems.append(Problem(where, f"{error} in {one.name}", got, todo))
            else:
                values.get(one.name, []).append(value)
        if len(problems) >= MAX_PROBLEMS:
            break
    raise_unread(problems)
    columns: list[Column] = []
    for one in (one for one in header if one.read):
        if kind_of(one.field) == "order":  # times stay texts: whether integers stand beside them shows in all blocks
            columns.append(column_of(one.name, values[one.name]))
        else:
            columns.append((pa.field(one.name, one.kind), pa.array(values[one.name], one.kind)))
    return table_of_columns(columns), np.array(lines, np.int64)


def _value_of(cell: str, column: _HeaderCell) -> Any:
    """Returns the value of a cell; a ValueError says what it should be."""
    if pa.types.is_string(column.kind):
        return cell
    if pa.types.is_boolean(column.kind):
        if cell in _FLAGS:
            return _FLAGS[cell]
        raise ValueError("true or false, or 1 or 0")
    floating, ordered = pa.types.is_floating(column.kind), kind_of(column.field) == "order"
    if ordered and microseconds_of(cell) is not None:
        return cell
    try:
        if "_" in cell:
            raise ValueError  # Python's own way to group digits
        number = float(WORDS.get(cell, cell)) if floating else float(cell)
        # pandas writes integers as 3.0 where a column has gaps
        value = number if floating else int(number) if abs(number) < EXACT_BELOW else int(cell)
        if value != number and abs(number) < EXACT_BELOW:
            raise ValueError
    except ValueError:
        raise ValueError("a number" if floating else INTEGER_OR_TIME if ordered else "an integer") from None
    if not floating and not -(1 << 63) <= value < 1 << 63:
        raise ValueError("a 64-bit integer")
    return value


def _plain_column(column: _HeaderCell, table: pa.Table, lines: Lines, path: str) -> Column:
    """Returns a column of cells, those of JSON parsed; actions are JSON where one of them begins with a brace."""
    kind = kind_of(column.field)
    array = in_one_piece(table.column(column.name))
    has_maps = kind == "action" and pc.any(pc.match_substring_regex(array, r"^\s*\{"), min_count=0).as_py()
    if not has_maps and kind not in ("features", "metrics", "actions"):
        return table.schema.field(column.name), array
    cells = pc.fill_null(array, "null")
    documents = pc.binary_join_element_wise("{" + json.dumps(column.name) + ":", cells, "}\n", "")
    table = parse_with_arrow("".join(documents.to_pylist()).encode())
    # a cell that closes the document's brace and opens another is not JSON by itself
    if table is not None and table.column_names == [column.name] and table.num_rows == len(array):
        return table.schema.field(0), in_one_piece(table.column(0))
    return column_of(column.name, _json_by_python(column.name, array, lines, path, may_be_name=kind == "action"))


def _json_by_python(name: str, array: pa.Array, lines: Lines, path: str, *, may_be_name: bool) -> list[Any]:
    """Returns the values of JSON cells by the json module; an action that does not begin with a brace is a name.

    Raises:
        DataError: naming lines whose cells are not JSON.
    """
    problems: list[Problem] = []
    values: list[Any] = []
    for line, cell in zip(lines.tolist(), array.to_pylist(), strict=True):
        try:
            is_json = cell is not None and (not may_be_name or cell.lstrip().startswith("{"))
            values.append(parse_json(cell.encode()) if is_json else cell)
        except ValueError as error:
            got = f"{error}; the cell starts {cell[:40]!r}"
            problems.append(Problem(f"{path}:{line}", f"JSON in {name}", got, _JSON))
            if len(problems) == MAX_PROBLEMS:
                break
    raise_unread(problems)
    return values


def _map_column(parts: list[_HeaderCell], cells: pa.Table) -> Column:
    """Returns the struct of a map that is spread over columns.

    A row without any cell has no map, but for state_features: a state of which nothing is known is a state.
    """
    arrays, field = [in_one_piece(cells.column(one.name)) for one in parts], parts[0].field
    mask = None
    if field != "state_features":
        mask = pa.array(~np.logical_or.reduce([valid_rows(array) for array in arrays]))
    struct = pa.StructArray.from_arrays(arrays, [one.feature for one in parts], mask=mask)
    return pa.field(field, struct.type), struct
