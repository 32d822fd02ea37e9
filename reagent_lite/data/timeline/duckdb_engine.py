"""The embedded engine: DuckDB in this process, sealed, with as much memory as it is given and the disk for the rest."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from reagent_lite.data.formats.blocks import Show
from reagent_lite.data.formats.files import InputFile
from reagent_lite.data.formats.reading import num_threads
from reagent_lite.data.rows.contract import Contract
from reagent_lite.data.timeline.engine import CheckedEvents, check_events, polling
from reagent_lite.data.timeline.pairs import PLACE, hash32
from reagent_lite.data.writing.part_files import ROW_GROUP_ROWS, PartFiles
from reagent_lite.errors import DataError, Problem, first_line

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_MACROS = (
    "ARRAY_SIZE(items) AS LEN(items)",
    "CONV(digits, base, wanted) AS CAST(CONCAT('0x', digits) AS BIGINT)",
    "EXPLODE(items) AS UNNEST(items)",
    "MAP_FROM_ARRAYS(ids, items) AS MAP(ids, items)",
    "SLICE(items, first, number) AS items[first:first + number - 1]",
    "TO_BINARY(words, form) AS ENCODE(words)",
    "TRY_ELEMENT_AT(entries, id) AS entries[id]",
)
"""Functions of Spark, as far as pairs.py and making.py use them."""
_PROBE_ROWS = 10_000
_PROGRESS_SECONDS = 0.5
_TIMES_ROWS = 12.0
"""Memory that pairing and sorting take, in bytes of their rows."""


class DuckDBEngine:
    """Runs queries in this process.

    Args of the constructor:
        folder: temporary folder of its own, on a local disk; nothing else can be reached from SQL.
        memory_bytes: what it may take; more goes to the disk.
        threads: None takes the cores this process may use.
    """

    array, unit = "LIST_VALUE", "percent"

    def __init__(self, folder: Path, memory_bytes: int, threads: int | None = None) -> None:
        import duckdb  # 0.1 s that other engines need not pay

        self._folder, self._memory_bytes, self._parts = folder, memory_bytes, 1
        settings: dict[str, Any] = {
            "threads": threads or num_threads(),
            "memory_limit": f"{memory_bytes // 1_000_000}MB",
            "temp_directory": str(folder / "spill"),
            "preserve_insertion_order": False,
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
        }
        self._connection: DuckDBPyConnection = duckdb.connect(":memory:", config=settings)
        for macro in _MACROS:
            self._connection.execute(f"CREATE MACRO {macro}")
        self._connection.execute(f"SET allowed_directories = [{_text(str(folder))}, {_text(_pattern(str(folder)))}]")
        self._connection.execute("SET enable_progress_bar = true")  # or it does not count
        self._connection.execute("SET enable_progress_bar_print = false")
        # from here on nothing but this folder can be reached, and nothing can change that
        self._connection.execute("SET enable_external_access = false")
        self._connection.execute("SET lock_configuration = true")

    def load(self, files: Sequence[InputFile], contract: Contract, show: Show) -> CheckedEvents:
        """Makes relation `events` of the files; see Engine."""
        spool = self._folder / "events.parquet"
        found = check_events(files, contract, spool, show)
        # names of folders are no columns, whatever they say
        scan = f"read_parquet({_text(_pattern(str(spool)))}, hive_partitioning = false)"
        self.name("all_events", f"SELECT * FROM {scan}")
        self._take(0, 1)
        rows = self.rows("SELECT COUNT(*) FROM all_events")[0][0]
        with _problems_of_data():
            first = self._connection.sql(f"SELECT * FROM all_events LIMIT {_PROBE_ROWS}").to_arrow_table()
        bytes_per_row = first.nbytes / max(1, first.num_rows)
        self._parts = max(1, -(-int(rows * bytes_per_row * _TIMES_ROWS) // self._memory_bytes))
        return found

    def _take(self, part: int, parts: int) -> None:
        """Makes `events` one of so many equal parts of the episodes by their place, which fit into memory."""
        low, high = (2**32 * number // parts for number in (part, part + 1))
        condition = f" WHERE {hash32(PLACE)} >= {low} AND {hash32(PLACE)} < {high}" if parts > 1 else ""
        self.name("events", f"SELECT * FROM all_events{condition}")

    def name(self, relation: str, query: str) -> None:
        """Makes a view."""
        with _problems_of_data():
            self._connection.execute(f"CREATE OR REPLACE VIEW {relation} AS {query}")

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """Runs a query of few rows."""
        with _problems_of_data():
            return self._connection.sql(query).fetchall()

    def sums(self, query: str) -> tuple[int, ...]:
        """Adds up the counts of parts of the episodes."""
        counts = []
        for part in range(self._parts):
            self._take(part, self._parts)
            counts += self.rows(query)
        self._take(0, 1)
        return tuple(sum(int(count) for count in column) for column in zip(*counts, strict=True))

    def write(
        self, query: str, names: Sequence[str], folders: Sequence[Path], files: int, rows: int, show: Show
    ) -> list[list[int]]:
        """Writes the rows sorted by place, episode and number in it; see Engine."""
        ordered = f"SELECT * FROM ({query}) result ORDER BY place, mdp_id, sequence_number"
        outputs: list[PartFiles] = []
        waiting: deque[Future[None]] = deque()
        done = 0
        with _problems_of_data(), ExitStack() as stack, ThreadPoolExecutor(1, thread_name_prefix="write") as pool:
            for part in range(self._parts):
                self._take(part, self._parts)
                with self._progress(show, part):
                    reader = self._connection.sql(ordered).to_arrow_reader(ROW_GROUP_ROWS // 4)
                if not outputs:
                    outputs = [stack.enter_context(PartFiles(folder, names, reader.schema)) for folder in folders]
                for batch in reader:
                    # the database makes the next rows while these are written
                    waiting.append(pool.submit(_distribute, batch, outputs))
                    if len(waiting) > 1:
                        waiting.popleft().result()
                    done += batch.num_rows
                    show(min(99, 100 * done // max(rows, 1)), 100)
            for one in waiting:
                one.result()
            for output in outputs:
                output.write_empty(set(range(files)) - set(output.rows))
            self._take(0, 1)
            show(100, 100)
        return [[output.rows[number] for number in range(files)] for output in outputs]

    @contextmanager
    def _progress(self, show: Show, part: int) -> Iterator[None]:
        """Shows how much of the block's query is done, as far as the database can tell."""

        def poll() -> None:
            share = max(0.0, self._connection.query_progress()) / 100
            show(int(100 * (part + share) / self._parts), 100)

        with polling(_PROGRESS_SECONDS, poll):
            yield

    def close(self) -> None:
        """Closes the database."""
        self._connection.close()


