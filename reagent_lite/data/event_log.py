"""Writing logs: whole episodes as JSON lines or Parquet, as logged decisions or as transitions.

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
from pathlib import Path
from typing import IO, Any, Protocol

import pyarrow as pa
import pyarrow.parquet
import zstandard

from reagent_lite.data.event_log_columns import EpisodeBlock, LogSchema, json_lines, require_finite, table
from reagent_lite.data.readers import num_threads
from reagent_lite.errors import DataError, Problem
from reagent_lite.files import appearing_file

_GZIP_LEVEL = 4


class Sink(Protocol):
    """How blocks become a file's bytes."""

    def encode(self, block: EpisodeBlock) -> Any:
        """Returns a block as `append` takes it; called in threads."""
        ...

    def append(self, encoded: Any) -> None:
        """Adds to the file; called in order."""
        ...

    def close(self) -> None:
        """Writes what ends the file."""
        ...


class JsonLinesSink:
    """One JSON object a line; each block is compressed by itself, which gzip and zstandard readers take as one file."""

    def __init__(self, stream: IO[bytes], schema: LogSchema, compress: Callable[[Any], Any]) -> None:
        self._stream, self._schema, self._compress = stream, schema, compress

    def encode(self, block: EpisodeBlock) -> Any:
        """Returns the block's bytes."""
        return self._compress(json_lines(block, self._schema))

    def append(self, encoded: Any) -> None:
        """Adds bytes."""
        self._stream.write(encoded)

    def close(self) -> None:
        """Does nothing: the last line ends the file."""


class ParquetSink:
    """A row group a block."""

    def __init__(self, stream: IO[bytes], schema: LogSchema) -> None:
        self._stream, self._schema = stream, schema
        self._writer: pa.parquet.ParquetWriter | None = None

    def encode(self, block: EpisodeBlock) -> Any:
        """Returns the block's Arrow table."""
        return table(block, self._schema)

    def append(self, encoded: Any) -> None:
        """Adds a table's rows."""
        if self._writer is None:
            self._writer = pa.parquet.ParquetWriter(self._stream, encoded.schema, compression="zstd")
        self._writer.write_table(encoded)

    def close(self) -> None:
        """Writes the footer."""
        if self._writer is not None:
            self._writer.close()


class LogWriter:
    """Takes blocks and writes them in order; `log_writer` makes it."""

    def __init__(self, sink: Sink, pool: ThreadPoolExecutor) -> None:
        self._sink, self._pool = sink, pool
        self._pending: deque[Future[Any]] = deque()

    def write(self, block: EpisodeBlock) -> None:
        """Adds whole episodes to the log.

        Raises:
            DataError: a number of the block is NaN or infinite.
        """
        require_finite(block)
        self._pending.append(self._pool.submit(self._sink.encode, block))
        while len(self._pending) > num_threads():
            self._sink.append(self._pending.popleft().result())

    def finish(self) -> None:
        """Writes what is still being encoded."""
        while self._pending:
            self._sink.append(self._pending.popleft().result())


@contextmanager
def log_writer(target: Path, schema: LogSchema) -> Iterator[LogWriter]:
    """Gives a writer whose file appears as `target`, whole, when the block ends well, and not at all otherwise.

    Args:
        target: its name ends in one of SINKS.
        schema: what the rows hold.

    Raises:
        DataError: an unknown suffix, or a file that cannot be written.
    """
    suffix = next((suffix for suffix in SINKS if target.name.endswith(suffix)), None)
    if suffix is None:
        raise DataError(Problem(str(target), f"a name that ends in {', '.join(SINKS)}", repr(target.name)))
    try:
        with (
            appearing_file(target) as stream,
            closing(SINKS[suffix](stream, schema)) as sink,
            ThreadPoolExecutor(num_threads(), thread_name_prefix="write") as pool,
        ):
            writer = LogWriter(sink, pool)
            yield writer
            writer.finish()
    except OSError as error:
        raise DataError(Problem(str(target), "a file that can be written", error.strerror or str(error))) from error


def _gzip(text: Any) -> bytes:
    return gzip.compress(text, _GZIP_LEVEL, mtime=0)  # without the time: the same log has the same bytes


def _zstd(text: Any) -> bytes:
    return zstandard.ZstdCompressor().compress(text)


SINKS: dict[str, Callable[[IO[bytes], LogSchema], Sink]] = {
    ".jsonl": lambda stream, schema: JsonLinesSink(stream, schema, lambda text: text),
    ".jsonl.gz": lambda stream, schema: JsonLinesSink(stream, schema, _gzip),
    ".jsonl.zst": lambda stream, schema: JsonLinesSink(stream, schema, _zstd),
    ".parquet": ParquetSink,
}
