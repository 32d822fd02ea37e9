"""Logged transitions as checked numpy rows: the rules of the training-file contract, block by block.

    block ─► common columns ─┬─► transitions_discrete.py: action codes, masks ──────────────┬─► Rows
             and faults      └─► transitions_parametric.py: candidate lists, indices in them ┘

A row is terminal when its `terminal` says so; where that is absent, when possible_next_actions is there and empty or
all zero; where that is absent too, when next_action is null, "", {} or not below the number of actions. `truncated`
outranks the last two: a row cut by a limit has a next state whose value counts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from reagent_lite.data.formats.blocks import Block
from reagent_lite.data.formats.schema import REQUIRED_COLUMNS, any_true, nearest
from reagent_lite.data.rows.columns import (
    Column,
    Faults,
    Mask,
    column_of,
    flags,
    integers,
    is_number,
    scalar,
    sequence_numbers,
    strings,
)
from reagent_lite.data.rows.named import Named, named_numbers
from reagent_lite.errors import DataError, Problem

NONE = -1
_FEATURE_ID = re.compile(r"0|-?[1-9][0-9]{0,17}")
MOST_STEPS = 255
"""Rows that a transition may span: what fits into a byte of the training copy."""


@dataclass(frozen=True, slots=True)
class FeatureMatrix:
    """Dense features of rows or candidates: ids as logged, values [n, ids] float32, NaN = absent."""

    ids: tuple[int, ...]
    values: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Lists:
    """Candidate lists of n rows: lengths [n], and the features of all candidates in order."""

    lengths: NDArray[np.int64]
    features: FeatureMatrix


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    """What the log says beside states and actions; missing values filled in, shapes [n] as in TrainingCopy.

    Attributes:
        metrics: by name, NaN where a row lacks one.
        episode: number of the row's mdp_id in `mdp_ids`, -1 without one.
        mdp_ids: distinct ids of the block.
        has_sequence: whether the row has a sequence_number.
    """

    reward: NDArray[np.float32]
    time_diff: NDArray[np.float32]
    step: NDArray[np.uint8]
    propensity: NDArray[np.float32]
    num_without_propensity: int
    metrics: Named
    episode: NDArray[np.int32]
    mdp_ids: pa.Array
    sequence: NDArray[np.int64]
    has_sequence: Mask


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Checked rows of one block; shapes and meaning as in TrainingCopy, in the order of the file.

    Attributes:
        mask, next_mask: [n, A] of discrete actions, A 0 for parametric.
        lists, next_lists: of parametric actions, None for discrete.
        columns: names the block has.
        counts: what was counted, by name.
        problems: first faults; `num_faults` says how many there are.
    """

    block: Block
    state: FeatureMatrix
    next_state: FeatureMatrix
    action: NDArray[np.int32]
    next_action: NDArray[np.int32]
    bootstrap: NDArray[np.float32]
    truncated: NDArray[np.uint8]
    mask: NDArray[np.uint8]
    next_mask: NDArray[np.uint8]
    lists: Lists | None
    next_lists: Lists | None
    logged: Logged
    columns: frozenset[str]
    counts: dict[str, int]
    problems: tuple[Problem, ...]
    num_faults: int

    def __len__(self) -> int:
        return len(self.action)


def require_columns(block: Block) -> None:
    """Checks that a block has the columns no log can lack.

    Raises:
        DataError: naming those that are missing and the nearest that are there.
    """
    names = block.table.column_names
    missing = [name for name in REQUIRED_COLUMNS if name not in names]
    if missing:
        here = ", ".join(sorted(names))
        raise DataError(
            Problem(block.where(0), f"a column {name!r}", f"columns {here}", nearest(name, names)) for name in missing
        )


@dataclass(frozen=True, slots=True)
class Common:
    """What both kinds of actions read alike; `ends` is [n] 1 terminal, 0 not, NaN unsaid."""

    state: FeatureMatrix
    next_state: FeatureMatrix
    next_present: Mask
    ends: NDArray[np.float64]
    truncated: Mask


def read_common(block: Block, faults: Faults) -> Common:
    """Reads states and the explicit end marks of a block."""
    state = named_numbers(column_of(block, "state_features"), faults)
    faults.add(~state.present, "state_features", lambda _: "none")
    after = named_numbers(column_of(block, "next_state_features"), faults)
    some = after.present & any_true(~np.isnan(after.values))
    ends = flags(column_of(block, "terminal"), faults)
    truncated = flags(column_of(block, "truncated"), faults) == 1
    return Common(feature_matrix(state, faults), feature_matrix(after, faults), some, ends, truncated)


def feature_matrix(named: Named, faults: Faults, rows: NDArray[np.int64] | None = None) -> FeatureMatrix:
    """Returns features by integer id.

    Raises:
        DataError: for an id that is no integer, with the first line that has it.
    """
    for index, name in enumerate(named.names):
        if _FEATURE_ID.fullmatch(name) is None:
            having = np.flatnonzero(~np.isnan(named.values[:, index]))
            first = int(having[0]) if len(having) else 0
            row = first if rows is None else int(rows[first])
            raise faults.refuse(row, "integers as feature ids", repr(name[:60]), "They have at most 18 digits")
    ids = tuple(int(name) for name in named.names)
    return FeatureMatrix(ids, named.values)


