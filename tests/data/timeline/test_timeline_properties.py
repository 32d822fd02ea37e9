"""Random episodes, as files of every format, through timeline and training copy, as a plain reading of them says."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracles.event_files import FORMATS, write_events
from oracles.events import Row, transitions
from oracles.transitions import check_copy

from reagent_lite.config import check
from reagent_lite.config.timeline import TimelineConfig
from reagent_lite.data.copy.training_copy import prepare_training_copy
from reagent_lite.data.stage import data_files
from reagent_lite.data.timeline.local_engine import LocalEngine
from reagent_lite.data.timeline.spark_engine import SparkEngine
from reagent_lite.data.timeline.stage import Engine, make_timeline

ACTIONS = ("left", "right", "7")
PROFILE = settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)

values = st.floats(width=32, allow_nan=False, allow_infinity=False)
ids = st.sampled_from(["0", "3", "12", "-5"])
maps = st.dictionaries(ids, values | st.none(), max_size=4)
# a next state without any feature is none to training, so that states have one
some = st.builds(lambda features, feature, value: {**features, feature: value}, maps, ids, values)


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
        end = with_ends and draw(st.sampled_from(["terminal", "truncated", "truncated at a state", "unfinished"]))
        if end and end != "unfinished":
            rows[-1][end.split()[0]] = True
        if end == "truncated at a state" and with_choices:  # choices are kept where choices are logged at all
            rows[-1] |= {"next_state_features": draw(some), "possible_next_actions": choices()}
    return draw(st.permutations(rows))


def check_timeline(make: Callable[[Path], Engine], rows: list[Row], form: str, *, parametric: bool, add: bool) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        events = write_events(rows, folder / "events", form, files=1 + len(rows) % 3)
        tree = {"inputTableName": str(events), "outputTableName": str(folder / "out"), "addTerminalStateRow": add,
                "actionDiscrete": not parametric}  # fmt: skip
        (folder / "work").mkdir()
        with closing(make(folder / "work")) as engine:
            config = check(TimelineConfig, {"timeline": tree})
            (manifest,) = make_timeline(config, engine, data_files(str(events)))
        wanted = transitions(rows, add_terminal_state_row=add)
        assert manifest.rows == len(wanted)
        if wanted:
            actions = None if parametric else ACTIONS
            copy = prepare_training_copy(str(folder / "out"), actions=actions, directory=name)
            check_copy(copy, wanted, actions, in_file_order=False)


def local(work: Path) -> Engine:
    return LocalEngine(work, 400_000_000)


forms = st.sampled_from(FORMATS)


@pytest.mark.parametrize("parametric", [False, True])
@PROFILE
@given(data=st.data(), form=forms, add=st.booleans())
def test_episodes_come_back_as_their_transitions(parametric: bool, data: st.DataObject, form: str, add: bool) -> None:
    rows = data.draw(logs(parametric, st.integers(1, 4)))
    check_timeline(local, rows, form, parametric=parametric, add=add)


@pytest.mark.slow
@settings(PROFILE, max_examples=2, suppress_health_check=list(HealthCheck))
@given(discrete=logs(False, st.integers(5, 8)), parametric=logs(True, st.integers(5, 8)), form=forms, add=st.booleans())
def test_spark_gives_them_too(spark: Any, discrete: list[Row], parametric: list[Row], form: str, add: bool) -> None:
    """A job takes a second: few examples, of more episodes."""
    for rows in (discrete, parametric):
        check_timeline(lambda work: SparkEngine("local[2]", work), rows, form, parametric=rows is parametric, add=add)
