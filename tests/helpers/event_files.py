"""Rows of a log as files of every format that logs come in, by other people's writers; and what readers give."""

import bz2
import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import zstandard
from helpers.logs import Row

from reagent_lite.data.formats import text_files
from reagent_lite.data.formats.blocks import Block
from reagent_lite.data.formats.format_table import ALL_COLUMNS, READERS, read_blocks
from reagent_lite.data.formats.input_files import list_input
from reagent_lite.errors import DataError, Problem

PACKINGS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "zst": lambda data: zstandard.ZstdCompressor().compress(data),
}
EXTENSIONS = tuple(READERS)
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
_FEATURES = pa.map_(pa.int64(), pa.float32())
_PAIRS = pa.list_(pa.struct([("key", pa.int32()), ("value", pa.float64())]))


def rows_of(path: Path | str) -> list[Row]:
    return [
        row
        for rows in read_blocks(list_input(str(path), EXTENSIONS), lambda block: block.table.to_pylist())
        for row in rows
    ]


def blocks_of(path: Path) -> list[Block]:
    """All columns, also those that no log has."""
    return list(read_blocks(list_input(str(path), EXTENSIONS), lambda block: block, None, ALL_COLUMNS))


def values_of(blocks: list[Block], column: str) -> list[Any]:
    return [value for block in blocks for value in block.table.column(column).to_pylist()]


def lines_of(blocks: list[Block]) -> list[int]:
    return [int(line) for block in blocks for line in block.lines]


def problems_of(path: Path | str) -> tuple[Problem, ...]:
    with pytest.raises(DataError) as caught:
        rows_of(path)
    return caught.value.problems


def small_blocks(patch: pytest.MonkeyPatch, first: int, later: int | None = None) -> None:
    """Text is read in blocks of so many bytes."""
    patch.setattr(text_files, "FIRST_BLOCK_BYTES", first)
    patch.setattr(text_files, "BLOCK_BYTES", later or first)


def write_events(rows: list[Row], folder: Path, form: str, files: int = 1) -> Path:
    """Writes rows to so many files of a folder, one after the other, and returns the folder."""
    folder.mkdir(parents=True)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    full = [{name: row.get(name) for name in columns} for row in rows]  # in every file, as logs of one writer do
    for number in range(files):
        if part := full[len(rows) * number // files : len(rows) * (number + 1) // files]:
            (folder / f"events-{number}.{form}").write_bytes(data_of(part, form))
    return folder


def write_frame(frame: pd.DataFrame, file: Path) -> Path:
    """Writes a frame as pandas does for the file's extension, and returns the file."""
    options: dict[str, Row] = {"csv": {"index": False}, "json": {"orient": "records", "lines": True}}
    extension = file.suffix[1:].removesuffix("l")
    getattr(frame, f"to_{extension}")(file, **options.get(extension, {}))
    return file


def data_of(rows: list[Row], form: str) -> bytes:
    """Returns the bytes of a file.

    Args:
        rows: with the same keys each.
        form: extension of the file, packing included. Of Parquet it says how features are kept ("map", "pairs",
            "struct", "text"), of CSV whether they have columns of their own ("dense"), of Arrow whether it is a
            "stream".
    """
    kind, _, packing = form.rpartition(".")
    if packing in PACKINGS:
        return PACKINGS[packing](data_of(rows, kind))
    if form in ("json", "jsonl"):
        return "".join(json.dumps(row) + "\n" for row in rows).encode()
    if form == "dense.csv":
        return (
            pd.DataFrame([_cells(row) for row in rows], dtype=object)
            .to_csv(index=False, lineterminator="\r\n")
            .encode()
        )
    texts = [{name: json.dumps(value) if isinstance(value, dict | list) else value for name, value in row.items()}
             for row in rows]  # fmt: skip
    if form == "csv":
        return pd.DataFrame(texts).to_csv(index=False).encode()
    if form in ("struct.parquet", "text.parquet"):
        return pd.DataFrame(texts if form == "text.parquet" else rows).to_parquet()
    stream = io.BytesIO()
    table = pa.table({name: _array(name, [row[name] for row in rows], form) for name in rows[0]})
    if form.endswith("parquet"):
        pq.write_table(table, stream, row_group_size=5)
    elif form == "feather":
        pyarrow.feather.write_feather(table, stream)
    else:
        with (pa.ipc.new_stream if form == "stream.arrow" else pa.ipc.new_file)(stream, table.schema) as writer:
            writer.write_table(table, max_chunksize=150)
    return stream.getvalue()


def _cells(row: Row) -> Row:
    """Features in columns of their own."""
    return {
        key: cell
        for name, value in row.items()
        for key, cell in (
            [(f"{name}.{feature}", repr(number)) for feature, number in value.items()]
            if isinstance(value, dict)
            else [(name, json.dumps(value) if isinstance(value, list) else value)]
        )
    }


def _array(name: str, cells: list[Any], form: str) -> pa.Array:
    features = _PAIRS if form == "pairs.parquet" else _FEATURES
    if name == "metrics":
        return pa.array(
            [None if cell is None else list(cell.items()) for cell in cells], pa.map_(pa.string(), pa.float64())
        )
    if name in ("state_features", "next_state_features") or _has_map(cells):
        return pa.array([_entries(cell, form) for cell in cells], features)
    if any(_has_map(cell) for cell in cells if isinstance(cell, list)):
        return pa.array(
            [None if cell is None else [_entries(entry, form) for entry in cell] for cell in cells], pa.list_(features)
        )
    return pa.array(cells)


def _has_map(cells: list[Any]) -> bool:
    return any(isinstance(cell, dict) for cell in cells)


def _entries(cell: Row | None, form: str) -> Any:
    if cell is None:
        return None
    return [
        {"key": int(key), "value": value} if form == "pairs.parquet" else (int(key), value)
        for key, value in cell.items()
    ]
