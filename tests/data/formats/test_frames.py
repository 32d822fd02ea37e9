"""Logs in memory: states as lists of numbers, and dicts of arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.logs import write_lines
from helpers.transitions import check_copy

from reagent_lite.data.copy.prepared_copy import prepare_training_copy
from reagent_lite.data.formats.frames import path_of
from reagent_lite.data.logs import Log
from reagent_lite.errors import DataError

STATES = [[0.5, 1.0], [1.5, 0.0], [2.5, 1.0]]
ROWS = [{"state_features": state, "action": "a", "reward": 1.0} for state in STATES]


@pytest.mark.parametrize("kind", [pa.list_(pa.float64()), pa.large_list(pa.float32()), pa.list_(pa.int8(), 2), None])
def test_lists_of_numbers_are_features_by_their_places(tmp_path: Path, kind: pa.DataType | None) -> None:
    """They may be ragged, have nulls, and be mixed with maps."""
    rows: list[dict[str, Any]] = [
        ROWS[0],
        ROWS[1] | {"state_features": [True]},
        ROWS[2] | {"state_features": [None, 2]},
        ROWS[2] | {"state_features": {"1": 3.0}},
    ]
    if kind is None:
        log = write_lines(tmp_path / "log.jsonl", rows)
    else:
        rows = [row | {"state_features": [int(value) for value in row["state_features"]]} for row in ROWS]
        table = pa.Table.from_pylist(rows)
        table = table.set_column(0, "state_features", table["state_features"].cast(kind))
        log = tmp_path / "log.parquet"
        pq.write_table(table, log)
    copy = prepare_training_copy(Log(str(log), actions=("a", "b"), directory=str(tmp_path / "copies")))
    check_copy(copy, rows, ("a", "b"))


@pytest.mark.parametrize("packed", [False, True])
def test_a_dict_of_arrays_is_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed: bool) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    arrays: Any = {"state_features": np.array(STATES), "action": np.array([0, 1, 0]), "reward": np.ones(3)}
    if packed:
        np.savez(tmp_path / "log.npz", **arrays)
        arrays = np.load(tmp_path / "log.npz")
    copy = prepare_training_copy(Log(path_of(arrays), actions=("a", "b"), directory=str(tmp_path / "copies")))
    assert copy.state.tolist() == STATES
    assert copy.action.tolist() == [0, 1, 0]
    with pytest.raises(DataError, match="or a dict of arrays, whose columns"):
        path_of({"reward": np.ones(3), "action": np.ones(2)})
