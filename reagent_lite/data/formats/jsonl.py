"""JSON lines as Arrow tables: three parsers of one result, the fastest that is sure of itself.

 bytes ─► blocks of whole lines ─► fast (DuckDB, known columns) ─► Arrow's parser ─► Python's json
                  in doubt ─┐      readers_fast.py                  finds new columns   mixed types, and names the line
                            └──────────────────────────────────────────────────────────► of what is no JSON

Each parser gives None where it is not sure, and the next one reads the same block; a block whose bytes show what the
first two take for more or less than it is goes to the last at once. Columns whose values have no common
Arrow type (an action as 3 in one row and "left" in another) become text: strings of JSON, marked by `is_text`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json
from numpy.typing import NDArray

from reagent_lite.data.formats.blocks import Block, Position
from reagent_lite.data.formats.files import ByteStream, InputFile
from reagent_lite.data.formats.jsonl_fast import FastParser
from reagent_lite.data.formats.lines import LineReader, Lines
from reagent_lite.data.formats.schema import MAX_PROBLEMS, TEXT_METADATA
from reagent_lite.errors import DataError, Problem
from reagent_lite.strict_json import MOST_LEVELS, is_deep, parse_json

FIRST_BLOCK_BYTES = 1 << 18
# [m] 97 MB on 2 cores: 0.264 s by 12 MB, 0.276 s by 8, 0.292 s by 6: a block takes a query and some 2000 calls.
BLOCK_BYTES = 12 << 20
# What is left of a file is shared out in smaller blocks, so that all threads end at about the same time.
LAST_BLOCK_BYTES = 3 << 20
# DuckDB's import and start take 0.15 s, which a small input does not win back.
FAST_FROM_BYTES = 32 << 20
# Stored bytes count this much more where they are compressed.
PACKED_TIMES = 8
LONGEST_LINE_BYTES = 1 << 28
DENSE_BLOCK_BYTES = 1 << 24
# What is compared stays in the cache.
PIECE_BYTES = 1 << 18
_SPACED_COMMA = re.compile(rb",[ \t\r\n]+[]}]")


def read_json_lines(file: InputFile, number: int, position: Position) -> Iterator[Callable[[], Block]]:
    """Yields the parsing of each block of a JSON lines file, to be called once; in any thread, in any order.

    Args:
        file: plain or compressed JSON lines.
        number: the file's place in the input.
        position: kept up to date with what has been read.

    Raises:
        DataError: damaged compression, a line that is no JSON object, NaN or Infinity, with file and line.
    """
    stream = ByteStream(file)
    times = PACKED_TIMES if file.compression else 1
    parser = JsonLinesParser(file, number, FastParser() if position.bytes_in_all * times >= FAST_FROM_BYTES else None)

    def wanted() -> int:
        if not stream.position:
            return FIRST_BLOCK_BYTES
        share = (file.size - stream.position) * times // position.threads
        return min(parser.block_bytes, max(LAST_BLOCK_BYTES, share))

    with stream.filling() as fill:
        for lines in LineReader(fill, file.path, LONGEST_LINE_BYTES).blocks(wanted):
            position.bytes_read = stream.position
            # The first block is small and parsed at once: it teaches the columns, and how large blocks may be.
            yield partial(parser.parse, lines) if lines.first > 1 else partial(_given, parser.parse(lines))
    position.bytes_read, position.sha256 = stream.position, stream.digest.hexdigest()


def _given(block: Block) -> Block:
    return block


@dataclass(slots=True)
class JsonLinesParser:
    """Parses blocks of one file; what earlier blocks taught about its columns makes later ones faster.

    Attributes:
        file: named in errors.
        number: its place in the input.
        fast: tried first, if given.
        block_bytes: of the next block at most; fewer where rows have many columns.
    """

    file: InputFile
    number: int
    fast: FastParser | None
    block_bytes: int = field(default_factory=lambda: BLOCK_BYTES)

    def parse(self, lines: Lines) -> Block:
        """Returns the rows of a block of whole lines, and gives their memory back."""
        try:
            doubt = in_doubt(lines.text, lines.bounds)
            table = None if doubt or self.fast is None else self.fast.parse(lines.text, lines.bounds)
            if table is None:
                return self._parse_carefully(bytes(lines.text), lines.first, len(lines.bounds) - 1, doubt=doubt)
        finally:
            lines.give_back()
        numbers = np.arange(lines.first, lines.first + table.num_rows)
        return Block(file=self.file, file_number=self.number, table=table, lines=numbers)

    def _parse_carefully(self, text: bytes, first_line: int, num_lines: int, *, doubt: bool) -> Block:
        table = None if doubt else parse_with_arrow(text)
        lines = np.arange(first_line, first_line + num_lines)
        if table is None or table.num_rows != num_lines:
            table, lines = parse_with_python(text, first_line, self.file.path)
        if self.fast is not None:
            self.fast.learn(table)
        self._limit(table, len(text))
        return Block(file=self.file, file_number=self.number, table=table, lines=lines)

    def _limit(self, table: pa.Table, num_bytes: int) -> None:
        dense = table.num_rows * sum(_num_leaves(column.type) for column in table.columns) * 8
        share = min(1.0, DENSE_BLOCK_BYTES / max(1, dense / num_bytes * BLOCK_BYTES))
        self.block_bytes = min(self.block_bytes, max(FIRST_BLOCK_BYTES, int(BLOCK_BYTES * share)))


def _num_leaves(kind: pa.DataType) -> int:
    if pa.types.is_struct(kind):
        return sum(_num_leaves(child.type) for child in kind)
    return 1


def in_doubt(text: bytes | memoryview, bounds: NDArray[np.int64]) -> bool:
    """Whether lines may hold what the parsers but the last take for something else, or end the process by.

    That are lines that are not one object each, bytes that are no UTF-8, commas before the end of an object or list,
    and many levels.

    Args:
        text: whole lines.
        bounds: [n+1] byte offsets of their starts and of the end.
    """
    signs = np.frombuffer(text, np.uint8)
    lasts = bounds[1:] - 1
    for ending in b"\n\r":
        lasts = lasts - (signs[lasts] == ending)
    if not (signs[bounds[:-1]] == ord("{")).all() or not (signs[lasts] == ord("}")).all():
        return True
    opening = []
    spaced = False
    for start in range(0, len(signs), PIECE_BYTES):
        piece = signs[max(0, start - 1) : start + PIECE_BYTES]
        brackets = piece | 0x20  # [ and ] differ from { and } by this bit
        before = piece[:-1][brackets[1:] == ord("}")]
        if (before == ord(",")).any():
            return True
        spaced = spaced or bool((before <= ord(" ")).any())
        opening.append(np.flatnonzero(brackets[start > 0 :] == ord("{")) + start)
    if spaced and _SPACED_COMMA.search(text):
        return True
    places = np.searchsorted(np.concatenate(opening), bounds)
    many = np.flatnonzero(np.diff(places) > MOST_LEVELS)
    if any(is_deep(bytes(text[bounds[line] : bounds[line + 1]])) for line in many):
        return True
    try:
        str(text, "utf-8")
    except UnicodeDecodeError:
        return True
    return False


def parse_with_arrow(text: bytes) -> pa.Table | None:
    """Returns the block's rows by Arrow's parser, or None where types are mixed or something is wrong."""
    table = _arrow_table(text, None)
    if table is not None and (dated := [f for f in table.schema if _has_temporal(f.type)]):
        # Arrow reads strings that look like dates as timestamps; a log means the string.
        table = _arrow_table(text, pa.schema([pa.field(f.name, _as_string(f.type)) for f in dated]))
    if table is None or len(set(table.column_names)) != table.num_columns:
        return None
    table = table.combine_chunks()
    return table if all(_is_finite(column.chunk(0)) for column in table.columns if column.num_chunks) else None


def _arrow_table(text: bytes, schema: pa.Schema | None) -> pa.Table | None:
    read = pa.json.ReadOptions(use_threads=False, block_size=len(text) + 1)
    parse = pa.json.ParseOptions(explicit_schema=schema, newlines_in_values=False)
    try:
        return pa.json.read_json(pa.BufferReader(text), read_options=read, parse_options=parse)
    except (pa.ArrowException, UnicodeDecodeError):
        return None


def _has_temporal(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return any(_has_temporal(child.type) for child in kind)
    if pa.types.is_list(kind):
        return _has_temporal(kind.value_type)
    return bool(pa.types.is_temporal(kind))


def _as_string(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(child.name, _as_string(child.type)) for child in kind])
    if pa.types.is_list(kind):
        return pa.list_(_as_string(kind.value_type))
    return pa.string() if pa.types.is_temporal(kind) else kind


def _is_finite(array: pa.Array) -> bool:
    if pa.types.is_struct(array.type):
        return all(_is_finite(child) for child in array.flatten())
    if pa.types.is_list(array.type):
        return _is_finite(array.flatten())
    return not pa.types.is_floating(array.type) or pc.all(pc.is_finite(array)).as_py() is not False


def parse_with_python(text: bytes, first_line: int, path: str) -> tuple[pa.Table, NDArray[np.int64]]:
    """Returns the block's rows and their line numbers by the json module.

    Raises:
        DataError: naming up to 20 lines that are no JSON objects.
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
            start = content[:40].decode(errors="replace")
            problems.append(Problem(f"{path}:{line}", "one JSON object in the line", f"{error}; it starts {start!r}"))
            if len(problems) == MAX_PROBLEMS:
                break
            continue
        rows.append(row)
        lines.append(line)
    if problems:
        raise DataError(problems)
    return table_of(rows), np.array(lines, np.int64)


