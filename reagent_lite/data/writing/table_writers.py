"""Rows to a file of any format: JSON lines, Parquet, Arrow IPC or CSV, by the name of the file.

    Arrow tables ─► encoded in threads ─► appended in order under a temporary name ─► fsync ─► renamed

formats/encodings.py says how rows become bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.compute as pc

from reagent_lite.data.formats.blocks import num_threads
from reagent_lite.data.formats.encodings import Encoding
from reagent_lite.data.formats.format_table import ENCODINGS
from reagent_lite.disk_room import disk_errors
from reagent_lite.errors import DataError, Problem, first_line
from reagent_lite.folder_identity import FolderIdentity
from reagent_lite.whole_files import appearing_file


class TableWriter:
    """Writes tables in order; made by `table_writer`."""

    def __init__(self, where: str, encoding: Encoding, stream: IO[bytes], closing: ExitStack) -> None:
        self._where = where
        self._encoding = encoding
        self._stream = stream
        self._closing = closing
        self._pool = closing.enter_context(ThreadPoolExecutor(num_threads(), thread_name_prefix="write"))
        self._pending: deque[Future[Any]] = deque()
        self._file: Any = None

    def write(self, table: pa.Table) -> None:
        """Adds rows; all tables have the same columns, unless the format is JSON lines."""
        self._pending.append(self._pool.submit(self._encoding.encode, table))
        self.flush(waiting=num_threads())

    def flush(self, *, waiting: int = 0) -> None:
        """Appends tables to the file, in order, until `waiting` of them are left."""
        try:
            while len(self._pending) > waiting:
                encoded = self._pending.popleft().result()
                if self._file is None:
                    self._file = self._closing.enter_context(self._encoding.opened(self._stream, encoded))
                self._file.write(encoded)
        except (ArithmeticError, ValueError, pa.ArrowException) as error:
            expected = "values that the format can hold"
            todo = "Choose another format, or leave their column out"
            raise DataError(Problem(self._where, expected, first_line(error), todo)) from error


@contextmanager
def table_writer(target: Path, *, within: FolderIdentity | None = None) -> Iterator[TableWriter]:
    """Yields a writer whose file appears as `target` if the block ends without an error, and not at all otherwise.

    Args:
        target: the file.
        within: see `whole_files.appearing_file`.

    Raises:
        DataError: a name that ends in none of ENCODINGS, values that the format cannot hold, or a file that cannot be
            written.
    """
    encoding = encoding_of(target)
    with (
        disk_errors(str(target), "a file that can be written"),
        appearing_file(target, within=within) as stream,
        ExitStack() as closing,
    ):
        writer = TableWriter(str(target), encoding, stream, closing)
        yield writer
        writer.flush()


def without_formulas(table: pa.Table) -> pa.Table:
    """Returns a table with an apostrophe before strings that spreadsheets take for formulas (OWASP, CSV injection).

    Names of columns are among these strings; numbers stay as they are, also those that are strings, as -0.5.
    """
    for index, field in enumerate(table.schema):
        if pa.types.is_string(field.type) or pa.types.is_large_string(field.type):
            table = table.set_column(index, field, _escape_formulas(table.column(index)))
    return table.rename_columns(_escape_formulas(pa.array(table.column_names, pa.string())).to_pylist())


def _escape_formulas(cells: pa.Array) -> pa.Array:
    escaped = pc.replace_substring_regex(cells, r"\A([=+\-@\t\r\n＝＋－＠])", r"'\1")
    return pc.if_else(pc.match_substring_regex(cells, r"\A[-+]?[0-9]*[.,]?[0-9]+([eE][-+]?[0-9]+)?\z"), cells, escaped)


def encoding_of(target: Path) -> Encoding:
    """Returns how rows become the bytes of a file, by its name.

    Raises:
        DataError: a name that ends in none of ENCODINGS.
    """
    encoding = next((encoding for suffix, encoding in ENCODINGS.items() if target.name.endswith(suffix)), None)
    if encoding is None:
        raise DataError(Problem(str(target), f"a name that ends in {', '.join(ENCODINGS)}", repr(target.name)))
    return encoding
