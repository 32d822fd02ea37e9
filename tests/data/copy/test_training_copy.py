"""The training copy: the 2019 file's figures, the rules one by one."""

from __future__ import annotations

from collections import Counter
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from helpers.cases import cases
from helpers.logs import write_lines
from helpers.transitions import check_arrays
from hypothesis import given
from hypothesis import strategies as st

from reagent_lite.data.copy.order import find_order
from reagent_lite.data.copy.prepared_copy import prepare_training_copy
from reagent_lite.data.copy.training_copy import TrainingCopy
from reagent_lite.data.logs import Log
from reagent_lite.data.rows.matrices import FeatureMatrix, Lists

LOG_2019 = Path(__file__).resolve().parents[3].parent / "shared/data/reagent2019/cartpole_training.json.bz2"
ACTIONS = ("left", "right")


def row(**changes: Any) -> dict[str, Any]:
    """A row without fault, not terminal; None removes a key."""
    usual = {
        "state_features": {"0": 1.0},
        "action": 0,
        "reward": 1.0,
        "next_state_features": {"0": 2.0},
        "next_action": 1,
    }
    return {key: value for key, value in (usual | changes).items() if value is not None}


def copied(folder: Path, *rows: dict[str, Any], actions: tuple[str, ...] | None = ACTIONS) -> TrainingCopy:
    return prepare_training_copy(Log(write_lines(folder / "log.json", rows), actions=actions))


@pytest.mark.skipif(not LOG_2019.exists(), reason="the 2019 file lies beside the repository, not in it")
def test_the_2019_file_has_its_published_figures(tmp_path: Path) -> None:
    copy = prepare_training_copy(Log(str(LOG_2019), actions=("0", "1"), directory=str(tmp_path)))
    assert (len(copy), len(copy.episode_hash), copy.counts["terminal_rows"], copy.notes) == (3470, 29, 29, ())
    assert np.flatnonzero(copy.bootstrap == 0).tolist() == (np.cumsum(np.bincount(copy.episode)) - 1).tolist()
    assert Counter(copy.propensity.tolist()) == {np.float32(0.05): 171, np.float32(0.95): 3299}
    discounted = np.bincount(copy.episode, copy.reward * 0.99 ** copy.sequence.astype(float))
    assert discounted.mean() == pytest.approx(59.0221, abs=5e-5)
    # Every next state that counts is the next row's state, though the file is shuffled.
    assert (copy.state.shape, int(copy.follows.sum())) == ((3470, 4), 3470 - 29)


def test_one_small_log_by_hand(tmp_path: Path) -> None:
    # Episode b: steps 3, 5 (missing 4), out of order; episode a: one terminal step. "b" sorts after "a".
    copy = copied(
        tmp_path,
        row(mdp_id="b", sequence_number=5, state_features={"0": 2.0, "7": 3.0}, next_action=None, propensity=0.25),
        row(mdp_id="b", sequence_number=3, action="right", next_state_features={"7": 3.0, "0": 2.0}, time_diff=2),
        row(mdp_id="a", sequence_number=9, state_features={"3": 4.0}, terminal=True, metrics={"x": 7}),
        row(mdp_id="b", sequence_number=1, next_state_features={"0": 9.0}, reward=-1, shoe_size="42"),
    )
    check_arrays(
        copy,
        # a9, b1, b3, b5, then b1's next state, which is no row's state.
        state=[[nan, 4, nan], [1, nan, nan], [1, nan, nan], [2, nan, 3], [9, nan, nan]],
        origin_line=[3, 4, 2, 1],
        episode=[0, 1, 1, 1],
        sequence=[9, 1, 3, 5],
        next_index=[0, 4, 3, 3],
        follows=[False, False, True, False],
        bootstrap=[0, 1, 1, 0],
        action=[0, 0, 1, 0],
        next_action=[-1, 1, 1, -1],
        next_mask=[[0, 0], [1, 1], [1, 1], [0, 0]],
        reward=[1, -1, 1, 1],
        time_diff=[0, 0, 2, 0],
        propensity=[1, 1, 1, 0.25],
        metrics=[[7], [0], [0], [0]],
    )
    assert (copy.state_ids, copy.metric_names, copy.source_line(0), copy.counts["propensity_absent_rows"]) == (
        (0, 3, 7), ("x",), f"{tmp_path}/log.json:3", 3,
    )  # fmt: skip
    assert any(note.startswith("3 of 4 rows have no propensity") for note in copy.notes)
    assert copy.notes[-1] == "columns that training does not use: shoe_size"
    assert [array.dtype.name for array in (copy.state, copy.reward, copy.follows, copy.next_index, copy.mask)] == [
        "float32", "float32", "bool", "int32", "uint8"
    ]  # fmt: skip