def table_of(rows: list[dict[str, Any]]) -> pa.Table:
    """Returns an Arrow table of JSON objects; a column without a common type becomes text."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    arrays = [_array_of([row.get(name) for row in rows]) for name in names]
    fields = [
        pa.field(name, pa.string(), metadata=TEXT_METADATA) if array is None else pa.field(name, array.type)
        for name, array in zip(names, arrays, strict=True)
    ]
    columns = [
        _text_of([row.get(name) for row in rows]) if array is None else array
        for name, array in zip(names, arrays, strict=True)
    ]
    # A table without columns forgets its rows; no log has such rows, but errors should count them.
    return pa.table(columns, pa.schema(fields)) if names else pa.table({"": pa.nulls(len(rows))})


def _text_of(values: list[Any]) -> pa.Array:
    return pa.array([None if value is None else json.dumps(value) for value in values], pa.string())


def _array_of(values: list[Any]) -> pa.Array | None:
    kinds = {type(value) for value in values} - {type(None)}
    elements = [element for value in values if isinstance(value, list) for element in value]
    element_kinds = {type(element) for element in elements}
    try:
        if kinds == {dict}:
            struct = _struct_of(values)
            return None if struct is None else pa.array(values, struct)
        if kinds == {list} and element_kinds == {dict}:
            struct = _struct_of(elements)
            return None if struct is None else pa.array(values, pa.list_(struct))
        if kinds & {list, dict} and (len(kinds) > 1 or element_kinds & {list, dict, type(None)}):
            return None
        if len((kinds | element_kinds) - {list, float}) > 1:
            return None
        array = pa.array(values)
    except (pa.ArrowException, OverflowError):
        return None
    return None if _has_temporal(array.type) else array


def _struct_of(values: list[dict[str, Any] | None]) -> pa.DataType | None:
    present = [value for value in values if value is not None]
    if {type(leaf) for value in present for leaf in value.values()} - {int, float, type(None)}:
        return None
    return pa.struct([(name, pa.float64()) for name in dict.fromkeys(name for value in present for name in value)])
