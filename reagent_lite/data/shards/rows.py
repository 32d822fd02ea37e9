"""Shards of rows in any order and format, and shuffled copies: two passes, and memory for the rows of a part.

    pass 1   episode of every row, types of every column ─► rank of every episode ─► parts: ranges of ranks
    pass 2   rows ─► a spool for each part ─► each part sorted by (rank, place in the input) ─► Parquet

A shard is a run of parts. Rows keep the columns they have; values without a common type stay JSON texts, as readers
give them.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet
from numpy.typing import NDArray

from reagent_lite.data.formats.blocks import Block, Position
from reagent_lite.data.formats.files import InputFile, sha256_of
from reagent_lite.data.formats.reading import ALL_COLUMNS, num_threads, read_blocks
from reagent_lite.data.formats.schema import from_indices, is_text, merge_fields
from reagent_lite.data.shards.episodes import Episodes, ids_of
from reagent_lite.data.shards.parquet_groups import damaged
from reagent_lite.errors import NoRowsError, Problem, counted

PART_BYTES = 1 << 24
"""Of Arrow's form of a part: a thread holds three times as much while it sorts one."""
_BATCH_BYTES = 1 << 22
_GROUP_ROWS = 1 << 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What was written.

    Attributes:
        parts: of each shard, {file name: {"rows": rows}}, with "size" and "sha256" where these are known.
        columns: {name: type} of the rows.
        hashes: sha256 of the input files.
        rows: of the input.
        episodes: of the input; None where they were not counted.
        moved_as: "row groups" or "rows".
    """

    parts: tuple[dict[str, dict[str, Any]], ...]
    columns: dict[str, str]
    hashes: tuple[str, ...]
    rows: int
    episodes: int | None
    moved_as: str


def part_name(number: int) -> str:
    """Returns the name of a shard's file."""
    return f"part-{number:05d}.parquet"


def columns_of(schemas: Sequence[pa.Schema]) -> dict[str, str]:
    """Returns {name: type} of the columns of several files, those of the first where they differ."""
    return {field.name: str(field.type) for schema in reversed(schemas) for field in schema}


def no_rows(files: Sequence[InputFile]) -> NoRowsError:
    """Returns the error of files without rows."""
    where = files[0].path if len(files) == 1 else os.path.dirname(files[0].path)
    return NoRowsError(Problem(where, "rows of data", f"none in {counted(len(files), 'file')}"))