ONE = {"1": 1.0}


@pytest.mark.parametrize(
    ("actions", "changes", "bootstrap"),
    [
        (ACTIONS, {"terminal": True, "possible_next_actions": [1, 1]}, 0),
        (ACTIONS, {"terminal": False, "next_action": None}, 1),
        (ACTIONS, {"terminal": 1}, 0),
        (ACTIONS, {"possible_next_actions": [0, 0], "next_action": 1}, 0),
        (ACTIONS, {"possible_next_actions": [], "next_action": 1}, 0),
        (ACTIONS, {"possible_next_actions": [0, 1], "next_action": None}, 1),
        (ACTIONS, {"possible_next_actions": ["left"]}, 1),
        *((ACTIONS, {"next_action": none}, 0) for none in (None, "", 2, 7, "2")),
        *((ACTIONS, {"next_action": action}, 1) for action in (1, "right")),
        (ACTIONS, {"next_action": None, "truncated": True}, 1),
        (ACTIONS, {"terminal": True, "truncated": True}, 0),
        (ACTIONS, {"next_action": None, "truncated": False}, 0),
        *((None, {"next_action": none}, 0) for none in (None, {}, "")),
        (None, {"possible_next_actions": [], "next_action": ONE}, 0),
        (None, {"possible_next_actions": [ONE], "next_action": {}}, 1),
        (None, {"terminal": True, "possible_next_actions": [ONE]}, 0),
    ],
)
def test_the_terminal_rule(
    tmp_path: Path, actions: tuple[str, ...] | None, changes: dict[str, Any], bootstrap: float
) -> None:
    base = row() if actions else row(action=ONE, next_action=ONE)
    copy = copied(tmp_path, {**base, **changes}, base, actions=actions)
    assert (copy.bootstrap.tolist(), copy.truncated.tolist()) == (
        [bootstrap, 1],
        [int(bool(changes.get("truncated"))), 0],
    )
    assert bootstrap or copy.next_action[0] == -1


def test_rows_of_two_blocks_are_sorted_by_hand() -> None:
    # slots 0 and 1 are of the first block's ids, 2 and 3 of the second's; "a" is in both, one row has none
    ids = pa.array(["7", "214", "214", "c"])
    order = find_order(np.array([0, 1, -1, 2, 3, 2]), ids, np.array([7, 5, 1, 4, 0, 5]))
    # 214: rows 3 (4), 1 (5), 5 (5, the same again); 7: row 0; c: row 4; then the row without mdp_id
    assert (order.rows.tolist(), order.episode.tolist()) == ([3, 1, 5, 0, 4, 2], [0, 0, 0, 1, 2, 3])
    assert (order.duplicates, order.num_episodes, order.alone.tolist()) == (1, 4, [2])
    # BLAKE2b with 8 bytes, as coreutils' `printf 214 | b2sum -l 64` prints it
    assert order.episode_hashes()[:2].tolist() == [
        int.from_bytes(bytes.fromhex(digest), "little") for digest in ("350f42fc966eb108", "e75017cace788f82")
    ]
    # without sequence numbers the order is the files'
    assert find_order(np.array([1, 0, 1]), pa.array(["a", "b"]), None).rows.tolist() == [0, 1, 2]


