"""A user's own columns, read as the standard ones.

    session, time, age, income, clicked ─► mdp_id, sequence_number, state_features {age, income}, reward
    signed_up "2026-01-31 10:30"        ─► state_features {signed_up_weekday: 5, signed_up_hour: 10}

The names are attached to the files when these are listed, so that every reader of rows sees the standard columns, in
this process and in executors of Spark. Folders that a stage made have the standard names already.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from reagent_lite.config.column_names import (
    COLUMNS,
    CSV,
    EVENT_COLUMNS,
    LATE_COLUMNS,
    PLAIN_CSV,
    SERVED_COLUMNS,
    Columns,
    CsvFormat,
    names_of,
)
from reagent_lite.data.faults_by_kind import raise_unread
from reagent_lite.data.formats.blocks import Block
from reagent_lite.data.formats.jsonl import NamedArray, array_of_values, in_one_column
from reagent_lite.data.formats.schema import find_distinct, in_one_piece, is_text
from reagent_lite.data.rows.row_rules import require_columns
from reagent_lite.errors import DataError, Problem, join_names
from reagent_lite.raw_values import TODO, RawColumn, raw_columns


@dataclass(frozen=True, slots=True)
class ColumnMapping:
    """Which of a log's columns hold the standard columns, and how they are written.

    Attributes:
        fields: (field, its column) each; for features and metrics (field, a column for each of them).
        raw_columns: the columns whose values are not read as they are.
        csv: format of CSV files.
        beside_others: whether the log is one of several, some of which may have the standard names.
    """

    fields: tuple[tuple[str, str | tuple[str, ...]], ...]
    raw_columns: tuple[RawColumn, ...] = ()
    csv: CsvFormat = PLAIN_CSV
    beside_others: bool = False

    @classmethod
    def of(cls, columns: Columns, *, beside_others: bool = False) -> ColumnMapping | None:
        """Returns the names that a config gives; None if it gives none."""
        if not columns:
            return None
        sources = {field: source for field, source in columns.items() if field != CSV}
        return cls(
            fields=tuple(
                (field, names_of(source) if isinstance(source, list) else names_of(source)[0])
                for field, source in sources.items()
            ),
            raw_columns=tuple(column for source in sources.values() for column in raw_columns(source)),
            csv=csv_of(columns),
            beside_others=beside_others,
        )

    def meaning(self, name: str) -> str:
        """Returns the field that a column holds; `field.name` if it holds one of the field's features."""
        for field, source in self.fields:
            if name == source:
                return field
            if not isinstance(source, str) and name in source:
                return f"{field}.{name}"
        return name

    @property
    def own_names(self) -> bool:
        """Whether columns may have names of the user's own."""
        return True

    @property
    def raw(self) -> tuple[str, ...]:
        """Names of the columns whose values are not read as they are."""
        return tuple(column.column for column in self.raw_columns)

    def read(self, block: Block) -> Block:
        """Returns a block with the standard columns.

        The log of workflows.serve has the standard names, even if the model that it served was trained with others.

        Raises:
            DataError: columns are missing; names the nearest ones. Values of raw columns that are not of their kind.
        """
        table = block.table
        has_all_columns = not block.file.own_columns
        is_checked = has_all_columns or (len(block.lines) > 0 and block.lines[0] == 1)
        has_contract_names = contract_names(dict(self.fields), table.column_names)
        names = set(table.column_names)
        is_served = SERVED_COLUMNS[0] in names and names <= {*SERVED_COLUMNS, *COLUMNS}
        if has_contract_names and (self.beside_others or is_served):
            return block
        if is_checked and has_contract_names:
            expected = f"the columns that data.columns names: {join_names(self._sources)}"
            todo = "Drop data.columns, in other workflows columns: the log has the standard names already"
            raise DataError(
                Problem(block.file.location(), expected, f"columns {join_names(sorted(table.column_names))}", todo)
            )
        if has_all_columns:
            require_columns(table.column_names, self._sources, block.file.location(), self._sources)
        elif is_checked:
            required = {name: field for name, field in self._sources.items() if field not in LATE_COLUMNS}
            require_columns(table.column_names, required, block.where(0), required)
        replaced = {*dict(self.fields), *self._sources}
        columns = [
            (field, table.column(number)) for number, field in enumerate(table.schema) if field.name not in replaced
        ]
        for field, source in self.fields:
            if not isinstance(source, str):
                parts = {feature: part for name in source for feature, part in self._parts(name, block).items()}
                columns.append(in_one_column(field, parts, np.ones(table.num_rows, bool)))
            elif source in table.column_names:
                (part,) = self._parts(source, block).values()
                columns.append((part[0].with_name(field), part[1]))
        fields, arrays = zip(*columns, strict=True)
        return replace(block, table=pa.table(list(arrays), pa.schema(fields)))

    def _parts(self, name: str, block: Block) -> dict[str, NamedArray]:
        """Returns {feature: its values} of a column; of a column that the block lacks, nulls."""
        table = block.table
        raw = next((column for column in self.raw_columns if column.column == name), None)
        if name in table.column_names:
            part = table.schema.field(name), in_one_piece(table.column(name))
            return {name: part} if raw is None else _read_raw(raw, part, block)
        absent = pa.field(name, pa.float64()), pa.nulls(table.num_rows, pa.float64())
        return dict.fromkeys((name,) if raw is None else raw.features, absent)

    @property
    def _sources(self) -> dict[str, str]:
        """{column: the field it stands for}."""
        return {name: field for field, source in self.fields for name in names_of(source)}


