"""A user's own columns, read as those of the contract.

    session, time, age, income, clicked ─► mdp_id, sequence_number, state_features {age, income}, reward

The names are given where files are listed and travel with each file, so that whoever reads its rows sees the
contract's columns, in this process and in an executor. Folders that a stage made have the contract's names already.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from reagent_lite.config.columns import LATE_COLUMNS
from reagent_lite.data.formats.blocks import Block
from reagent_lite.data.formats.jsonl import column_of
from reagent_lite.data.formats.schema import in_one_piece, is_text
from reagent_lite.data.rows.contract import require_columns

_JSON_LINES = (".json", ".jsonl", ".ndjson")


@dataclass(frozen=True, slots=True)
class OwnColumns:
    """Which of a log's columns hold the fields of the contract.

    Attributes:
        fields: (field, name of its column; of features and metrics the names of one column each).
    """

    fields: tuple[tuple[str, str | tuple[str, ...]], ...]

    @classmethod
    def of(cls, columns: Mapping[str, str | Sequence[str]]) -> OwnColumns | None:
        """Returns the names that a config gives, None where it gives none."""
        fields = [(name, one if isinstance(one, str) else tuple(one)) for name, one in columns.items()]
        return cls(tuple(fields)) if fields else None

    def meaning(self, name: str) -> str:
        """Returns the field that a column holds; `field.name` where it holds one of the field's features."""
        for field, source in self.fields:
            if name == source:
                return field
            if not isinstance(source, str) and name in source:
                return f"{field}.{name}"
        return name

    def read(self, block: Block) -> Block:
        """Returns a block with the contract's columns.

        Raises:
            DataError: for columns that are not there, with the nearest that are.
        """
        table = block.table
        if block.file.extension not in _JSON_LINES:
            require_columns(table.column_names, self._sources, block.file.place(), self._sources)
        elif len(block.lines) and block.lines[0] == 1:
            soon = {name: field for name, field in self._sources.items() if field not in LATE_COLUMNS}
            require_columns(table.column_names, soon, block.where(0), soon)
        replaced = {*dict(self.fields), *self._sources}
        columns = [(one, table.column(number)) for number, one in enumerate(table.schema) if one.name not in replaced]
        for field, source in self.fields:
            if not isinstance(source, str):
                columns.append(_together(field, source, table))
            elif source in table.column_names:
                columns.append((table.schema.field(source).with_name(field), table.column(source)))
        fields, arrays = zip(*columns, strict=True)
        return replace(block, table=pa.table(list(arrays), pa.schema(fields)))

    @property
    def _sources(self) -> dict[str, str]:
        """{column: the field it stands for}."""
        return {
            name: field for field, source in self.fields for name in ((source,) if isinstance(source, str) else source)
        }


def _together(field: str, names: tuple[str, ...], table: pa.Table) -> tuple[pa.Field, pa.Array]:
    """Returns columns of single features as one column of maps."""
    there = {name: table.schema.field(name) for name in names if name in table.column_names}
    if texts := [name for name, one in there.items() if is_text(one)]:
        rows = table.select(list(there)).to_pylist()
        for row in rows:
            row |= {name: json.loads(row[name]) for name in texts if row[name] is not None}
        return column_of(field, rows)
    none = pa.nulls(table.num_rows, pa.float64())
    arrays = [in_one_piece(table.column(name)) if name in there else none for name in names]
    struct = pa.StructArray.from_arrays(arrays, list(names))
    return pa.field(field, struct.type), struct
