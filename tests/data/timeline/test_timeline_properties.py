"""Random episodes, as files of every format, through timeline and training copy, as a plain reading of them says."""

from __future__ import annotations

from pathlib import Path

import pytest
from oracles.event_files import write_events
from oracles.events import NAMES, make, random_events, read, report, transitions
from oracles.transitions import check_copy

from reagent_lite.data.copy.training_copy import prepare_training_copy

CHOICES = ("possible_actions", "possible_next_actions", "next_state_features")
ENDS = ("terminal", "truncated", "next_state_features", "possible_next_actions")


@pytest.mark.parametrize("actions", [NAMES, None])
@pytest.mark.parametrize(
    ("form", "left_out", "add"),
    [("jsonl.gz", (), False), ("map.parquet", CHOICES, False), ("pairs.parquet", ENDS, True), ("arrow", ENDS, False),
     ("csv", ("action_probability",), True)],
)  # fmt: skip
def test_episodes_come_back_as_their_transitions(
    actions: tuple[str, ...] | None, form: str, left_out: tuple[str, ...], add: bool, tmp_path: Path
) -> None:
    events = random_events(parametric=actions is None, seed=len(form), repeated=())
    rows = [{name: value for name, value in row.items() if name not in left_out} for row in events]
    folder = write_events(rows, tmp_path / "events", form, files=3)
    outcome = make(tmp_path, folder, actionDiscrete=actions is not None, addTerminalStateRow=add)
    expected = transitions(rows, add_terminal_state_row=add)
    assert outcome.train_rows == len(expected)
    copy = prepare_training_copy(outcome.train, actions=actions, directory=str(tmp_path / "copies"))
    check_copy(copy, expected, actions, in_file_order=False)


@pytest.mark.parametrize("actions", [NAMES, None])
def test_files_of_events_are_paired_as_the_log_is(actions: tuple[str, ...] | None, tmp_path: Path) -> None:
    """Twice three rows have the mdp_id and sequence_number of another, and one of five episodes has no end."""
    rows = random_events(parametric=actions is None)
    log = write_events(rows, tmp_path / "log", "jsonl", files=3)
    columns = {
        "actionDiscrete": actions is not None,
        "extraFeatureColumns": ["city", "visits", "new"],
        "rewardColumns": ["reward", "metrics", "cost"],
    }
    pairing = {"steps": 3, "gamma": 0.5, "timeWindowLimit": 9}
    make(tmp_path / "direct", log, **columns, **pairing)
    outcome = make(tmp_path / "checked", log, {"output": "events"}, **columns, numOutputShards=2)
    folder = Path(outcome.train)
    make(tmp_path / "paired", folder, **columns, **pairing)
    assert read(tmp_path / "paired/train") == read(tmp_path / "direct/train")

    first = {(row["mdp_id"], row["sequence_number"]): row for row in reversed(rows)}
    assert [row["reward"] for row in read(folder)] == [row["reward"] for _, row in sorted(first.items())]
    assert outcome.train_rows == len(first) == len(rows) - 3
    left_out = (
        f"{log}: of {len(rows):,} events left out by the timeline: 3 with the mdp_id and sequence_number of another"
    )
    assert report(folder) | {"left_out": [left_out], "rows_beyond_time_window": 0} == report(folder)
    copy = prepare_training_copy(str(folder), actions=actions, directory=str(tmp_path / "copies"))
    check_copy(copy, transitions(list(first.values())), actions, in_file_order=False)
