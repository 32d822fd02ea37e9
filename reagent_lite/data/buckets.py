"""Rows in buckets by a hash, on a disk where memory is short, so that any number of them can be sorted group by group.

    rows ─► held until they are a chunk ─► partitioned by hash ─► in memory while there is room, else one file a bucket
    groups of buckets, to be sorted ◄───────────────────────────────────────────────────────────────────┘

Rows of one hash are in one group, in the order in which they were added. A chunk is partitioned at once, so that the
pieces of its rows are few and large.
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

from reagent_lite.data.formats.files import InputFile
from reagent_lite.data.formats.schema import in_one_piece

HASHES = 2**32
"""Hashes are below it."""
BUCKET_BYTES = 1 << 20
"""Stored bytes of the files for each bucket, which are some MB in memory."""
_MOST_BUCKETS = 1024
_CHUNK_BYTES = 1 << 26  # of which each bucket gets 64 KiB or more: smaller pieces are slow


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketGroup:
    """Rows of neighbouring hashes.

    Attributes:
        rows: how many there are.
        held: those in memory.
        paths: files that may hold others.
    """

    rows: int
    held: tuple[pa.Table, ...]
    paths: tuple[Path, ...]

    def tables(self, *, last: bool = True) -> list[pa.Table]:
        """Returns the rows; each table has the columns with which its rows were added.

        Args:
            last: whether this is the last read, which frees their disk.
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
    """Holds rows by their hash.

    Args of the constructor:
        folder: empty; gets a file for each bucket, as soon as memory does not suffice.
        files: those that the rows are from; their size decides how many buckets there are.
        memory_bytes: how many bytes rows take in memory, at most.
    """

    def __init__(self, folder: Path, files: Sequence[InputFile], memory_bytes: int) -> None:
        # half of the memory is for rows that stay there, the rest for the chunk and its copy in order
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
        # with the metadata of columns, which says whose text is JSON
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
        table = in_order(tables, pa.array(order))
        bounds = np.searchsorted(bucket[order], np.arange(self._count + 1))
        self._rows += np.diff(bounds)
        self._bytes += self._chunk_size
        self._chunk = []
        self._chunk_size = 0
        if table.nbytes <= self._room:
            self._room -= table.nbytes
            self._partitioned.append((table, bounds))
            return
        self._room = 0  # later rows lie behind those in memory
        for number in np.flatnonzero(np.diff(bounds)).tolist():
            start, stop = bounds[number : number + 2]
            with pa.OSFile(str(self._paths[number]), "ab") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
                stream.write_table(table.slice(start, stop - start))

    def groups(self, num_bytes: int) -> list[BucketGroup]:
        """Returns all rows, once they are added, in groups of about `num_bytes` in memory, in the order of hashes."""
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


def in_order(tables: Sequence[pa.Table], order: pa.Array) -> pa.Table:
    """Returns the rows of tables of the same columns in another order."""
    table = pa.concat_tables(tables)
    # column by column, which takes twice the memory of the table; all at once would take three times
    columns = [in_one_piece(column).take(order) for column in table.columns]
    return pa.table(columns, schema=table.schema)
