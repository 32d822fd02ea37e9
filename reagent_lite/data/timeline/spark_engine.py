"""The distributed engine: a Spark that is there, on this machine, behind a master, or behind Spark Connect.

    one task per file: readers, contract ─► Parquet in a folder that all see ─► relation events ─► pairs, by place
                       this package's Python                                                       │
    files of transitions, by the same Python as DuckDB's ◄──────── one task or more per file ◄─────┘

Executors run this package: PYSPARK_PYTHON is a Python in which it is installed, under one path on all machines.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from reagent_lite.data.formats.blocks import Show
from reagent_lite.data.formats.files import InputFile
from reagent_lite.data.formats.reading import no_rows
from reagent_lite.data.rows.contract import Contract
from reagent_lite.data.timeline.engine import CheckedEvents, check_events
from reagent_lite.data.timeline.spark_session import SparkPlace, opened, problems_of_spark
from reagent_lite.data.writing.part_files import PartFiles, part_name
from reagent_lite.errors import DataError, NoRowsError, Problem, counted, raise_any
from reagent_lite.feature_ids import read, written

Batches = Iterable[pa.RecordBatch]
_WRITTEN = pa.schema([("part", pa.int32()), ("count", pa.int64()), ("file", pa.string())])


class SparkEngine:
    """Runs queries on Spark.

    Args of the constructor:
        master: spark://host:7077, local[4], yarn, ..., or sc://host:15002 for Spark Connect. A session that this
            process has already is used whatever its master, left as it was and not stopped.
        folder: temporary folder of its own; executors see it under the same path.

    Raises:
        ConfigError: no pyspark, no Java, nobody at the address.
    """

    array, unit = "ARRAY", "tasks"

    def __init__(self, master: str, folder: Path) -> None:
        self._folder = folder
        self._place: SparkPlace = opened(master, folder)
        self._session = self._place.session

    def load(self, files: Sequence[InputFile], contract: Contract, show: Show) -> CheckedEvents:
        """Makes relation `events` of the files, each read by one task; see Engine."""
        total, furthest = sum(file.size for file in files), 0
        show(0, total)

        def tell(done: int, known: int) -> None:
            nonlocal furthest
            furthest = max(furthest, total * done // (known + 1))  # there may be one more
            show(furthest, total)

        spool = self._folder / "events"
        spool.mkdir()
        task = partial(_check_files, tuple(files), contract, spool)
        with problems_of_spark(), self._place.watched(tell):
            numbers = self._session.range(0, len(files), 1, len(files))
            found = numbers.mapInArrow(task, "file BIGINT, found STRING").collect()
        texts = dict(tuple(row) for row in found)
        reports = [json.loads(texts[number]) for number in range(len(files))]
        raise_any([Problem(**fields) for report in reports for fields in report["problems"]])
        parts = [spool / report["part"] for report in reports if report["part"]]
        if not parts:
            raise no_rows(files)
        for part in parts:
            _require_here(part, None)
        with problems_of_spark():
            self._session.read.parquet(*map(_uri, parts)).createOrReplaceTempView("events")
        show(total, total)
        kinds: dict[str, set[str]] = {}
        for report in reports:
            for name, some in report["kinds"].items():
                kinds.setdefault(name, set()).update(some)
        return CheckedEvents(
            hashes=tuple(report["sha256"] for report in reports),
            seen=frozenset(name for report in reports for name in report["seen"]),
            kinds=kinds,
            features=frozenset(one for report in reports for one in read(report["features"])),
        )

    def name(self, relation: str, query: str) -> None:
        """Makes a view of this session."""
        with problems_of_spark():
            self._session.sql(f"CREATE OR REPLACE TEMPORARY VIEW {relation} AS {query}")

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """Runs a query of few rows."""
        with problems_of_spark():
            return [tuple(row) for row in self._session.sql(query).collect()]

    def sums(self, query: str) -> tuple[int, ...]:
        """Runs a query of one row of counts."""
        (counts,) = self.rows(query)
        return tuple(int(count) for count in counts)

    def write(
        self, query: str, names: Sequence[str], folders: Sequence[Path], files: int, rows: int, show: Show
    ) -> list[list[int]]:
        """Writes each file in one task; see Engine."""
        tasks = len(folders) * files  # at least
        show(0, tasks)

        def tell(done: int, known: int) -> None:
            nonlocal tasks
            tasks = max(tasks, known)
            if done < tasks:  # those that are known are not yet all
                show(done, tasks)

        # by number and not by range: a range would be sampled first, which runs the query twice
        ordered = (
            f"SELECT /*+ REPARTITION({tasks}, part) */ * EXCEPT (part), folder * {files} + part AS part "
            f"FROM ({query}) result SORT BY part, place, mdp_id, sequence_number"
        )
        together = folders[0] / "spark.tmp"  # beside where the files will be
        together.mkdir()
        with problems_of_spark(), self._place.watched(tell):
            result = self._session.sql(ordered)
            task = partial(_write_files, together, tuple(names))
            written = result.mapInArrow(task, "part INT, count BIGINT, file STRING").collect()
            columns = result.limit(0).toArrow().schema
        counts = [[0] * files for _ in folders]
        for number, count, file in written:
            _require_here(Path(file), count)
            at, part = divmod(number, files)
            counts[at][part] = count
            shutil.move(file, folders[at] / part_name(part))
        shutil.rmtree(together)
        for folder, of_folder in zip(folders, counts, strict=True):
            with PartFiles(folder, names, columns) as rest:
                rest.write_empty(part for part, count in enumerate(of_folder) if not count)
        show(tasks, tasks)
        return counts

    def close(self) -> None:
        """Leaves a session that was there before, and stops one of ours."""
        self._place.close()


def _check_files(
    files: tuple[InputFile, ...], contract: Contract, spool: Path, batches: Batches
) -> Iterator[pa.RecordBatch]:
    """Runs in an executor: reads the files of these numbers, and yields what it found as JSON."""
    for number in (number for batch in batches for number in batch.column(0).to_pylist()):
        found = json.dumps(_checked(files[number], contract, spool))
        yield pa.RecordBatch.from_pydict({"file": [number], "found": [found]})


def _checked(file: InputFile, contract: Contract, spool: Path) -> dict[str, Any]:
    part = f"{uuid.uuid4().hex}.parquet"  # of this attempt alone
    found: dict[str, Any] = {"problems": [], "part": part, "sha256": "", "seen": [], "kinds": {}, "features": []}
    expected, todo = "a path that every executor of Spark sees", "Give folders that all machines share"
    for path in (str(spool), *(() if file.remote else (file.path,))):
        if not os.path.exists(path):
            problem = Problem(path, expected, f"nothing there on {socket.gethostname()}", todo)
            return found | {"problems": [asdict(problem)]}
    try:
        events = check_events([file], contract, spool / part, None)
    except NoRowsError:
        return found | {"part": ""}
    except DataError as error:
        return found | {"problems": [asdict(problem) for problem in error.problems]}
    kinds = {name: sorted(some) for name, some in events.kinds.items()}
    names = {"seen": sorted(events.seen), "kinds": kinds, "features": written(events.features)}
    return found | {"sha256": events.hashes[0], **names}


def _write_files(folder: Path, names: tuple[str, ...], batches: Batches) -> Iterator[pa.RecordBatch]:
    """Runs in an executor: writes rows in the order of their part, and yields what it wrote."""
    own = folder / uuid.uuid4().hex  # of this attempt alone
    rows = iter(batches)
    if (first := next(rows, None)) is None:
        return
    own.mkdir()
    with PartFiles(own, names, first.schema) as output:
        for batch in chain([first], rows):
            output.write(batch)
    for part, count in output.rows.items():
        yield pa.RecordBatch.from_pylist([{"part": part, "count": count, "file": str(own / part_name(part))}], _WRITTEN)


def _uri(file: Path) -> str:
    """Returns a local path as Spark takes it: with what would be a pattern for several files escaped."""
    return "file://" + "".join(f"\\{one}" if one in "{}[]*?\\" else one for one in str(file))


def _require_here(file: Path, rows: int | None) -> None:
    """Checks that a file which an executor wrote is the one that this process sees.

    Raises:
        DataError: it is not.
    """
    here = pa.parquet.read_metadata(file).num_rows if file.exists() else 0
    if file.exists() and rows in (None, here):
        return
    todo = "Give outputs, and temporary_directory where it is set, on a folder that all machines share"
    wanted = "a file" if rows is None else counted(rows, "row")
    raise DataError(Problem(str(file.parent), f"{wanted} that Spark's executors wrote", f"{here:,} rows here", todo))
