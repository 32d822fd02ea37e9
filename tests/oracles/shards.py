"""Logs of episodes of given lengths, and what shards of them hold."""

import json
from collections.abc import Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from reagent_lite.data.stage import StageManifest, data_files
from reagent_lite.errors import NoRowsError


def table(lengths: Sequence[int], *, first: int = 0, seed: int = 0) -> pa.Table:
    """Transitions of episodes named e<first>, e<first + 1>, ..., one after the other."""
    rows = sum(lengths)
    rng = np.random.default_rng([seed, first])
    episode = np.repeat(np.arange(len(lengths)), lengths)
    position = np.concatenate([np.arange(n) for n in lengths] or [np.zeros(0, int)])
    over = position == np.array(lengths, int)[episode] - 1
    values = rng.normal(size=(rows + 1, 2)).astype(np.float32)
    offsets = pa.array(np.arange(rows + 1) * 2, pa.int32())

    def maps(of: Any) -> pa.Array:
        return pa.MapArray.from_arrays(
            offsets, pa.array(np.tile([0, 1], rows), pa.int32()), pa.array(of.reshape(-1), pa.float32())
        )

    return pa.table(
        {
            "mdp_id": pa.array([f"e{first + number}" for number in episode], pa.string()),
            "sequence_number": pa.array(position, pa.int64()),
            "state_features": maps(values[:-1]),
            "action": pa.array(rng.choice(["a", "b"], rows), pa.string()),
            "reward": pa.array(rng.normal(size=rows).astype(np.float32), pa.float32()),
            "possible_actions": pa.array([["a", "b"]] * rows, pa.list_(pa.string())),
            "next_state_features": maps(values[1:]),
            "next_action": pa.array([None if end else "a" for end in over], pa.string()),
            "possible_next_actions": pa.array([[] if end else ["a", "b"] for end in over], pa.list_(pa.string())),
            "of_our_own": pa.array(np.arange(rows) + 1000 * first, pa.int64()),
        }
    )


def write(file: Path, rows: pa.Table, group: int = 7) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(rows, file, row_group_size=group)
    return file


def stage(folder: Path) -> StageManifest:
    """Makes a folder of Parquet files, which share no episode, one of a timeline."""
    files = {file.name: {"rows": pq.read_metadata(file).num_rows} for file in sorted(folder.glob("*.parquet"))}
    return StageManifest(kind="timeline", rows=sum(entry["rows"] for entry in files.values()), columns={},
                         state_ids=(0, 1), action_ids=(), metric_names=("m",), settings={}, inputs=(), report={},
                         files=files).write(folder)  # fmt: skip


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Rows of a folder's data files, in the order of their names."""
    with suppress(NoRowsError):
        return [row for file in data_files(str(folder)) for row in pq.ParquetFile(file.path).read().to_pylist()]
    return []


def multiset(rows: Sequence[dict[str, Any]]) -> list[str]:
    return sorted(json.dumps(row, sort_keys=True) for row in rows)


def names(rows: Sequence[dict[str, Any]]) -> list[str]:
    """mdp_ids in order, neighbours of one name once."""
    return [name for name, _ in groupby(row["mdp_id"] for row in rows)]
