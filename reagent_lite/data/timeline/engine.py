"""What turns events into transitions: a SQL engine, and the few words in which engines differ.

    files ─► relation `events` ─► named queries ─► rows of figures, and Parquet files
             Engine.load          Engine.name       Engine.rows      Engine.write

The transformation is written once, in the SQL that DuckDB and Spark both run (pairs.py).
Identifiers are quoted by `Dialect.quote`; numbers and texts from outside become literals by `Dialect.literal`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any, Protocol

from reagent_lite.data.formats.files import InputFile
from reagent_lite.data.rows.contract import Contract

Show = Callable[[int, int], None]
"""Called with (units done, units in all)."""


@contextmanager
def looking(seconds: float, look: Callable[[], None]) -> Iterator[None]:
    """Calls `look` every so many seconds, from a thread of its own, until the block ends."""
    ended = Event()

    def work() -> None:
        while not ended.wait(seconds):
            look()

    watcher = Thread(target=work, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


@dataclass(frozen=True, slots=True, kw_only=True)
class EventColumns:
    """Which columns the events have, beside those that no event lacks.

    Attributes:
        discrete: actions are names; else maps of features.
        optional: of OPTIONAL_COLUMNS, those that some file has.
        extra: further columns that are carried along, as the config orders them.
    """

    discrete: bool
    optional: frozenset[str]
    extra: tuple[str, ...] = ()


OPTIONAL_COLUMNS = (
    "ds",
    "possible_actions",
    "action_probability",
    "metrics",
    "terminal",
    "truncated",
    "next_state_features",
    "possible_next_actions",
)
"""What events may lack. The last two count where `truncated` is true: what was seen when a limit cut the episode."""


class Dialect(Protocol):
    """How an engine says what engines say differently."""

    @property
    def types(self) -> dict[str, str]:
        """Names of the types text, integer, number, single, flag, features, named, names and candidates."""
        ...

    def quote(self, name: str) -> str:
        """Returns an identifier that may hold any character."""
        ...

    def literal(self, value: str | float) -> str:
        """Returns a text or a number as SQL."""
        ...

    def hash32(self, text: str, number: int) -> str:
        """Returns SQL for the bytes 4·number to 4·number + 3 of md5(text) as an integer below 2^32; number 0 to 3."""
        ...

    def entries(self, column: str, relation: str) -> str:
        """Returns a query for all entries of a column of maps, as columns k and v."""
        ...

    def elements(self, column: str, relation: str) -> str:
        """Returns a query for all elements of a column of lists, as column e."""
        ...

    def holds(self, names: str, name: str) -> str:
        """Returns SQL that says whether a list of names has a name."""
        ...

    def holds_features(self, candidates: str, features: str) -> str:
        """Returns SQL that says whether a list of maps has a map with the same entries, in whatever order."""
        ...

    def length(self, elements: str) -> str:
        """Returns SQL for the number of a list's elements."""
        ...

    def list_of(self, element: str) -> str:
        """Returns SQL for a list of one element."""
        ...

    def infinite(self, number: str) -> str:
        """Returns SQL that says whether a number is NaN or infinite."""
        ...

    def any_infinite(self, features: str) -> str:
        """Returns SQL that says whether a map has an infinite value; NaN counts as absent."""
        ...

    def any_not_finite(self, numbers: str) -> str:
        """Returns SQL that says whether a map has a value that is NaN or infinite."""
        ...

    def empty(self, like: str) -> str:
        """Returns SQL for an empty list of a column's type; null where the column is."""
        ...

    def value_of(self, named: str, key: str) -> str:
        """Returns SQL for the value of a key in a map, null without one."""
        ...

    def map_of(self, values: dict[str, str]) -> str:
        """Returns SQL for a map of names to expressions, without those that are null; null where none is left."""
        ...

    def in_doubt(self) -> str:
        """Returns SQL whose order decides between rows of one mdp_id and sequence_number."""
        ...


class Engine(Protocol):
    """Holds the events as relation `events` and answers queries on them."""

    @property
    def dialect(self) -> Dialect:
        """Its SQL."""
        ...

    def load(self, files: Sequence[InputFile], contract: Contract, show: Show) -> EventColumns:
        """Makes relation `events` of the files, checked, and returns its columns.

        Besides the columns of events it has `source_file` and `source_line`, and `fault`: (rule, expected, got, todo)
        of what is wrong with a row, or null.

        Raises:
            DataError: a file that cannot be read, a column that is missing or of another type, with file and line.
        """
        ...

    @property
    def unit(self) -> str:
        """What `write` shows so and so many of, plural."""
        ...

    @property
    def hashes(self) -> tuple[str, ...] | None:
        """sha256 of each file where loading has read all bytes, else None."""
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

    def write(self, query: str, folders: Sequence[Path], files: int, rows: int, show: Show) -> list[list[int]]:
        """Runs a query over whole episodes and writes its rows as Parquet files part-00000.parquet and so on.

        Args:
            query: has two columns that are not written: `folder`, a number from 0, and `place`, below 2^32 and equal
                for the rows of an episode.
            folders: where the files go.
            files: of each folder; one without rows is written as well. File f holds f / files <= place / 2^32 < (f + 1)
                / files, so that an episode is in one of them.
            rows: how many there will be at most, for `show`.
            show: called on the way with (done, all that are known) of `unit`.

        Returns:
            Rows of each file of each folder. They are in the order of place, mdp_id and sequence_number.
        """
        ...

    def close(self) -> None:
        """Frees what the engine holds."""
        ...