def cut_by_rows(
    files: Sequence[InputFile],
    layout: Literal["shards", "replicas"],
    seed: int,
    folders: Sequence[Path],
    progress: Callable[[int, int], None] | None,
) -> Made:
    """Writes the parts of every shard, or of every copy.

    Args:
        files: the input.
        layout: parts, or copies each in an order of its own.
        seed: of the order.
        folders: of the shards, empty.
        progress: called with (bytes read, bytes in all), over all passes.

    Raises:
        DataError: a file that cannot be read, with file and line.
    """
    passes = 2 if layout == "shards" else 1 + len(folders)
    size = sum(file.size for file in files)

    def shown(number: int) -> Callable[[int, int], None]:
        return lambda done, _: progress(number * size + done, passes * size) if progress else None

    first = _first_pass(files, shown(0))
    if not len(first.episodes.codes):
        raise no_rows(files)
    parts: list[dict[str, dict[str, Any]]] = []
    if layout == "shards":
        parts = _second_pass(first, first.episodes.ranked(seed), folders, shown(1))
    else:
        for number, folder in enumerate(folders):
            parts += _second_pass(first, first.episodes.ranked(seed, number), [folder], shown(1 + number))
    return Made(
        parts=tuple(parts),
        columns=columns_of([first.schema]),
        hashes=first.hashes,
        rows=len(first.episodes.codes),
        episodes=first.num_episodes,
        moved_as="rows",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _First:
    """What the first pass finds out."""

    files: tuple[InputFile, ...]
    episodes: Episodes
    schema: pa.Schema
    num_bytes: int
    hashes: tuple[str, ...]

    @property
    def num_episodes(self) -> int:
        codes = self.episodes.codes
        return len(np.unique(codes[codes >= 0])) + int((codes < 0).sum())


def _first_pass(files: Sequence[InputFile], progress: Callable[[int, int], None]) -> _First:
    fields: dict[str, pa.Field] = {}
    ids, size = [], 0
    positions = [Position() for _ in files]
    for block in _blocks(files, positions, progress):
        fields = merge_fields(fields, {one.name: _plain(one) for one in block.table.schema})
        ids.append(ids_of(block))
        size += block.table.nbytes
    with ThreadPoolExecutor(num_threads()) as pool:
        hashes = tuple(pool.map(lambda one: one[1].sha256 or sha256_of(one[0]), zip(files, positions, strict=True)))
    return _First(files=tuple(files), episodes=Episodes.of(ids), schema=pa.schema(list(fields.values())),
                  num_bytes=size, hashes=hashes)  # fmt: skip


def _plain(field: pa.Field) -> pa.Field:
    if is_text(field):
        return field
    kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
    return pa.field(field.name, kind)


def _blocks(
    files: Sequence[InputFile], positions: list[Position], progress: Callable[[int, int], None]
) -> Iterator[Block]:
    """Yields the rows of files with all columns, in order."""
    total, before = sum(file.size for file in files), 0
    for file, position in zip(files, positions, strict=True):
        if file.extension == ".parquet" and not file.compression:
            for block, share in _parquet_blocks(file):
                progress(before + int(share * file.size), total)
                yield block
        else:
            for block in read_blocks((file,), lambda block: block, [position], readers=ALL_COLUMNS):
                progress(before + position.bytes_read, total)
                yield block
        before += file.size


def _parquet_blocks(file: InputFile) -> Iterator[tuple[Block, float]]:
    """Yields blocks, and which share of the file has been read; columns that no log has are kept here."""
    try:
        with file.open() as stream:
            parquet = pa.parquet.ParquetFile(stream, pre_buffer=False)
            metadata = parquet.metadata
            size = sum(metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups))
            rows, done = max(1, _BATCH_BYTES * metadata.num_rows // max(1, 4 * size)), 0
            for batch in parquet.iter_batches(rows):
                lines = np.arange(done + 1, done + 1 + batch.num_rows)
                done += batch.num_rows
                table = pa.Table.from_batches([batch])
                yield Block(file=file, file_number=0, table=table, lines=lines), done / metadata.num_rows
    except (pa.ArrowException, OSError) as error:
        raise damaged(file, error) from error


def _second_pass(
    first: _First,
    ranked: tuple[NDArray[np.int32], NDArray[np.int64]],
    folders: Sequence[Path],
    progress: Callable[[int, int], None],
) -> list[dict[str, dict[str, Any]]]:
    """Writes the rows of all folders, in the order of ranks, and returns {file name: {"rows": rows}} of each."""
    rank, sizes = ranked
    begins, owners = _parts(sizes, len(folders), first.num_bytes)
    numbers = [owners[:part].count(owner) for part, owner in enumerate(owners)]
    targets = [folders[owner] / part_name(number) for owner, number in zip(owners, numbers, strict=True)]
    part_of_rank = np.repeat(np.arange(len(begins), dtype=np.int32), np.diff([*begins, len(sizes)]))
    with ExitStack() as stack:
        spools = [stack.enter_context(_Spool(target, first.schema)) for target in targets]
        row = 0
        for block in _blocks(first.files, [Position() for _ in first.files], progress):
            table = conformed(block.table, first.schema)
            inside = part_of_rank[rank[row : row + table.num_rows]]
            for part in np.unique(inside).tolist():
                spools[part].write(table.take(from_indices(np.flatnonzero(inside == part))))
            row += table.num_rows

    def finish(part: int) -> int:
        end = begins[part + 1] if part + 1 < len(begins) else len(sizes)
        own = rank[(rank >= begins[part]) & (rank < end)]
        _sort(targets[part], np.argsort(own, kind="stable"))
        return len(own)

    with ThreadPoolExecutor(min(2, num_threads())) as pool:
        counts = list(pool.map(finish, range(len(targets))))
    written: list[dict[str, dict[str, Any]]] = [{} for _ in folders]
    for target, owner, count in zip(targets, owners, counts, strict=True):
        written[owner][target.name] = {"rows": count}
    return written


def _parts(sizes: NDArray[np.int64], num_folders: int, num_bytes: int) -> tuple[list[int], list[int]]:
    """Returns (first rank, folder) of each part; a folder of no rows has none.

    Args:
        sizes: [E] rows of each rank.
        num_folders: that share the ranks, equal by rows as far as whole episodes allow.
        num_bytes: of all rows; a part has at most about PART_BYTES of them.
    """
    ends = np.cumsum(sizes)
    total = int(ends[-1])
    bounds = _nearest(ends, [total * number / num_folders for number in range(num_folders + 1)])
    begins, owners = [], []
    for folder, (low, high) in enumerate(itertools.pairwise(bounds)):
        start, stop = (int(ends[low - 1]) if low else 0), (int(ends[high - 1]) if high else 0)
        if start == stop:
            continue
        count = max(1, -(-(stop - start) * num_bytes // (total * PART_BYTES)))
        inner = [start + (stop - start) * number / count for number in range(count)]
        for begin in sorted(set(_nearest(ends, inner))):
            begins.append(min(max(begin, low), high - 1))
            owners.append(folder)
    return begins, owners


def _nearest(ends: NDArray[np.int64], wanted: list[float]) -> list[int]:
    """Returns how many whole ranks have about so many rows, for each number of rows."""
    edges = np.concatenate(([0], ends))
    found = []
    for rows in wanted:
        after = min(int(np.searchsorted(edges, rows, "left")), len(edges) - 1)
        before = max(after - 1, 0)
        found.append(before if rows - edges[before] < edges[after] - rows else after)
    return found


class _Spool:
    """Rows of one part in the order they come, as an Arrow stream beside the part to be."""

    def __init__(self, target: Path, schema: pa.Schema) -> None:
        self._sink = pa.OSFile(str(target.with_suffix(".spool")), "wb")
        options = pa.ipc.IpcWriteOptions(compression="lz4")
        self._writer = pa.ipc.new_stream(self._sink, schema, options=options)

    def write(self, table: pa.Table) -> None:
        self._writer.write_table(table)

    def __enter__(self) -> _Spool:
        return self

    def __exit__(self, *error: object) -> None:
        self._writer.close()
        self._sink.close()


def _sort(target: Path, order: NDArray[np.int64]) -> None:
    """Replaces a part's spool by the part, its rows in an order."""
    spool = target.with_suffix(".spool")
    with pa.OSFile(str(spool), "rb") as stream:
        table = pa.ipc.open_stream(stream).read_all()
    table = table.combine_chunks().take(from_indices(order))
    pa.parquet.write_table(table, target, compression="zstd", row_group_size=_GROUP_ROWS)
    spool.unlink()


def conformed(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Returns rows with the columns and types of all: nulls for what they lack, JSON texts where types are mixed."""
    arrays = []
    for field in schema:
        index = table.schema.get_field_index(field.name)
        if index < 0:
            arrays.append(pa.nulls(table.num_rows, field.type))
        elif is_text(field) and not is_text(table.schema.field(index)):
            arrays.append(_texts(table.column(index)))
        else:
            arrays.append(pc.cast(table.column(index), field.type))
    return pa.table(arrays, schema=schema)


def _texts(column: pa.ChunkedArray) -> pa.Array:
    values = (_json_value(value, column.type) for value in column.to_pylist())
    return pa.array([None if value is None else json.dumps(value) for value in values], pa.string())


def _json_value(value: Any, kind: pa.DataType) -> Any:
    """Returns an Arrow value as JSON has it; of objects, what is absent is left out: Arrow gives each all keys."""
    if value is None:
        return None
    if pa.types.is_struct(kind):
        return {
            child.name: _json_value(value[child.name], child.type) for child in kind if value[child.name] is not None
        }
    if pa.types.is_map(kind):
        return {str(key): _json_value(inner, kind.item_type) for key, inner in value}
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return [_json_value(inner, kind.value_type) for inner in value]
    return value
