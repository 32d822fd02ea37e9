"""Parquet and Arrow IPC as blocks; the "line" of a row is its number in the file, from 1.

IPC is read as a file (Feather version 2 is one) or a stream. One record batch at a time is in memory, as stored, and
blocks are parts of it. Every block is validated before its values are read, since the offsets of a damaged file may
point outside its memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import IO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet

from reagent_lite.config.column_names import TRAINING_COLUMNS
from reagent_lite.data.formats.blocks import Block, InputFile, Position
from reagent_lite.data.formats.input_files import damage_reported, digest_of, require_format
from reagent_lite.data.formats.schema import fill_nulls, is_text, item_values, valid_rows
from reagent_lite.errors import DataError, Problem, first_line, join_names, pluralize
from reagent_lite.strict_json import MAX_DEPTH, is_deep, unique_keys

BLOCK_VALUES = 1 << 19
"""Leaf values of a block, keys of maps included: a temporary array of them takes about 4 MB."""
_BYTES_OF_VALUE = 4
"""Bytes of a value in Parquet, before compression, if few values are equal."""
PARQUET = "Parquet"
IPC = "Arrow IPC"
_FILE_MAGIC = b"ARROW1"
_FEATHER_1_MAGIC = b"FEA1"
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


def read_parquet(
    file: InputFile, number: int, position: Position, columns: Collection[str] | None = TRAINING_COLUMNS
) -> Iterator[Callable[[], Block]]:
    """Reads a Parquet file; see `blocks.Reader`.

    Raises:
        DataError: the file is not Parquet, is compressed as a whole, ends early, has a column twice, or has text that
            is not UTF-8.
    """
    with _open_file(file, PARQUET) as stream:
        parquet = _parquet(stream, file)
        names = parquet.schema_arrow.names
        wanted = [name for name in names if columns is None or name in columns]
        total = parquet.metadata.num_rows
        row = 0
        for batch in parquet.iter_batches(_rows_of_batch(parquet.metadata), columns=wanted):
            for part in _parts(batch, file):
                row += part.num_rows
                position.bytes_read = file.size * row // max(1, total)
                yield partial(_block, file, number, part, names, row, PARQUET)
        if row != total:
            raise ValueError(f"{pluralize(total, 'row')} by its metadata, and {row:,} that can be read")
        position.sha256 = digest_of(stream)


@contextmanager
def opened_parquet(file: InputFile) -> Iterator[pa.parquet.ParquetFile]:
    """Opens a Parquet file.

    Raises:
        DataError: the file is not Parquet, is damaged (this may show only while it is read), or has a column twice.
    """
    with _open_file(file, PARQUET) as stream:
        yield _parquet(stream, file)


def _parquet(stream: IO[bytes], file: InputFile) -> pa.parquet.ParquetFile:
    parquet = pa.parquet.ParquetFile(stream, pre_buffer=False)
    _require_each_once(parquet.schema_arrow.names, file)
    return parquet


def _rows_of_batch(metadata: pa.parquet.FileMetaData) -> int:
    # The number of values is estimated from the bytes of row groups, which are few if many values are equal. Columns
    # have exact numbers in their metadata, but Arrow ends the process if it reads metadata that is damaged.
    num_bytes = sum(metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups))
    values = max(max(1, metadata.num_columns) * metadata.num_rows, num_bytes // _BYTES_OF_VALUE)
    return int(max(1, BLOCK_VALUES * metadata.num_rows // max(1, values)))


def read_ipc(
    file: InputFile, number: int, position: Position, columns: Collection[str] | None = TRAINING_COLUMNS
) -> Iterator[Callable[[], Block]]:
    """Reads an Arrow IPC file or stream, whose buffers may be compressed (LZ4, Zstandard); see `blocks.Reader`.

    Raises:
        DataError: the file is neither, is compressed as a whole, is damaged, or ends early.
    """
    row = 0
    with _open_file(file, IPC) as stream:
        for batch in _ipc_batches(stream, file):
            names = batch.schema.names
            batch.validate()
            kept = batch.select([name for name in names if columns is None or name in columns])
            begin = position.bytes_read
            before = row
            num_bytes = min(file.size, stream.tell()) - begin
            for part in _parts(kept, file):
                row += part.num_rows
                position.bytes_read = begin + num_bytes * (row - before) // batch.num_rows
                yield partial(_block, file, number, part, names, row, IPC)
        position.sha256 = digest_of(stream)


def _parts(batch: pa.RecordBatch, file: InputFile) -> Iterator[pa.RecordBatch]:
    """Yields a batch in parts of at most BLOCK_VALUES values, which include the features that item ids stand for."""
    # the size of the buffers, and not nbytes, which would follow offsets before `_block` has validated them
    values = batch.get_total_buffer_size() // 8 + batch.num_rows + item_values(batch, file.items)
    rows = max(1, BLOCK_VALUES * batch.num_rows // max(1, values))
    for start in range(0, batch.num_rows, rows):
        yield batch.slice(start, rows)


def _ipc_batches(stream: IO[bytes], file: InputFile) -> Iterator[pa.RecordBatch]:
    magic = stream.read(len(_FILE_MAGIC))
    if not magic:
        return
    if magic.startswith(_FEATHER_1_MAGIC):
        raise DataError(Problem(file.path, "an Arrow IPC file", "Feather version 1", "Write it again as version 2"))
    if magic == _FILE_MAGIC:
        stream.seek(0)
        reader = pa.ipc.open_file(stream)
        _require_names(reader.schema, file)
        for index in range(reader.num_record_batches):
            yield reader.get_batch(index)
        return
    # The format lets a stream end between any two batches, so that a stream that was cut there looks complete.
    stream.seek(-min(len(_END_OF_STREAM), file.size), 2)
    if stream.read() != _END_OF_STREAM:
        raise EOFError("it does not end with the mark that closes a stream")
    stream.seek(0)
    batches = pa.ipc.open_stream(stream)
    _require_names(batches.schema, file)
    yield from batches
    if stream.tell() != file.size:
        raise ValueError(f"trailing data after the Arrow stream, which ends at byte {stream.tell():,}")


@contextmanager
def _open_file(file: InputFile, kind: str) -> Iterator[IO[bytes]]:
    if file.compression:
        got = f"one packed as {file.compression}"
        raise DataError(Problem(file.path, f"an uncompressed {kind} file", got, "Unpack it"))
    with file.open() as stream, damage_reported(file, kind):
        require_format(file, stream)
        yield stream


def _require_names(schema: pa.Schema, file: InputFile) -> None:
    for column in schema:
        _require_text(column)
    _require_each_once(schema.names, file)


def _require_text(field: pa.Field) -> None:
    """Reads the names of all fields inside; a name that is not UTF-8 raises UnicodeDecodeError, a ValueError."""
    if field.name and pa.types.is_nested(field.type):
        for index in range(field.type.num_fields):
            _require_text(field.type.field(index))


def _require_each_once(names: list[str], file: InputFile) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DataError(Problem(file.location(), "each column once", f"{', '.join(map(repr, twice))} more than once"))


def _block(file: InputFile, number: int, batch: pa.RecordBatch, names: list[str], end: int, kind: str) -> Block:
    """Returns checked rows, the last of which is row `end` of the file; columns that were not read are null."""
    lines = np.arange(end - batch.num_rows + 1, end + 1)
    if unions := [field.name for field in batch.schema if _has_union(field.type)]:
        todo = "Write it again with one type a column"
        raise DataError(Problem(file.path, "columns of one type", f"a union of types in {join_names(unions)}", todo))
    with damage_reported(file, kind):
        batch.validate()
        try:
            batch.validate(full=True)
        except pa.ArrowInvalid:
            # Looks for the first invalid value. Offsets of Parquet come from its decoder and are safe to follow;
            # those of IPC may be anything, so that only values without offsets are read: numbers, flags and times.
            without_offsets = [field.name for field in batch.schema if pa.types.is_primitive(field.type)]
            readable = batch if kind == PARQUET else batch.select(without_offsets)
            problem = _unreadable(Block(file=file, file_number=number, table=pa.table(readable), lines=lines))
            if problem is not None:
                raise DataError(problem) from None
            raise
        arrays = dict(zip(batch.schema.names, batch.columns, strict=True))
        columns = [_decode(arrays[name]) if name in arrays else pa.nulls(batch.num_rows) for name in names]
    fields = [
        batch.schema.field(name).with_type(array.type) if name in arrays else pa.field(name, array.type)
        for name, array in zip(names, columns, strict=True)
    ]
    block = Block(file=file, file_number=number, table=pa.table(columns, pa.schema(fields)), lines=lines)
    for field, array in zip(fields, columns, strict=True):
        if is_text(field):
            _require_json(block, field.name, array)
    return block


def _has_union(kind: pa.DataType) -> bool:
    inner = kind.value_type if pa.types.is_dictionary(kind) else kind
    return pa.types.is_union(inner) or any(_has_union(inner.field(at).type) for at in range(inner.num_fields))


def _require_json(block: Block, name: str, array: pa.Array) -> None:
    """Checks the strings of a column whose metadata says that they are JSON, as in our own files."""
    for text in array.unique().drop_null().to_pylist():
        try:
            if is_deep(text.encode()):
                raise ValueError(f"more than {MAX_DEPTH} levels")
            value = json.loads(text, object_pairs_hook=unique_keys)
            json.dumps(value, ensure_ascii=False).encode()
        except ValueError as error:
            where = block.where(pc.index(array, text).as_py())
            expected = f"JSON in {name}, as the metadata of the column say"
            raise DataError(Problem(where, expected, f"{text[:40]!r}: {first_line(error)}")) from None


def _unreadable(block: Block) -> Problem | None:
    """Returns the problem of the first value that is not UTF-8 or not allowed by its type, such as a time of 25 h."""
    for row in range(block.table.num_rows):
        for name in block.table.column_names:
            cell = block.table.column(name).take([row])
            with suppress(ValueError, OverflowError):  # Python may lack the value
                try:
                    cell.to_pylist()
                except UnicodeDecodeError as error:
                    return Problem(block.where(row), f"text in UTF-8 in {name}", str(error))
            try:
                cell.validate(full=True)
            except pa.ArrowInvalid as error:
                return Problem(block.where(row), f"values that the column's type allows in {name}", first_line(error))
    return None


def _decode(array: pa.Array) -> pa.Array:
    """Returns the values without dictionaries (of pandas), views (of Polars), runs and UUIDs; see `_plain`."""
    types = pa.types
    if types.is_dictionary(array.type):
        return _decode(array.dictionary).take(array.indices)
    if types.is_run_end_encoded(array.type):
        return pc.run_end_decode(array)
    if types.is_list_view(array.type) or types.is_large_list_view(array.type):
        # Arrow's own cast leaves the last offset unset
        lengths = fill_nulls(pc.list_value_length(array), 0).astype(np.int64)
        ends = pa.array(np.concatenate(([0], lengths.cumsum())), mask=np.append(~valid_rows(array), False))
        return pa.LargeListArray.from_arrays(ends, _decode(array.flatten()))
    if getattr(array.type, "extension_name", "") == "arrow.uuid":
        return pa.array([None if value is None else str(value) for value in array.to_pylist()], pa.string())
    kind = _plain(array.type)
    return array if kind == array.type else array.cast(kind)


def _plain(kind: pa.DataType) -> pa.DataType:
    """Returns the type of the same values without dictionaries, views, extensions and lists of a fixed size."""
    types = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return _plain(kind.storage_type)
    if types.is_dictionary(kind):
        return _plain(kind.value_type)
    if types.is_string_view(kind):
        return pa.large_string()
    if types.is_struct(kind):
        return pa.struct([field.with_type(_plain(field.type)) for field in kind])
    if types.is_map(kind):
        return pa.map_(_plain(kind.key_type), _plain(kind.item_type))
    if types.is_list(kind) or types.is_fixed_size_list(kind):
        return pa.list_(_plain(kind.value_type))
    if types.is_large_list(kind):
        return pa.large_list(_plain(kind.value_type))
    return kind