def _distribute(batch: pa.RecordBatch, outputs: Sequence[PartFiles]) -> None:
    for number, output in enumerate(outputs):
        output.write(batch.filter(pc.equal(batch.column("folder"), number)))


@contextmanager
def _problems_of_data() -> Iterator[None]:
    """Turns what DuckDB finds wrong with files, disks and memory into errors of ours."""
    import duckdb

    todo = "Raise memory_limit_mb, or free disk in temporary_directory"
    try:
        yield
    except duckdb.OutOfMemoryException as error:
        raise DataError(Problem("DuckDB", "memory and disk for the work", first_line(error), todo)) from error
    except OSError as error:  # as Arrow passes on what DuckDB says while rows are read
        got = first_line(error)
        advice = todo if "emory" in got else ""
        raise DataError(Problem("DuckDB", "memory and disk for the work", got, advice)) from error
    except duckdb.IOException as error:
        raise DataError(Problem("DuckDB", "files that can be read and written", first_line(error))) from error
    except duckdb.Error as error:
        raise DataError(Problem("the events", "values that DuckDB can work with", first_line(error))) from error


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


def _pattern(path: str) -> str:
    """Returns a path as a pattern that means it alone: DuckDB reads patterns."""
    return "".join(f"[{one}]" if one in "*?[" else one for one in path)
