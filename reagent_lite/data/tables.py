"""The rows of a log as Arrow tables with the columns of the contract, checked."""

from __future__ import annotations

from collections.abc import Generator

import pyarrow as pa

from reagent_lite.config.columns import Columns
from reagent_lite.console import progress
from reagent_lite.data.formats.blocks import Position
from reagent_lite.data.formats.files import InputFile
from reagent_lite.data.formats.frames import Log, path_of
from reagent_lite.data.formats.reading import ALL_COLUMNS, read_blocks
from reagent_lite.data.rows.table import typed_table
from reagent_lite.data.stage import data_files
from reagent_lite.data.writing.tables import merged, with_types


def typed_tables(files: tuple[InputFile, ...], doing: str) -> Generator[tuple[pa.Table, str]]:
    """Yields the rows of a log as tables of the types of logs, and where the first row of each comes from."""
    with progress(doing, "bytes") as show:
        positions = [Position() for _ in files]
        yield from read_blocks(files, lambda block: (typed_table(block), block.where(0)), positions, show, ALL_COLUMNS)


def read_log(log: Log, columns: Columns | None = None) -> pa.Table:
    """Returns a whole log, in memory, as training understands it: one Arrow table; `to_pandas()` makes a frame of it.

    Args:
        log: path of a file or a folder in any format, URL, or frame of pandas, polars or Arrow.
        columns: the log's own names for columns of the contract.

    Raises:
        DataError: what is wrong in the data, with file and line.
    """
    fields: dict[str, pa.Field] = {}
    tables = []
    for table, where in typed_tables(data_files(path_of(log), columns), "reading"):
        fields = merged(fields, table, where)
        tables.append(table)
    return pa.concat_tables([with_types(table, fields) for table in tables])