@pytest.mark.parametrize("large", [1, 2**61, 2**63 - 1])  # 2^62 values times 4 episodes are beyond 64 bits
@given(st.lists(st.tuples(st.integers(-1, 3), st.integers(-2, 2)), min_size=1, max_size=30))
def test_the_order_is_that_of_sorting_by_both(large: int, rows: list[tuple[int, int]]) -> None:
    slots = np.array([slot for slot, _ in rows])
    sequence = np.array([max(-(2**63), min(2**63 - 1, place * large)) for _, place in rows])
    order = find_order(slots, pa.array(["a", "b", "c", "d"]), sequence)
    episode = np.where(slots >= 0, slots, 3 + np.cumsum(slots < 0))
    in_order = range(len(rows)) if (slots < 0).all() else np.lexsort((sequence, episode))
    assert (order.rows.tolist(), order.episode.tolist()) == (list(in_order), episode[order.rows].tolist())
    assert len(set(order.episode_hashes().tolist())) == order.num_episodes  # rows without mdp_id are episodes too
    assert order.sequence.tolist() == sequence[order.rows].tolist()


LOW, HIGH = {"1": 1.0, "4": 0.0}, {"1": 2.0}
AFTER = row(mdp_id="a", next_action=LOW, possible_next_actions=[HIGH, LOW, HIGH], sequence_number=1)
ALONE = row(mdp_id="a", next_action=LOW, possible_next_actions=[LOW, HIGH], action=LOW, propensity=0.25)


@cases("rows, arrays, counts, notes", {
    # the next row's state is right, but it is not later
    "duplicates are kept and counted": (
        [row(mdp_id="a", sequence_number=1, reward=n, state_features={"0": 2.0}, action=LOW, next_action=LOW)
         for n in range(3)],
        {"reward": [0, 1, 2], "next_index": [1, 2, 3], "follows": [False] * 3}, {"duplicate_rows": 2}, set(),
    ),
    "equal candidates of a list are one": (
        # 1 + 1e-9 is 1 as float32, -0.0 equals 0.0, null is absent
        [{**AFTER, "action": HIGH, "possible_actions": [LOW, {"1": 1 + 1e-9, "4": -0.0}, HIGH, {**HIGH, "4": None}]},
         {**AFTER, "action": {}, "possible_actions": [LOW, {}, {"4": None}, {}], "mdp_id": "b"}],
        {"candidates": [[1, 0], [2, nan], [2, nan], [1, 0], [1, 0], [nan, nan]], "list_offsets": [0, 2, 4, 6],
         "actions_list": [0, 2], "next_list": [1, 1], "action": [1, 1], "next_action": [1, 1]}, {}, set(),
    ),
    "candidates that are unknown are the action alone": (
        [{**ALONE, "possible_actions": [HIGH, LOW], "sequence_number": 1},
         {**ALONE, "possible_actions": [], "sequence_number": 2},
         {**ALONE, "possible_actions": [], "action": None, "sequence_number": 3},
         {**ALONE, "possible_actions": [], "possible_next_actions": [], "sequence_number": 4}],
        {"action": [1, 0, -1, 0], "propensity": [0.25, 1, 0.25, 1]}, {"candidates_unknown_rows": 2},
        {"2 of 4 rows have an empty possible_actions; the action taken is the only candidate there",
         "1 of 4 rows has no action and no part in training"},
    ),
})  # fmt: skip
def test_rows_of_candidates_by_hand(
    tmp_path: Path, rows: list[dict[str, Any]], arrays: dict[str, Any], counts: dict[str, int], notes: set[str]
) -> None:
    copy = copied(tmp_path, *rows, actions=None)
    check_arrays(copy, **arrays)
    assert (counts.items() <= copy.counts.items(), notes <= {*copy.notes}) == (True, True)


def test_list_hashes_see_every_difference() -> None:
    def hashed(lengths: list[int], ids: tuple[int, ...], values: Any) -> list[tuple[int, int]]:
        features = FeatureMatrix(ids, np.array(values, np.float32))
        return [*zip(*(hashes.tolist() for hashes in Lists(np.array(lengths), features).hashes()), strict=True)]

    seen = [
        *hashed([1, 1, 1, 0], (1, 2), [[1, nan], [nan, 1], [nan, nan]]),
        *hashed([2, 2], (1, 2), [[1, nan], [nan, 1], [nan, 1], [1, nan]]),
    ]
    # both hashes tell all of them apart; only those of a list without candidates are equal
    assert (len({first for first, _ in seen}), len({code for codes in seen for code in codes})) == (6, 11)
    # The order of columns and columns of absent features make no difference.
    assert hashed([2, 0], (5, 2, 1), [[nan, nan, 1], [nan, 1, nan]]) == [seen[4], seen[3]]
