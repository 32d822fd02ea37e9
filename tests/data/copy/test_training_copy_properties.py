"""Random logs of candidates in several formats: the copy has the rows that a plain reading of them finds.

Logs of named actions are read so in rows/test_mutated_logs.py and formats/test_log_formats.py.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracles.event_files import data_of, small_blocks
from oracles.logs import write_lines
from oracles.transitions import check_copy, features_of, is_terminal

from reagent_lite.data.copy.training_copy import prepare_training_copy

Row = dict[str, Any]

values = st.floats(width=32, allow_nan=False, allow_infinity=False)
features = st.dictionaries(st.sampled_from(["0", "3", "12", "-5"]), values | st.none(), max_size=4)
some_features = features.filter(lambda each: any(value is not None for value in each.values()))
FORMS = ("map.parquet", "pairs.parquet", "arrow")
candidate_lists = st.lists(features, min_size=1, max_size=3)


@st.composite
def logs(draw: st.DrawFn) -> list[Row]:
    """Rows of candidates without faults."""
    with_lists, with_id, with_sequence = draw(st.booleans()), draw(st.booleans()), draw(st.booleans())

    def choose(row: Row, now: str, possible: str) -> None:
        candidates = draw(candidate_lists)
        if now == "next_action":
            candidates = [*candidates, draw(some_features)]
        row[now] = draw(st.sampled_from([each for each in candidates if now == "action" or features_of(each)]))
        if with_lists and draw(st.booleans()):
            row[possible] = candidates

    rows: list[Row] = []
    for episode in range(draw(st.integers(1, 3))):
        sequence = 0
        for step in range(draw(st.integers(1, 4))):
            row: Row = {"state_features": draw(features), "reward": draw(values), "time_diff": draw(st.integers(1, 9))}
            if with_id:
                row["mdp_id"] = f"e{9 - episode}"
            if with_sequence:
                row["sequence_number"] = sequence
                sequence += draw(st.integers(1, 3))
            choose(row, "action", "possible_actions")
            if step > 0 and draw(st.booleans()):
                rows[-1]["next_state_features"] = dict(row["state_features"])
            if draw(st.integers(0, 3)) == 0:
                row["next_action"] = draw(st.sampled_from([None, {}]))
                row["possible_next_actions"] = [] if with_lists and draw(st.booleans()) else None
            else:
                choose(row, "next_action", "possible_next_actions")
                row["next_state_features"] = draw(some_features)
            if draw(st.booleans()):
                row["propensity"] = draw(st.floats(0.125, 1, width=32))
            if draw(st.booleans()):
                row["metrics"] = {"clicks": draw(values)}
            rows.append(row)
    for row in rows:
        if not is_terminal(row, None) and not features_of(row.get("next_state_features")):
            row["next_state_features"] = {"0": 0.5}
    return draw(st.permutations(rows))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), rows=logs(), form=st.sampled_from(["json", *FORMS]))
def test_rows_read_back(data: st.DataObject, rows: list[Row], form: str) -> None:
    columns = dict.fromkeys(name for row in rows for name in row)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        file = Path(folder) / f"log.{form}"
        if form == "json":
            rows *= data.draw(st.integers(1, 4))
            small_blocks(patch, data.draw(st.integers(100, 2000)))
            write_lines(file, rows)
        else:
            file.write_bytes(data_of([{name: row.get(name) for name in columns} for row in rows], form))
        check_copy(prepare_training_copy(str(file), actions=None, directory=folder), rows, None)
