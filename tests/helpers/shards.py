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

from reagent_lite.data.logs import Log
from reagent_lite.data.stage_folder import StageManifest
from reagent_lite.errors import NoRowsError

_MAPS, _NAMES = pa.map_(pa.int32(), pa.float32()), pa.list_(pa.string())
SCHEMA = pa.schema({
    "mdp_id": pa.string(), "sequence_number": pa.int64(), "state_features": _MAPS, "action": pa.string(),
    "reward": pa.float32(), "possible_actions": _NAMES, "next_state_features": _MAPS, "next_action": pa.string(),
    "possible_next_actions": _NAMES, "of_our_own": pa.int64(),
})  # fmt: skip


def table(lengths: Sequence[int], *, first: int = 0, seed: int = 0) -> pa.Table:
    """Transitions of episodes named e<first>, e<first + 1>, ..., one after the other."""
    rng = np.random.default_rng([seed, first])
    steps = [(f"e{name}", step, step == length - 1)
             for name, length in enumerate(lengths, first) for step in range(length)]  # fmt: skip
    states = [list(enumerate(state)) for state in rng.normal(size=(len(steps) + 1, 2)).tolist()]
    rows = [
        {
            "mdp_id": name,
            "sequence_number": step,
            "state_features": states[number],
            "action": rng.choice(["a", "b"]),
            "reward": rng.normal(),
            "possible_actions": ["a", "b"],
            "next_state_features": states[number + 1],
            "next_action": None if is_last else "a",
            "possible_next_actions": [] if is_last else ["a", "b"],
            "of_our_own": number + 1000 * first,
        }
        for number, (name, step, is_last) in enumerate(steps)
    ]
    return pa.Table.from_pylist(rows, SCHEMA)


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
        return [row for file in Log(str(folder)).files for row in pq.ParquetFile(file.path).read().to_pylist()]
    return []


def multiset(rows: Sequence[dict[str, Any]]) -> list[str]:
    return sorted(json.dumps(row, sort_keys=True) for row in rows)


def names(rows: Sequence[dict[str, Any]]) -> list[str]:
    """mdp_ids in order, neighbors of one name once."""
    return [name for name, _ in groupby(row["mdp_id"] for row in rows)]
