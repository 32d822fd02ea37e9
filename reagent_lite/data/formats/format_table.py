"""Logged data as blocks of Arrow columns, in the order of the files, with the line of every row.

    path ─► files ─► READERS[extension] ─► blocks, parsed and transformed in threads ─► results in order

A reader yields a function for each block of a file, which parses the block. To add a format, add it to FORMATS.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from reagent_lite.config.column_names import kind_of_column
from reagent_lite.data.formats.arrow import read_ipc, read_parquet
from reagent_lite.data.formats.blocks import JSON_LINES, Block, InputFile, Position, Reader, Show, num_threads
from reagent_lite.data.formats.csv import read_csv
from reagent_lite.data.formats.encodings import (
    CSV_ENCODINGS,
    IPC_ENCODINGS,
    JSON_LINES_ENCODINGS,
    PARQUET_ENCODINGS,
    Encoding,
)
from reagent_lite.data.formats.input_files import MINARI
from reagent_lite.data.formats.jsonl import count_keys, read_json_lines
from reagent_lite.data.formats.minari import read_minari
from reagent_lite.data.formats.schema import in_one_piece
from reagent_lite.errors import DataError, NoRowsError, Problem, pluralize

T = TypeVar("T")
_MOST_MAPPED = 1 << 22
"""Values of a matrix of features, 4 bytes each: rows with few of many features are read in small parts."""
_OF_MAPS = ("features", "metrics", "actions", "action")
"""Kinds of columns whose values may be maps."""
_REWARDS = ("reward", "rewards")


def parsers_of(
    file: InputFile, number: int, position: Position, readers: Mapping[str, Reader] | None = None
) -> Generator[Callable[[], Block]]:
    """Yields the functions that parse the blocks of a file, see Reader; columns get the standard names."""
    needs_all = (file.columns is not None and file.columns.own_names) or file.id_columns
    reader = (ALL_COLUMNS if needs_all else readers or READERS)[file.extension]
    for parse in reader(file, number, position):
        yield partial(_read, file, parse)


def _read(file: InputFile, parse: Callable[[], Block]) -> Block:
    block = parse()
    rewards = [field for field in block.table.schema if field.name.lower() in _REWARDS]
    todo = "Write a row for each step, with the mdp_id of its episode and a sequence_number"
    if rewards and all(_is_list(field.type) for field in rewards):
        expected = f"one step a row, so one number in {rewards[0].name}"
        raise DataError(Problem(block.where(0), expected, "several steps: lists", todo))
    steps = [field.name for field in block.table.schema if not rewards and _is_list(field.type) and _are_steps(field)]
    if steps:
        raise DataError(Problem(block.where(0), "one step a row", f"several steps in {steps[0]}", todo))
    if file.columns is not None:
        block = file.columns.read(block)
    return block if file.selection is None else file.selection.select(block)


def _parts(block: Block) -> Iterator[Block]:
    """Yields a block in parts whose maps have at most _MOST_MAPPED values when each key is a column of a matrix."""
    rows = block.table.num_rows
    table = block.table
    values = sum(_mapped_values(name, table.column(index)) for index, name in enumerate(table.column_names))
    step = max(rows * _MOST_MAPPED // max(values, 1), 1)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        yield block if step >= rows else replace(block, table=block.table.slice(start, step), lines=block.lines[part])


def _mapped_values(name: str, column: pa.ChunkedArray) -> int:
    """Returns the number of values of a column of maps, or of lists of maps, as a matrix of all keys; 0 for others.

    Maps may be JSON texts, also in a list or as pairs.
    """
    maps = in_one_piece(column)
    if kind_of_column(name) in _OF_MAPS and (pa.types.is_string(maps.type) or pa.types.is_large_string(maps.type)):
        text = "\n".join(maps.drop_null().to_pylist())
        return len(maps) * count_keys(text.encode()) if "{" in text else 0
    if _is_list(maps.type) and not _holds_pairs(maps.type):
        maps = maps.flatten()
    if pa.types.is_map(maps.type) and len(maps):
        keys = maps.keys[maps.offsets[0].as_py() : maps.offsets[-1].as_py()]
    elif _holds_pairs(maps.type):
        keys = maps.flatten().field("key")
    else:
        return 0
    return len(maps) * int(pc.count_distinct(keys).as_py())


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _are_steps(field: pa.Field) -> bool:
    """Whether the elements of lists are objects with a reward."""
    kind = field.type.value_type
    return pa.types.is_struct(kind) and any(member.name.lower() in _REWARDS for member in kind)


def _holds_pairs(kind: pa.DataType) -> bool:
    """Whether values of the type are maps as lists of pairs."""
    pairs = _is_list(kind) and pa.types.is_struct(kind.value_type)
    return pairs and {field.name for field in kind.value_type} == {"key", "value"}


def read_blocks(
    files: tuple[InputFile, ...],
    transform: Callable[[Block], T],
    progress: Show | None = None,
    readers: Mapping[str, Reader] | None = None,
    hashes: list[str] | None = None,
) -> Generator[T]:
    """Yields the result of `transform` for every block that has rows, in order; works in threads.

    Args:
        files: the input, as `list_input` gives it.
        transform: called in a thread, once per block.
        progress: called with (stored bytes read, total stored bytes) after each block.
        readers: readers by extension; None: READERS, which read the columns that training needs.
        hashes: a list to which the sha256 of each file's stored bytes is appended.

    Raises:
        DataError: a file that cannot be read, with file and line; no rows in any file.
    """
    total = sum(file.size for file in files)
    before = 0
    pending: deque[Future[list[T]]] = deque()
    has_rows = False

    def work(parse: Callable[[], Block]) -> list[T]:
        return [transform(part) for part in _parts(parse())]

    def results(most_pending: int) -> Iterator[T]:
        nonlocal has_rows
        while len(pending) > most_pending:
            for result in pending.popleft().result():
                has_rows = True
                yield result

    pool = ThreadPoolExecutor(num_threads(), thread_name_prefix="read")
    try:
        for number, file in enumerate(files):
            position = Position()
            for parse in parsers_of(file, number, position, readers):
                pending.append(pool.submit(work, parse))
                if progress is not None:
                    progress(before + position.bytes_read, total)
                yield from results(num_threads())
            require_hash(file, position.sha256)
            before += file.size
            if hashes is not None:
                hashes.append(position.sha256)
        yield from results(0)
    finally:
        # Work that has not begun is dropped. There is no waiting, as an abandoned generator may be collected in one of
        # the pool's own threads.
        pool.shutdown(wait=False, cancel_futures=True)
        pa.default_memory_pool().release_unused()
    if progress is not None:
        progress(total, total)
    if not has_rows:
        raise no_rows_error(files)


def first_block(files: Sequence[InputFile], readers: Mapping[str, Reader] | None = None) -> Block | None:
    """Returns the first block with rows; None if no file has rows."""
    for number, file in enumerate(files):
        with closing(parsers_of(file, number, Position(), readers)) as parsers:
            for parse in parsers:
                if (block := parse()).table.num_rows:
                    return block
    return None


def no_rows_error(files: Sequence[InputFile]) -> NoRowsError:
    """Returns the error for files that can be read but have no rows."""
    where = files[0].location() if len(files) == 1 else os.path.dirname(files[0].path)
    got = f"none in {pluralize(len(files), 'file')}, {pluralize(sum(file.size for file in files), 'byte')}"
    return NoRowsError(Problem(where, "rows of data", got))


def require_hash(file: InputFile, sha256: str) -> None:
    """Raises DataError if a file's sha256 is not that in the manifest of its folder."""
    if file.sha256 and sha256 != file.sha256:
        todo = "Copy the folder again, or let the stage that made it make it again"
        expected = f"bytes with sha256 {file.sha256}, as its manifest says"
        raise DataError(Problem(file.path, expected, f"sha256 {sha256}", todo))


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A format of logs.

    Attributes:
        extensions: extensions of its files, without that of a compression.
        read: reads a file.
        by_column: whether `read` takes `columns`, the names of the columns to read; else it reads all.
        encodings: {ending of a file's name: how rows become its bytes}; empty if the format is only read.
    """

    extensions: tuple[str, ...]
    read: Callable[..., Iterator[Callable[[], Block]]]
    by_column: bool = True
    encodings: dict[str, Encoding] = field(default_factory=dict)


FORMATS = (
    Format(extensions=JSON_LINES, read=read_json_lines, by_column=False, encodings=JSON_LINES_ENCODINGS),
    Format(extensions=(".parquet",), read=read_parquet, encodings=PARQUET_ENCODINGS),
    Format(extensions=(".arrow", ".feather", ".ipc"), read=read_ipc, encodings=IPC_ENCODINGS),
    Format(extensions=(".csv",), read=read_csv, encodings=CSV_ENCODINGS),
    Format(extensions=(MINARI,), read=read_minari, by_column=False),
)
READERS: dict[str, Reader] = {extension: form.read for form in FORMATS for extension in form.extensions}
ENCODINGS = {ending: encoding for form in FORMATS for ending, encoding in form.encodings.items()}


def readers_of(columns: Collection[str] | None) -> dict[str, Reader]:
    """Returns readers of these columns, or of all for None; some formats are always read with all columns."""
    return {
        extension: partial(form.read, columns=columns) if form.by_column else form.read
        for form in FORMATS
        for extension in form.extensions
    }


ALL_COLUMNS = readers_of(None)
"""Readers of all columns, for copies of logs."""
