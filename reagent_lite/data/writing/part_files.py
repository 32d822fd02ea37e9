"""Parquet files part-00000.parquet and so on in one folder, from rows in the order of these files.

The same rows give the same bytes, in whatever batches they are added: row groups have a fixed number of rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from reagent_lite.disk_room import room_in

ROW_GROUP_ROWS = 1 << 16
PARQUET: Final[dict[str, Any]] = {"compression": "lz4", "use_dictionary": False}
"""Options of the files.

Measured with 4, 8 and 16 features: 38, 71 and 136 bytes a row; with Zstandard 37, 66 and 126, and 40 % more processor
time to write and 20 % more to read. Dictionaries save a byte and take half as much time again.
"""


class PartFiles:
    """Writes the files of one folder, one after the other; raises ConfigError if the disk is full.

    Args:
        folder: the folder.
        key: the config key that names it.
        names: names of the columns in the files.
        columns: columns of incoming rows; only the first len(names) are written.

    Attributes:
        rows: number of rows of each file that has some, by the file's number.
    """

    def __init__(self, folder: Path, key: str, names: Sequence[str], columns: pa.Schema) -> None:
        self._folder = folder
        self._key = key
        self._columns = pa.schema([pa.field(name, columns.field(at).type) for at, name in enumerate(names)])
        self.rows: dict[int, int] = {}
        self._held: list[pa.RecordBatch] = []
        self._file: tuple[pa.parquet.ParquetWriter, IO[bytes]] | None = None

    def __enter__(self) -> PartFiles:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if kind is None:
                with room_in(self._folder.parent, self._key):
                    self._end()
        finally:
            if self._file is not None:
                writer, stream = self._file
                writer.is_open = False  # after an error; its destructor writes if it is open
                stream.close()

    def write(self, batch: pa.RecordBatch) -> None:
        """Adds rows; their column `part`, which never decreases from row to row, is the number of the file."""
        numbers = batch.column("part").to_numpy()
        kept = pa.RecordBatch.from_arrays(batch.columns[: len(self._columns)], schema=self._columns)
        starts = np.flatnonzero(np.diff(numbers, prepend=-1)).tolist()
        with room_in(self._folder.parent, self._key):
            for start, stop in itertools.pairwise((*starts, len(numbers))):
                number = int(numbers[start])
                if number not in self.rows:
                    self._begin(number)
                self._held.append(kept.slice(start, stop - start))
                self.rows[number] += stop - start
                if sum(batch_held.num_rows for batch_held in self._held) >= ROW_GROUP_ROWS:
                    self._flush(whole_groups=True)

    def write_empty(self, numbers: Iterable[int]) -> None:
        """Writes files without rows."""
        for number in numbers:
            self._begin(number)

    def _begin(self, number: int) -> None:
        self._end()
        self.rows[number] = 0
        stream = (self._folder / part_name(number)).open("wb")
        self._file = pa.parquet.ParquetWriter(stream, self._columns, **PARQUET), stream

    def _end(self) -> None:
        if self._file is not None:
            self._flush(whole_groups=False)
            for file in self._file:
                file.close()
            self._file = None

    def _flush(self, *, whole_groups: bool) -> None:
        table = pa.Table.from_batches(self._held, self._columns)
        rows = table.num_rows - (table.num_rows % ROW_GROUP_ROWS if whole_groups else 0)
        if rows and self._file is not None:
            # in one piece: pages end where chunks do
            self._file[0].write_table(table.slice(0, rows).combine_chunks(), ROW_GROUP_ROWS)
        self._held = table.slice(rows).to_batches()


def part_name(number: int) -> str:
    """Returns the name of the file with a number."""
    return f"part-{number:05}.parquet"