def csv_of(columns: Columns) -> CsvFormat:
    """Returns the format of CSV files that `columns` gives."""
    return CsvFormat.model_validate(columns.get(CSV, {}))


def contract_names(columns: Mapping[str, Any], names: Collection[str]) -> bool:
    """Whether a log has the standard names, and none of the names in `columns`, for the renamed fields of events."""
    renamed = {
        field: source
        for field, source in columns.items()
        if field in EVENT_COLUMNS and (isinstance(source, list | tuple) or names_of(source) != (field,))
    }
    has_no_own_name = all(set(names_of(source)).isdisjoint(names) for source in renamed.values())
    return bool(renamed) and has_no_own_name and renamed.keys() <= {name.partition(".")[0] for name in names}


def recall_columns(columns: Columns, names: Collection[str]) -> Columns:
    """Returns the column names of a model's training log that apply to another log.

    There are none if the other log has the standard names. Fields that it lacks, such as a reward, are left out. The
    format of CSV files stays.
    """
    if contract_names(columns, names):
        return {CSV: columns[CSV]} if CSV in columns else {}
    return {
        field: source
        for field, source in columns.items()
        if field == CSV or not set(names_of(source)).isdisjoint(names)
    }


@dataclass(frozen=True, slots=True)
class OriginalNames:
    """Reads every column of a log under its own name.

    Attributes:
        csv: format of CSV files.
        own_names: true, so that all columns are read.
    """

    csv: CsvFormat = PLAIN_CSV
    raw: tuple[str, ...] = ()
    own_names: bool = True

    def meaning(self, name: str) -> str:
        """Returns "", which is the name of no field."""
        return ""

    def read(self, block: Block) -> Block:
        """Returns the block."""
        return block


def _read_raw(raw: RawColumn, part: NamedArray, block: Block) -> dict[str, NamedArray]:
    """Returns {feature: its values} of a raw column; each distinct value is read once.

    Raises:
        DataError: values are not of the column's kind, with their rows.
    """
    field, array = part
    kind = array.type
    if pa.types.is_timestamp(kind) and kind.unit == "ns":
        array = array.cast(pa.timestamp("us", kind.tz), safe=False)  # Python's times have microseconds
    if pa.types.is_nested(kind):
        values = array.to_pylist()
        index = np.arange(len(array))
    else:
        distinct, codes = find_distinct(array)
        values = [*distinct.to_pylist(), None]
        index = np.where(codes < 0, len(distinct), codes)
    read: list[tuple[Any, ...]] = []
    problems = []
    for number, value in enumerate(values):
        try:
            read.append(raw.read(json.loads(value) if is_text(field) and value is not None else value))
        except ValueError as error:
            row = int((index == number).argmax())
            expected = f"{error} in {raw.column}"
            problems.append(Problem(block.where(row), expected, f"{value!r:.60}", TODO))
            read.append((None,) * len(raw.features))
    raise_unread(problems)
    columns = {}
    for name, of_feature in zip(raw.features, zip(*read, strict=True), strict=True):
        named, values_of_feature = array_of_values(name, list(of_feature))
        columns[name] = named, values_of_feature.take(pa.array(index))
    return columns
