"""Data files, the blocks of rows that readers make of them, and the progress of reading a file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from reagent_lite.config.column_names import PLAIN_CSV, CsvFormat
from reagent_lite.data.formats.frames import location
from reagent_lite.errors import DataError, Problem
from reagent_lite.id_values import IdFeature
from reagent_lite.item_table import ItemTable
from reagent_lite.types import Image

if TYPE_CHECKING:
    import pyarrow as pa

JSON_LINES = (".json", ".jsonl", ".ndjson")
"""Extensions of JSON lines."""
MOST_THREADS = 8
"""Threads that parse blocks; each holds about 60 MB of a block in its various forms."""


def num_threads() -> int:
    """Returns the number of threads that parse blocks: the cores this process may use, at most MOST_THREADS."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MOST_THREADS)


class ColumnNames(Protocol):
    """A user's own names of the standard columns; see rows/column_mapping.py."""

    @property
    def csv(self) -> CsvFormat:
        """How CSV files are written."""
        ...

    @property
    def raw(self) -> tuple[str, ...]:
        """Names of the columns whose values are read from their texts."""
        ...

    def meaning(self, name: str) -> str:
        """Returns the field that a column holds; `field.name` if it holds one of the field's features."""
        ...

    def read(self, block: Block) -> Block:
        """Returns a block with the standard columns."""
        ...


class RowSelection(Protocol):
    """The rows of a log that are read; see ../partition.py."""

    def select(self, block: Block) -> Block:
        """Returns some rows of a block with the standard columns."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFile:
    """One data file of an input.

    Attributes:
        path: local path or URL.
        name: name inside the input's folder.
        extension: the data format's extension, lower case, without the compression's: ".json" for "a.json.gz".
        compression: ".gz", ".bz2", ".zst" or "" for none.
        size: bytes as stored.
        modified_ns: local modification time; 0 if the storage has none.
        sha256: sha256 of the stored bytes according to a manifest, which readers check; "" without a manifest.
        columns: the user's own names of columns; None if they are the standard ones.
        features: feature ids with their names, if the rows have ids only.
        log: number of the file's log, from 1, if several logs are read as one; else 0.
        items: the table of the items that actions may name; not compared by `==`.
        id_features: features whose values are ids.
        selection: selects the rows that are read; None for all.
        image: shape of its states if they are images; None if they have features.
    """

    path: str
    name: str
    extension: str
    compression: str
    size: int
    modified_ns: int
    sha256: str = ""
    columns: ColumnNames | None = None
    features: tuple[int, ...] = ()
    log: int = 0
    items: ItemTable | None = field(default=None, compare=False, repr=False)
    id_features: tuple[IdFeature, ...] = ()
    selection: RowSelection | None = None
    image: Image | None = None

    @property
    def id_columns(self) -> tuple[str, ...]:
        """Columns other than the standard ones that features of ids are in."""
        return tuple(dict.fromkeys(feature.column for feature in self.id_features if feature.column))

    @property
    def label(self) -> str:
        """Name that tells the files of an input apart, also those of several logs."""
        return f"{self.log}/{self.name}" if self.log else self.name

    def location(self, row: int | None = None) -> str:
        """Returns how errors name the file or one of its rows; see frames.location."""
        return location(self.path, row)

    @property
    def remote(self) -> bool:
        """Whether it is opened through fsspec."""
        return "://" in self.path

    @property
    def cells(self) -> bool:
        """Whether values are cells of text, without types of their own, as in CSV."""
        return self.extension == ".csv"

    @property
    def own_columns(self) -> bool:
        """Whether each row may have columns of its own, as in JSON lines, so that a block may lack some of the log."""
        return self.extension in JSON_LINES

    @property
    def csv(self) -> CsvFormat:
        """How the file is written if it is CSV."""
        return PLAIN_CSV if self.columns is None else self.columns.csv

    def open(self) -> IO[bytes]:
        """Opens the stored bytes for reading; errors of the storage become DataError."""
        try:
            if not self.remote:
                return open(self.path, "rb")
            import fsspec  # only remote paths pay for its import

            stream: IO[bytes] = fsspec.open(self.path, "rb").open()
            return stream
        except (OSError, ImportError) as error:
            raise DataError(Problem(self.path, "a readable file", f"{type(error).__name__}: {error}")) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Some rows of one file.

    Attributes:
        file: the file that the rows are from.
        file_number: number of the file in the input, from 0.
        table: n rows as Arrow columns.
        lines: [n] line of each row in the file (Parquet, Arrow IPC: its number), from 1.
    """

    file: InputFile
    file_number: int
    table: pa.Table
    lines: NDArray[np.int64]

    def where(self, row: int) -> str:
        """Returns "file:line" of a row of the block."""
        return self.file.location(int(self.lines[row]))


@dataclass(slots=True)
class Position:
    """Progress of reading one file: the stored bytes read, and the sha256 of all of them at the end."""

    bytes_read: int = 0
    sha256: str = ""


Show = Callable[[int, int], None]
"""Shows progress; called with (units done, total units)."""
Reader = Callable[[InputFile, int, Position], Iterator[Callable[[], Block]]]
"""Yields a function for each block of a file, which parses the block; it is called once, in any thread and order.

Arguments are the file, its number in the input, and the position, which the reader keeps up to date. Some readers also
take `columns`, the columns to read, or None for all; the other columns of their blocks are null.
"""
