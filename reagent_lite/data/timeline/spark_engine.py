"""The distributed engine: an existing Spark, on this machine, behind a master, or behind Spark Connect.

    one task per file: readers, rules ─► Parquet in a folder that all see ─► sorted by Spark
                       this package's Python                                          │
    files of transitions, paired and written by the same Python as here ◄─── one task or more per file

Executors run this package: it must be installed in the Python that PYSPARK_PYTHON names, a path on all machines.
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
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
from pydantic import TypeAdapter

from reagent_lite.config.timeline_config import TimelineConfig
from reagent_lite.data.formats.blocks import InputFile, Show
from reagent_lite.data.formats.format_table import no_rows_error
from reagent_lite.data.formats.input_files import sha256_of
from reagent_lite.data.timeline.buckets import HASHES
from reagent_lite.data.timeline.event_spans import Counts
from reagent_lite.data.timeline.events import ORDER, EventFacts, check_events, event_columns
from reagent_lite.data.timeline.pairing import Pairing, batch_whole_episodes
from reagent_lite.data.timeline.spark_session import open_session, problems_of_spark
from reagent_lite.data.writing.part_files import part_name
from reagent_lite.errors import DataError, NoRowsError, Problem, pluralize, raise_any

Batches = Iterable[pa.RecordBatch]
_LENGTHS = (
    "SELECT length, COUNT(*) AS episodes FROM (SELECT COUNT(DISTINCT sequence_number) AS length FROM events "
    "GROUP BY mdp_id HAVING COUNT(_rule) = 0) lengths GROUP BY length"
)
_FACTS = TypeAdapter(EventFacts)
_COUNTS = TypeAdapter(Counts)


class SparkEngine:
    """Checks, sorts and pairs events on Spark.

    Args:
        master: spark://host:7077, local[4], yarn, ..., or sc://host:15002 for Spark Connect. If this process already
            has a session of classic Spark, a second session is used, whatever its master, and nothing is stopped.
        folder: temporary folder for this engine alone; executors see it under the same path.

    Raises:
        ConfigError: no pyspark, no Java, no server at the address.
    """

    def __init__(self, master: str, folder: Path) -> None:
        self._folder = folder
        self._session, self._own = open_session(master, folder)

    def load(self, config: TimelineConfig, files: Sequence[InputFile], show: Show, *, texts: bool) -> EventFacts:
        """Makes the view `events` of the files, each of which one task reads; see Engine."""
        total = sum(file.size for file in files)
        show(0, total)
        spool = self._folder / "events"
        shutil.rmtree(spool, ignore_errors=True)  # left from a first reading without strings
        spool.mkdir()
        task = partial(_check_files, config, tuple(files), spool, texts)
        with problems_of_spark():
            numbers = self._session.range(0, len(files), 1, len(files))
            answers = dict(tuple(row) for row in numbers.mapInArrow(task, "file BIGINT, report STRING").collect())
        reports = [json.loads(answers[number]) for number in range(len(files))]
        raise_any([Problem(**fields) for report in reports for fields in report["problems"]])
        facts = EventFacts()
        for report in reports:
            facts.add(_FACTS.validate_json(report["facts"]))
        if not facts.rows:
            raise no_rows_error(files)
        parts = [spool / report["part"] for report in reports]
        for part in parts:
            _require_here(part, None)
        with problems_of_spark():
            self._session.read.parquet(*map(_uri, parts)).createOrReplaceTempView("events")
        show(total, total)
        return facts

    def lengths(self) -> dict[int, int]:
        """Returns {number of rows: number of episodes}; see Engine."""
        with problems_of_spark():
            return {row["length"]: row["episodes"] for row in self._session.sql(_LENGTHS).collect()}

    def write(self, pairing: Pairing, folders: Sequence[Path], show: Show) -> tuple[list[dict[int, int]], Counts]:
        """Writes each file in one task; see Engine."""
        files = pairing.files
        total = pairing.facts.selected
        show(0, total)
        # rows are distributed by number, not by range: Spark would sample a range first and run the query twice
        ordered = (
            f"SELECT /*+ REPARTITION({files}, part) */ * FROM (SELECT *, FLOOR(_place * {files} / {HASHES}) AS part "
            f"FROM events) events SORT BY {', '.join(ORDER)}"
        )
        work = folders[0] / "spark.tmp"  # on the disk of the output
        work.mkdir()
        with problems_of_spark():
            task = partial(_write_files, pairing, work, len(folders))
            answers = self._session.sql(ordered).mapInArrow(task, "written STRING").collect()
        written = [dict[int, int]() for _ in folders]
        counts = Counts()
        for (answer,) in answers:
            report = json.loads(answer)
            counts.add(_COUNTS.validate_json(report["counts"]))
            for index, number, rows in report["files"]:
                file = work / report["task"] / str(index) / part_name(number)
                _require_here(file, rows)
                written[index][number] = rows
                shutil.move(file, folders[index] / part_name(number))
        shutil.rmtree(work)
        show(total, total)
        return written, counts

    def close(self) -> None:
        """Stops the session if this engine started it."""
        if self._own:
            self._session.stop()


def _check_files(
    config: TimelineConfig, files: tuple[InputFile, ...], spool: Path, texts: bool, batches: Batches
) -> Iterator[pa.RecordBatch]:
    """Runs in an executor: reads the files with the given numbers, and yields a report on each as JSON."""
    for number in (number for batch in batches for number in batch.column(0).to_pylist()):
        report = json.dumps(_check_file(config, files[number], number, spool, texts=texts))
        yield pa.RecordBatch.from_pydict({"file": [number], "report": [report]})


def _check_file(config: TimelineConfig, file: InputFile, number: int, spool: Path, *, texts: bool) -> dict[str, Any]:
    part = f"{uuid.uuid4().hex}.parquet"  # of this attempt alone
    report: dict[str, Any] = {"problems": [], "part": part}
    expected = "a path that every executor of Spark sees"
    todo = "Give folders that all machines share"
    for path in (str(spool), *(() if file.remote else (file.path,))):
        if not os.path.exists(path):
            problem = Problem(path, expected, f"nothing there on {socket.gethostname()}", todo)
            return report | {"problems": [asdict(problem)]}
    try:
        with pa.parquet.ParquetWriter(spool / part, event_columns(config, texts=texts), compression="lz4") as writer:
            try:
                facts = check_events(config, [file], number, writer.write_table, None, texts=texts)
            except NoRowsError:
                facts = EventFacts(hashes=[sha256_of(file)])
    except DataError as error:
        return report | {"problems": [asdict(problem) for problem in error.problems]}
    return report | {"facts": _FACTS.dump_json(facts).decode()}


def _write_files(pairing: Pairing, work: Path, folders: int, batches: Batches) -> Iterator[pa.RecordBatch]:
    """Runs in an executor: pairs and writes rows in the order of their part, and yields a report as JSON."""
    task = uuid.uuid4().hex  # of this attempt alone
    task_folders = [work / task / str(number) for number in range(folders)]
    for folder in task_folders:
        folder.mkdir(parents=True)
    events = (batch.drop_columns("part") for batch in batches)
    written, counts = pairing.write(batch_whole_episodes(events), task_folders, lambda done, total: None)
    files = [(index, part, rows) for index, rows_by_part in enumerate(written) for part, rows in rows_by_part.items()]
    report = {"task": task, "counts": _COUNTS.dump_json(counts).decode(), "files": files}
    yield pa.RecordBatch.from_pydict({"written": [json.dumps(report)]})


def _uri(file: Path) -> str:
    """Returns a local path as a URI for Spark, in which characters of patterns are escaped."""
    return "file://" + "".join(f"\\{sign}" if sign in "{}[]*?\\" else sign for sign in str(file))


def _require_here(file: Path, rows: int | None) -> None:
    """Checks that this process sees a file that an executor wrote; `rows` None stands for any number of rows.

    Raises:
        DataError: it does not, or the file has another number of rows.
    """
    rows_here = pa.parquet.read_metadata(file).num_rows if file.exists() else 0
    if file.exists() and rows in (None, rows_here):
        return
    todo = "Give outputs, and temporary_directory where it is set, on a folder that all machines share"
    wanted = "a file" if rows is None else pluralize(rows, "row")
    raise DataError(
        Problem(str(file.parent), f"{wanted} that Spark's executors wrote", f"{rows_here:,} rows here", todo)
    )
