"""States of several steps by hand: episodes of any length, in any order and number of files, transitions and events."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.logs import write_lines

from reagent_lite.data.copy.prepared_copy import prepare_training_copy
from reagent_lite.data.copy.training_copy import TrainingCopy
from reagent_lite.data.logs import Log
from reagent_lite.data.sampling.normalized import open_raw_columns
from reagent_lite.data.sampling.source import LoggedRows, build_rows
from reagent_lite.data.sampling.spans import n_steps, single_steps
from reagent_lite.data.sampling.stacked import stack_columns_of
from reagent_lite.errors import DataError

Rows = list[dict[str, Any]]


def events(episode: str, *states: int, **last: object) -> Rows:
    """Events of an episode whose last row is terminal, or as `last` says."""
    rows: Rows = [
        {"mdp_id": episode, "sequence_number": 10 * number, "state_features": {"0": state}, "action": "a",
         "reward": 1.0, "possible_actions": ["a", "b"]}
        for number, state in enumerate(states)
    ]  # fmt: skip
    rows[-1] |= last or {"terminal": True}
    return rows


def transitions(episode: str, *states: int) -> Rows:
    """Transitions of an episode; the last state is only a next state, which a time limit left."""
    pairs = list(pairwise(states))
    return [
        {"mdp_id": episode, "sequence_number": number, "state_features": {"0": state}, "action": "a", "reward": 1.0,
         "next_state_features": {"0": after}, "next_action": "a", "possible_actions": [1, 1],
         "possible_next_actions": [1, 1], "terminal": False, "truncated": number == len(pairs) - 1}
        for number, (state, after) in enumerate(pairs)
    ]  # fmt: skip


def copied(path: Path | list[str]) -> TrainingCopy:
    return prepare_training_copy(Log(path if isinstance(path, list) else str(path), actions=("a", "b")))


def stacked(copy: TrainingCopy, history: int) -> LoggedRows:
    return build_rows(copy, single_steps(copy), None, stack_columns_of(copy, open_raw_columns(copy.state), history))


def by_state(rows: LoggedRows, copy: TrainingCopy) -> dict[int, tuple[list[float], list[float] | None]]:
    """Returns {present state: (its steps, the steps of the next state)}; None after a terminal row."""
    batch = rows.take(torch.arange(len(rows)), torch.ones(len(rows)))
    pairs = zip(batch.state.tolist(), batch.next_state.tolist(), batch.bootstrap.tolist(), strict=True)
    return {int(now[-1]): (now, after if bootstrap else None) for now, after, bootstrap in pairs}


# of an episode 1 2 3 4 that ends, an episode 5 of one row, and an episode 6 7 that is shorter than the history:
# 1 before each state that exists, 0 0 before the start
OF_THREE = {
    1: ([0, 0, 0, 0, 1, 1], [0, 0, 1, 1, 1, 2]),
    2: ([0, 0, 1, 1, 1, 2], [1, 1, 1, 2, 1, 3]),
    3: ([1, 1, 1, 2, 1, 3], [1, 2, 1, 3, 1, 4]),
    4: ([1, 2, 1, 3, 1, 4], None),
    5: ([0, 0, 0, 0, 1, 5], None),
    6: ([0, 0, 0, 0, 1, 6], [0, 0, 1, 6, 1, 7]),
    7: ([0, 0, 1, 6, 1, 7], None),
}


def in_order(rows: Rows) -> Rows:
    return rows


def interleaved(rows: Rows) -> Rows:
    return [rows[number] for number in (3, 6, 0, 4, 2, 5, 1)]


@pytest.mark.parametrize("order", [in_order, interleaved])
def test_events(tmp_path: Path, order: Callable[[Rows], Rows]) -> None:
    rows = [*events("x", 1, 2, 3, 4), *events("y", 5), *events("z", 6, 7)]
    copy = copied(write_lines(tmp_path / "log.jsonl", order(rows)))
    assert by_state(stacked(copy, 3), copy) == OF_THREE


def test_episodes_in_several_files_of_a_folder(tmp_path: Path) -> None:
    rows = [*events("x", 1, 2, 3, 4), *events("y", 5), *events("z", 6, 7)]
    for part in range(3):  # 1 4 7, 2 5 and 3 6 are in a file each
        write_lines(tmp_path / f"log/{part}.jsonl", rows[part::3])
    copy = copied(tmp_path / "log")
    assert by_state(stacked(copy, 3), copy) == OF_THREE


def test_two_logs_with_the_same_names_of_episodes(tmp_path: Path) -> None:
    first = write_lines(tmp_path / "first.jsonl", [*events("x", 1, 2, 3, 4), *events("y", 5)])
    second = write_lines(tmp_path / "second.jsonl", events("x", 6, 7))
    copy = copied([str(first), str(second)])
    assert by_state(stacked(copy, 3), copy) == OF_THREE


def test_a_next_state_that_is_no_row_follows_the_last_row(tmp_path: Path) -> None:
    log = [*transitions("x", 1, 2, 3, 9), *transitions("y", 5, 8)]
    copy = copied(write_lines(tmp_path / "log.jsonl", log))
    assert by_state(stacked(copy, 3), copy) == {
        1: ([0, 0, 0, 0, 1, 1], [0, 0, 1, 1, 1, 2]),
        2: ([0, 0, 1, 1, 1, 2], [1, 1, 1, 2, 1, 3]),
        3: ([1, 1, 1, 2, 1, 3], [1, 2, 1, 3, 1, 9]),
        5: ([0, 0, 0, 0, 1, 5], [0, 0, 1, 5, 1, 8]),
    }
    # the second row after row 1 is row 3, and the steps before it are those of its own
    spans = n_steps(copy, 2, 0.9)
    rows = build_rows(copy, spans, None, stack_columns_of(copy, open_raw_columns(copy.state), 3))
    assert by_state(rows, copy)[1] == ([0, 0, 0, 0, 1, 1], [1, 1, 1, 2, 1, 3])
    assert by_state(rows, copy)[2] == ([0, 0, 1, 1, 1, 2], [1, 2, 1, 3, 1, 9])


def test_rows_after_an_end_begin_anew(tmp_path: Path) -> None:
    log = transitions("x", 1, 2, 3, 4)
    log[1] |= {"terminal": True, "possible_next_actions": [0, 0]}
    copy = copied(write_lines(tmp_path / "log.jsonl", log))
    assert by_state(stacked(copy, 2), copy)[3] == ([0, 0, 1, 3], [1, 3, 1, 4])
    log[1] |= {"terminal": False, "truncated": True, "possible_next_actions": [1, 1], "next_state_features": {"0": 9}}
    copy = copied(write_lines(tmp_path / "cut.jsonl", log))
    assert by_state(stacked(copy, 2), copy) == {
        1: ([0, 0, 1, 1], [1, 1, 1, 2]), 2: ([1, 1, 1, 2], [1, 2, 1, 9]), 3: ([0, 0, 1, 3], [1, 3, 1, 4]),
    }  # fmt: skip


def test_without_episodes_each_row_is_a_start(tmp_path: Path) -> None:
    rows = [{name: value for name, value in row.items() if name not in ("mdp_id", "sequence_number", "terminal")}
            for row in events("x", 1, 2, 3)]  # fmt: skip
    copy = copied(write_lines(tmp_path / "log.jsonl", rows))
    assert [now for now, _ in by_state(stacked(copy, 2), copy).values()] == [[0, 0, 1, 1], [0, 0, 1, 2], [0, 0, 1, 3]]


def test_raw_steps_that_do_not_exist_are_missing(tmp_path: Path) -> None:
    copy = copied(write_lines(tmp_path / "log.jsonl", events("x", 1, 2)))
    columns = stack_columns_of(copy, open_raw_columns(copy.state), 2, absent=np.nan)
    np.testing.assert_array_equal(columns.take(torch.arange(2)), [[0, np.nan, 1, 1], [1, 1, 1, 2]])


def test_one_step_is_the_columns_themselves(tmp_path: Path) -> None:
    copy = copied(write_lines(tmp_path / "log.jsonl", events("x", 1, 2)))
    step = open_raw_columns(copy.state)
    assert stack_columns_of(copy, step, 1) is step


def test_rows_of_several_steps_are_refused(tmp_path: Path) -> None:
    log = transitions("x", 1, 2, 3)
    log[0] |= {"step": 2}
    copy = copied(write_lines(tmp_path / "log.jsonl", log))
    with pytest.raises(DataError, match=r"log\.jsonl:1: expected rows of one step, as a state has the last 2 steps"):
        stacked(copy, 2)
