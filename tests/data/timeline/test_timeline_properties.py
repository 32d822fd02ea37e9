"""Random episodes, as files of every format, through timeline and training copy, as a plain reading of them says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.event_files import write_events
from helpers.events import NAMES, make, random_events, transitions
from helpers.logs import write_lines
from helpers.transitions import check_copy

from reagent_lite.data.copy.prepared_copy import prepare_training_copy
from reagent_lite.data.logs import Log
from reagent_lite.errors import DataError

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
    copy = prepare_training_copy(Log(outcome.train, actions=actions, directory=str(tmp_path / "copies")))
    check_copy(copy, expected, actions, in_file_order=False)


@pytest.mark.parametrize(
    ("actions", "nothing"),
    [
        (None, {"action": {}, "possible_actions": []}),
        (None, {"action": None, "possible_actions": []}),
        (None, {"action": None, "possible_actions": None}),
        (None, {"action": "", "possible_actions": None}),
        (None, {"action": ..., "possible_actions": ...}),
        (NAMES, {"action": "", "possible_actions": []}),
        (NAMES, {"action": None, "possible_actions": [0] * len(NAMES)}),
        (NAMES, {"action": None, "possible_actions": None}),
        (NAMES, {"action": "", "possible_actions": None}),
        (NAMES, {"action": ..., "possible_actions": ...}),
    ],
)
def test_a_last_row_without_a_possible_action_is_an_end(
    actions: tuple[str, ...] | None, nothing: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of three decisions that earn 1 each the returns at 0.9 are 2.71, 1.9 and 1."""
    action: Any = {"0": 1.0} if actions is None else NAMES[0]
    possible = (
        [action] if actions is None or not nothing["possible_actions"] else [int(name == action) for name in NAMES]
    )
    rows = [
        {"mdp_id": name, "sequence_number": number, "state_features": {"0": number}, "reward": 1 + number // 3,
         "action": action, "possible_actions": possible, "action_probability": 1.0, **(nothing if number == 3 else {})}
        for name in ("one", "two") for number in range(4)
    ]  # fmt: skip
    rows = [{key: value for key, value in row.items() if value is not ...} for row in rows]
    log = tmp_path / "log.jsonl"
    log.write_text("\n".join(map(json.dumps, rows)))  # without a newline at the end the last row is a block of its own
    columns = {"actionDiscrete": actions is not None}
    query = {"query": {"actions": actions or ()}}
    for source in (
        str(log),
        make(tmp_path / "direct", log, query, **columns).train,
    ):
        copy = prepare_training_copy(Log(source, actions=actions, directory=str(tmp_path / "copies")))
        assert copy.bootstrap.tolist() == [1, 1, 0] * 2
        assert copy.action.tolist() == [0] * 6
        returns = np.zeros(7)
        for row in range(5, -1, -1):
            returns[row] = copy.reward[row] + 0.9 * copy.bootstrap[row] * returns[row + 1]
        np.testing.assert_allclose(returns[:3], [2.71, 1.9, 1.0])
    # by the timeline, and by the copy of the events
    assert caplog.text.count("2 states after an end have a reward that no transition has") == 2


@pytest.mark.parametrize(
    ("last", "bootstrap"),
    [
        ({"terminal": True}, [1, 0]),  # a decision for an action that is not known
        ({"truncated": True, "next_state_features": {"0": 9}, "action_probability": None}, [1, 1]),
        ({"possible_actions": list(NAMES)}, [1]),  # what followed is not known
    ],
)
def test_a_last_row_with_an_unknown_action_is_no_end_if_it_says_so(
    last: dict[str, Any], bootstrap: list[int], tmp_path: Path
) -> None:
    row = {"mdp_id": "e", "action": NAMES[0], "reward": 1, "action_probability": 1.0}
    rows = [{**row, "sequence_number": number, "state_features": {"0": number}} for number in range(2)]
    rows[1] |= {"action": None, **last}
    copy = prepare_training_copy(
        Log(str(write_lines(tmp_path / "log.jsonl", rows)), actions=NAMES, directory=str(tmp_path / "copies"))
    )
    assert copy.bootstrap.tolist() == bootstrap


@pytest.mark.parametrize("actions", [None, NAMES])
@pytest.mark.parametrize("state", [{}, None, {"0": 3}])
def test_of_a_state_after_an_end_nothing_has_to_be_known(
    actions: tuple[str, ...] | None, state: dict[str, Any] | None, tmp_path: Path
) -> None:
    action: Any = {"0": 1.0} if actions is None else NAMES[0]
    decision = {"action": action, "possible_actions": [action], "action_probability": 1.0, "reward": 1.0}
    end = {"action": None, "possible_actions": [], "reward": None, "state_features": state}
    rows = [
        {"mdp_id": name, "sequence_number": number, "state_features": {"0": number}}
        | (end if number == 3 else decision)
        for name in ("one", "two")
        for number in range(4)
    ]
    log = write_events(rows, tmp_path / "log", "jsonl")
    columns = {"actionDiscrete": actions is not None}
    query = {"query": {"actions": actions or ()}}
    for source in (str(log), make(tmp_path / "direct", log, query, **columns).train):
        copy = prepare_training_copy(Log(source, actions=actions, directory=str(tmp_path / "copies")))
        assert copy.bootstrap.tolist() == [1, 1, 0] * 2
        assert copy.reward.tolist() == [1.0] * 6


def test_an_empty_string_is_an_action_that_is_not_listed(tmp_path: Path) -> None:
    """It stands for none only where nothing is possible."""
    rows = [
        {"mdp_id": "a", "sequence_number": number, "state_features": {"0": 1}, "reward": 1, "action": action,
         "possible_actions": NAMES}
        for number, action in enumerate((NAMES[0], ""))
    ]  # fmt: skip
    log = write_events(rows, tmp_path / "log", "jsonl")
    with pytest.raises(DataError, match=r'expected one of the actions .*, got ""'):
        prepare_training_copy(Log(str(log), actions=NAMES, directory=str(tmp_path / "copies")))
