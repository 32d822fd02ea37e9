"""The same rows in every format give the same training copy, and the copy has what the rows say."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import zstandard
from oracles.transitions import check_copy, check_same

from reagent_lite.data.copy.first_look import first_rows
from reagent_lite.data.copy.training_copy import TrainingCopy, prepare_training_copy
from reagent_lite.data.formats import text_files
from reagent_lite.data.formats.jsonl import table_of

Row = dict[str, Any]
NAMES = ("left", "right")
NUM = 400


def discrete_rows() -> list[Row]:
    """Episodes of 5 rows in disorder; a feature that is absent now and then; names that CSV has to quote."""
    rng = np.random.default_rng(0)
    rows: list[Row] = []
    for number in rng.permutation(NUM).tolist():
        episode, step = divmod(number, 5)
        ends = step == 4
        rows.append({
            "mdp_id": f'é"{episode},\n{episode}', "sequence_number": step * 10,
            "state_features": {"0": number / 8, "7": -0.0} if number % 3 else {"7": 1e-20},
            "next_state_features": {} if ends else {"0": (number + 1) / 8, "7": 0.1},
            "action": NAMES[number % 2], "next_action": None if ends else NAMES[(number + 1) % 2],
            "possible_actions": ["left", "right"], "possible_next_actions": [] if ends else ["left", "right"],
            "reward": float(np.float32(rng.normal())), "time_diff": 10, "action_probability": 0.25 + number % 2 / 2,
            "metrics": {"clicks": number / 2}, "terminal": ends, "truncated": False,
        })  # fmt: skip
    return rows


def parametric_rows() -> list[Row]:
    rows = []
    for row in discrete_rows():
        left, right = {"1": 1.0, "2": 0.0}, {"1": 0.0, "2": row["reward"]}
        maps = {"left": left, "right": right, None: {}}
        rows.append(row | {
            "action": maps[row["action"]], "next_action": maps[row["next_action"]],
            "possible_actions": [left, right],
            "possible_next_actions": [maps[name] for name in row["possible_next_actions"]],
        })  # fmt: skip
    return rows


def json_text(rows: list[Row]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def csv_text(rows: list[Row], *, dense: bool) -> bytes:
    """By Python's writer: maps and lists as JSON, or maps as a column for each feature, as pandas has them."""
    flat = []
    for row in rows:
        cells: Row = {}
        for name, value in row.items():
            if dense and isinstance(value, dict):
                cells |= {f"{name}.{feature}": repr(number) for feature, number in value.items()}
            elif isinstance(value, dict | list):
                cells[name] = json.dumps(value)
            else:
                cells[name] = value
        flat.append(cells)
    names = list(dict.fromkeys(name for cells in flat for name in cells))
    stream = io.StringIO(newline="")
    writer = csv.DictWriter(stream, names, restval="")
    writer.writeheader()
    writer.writerows(flat)
    return stream.getvalue().encode()


def ipc(rows: list[Row], make: Callable[..., Any]) -> bytes:
    table, stream = table_of(rows), io.BytesIO()
    with make(stream, table.schema) as writer:
        writer.write_table(table, max_chunksize=150)
    return stream.getvalue()


def feather(rows: list[Row]) -> bytes:
    stream = io.BytesIO()
    pyarrow.feather.write_feather(table_of(rows), stream)
    return stream.getvalue()


def parquet(rows: list[Row]) -> bytes:
    stream = io.BytesIO()
    pq.write_table(table_of(rows), stream, row_group_size=150)
    return stream.getvalue()


def zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


FORMATS: dict[str, Callable[[list[Row]], bytes]] = {
    "x.jsonl": json_text,
    "X.JSON.GZ": lambda rows: gzip.compress(json_text(rows)),
    "x.jsonl.bz2": lambda rows: bz2.compress(json_text(rows)),
    "x.jsonl.zst": lambda rows: zstd(json_text(rows)),
    "x.parquet": parquet,
    "file.arrow": lambda rows: ipc(rows, pa.ipc.new_file),
    "stream.arrow": lambda rows: ipc(rows, pa.ipc.new_stream),
    "x.ipc": lambda rows: ipc(rows, pa.ipc.new_stream),
    "x.feather": feather,
    "x.csv": lambda rows: csv_text(rows, dense=False),
    "x.csv.gz": lambda rows: gzip.compress(csv_text(rows, dense=False)),
    "x.csv.bz2": lambda rows: bz2.compress(csv_text(rows, dense=False)),
    "x.csv.zst": lambda rows: zstd(csv_text(rows, dense=False)),
    "dense.csv": lambda rows: csv_text(rows, dense=True),
}


def copies(tmp_path: Path, rows: list[Row], actions: tuple[str, ...] | None) -> dict[str, TrainingCopy]:
    found = {}
    for name, data in FORMATS.items():
        file = tmp_path / name
        file.write_bytes(data(rows))
        found[name] = prepare_training_copy(str(file), actions=actions, directory=str(tmp_path / "copies"))
    return found


@pytest.mark.parametrize("small_blocks", [False, True])
@pytest.mark.parametrize("kind", ["discrete", "parametric"])
def test_every_format_gives_the_check_same(
    tmp_path: Path, kind: str, small_blocks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if small_blocks:
        monkeypatch.setattr(text_files, "FIRST_BLOCK_BYTES", 4000)
        monkeypatch.setattr(text_files, "BLOCK_BYTES", 9000)
    rows = discrete_rows() if kind == "discrete" else parametric_rows()
    found = copies(tmp_path, rows, NAMES if kind == "discrete" else None)
    first = found["x.jsonl"]
    for name, copy in found.items():
        assert (name, len(copy), copy.notes) == (name, NUM, ())
        check_same(first, copy)
    check_copy(first, rows, NAMES if kind == "discrete" else None)
    if kind == "discrete":
        # a CSV record that spans three lines begins in the first of them; the header is line 1
        lines = np.array(found["x.csv"].origin_line)
        position = np.array(first.origin_line) - 1
        np.testing.assert_array_equal(lines, 2 + 2 * position)


@pytest.mark.parametrize("name", ["x.csv.gz", "file.arrow", "stream.arrow"])
def test_first_rows_and_urls(tmp_path: Path, name: str) -> None:
    rows, filesystem = discrete_rows(), fsspec.filesystem("memory")
    filesystem.pipe(f"/formats/{name}/{name}", FORMATS[name](rows))
    filesystem.pipe("/formats/json/x.jsonl", json_text(rows))
    url = f"memory://formats/{name}"
    seen = first_rows(url, NAMES)
    assert seen.state_ids == (0, 7)
    assert 0 < seen.rows <= NUM
    one, other = (
        prepare_training_copy(path, actions=NAMES, directory=str(tmp_path)) for path in (url, "memory://formats/json")
    )
    check_same(one, other)


def test_formats_mix_in_a_folder(tmp_path: Path) -> None:
    """A folder's shards may be of several formats: rows 0 to 199 of one, 200 to 399 of the other."""
    rows, folder = discrete_rows(), tmp_path / "shards"
    folder.mkdir()
    (folder / "a.csv").write_bytes(csv_text(rows[:200], dense=True))
    (folder / "b.arrow").write_bytes(ipc(rows[200:], pa.ipc.new_file))
    (tmp_path / "x.jsonl").write_bytes(json_text(rows))
    one, other = (
        prepare_training_copy(str(tmp_path / name), actions=NAMES, directory=str(tmp_path / "copies"))
        for name in ("shards", "x.jsonl")
    )
    check_same(one, other)
