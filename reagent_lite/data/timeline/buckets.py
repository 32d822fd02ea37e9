"""Rows partitioned into buckets by a hash, in memory or on disk, so that any number can be sorted group by group.

    rows ─► collected to a chunk ─► partitioned by hash ─► in memory while there is room, else a file per bucket
    groups of buckets, to be sorted ◄────────────────────────────────────────────────────────┘

Rows with the same hash are in one group, in the order in which they were added. Rows are partitioned a chunk at a time,
so that each bucket gets few and large pieces.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from reagent_lite.data.formats.blocks import InputFile
from reagent_lite.data.formats.schema import in_one_piece

HASHES = 2**32
"""Number of hashes: they are integers from 0 to HASHES - 1."""
BUCKET_BYTES = 1 << 20
"""Input bytes per bucket, as stored; in memory their rows take some MB."""
_MOST_BUCKETS = 1024
_CHUNK_BYTES = 1 << 26  # each bucket gets 64 KiB of a chunk, or more: smaller pieces are slow


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketGroup:
    """The rows of some consecutive buckets.

    Attributes:
        rows: number of rows.
        held: the rows in memory.
        paths: files with the other rows; some may not exist.
    """

    rows: int
    held: tuple[pa.Table, ...]
    paths: tuple[Path, ...]

    def tables(self, *, last: bool = True) -> list[pa.Table]:
        """Returns the rows; each table has the columns with which its rows were added.

        Args:
            last: whether the rows are not read again; their files are then removed.
        """
        tables = list(self.held)
        for path in filter(Path.exists, self.paths):
            with pa.OSFile(str(path), "rb") as source:
                while source.tell() < source.size():
                    tables.append(pa.ipc.open_stream(source).read_all())
            if last:
                path.unlink()
        return tables


class Buckets:
    """Partitions rows by their hash.

    Args:
        folder: an empty folder; gets a file for each bucket once memory does not suffice.
        files: the files that the rows are from; their size determines the number of buckets.
        memory_bytes: largest number of bytes that rows take in memory.
    """

    def __init__(self, folder: Path, files: Sequence[InputFile], memory_bytes: int) -> None:
        # half of the memory is for rows that stay there, the rest for a chunk and its sorted copy
        self._room = memory_bytes // 2
        self._chunk_bytes = min(memory_bytes // 4, _CHUNK_BYTES)
        self._count = min(_MOST_BUCKETS, 1 + sum(file.size for file in files) // BUCKET_BYTES)
        self._paths = [folder / f"{number}.arrows" for number in range(self._count)]
        self._chunk: list[tuple[pa.Table, NDArray[Any]]] = []
        self._chunk_size = 0
        self._bytes = 0
        self._partitioned: list[tuple[pa.Table, NDArray[np.int64]]] = []
        self._rows = np.zeros(self._count, np.int64)

    def add(self, table: pa.Table, hashes: NDArray[Any]) -> None:
        """Adds n rows with their hashes [n], integers below HASHES."""
        # the metadata of columns is compared too: it says which text is JSON
        if self._chunk and not self._chunk[0][0].schema.equals(table.schema, check_metadata=True):
            self._partition()
        self._chunk.append((table, hashes))
        self._chunk_size += table.nbytes
        if self._chunk_size >= self._chunk_bytes:
            self._partition()

    def _partition(self) -> None:
        tables, hashes = zip(*self._chunk, strict=True)
        bucket = (np.concatenate(hashes).astype(np.int64) * self._count // HASHES).astype(np.uint16)
        order = np.argsort(bucket, kind="stable")
        table = reordered_rows(tables, pa.array(order))
        bounds = np.searchsorted(bucket[order], np.arange(self._count + 1))
        self._rows += np.diff(bounds)
        self._bytes += self._chunk_size
        self._chunk = []
        self._chunk_size = 0
        if table.nbytes <= self._room:
            self._room -= table.nbytes
            self._partitioned.append((table, bounds))
            return
        self._room = 0  # a bucket's rows in memory come before those in its file, so that all later rows go to files
        for number in np.flatnonzero(np.diff(bounds)).tolist():
            start, stop = bounds[number : number + 2]
            with pa.OSFile(str(self._paths[number]), "ab") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
                stream.write_table(table.slice(start, stop - start))

    def groups(self, num_bytes: int) -> list[BucketGroup]:
        """Returns all added rows in groups that take about `num_bytes` in memory, in the order of hashes."""
        if self._chunk:
            self._partition()
        size = self._bytes / max(1, self._rows.sum())
        changes = np.diff(np.cumsum(self._rows) * size // num_bytes)
        bounds = (0, *(np.flatnonzero(changes) + 1).tolist(), self._count)
        return [group for start, stop in itertools.pairwise(bounds) if (group := self._group(start, stop)).rows]

    def _group(self, start: int, stop: int) -> BucketGroup:
        return BucketGroup(
            rows=int(self._rows[start:stop].sum()),
            held=tuple(table.slice(bounds[start], bounds[stop] - bounds[start]) for table, bounds in self._partitioned),
            paths=tuple(self._paths[start:stop]),
        )


def reordered_rows(tables: Sequence[pa.Table], order: pa.Array) -> pa.Table:
    """Returns the rows of tables with the same columns in another order."""
    table = pa.concat_tables(tables)
    # column by column, which takes twice the memory of the table; all at once would take three times
    columns = [in_one_piece(column).take(order) for column in table.columns]
    return pa.table(columns, schema=table.schema)