def finish(block: Block, faults: Faults, common: Common, choices: Choices) -> Rows:
    """Reads the remaining columns, checks what hangs together, and returns the rows."""
    ends = np.where(common.truncated & np.isnan(common.ends), 0.0, common.ends)
    terminal = np.where(np.isnan(ends), choices.looks_terminal, ends == 1)
    faults.add(~terminal & ~common.next_present, "next_state_features in a row that is not terminal", lambda _: "none")
    faults.add(~terminal & ~choices.has_next, "a possible next action in a row that is not terminal", lambda _: "none")
    logged = _logged(block, faults)
    counts = {
        "unknown_action_rows": int((choices.action == NONE).sum()),
        "candidates_unknown_rows": int(choices.candidates_unknown.sum()),
        "propensity_absent_rows": logged.num_without_propensity,
        "next_action_not_possible_rows": int((choices.next_not_possible & ~terminal).sum()),
        "rows_without_mdp_id": int((logged.episode < 0).sum()),
    }
    return Rows(
        block=block,
        state=common.state,
        next_state=common.next_state,
        action=choices.action,
        next_action=np.where(terminal, NONE, choices.next_action).astype(np.int32),
        bootstrap=(~terminal).astype(np.float32),
        truncated=common.truncated.astype(np.uint8),
        mask=choices.mask,
        next_mask=_cleared(choices.next_mask, terminal),
        lists=choices.lists,
        next_lists=None if choices.next_lists is None else without(choices.next_lists, terminal),
        # beside its only candidate no other could have been taken
        logged=replace(logged, propensity=np.where(choices.candidates_unknown, np.float32(1), logged.propensity)),
        columns=frozenset(block.table.column_names),
        counts=counts,
        problems=tuple(faults.first()),
        num_faults=faults.count,
    )


def _cleared(mask: NDArray[np.uint8], rows: Mask) -> NDArray[np.uint8]:
    """Returns the mask [n, A] with zeros in some rows; [m] a third of the time of `where` for two actions."""
    cleared = mask.copy()
    cleared[rows] = 0
    return cleared


def _logged(block: Block, faults: Faults) -> Logged:
    reward_column = column_of(block, "reward")
    reward = _finite(reward_column, faults)
    faults.add(~reward_column.present, "a reward", lambda _: "none")
    propensity, absent = _propensity(block, faults)
    episode, mdp_ids = strings(column_of(block, "mdp_id"), faults)
    sequence = column_of(block, "sequence_number")
    return Logged(
        reward=np.nan_to_num(reward, nan=0.0),
        time_diff=np.nan_to_num(_finite(column_of(block, "time_diff"), faults), nan=1.0),
        step=_steps(column_of(block, "step"), faults),
        propensity=propensity,
        num_without_propensity=int(absent.sum()),
        metrics=named_numbers(column_of(block, "metrics"), faults, nan_is_absent=False),
        episode=episode,
        mdp_ids=mdp_ids,
        sequence=sequence_numbers(sequence, faults),
        has_sequence=sequence.present,
    )


def without(lists: Lists, rows: Mask) -> Lists:
    """Returns the lists with those of some rows emptied."""
    kept = np.repeat(~rows, lists.lengths)
    features = FeatureMatrix(lists.features.ids, lists.features.values[kept])
    return Lists(np.where(rows, 0, lists.lengths), features)


def _finite(column: Column, faults: Faults) -> NDArray[np.float32]:
    """[n] float32, NaN where null; NaN and what is infinite as float32 are faults."""
    values = scalar(column, faults, "a number")
    with np.errstate(over="ignore"):
        single = values.astype(np.float32)
    wrong = column.present & np.isinf(single)
    if is_number(column.array.type):
        wrong |= column.present & np.isnan(single)
    faults.add(wrong, f"a finite number in {column.name}", lambda row: values[row])
    return np.where(wrong, np.float32(0), single)


def _steps(column: Column, faults: Faults) -> NDArray[np.uint8]:
    """[n] rows that each transition spans, 1 where null."""
    if column.array.null_count == len(column.array):
        return np.ones(len(column.array), np.uint8)
    steps = np.where(column.present, integers(column, faults), 1)
    wrong = (steps < 1) | (steps > MOST_STEPS)
    faults.add(wrong, f"an integer from 1 to {MOST_STEPS} in step", lambda row: steps[row])
    return np.where(wrong, 1, steps).astype(np.uint8)


def _propensity(block: Block, faults: Faults) -> tuple[NDArray[np.float32], Mask]:
    one, other = column_of(block, "propensity"), column_of(block, "action_probability")
    first, second = scalar(one, faults, "a number"), scalar(other, faults, "a number")
    differ = one.present & other.present & (first != second)
    faults.add(
        differ, "propensity and action_probability alike", lambda row: f"{first[row]:g} and {second[row]:g}", "Keep one"
    )
    values = np.where(one.present, first, second).astype(np.float32)
    absent = ~one.present & ~other.present
    # NaN is outside too: it compares false.
    wrong = ~absent & ~((values > 0) & (values <= 1))
    faults.add(wrong, "a propensity above 0 and at most 1", lambda row: values[row])
    return np.where(absent | wrong, np.float32(1), values), absent


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What a block says about actions, before it is known which rows end.

    Attributes:
        looks_terminal: [n] by possible_next_actions, else by next_action.
        has_next: [n] whether there is a possible next action, were the row not terminal.
        next_not_possible: [n] whether next_action is known and not among possible_next_actions.
        candidates_unknown: [n] whether the list is empty though an action was taken; always false of discrete actions.
        action, next_action, mask, next_mask, lists, next_lists: as in Rows.
    """

    looks_terminal: Mask
    has_next: Mask
    next_not_possible: Mask
    candidates_unknown: Mask
    action: NDArray[np.int32]
    next_action: NDArray[np.int32]
    mask: NDArray[np.uint8]
    next_mask: NDArray[np.uint8]
    lists: Lists | None = None
    next_lists: Lists | None = None
