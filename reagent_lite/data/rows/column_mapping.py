"""A user's own columns, read as those of the contract.

    session, time, age, income, clicked ─► mdp_id, sequence_number, state_features {age, income}, reward

The names are attached to the files when these are listed, so that every reader of rows sees the contract's columns, in
this process and in executors of Spark. Folders that a stage made have the contract's names already.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from reagent_lite.config.columns import COLUMNS, EVENT_COLUMNS, LATE_COLUMNS, SERVED_COLUMNS, Columns
from reagent_lite.data.formats.blocks import Block
from reagent_lite.data.formats.jsonl import NamedArray, in_one_column
from reagent_lite.data.formats.schema import in_one_piece
from reagent_lite.data.rows.contract import require_columns
from reagent_lite.errors import DataError, Problem, listed

_JSON_LINES = (".json", ".jsonl", ".ndjson")


@dataclass(frozen=True, slots=True)
class ColumnMapping:
    """Which of a log's columns hold the fields of the contract.

    Attributes:
        fields: (field, its column) each; for features and metrics (field, a column for each of them).
        beside_others: whether the log is one of several, some of which may have the contract's names.
    """

    fields: tuple[tuple[str, str | tuple[str, ...]], ...]
    beside_others: bool = False

    @classmethod
    def of(cls, columns: Mapping[str, str | Sequence[str]], *, beside_others: bool = False) -> ColumnMapping | None:
        """Returns the names that a config gives; None if it gives none."""
        fields = [(name, source if isinstance(source, str) else tuple(source)) for name, source in columns.items()]
        return cls(tuple(fields), beside_others) if fields else None

    def meaning(self, name: str) -> str:
        """Returns the field that a column holds; `field.name` if it holds one of the field's features."""
        for field, source in self.fields:
            if name == source:
                return field
            if not isinstance(source, str) and name in source:
                return f"{field}.{name}"
        return name

    def read(self, block: Block) -> Block:
        """Returns a block with the contract's columns.

        The log of workflows.serve has the contract's names, even if the model that it served was trained with others.

        Raises:
            DataError: columns are missing; names the nearest ones.
        """
        table = block.table
        has_all_columns = block.file.extension not in _JSON_LINES
        is_checked = has_all_columns or (len(block.lines) > 0 and block.lines[0] == 1)
        has_contract_names = contract_names(dict(self.fields), table.column_names)
        names = set(table.column_names)
        is_served = SERVED_COLUMNS[0] in names and names <= {*SERVED_COLUMNS, *COLUMNS}
        if has_contract_names and (self.beside_others or is_served):
            return block
        if is_checked and has_contract_names:
            expected = f"the columns that data.columns names: {listed(self._sources)}"
            todo = "Drop data.columns, in other workflows columns: the log has the contract's names already"
            raise DataError(
                Problem(block.file.location(), expected, f"columns {listed(sorted(table.column_names))}", todo)
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
                parts = {name: _part(name, table) for name in source}
                columns.append(in_one_column(field, parts, np.ones(table.num_rows, bool)))
            elif source in table.column_names:
                columns.append((table.schema.field(source).with_name(field), table.column(source)))
        fields, arrays = zip(*columns, strict=True)
        return replace(block, table=pa.table(list(arrays), pa.schema(fields)))

    @property
    def _sources(self) -> dict[str, str]:
        """{column: the field it stands for}."""
        return {name: field for field, source in self.fields for name in names_of(source)}


def names_of(source: str | Sequence[str]) -> Sequence[str]:
    """Returns the columns that hold a field, or its features."""
    return (source,) if isinstance(source, str) else source


def contract_names(columns: Mapping[str, str | Sequence[str]], names: Collection[str]) -> bool:
    """Whether a log has the contract's names, and none of the names in `columns`, for the renamed fields of events."""
    renamed = {field: source for field, source in columns.items() if field in EVENT_COLUMNS and source != field}
    has_no_own_name = all(set(names_of(source)).isdisjoint(names) for source in renamed.values())
    return bool(renamed) and has_no_own_name and renamed.keys() <= {name.partition(".")[0] for name in names}


def remembered(columns: Columns, names: Collection[str]) -> Columns:
    """Returns the column names of a model's training log that apply to another log.

    There are none if the other log has the contract's names. Fields that it lacks, such as a reward, are left out.
    """
    if contract_names(columns, names):
        return {}
    return {field: source for field, source in columns.items() if not set(names_of(source)).isdisjoint(names)}


@dataclass(frozen=True, slots=True)
class OriginalNames:
    """Reads every column of a log under its own name."""

    def meaning(self, name: str) -> str:
        """Returns "", which is the name of no field."""
        return ""

    def read(self, block: Block) -> Block:
        """Returns the block."""
        return block


def _part(name: str, table: pa.Table) -> NamedArray:
    """Returns the column of a feature; if the table lacks it, a column of nulls."""
    if name in table.column_names:
        return table.schema.field(name), in_one_piece(table.column(name))
    return pa.field(name, pa.float64()), pa.nulls(table.num_rows, pa.float64())
