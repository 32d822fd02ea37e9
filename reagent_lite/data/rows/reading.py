"""Logged transitions, or events, as checked numpy rows, block by block.

    block ─► states, ends ─► actions: codes and masks, or candidate lists and indices in them ─► Rows and faults

Whether a transition is terminal is decided by the first line that applies:

    `terminal` has a value                 terminal if it is true
    `truncated` is true                    not terminal: the value of the next state counts
    `possible_next_actions` has a value    terminal if the list is empty or all zero
    otherwise                              terminal if next_action is null, "", {} or not below the number of actions

An event is terminal if its `terminal` is true, and its next state and choices are only used if it is truncated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from reagent_lite.data.formats.blocks import Block
from reagent_lite.data.formats.schema import take_or_null, valid_rows
from reagent_lite.data.rows.block_columns import (
    NONE,
    WRONG,
    Column,
    column_of,
    dates,
    flags,
    float64,
    integers,
    is_number,
    per_distinct,
    pieces,
    sequence_numbers,
    strings,
)
from reagent_lite.data.rows.faults import Faults
from reagent_lite.data.rows.maps import (
    Named,
    features,
    match,
    metrics,
    offered_items,
    read_candidate_features,
    read_candidate_lists,
)
from reagent_lite.data.rows.matrices import FeatureMatrix, Lists, Mask
from reagent_lite.data.rows.row_rules import (
    COMPARED,
    TODO_MAPS,
    ActionRule,
    RowRules,
    candidates,
    empty_strings_as_null,
    further_reward,
    propensity,
    read_numbers,
    require_event,
    require_present,
)
from reagent_lite.errors import pluralize

MOST_STEPS = 255
"""Largest number of rows that a transition may span; it is stored as a byte."""
NEXT_ACTION = "a possible next action in a row that is not terminal"
_ZERO = -3
_ONE = -4
"""Codes of the elements of a list with 0 or 1 per action."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Checked rows of one block, in the order of the file; attributes are as in TrainingCopy, if not listed here.

    Attributes:
        has_next_state: [n] whether the row has next_state_features.
        without_choice: [n] whether no action was taken and none is listed.
        mask, next_mask: [n, A] of discrete actions; A is 0 for parametric ones.
        lists, next_lists: the candidate lists at states and next states; None for discrete actions.
        reward: float64 for events, whose rewards a timeline may sum; else float32.
        has_propensity: [n] whether the row has a propensity.
        metrics: metrics by name, NaN where absent.
        episode: index of the row's mdp_id in `mdp_ids`, -1 without one.
        mdp_ids: the distinct ids of the block.
        has_sequence: [n] whether the row has a sequence_number.
        counts: figures by name.
        faults: the faults of the block.
        refused: {rule: mdp_ids of the rows that break it}.
    """

    block: Block
    state: FeatureMatrix
    next_state: FeatureMatrix
    has_next_state: Mask
    action: NDArray[np.int32]
    next_action: NDArray[np.int32]
    bootstrap: NDArray[np.float32]
    truncated: NDArray[np.uint8]
    without_choice: Mask
    mask: NDArray[np.uint8]
    next_mask: NDArray[np.uint8]
    lists: Lists | None
    next_lists: Lists | None
    reward: NDArray[np.floating[Any]]
    time_diff: NDArray[np.float32]
    step: NDArray[np.uint8]
    propensity: NDArray[np.float32]
    has_propensity: Mask
    metrics: Named
    episode: NDArray[np.int32]
    mdp_ids: pa.Array
    sequence: NDArray[np.int64]
    has_sequence: Mask
    counts: dict[str, int]
    faults: Faults
    refused: dict[str, set[str]]

    def __len__(self) -> int:
        return len(self.action)


def read_rows(block: Block, rules: RowRules) -> Rows:
    """Reads a block of transitions, or of events by the rules of events.

    Raises:
        DataError: the block is unreadable; faults of single rows are in the result.
    """
    faults = Faults(block)
    column = partial(column_of, block)
    # values of a wrong type are recorded first, as other faults follow from them
    state, with_state = features(column("state_features"), faults, rule="state_features_infinite")
    next_state, has_next_state = features(column("next_state_features"), faults, rule="next_state_features_infinite")
    ends = flags(column("terminal"), faults)
    truncated = flags(column("truncated"), faults) == 1
    episode, mdp_ids = strings(column("mdp_id"), faults)
    sequence, has_sequence = sequence_numbers(column("sequence_number"), faults)
    measured = metrics(column("metrics"), faults)
    choices = _choices(column, faults, ends == 1, rules)
    if rules.events:
        terminal = ends == 1
        goes_on = truncated & has_next_state
        require_event(
            faults,
            named=episode >= 0,
            ordered=has_sequence,
            with_state=with_state,
            empty=state.empty,
            of_no_state=choices.of_no_state,
            both=terminal & truncated,
            dated=_has_date(column("ds"), faults, rules),
        )
        for name in rules.rewards:
            further_reward(block, name, faults)
    else:
        terminal = _terminal(ends, truncated, choices)
        goes_on = ~terminal
        require_present("state_features", with_state, faults)
    lacking = goes_on & (~has_next_state | next_state.empty)
    todo = "Log what followed, or events: rows with mdp_id and sequence_number, which are paired first"
    faults.add(lacking, "next_state_features in a row that is not terminal", lambda _: "none", todo)
    faults.add(goes_on & ~choices.has_next, NEXT_ACTION, lambda _: "none")
    reward = read_numbers(column("reward"), faults, required=~choices.of_no_state | (not rules.events))
    time_diff = read_numbers(column("time_diff"), faults)
    step = _steps(column("step"), faults)
    probability, has_propensity = propensity(block, faults)
    return Rows(
        block=block,
        state=state,
        next_state=next_state,
        has_next_state=has_next_state,
        action=choices.action,
        next_action=np.where(terminal, NONE, choices.next_action).astype(np.int32),
        bootstrap=(~terminal).astype(np.float32),
        truncated=truncated.astype(np.uint8),
        without_choice=choices.without_choice,
        mask=choices.mask,
        next_mask=choices.next_mask * ~terminal[:, None],
        lists=choices.lists,
        next_lists=None if choices.next_lists is None else choices.next_lists.without(terminal),
        reward=np.where(np.isnan(reward), 0, reward).astype(np.float64 if rules.events else np.float32),
        time_diff=np.where(np.isnan(time_diff), 0, time_diff).astype(np.float32),
        step=step,
        # the only candidate is taken with certainty
        propensity=np.where(faults.unlisted | np.isnan(probability), 1, probability).astype(np.float32),
        has_propensity=has_propensity,
        metrics=measured,
        episode=episode,
        mdp_ids=mdp_ids,
        sequence=sequence,
        has_sequence=has_sequence,
        counts={
            "unknown_action_rows": int((choices.action == NONE).sum()),
            "candidates_unknown_rows": int(faults.unlisted.sum()),
            "propensity_absent_rows": int((~has_propensity).sum()),
            "next_action_not_possible_rows": int((choices.next_not_possible & ~terminal).sum()),
            "rows_without_mdp_id": int((episode < 0).sum()),
        },
        faults=faults,
        refused=faults.by_rule(take_or_null(mdp_ids, episode)) if faults.kinds else {},
    )


def _has_date(column: Column, faults: Faults, rules: RowRules) -> Mask:
    """Returns [n] whether each row has a date, or needs none."""
    return valid_rows(dates(column, faults)) if rules.dated else np.ones(len(faults.kind), bool)


def _terminal(ends: NDArray[np.float64], truncated: Mask, choices: _ChoicesOfBlock) -> Mask:
    """Returns [n] whether each row is terminal, see the module's docstring; `ends` [n] is `terminal`, NaN if absent."""
    looks_terminal = np.where(choices.next_listed, ~choices.has_next, choices.next_action == NONE)
    return np.where(np.isnan(ends), looks_terminal & ~truncated, ends == 1)


