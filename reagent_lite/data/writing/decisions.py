"""Decisions of a service as a file of events: standard columns, ids, and versions of the models."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet

from reagent_lite.config.column_names import EPISODE_COLUMNS
from reagent_lite.data.formats.schema import VALUES
from reagent_lite.data.writing.table_writers import table_writer

_FEATURES = pa.map_(pa.string(), pa.float32())
ROLLOUT_TYPES = {
    "rollout": pa.string(),
    "policy": pa.string(),
    "share": pa.float64(),
    "probability_current": pa.float64(),
    "probability_new": pa.float64(),
    "unit_step": pa.int64(),
    "decided": pa.timestamp("us", "UTC"),
}
"""Types of the columns that a rollout adds; `rollout_rows` reads them."""
_AT_ONCE = 1000  # rows that are converted to Arrow at once, during which no other thread of the process runs


def write_decisions(target: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes events, {column: value} each, as a file that appears once it is complete.

    Actions are all names, all ids of items, or all features; states that are strings are images, bytes in base64.
    Events with ids have a column `items`, the hash of the item table, and rows of a rollout its columns. Rows without
    `mdp_id` are single decisions, whose file has none of the columns of episodes.

    Raises:
        DataError: the file cannot be written.
    """
    texts = any(map(_has_texts, rows))
    features = pa.map_(pa.string(), VALUES) if texts else _FEATURES
    action = pa.string() if isinstance(rows[0]["action"], str) else features
    if isinstance(image := rows[0]["state_features"], str):
        rows = [{**row, "state_features": base64.b64decode(row["state_features"])} for row in rows]
        features = pa.binary(len(base64.b64decode(image)))
    table = {"items": pa.string()} if "items" in rows[0] else {}
    schema = pa.schema({
        "decision_id": pa.string(), "model": pa.string(), **table, "ds": pa.string(),
        "mdp_id": pa.string(), "sequence_number": pa.int64(), "state_features": features,
        "action": action, "reward": pa.float64(), "possible_actions": pa.list_(action),
        "action_probability": pa.float64(), "metrics": pa.map_(pa.string(), pa.float64()), "terminal": pa.bool_(),
    })  # fmt: skip
    if any("policy" in row for row in rows):
        for name, kind in ROLLOUT_TYPES.items():
            schema = schema.append(pa.field(name, kind))
    if "mdp_id" not in rows[0]:
        schema = pa.schema([field for field in schema if field.name not in EPISODE_COLUMNS])
    with table_writer(target) as writer:
        for start in range(0, len(rows), _AT_ONCE):
            part = rows[start : start + _AT_ONCE]
            writer.write(pa.Table.from_pylist([_with_values(row) for row in part] if texts else part, schema))


def _maps(row: Mapping[str, Any]) -> list[Any]:
    return [row["state_features"], row["action"], *row["possible_actions"]]


def _has_texts(row: Mapping[str, Any]) -> bool:
    return any(
        isinstance(value, str | list)
        for features in _maps(row)
        if isinstance(features, dict)
        for value in features.values()
    )


def _with_values(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a row in which each feature is a number or a text, as VALUES has them; a list of ids is a JSON text."""

    def values(features: Any) -> Any:
        if not isinstance(features, dict):
            return features
        texts = {name: json.dumps(value) if isinstance(value, list) else value for name, value in features.items()}
        return {name: {"text" if isinstance(value, str) else "number": value} for name, value in texts.items()}

    state, action, *possible = map(values, _maps(row))
    return {**row, "state_features": state, "action": action, "possible_actions": possible}


def choices_of(file: Path) -> Literal["named actions", "candidates", "items"]:
    """Returns the kind of the actions in a file that `write_decisions` wrote."""
    schema = pyarrow.parquet.read_schema(file)
    if pa.types.is_map(schema.field("action").type):
        return "candidates"
    return "items" if "items" in schema.names else "named actions"
