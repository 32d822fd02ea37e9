"""The training copy of events is that of their timeline: the same rows in the same order, without its files."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.events import NAMES, event, random_events, timeline_config
from helpers.logs import write_lines
from helpers.transitions import check_arrays

from reagent_lite.config.timeline_config import TimelineConfig, TimelineSection
from reagent_lite.data.copy.prepared_copy import prepare_training_copy
from reagent_lite.data.copy.training_copy import TrainingCopy
from reagent_lite.data.logs import Log
from reagent_lite.data.timeline.stage import run_timeline
from reagent_lite.errors import DataError

VECTORS = (
    "action", "reward", "time_diff", "step", "propensity", "bootstrap", "truncated", "mask", "metrics", "episode",
    "episode_hash", "sequence",
)  # fmt: skip


def columns_of(copy: TrainingCopy) -> dict[str, Any]:
    """The rows of a copy, whatever the order in which states and lists are stored."""
    goes_on = copy.bootstrap > 0
    lists = np.split(copy.candidates, copy.list_offsets[1:-1])
    return {
        **{name: getattr(copy, name) for name in VECTORS},
        "names": [copy.state_ids, copy.action_ids, copy.metric_names],
        "state": copy.state[: len(copy)],
        "next_state": copy.state[copy.next_index][goes_on],
        "next": [copy.next_action[goes_on], copy.next_mask[goes_on]],
        "lists": [[lists[number] for number in getattr(copy, name)] for name in ("actions_list", "next_list")],
    }


@pytest.mark.parametrize(
    "section",
    [
        {},
        {"steps": 3, "gamma": 0.9},
        {"steps": 4, "gamma": 0.9, "addTerminalStateRow": True, "rewardColumns": ["reward"]},
        {"addTerminalStateRow": True},
        {"timeWindowLimit": 6},
        {"startDs": "2026-01-02", "endDs": "2026-01-04"},
        {"outlierEpisodeLengthPercentile": 0.5},
        {"on_refused": "drop_episode"},
    ],
    ids=lambda section: "-".join(section) or "plain",
)
@pytest.mark.parametrize("parametric", [False, True])
def test_the_copy_of_events_is_that_of_their_timeline(
    tmp_path: Path, section: dict[str, Any], parametric: bool
) -> None:
    rows = random_events(parametric=parametric, episodes=150)
    for row in rows[::30] if "on_refused" in section else ():
        row["reward"] = None
    source, actions = write_lines(tmp_path / "events.jsonl", rows), None if parametric else NAMES
    query = {"tableSample": 80.0, **({"actions": actions} if actions else {})}
    config = timeline_config(tmp_path, source, {"query": query}, actionDiscrete=not parametric, **section)
    run_timeline(config)
    copy = prepare_training_copy(Log(source, actions=actions, timeline=config))
    np.testing.assert_equal(
        columns_of(copy), columns_of(prepare_training_copy(Log(tmp_path / "train", actions=actions)))
    )


def copied(folder: Path, rows: list[dict[str, Any]], **section: Any) -> TrainingCopy:
    return prepare_training_copy(
        Log(
            write_lines(folder / "events.jsonl", rows),
            actions=("l", "r"),
            timeline=TimelineConfig(timeline=TimelineSection(**section)),
        )
    )


def test_next_states_of_several_rows_are_stored_once(tmp_path: Path) -> None:
    """Of spans of two rows the next state is the row after the next: no state but those of the rows is needed."""
    copy = copied(tmp_path, [event("a", n, float(n), 1.0, terminal=n == 5) for n in range(6)], steps=2, gamma=0.5)
    check_arrays(
        copy, state=[[0], [1], [2], [3], [4], [5]], next_index=[2, 3, 4, 5, 4, 5],
        reward=[1.5, 1.5, 1.5, 1.5, 1.5, 1.0], bootstrap=[1, 1, 1, 1, 0, 0],
    )  # fmt: skip


@pytest.mark.parametrize("reward", ["x", 1e39])
def test_features_and_texts_of_refused_rows_are_no_columns_and_no_levels(tmp_path: Path, reward: Any) -> None:
    rows = [
        *(event("a", n, 0.0, state_features={"country": "DE"}, terminal=n == 1) for n in range(2)),
        event("b", 0, 0.0, state_features={"5": 1.0}),
        event("b", 1, 0.0, state_features={"country": "FR"}, reward=reward),
    ]
    copy = copied(tmp_path, rows, on_refused="drop_episode")
    levels = {str(feature): counts for feature, counts in copy.levels["state"].items()}
    assert (len(copy), list(map(str, copy.state_ids)), levels) == (2, ["country"], {"country": {"DE": 2}})
    assert copy.notes[-1].endswith("2 refused or in a refused row's episode")


@pytest.mark.parametrize(
    ("rows", "section", "words"),
    [
        ([event("a", 0, 0.0), event("a", 1, 0.0, action=None, possible_actions=[]), event("a", 2, 0.0, terminal=True)],
         {}, "events.jsonl:1: .*a possible next action"),
        ([event("a", 0, 0.0, ds="2026-01-01"), event("a", 1, 0.0, terminal=True)],
         {"startDs": "2026-01-01"}, "events.jsonl:2: expected a date in ds"),
        ([event("a", 0, 0.0), event("b", 0, 0.0)], {}, "none of 2 events: 2 last of an episode"),
    ],
)  # fmt: skip
def test_errors_name_the_line_of_the_log(
    tmp_path: Path, rows: list[dict[str, Any]], section: dict[str, Any], words: str
) -> None:
    with pytest.raises(DataError, match=words):
        copied(tmp_path, rows, **section)
