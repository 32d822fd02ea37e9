"""The embedded engine: DuckDB in this process, sealed, sorts with as much memory as it is given and the disk."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from reagent_lite.config.timeline import TimelineConfig
from reagent_lite.data.formats.blocks import Show, num_threads
from reagent_lite.data.formats.files import InputFile
from reagent_lite.data.timeline.events import HASHES, ORDER, Checked, check_events
from reagent_lite.data.timeline.pairing import Counts, Pairing
from reagent_lite.data.writing.part_files import ROW_GROUP_ROWS
from reagent_lite.errors import DataError, Problem, first_line

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_TIMES_ROWS = 3.0
"""Memory that a sort takes, in bytes of its rows; where there is less, episodes are sorted part by part."""


class DuckDBEngine:
    """Sorts events in this process.

    Args of the constructor:
        folder: temporary folder of its own, on a local disk; nothing else can be reached from SQL.
        memory_bytes: what it may take; more goes to the disk.
    """

    def __init__(self, folder: Path, memory_bytes: int) -> None:
        import duckdb  # 0.1 s that other engines need not pay

        # Arrow's own pool keeps what threads have freed: 554 MB resident at most where this one takes 438
        self._pool = pa.default_memory_pool()
        pa.set_memory_pool(pa.system_memory_pool())
        self._events, self._memory_bytes = folder / "events.parquet", memory_bytes
        settings: dict[str, Any] = {
            "threads": num_threads(),
            "memory_limit": f"{memory_bytes // 1_000_000}MB",
            "temp_directory": str(folder / "spill"),
            "preserve_insertion_order": False,
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
        }
        self._connection: DuckDBPyConnection = duckdb.connect(":memory:", config=settings)
        self._connection.execute(f"SET allowed_directories = [{_text(str(folder))}, {_text(_pattern(str(folder)))}]")
        # from here on nothing but this folder can be reached, and nothing can change that
        self._connection.execute("SET enable_external_access = false")
        self._connection.execute("SET lock_configuration = true")

    def load(self, config: TimelineConfig, files: Sequence[InputFile], show: Show) -> Checked:
        """Makes relation `events` of the files; see Engine."""
        found = check_events(config, files, 0, self._events, show)
        # names of folders such as ds=2026-01-31 are no columns
        scan = f"read_parquet({_text(_pattern(str(self._events)))}, hive_partitioning = false)"
        with _problems_of_data():
            self._connection.execute(f"CREATE VIEW events AS SELECT * FROM {scan}")
        return found

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """Runs a query of few rows."""
        with _problems_of_data():
            return self._connection.sql(query).fetchall()

    def write(self, pairing: Pairing, folders: Sequence[Path], show: Show) -> tuple[list[dict[int, int]], Counts]:
        """Writes the transitions of the events in order; see Engine."""
        parts = max(1, -(-int(pairing.found.nbytes * _TIMES_ROWS) // self._memory_bytes))
        with closing(self._sorted(parts)) as events:  # or, after an error, it would keep the file open
            return pairing.write(events, folders, show)

    def _sorted(self, parts: int) -> Generator[pa.RecordBatch]:
        for part in range(parts):
            low, high = (HASHES * number // parts for number in (part, part + 1))
            condition = f"mdp_id IS NOT NULL AND _place >= {low} AND _place < {high}"
            query = f"SELECT * FROM events WHERE {condition} ORDER BY {ORDER}"
            with _problems_of_data():
                yield from self._connection.sql(query).to_arrow_reader(ROW_GROUP_ROWS // 4)

    def close(self) -> None:
        """Closes the database."""
        self._connection.close()
        pa.set_memory_pool(self._pool)


@contextmanager
def _problems_of_data() -> Iterator[None]:
    """Turns what DuckDB finds wrong with files, disks and memory into errors of ours."""
    import duckdb

    todo = "Raise memory_limit_mb, or free disk in temporary_directory"
    try:
        yield
    except duckdb.OutOfMemoryException as error:
        raise DataError(Problem("DuckDB", "memory and disk for the work", first_line(error), todo)) from error
    except OSError as error:  # how Arrow passes on DuckDB's errors while rows are read
        got = first_line(error)
        advice = todo if "emory" in got else ""
        raise DataError(Problem("DuckDB", "memory and disk for the work", got, advice)) from error
    except duckdb.Error as error:
        raise DataError(Problem("DuckDB", "files that can be read and written", first_line(error))) from error


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


def _pattern(path: str) -> str:
    """Returns a path as a pattern that means it alone: DuckDB reads patterns."""
    return "".join(f"[{one}]" if one in "*?[" else one for one in path)
