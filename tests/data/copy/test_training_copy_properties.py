"""Random logs in several formats: the copy has the rows that a plain reading of them finds."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracles.event_files import small_blocks
from oracles.logs import write_lines
from oracles.transitions import check_copy, features_of, is_terminal

from reagent_lite.data.copy.training_copy import prepare_training_copy

ACTIONS = ("left", "right", "7")
Row = dict[str, Any]

values = st.floats(width=32, allow_nan=False, allow_infinity=False)
features = st.dictionaries(st.sampled_from(["0", "3", "12", "-5"]), values | st.none(), max_size=4)
some_features = features.filter(lambda one: any(value is not None for value in one.values()))
candidate_lists = st.lists(features, min_size=1, max_size=3)


@st.composite
def discrete_logs(draw: st.DrawFn, mixed: bool) -> list[Row]:
    """Rows without faults; `mixed` allows several JSON types in one column."""
    styles = ["index", "name"]
    column_style = draw(st.sampled_from(styles))
    list_style = draw(st.sampled_from(["mask", "names", "none"]))

    def one_action(index: int) -> Any:
        style = draw(st.sampled_from(styles)) if mixed else column_style
        return index if style == "index" else ACTIONS[index]

    def one_list(allowed: list[int]) -> Any:
        style = draw(st.sampled_from(["mask", "names"])) if mixed else list_style
        if style == "names":
            return [ACTIONS[index] for index in allowed]
        return [int(index in allowed) for index in range(len(ACTIONS))]

    def choose(row: Row, now: str, possible: str) -> None:
        allowed = draw(st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True))
        if list_style != "none" and draw(st.booleans()):
            row[possible] = one_list(allowed)
        else:
            allowed = [0, 1, 2]
        row[now] = one_action(draw(st.sampled_from(allowed)))

    def end(row: Row) -> None:
        row["possible_next_actions"] = None
        row["next_action"] = draw(st.sampled_from([None, 3, ""])) if mixed else None
        if list_style != "none" and draw(st.booleans()):
            row["possible_next_actions"] = [0, 0, 0] if list_style == "mask" else []

    log = draw_log(draw, choose, end, ACTIONS)
    for row in log:
        if draw(st.integers(0, 5)) == 0:
            row["action"] = None
    return log


@st.composite
def parametric_logs(draw: st.DrawFn) -> list[Row]:
    with_lists = draw(st.booleans())

    def choose(row: Row, now: str, possible: str) -> None:
        candidates = draw(candidate_lists)
        if now == "next_action":
            candidates = [*candidates, draw(some_features)]
        chosen = draw(st.sampled_from([one for one in candidates if now == "action" or features_of(one)]))
        row[now] = chosen
        if with_lists and draw(st.booleans()):
            row[possible] = candidates

    def end(row: Row) -> None:
        row["next_action"] = draw(st.sampled_from([None, {}]))
        row["possible_next_actions"] = [] if with_lists and draw(st.booleans()) else None

    return draw_log(draw, choose, end, None)


def draw_log(draw: st.DrawFn, choose: Any, end: Any, actions: tuple[str, ...] | None) -> list[Row]:
    with_id, with_sequence = draw(st.booleans()), draw(st.booleans())
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
                end(row)
            else:
                choose(row, "next_action", "possible_next_actions")
                row["next_state_features"] = draw(some_features)
            if draw(st.booleans()):
                row["propensity"] = draw(st.floats(0.125, 1, width=32))
            if draw(st.booleans()):
                row["metrics"] = {"clicks": draw(values)}
            rows.append(row)
    for row in rows:
        if not is_terminal(row, actions) and not features_of(row.get("next_state_features")):
            row["next_state_features"] = {"0": 0.5}
    return draw(st.permutations(rows))


FEATURE_TYPES = {
    "map of strings": pa.map_(pa.string(), pa.float64()),
    "map of integers": pa.map_(pa.int64(), pa.float32()),
    "struct": pa.struct([(name, pa.float64()) for name in ("0", "3", "12", "-5")]),
    "list of pairs": pa.list_(pa.struct([("key", pa.int32()), ("value", pa.float64())])),
}


def write_parquet(file: Path, rows: list[Row], actions: tuple[str, ...] | None, style: str) -> None:
    kind = FEATURE_TYPES[style]
    number_keys = style in ("map of integers", "list of pairs")

    def convert(one: Any) -> Any:
        if not isinstance(one, dict) or style == "struct":
            return one
        pairs = [(int(name) if number_keys else name, value) for name, value in one.items()]
        return [{"key": k, "value": v} for k, v in pairs] if style == "list of pairs" else pairs

    maps = ["state_features", "next_state_features", *(() if actions else ("action", "next_action"))]
    lists = () if actions else ("possible_actions", "possible_next_actions")
    columns: dict[str, pa.Array] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        cells = [row.get(name) for row in rows]
        if name in maps:
            columns[name] = pa.array([convert(cell) for cell in cells], kind)
        elif name in lists:
            inner = [None if cell is None else [convert(one) for one in cell] for cell in cells]
            columns[name] = pa.array(inner, pa.list_(kind))
        else:
            columns[name] = pa.array(cells)
    pq.write_table(pa.table(columns), file, row_group_size=3)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), parametric=st.booleans(), style=st.sampled_from(["json", *FEATURE_TYPES]))
def test_rows_read_back(data: st.DataObject, parametric: bool, style: str) -> None:
    actions, block = None if parametric else ACTIONS, data.draw(st.integers(100, 2000))
    rows = data.draw(parametric_logs() if parametric else discrete_logs(mixed=style == "json"))
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        file = Path(folder) / ("log.json" if style == "json" else "log.parquet")
        if style == "json":
            rows *= data.draw(st.integers(1, 4))
            small_blocks(patch, block, block)
            write_lines(file, rows)
        else:
            write_parquet(file, rows, actions, style)
        check_copy(prepare_training_copy(str(file), actions=actions, directory=folder), rows, actions)
