"""Arrow IPC as blocks, files (Feather version 2 is one) and streams; the "line" of a row is its number, from 1.

Memory is that of a record batch as stored; blocks are parts of it. Every block is validated before anything looks into
it: what a damaged file says of offsets would lead outside its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import IO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from reagent_lite.data.formats.files import InputFile
from reagent_lite.data.formats.jsonl import Block, Position
from reagent_lite.data.formats.parquet import BLOCK_VALUES, require_each_once, sha256_of
from reagent_lite.data.formats.schema import KNOWN_COLUMNS, filled, valid_rows
from reagent_lite.errors import DataError, Problem

_FILE_MAGIC, _FEATHER_1_MAGIC = b"ARROW1", b"FEA1"
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
# Damaged lengths ask for any amount of memory.
_DAMAGED = (pa.ArrowException, OSError, ValueError, EOFError, MemoryError)


def read_ipc(
    file: InputFile, number: int, position: Position, columns: Collection[str] | None = KNOWN_COLUMNS
) -> Iterator[Callable[[], Block]]:
    """Yields the rows of an Arrow IPC file or stream in blocks.

    Args:
        file: plain; what is packed inside (LZ4, Zstandard) is unpacked.
        number: the file's place in the input.
        position: kept up to date with what has been read.
        columns: those that are read; others are only named. None reads all.

    Raises:
        DataError: neither format, damaged, or one that ends early.
    """
    if file.compression:
        got = f"one packed as {file.compression}"
        raise DataError(Problem(file.path, "an Arrow IPC file as it is", got, "Unpack it"))
    with file.open() as stream, ThreadPoolExecutor(1) as pool:
        digest: Future[str] | None = None
        row = 0
        with _told(file):
            for batch in _batches(stream, file):
                wanted = [name for name in batch.schema.names if columns is None or name in columns]
                for part in _parts(batch, wanted):
                    row += part.num_rows
                    yield partial(_block, file, number, part, row)
                    # after the first block: who wants no more need not wait for it; and memory:// has one place to
                    # read at for all who opened a file
                    if digest is None and not file.remote:
                        digest = pool.submit(sha256_of, file)
                position.bytes_read = min(file.size, stream.tell())
        position.sha256 = (digest or pool.submit(sha256_of, file)).result()
    position.bytes_read = file.size


@contextmanager
def _told(file: InputFile) -> Iterator[None]:
    try:
        yield
    except _DAMAGED as error:
        got = "one that ends early or is damaged: " + str(error).strip().split("\n")[0]
        raise DataError(Problem(file.path, "a complete Arrow IPC file", got, "Copy the file again")) from error


def _batches(stream: IO[bytes], file: InputFile) -> Iterator[pa.RecordBatch]:
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
    # The format lets a stream end anywhere between two batches; then nothing tells a whole one from one cut there.
    stream.seek(-min(len(_END_OF_STREAM), file.size), 2)
    if stream.read() != _END_OF_STREAM:
        raise EOFError("it does not end with the mark that closes a stream")
    stream.seek(0)
    batches = pa.ipc.open_stream(stream)
    _require_names(batches.schema, file)
    yield from batches
    if stream.tell() != file.size:
        raise ValueError(f"another stream, or other data, follows its end after {stream.tell()} bytes")


def _require_names(schema: pa.Schema, file: InputFile) -> None:
    for one in schema:
        _require_text(one)
    require_each_once(schema.names, file)


def _require_text(one: pa.Field) -> None:
    """Looks at all names inside: those that are no text raise UnicodeDecodeError, a ValueError."""
    if one.name and pa.types.is_nested(one.type):
        for index in range(one.type.num_fields):
            _require_text(one.type.field(index))


def _parts(batch: pa.RecordBatch, wanted: list[str]) -> Iterator[pa.Table]:
    """Yields the batch in parts of some BLOCK_VALUES values; columns that are not wanted keep their names alone."""
    batch.validate()
    kept = batch.select(wanted)
    # of whole buffers: nbytes would follow offsets, which `_block` validates
    values = kept.get_total_buffer_size() // 8 + kept.num_rows
    rows = max(1, BLOCK_VALUES * batch.num_rows // max(1, values))
    for start in range(0, batch.num_rows, rows):
        part = kept.slice(start, rows)
        columns = dict(zip(wanted, part.columns, strict=True))
        nothing = pa.nulls(min(rows, batch.num_rows - start))
        yield pa.table({name: columns.get(name, nothing) for name in batch.schema.names})


def _block(file: InputFile, number: int, table: pa.Table, end: int) -> Block:
    with _told(file):
        table.validate(full=True)
        columns = {}
        for name in table.column_names:
            chunks = table.column(name).chunks
            columns[name] = _in_one_piece(chunks[0] if len(chunks) == 1 else pa.concat_arrays(chunks))
        table = pa.table(columns)
    return Block(file=file, file_number=number, table=table, lines=np.arange(end - table.num_rows + 1, end + 1))


def _in_one_piece(array: pa.Array) -> pa.Array:
    """Returns an array as readers of columns know it: strings and lists in one piece; Polars writes views."""
    types = pa.types
    if types.is_run_end_encoded(array.type):
        return pc.run_end_decode(array)
    if types.is_list_view(array.type) or types.is_large_list_view(array.type):
        # Arrow's own cast leaves the last offset unset
        lengths = filled(pc.list_value_length(array), 0).astype(np.int64)
        ends = pa.array(np.concatenate(([0], lengths.cumsum())), mask=np.append(~valid_rows(array), False))
        return pa.LargeListArray.from_arrays(ends, _in_one_piece(array.flatten()))
    kind = _without_views(array.type)
    return array if kind == array.type else array.cast(kind)


def _without_views(kind: pa.DataType) -> pa.DataType:
    types = pa.types
    if types.is_string_view(kind):
        return pa.large_string()
    if types.is_list(kind) or types.is_large_list(kind):
        inner = _without_views(kind.value_type)
        return pa.list_(inner) if types.is_list(kind) else pa.large_list(inner)
    return kind
