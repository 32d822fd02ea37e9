"""CSV files as blocks: a header, a row a record, feature maps as JSON cells or as columns of their own.

    block of whole records ─► quotation marks checked ─► cells by Arrow's parser, types given ─► JSON cells by that
                                                         (by Python where it refuses one)        of JSON lines

    mdp_id,sequence_number,state_features,action,reward              JSON cells: "{""0"": 0.5}"
    mdp_id,sequence_number,state_features.0,action.0,reward          a column a feature; an empty cell is absent

Types are the columns' own and never depend on what a block holds: mdp_id and discrete actions are strings, so an action
1 is the name "1" if there is one, and else the index. Records are those of RFC 4180: a quotation mark opens a cell only
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
from reagent_lite.data.formats.blocks import Block, Position
from reagent_lite.data.formats.files import InputFile, OwnNames
from reagent_lite.data.formats.jsonl import EXACT_BELOW, column_of, parse_with_arrow, table_of_columns
from reagent_lite.data.formats.schema import in_one_piece, microseconds_of, valid_rows
from reagent_lite.data.formats.text_files import BYTE_ORDER_MARK, contains, read_text
from reagent_lite.errors import MAX_PROBLEMS, DataError, Problem, raise_any
from reagent_lite.strict_json import parse_json

_TYPES = {"number": pa.float64(), "flag": pa.bool_(), "order": pa.int64(), "integer": pa.int64()}
# pandas writes 1.0 where a column has gaps, PostgreSQL writes t.
_TRUE, _FALSE = ("true", "True", "TRUE", "1", "1.0", "t"), ("false", "False", "FALSE", "0", "0.0", "f")
_QUOTED = re.compile(rb'"(?:[^"]|"")*+"')
_RECORDS = re.compile(rb'(?:(?:"(?:[^"]|"")*+"|[^",\r\n]*+)(?:,|\r?(?:\n|\Z)))*+')
_RECORDS_RE2 = r'\A(?:(?:"(?:[^"]|"")*"|[^",\r\n]*)(?:,|\r?(?:\n|\z)))*\z'
_CELL = re.compile(r'"((?:[^"]|"")*)"|([^,]*)')

Column = tuple[pa.Field, pa.Array]


def read_csv(
    file: InputFile, number: int, position: Position, columns: Collection[str] | None = TRAINING_COLUMNS
) -> Iterator[Callable[[], Block]]:
    """Yields the parsing of each block of a CSV file.

    Args:
        file: plain or compressed CSV, UTF-8, separated by commas, with a header.
        number: the file's place in the input.
        position: kept up to date with what has been read.
        columns: those that are read; of others only the names are kept. None reads all, those no log has as strings.

    Raises:
        DataError: damaged compression, no header, a name twice, or what is wrong with a row, with file and line.
    """
    return read_text(file, position, _end_of_records, _CsvParser(file, number, columns).parse)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """What the columns of a file are.

    Attributes:
        kinds: type of each column of the file, in order.
        dense: {column of a log: {feature: name of the file's column}} of maps that are spread over columns.
        plain: columns that are read as they are.
        ignored: columns of which only the names are kept.
        fields: {column that is read as it is: the contract's name of it}.
    """

    kinds: dict[str, pa.DataType]
    dense: dict[str, dict[str, str]]
    plain: tuple[str, ...]
    ignored: tuple[str, ...]
    fields: dict[str, str]

    @property
    def read(self) -> list[str]:
        """The file's columns that are read."""
        return [*self.plain, *(name for features in self.dense.values() for name in features.values())]


@dataclass(slots=True)
class _CsvParser:
    """Parses blocks of one file, the first of which has the header."""

    file: InputFile
    number: int
    columns: Collection[str] | None
    layout: _Layout | None = None

    def parse(self, text: bytes, line: int) -> Block:
        """Returns the rows of whole records, the first of which begins in `line`."""
        path = self.file.path
        _require_grammar(text, line, path)
        bounds, lines = _records(text, line)
        if self.layout is None:
            if len(lines):
                header, own = text[bounds[0] : bounds[1]], self.file.columns
                self.layout = _layout(header, f"{path}:{lines[0]}", self.columns, own)
                text, bounds, lines = text[bounds[1] :], bounds[1:] - bounds[1], lines[1:]
            elif line > 1:
                raise DataError(Problem(f"{path}:{line}", "a header as the first record", "blank lines"))
        layout = self.layout or _Layout(kinds={}, dense={}, plain=(), ignored=(), fields={})
        cells = _by_arrow(text, layout)
        if cells is None or cells.num_rows != len(lines):
            cells = _by_python(text, bounds, lines, layout, path)
        columns = [
            _plain_column(name, layout.fields[name], in_one_piece(cells.column(name)), lines, path)
            for name in layout.plain
        ]
        columns += [_dense_column(name, features, cells) for name, features in layout.dense.items()]
        columns += [(pa.field(name, pa.null()), pa.nulls(len(lines))) for name in layout.ignored]
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


def _require_grammar(text: bytes, line: int, path: str) -> None:
    """Refuses quotation marks that neither open nor close a cell, and carriage returns alone outside quoted cells."""
    if contains(text, _RECORDS_RE2):
        return

    def line_at(offset: int) -> int:
        return line + text.count(b"\n", 0, offset)

    records = _RECORDS.match(text)
    assert records is not None  # it matches nothing as well
    start = at = records.end()  # of the first cell that is wrong
    if text.startswith(b'"', start):
        quoted = _QUOTED.match(text, start)
        if quoted is None:
            got = "a file that ends inside the quoted cell that begins here"
            raise DataError(Problem(f"{path}:{line_at(start)}", "quoted cells that end", got, "Copy the file again"))
        at = quoted.end() - 1
    else:
        while text[at] not in b'"\r':
            at += 1
    begins, here = line_at(start), line_at(at)
    if text.startswith(b"\r", at):
        # other readers of CSV end a record there
        todo = "End lines by a newline, with or without a carriage return, and quote cells that have one"
        raise DataError(Problem(f"{path}:{here}", "lines that end by a newline", "a carriage return alone", todo))
    shown = text[max(0, at - 20) : at + 20].decode(errors="replace")
    of_cell = "" if begins == here else f", of a cell that begins in line {begins}"
    expected = "quotation marks around whole cells, doubled inside them"
    raise DataError(Problem(f"{path}:{here}", expected, f"one in the middle of {shown!r}{of_cell}"))


def _records(text: bytes, line: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns ([n+1] offsets where records begin, and the end; [n] their lines); blank lines are no records."""
    data = np.frombuffer(text, np.uint8)
    marks, newlines = np.flatnonzero(data == ord('"')), np.flatnonzero(data == ord("\n"))
    ends = newlines[np.searchsorted(marks, newlines) % 2 == 0]
    starts, stops = np.concatenate(([0], ends + 1)), np.concatenate((ends, [len(text)]))
    returned = (stops > starts) & (data[np.maximum(stops - 1, 0)] == ord("\r"))
    starts = starts[stops - returned > starts]
    return np.append(starts, len(text)), line + np.searchsorted(newlines, starts)


def _layout(header: bytes, where: str, columns: Collection[str] | None, own: OwnNames | None) -> _Layout:
    try:
        cells = _cells_of(header.decode())
    except UnicodeDecodeError as error:
        raise DataError(Problem(where, "a header in UTF-8", str(error), "Write the file as UTF-8")) from error
    # pandas writes its row labels as a column without a name
    names = [name or f"Unnamed: {index}" for index, name in enumerate(cells)]
    fields = {name: name if own is None else own.meaning(name) for name in names}
    dense: dict[str, dict[str, str]] = {}
    for name in names:
        column, dot, feature = name.partition(".")
        if dot and column in MAPS:
            dense.setdefault(column, {})[feature] = name
    problems = []
    for name in sorted({name for name in names if names.count(name) > 1}):
        problems.append(Problem(where, "a header that names each column once", f"{name!r} {names.count(name)} times"))
    for column in sorted(set(dense) & set(names)):
        one = next(iter(dense[column].values()))
        problems.append(Problem(where, f"{column} once", f"a column {column!r} and a column {one!r}", "Keep one"))
    spread = {name for features in dense.values() for name in features.values()}
    single = {name for name, field in fields.items() if field != name and "." in field}
    if not spread and not single and not set(fields.values()) & set(TRAINING_COLUMNS):
        todo = "Separate cells by commas" if any(one in cells[0] for one in ";\t|") else "Write it as the first line"
        expected = "a header with names of columns like state_features"
        problems.append(Problem(where, expected, repr(cells[0][:60]), todo))
    if problems:
        raise DataError(problems)
    plain = tuple(name for name in names if name not in spread and (columns is None or name in columns))
    return _Layout(
        kinds={
            name: _TYPES.get("number" if name in spread | single else kind_of(field), pa.string())
            for name, field in fields.items()
        },
        dense={name: features for name, features in dense.items() if columns is None or name in columns},
        plain=plain,
        ignored=tuple(name for name in names if name not in spread and name not in plain),
        fields=fields,
    )


def _by_arrow(text: bytes, layout: _Layout) -> pa.Table | None:
    """Returns the columns that are read; None where Arrow's parser refuses a row or a cell, or would change one."""
    if text.startswith(BYTE_ORDER_MARK):
        return None  # it would be left out, and only at a file's start it is not part of a cell
    read = pa.csv.ReadOptions(use_threads=False, column_names=list(layout.kinds), block_size=len(text) + 1)
    convert = pa.csv.ConvertOptions(
        column_types=layout.kinds,
        include_columns=layout.read,
        null_values=[""],
        strings_can_be_null=True,
        quoted_strings_can_be_null=True,
        true_values=_TRUE,
        false_values=_FALSE,
    )
    try:
        return pa.csv.read_csv(pa.BufferReader(text), read, pa.csv.ParseOptions(newlines_in_values=True), convert)
    except pa.ArrowException:
        return None


def _by_python(
    text: bytes, bounds: NDArray[np.int64], lines: NDArray[np.int64], layout: _Layout, path: str
) -> pa.Table:
    """Returns the columns that are read, cell by cell.

    Raises:
        DataError: naming up to 20 cells that are not what their column holds.
    """
    values: dict[str, list[Any]] = {name: [] for name in layout.read}
    problems: list[Problem] = []
    for start, end, line in zip(bounds[:-1].tolist(), bounds[1:].tolist(), lines.tolist(), strict=True):
        where = f"{path}:{line}"
        try:
            cells = _cells_of(text[start:end].decode())
        except UnicodeDecodeError as error:
            problems.append(Problem(where, "UTF-8", str(error), "Write the file as UTF-8"))
            continue
        if len(cells) != len(layout.kinds):
            problems.append(Problem(where, f"{len(layout.kinds)} cells, as the header has", str(len(cells))))
            continue
        for (name, kind), cell in zip(layout.kinds.items(), cells, strict=True):
            if name not in values:
                continue
            try:
                values[name].append(_value_of(cell, kind) if cell else None)
            except ValueError as error:
                problems.append(Problem(where, f"{error} in {name}", repr(cell[:60])))
        if len(problems) >= MAX_PROBLEMS:
            break
    raise_any(problems)
    return pa.table({name: pa.array(found, layout.kinds[name]) for name, found in values.items()})


def _cells_of(record: str) -> list[str]:
    """Returns the cells of one record, with or without its line end."""
    record = record.rstrip("\r\n")
    cells, at = [], 0
    while at <= len(record):
        match = _CELL.match(record, at)
        assert match is not None  # the empty cell matches everywhere
        cells.append(match[2] if match[1] is None else match[1].replace('""', '"'))
        at = match.end() + 1
    return cells


def _value_of(cell: str, kind: pa.DataType) -> Any:
    """Returns the value of a cell; a ValueError says what it should be."""
    if pa.types.is_string(kind):
        return cell
    if pa.types.is_boolean(kind):
        if cell in (*_TRUE, *_FALSE):
            return cell in _TRUE
        raise ValueError("true or false, or 1 or 0")
    floating = pa.types.is_floating(kind)
    if not floating and (time := microseconds_of(cell)) is not None:
        return time
    try:
        if "_" in cell:
            raise ValueError  # Python's own way to group digits
        number = float(cell)
        # pandas writes integers as 3.0 where a column has gaps
        value = number if floating else int(number) if abs(number) < EXACT_BELOW else int(cell)
    except ValueError:
        raise ValueError("a number" if floating else "an integer") from None
    if not floating and number != value and abs(number) < EXACT_BELOW:
        raise ValueError("an integer")
    if not floating and not -(1 << 63) <= value < 1 << 63:
        raise ValueError("a 64-bit integer")
    return value


def _plain_column(name: str, field: str, array: pa.Array, lines: NDArray[np.int64], path: str) -> Column:
    """Returns a column of cells, those of JSON parsed; actions are JSON where one of them begins with a brace."""
    kind = kind_of(field)
    has_maps = kind == "action" and pc.any(pc.match_substring_regex(array, r"^\s*\{"), min_count=0).as_py()
    if not has_maps and kind not in ("features", "metrics", "actions"):
        return pa.field(name, array.type), array
    table = _json_by_arrow(name, array)
    if table is None:
        return column_of(name, _json_by_python(name, field, array, lines, path))
    return table.schema.field(0), in_one_piece(table.column(0))


def _json_by_arrow(name: str, array: pa.Array) -> pa.Table | None:
    """Returns a column of JSON cells by Arrow's parser of JSON lines, or None where it may be wrong."""
    cells = pc.replace_substring_regex(pc.fill_null(array, "null"), r"[\r\n]", " ")
    documents = pc.binary_join_element_wise("{" + json.dumps(name) + ":", cells, "}\n", "")
    text = "".join(documents.to_pylist()).encode()
    table = parse_with_arrow(text)
    # a cell that closes the document's brace and opens another is not JSON by itself
    same = table is not None and table.column_names == [name] and table.num_rows == len(array)
    return table if same else None


def _json_by_python(name: str, field: str, array: pa.Array, lines: NDArray[np.int64], path: str) -> list[Any]:
    """Returns the values of JSON cells by the json module; an action that does not begin with a brace is a name.

    Raises:
        DataError: naming up to 20 lines whose cells are not JSON.
    """
    problems: list[Problem] = []
    values: list[Any] = []
    for line, cell in zip(lines.tolist(), array.to_pylist(), strict=True):
        try:
            is_json = cell is not None and (kind_of(field) != "action" or cell.lstrip().startswith("{"))
            values.append(parse_json(cell.encode()) if is_json else cell)
        except ValueError as error:
            todo = "json.dumps writes it: a Python dict's own text is not JSON" if "'" in cell else ""
            got = f"{error}; the cell starts {cell[:40]!r}"
            problems.append(Problem(f"{path}:{line}", f"JSON in {name}", got, todo))
            if len(problems) == MAX_PROBLEMS:
                break
    raise_any(problems)
    return values


def _dense_column(name: str, features: dict[str, str], cells: pa.Table) -> Column:
    """Returns the struct of a map that is spread over columns.

    A row without any cell has no map, but for state_features: a state of which nothing is known is a state.
    """
    arrays = [in_one_piece(cells.column(column)) for column in features.values()]
    mask = None
    if name != "state_features":
        mask = pa.array(~np.logical_or.reduce([valid_rows(array) for array in arrays]))
    struct = pa.StructArray.from_arrays(arrays, list(features), mask=mask)
    return pa.field(name, struct.type), struct
