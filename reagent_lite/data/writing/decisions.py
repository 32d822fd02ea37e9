"""Decisions of a service as a file of events: columns of the contract, ids, and versions of the models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet

from reagent_lite.data.writing.files import table_writer

_FEATURES = pa.map_(pa.string(), pa.float32())
_AT_ONCE = 1000  # rows that are turned into Arrow while nothing else of the process runs


def write_decisions(target: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes events, {column: value}, as a file that appears whole; actions are all names, all ids, or all features.

    Those of items have a column `items`, the hash of the item table.

    Raises:
        DataError: the file cannot be written.
    """
    action = pa.string() if isinstance(rows[0]["action"], str) else _FEATURES
    table = {"items": pa.string()} if "items" in rows[0] else {}
    schema = pa.schema({
        "decision_id": pa.string(), "model": pa.string(), **table, "ds": pa.string(),
        "mdp_id": pa.string(), "sequence_number": pa.int64(), "state_features": _FEATURES,
        "action": action, "reward": pa.float64(), "possible_actions": pa.list_(action),
        "action_probability": pa.float64(), "metrics": pa.map_(pa.string(), pa.float64()), "terminal": pa.bool_(),
    })  # fmt: skip
    with table_writer(target) as writer:
        for start in range(0, len(rows), _AT_ONCE):
            writer.write(pa.Table.from_pylist(rows[start : start + _AT_ONCE], schema))


def choices_of(file: Path) -> Literal["named actions", "candidates", "items"]:
    """Returns the kind of the decisions in such a file."""
    schema = pyarrow.parquet.read_schema(file)
    if pa.types.is_map(schema.field("action").type):
        return "candidates"
    return "items" if "items" in schema.names else "named actions"
