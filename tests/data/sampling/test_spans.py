"""Spans by hand: one step, time differences, n steps."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers.logs import random_rows, write_lines

from reagent_lite.data.copy.prepared_copy import prepare_training_copy
from reagent_lite.data.copy.training_copy import TrainingCopy
from reagent_lite.data.logs import Log
from reagent_lite.data.sampling.spans import learnable_rows, n_steps, single_steps, time_steps
from reagent_lite.errors import DataError


def timeline(tmp_path: Path, **last: object) -> TrainingCopy:
    """States 0, 1, 4, 5 -> 6 with rewards 0, 1, 4, 5 and time differences 1, 3, 1, 1."""
    rows = [
        {"mdp_id": "one", "sequence_number": state, "state_features": {"0": state}, "action": "a", "reward": state,
         "next_state_features": {"0": following}, "next_action": "a", "possible_actions": [1, 1],
         "possible_next_actions": [1, 1], "time_diff": time, "terminal": following == 6}
        for state, following, time in ((0, 1, 1), (1, 4, 3), (4, 5, 1), (5, 6, 1))
    ]  # fmt: skip
    return prepare_training_copy(
        Log(write_lines(tmp_path / "log.jsonl", [*rows[:-1], rows[-1] | last]), actions=("a", "b"))
    )


def test_two_steps_at_gamma_09(tmp_path: Path) -> None:
    copy = timeline(tmp_path)
    spans = n_steps(copy, 2, 0.9)
    np.testing.assert_allclose(spans.reward, [0.9, 4.6, 8.5, 5.0], rtol=1e-6)
    assert (spans.steps.tolist(), spans.at_end(np.arange(4)).tolist(), spans.at_end(copy.bootstrap).tolist()) == (
        [2, 2, 2, 1], [1, 2, 3, 3], [1, 1, 0, 0],
    )  # fmt: skip
    beyond = n_steps(copy, 50, 0.5)
    np.testing.assert_allclose(beyond.reward, [0 + 0.5 + 1 + 0.625, 1 + 2 + 1.25, 4 + 2.5, 5], rtol=1e-6)
    assert beyond.steps.tolist() == [4, 3, 2, 1]
    # boosts of later actions are in the sum
    np.testing.assert_allclose(n_steps(copy, 2, 0.9, np.array([10.0, 0.0])).reward, [9.9, 13.6, 17.5, 5.0], rtol=1e-6)


def test_sarsa_ends_a_span_before_a_row_at_a_limit(tmp_path: Path) -> None:
    copy = timeline(tmp_path, terminal=False, truncated=True, next_action=None)
    spans = n_steps(copy, 50, 1.0, maxq=False)
    assert (spans.reward.tolist(), spans.steps.tolist()) == ([5, 5, 4, 5], [3, 2, 1, 1])
    kept, notes = learnable_rows(copy, spans, maxq=False, unit_reward=False)
    assert (kept is not None and kept.tolist(), len(notes)) == ([0, 1, 2], 1)
    assert n_steps(copy, 50, 1.0).steps.tolist() == [4, 3, 2, 1]


def test_episodes_do_not_run_into_each_other(tmp_path: Path) -> None:
    copy = prepare_training_copy(
        Log(str(write_lines(tmp_path / "log.jsonl", random_rows(30, missing=0.0))), actions=("a", "b"))
    )
    expected = [copy.reward[i : min(i + 4, i // 10 * 10 + 10)].sum() for i in range(30)]
    np.testing.assert_allclose(n_steps(copy, 4, 1.0).reward, expected, rtol=1e-5, atol=1e-6)


def test_time_is_divided_by_its_unit(tmp_path: Path) -> None:
    copy = timeline(tmp_path)
    several = timeline(tmp_path / "several", step=2)  # a row of several steps already
    spans = (time_steps(copy, 1.0), time_steps(copy, 2.0), single_steps(copy), single_steps(several))
    assert [each.steps.tolist() for each in spans] == [[1, 3, 1, 1], [0.5, 1.5, 0.5, 1], [1, 1, 1, 1], [1, 1, 1, 2]]
    assert single_steps(copy).at_end(copy.bootstrap).tolist() == [1, 1, 1, 0]


@pytest.mark.parametrize(("last", "use", "words"), [
    ({"time_diff": 0, "terminal": False}, lambda copy: time_steps(copy, 1.0), "4: .*time_diff above 0"),
    ({"time_diff": None, "terminal": False}, lambda copy: time_steps(copy, 1.0), "4: .*time_diff above 0.*none, or 0"),
    ({"next_action": None, "terminal": False},
     lambda copy: learnable_rows(copy, single_steps(copy), maxq=False, unit_reward=False), "4: .*a next_action"),
    ({}, lambda copy: learnable_rows(copy, single_steps(copy), maxq=True, unit_reward=True),
     r"3: .*a reward in \[0, 1\].*\(2 such rows\)"),
    ({"step": 2}, lambda copy: n_steps(copy, 3, 0.9), "4: .*multi_steps is 3.*step 2"),
    ({"step": 2}, lambda copy: time_steps(copy, 1.0), "4: .*rl.use_seq_num_diff.*step 2"),
    *(({"step": step}, single_steps, f"4: .*in step, got {step}") for step in (0, 256, 1.5)),
])  # fmt: skip
def test_rows_that_cannot_be_learned_from_are_named(
    tmp_path: Path, last: dict[str, object], use: Callable[[TrainingCopy], object], words: str
) -> None:
    with pytest.raises(DataError, match=rf"log\.jsonl:{words}"):
        use(timeline(tmp_path, **last))


@pytest.mark.parametrize(("last", "maxq", "note"), [
    ({"next_action": None, "terminal": False, "truncated": True}, False,
     "1 row ends at a time limit without a next action; SARSA leaves that out"),
    ({"action": None}, True, "1 row has no action and no part in the loss"),
])  # fmt: skip
def test_rows_without_an_action_that_is_needed_are_left_out(
    tmp_path: Path, last: dict[str, object], maxq: bool, note: str
) -> None:
    copy = timeline(tmp_path, **last)
    usable, notes = learnable_rows(copy, single_steps(copy), maxq=maxq, unit_reward=False)
    assert (usable.tolist(), notes) == ([0, 1, 2], (note,))
    assert maxq or learnable_rows(copy, single_steps(copy), maxq=True, unit_reward=False) == (None, ())
