"""The rows of a log as Arrow tables with the columns of the contract, checked.

A column may come late or with a narrower type: `merged` and `with_types` give each one type in the whole log.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator
from contextlib import closing

import pyarrow as pa

from reagent_lite.config.columns import Columns, LogColumns
from reagent_lite.config.loader import check
from reagent_lite.config.section import Section
from reagent_lite.console import progress
from reagent_lite.data.formats.files import InputFile
from reagent_lite.data.formats.frames import Log, path_of
from reagent_lite.data.formats.reading import ALL_COLUMNS, read_blocks
from reagent_lite.data.formats.schema import conformed, in_one_piece, is_text, merge_fields
from reagent_lite.data.rows.columns import require_one_order
from reagent_lite.data.rows.table import features_as, features_type, typed_table
from reagent_lite.data.stage import data_files
from reagent_lite.errors import DataError, Problem


def typed_tables(files: tuple[InputFile, ...], doing: str) -> Generator[tuple[pa.Table, str]]:
    """Yields the rows of a log as tables of the types of logs, and where the first row of each comes from.

    Raises:
        DataError: faults of the data, with file and line; sequence numbers of two kinds.
    """
    orders: dict[str, str] = {}
    with progress(doing, "bytes") as show:
        blocks = read_blocks(files, lambda block: (*typed_table(block), block.where(0)), show, ALL_COLUMNS)
        for table, of_block, where in blocks:
            orders = {**of_block, **orders}
            require_one_order(orders, 0)
            yield table, where


def survey(files: tuple[InputFile, ...]) -> dict[str, pa.Field]:
    """Returns the columns of all rows of files, with types that hold all values; reads them once."""
    fields: dict[str, pa.Field] = {}
    with closing(typed_tables(files, "surveying")) as tables:
        for table, where in tables:
            fields = merged(fields, table, where)
    return fields


class _Own(Section):
    columns: LogColumns = {}


def read_log(log: Log, columns: Columns | None = None) -> pa.Table:
    """Returns a whole log, in memory, as training understands it: one Arrow table; `to_pandas()` makes a frame of it.

    Args:
        log: path of a file or a folder in any format, URL, or frame of pandas, polars or Arrow.
        columns: the log's own names for columns of the contract.

    Raises:
        ConfigError: `columns` that no log can have.
        DataError: what is wrong in the data, with file and line.
    """
    columns = check(_Own, {"columns": {} if columns is None else columns}).columns
    fields: dict[str, pa.Field] = {}
    tables = []
    for table, where in typed_tables(data_files(path_of(log), columns), "reading"):
        fields = merged(fields, table, where)
        tables.append(table)
    return pa.concat_tables([with_types(table, fields) for table in tables])


def merged(before: dict[str, pa.Field], table: pa.Table, where: str) -> dict[str, pa.Field]:
    """Returns the columns of typed tables that hold the values of all seen so far.

    Args:
        before: the result for the tables before.
        table: the next, as `typed_table` gives it.
        where: names its first row in errors.

    Raises:
        DataError: a column whose values here and before have no type in common.
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
    """Returns a typed table with the columns `merged` gives: others' types, and nulls for columns it lacks."""
    for number, column in enumerate(table.schema):
        kind = fields[column.name].type
        of_features = [features_type(kind_of_column, names=True, texts=True) for kind_of_column in (column.type, kind)]
        if column.type != kind and of_features[0] == of_features[1]:
            array = features_as(in_one_piece(table.column(number)), kind)
            table = table.set_column(number, column.name, array)
    return conformed(table, fields)
