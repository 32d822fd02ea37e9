"""Spans by hand: one step, time differences, n steps."""

from pathlib import Path

import numpy as np
import pytest
from oracles.logs import random_rows, write_lines

from reagent_lite.data.copy.training_copy import TrainingCopy, prepare_training_copy
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
    rows[-1] |= last
    return prepare_training_copy(str(write_lines(tmp_path / "log.jsonl", rows)), actions=("a", "b"))


def test_two_steps_at_gamma_09(tmp_path: Path) -> None:
    copy = timeline(tmp_path)
    spans = n_steps(copy, 2, 0.9)
    np.testing.assert_allclose(spans.reward, [0.9, 4.6, 8.5, 5.0], rtol=1e-6)
    assert spans.steps.tolist() == [2, 2, 2, 1]
    assert spans.at_end(np.arange(4)).tolist() == [1, 2, 3, 3]
    assert spans.at_end(copy.bootstrap).tolist() == [1, 1, 0, 0]
    beyond = n_steps(copy, 50, 0.5)
    np.testing.assert_allclose(beyond.reward, [0 + 0.5 + 1 + 0.625, 1 + 2 + 1.25, 4 + 2.5, 5], rtol=1e-6)
    assert beyond.steps.tolist() == [4, 3, 2, 1]


def test_boost_of_later_actions_is_in_the_sum(tmp_path: Path) -> None:
    spans = n_steps(timeline(tmp_path), 2, 0.9, np.array([10.0, 0.0]))
    np.testing.assert_allclose(spans.reward, [9.9, 13.6, 17.5, 5.0], rtol=1e-6)


def test_episodes_do_not_run_into_each_other(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "log.jsonl", random_rows(30, missing=0.0))
    copy = prepare_training_copy(str(file), actions=("a", "b"))
    spans = n_steps(copy, 4, 1.0)
    expected = [
        copy.reward[start + i : min(start + i + 4, start + 10)].sum() for start in (0, 10, 20) for i in range(10)
    ]
    np.testing.assert_allclose(spans.reward, expected, rtol=1e-5, atol=1e-6)


def test_time_is_divided_by_its_unit(tmp_path: Path) -> None:
    copy = timeline(tmp_path)
    assert time_steps(copy, 1.0).steps.tolist() == [1, 3, 1, 1]
    assert time_steps(copy, 2.0).steps.tolist() == [0.5, 1.5, 0.5, 1]
    assert single_steps(copy).steps.tolist() == [1, 1, 1, 1]
    assert single_steps(copy).last is time_steps(copy, 1.0).last is None  # no index of 8 bytes a row
    assert single_steps(copy).at_end(copy.bootstrap).tolist() == [1, 1, 1, 0]


def test_a_row_that_goes_on_needs_time(tmp_path: Path) -> None:
    copy = timeline(tmp_path, time_diff=0, terminal=False)
    with pytest.raises(DataError, match=r"log\.jsonl:4: expected a time_diff above 0"):
        time_steps(copy, 1.0)


def test_sarsa_needs_a_next_action_but_not_at_a_time_limit(tmp_path: Path) -> None:
    copy = timeline(tmp_path, next_action=None, terminal=False)
    with pytest.raises(DataError, match=r"log\.jsonl:4: expected a next_action"):
        learnable_rows(copy, single_steps(copy), maxq=False, unit_reward=False)
    (tmp_path / "log.jsonl").unlink()
    copy = timeline(tmp_path, next_action=None, terminal=False, truncated=True)
    usable, notes = learnable_rows(copy, single_steps(copy), maxq=False, unit_reward=False)
    assert usable.tolist() == [0, 1, 2]
    assert notes == ("1 row ends at a time limit without a next action; SARSA leaves that out",)
    assert learnable_rows(copy, single_steps(copy), maxq=True, unit_reward=False) == (None, ())


def test_unknown_actions_are_left_out_and_counted(tmp_path: Path) -> None:
    copy = timeline(tmp_path, action=None)
    usable, notes = learnable_rows(copy, single_steps(copy), maxq=True, unit_reward=False)
    assert usable.tolist() == [0, 1, 2]
    assert notes == ("1 row has no action and no part in the loss",)


def test_cross_entropy_needs_rewards_in_the_unit_interval(tmp_path: Path) -> None:
    copy = timeline(tmp_path)
    with pytest.raises(DataError, match=r"log\.jsonl:3: expected a reward in \[0, 1\].*got 4 \(2 such rows\)"):
        learnable_rows(copy, single_steps(copy), maxq=True, unit_reward=True)


def test_rows_that_span_several_already_keep_their_steps(tmp_path: Path) -> None:
    copy = timeline(tmp_path, step=2)
    assert single_steps(copy).steps.tolist() == [1, 1, 1, 2]
    with pytest.raises(DataError, match=r"log.jsonl:4: expected rows of one step, as rl.multi_steps is 3, got step 2"):
        n_steps(copy, 3, 0.9)
    with pytest.raises(DataError, match=r"as rl.use_seq_num_diff_as_time_diff is true, got step 2"):
        time_steps(copy, 1.0)


@pytest.mark.parametrize(("step", "got"), [(0, "0"), (256, "256"), (1.5, "1.5")])
def test_steps_that_are_none(tmp_path: Path, step: float, got: str) -> None:
    with pytest.raises(DataError, match=f"log.jsonl:4: expected an integer .*in step, got {got}"):
        timeline(tmp_path, step=step)
