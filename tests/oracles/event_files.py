"""Lists of events as files of every format that timelines read."""

import bz2
import gzip
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

Row = dict[str, Any]
FORMATS = (
    "jsonl",
    "jsonl.gz",
    "jsonl.bz2",
    "jsonl.zst",
    "map.parquet",
    "struct.parquet",
    "pairs.parquet",
    "arrow",
    "csv",
)
_FEATURES, _METRICS = pa.map_(pa.int64(), pa.float32()), pa.map_(pa.string(), pa.float64())
_PAIRS = pa.list_(pa.struct([("key", pa.int32()), ("value", pa.float64())]))


def write_events(rows: list[Row], folder: Path, form: str, files: int = 1) -> Path:
    """Writes rows to so many files of a folder, one after the other, and returns the folder."""
    folder.mkdir(parents=True)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    for number in range(files):
        part = rows[len(rows) * number // files : len(rows) * (number + 1) // files]
        if part:
            _write(part, columns, folder / f"events-{number}.{form}")
    return folder


def _write(rows: list[Row], columns: list[str], file: Path) -> None:
    kind = file.name.split(".", 1)[1]
    # every file names all columns, as logs of one writer do
    full = [{name: row.get(name) for name in columns} for row in rows]
    text = "".join(json.dumps(row) + "\n" for row in full).encode()
    if kind == "jsonl":
        file.write_bytes(text)
    elif kind == "jsonl.gz":
        file.write_bytes(gzip.compress(text))
    elif kind == "jsonl.bz2":
        file.write_bytes(bz2.compress(text))
    elif kind == "jsonl.zst":
        file.write_bytes(zstandard.ZstdCompressor().compress(text))
    elif kind == "struct.parquet":
        pd.DataFrame(full, columns=columns).to_parquet(file)
    elif kind == "csv":
        cells = [[json.dumps(cell) if isinstance(cell, dict | list) else cell for cell in row.values()] for row in full]
        pd.DataFrame(cells, columns=columns).to_csv(file, index=False)
    else:
        table = pa.table({name: _array(name, [row[name] for row in full], kind) for name in columns})
        if kind == "arrow":
            with pa.ipc.new_file(file, table.schema) as writer:
                writer.write_table(table)
        else:
            pq.write_table(table, file, row_group_size=5)


def _array(name: str, cells: list[Any], kind: str) -> pa.Array:
    features = _PAIRS if kind == "pairs.parquet" else _FEATURES
    if name == "metrics":
        return pa.array([None if cell is None else list(cell.items()) for cell in cells], _METRICS)
    if name in ("state_features", "next_state_features") or (name == "action" and _is_map(cells)):
        return pa.array([_entries(cell, kind) for cell in cells], features)
    if name in ("possible_actions", "possible_next_actions"):
        if all(cell is None for cell in cells):
            return pa.nulls(len(cells))
        if not any(_is_map(cell or []) for cell in cells):
            return pa.array(cells, pa.list_(pa.string()))
        return pa.array([None if cell is None else [_entries(one, kind) for one in cell] for cell in cells],
                        pa.list_(features))  # fmt: skip
    return pa.array(cells)


def _is_map(cells: list[Any]) -> bool:
    return any(isinstance(cell, dict) for cell in cells)


def _entries(cell: Row | None, kind: str) -> Any:
    if cell is None:
        return None
    entries = [(int(key), value) for key, value in cell.items()]
    return [{"key": key, "value": value} for key, value in entries] if kind == "pairs.parquet" else entries
