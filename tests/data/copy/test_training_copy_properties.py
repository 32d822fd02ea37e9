"""Random logs of candidates in several formats: the copy has the rows that a plain reading of them finds.

Logs of named actions are read so in rows/test_mutated_logs.py and formats/test_log_formats.py.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from helpers.event_files import small_blocks, write_events
from helpers.logs import Row
from helpers.transitions import check_copy, features_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reagent_lite.data.copy.prepared_copy import prepare_training_copy
from reagent_lite.data.logs import Log

values = st.floats(width=32, allow_nan=False, allow_infinity=False)
features = st.dictionaries(st.sampled_from(["0", "3", "12", "-5"]), values | st.none(), max_size=4)
some_features = features.filter(lambda each: any(value is not None for value in each.values()))
candidate_lists = st.lists(features, min_size=1, max_size=3)
NEXT = ("next_action", "possible_next_actions")
LEFT_OUT = st.sets(st.sampled_from(["mdp_id", "sequence_number", "possible_actions", NEXT[1], "propensity", "metrics"]))


@st.composite
def logs(draw: st.DrawFn) -> list[Row]:
    """Rows of candidates without faults, of few states, so that rows follow each other."""
    states = draw(st.lists(some_features, min_size=1, max_size=3))
    always = {
        "mdp_id": st.sampled_from(["e9", "e8", "e10"]), "state_features": st.sampled_from(states) | features,
        "reward": values, "time_diff": st.integers(1, 9), "next_state_features": st.sampled_from(states),
    }  # fmt: skip
    optional = {"propensity": st.floats(0.125, 1, width=32), "metrics": st.fixed_dictionaries({"clicks": values})}
    rows: list[Row] = draw(st.lists(st.fixed_dictionaries(always, optional=optional), min_size=1, max_size=9))
    for number, row in enumerate(rows):
        listed, last = draw(candidate_lists), draw(some_features)
        after = [*draw(candidate_lists), last]
        ends = (draw(st.sampled_from([None, {}])), draw(st.sampled_from([[], None])))
        goes_on = (draw(st.sampled_from([*filter(features_of, after)])), draw(st.sampled_from([after, None])))
        row |= {"sequence_number": 2 * number, "action": draw(st.sampled_from(listed)),
                "possible_actions": draw(st.sampled_from([listed, None])),
                **dict(zip(NEXT, draw(st.sampled_from([ends, goes_on, goes_on])), strict=True))}  # fmt: skip
    left_out = draw(LEFT_OUT)
    return draw(st.permutations([{name: row[name] for name in row if name not in left_out} for row in rows]))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), rows=logs(), form=st.sampled_from(["jsonl", "map.parquet", "pairs.parquet", "arrow"]))
def test_rows_read_back(data: st.DataObject, rows: list[Row], form: str) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        if form == "jsonl":
            rows *= data.draw(st.integers(1, 4))
            small_blocks(patch, data.draw(st.integers(100, 2000)))
        log = write_events(rows, Path(folder, "log"), form)
        check_copy(prepare_training_copy(Log(log, directory=folder)), rows, None)
