"""The session that Spark's engine works in: found or made, set so that results do not depend on the user's settings."""

from __future__ import annotations

import os
import re
import shutil
import socket
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reagent_lite.data.timeline.spark_progress import Tasks, classic_tasks, connect_tasks
from reagent_lite.errors import ConfigError, DataError, Problem, ReagentLiteError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_SETTINGS = {
    "spark.sql.ansi.enabled": "true",  # as DuckDB: an overflow is an error
    "spark.sql.caseSensitive": "true",
    "spark.sql.variable.substitute": "false",  # a name of the user's may hold ${...}
    "spark.sql.parser.escapedStringLiterals": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.parquet.writeLegacyFormat": "false",
    "spark.sql.files.ignoreCorruptFiles": "false",
    "spark.sql.files.ignoreMissingFiles": "false",
    "spark.sql.mapKeyDedupPolicy": "EXCEPTION",
    "spark.sql.json.enablePartialResults": "true",
}
_CONNECT_PORT = 15_002
_CONNECT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class SparkPlace:
    """A session, and what differs between classic Spark and Spark Connect.

    Attributes:
        session: to run SQL in.
        observe: of a frame: (a call that gives the rows that were written, once they are; the frame to write).
        watched: tells inside its block how many tasks are done.
        close: leaves or stops the session.
    """

    session: SparkSession
    observe: Callable[[DataFrame], tuple[Callable[[], int], DataFrame]]
    watched: Callable[[Tasks], AbstractContextManager[None]]
    close: Callable[[], None]


def opened(master: str, folder: Path) -> SparkPlace:
    """Opens a session.

    Args:
        master: as the config has it.
        folder: for what does not fit into the memory of a local master.

    Raises:
        ConfigError: no pyspark, no Java, nobody at the address, an address that Spark does not take.
    """
    with warnings.catch_warnings():
        # pyspark warns of pandas 3, which nothing here hands to it
        warnings.simplefilter("ignore", FutureWarning)
        try:
            import pyspark.sql  # noqa: F401 # seconds that other engines need not pay
        except ImportError as error:
            raise _lacks("the package pyspark", str(error)) from error
        return _connected(master) if master.startswith("sc://") else _classic(master, folder)


def _lacks(expected: str, got: str) -> ConfigError:
    todo = (
        "pip install 'reagent-lite[spark]', and Java 17 or newer, found by JAVA_HOME or PATH; or set engine to duckdb"
    )
    return ConfigError(Problem("engine", f"{expected}, as it is spark", got, todo))


def _connected(master: str) -> SparkPlace:
    try:
        from pyspark.sql.connect import functions
        from pyspark.sql.connect.observation import Observation
        from pyspark.sql.connect.session import SparkSession as ConnectSession
    except ImportError as error:  # grpcio and what belongs to it
        raise _lacks("the packages of Spark Connect", str(error).strip().split("\n")[0]) from error
    _require_somebody(master)
    with _problems_of_master(master):
        session: Any = ConnectSession.builder.remote(master).create()
        for key, value in _SETTINGS.items():
            session.conf.set(key, value)

    def observe(frame: Any) -> tuple[Callable[[], int], Any]:
        observation = Observation()
        counting = frame.observe(observation, functions.count(functions.lit(1)).alias("rows"))
        return lambda: int(observation.get["rows"]), counting

    return SparkPlace(session, observe, partial(connect_tasks, session), session.stop)


def _require_somebody(master: str) -> None:
    """Checks that somebody listens: Spark's client would try for minutes.

    Raises:
        ConfigError: nobody does.
    """
    address = re.match(r"sc://(\[[^\]]+\]|[^:/;]+)(?::(\d+))?(?:/|$)", master)
    if address is None:
        raise ConfigError(Problem("master", "an address such as sc://host:15002", repr(master)))
    host, port = address.group(1).strip("[]"), int(address.group(2) or _CONNECT_PORT)
    try:
        socket.create_connection((host, port), _CONNECT_SECONDS).close()
    except OSError as error:
        todo = "Start Spark's sbin/start-connect-server.sh there, or correct the address"
        raise ConfigError(Problem("master", f"a Spark Connect server at {host}:{port}", str(error), todo)) from error


