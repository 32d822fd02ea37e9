"""Logs that are given as frames: pandas, polars or Arrow in place of a path."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from reagent_lite.config.paths import DataPath, logs_of
from reagent_lite.errors import DataError, Problem, needing
from reagent_lite.shipped import user_cache
from reagent_lite.whole_files import sweep, sync, work_folder

if TYPE_CHECKING:
    from pyarrow import Table as Table


def _columns_of(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Returns arrays by name, such as those of a .npz file; arrays [n, m] become lists of m numbers."""
    return {
        name: list(array.reshape(len(array), -1)) if getattr(array, "ndim", 1) > 1 else array
        for name, array in arrays.items()
    }


class Frame(Protocol):
    """A frame of pandas, polars or Arrow: each exports its rows as an Arrow stream."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """Returns the rows as Arrow's C stream."""
        ...


PathOrFrame = str | os.PathLike[str] | Frame | Mapping[str, Any]
PathsOrFrames = PathOrFrame | Sequence[PathOrFrame]
"""A log, or several that are read as one."""

_KEPT_DAYS = 30


def locations(path: DataPath) -> str:
    """Returns how errors name a log, or several."""
    return ", ".join(map(location, logs_of(path)))


def location(path: str, row: int | None = None) -> str:
    """Returns how errors name a file or one of its rows.

    Args:
        path: local path or URL.
        row: line or row of the file, from 1. Rows of frames are named from 0, as their users count them.
    """
    if Path(path).parent.parent == _cache():
        return f"the frame {Path(path).stem}" + ("" if row is None else f", row {row - 1}")
    return path if row is None else f"{path}:{row}"


def _cache() -> Path:
    return user_cache() / "frames"


def paths_of(logs: PathsOrFrames, name: str = "data") -> DataPath:
    """Returns the path of a log, or those of several; see path_of."""
    if isinstance(logs, list | tuple) and not any(isinstance(log, dict) for log in logs):  # dicts would be rows
        return tuple(path_of(log, name) for log in logs)
    return path_of(cast("PathOrFrame", logs), name)


def path_of(log: PathOrFrame, name: str = "data") -> str:
    """Returns the path of a log; a frame becomes an Arrow file in the user's cache, named by its content.

    Files that no call has used for a month are removed from the cache.

    Args:
        log: path, URL or frame.
        name: name of the argument, which errors and the file have.

    Raises:
        DataError: `log` is neither a path nor a frame, or has columns that Arrow has no type for.
    """
    if isinstance(log, str | os.PathLike):
        return os.fspath(log)
    expected = (
        "a path, a frame of pandas, polars or Arrow, or a dict of arrays, whose columns each hold one type of values"
    )
    if type(log).__name__ == "LazyFrame":
        raise DataError(Problem(name, expected, "a LazyFrame of polars", "Give what its method collect() returns"))
    with needing("data", name):
        import pyarrow as pa
    try:
        table = pa.table(_columns_of(log) if isinstance(log, Mapping) else log)
    except (TypeError, ValueError, OverflowError, pa.ArrowException) as error:
        got = f"{type(log).__name__}: {'; '.join(map(str, error.args))}"
        raise DataError(Problem(name, expected, got)) from error
    for index, column in enumerate(table.schema):
        # pandas cannot read its categories of intervals, those of pandas.cut, from a file of Arrow
        if pa.types.is_dictionary(column.type) and isinstance(column.type.value_type, pa.BaseExtensionType):
            chunks = [chunk.dictionary_decode() for chunk in table.column(index).chunks]
            table = table.set_column(index, column.name, pa.chunked_array(chunks, column.type.value_type))
    cache = _cache()
    with work_folder(cache, name) as work:
        sweep(cache.iterdir(), after_days=_KEPT_DAYS)
        written = work / "written.arrow"
        with written.open("wb") as stream, pa.ipc.new_file(stream, table.schema) as writer:
            writer.write_table(table)
        with written.open("rb") as source:
            digest = hashlib.file_digest(source, "sha256").hexdigest()
        sync(written)
        folder = cache / digest[:32]  # training copies are made next to the file, and removed with it
        folder.mkdir(exist_ok=True)
        os.utime(folder)
        file = folder / f"{name}.arrow"
        if not file.exists():  # an older file stays: training copies know it by its modification time
            written.rename(file)
        return str(file)
