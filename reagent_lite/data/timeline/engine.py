"""What a SQL engine does for a timeline, and the temporary files of checked events that every engine queries.

    files ─► readers, contract ─► Parquet of checked events ─► named queries ─► counts, Parquet of transitions
             `check_events`       relation `events`            Engine.name      Engine.rows, Engine.write

Both engines run the same SQL (pairs.py) in Spark's words. Names that a user chose never enter it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet

from reagent_lite.data.formats.blocks import Position, Show
from reagent_lite.data.formats.files import InputFile
from reagent_lite.data.formats.reading import ALL_COLUMNS, read_blocks
from reagent_lite.data.rows.contract import Contract
from reagent_lite.data.rows.table import EventReader, schema
from reagent_lite.data.writing.part_files import ROW_GROUP_ROWS


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedEvents:
    """What reading the events has found, beside their rows.

    Attributes:
        hashes: sha256 of each file.
        seen: columns that have a value in some row.
        kinds: of the values of each further column, see rows/table.py.
        features: ids that have a name.
    """

    hashes: tuple[str, ...]
    seen: frozenset[str]
    kinds: dict[str, set[str]]
    features: frozenset[int]


class Engine(Protocol):
    """Holds the events as relation `events` and answers queries on them."""

    @property
    def array(self) -> str:
        """Name of the SQL function that makes a list of its arguments."""
        ...

    @property
    def unit(self) -> str:
        """What `write` shows so and so many of, plural."""
        ...

    def load(self, files: Sequence[InputFile], contract: Contract, show: Show) -> CheckedEvents:
        """Makes relation `events`, with the columns of rows.table.schema; further ones are called extra0 and so on.

        Raises:
            DataError: a file that cannot be read or lacks a column, with file and line; no rows in any file.
        """
        ...

    def name(self, relation: str, query: str) -> None:
        """Gives a query a name for further queries; it is run when they are."""
        ...

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """Runs a query of few rows and returns them."""
        ...

    def sums(self, query: str) -> tuple[int, ...]:
        """Runs a query of one row of counts over whole episodes; parts of them may be counted apart and added up."""
        ...

    def write(
        self, query: str, names: Sequence[str], folders: Sequence[Path], files: int, rows: int, show: Show
    ) -> list[list[int]]:
        """Runs a query over whole episodes and writes its rows as Parquet files part-00000.parquet and so on.

        Args:
            query: its columns, then `folder`, a number from 0, `part`, the number of the file there, and `place`,
                which orders the rows of a file together with mdp_id and sequence_number.
            names: of the columns in the files.
            folders: where the files go.
            files: of each folder; one without rows is written as well.
            rows: how many there will be at most, for `show`.
            show: called on the way with (done, all that are known) of `unit`.

        Returns:
            Rows of each file of each folder.
        """
        ...

    def close(self) -> None:
        """Frees what the engine holds."""
        ...


def check_events(files: Sequence[InputFile], contract: Contract, target: Path, show: Show | None) -> CheckedEvents:
    """Reads files of any format, checks their rows and writes them as one Parquet file, in bounded memory.

    Raises:
        DataError: see Engine.load.
    """
    reader, wanted = EventReader(contract), schema(discrete=contract.discrete, extra=contract.extra)
    further = {name: f"extra{number}" for number, name in enumerate(contract.extra)}
    columns = pa.schema([field.with_name(further.get(field.name, field.name)) for field in wanted])
    positions = [Position() for _ in files]
    with target.open("wb") as stream, pa.parquet.ParquetWriter(stream, columns, compression="lz4") as writer:
        for table in read_blocks(tuple(files), reader.read, positions, show, ALL_COLUMNS):
            writer.write_table(table.rename_columns(columns.names), ROW_GROUP_ROWS)
    return CheckedEvents(
        hashes=tuple(position.sha256 for position in positions),
        seen=frozenset(reader.seen),
        kinds=reader.kinds,
        features=frozenset(reader.features),
    )


@contextmanager
def polling(seconds: float, poll: Callable[[], None]) -> Iterator[None]:
    """Calls `poll` every so many seconds, from a thread of its own, until the block ends."""
    ended = Event()

    def work() -> None:
        while not ended.wait(seconds):
            poll()

    thread = Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