def _classic(master: str, folder: Path) -> SparkPlace:
    from pyspark.sql import Observation, SparkSession, functions

    there = SparkSession.getActiveSession()
    if there is None and not _java():
        raise _lacks("Java 17 or newer", "no command java")
    with _problems_of_master(master):
        session = _started(master, folder) if there is None else there.newSession()
        for key, value in _SETTINGS.items():
            session.conf.set(key, value)

    def observe(frame: DataFrame) -> tuple[Callable[[], int], DataFrame]:
        observation = Observation()
        counting = frame.observe(observation, functions.count(functions.lit(1)).alias("rows"))
        return lambda: int(observation.get["rows"]), counting

    watched = partial(classic_tasks, session.sparkContext)
    return SparkPlace(session, observe, watched, session.stop if there is None else lambda: None)


def _java() -> bool:
    home = os.environ.get("JAVA_HOME")
    return bool(shutil.which("java") or (home and Path(home, "bin", "java").is_file()))


def _started(master: str, folder: Path) -> SparkSession:
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(master).appName("reagent-lite").config("spark.ui.enabled", "false")
    builder = builder.config("spark.ui.showConsoleProgress", "false").config("spark.log.level", "FATAL")
    builder = builder.config("spark.sql.catalogImplementation", "in-memory")
    builder = builder.config("spark.sql.warehouse.dir", str(folder / "warehouse"))
    if master.startswith("local"):
        # nobody else has to reach this process
        builder = builder.config("spark.driver.bindAddress", "127.0.0.1").config("spark.driver.host", "127.0.0.1")
        builder = builder.config("spark.local.dir", str(folder))
    return builder.getOrCreate()


@contextmanager
def _problems_of_master(master: str) -> Iterator[None]:
    from pyspark.errors import PySparkException

    try:
        yield
    except PySparkException as error:
        if error.getCondition() == "JAVA_GATEWAY_EXITED":
            raise _lacks("Java 17 or newer", "a Java that ends at once") from error
        raise ConfigError(Problem("master", "a Spark that takes work", f"{master}: {_first_line(error)}")) from error
    except Exception as error:
        if not _of_spark(error):
            raise
        raise ConfigError(Problem("master", "a Spark that takes work", f"{master}: {_first_line(error)}")) from error


@contextmanager
def problems_of_spark() -> Iterator[None]:
    """Turns what Spark finds wrong with files, disks and values into errors of ours."""
    try:
        yield
    except ReagentLiteError:
        raise
    except Exception as error:
        if not _of_spark(error):
            raise
        raise DataError(_problem(str(error))) from error


def _of_spark(error: Exception) -> bool:
    return type(error).__module__.split(".")[0] in ("pyspark", "py4j", "grpc")


def _problem(text: str) -> Problem:
    if "No space left on device" in text:
        return Problem("Spark", "room on the disk", "No space left on device", "Free disk where it writes")
    file = re.search(r"file:/+([^\s,]+\.\w+)", text)
    where = f"/{file.group(1)}" if file else "Spark"
    if "PATH_NOT_FOUND" in text or "FileNotFoundException" in text or "FILE_NOT_EXIST" in text:
        return Problem(where, "a file that every executor of Spark sees under this path", "none on one of them",
                       "Give a folder that all machines share")  # fmt: skip
    if "FAILED_READ_FILE" in text or "EOFException" in text or "Unexpected end" in text:
        return Problem(where, "a complete file", f"one that ends early or is damaged: {_cause(text)}",
                       "Copy the file again")  # fmt: skip
    return Problem(where, "events and room that Spark can work with", _cause(text))


def _cause(text: str) -> str:
    causes = re.findall(r"^(?:Caused by)?: (.*)", text, re.MULTILINE)
    return str(causes[-1] if causes else text.strip().split("\n")[0])[:300]


def _first_line(error: Exception) -> str:
    return _cause(str(error))