def _steps(column: Column, faults: Faults) -> NDArray[np.uint8]:
    """Returns [n] the number of rows that each transition spans, 1 where null."""
    steps, present = integers(column, faults)
    wrong = present & ((steps < 1) | (steps > MOST_STEPS))
    faults.add(wrong, f"an integer from 1 to {MOST_STEPS} in {column.name}", lambda row: steps[row])
    return np.where(wrong | ~present, 1, steps).astype(np.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ChoicesOfBlock:
    """Actions of a block, before it is known which rows are terminal; other attributes are as in Rows.

    Attributes:
        without_choice: as in Rows.
        of_no_state: [n] whether the row is a state after an end, of which nothing has to be known.
        next_listed: [n] whether the row has a list of next actions.
        has_next: [n] whether there is a possible next action, unless the row is terminal.
        next_not_possible: [n] whether next_action is known and not among possible_next_actions.
    """

    action: NDArray[np.int32]
    next_action: NDArray[np.int32]
    mask: NDArray[np.uint8]
    next_mask: NDArray[np.uint8]
    lists: Lists | None = None
    next_lists: Lists | None = None
    without_choice: Mask
    of_no_state: Mask
    next_listed: Mask
    has_next: Mask
    next_not_possible: Mask


def _choices(column: Callable[[str], Column], faults: Faults, ended: Mask, rules: RowRules) -> _ChoicesOfBlock:
    if rules.actions is None:
        return _parametric(column, faults, ended, rules)
    return _discrete(column, faults, ended, rules)


def _discrete(column: Callable[[str], Column], faults: Faults, ended: Mask, rules: RowRules) -> _ChoicesOfBlock:
    actions = rules.actions or ()
    rule = ActionRule(actions)
    mask = action_mask(column("possible_actions"), actions, faults)
    listed = column("possible_actions").present
    none_listed = np.where(listed, ~np.any(mask, axis=1), rules.events & ~ended)
    logged = empty_strings_as_null(column("action"), none_listed)
    after = column("next_action")
    action = rule.codes(logged, faults)
    next_action = per_distinct(after, rule.next_action, NONE, np.int32)
    faults.add(next_action == WRONG, f"{rule.expected} in next_action", after.value)
    next_mask = action_mask(column("possible_next_actions"), actions, faults)
    impossible = (action >= 0) & ~_at(mask, action)
    faults.add(impossible, "an action among possible_actions", logged.value, rule="action_not_possible")
    if not rules.choices:
        mask = np.ones_like(mask)
        next_mask = np.ones_like(next_mask)
    return _ChoicesOfBlock(
        action=action,
        next_action=next_action,
        mask=mask,
        next_mask=next_mask,
        without_choice=none_listed & (action == NONE),
        of_no_state=none_listed & (action == NONE) & listed,  # elsewhere an action may be null as it is unknown
        next_listed=column("possible_next_actions").present,
        has_next=np.any(next_mask, axis=1),
        next_not_possible=(next_action >= 0) & ~_at(next_mask, next_action),
    )


def _at(mask: NDArray[np.uint8], action: NDArray[np.int32]) -> Mask:
    starts = np.arange(0, mask.size, mask.shape[1])  # a third of the time of two indices
    return np.take(mask, starts + np.maximum(action, 0)).astype(bool)


def action_mask(column: Column, actions: tuple[str, ...], faults: Faults) -> NDArray[np.uint8]:
    """Returns lists of names, or of 0 and 1, as [n, A] possible actions; ones if a row has no list."""
    present = column.present
    num = len(actions)
    if not present.any():
        return np.ones((len(present), num), np.uint8)
    expected = f"0 or 1 for each of {pluralize(num, 'action')}, or names of actions"
    lengths, elements = pieces(column, faults, expected)
    if is_number(elements.array.type) and (lengths == num).all():
        values = float64(elements.array).reshape(-1, num)
        if ((values == 0) | (values == 1)).all():
            return values.astype(np.uint8)
    index = {name: number for number, name in enumerate(actions)}

    def code(value: object) -> int:
        if isinstance(value, str):
            return index.get(value, WRONG)
        if not isinstance(value, int | float) or value not in (0, 1):
            return WRONG
        return _ZERO if value == 0 else _ONE

    codes = per_distinct(elements, code, WRONG)
    rows = elements.rows
    assert rows is not None
    position = np.arange(len(rows)) - (np.cumsum(lengths) - lengths)[rows]
    of_names, of_flags = (np.bincount(rows[of_kind], minlength=len(lengths)) for of_kind in (codes >= 0, codes < WRONG))
    wrong = (of_names < lengths) & ((of_flags < lengths) | (lengths != num))
    faults.add(wrong, f"{expected}, in {column.name}", column.value, TODO_MAPS if elements.nested else "")
    allowed = ~wrong[rows] & (codes != _ZERO)
    mask = np.where(present[:, None], np.uint8(0), np.ones(num, np.uint8))
    mask[rows[allowed], np.where(codes >= 0, codes, position)[allowed]] = 1
    return mask


def _parametric(column: Callable[[str], Column], faults: Faults, ended: Mask, rules: RowRules) -> _ChoicesOfBlock:
    """Reads feature maps or ids of items; `action` becomes the index of the equal candidate of the row.

    A row without a list has its action as the only candidate; the same holds at the next state. If a list is empty
    although an action was taken, the candidates are unknown, and the action is the only candidate as well. An empty
    list of next candidates marks an end.
    """
    action, present, lists, index = candidates(column, faults)
    next_action, next_taken = read_candidate_features(empty_strings_as_null(column("next_action")), faults)
    # {} is a valid action, but as a next action it means that there is none
    next_taken = next_taken & ~np.isnan(next_action.values).all(axis=1)
    without_choice = ~present & (lists.lengths == 0)
    after = column("possible_next_actions")
    without = (lists.lengths == 0) if rules.choices else np.ones(len(index), bool)
    lists = lists.or_alone(action, present, without)
    index = np.where(without & present, 0, index)
    next_lists = read_candidate_lists(after, faults).distinct()
    if rules.choices:
        next_lists = offered_items(next_lists, next_taken & ~after.present, after, faults)
    next_without = ~after.present & (next_lists.lengths == 0) if rules.choices else np.ones(len(index), bool)
    next_lists = next_lists.or_alone(next_action, next_taken, next_without)
    next_index = match(next_action, next_taken, next_lists)
    missing = next_taken & (next_index == NONE) & (next_lists.lengths > 0) & ~ended
    faults.add(missing, "a next_action among possible_next_actions", column("next_action").value, COMPARED)
    none = np.zeros((len(index), 0), np.uint8)
    return _ChoicesOfBlock(
        action=index.astype(np.int32),
        next_action=next_index,
        mask=none,
        next_mask=none,
        lists=lists,
        next_lists=next_lists,
        without_choice=without_choice,
        of_no_state=without_choice,
        next_listed=after.present,
        has_next=next_lists.lengths > 0,
        next_not_possible=np.zeros(len(index), bool),
    )
