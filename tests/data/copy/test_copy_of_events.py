"""The training copy of events is that of their timeline: the same rows in the same order, without its files."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracles.events import NAMES, event, random_events
from oracles.logs import write_lines

from reagent_lite.config.loader import check
from reagent_lite.config.timeline import TimelineConfig, TimelineSection
from reagent_lite.data.copy.training_copy import TrainingCopy, prepare_training_copy
from reagent_lite.data.timeline.stage import run_timeline
from reagent_lite.errors import DataError

VECTORS = (
    "action", "reward", "time_diff", "step", "propensity", "bootstrap", "truncated", "mask", "metrics", "episode",
    "episode_hash", "sequence",
)  # fmt: skip


def next_lists(copy: TrainingCopy, name: str) -> list[list[list[float]]]:
    lists = getattr(copy, name) if copy.parametric else []
    starts = copy.list_offsets
    return [np.nan_to_num(copy.candidates[starts[index] : starts[index + 1]], nan=-1).tolist() for index in lists]


def check_same(copy: TrainingCopy, other: TrainingCopy) -> None:
    goes_on = copy.bootstrap > 0
    assert (copy.state_ids, copy.action_ids) == (other.state_ids, other.action_ids)
    assert copy.metric_names == other.metric_names
    for name in VECTORS:
        np.testing.assert_array_equal(getattr(copy, name), getattr(other, name), err_msg=name)
    np.testing.assert_array_equal(copy.state[: len(copy)], other.state[: len(other)])
    np.testing.assert_array_equal(copy.state[copy.next_index][goes_on], other.state[other.next_index][goes_on])
    np.testing.assert_array_equal(copy.next_action[goes_on], other.next_action[goes_on])
    np.testing.assert_array_equal(copy.next_mask[goes_on], other.next_mask[goes_on])
    for name in ("actions_list", "next_list"):
        assert next_lists(copy, name) == next_lists(other, name)


SECTIONS: list[dict[str, Any]] = [
    {},
    {"steps": 3, "gamma": 0.9},
    {"steps": 4, "gamma": 0.9, "addTerminalStateRow": True, "rewardColumns": ["reward"]},
    {"addTerminalStateRow": True},
    {"timeWindowLimit": 6},
    {"startDs": "2026-01-02", "endDs": "2026-01-04"},
    {"outlierEpisodeLengthPercentile": 0.5},
    {"on_refused": "drop_episode"},
]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: "-".join(section) or "plain")
@pytest.mark.parametrize("parametric", [False, True])
def test_the_copy_of_events_is_that_of_their_timeline(
    tmp_path: Path, section: dict[str, Any], parametric: bool
) -> None:
    rows = random_events(parametric=parametric, episodes=150)
    if "on_refused" in section:
        for row in rows[::30]:
            row["reward"] = None
    source, actions = write_lines(tmp_path / "events.jsonl", rows), None if parametric else NAMES
    paths = {"inputTableName": str(source), "outputTableName": str(tmp_path / "transitions")}
    tree = {"timeline": {**paths, "actionDiscrete": not parametric, **section}, "query": {"tableSample": 80.0}}
    config = check(TimelineConfig, tree | ({"query": {"tableSample": 80.0, "actions": actions}} if actions else {}))
    run_timeline(config)
    copy = prepare_training_copy(source, actions=actions, timeline=config)
    check_same(copy, prepare_training_copy(tmp_path / "transitions", actions=actions))


def test_next_states_of_several_rows_are_stored_once(tmp_path: Path) -> None:
    """Of spans of two rows the next state is the row after the next: no state but those of the rows is needed."""
    rows = [event("a", n, float(n), 1.0, terminal=n == 5) for n in range(6)]
    source = write_lines(tmp_path / "events.jsonl", rows)
    config = TimelineConfig(timeline=TimelineSection(steps=2, gamma=0.5))
    copy = prepare_training_copy(source, actions=("l", "r"), timeline=config)
    assert copy.state.tolist() == [[0.0], [1.0], [2.0], [3.0], [4.0], [5.0]]
    assert copy.next_index.tolist() == [2, 3, 4, 5, 4, 5]
    assert copy.reward.tolist() == [1.5, 1.5, 1.5, 1.5, 1.5, 1.0]
    assert copy.bootstrap.tolist() == [1, 1, 1, 1, 0, 0]


def test_features_of_episodes_that_are_left_out_are_no_columns(tmp_path: Path) -> None:
    good = [event("a", n, 0.0, terminal=n == 1) for n in range(2)]
    bad = [event("b", 0, 0.0, state_features={"5": 1.0}), event("b", 1, 0.0, reward="x")]
    source = write_lines(tmp_path / "events.jsonl", good + bad)
    config = TimelineConfig(timeline=TimelineSection(on_refused="drop_episode"))
    copy = prepare_training_copy(source, actions=("l", "r"), timeline=config)
    assert (len(copy), copy.state_ids) == (2, (0,))
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
    source = write_lines(tmp_path / "events.jsonl", rows)
    config = TimelineConfig(timeline=TimelineSection(**section))
    with pytest.raises(DataError, match=words):
        prepare_training_copy(source, actions=("l", "r"), timeline=config)


def test_texts_of_refused_rows_are_not_counted(tmp_path: Path) -> None:
    """They are no levels of a category."""
    rows = [event("a", k, 0.0, state_features={"country": "DE"}, terminal=k == 2) for k in range(3)]
    rows.append(event("b", 0, 0.0, 1e39, state_features={"country": "FR"}, terminal=True))
    config = TimelineConfig(timeline=TimelineSection(on_refused="drop_episode"))
    file = write_lines(tmp_path / "log.jsonl", rows)
    copy = prepare_training_copy(str(file), actions=("l", "r"), timeline=config)
    assert list(copy.levels["state"].values()) == [{"DE": 3}]
