"""The rows of a log as Arrow tables with the standard columns, checked.

A column may begin late or with a narrower type; `widen_fields` and `with_types` give it one type in the whole log.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Mapping
from contextlib import closing
from typing import Any

import pyarrow as pa

from reagent_lite.config.column_names import Columns, LogColumns
from reagent_lite.config.embedding_config import Embeddings, id_features
from reagent_lite.config.loader import check
from reagent_lite.config.section import Section
from reagent_lite.console import progress
from reagent_lite.data.formats.blocks import InputFile
from reagent_lite.data.formats.format_table import ALL_COLUMNS, read_blocks
from reagent_lite.data.formats.frames import PathOrFrame, path_of
from reagent_lite.data.formats.schema import conform, in_one_piece, is_text, merge_fields
from reagent_lite.data.logs import Log
from reagent_lite.data.rows.block_columns import require_one_order
from reagent_lite.data.rows.typed_columns import features_as, features_type, typed_table
from reagent_lite.errors import DataError, Problem


def typed_tables(files: tuple[InputFile, ...], title: str) -> Generator[tuple[pa.Table, str]]:
    """Yields the rows of a log as tables from `typed_table`, each with the location of its first row.

    Args:
        files: the files of the log.
        title: name of the work in the progress display.

    Raises:
        DataError: faults of the data, with file and line; sequence numbers of two kinds.
    """
    orders: dict[str, str] = {}
    with progress(title, "bytes") as show:
        blocks = read_blocks(files, lambda block: (*typed_table(block), block.where(0)), show, ALL_COLUMNS)
        for table, of_block, where in blocks:
            orders = {**of_block, **orders}
            require_one_order(orders, 0)
            yield table, where


def survey(files: tuple[InputFile, ...]) -> dict[str, pa.Field]:
    """Returns the columns of all rows, with types that hold all values; reads the files once."""
    fields: dict[str, pa.Field] = {}
    with closing(typed_tables(files, "surveying")) as tables:
        for table, where in tables:
            fields = widen_fields(fields, table, where)
    return fields


class _ReadLogConfig(Section):
    columns: LogColumns = {}
    embeddings: Embeddings = {}


def read_log(log: PathOrFrame, columns: Columns | None = None, embeddings: Mapping[str, Any] | None = None) -> pa.Table:
    """Returns a whole log as one Arrow table in memory, with its values as training reads them.

    `to_pandas()` converts the table to a frame.

    Args:
        log: path of a file or a folder in any format, URL, or frame of pandas, polars or Arrow.
        columns: the log's own names for standard columns.
        embeddings: features whose values are ids, as data.embeddings; lists of ids are JSON strings in the table.

    Returns:
        the table, with the standard columns of a log.

    Raises:
        ConfigError: `columns` or `embeddings` have unknown fields or impossible names.
        DataError: faults of the data, with file and line.
    """
    config = check(_ReadLogConfig, {"columns": columns or {}, "embeddings": embeddings or {}})
    fields: dict[str, pa.Field] = {}
    tables = []
    files = Log(path_of(log), columns=config.columns, id_features=id_features(config.embeddings) or None).files
    for table, where in typed_tables(files, "reading"):
        fields = widen_fields(fields, table, where)
        tables.append(table)
    return pa.concat_tables([with_types(table, fields) for table in tables])


def widen_fields(before: dict[str, pa.Field], table: pa.Table, where: str) -> dict[str, pa.Field]:
    """Returns columns whose types hold the values of all tables so far.

    Args:
        before: the result for the previous tables.
        table: the next table, from `typed_table`.
        where: location of its first row, for errors.

    Raises:
        DataError: the values of a column have no type in common with the previous ones.
    """
    more = {column.name: column for column in table.schema}
    for name in before.keys() & more.keys():
        for names, texts in itertools.product((False, True), repeat=2):
            kinds = [features_type(columns[name].type, names=names, texts=texts) for columns in (before, more)]
            if kinds[0] == kinds[1]:
                before, more = ({**columns, name: pa.field(name, kinds[0])} for columns in (before, more))
                break
    fields = merge_fields(before, more)
    for name, column in fields.items():
        if is_text(column) and name in more:
            expected = f"{before[name].type} in {name}, as in the rows before"
            todo = "Write its values as of one kind"
            raise DataError(Problem(where, expected, str(more[name].type), todo))
    return fields


def with_types(table: pa.Table, fields: dict[str, pa.Field]) -> pa.Table:
    """Returns a typed table with the columns and types from `widen_fields`; columns that it lacks are null."""
    for number, column in enumerate(table.schema):
        kind = fields[column.name].type
        widest, wanted_widest = (features_type(type_, names=True, texts=True) for type_ in (column.type, kind))
        if column.type != kind and widest == wanted_widest:
            array = features_as(in_one_piece(table.column(number)), kind)
            table = table.set_column(number, column.name, array)
    return conform(table, fields)
