"""The distributed engine: a Spark that is there, on this machine, behind a master, or behind Spark Connect.

    Parquet ─► read in place, any of the forms that feature maps have ────────┐
    JSON lines ─► parsed once, kept as Parquet in a folder that all see ──────┴─► relation events

Everything is SQL, so that executors need no Python. Output goes to a folder that driver and executors both see, one
task per file, and is moved to its place with its rows counted on both sides.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet

from reagent_lite.data.formats.files import InputFile
from reagent_lite.data.formats.schema import MAX_PROBLEMS
from reagent_lite.data.rows.contract import Contract, has_numerals_of_others
from reagent_lite.data.stage import hashes_of
from reagent_lite.data.timeline.dialects import SparkDialect
from reagent_lite.data.timeline.engine import EventColumns, Show
from reagent_lite.data.timeline.rules import faulty
from reagent_lite.data.timeline.spark_json import json_events, uri
from reagent_lite.data.timeline.spark_parquet import parquet_events
from reagent_lite.data.timeline.spark_progress import share_of
from reagent_lite.data.timeline.spark_session import SparkPlace, opened, problems_of_spark
from reagent_lite.data.timeline.spark_sql import quote
from reagent_lite.errors import DataError, Problem, counted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_JSON = (".json", ".jsonl", ".ndjson")
_NOT_SEEN = ("_", ".")
"""Spark reads nothing from files whose names start so."""


class SparkEngine:
    """Runs queries on Spark.

    Args of the constructor:
        master: spark://host:7077, local[4], yarn, ..., or sc://host:15002 for Spark Connect. A session that this
            process has already is used whatever its master, left as it was and not stopped.
        folder: temporary folder of its own; executors see it under the same path.

    Raises:
        ConfigError: no pyspark, no Java, nobody at the address.
    """

    dialect = SparkDialect()
    unit = "tasks"

    def __init__(self, master: str, folder: Path) -> None:
        self._folder = folder
        self._place: SparkPlace = opened(master, folder)
        self._session = self._place.session

    @property
    def hashes(self) -> None:
        """Spark reads splits of files: nobody sees all bytes of one."""
        return

    def load(self, files: Sequence[InputFile], contract: Contract, show: Show) -> EventColumns:
        """Makes relation `events` of the files; see Engine."""
        indices = not has_numerals_of_others(contract.actions or ())
        _require_files_of_spark(files)
        _require_hashes([file for file in files if file.sha256])
        total = sum(file.size for file in files)
        show(0, total)
        with problems_of_spark(), self._place.watched(share_of(total, show)):
            if files[0].extension in _JSON:
                query, columns = json_events(
                    self._session, files, contract.discrete, indices, contract.extra, self._spooled
                )
            else:
                query, columns = parquet_events(self._session, files, contract.discrete, indices, contract.extra)
        self.name("events", faulty(query, self.dialect, columns, contract))
        show(total, total)
        return columns

    def name(self, relation: str, query: str) -> None:
        """Makes a view of this session."""
        with problems_of_spark():
            self._session.sql(f"CREATE OR REPLACE TEMPORARY VIEW {quote(relation)} AS {query}")

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """Runs a query of few rows."""
        with problems_of_spark():
            return [tuple(row) for row in self._session.sql(query).collect()]

    def sums(self, query: str) -> tuple[int, ...]:
        """Runs a query of one row of counts."""
        (counts,) = self.rows(query)
        return tuple(int(count) for count in counts)

    def write(self, query: str, folders: Sequence[Path], files: int, rows: int, show: Show) -> list[list[int]]:
        """Writes each file as one task; see Engine."""
        tasks = len(folders) * files  # at least
        show(0, tasks)
        number = f"CAST(folder * {files} + SHIFTRIGHT(place * {files}, 32) AS INT)"
        columns = f"* EXCEPT (folder, place), {number} AS file_number, place"
        # by number and not by range: a range would be sampled first, which runs the query twice
        ordered = (
            f"SELECT * EXCEPT (place) FROM (SELECT /*+ REPARTITION({len(folders) * files}, file_number) */ {columns} "
            f"FROM ({query}) result) placed SORT BY file_number, place, mdp_id, sequence_number"
        )
        together = folders[0] / "spark.tmp"  # where the output will be, so that files move by their names alone

        def tell(done: int, known: int) -> None:
            nonlocal tasks
            tasks = max(tasks, known)
            if done < tasks:  # those that are known are not yet all
                show(done, tasks)

        with problems_of_spark(), self._place.watched(tell):
            self._saved(self._session.sql(ordered), together, "file_number")
        counts = self._placed(together, folders, files, query)
        show(tasks, tasks)
        return counts

    def _placed(self, together: Path, folders: Sequence[Path], files: int, query: str) -> list[list[int]]:
        """Moves the files of a query to their folders, makes those without rows, and returns the rows of each."""
        found = {int(one.parent.name.removeprefix("file_number=")): one for one in _parts(together)}
        columns_of_files = pa.parquet.read_schema(next(iter(found.values()))) if found else self._columns_of(query)
        counts = []
        for at, folder in enumerate(folders):
            counts.append([0] * files)
            for part in range(files):
                target, one = folder / f"part-{part:05}.parquet", found.get(at * files + part)
                if one is None:
                    pa.parquet.write_table(columns_of_files.remove_metadata().empty_table(), target)
                else:
                    counts[at][part] = pa.parquet.read_metadata(one).num_rows
                    shutil.move(one, target)
        shutil.rmtree(together)
        return counts

    def close(self) -> None:
        """Leaves a session that was there before, and stops one of ours."""
        self._place.close()

    def _columns_of(self, query: str) -> pa.Schema:
        """Returns the columns of files without rows."""
        empty = self._folder / "empty"
        with problems_of_spark():
            self._session.sql(f"SELECT * EXCEPT (folder, place) FROM ({query}) result LIMIT 0").coalesce(1) \
                .write.parquet(f"file://{empty}")  # fmt: skip
        return pa.parquet.read_schema(next(iter(_parts(empty))))

    def _spooled(self, query: str) -> str:
        """Runs a query once, and returns one for its rows where they are kept."""
        folder = self._folder / "events"
        self._saved(self._session.sql(query), folder, None)
        return f"SELECT * FROM parquet.{quote(uri(str(folder)))}"

    def _saved(self, frame: DataFrame, folder: Path, by: str | None) -> None:
        """Writes Parquet, one folder for each value of a column, and counts what arrived here.

        Raises:
            DataError: executors write somewhere else than this process reads.
        """
        observed, counting = self._place.observe(frame)
        writer = counting.write.option("compression", "zstd").option("maxRecordsPerFile", 0)
        (writer.partitionBy(by) if by else writer).parquet(f"file://{folder}")  # Spark decodes nothing: no as_uri()
        rows = sum(pa.parquet.read_metadata(one).num_rows for one in _parts(folder))
        if rows != (wanted := observed()):
            todo = "Give outputs, and temporary_directory where it is set, on a folder that all machines share"
            raise DataError(
                Problem(str(folder), f"{counted(wanted, 'row')} that Spark's executors wrote", f"{rows:,} here", todo)
            )


def _parts(folder: Path) -> list[Path]:
    return sorted(folder.rglob("part-*.parquet"))


def _require_files_of_spark(files: Sequence[InputFile]) -> None:
    """Checks that Spark can read the files in place.

    Raises:
        DataError: naming each file that it cannot.
    """
    convert = "Run workflows.convert first, or let engine duckdb read it"
    first, problems = files[0].extension, []
    for file in files[:MAX_PROBLEMS]:
        if file.remote:
            problems.append(Problem(file.path, "a path that this machine and Spark's executors see alike", "a URL",
                                    "Copy it to a shared folder first"))  # fmt: skip
        elif file.extension != ".parquet" and file.extension not in _JSON:
            problems.append(
                Problem(file.path, "JSON lines or Parquet, which Spark reads", repr(file.extension), convert)
            )
        elif (file.extension in _JSON) != (first in _JSON):
            problems.append(Problem(file.path, f"files of one format, as {files[0].path}", file.extension, convert))
        elif file.extension == ".parquet" and file.compression:
            problems.append(Problem(file.path, "Parquet as it was written", f"compressed as {file.compression}"))
        elif Path(file.path).name.startswith(_NOT_SEEN):
            got = "one that Spark takes for its own and leaves out"
            problems.append(Problem(file.path, "a name that starts otherwise", got, "Rename the file"))
    if problems:
        raise DataError(problems)


def _require_hashes(files: Sequence[InputFile]) -> None:
    """Compares files with what the manifest of their folder says.

    Raises:
        DataError: naming each file that was altered.
    """
    todo = "Copy the folder again, or let the stage that made it make it again"
    problems = [
        Problem(file.path, f"bytes with sha256 {file.sha256}", f"sha256 {digest}", todo)
        for file, digest in zip(files, hashes_of(files), strict=True)
        if digest != file.sha256
    ]
    if problems:
        raise DataError(problems[:MAX_PROBLEMS])
