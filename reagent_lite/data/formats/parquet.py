"""Parquet files as blocks; the "line" of a row is its number in the file, from 1."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from reagent_lite.data.formats.files import InputFile
from reagent_lite.data.formats.jsonl import Block, Position
from reagent_lite.data.formats.schema import KNOWN_COLUMNS
from reagent_lite.errors import DataError, Problem

# In leaf values, keys of maps among them: some 4 MB per array made on the way.
BLOCK_VALUES = 1 << 19
HASH_CHUNK_BYTES = 1 << 20


def read_parquet(
    file: InputFile, number: int, position: Position, columns: Collection[str] | None = KNOWN_COLUMNS
) -> Iterator[Callable[[], Block]]:
    """Yields the rows of a Parquet file in blocks.

    Args:
        file: the Parquet file.
        number: the file's place in the input.
        position: kept up to date with what has been read.
        columns: those that are read; others are only named. None reads all.

    Raises:
        DataError: no Parquet file, one that ends early, a column twice, or text that is no UTF-8.
    """
    if file.compression:
        raise DataError(Problem(file.path, "a Parquet file as it is", f"one packed as {file.compression}", "Unpack it"))
    with file.open() as stream, ThreadPoolExecutor(1) as pool:
        # memory:// has one place to read at for all who opened a file
        digest = None if file.remote else pool.submit(sha256_of, file)
        try:
            parquet = pa.parquet.ParquetFile(stream, pre_buffer=False)
            require_each_once(parquet.schema_arrow.names, file)
            wanted = [name for name in parquet.schema_arrow.names if columns is None or name in columns]
            total, row = parquet.metadata.num_rows, 0
            for batch in parquet.iter_batches(_batch_rows(parquet.metadata), columns=wanted):
                row += batch.num_rows
                position.bytes_read = file.size * row // max(1, total)
                yield partial(checked_block, file, number, _with_ignored(batch, parquet.schema_arrow.names), row)
        except (pa.ArrowException, OSError) as error:
            got = "one that ends early or is damaged: " + str(error).strip().split("\n")[0]
            raise DataError(Problem(file.path, "a complete Parquet file", got, "Copy the file again")) from error
        position.sha256 = sha256_of(file) if digest is None else digest.result()
    position.bytes_read = file.size


def _batch_rows(metadata: pa.parquet.FileMetaData) -> int:
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    values = sum(group.column(number).num_values for group in groups for number in range(group.num_columns))
    return int(max(1, BLOCK_VALUES * metadata.num_rows // max(1, values)))


def _with_ignored(batch: pa.RecordBatch, names: list[str]) -> pa.Table:
    """Keeps the names of columns that were not read, as columns without values."""
    table = pa.table(batch.columns, schema=batch.schema.remove_metadata())
    for name in names:
        if name not in batch.schema.names:
            table = table.append_column(name, pa.nulls(batch.num_rows))
    return table


def require_each_once(names: list[str], file: InputFile) -> None:
    """Checks that no column has the name of another.

    Raises:
        DataError: naming those that have.
    """
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DataError(Problem(file.path, "each column once", f"{', '.join(map(repr, twice))} more than once"))


def checked_block(file: InputFile, number: int, table: pa.Table, end: int) -> Block:
    """Returns rows of a Parquet file, the last of which is row `end` of it.

    Raises:
        DataError: text that is no UTF-8, with the row.
    """
    lines = np.arange(end - table.num_rows + 1, end + 1)
    block = Block(file=file, file_number=number, table=table, lines=lines)
    try:
        table.validate(full=True)
    except pa.ArrowInvalid as error:
        raise DataError(_unreadable(block) or Problem(file.path, "readable values", str(error))) from error
    return block


def _unreadable(block: Block) -> Problem | None:
    """Returns the first value of a block that cannot be read."""
    for row in range(block.table.num_rows):
        for name in block.table.column_names:
            try:
                block.table.column(name)[row].as_py()
            except ValueError as error:  # of text that is no UTF-8
                return Problem(block.where(row), f"text in UTF-8 in {name}", str(error))
    return None


def sha256_of(file: InputFile) -> str:
    """Returns the sha256 of a file's stored bytes."""
    digest = hashlib.sha256()
    with file.open() as stream:
        while chunk := stream.read(HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
