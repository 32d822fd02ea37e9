"""The Spark session of the engine, which exists already or is started, and Spark's errors as ours."""

from __future__ import annotations

import os
import re
import socket
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reagent_lite.errors import ConfigError, DataError, Problem, ReagentLiteError, first_line, install

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SETTINGS = {  # so that results do not depend on the user's settings
    "spark.sql.ansi.enabled": "true",  # an overflow is an error
    "spark.sql.variable.substitute": "false",  # a name in the log may contain ${...}
    "spark.sql.execution.arrow.useLargeVarTypes": "false",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "10000",
    # with a lower limit, Spark computes the size of the whole batch after each row, which takes most of the time
    "spark.sql.execution.arrow.maxBytesPerBatch": str(2**31 - 1),
    "spark.sql.files.ignoreCorruptFiles": "false",
    "spark.sql.files.ignoreMissingFiles": "false",
}
_CONNECT_PORT = 15_002
_CONNECT_SECONDS = 10.0


def open_session(master: str, folder: Path) -> tuple[SparkSession, bool]:
    """Returns a session, and whether it is ours to stop.

    Args:
        master: `master` of the config.
        folder: for data that does not fit into the memory of a local master.

    Raises:
        ConfigError: no pyspark, no Java, no server at the address, or an address that Spark does not accept.
    """
    with _without_warnings():
        try:
            import pyspark.sql  # noqa: F401 # takes seconds, which other engines need not pay
        except ImportError as error:
            raise _lacks("the package pyspark", str(error)) from error
        session, is_ours = (_connect(master), True) if master.startswith("sc://") else _classic(master, folder)
        for key, value in _SETTINGS.items():
            session.conf.set(key, value)
        return session, is_ours


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Silences pyspark's warnings about pandas 3, which is not used here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def _lacks(expected: str, got: str) -> ConfigError:
    todo = f"{install('spark')}, and Java 17 or newer, found by JAVA_HOME or PATH; or set engine to local"
    return ConfigError(Problem("engine", f"{expected}, as it is spark", got, todo))


def _connect(master: str) -> SparkSession:
    try:
        from pyspark.sql.connect.session import SparkSession as ConnectSession
    except ImportError as error:  # grpcio and its companions
        raise _lacks("the packages of Spark Connect", first_line(error)) from error
    _require_server(master)
    with _problems_of_master(master):
        session: Any = ConnectSession.builder.remote(master).create()
    return session  # type: ignore[no-any-return] # has the methods of classic Spark's


def _require_server(master: str) -> None:
    """Checks that a server listens, as Spark's client would retry for minutes.

    Raises:
        ConfigError: no server listens.
    """
    address = re.match(r"sc://(\[[^\]]+\]|[^:/;]+)(?::(\d+))?(?:/|$)", master)
    if address is None:
        raise ConfigError(Problem("master", "an address such as sc://host:15002", repr(master)))
    host = address.group(1).strip("[]")
    port = int(address.group(2) or _CONNECT_PORT)
    try:
        socket.create_connection((host, port), _CONNECT_SECONDS).close()
    except OSError as error:
        todo = "Start Spark's sbin/start-connect-server.sh there, or correct the address"
        raise ConfigError(Problem("master", f"a Spark Connect server at {host}:{port}", str(error), todo)) from error


def _classic(master: str, folder: Path) -> tuple[SparkSession, bool]:
    from pyspark.sql import SparkSession

    active = SparkSession.getActiveSession()
    with _problems_of_master(master):
        session = _start(master, folder) if active is None else active.newSession()
    context = session.sparkContext
    if (context.master or "").startswith("local") and "PYSPARK_PYTHON" not in os.environ:
        context.pythonExec = sys.executable  # this Python has the packages that tasks import
    return session, active is None


def _start(master: str, folder: Path) -> SparkSession:
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(master).appName("reagent-lite")
    builder = builder.config("spark.ui.showConsoleProgress", "false").config("spark.log.level", "FATAL")
    builder = builder.config("spark.sql.catalogImplementation", "in-memory")
    builder = builder.config("spark.sql.warehouse.dir", str(folder / "warehouse"))
    if master.startswith("local"):
        # no other machine has to reach this process
        builder = builder.config("spark.driver.bindAddress", "127.0.0.1").config("spark.driver.host", "127.0.0.1")
        builder = builder.config("spark.local.dir", str(folder)).config("spark.ui.enabled", "false")
    return builder.getOrCreate()


@contextmanager
def _problems_of_master(master: str) -> Iterator[None]:
    from pyspark.errors import PySparkException

    try:
        yield
    except Exception as error:
        if isinstance(error, PySparkException) and error.getCondition() == "JAVA_GATEWAY_EXITED":
            raise _lacks("Java 17 or newer", "no Java, or one that exits immediately") from error
        if not _is_from_spark(error):
            raise
        raise ConfigError(Problem("master", "a Spark that takes work", f"{master}: {_cause(str(error))}")) from error


@contextmanager
def problems_of_spark() -> Iterator[None]:
    """Turns Spark's errors about executors, files and disks into ours."""
    try:
        with _without_warnings():
            yield
    except ReagentLiteError:
        raise
    except Exception as error:
        if not _is_from_spark(error):
            raise
        raise DataError(_problem(error)) from error


def _is_from_spark(error: Exception) -> bool:
    return type(error).__module__.split(".")[0] in ("pyspark", "py4j", "grpc")


def _problem(error: Exception) -> Problem:
    """Returns Spark's error as a problem; of an error in an executor Spark passes on the text only."""
    text = str(error)
    if "No space left on device" in text:
        return Problem("Spark", "free disk", "No space left on device", "Free disk where it writes")
    of_python = re.search(r".*(ModuleNotFoundError|Cannot run program|PYTHON_VERSION_MISMATCH).*", text)
    if of_python:
        todo = "Install reagent-lite in a Python that all machines have under one path, and name it in PYSPARK_PYTHON"
        got = of_python.group().strip()[:300]
        return Problem("Spark's executors", "a Python with this version of reagent-lite", got, todo)
    return Problem("Spark", "events, memory and disk that Spark can work with", _cause(text))


def _cause(text: str) -> str:
    causes = re.findall(r"^(?:Caused by: (.*)|(\w+Error: .*))", text, re.MULTILINE)
    return str("".join(causes[-1]) if causes else text.strip().split("\n")[0])[:300]
