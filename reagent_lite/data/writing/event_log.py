"""Writing logs: whole episodes as JSON lines, Parquet, Arrow IPC or CSV, as logged decisions or as transitions.

    blocks of episodes ─► columns and bytes, in threads ─► appended in order under a temporary name ─► fsync ─► renamed
    (numpy)               event_log_columns.py

events       one row a decision, as a service logs it: what was seen, what could be done, what was done and how likely
transitions  the same, and where it led: the rows that training reads

[m] 2 cores, 4 features and 2 named actions, million rows/s as .jsonl, .gz, .zst, .parquet:
events 0.69, 0.52, 0.99, 2.1; transitions 0.55, 0.41, 0.77, 1.1.
"""

from __future__ import annotations

import gzip
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import pyarrow as pa
import pyarrow.parquet
import zstandard

from reagent_lite.data.formats.reading import num_threads
from reagent_lite.data.writing.columns import EpisodeBlock, LogSchema, json_lines, require_finite, table
from reagent_lite.data.writing.text import csv_header, csv_records, json_lines_of
from reagent_lite.errors import DataError, Problem
from reagent_lite.files import appearing_file

_GZIP_LEVEL = 4


class Rows(Protocol):
    """Rows that can be written, in both of their forms."""

    def table(self) -> pa.Table:
        """Returns them as Arrow columns."""
        ...

    def json_lines(self) -> memoryview:
        """Returns them as JSON objects, a line each."""
        ...


@dataclass(frozen=True, slots=True)
class _Episodes:
    block: EpisodeBlock
    schema: LogSchema

    def table(self) -> pa.Table:
        return table(self.block, self.schema)

    def json_lines(self) -> memoryview:
        return json_lines(self.block, self.schema)


@dataclass(frozen=True, slots=True)
class _Table:
    rows: pa.Table

    def table(self) -> pa.Table:
        return self.rows

    def json_lines(self) -> memoryview:
        return json_lines_of(self.rows)


class Sink(Protocol):
    """How rows become a file's bytes."""

    def encode(self, rows: Rows) -> Any:
        """Returns rows as `append` takes them; called in threads."""
        ...

    def append(self, encoded: Any) -> None:
        """Adds to the file; called in order."""
        ...

    def close(self) -> None:
        """Writes what ends the file."""
        ...


class JsonLinesSink:
    """One JSON object a line; each block is compressed by itself, which gzip and zstandard readers take as one file."""

    def __init__(self, stream: IO[bytes], compress: Callable[[Any], Any]) -> None:
        self._stream, self._compress = stream, compress

    def encode(self, rows: Rows) -> Any:
        """Returns the block's bytes."""
        return self._compress(rows.json_lines())

    def append(self, encoded: Any) -> None:
        """Adds bytes."""
        self._stream.write(encoded)

    def close(self) -> None:
        """Does nothing: the last line ends the file."""


