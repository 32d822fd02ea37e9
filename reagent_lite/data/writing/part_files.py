"""Parquet files of a folder, written one after the other from rows in the order of their place.

The same rows give the same bytes, however they come: row groups have a fixed number of rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import numpy as np
import pyarrow as pa
import pyarrow.parquet

ROW_GROUP_ROWS = 1 << 17
_ALL = 1 << 32
_BESIDE = ("folder", "place")
"""Columns that say where a row goes and are not written."""


class PartFiles:
    """The files part-00000.parquet and so on of one folder.

    Args of the constructor:
        folder: where they go.
        files: how many; file f holds the rows with f / files <= place / 2^32 < (f + 1) / files.
        columns: of the rows.

    Attributes:
        rows: of each file.
    """

    def __init__(self, folder: Path, files: int, columns: pa.Schema) -> None:
        self._folder, self._files = folder, files
        kept = [field for field in columns if field.name not in _BESIDE]
        self._columns = pa.schema([field.remove_metadata() for field in kept])
        self.rows = [0] * files
        self._held: list[pa.RecordBatch] = []
        self._number = 0
        self._writer = self._opened()

    def __enter__(self) -> PartFiles:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Ends the files that are left, those without rows among them."""
        try:
            if kind is None:
                while self._number < self._files - 1:
                    self._next()
                self._end()
        finally:
            self._stream.close()

    def write(self, batch: pa.RecordBatch) -> None:
        """Adds rows in the order of their place."""
        numbers = batch.column("place").to_numpy() * self._files // _ALL
        kept = batch.select(self._columns.names)
        # where the file changes
        bounds = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)]
        for start, stop in itertools.pairwise(bounds):
            if start == stop:
                continue
            while self._number < numbers[start]:
                self._next()
            self._held.append(kept.slice(start, stop - start))
            self.rows[self._number] += stop - start
            if sum(one.num_rows for one in self._held) >= ROW_GROUP_ROWS:
                self._flush(whole_groups=True)

    def _end(self) -> None:
        self._flush(whole_groups=False)
        self._writer.close()
        self._stream.close()

    def _next(self) -> None:
        self._end()
        self._number += 1
        self._writer = self._opened()

    def _opened(self) -> pa.parquet.ParquetWriter:
        # [m] numbers that hardly repeat take 23.5 bytes a row of four as a dictionary that overflows, 15.0 plain
        leaves = [leaf for field in self._columns for leaf in _leaves(field.name, field.type)]
        distinct = [path for path, kind in leaves if not pa.types.is_floating(kind)]
        # a stream of our own: after an error nothing keeps the disk busy
        self._stream = (self._folder / f"part-{self._number:05}.parquet").open("wb")
        return pa.parquet.ParquetWriter(
            self._stream, self._columns, compression="zstd", compression_level=1, use_dictionary=distinct
        )

    def _flush(self, *, whole_groups: bool) -> None:
        table = pa.Table.from_batches(self._held, self._columns)
        rows = table.num_rows // ROW_GROUP_ROWS * ROW_GROUP_ROWS if whole_groups else table.num_rows
        if rows:
            # in one piece: pages end where chunks do
            self._writer.write_table(table.slice(0, rows).combine_chunks(), ROW_GROUP_ROWS)
        self._held = table.slice(rows).to_batches()


def _leaves(path: str, kind: pa.DataType) -> Iterator[tuple[str, pa.DataType]]:
    """Yields the columns of a Parquet file that a column of a type becomes, by their paths there."""
    if pa.types.is_map(kind):
        yield from _leaves(f"{path}.key_value.key", kind.key_type)
        yield from _leaves(f"{path}.key_value.value", kind.item_type)
    elif pa.types.is_list(kind):
        yield from _leaves(f"{path}.list.element", kind.value_type)
    elif pa.types.is_struct(kind):
        for child in kind:
            yield from _leaves(f"{path}.{child.name}", child.type)
    else:
        yield path, kind
