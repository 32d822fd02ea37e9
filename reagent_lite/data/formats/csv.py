"""CSV files as blocks: a header, a row a record, feature maps as JSON cells or as columns of their own.

 bytes ─► blocks of whole records ─► cells by Arrow's parser, types given ─► JSON cells ─► columns of a log
          quotation marks counted    nothing is inferred                     Arrow types    dense ones gathered

    mdp_id,sequence_number,state_features,action,reward              JSON cells: "{""0"": 0.5}"
    mdp_id,sequence_number,state_features.0,action.0,reward          a column a feature; an empty cell is absent

Types are the columns' own and never depend on what a block holds: mdp_id and discrete actions are strings, so an action
1 is the name "1" if there is one, and else the index. What is not as it should be is looked for again by Python, cell
by cell, for the line. [m] 2 cores, 500 000 transitions of 4 features, rows a second as of JSON lines: JSON cells 0.45
times, dense columns 2.2 times; peak memory 390 MiB, of 2 000 000 rows the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
from numpy.typing import NDArray

from reagent_lite.data.formats import jsonl
from reagent_lite.data.formats.blocks import Block, Position
from reagent_lite.data.formats.csv_records import BlockSize, cells_of, lines_of, whole_records
from reagent_lite.data.formats.files import ByteStream, InputFile
from reagent_lite.data.formats.jsonl import in_doubt, parse_with_arrow, table_of
from reagent_lite.data.formats.jsonl_fast import FastParser
from reagent_lite.data.formats.schema import KNOWN_COLUMNS, MAX_PROBLEMS, valid_rows
from reagent_lite.errors import DataError, Problem
from reagent_lite.strict_json import parse_json

_MAPS = ("state_features", "next_state_features", "metrics")
_LISTS = ("possible_actions", "possible_next_actions")
_ACTIONS = ("action", "next_action")
_DENSE = (*_MAPS, *_ACTIONS)
_TYPES = {
    **dict.fromkeys(("reward", "propensity", "action_probability", "time_diff"), pa.float64()),
    **dict.fromkeys(("terminal", "truncated"), pa.bool_()),
    "sequence_number": pa.int64(),
}
# pandas writes 1.0 where a column has gaps, PostgreSQL writes t.
_TRUE, _FALSE = ("true", "True", "TRUE", "1", "1.0", "t"), ("false", "False", "FALSE", "0", "0.0", "f")
_EXACT_BELOW = float(1 << 53)


def read_csv(
    file: InputFile, number: int, position: Position, columns: Collection[str] | None = KNOWN_COLUMNS
) -> Iterator[Callable[[], Block]]:
    """Yields the parsing of each block of a CSV file; calls may run in any thread, in any order.

    Args:
        file: plain or compressed CSV, UTF-8, separated by commas, with a header.
        number: the file's place in the input.
        position: kept up to date with what has been read.
        columns: those that are read; others are only named. None reads all, those no log has as strings.

    Raises:
        DataError: damaged compression, no header, a name twice, or what is wrong with a row, with file and line.
    """
    stream = ByteStream(file)
    size = position.bytes_in_all * (jsonl.PACKED_TIMES if file.compression else 1)
    parser: CsvParser | None = None
    block = BlockSize()
    for text, line in whole_records(stream, file.path, block):
        position.bytes_read = stream.position
        if parser is None:
            first, text, line = _without_header(text, line, file.path)
            if first is None:
                continue
            layout = _layout(first, columns)
            parser = CsvParser(file, number, layout, block, fast=size >= jsonl.FAST_FROM_BYTES)
        # The first block is parsed at once: it teaches what actions are, and how large blocks may be.
        if parser.settled:
            yield partial(parser.parse, text, line)
        elif (parsed := parser.parse(text, line)).table.num_rows:
            yield partial(_given, parsed)
    position.bytes_read, position.sha256 = stream.position, stream.digest.hexdigest()


def _given(block: Block) -> Block:
    return block


@dataclass(frozen=True, slots=True)
class _Header:
    where: str
    cells: list[str]


def _without_header(text: bytes, line: int, path: str) -> tuple[_Header | None, bytes, int]:
    """Returns (the first record, the text after it, the line there); no record where the text is blank."""
    starts, lines = lines_of(text, line, path)
    if not len(lines):
        return None, b"", line
    end = int(starts[1]) if len(starts) > 1 else len(text)
    where = f"{path}:{lines[0]}"
    try:
        cells = cells_of(text[int(starts[0]) : end].decode())
    except UnicodeDecodeError as error:
        raise DataError(Problem(where, "a header in UTF-8", str(error), "Write the file as UTF-8")) from error
    return _Header(where, cells), text[end:], line + text.count(b"\n", 0, end)


@dataclass(frozen=True, slots=True, kw_only=True)
class CsvLayout:
    """What the columns of a file are.

    Attributes:
        names: of all columns, in order.
        dense: {column of a log: {feature: name of the file's column}} of maps that are spread over columns.
        wanted: columns that are read as they are.
        ignored: columns that are only named.
    """

    names: tuple[str, ...]
    dense: dict[str, dict[str, str]]
    wanted: tuple[str, ...]
    ignored: tuple[str, ...]


def _layout(header: _Header, columns: Collection[str] | None) -> CsvLayout:
    # pandas writes its row labels as a column without a name
    names = tuple(name or f"Unnamed: {index}" for index, name in enumerate(header.cells))
    dense: dict[str, dict[str, str]] = {}
    for name in names:
        column, dot, feature = name.partition(".")
        if dot and column in _DENSE:
            dense.setdefault(column, {})[feature] = name
    problems = []
    where, first = header.where, header.cells[0]
    for name in sorted({name for name in names if names.count(name) > 1}):
        problems.append(Problem(where, "a header that names each column once", f"{name!r} {names.count(name)} times"))
    for column in sorted(set(dense) & set(names)):
        one = next(iter(dense[column].values()))
        problems.append(Problem(where, f"{column} once", f"a column {column!r} and a column {one!r}", "Keep one"))
    spread = {name for features in dense.values() for name in features.values()}
    if not spread and not set(names) & set(KNOWN_COLUMNS):
        todo = "Separate cells by commas" if any(mark in first for mark in ";\t|") else "Write it as the first line"
        problems.append(Problem(where, "a header with names of columns like state_features", repr(first[:60]), todo))
    if problems:
        raise DataError(problems)
    wanted = tuple(name for name in names if name not in spread and (columns is None or name in columns))
    kept = {column: features for column, features in dense.items() if columns is None or column in columns}
    ignored = tuple(name for name in names if name not in spread and name not in wanted)
    return CsvLayout(names=names, dense=kept, wanted=wanted, ignored=ignored)


@dataclass(slots=True)
class CsvParser:
    """Parses blocks of one file.

    Attributes:
        file: named in errors.
        number: its place in the input.
        layout: of its columns.
        size: of the next block; smaller where rows become large.
        fast: whether the parser of large inputs is tried on JSON cells.
        maps: whether actions are maps, as the first one says; None before one is seen.
        settled: whether blocks may be parsed in any order.
    """

    file: InputFile
    number: int
    layout: CsvLayout
    size: BlockSize
    fast: bool
    maps: bool | None = None
    settled: bool = False
    _parsers: dict[str, FastParser] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if any(column in self.layout.dense for column in _ACTIONS):
            self.maps = True

    def parse(self, text: bytes, line: int) -> Block:
        """Returns the rows of a block of whole records, the first of which begins in `line`."""
        starts, lines = lines_of(text, line, self.file.path)
        layout = self.layout
        nothing = (pa.null(), pa.nulls(len(lines)))
        columns = {name: (pa.field(name, nothing[0]), nothing[1]) for name in (*layout.wanted, *layout.dense)}
        if len(lines):
            cells = self._cells(text, starts, lines)
            self._settle(cells, lines)
            columns = {name: self._column(name, cells.column(name), lines) for name in layout.wanted}
            columns |= {name: _gathered(name, features, cells) for name, features in layout.dense.items()}
        columns |= {name: (pa.field(name, nothing[0]), nothing[1]) for name in layout.ignored}
        table = pa.table([array for _, array in columns.values()], pa.schema([one for one, _ in columns.values()]))
        if not self.settled:
            share = jsonl.DENSE_BLOCK_BYTES / max(1, table.nbytes / max(1, len(text)) * jsonl.BLOCK_BYTES)
            self.size.bytes = max(jsonl.FIRST_BLOCK_BYTES, int(jsonl.BLOCK_BYTES * min(1.0, share)))
            self.settled = self.maps is not None or "action" not in layout.wanted
        return Block(file=self.file, file_number=self.number, table=table, lines=lines)

    def _cells(self, text: bytes, starts: NDArray[np.int64], lines: NDArray[np.int64]) -> pa.Table:
        """Returns the cells of each column as strings, numbers or flags."""
        kinds = {name: self._kind(name) for name in self.layout.names}
        table, fault = _converted(text, self.layout, kinds)
        if table is None and kinds.get("sequence_number") == pa.int64():
            # pandas writes integers as 3.0 where a column has gaps
            table, _ = _converted(text, self.layout, kinds | {"sequence_number": pa.float64()})
            table = None if table is None else _with_integers(table)
        if table is not None and table.num_rows == len(lines):
            return table
        problems = self._faults(text, starts, lines, kinds)
        got = fault or f"{len(lines)} records by their line ends, and another number of rows by Arrow's parser"
        where = f"{self.file.path}:{lines[0]}"
        raise DataError(problems or Problem(where, f"{len(lines)} rows from here as in RFC 4180", got))

    def _kind(self, name: str) -> pa.DataType:
        column, dot, _ = name.partition(".")
        return pa.float64() if dot and column in self.layout.dense else _TYPES.get(name, pa.string())

    def _faults(
        self, text: bytes, starts: NDArray[np.int64], lines: NDArray[np.int64], kinds: dict[str, pa.DataType]
    ) -> list[Problem]:
        """Looks at each cell by itself for what is wrong with it."""
        problems: list[Problem] = []
        ends = [*starts[1:].tolist(), len(text)]
        names, read = self.layout.names, {*self.layout.wanted, *_spread(self.layout)}
        for start, end, line in zip(starts.tolist(), ends, lines.tolist(), strict=True):
            where = f"{self.file.path}:{line}"
            try:
                cells = cells_of(text[start:end].decode())
            except UnicodeDecodeError as error:
                problems.append(Problem(where, "UTF-8", str(error), "Write the file as UTF-8"))
                continue
            if len(cells) != len(names):
                problems.append(Problem(where, f"{len(names)} cells, as the header has", str(len(cells))))
                continue
            for name, cell in zip(names, cells, strict=True):
                expected = _expected(kinds[name], cell) if name in read and cell else ""
                if expected:
                    problems.append(Problem(where, f"{expected} in {name}", repr(cell[:60])))
            if len(problems) >= MAX_PROBLEMS:
                break
        return problems[:MAX_PROBLEMS]

    def _settle(self, cells: pa.Table, lines: NDArray[np.int64]) -> None:
        """Decides by the first action whether actions are maps, and holds all others to it."""
        for name in _ACTIONS:
            if name not in self.layout.wanted:
                continue
            column = _one(cells.column(name))
            is_map = pc.fill_null(pc.match_substring_regex(column, r"^\s*\{"), False)
            present = valid_rows(column)
            if self.maps is None and present.any():
                self.maps = bool(is_map[int(present.argmax())].as_py())
            other = present & (np.asarray(is_map.to_numpy(zero_copy_only=False)) != bool(self.maps))
            if other.any():
                row = int(other.argmax())
                expected = "a map as before" if self.maps else "a name or an index as before"
                where = f"{self.file.path}:{lines[row]}"
                raise DataError(Problem(where, f"{expected} in {name}", repr(column[row].as_py()[:60])))

    def _column(self, name: str, cells: pa.ChunkedArray, lines: NDArray[np.int64]) -> tuple[pa.Field, pa.Array]:
        array = _one(cells)
        if name not in (*_MAPS, *_LISTS) and not (self.maps and name in _ACTIONS):
            return pa.field(name, array.type), array
        table = self._by_json(name, array)
        if table is None:
            values = _values(name, array, lines, self.file.path)
            table = table_of([{name: value} for value in values])
            self._learn(name, table)
        return table.schema.field(0), _one(table.column(0))

    def _by_json(self, name: str, array: pa.Array) -> pa.Table | None:
        """Returns a column of JSON cells by the parsers of JSON lines, or None where they are not sure."""
        array = pc.replace_substring_regex(pc.fill_null(array, "null"), r"[\r\n]", " ")
        documents = pc.binary_join_element_wise("{" + json.dumps(name) + ":", array, "}\n", "")
        _, offsets, data = documents.buffers()
        bounds = np.frombuffer(offsets, np.int32)[documents.offset :][: len(documents) + 1].astype(np.int64)
        text = data.to_pybytes()[int(bounds[0]) : int(bounds[-1])]
        bounds -= bounds[0]
        if in_doubt(text, bounds):
            return None
        parser = self._parsers.get(name)
        table = None if parser is None else parser.parse(text, bounds)
        if table is None:
            table = parse_with_arrow(text)
            # a cell that closes the document's brace and opens another is no JSON by itself
            if table is None or table.column_names != [name] or table.num_rows != len(array):
                return None
            self._learn(name, table)
        return table

    def _learn(self, name: str, table: pa.Table) -> None:
        if self.fast:
            self._parsers.setdefault(name, FastParser()).learn(table)


def _one(column: pa.ChunkedArray) -> pa.Array:
    array = column.combine_chunks()
    return pa.concat_arrays(array.chunks) if isinstance(array, pa.ChunkedArray) else array


def _spread(layout: CsvLayout) -> list[str]:
    return [name for features in layout.dense.values() for name in features.values()]


def _converted(text: bytes, layout: CsvLayout, kinds: dict[str, pa.DataType]) -> tuple[pa.Table | None, str]:
    """Returns (the columns that are read, "") or (None, what Arrow's parser says)."""
    odd: list[str] = []

    def skip(row: Any) -> str:
        odd.append(f"a row of {row.actual_columns} cells")
        return "skip"

    read = pa.csv.ReadOptions(use_threads=False, column_names=layout.names, block_size=len(text) + 1)
    parse = pa.csv.ParseOptions(newlines_in_values=True, invalid_row_handler=skip)
    convert = pa.csv.ConvertOptions(
        column_types=kinds, include_columns=[*layout.wanted, *_spread(layout)], null_values=[""],
        strings_can_be_null=True, quoted_strings_can_be_null=True, true_values=_TRUE, false_values=_FALSE,
    )  # fmt: skip
    try:
        table = pa.csv.read_csv(pa.BufferReader(text), read, parse, convert)
    except pa.ArrowException as error:
        return None, str(error).split("\n")[0]
    return (None, odd[0]) if odd else (table, "")


def _with_integers(table: pa.Table) -> pa.Table | None:
    index = table.schema.get_field_index("sequence_number")
    column = table.column(index)
    whole = pc.and_(pc.equal(column, pc.floor(column)), pc.less(pc.abs(column), _EXACT_BELOW))
    if pc.all(whole).as_py() is False:
        return None
    return table.set_column(index, "sequence_number", column.cast(pa.int64()))


def _expected(kind: pa.DataType, cell: str) -> str:
    """Returns what a cell should be and is not, or ""."""
    try:
        if pa.types.is_floating(kind):
            float(cell)
        elif pa.types.is_integer(kind) and (abs(value := float(cell)) >= _EXACT_BELOW or value != int(value)):
            int(cell)
            return "" if abs(int(cell)) < 1 << 63 else "a 64-bit integer"
    except (ValueError, OverflowError):
        return "a number" if pa.types.is_floating(kind) else "an integer"
    return "true or false, or 1 or 0" if pa.types.is_boolean(kind) and cell not in (*_TRUE, *_FALSE) else ""


def _gathered(name: str, features: dict[str, str], cells: pa.Table) -> tuple[pa.Field, pa.Array]:
    """Returns the struct of a map that is spread over columns.

    A row without any cell has no map, but for state_features: a state of which nothing is known is a state.
    """
    arrays = [_one(cells.column(column)) for column in features.values()]
    mask = None
    if name != "state_features":
        absent = np.ones(cells.num_rows, bool)
        for array in arrays:
            absent &= ~valid_rows(array)
        mask = pa.array(absent)
    struct = pa.StructArray.from_arrays(arrays, list(features), mask=mask)
    return pa.field(name, struct.type), struct


def _values(name: str, array: pa.Array, lines: NDArray[np.int64], path: str) -> list[Any]:
    """Returns the values of JSON cells by the json module.

    Raises:
        DataError: naming up to 20 lines whose cells are no JSON.
    """
    problems: list[Problem] = []
    values: list[Any] = []
    for line, cell in zip(lines.tolist(), array.to_pylist(), strict=True):
        try:
            values.append(None if cell is None else parse_json(cell.encode()))
        except ValueError as error:
            todo = "json.dumps writes it: a Python dict's own text is no JSON" if "'" in cell else ""
            got = f"{error}; the cell starts {cell[:40]!r}"
            problems.append(Problem(f"{path}:{line}", f"JSON in {name}", got, todo))
            if len(problems) == MAX_PROBLEMS:
                break
    if problems:
        raise DataError(problems)
    return values