class CsvSink:
    """A header, then a record a row; maps and lists are JSON in cells."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self._has_header = stream, False

    def encode(self, rows: Rows) -> Any:
        """Returns (names of columns, the block's records)."""
        columns = rows.table()
        return columns.column_names, csv_records(columns)

    def append(self, encoded: Any) -> None:
        """Adds records, the first of them under the header."""
        names, records = encoded
        if not self._has_header:
            self._stream.write(csv_header(names))
            self._has_header = True
        self._stream.write(records)

    def close(self) -> None:
        """Does nothing: the last record ends the file."""


class ArrowSink:
    """Arrow's own writers: a row group (Parquet) or record batch (IPC) a block."""

    def __init__(self, stream: IO[bytes], writer: Callable[[IO[bytes], pa.Schema], Any]) -> None:
        self._stream, self._make = stream, writer
        self._writer: Any = None

    def encode(self, rows: Rows) -> Any:
        """Returns the block's Arrow table."""
        return rows.table()

    def append(self, encoded: Any) -> None:
        """Adds a table's rows."""
        if self._writer is None:
            self._writer = self._make(self._stream, encoded.schema)
        self._writer.write_table(encoded)

    def close(self) -> None:
        """Writes the footer."""
        if self._writer is not None:
            self._writer.close()


class _Writer:
    """Encodes rows in threads and appends them in order."""

    def __init__(self, sink: Sink, pool: ThreadPoolExecutor) -> None:
        self._sink, self._pool = sink, pool
        self._pending: deque[Future[Any]] = deque()

    def _add(self, rows: Rows) -> None:
        self._pending.append(self._pool.submit(self._sink.encode, rows))
        while len(self._pending) > num_threads():
            self._sink.append(self._pending.popleft().result())

    def finish(self) -> None:
        """Writes what is still being encoded."""
        while self._pending:
            self._sink.append(self._pending.popleft().result())


class LogWriter(_Writer):
    """Takes blocks and writes them in order; `log_writer` makes it."""

    def __init__(self, sink: Sink, pool: ThreadPoolExecutor, schema: LogSchema) -> None:
        super().__init__(sink, pool)
        self._schema = schema

    def write(self, block: EpisodeBlock) -> None:
        """Adds whole episodes to the log.

        Raises:
            DataError: a number of the block is NaN or infinite.
        """
        require_finite(block)
        self._add(_Episodes(block, self._schema))


class TableWriter(_Writer):
    """Takes settled tables (log_tables.py) and writes them in order; `table_writer` makes it."""

    def write(self, rows: pa.Table) -> None:
        """Adds rows; but for JSON lines all tables have the same columns."""
        self._add(_Table(rows))


@contextmanager
def log_writer(target: Path, schema: LogSchema) -> Iterator[LogWriter]:
    """Gives a writer whose file appears as `target`, whole, when the block ends well, and not at all otherwise.

    Args:
        target: its name ends in one of SINKS.
        schema: what the rows hold.

    Raises:
        DataError: an unknown suffix, or a file that cannot be written.
    """
    with _appearing(target) as (sink, pool):
        writer = LogWriter(sink, pool, schema)
        yield writer
        writer.finish()


@contextmanager
def table_writer(target: Path) -> Iterator[TableWriter]:
    """Likewise for rows that are settled tables."""
    with _appearing(target) as (sink, pool):
        writer = TableWriter(sink, pool)
        yield writer
        writer.finish()


@contextmanager
def _appearing(target: Path) -> Iterator[tuple[Sink, ThreadPoolExecutor]]:
    suffix = next((suffix for suffix in SINKS if target.name.endswith(suffix)), None)
    if suffix is None:
        raise DataError(Problem(str(target), f"a name that ends in {', '.join(SINKS)}", repr(target.name)))
    try:
        with (
            appearing_file(target) as stream,
            closing(SINKS[suffix](stream)) as sink,
            ThreadPoolExecutor(num_threads(), thread_name_prefix="write") as pool,
        ):
            yield sink, pool
    except OSError as error:
        raise DataError(Problem(str(target), "a file that can be written", error.strerror or str(error))) from error


def _gzip(text: Any) -> bytes:
    return gzip.compress(text, _GZIP_LEVEL, mtime=0)  # without the time: the same log has the same bytes


def _zstd(text: Any) -> bytes:
    return zstandard.ZstdCompressor().compress(text)


def _parquet(stream: IO[bytes], schema: pa.Schema) -> Any:
    return pa.parquet.ParquetWriter(stream, schema, compression="zstd")


def _ipc(stream: IO[bytes], schema: pa.Schema) -> Any:
    return pa.ipc.new_file(stream, schema, options=pa.ipc.IpcWriteOptions(compression="zstd"))


SINKS: dict[str, Callable[[IO[bytes]], Sink]] = {
    ".jsonl": lambda stream: JsonLinesSink(stream, lambda text: text),
    ".jsonl.gz": lambda stream: JsonLinesSink(stream, _gzip),
    ".jsonl.zst": lambda stream: JsonLinesSink(stream, _zstd),
    ".parquet": lambda stream: ArrowSink(stream, _parquet),
    ".arrow": lambda stream: ArrowSink(stream, _ipc),
    ".csv": CsvSink,
}
