"""The embedded engine: DuckDB in this process, sealed, with as much memory as it is given and the disk for the rest.

    files ─► EventReader, in threads ─► Parquet in a temporary folder ─► relation events

[m] 2 cores, 5 M rows of 4 features, CPU seconds: read in place, paired, sorted and written 10.6; one leading map 1.8;
without the sort, which makes the same input the same bytes, 8.0.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet

from reagent_lite.data.formats.blocks import Position
from reagent_lite.data.formats.files import InputFile
from reagent_lite.data.formats.reading import ALL_COLUMNS, num_threads, read_blocks
from reagent_lite.data.rows.contract import Contract
from reagent_lite.data.rows.table import EventReader, schema, type_of
from reagent_lite.data.timeline.dialects import DuckDBDialect
from reagent_lite.data.timeline.engine import OPTIONAL_COLUMNS, EventColumns, Show, looking
from reagent_lite.data.timeline.pairs import PLACE
from reagent_lite.data.writing.part_files import ROW_GROUP_ROWS, PartFiles
from reagent_lite.errors import DataError, Problem

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

MEMORY_SHARE = 0.6
_READ = "read_parquet({}, file_row_number = true, hive_partitioning = false)"
"""Columns are those of the file: what names of folders say is not among them."""
_PROBE_ROWS = 10_000
_WATCH_SECONDS = 0.5
_TIMES_ROWS = 12.0
"""Memory that pairing and sorting take, in bytes of their rows."""


class DuckDBEngine:
    """Runs queries in this process.

    Args of the constructor:
        folder: temporary folder of its own, on a local disk.
        inputs: folders that hold the input files; nothing else is readable.
        memory_bytes: what it may take; more goes to the disk.
        threads: None takes the cores this process may use.
    """

    dialect = DuckDBDialect()
    unit = "percent"

    def __init__(self, folder: Path, inputs: Sequence[str], memory_bytes: int, threads: int | None = None) -> None:
        import duckdb  # 0.1 s that other engines need not pay

        self._folder, self._memory_bytes, self._parts = folder, memory_bytes, 1
        self._hashes: tuple[str, ...] | None = None
        settings: dict[str, Any] = {
            "threads": threads or num_threads(),
            "memory_limit": f"{memory_bytes // 1_000_000}MB",
            "temp_directory": str(folder / "spill"),
            "preserve_insertion_order": False,
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
        }
        self._connection: DuckDBPyConnection = duckdb.connect(":memory:", config=settings)
        allowed = {form for path in (str(folder), *inputs) for form in (path, _verbatim(path))}
        folders = ", ".join(self.dialect.literal(path) for path in sorted(allowed))
        self._connection.execute(f"SET allowed_directories = [{folders}]")
        self._connection.execute("SET enable_progress_bar = true")  # or it does not count
        self._connection.execute("SET enable_progress_bar_print = false")
        # from here on nothing but these folders can be reached, and nothing can change that
        self._connection.execute("SET enable_external_access = false")
        self._connection.execute("SET lock_configuration = true")

    @property
    def hashes(self) -> tuple[str, ...] | None:
        """sha256 of each file where loading has read all bytes, else None."""
        return self._hashes

    def load(self, files: Sequence[InputFile], contract: Contract, show: Show) -> EventColumns:
        """Makes relation `events` of the files; see Engine."""
        return self._spooled(tuple(files), EventReader(contract), show)

    def _spooled(self, files: tuple[InputFile, ...], reader: EventReader, show: Show) -> EventColumns:
        discrete, extra, spool = reader.contract.discrete, reader.contract.extra, self._folder / "events.parquet"
        positions = [Position() for _ in files]
        wanted = schema(discrete=discrete, extra=extra)
        with pa.parquet.ParquetWriter(spool, wanted, compression="lz4") as writer:
            for table in read_blocks(files, reader.read, positions, show, ALL_COLUMNS):
                writer.write_table(table, ROW_GROUP_ROWS)
        self._hashes = tuple(position.sha256 for position in positions)
        columns = [self.dialect.quote(name) for name in wanted.names if name not in extra]
        for name in extra:
            kind = self.dialect.types[type_of(reader.kinds.get(name, set()))]
            columns.append(f"CAST({self.dialect.quote(name)} AS {kind}) AS {self.dialect.quote(name)}")
        self._loaded(f"SELECT {', '.join(columns)} FROM {_READ.format(self.dialect.literal(_verbatim(str(spool))))}")
        optional = frozenset(name for name in OPTIONAL_COLUMNS if name in reader.seen)
        return EventColumns(discrete=discrete, optional=optional, extra=extra)

    def _loaded(self, query: str) -> None:
        """Names the events, and looks how many parts of the episodes fit into memory one by one."""
        self.name("all_events", query)
        self._take(0, 1)
        rows = self.rows("SELECT COUNT(*) FROM all_events")[0][0]
        with _problems_of_data():
            first = self._connection.sql(f"SELECT * FROM all_events LIMIT {_PROBE_ROWS}").to_arrow_table()
        bytes_per_row = first.nbytes / max(1, first.num_rows)
        self._parts = max(1, -(-int(rows * bytes_per_row * _TIMES_ROWS) // self._memory_bytes))

    def _take(self, part: int, parts: int) -> None:
        """Makes `events` one of so many equal parts of the episodes by their place."""
        low, high = (2**32 * number // parts for number in (part, part + 1))
        place = self.dialect.hash32("mdp_id", PLACE)
        condition = f" WHERE {place} >= {low} AND {place} < {high}" if parts > 1 else ""
        self.name("events", f"SELECT * FROM all_events{condition}")

    def name(self, relation: str, query: str) -> None:
        """Makes a view."""
        with _problems_of_data():
            self._connection.execute(f"CREATE OR REPLACE VIEW {self.dialect.quote(relation)} AS {query}")

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

    def write(self, query: str, folders: Sequence[Path], files: int, rows: int, show: Show) -> list[list[int]]:
        """Writes the rows sorted by place, episode and number in it; see Engine."""
        ordered = f"SELECT * FROM ({query}) result ORDER BY place, mdp_id, sequence_number"
        outputs: list[PartFiles] = []
        waiting: deque[Future[None]] = deque()
        done = 0
        with _problems_of_data(), ExitStack() as stack, ThreadPoolExecutor(1, thread_name_prefix="write") as pool:
            for part in range(self._parts):
                self._take(part, self._parts)
                with self._watched(partial(self._show_part, show, part)):
                    reader = self._connection.sql(ordered).to_arrow_reader(ROW_GROUP_ROWS)
                outputs = outputs or [
                    stack.enter_context(PartFiles(folder, files, reader.schema)) for folder in folders
                ]
                for batch in reader:
                    # the database makes the next rows while these are written
                    waiting.append(pool.submit(_distribute, batch, outputs))
                    if len(waiting) > 1:
                        waiting.popleft().result()
                    done += batch.num_rows
                    show(min(99, 100 * done // max(rows, 1)), 100)
            for one in waiting:
                one.result()
            self._take(0, 1)
            show(100, 100)
        return [output.rows for output in outputs]

    def _show_part(self, show: Show, part: int, share: float) -> None:
        show(int(100 * (part + share) / self._parts), 100)

    @contextmanager
    def _watched(self, show: Callable[[float], None]) -> Iterator[None]:
        """Shows how much of the block's query is done, as far as the database can tell."""
        with looking(_WATCH_SECONDS, lambda: show(max(0.0, self._connection.query_progress()) / 100)):
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

    try:
        yield
    except duckdb.OutOfMemoryException as error:
        todo = "Raise memory_limit_mb, or free disk in temporary_directory"
        raise DataError(Problem("DuckDB", "memory and disk for the work", _first_line(error), todo)) from error
    except duckdb.IOException as error:
        raise DataError(Problem("DuckDB", "files that can be read and written", _first_line(error))) from error
    except OSError as error:  # as Arrow passes on what DuckDB says while rows are read
        got = _first_line(error)
        todo = "Raise memory_limit_mb, or free disk in temporary_directory" if "emory" in got else ""
        raise DataError(Problem("DuckDB", "memory and disk for the work", got, todo)) from error
    except duckdb.Error as error:
        raise DataError(Problem("the events", "values that DuckDB can work with", _first_line(error))) from error


def _verbatim(path: str) -> str:
    """Returns a path as a pattern that means it alone: DuckDB reads patterns."""
    return "".join(f"[{one}]" if one in "*?[" else one for one in path)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
