"""Random episodes, as files of every format, through timeline and training copy, as a plain reading of them says."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracles.event_files import FORMATS, write_events
from oracles.timelines import Transition, features, transitions

from reagent_lite.config import check
from reagent_lite.config.timeline import TimelineConfig
from reagent_lite.data.copy.training_copy import TrainingCopy, prepare_training_copy
from reagent_lite.data.stage import data_files
from reagent_lite.data.timeline.duckdb_engine import DuckDBEngine
from reagent_lite.data.timeline.spark_engine import SparkEngine
from reagent_lite.data.timeline.stage import Engine, make_timeline

ACTIONS = ("left", "right", "7")
Row = dict[str, Any]
PROFILE = settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)

values = st.floats(width=32, allow_nan=False, allow_infinity=False)
maps = st.dictionaries(st.sampled_from(["0", "3", "12", "-5"]), values | st.none(), max_size=4)
# a next state without any feature is none to training, so that states have one
some = maps.filter(lambda one: any(value is not None for value in one.values()))


@st.composite
def logs(draw: st.DrawFn, parametric: bool, episodes: st.SearchStrategy[int]) -> list[Row]:
    """Rows of whole episodes, shuffled."""
    with_choices, with_ends, with_propensity = draw(st.booleans()), draw(st.booleans()), draw(st.booleans())

    def choices() -> list[Any]:
        if parametric:
            return draw(st.lists(some, min_size=1, max_size=3))
        return draw(st.lists(st.sampled_from(ACTIONS), min_size=1, max_size=3, unique=True))

    rows: list[Row] = []
    for number in range(draw(episodes)):
        at = draw(st.integers(0, 1000))
        for _ in range(draw(st.integers(1, 5))):
            possible = choices()
            row: Row = {"mdp_id": f"e{number}", "sequence_number": at, "state_features": draw(some),
                        "action": draw(st.sampled_from(possible)), "reward": draw(values)}  # fmt: skip
            if with_choices:
                row["possible_actions"] = possible if parametric or not rows or draw(st.booleans()) else None
            if with_propensity:
                row["action_probability"] = draw(st.floats(0.125, 1, width=32) | st.none())
            if with_ends:
                row |= {"terminal": draw(st.sampled_from([False, None])), "truncated": False}
                row |= {"next_state_features": None, "possible_next_actions": None}
            rows.append(row)
            at += draw(st.integers(1, 3))
        if with_ends:
            end = draw(st.sampled_from(["terminal", "truncated", "unfinished", "truncated without a next state"]))
            if end == "terminal":
                rows[-1]["terminal"] = True
            elif end != "unfinished":
                rows[-1]["truncated"] = True
                # choices beyond the limit are kept where choices are logged at all
                if end == "truncated" and with_choices:
                    rows[-1] |= {"next_state_features": draw(some), "possible_next_actions": choices()}
    return draw(st.permutations(rows))


def check_timeline(
    open_engine: Callable[[Path], Engine], rows: list[Row], form: str, files: int, *, parametric: bool, add: bool
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        events = write_events(rows, folder / "events", form, files)
        tree = {"inputTableName": str(events), "outputTableName": str(folder / "out"), "addTerminalStateRow": add,
                "actionDiscrete": not parametric}  # fmt: skip
        config = check(TimelineConfig, {"timeline": tree})
        work = folder / "work"
        work.mkdir()
        engine = open_engine(work)
        try:
            (manifest,) = make_timeline(config, engine, data_files(str(events)))
        finally:
            engine.close()
        wanted = transitions(rows, add_terminal_state_row=add)
        assert manifest.rows == len(wanted)
        if wanted:
            actions = None if parametric else ACTIONS
            copy = prepare_training_copy(str(folder / "out"), actions=actions, directory=name)
            check_copy(copy, wanted, parametric=parametric)


def check_copy(copy: TrainingCopy, wanted: list[Transition], *, parametric: bool) -> None:
    assert len(copy) == len(wanted)
    for at, one in enumerate(wanted):
        assert copy.sequence[at] == one.sequence_number
        assert read(copy.state_ids, copy.state[at]) == singles(one.state)
        assert copy.reward[at] == np.float32(one.reward)
        assert copy.time_diff[at] == one.time_diff
        assert copy.propensity[at] == np.float32(1.0 if one.propensity is None else one.propensity)
        assert copy.bootstrap[at] == (0.0 if one.terminal else 1.0)
        assert bool(copy.truncated[at]) == one.truncated
        if one.next_state is None:
            assert copy.next_index[at] == at
        else:
            assert read(copy.state_ids, copy.state[copy.next_index[at]]) == singles(one.next_state)
        (check_candidates if parametric else check_names)(copy, at, one)


def check_names(copy: TrainingCopy, at: int, one: Transition) -> None:
    assert copy.action[at] == ACTIONS.index(one.action)
    assert copy.mask[at].tolist() == mask(one.possible)
    assert copy.next_mask[at].tolist() == ([0, 0, 0] if one.terminal else mask(one.next_possible))
    assert copy.next_action[at] == (-1 if one.next_action is None else ACTIONS.index(one.next_action))


def check_candidates(copy: TrainingCopy, at: int, one: Transition) -> None:
    now = [singles(features(choice)) for choice in one.possible or [one.action]]
    assert listed(copy, int(copy.actions_list[at])) == now
    assert copy.action[at] == now.index(singles(features(one.action)))
    after = [] if one.terminal else [singles(features(choice)) for choice in one.next_possible or [one.next_action]]
    assert listed(copy, int(copy.next_list[at])) == after
    following = -1 if one.next_action is None else after.index(singles(features(one.next_action)))
    assert copy.next_action[at] == following


def mask(names: list[str] | None) -> list[int]:
    return [1, 1, 1] if names is None else [int(name in names) for name in ACTIONS]


def singles(logged: dict[int, float]) -> dict[int, float]:
    return {key: float(np.float32(value)) for key, value in logged.items()}


def read(ids: tuple[int, ...], row: Any) -> dict[int, float]:
    return {one: float(value) for one, value in zip(ids, row, strict=True) if not np.isnan(value)}


def listed(copy: TrainingCopy, number: int) -> list[dict[int, float]]:
    rows = copy.candidates[copy.list_offsets[number] : copy.list_offsets[number + 1]]
    return [read(copy.action_ids, row) for row in rows]


def duckdb(work: Path) -> Engine:
    return DuckDBEngine(work, 400_000_000, threads=1)


few, several = st.integers(1, 4), st.integers(5, 8)


@PROFILE
@given(rows=logs(False, few), form=st.sampled_from(FORMATS), files=st.integers(1, 3), add=st.booleans())
def test_discrete_episodes_come_back_as_their_transitions(rows: list[Row], form: str, files: int, add: bool) -> None:
    check_timeline(duckdb, rows, form, files, parametric=False, add=add)


@PROFILE
@given(rows=logs(True, few), form=st.sampled_from(FORMATS), files=st.integers(1, 3), add=st.booleans())
def test_parametric_episodes_come_back_as_their_transitions(rows: list[Row], form: str, files: int, add: bool) -> None:
    check_timeline(duckdb, rows, form, files, parametric=True, add=add)


MANY = settings(PROFILE, max_examples=2, suppress_health_check=list(HealthCheck))
"""A job takes a second: few examples, of more episodes."""


@pytest.mark.slow
@MANY
@given(rows=logs(False, several), form=st.sampled_from(FORMATS), files=st.integers(1, 3), add=st.booleans())
def test_spark_gives_discrete_ones(spark: Any, rows: list[Row], form: str, files: int, add: bool) -> None:
    check_timeline(lambda work: SparkEngine("local[2]", work), rows, form, files, parametric=False, add=add)


@pytest.mark.slow
@MANY
@given(rows=logs(True, several), form=st.sampled_from(FORMATS), files=st.integers(1, 3), add=st.booleans())
def test_spark_gives_parametric_ones(spark: Any, rows: list[Row], form: str, files: int, add: bool) -> None:
    check_timeline(lambda work: SparkEngine("local[2]", work), rows, form, files, parametric=True, add=add)
