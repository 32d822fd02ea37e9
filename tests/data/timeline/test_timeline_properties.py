"""Random episodes, as files of every format, through timeline and training copy, as a plain reading of them says."""

from __future__ import annotations

from pathlib import Path

import pytest
from oracles.event_files import write_events
from oracles.events import NAMES, make, random_events, transitions
from oracles.transitions import check_copy

from reagent_lite.data.copy.training_copy import prepare_training_copy

CHOICES = ("possible_actions", "possible_next_actions", "next_state_features")
ENDS = ("terminal", "truncated", "next_state_features", "possible_next_actions")


@pytest.mark.parametrize("parametric", [False, True])
@pytest.mark.parametrize(
    ("form", "left_out", "add"),
    [("jsonl.gz", (), False), ("map.parquet", CHOICES, False), ("pairs.parquet", ENDS, True), ("arrow", ENDS, False),
     ("csv", ("action_probability",), True)],
)  # fmt: skip
def test_episodes_come_back_as_their_transitions(
    parametric: bool, form: str, left_out: tuple[str, ...], add: bool, tmp_path: Path
) -> None:
    events = random_events(parametric=parametric, seed=len(form), repeated=())
    rows = [{name: value for name, value in row.items() if name not in left_out} for row in events]
    folder = write_events(rows, tmp_path / "events", form, files=3)
    outcome = make(tmp_path, folder, actionDiscrete=not parametric, addTerminalStateRow=add)
    expected = transitions(rows, add_terminal_state_row=add)
    assert outcome.train_rows == len(expected)
    actions = None if parametric else NAMES
    copy = prepare_training_copy(outcome.train, actions=actions, directory=str(tmp_path / "copies"))
    check_copy(copy, expected, actions, in_file_order=False)
