"""Logged transitions whose actions are feature maps, chosen from a list of candidates per row."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from reagent_lite.data.formats.blocks import Block
from reagent_lite.data.formats.schema import any_true, valid_rows
from reagent_lite.data.rows.columns import (
    Column,
    Faults,
    Mask,
    column_of,
    is_number,
    is_string,
    pieces,
)
from reagent_lite.data.rows.named import named_numbers
from reagent_lite.data.rows.transitions import (
    NONE,
    Choices,
    FeatureMatrix,
    Lists,
    Rows,
    feature_matrix,
    finish,
    read_common,
)


def parametric_rows(block: Block) -> Rows:
    """Reads a block whose actions are feature maps; `action` becomes the index of the equal candidate of the row.

    A row without a list has its action as the only candidate; likewise at the next state. So has a row whose list is
    empty although an action was taken: its candidates are unknown. An empty list of next candidates is an end.

    Raises:
        DataError: for what makes the block unreadable; faults of single rows are in the result.
    """
    faults = Faults(block)
    common = read_common(block, faults)
    column = column_of(block, "action")
    if not column.text and (is_number(column.array.type) or is_string(column.array.type)):
        todo = "Indices and names are actions of workflows.dqn"
        faults.add(column.present, "an object {id: number} in action", column.value, todo)
    action, has_action = _map(block, "action", faults)
    next_action, has_next_action = _map(block, "next_action", faults)
    # {} is a legal action, but as a next action it means none.
    has_next_action &= any_true(~np.isnan(next_action.values))
    lists, listed = _lists(block, "possible_actions", action, has_action, faults, empty_is_unknown=True)
    next_lists, next_listed = _lists(block, "possible_next_actions", next_action, has_next_action, faults)
    index = _match(action, has_action, lists)
    next_index = _match(next_action, has_next_action, next_lists)
    _refuse_unmatched(block, "action", has_action & (index == NONE), faults)
    looks_terminal = np.where(next_listed, next_lists.lengths == 0, ~has_next_action)
    unmatched = has_next_action & (next_index == NONE) & (next_lists.lengths > 0)
    _refuse_unmatched(block, "next_action", unmatched & ~(common.ends == 1), faults)
    none = np.zeros((len(index), 0), np.uint8)
    choices = Choices(
        looks_terminal=looks_terminal,
        has_next=next_lists.lengths > 0,
        next_not_possible=np.zeros(len(index), bool),
        candidates_unknown=column_of(block, "possible_actions").present & ~listed,
        action=index,
        next_action=next_index,
        mask=none,
        next_mask=none,
        lists=lists,
        next_lists=next_lists,
    )
    return finish(block, faults, common, choices)


def _map(block: Block, name: str, faults: Faults) -> tuple[FeatureMatrix, Mask]:
    column = column_of(block, name)
    if name == "next_action" and not pa.types.is_nested(column.array.type):
        column = _empty_strings_as_null(column)
    named = named_numbers(column, faults)
    return feature_matrix(named, faults), named.present


def _empty_strings_as_null(column: Column) -> Column:
    """A next action of "" means none, as null does."""
    array = column.array
    if pa.types.is_dictionary(array.type):
        array = array.cast(pa.string())
    if pa.types.is_string(array.type):
        empty = pc.is_in(array, pa.array(['""', "{}"] if column.text else [""], array.type))
        array = pc.if_else(empty, pa.scalar(None, array.type), array)
        if array.null_count == len(array):
            array = pa.nulls(len(array))
    return Column(column.name, array, column.text)


def _lists(
    block: Block, name: str, alone: FeatureMatrix, has_alone: Mask, faults: Faults, *, empty_is_unknown: bool = False
) -> tuple[Lists, Mask]:
    """Returns (the lists, with the action alone where a row has none; [n] whether the row has one)."""
    column = column_of(block, name)
    listed = column.present
    single = Lists(has_alone.astype(np.int64), FeatureMatrix(alone.ids, alone.values[has_alone]))
    if not listed.any():
        return single, listed
    taken = pieces(column, faults, "a list of objects {id: number}")
    inner = Column(name, taken.elements, taken.text)
    rows = taken.rows
    named = named_numbers(inner, faults, rows=rows)
    empty = np.zeros(len(listed), bool)
    empty[rows[~valid_rows(taken.elements)]] = True
    faults.add(empty, f"an object for every candidate in {name}", lambda _: "null")
    found = Lists(taken.lengths, feature_matrix(named, faults, rows))
    if empty_is_unknown:
        listed = listed & ~((taken.lengths == 0) & has_alone)
    return (found if listed.all() else _joined(found, single, listed)), listed


def _joined(found: Lists, single: Lists, listed: Mask) -> Lists:
    """Lists of `found` where the row has one, else of `single`."""
    ids = tuple(dict.fromkeys(found.features.ids + single.features.ids))
    lengths = np.where(listed, found.lengths, single.lengths)
    rows = np.repeat(np.arange(len(listed)), lengths)
    values = np.empty((int(lengths.sum()), len(ids)), np.float32)
    of_found = listed[rows]
    values[of_found] = aligned(found.features, ids)
    values[~of_found] = aligned(single.features, ids)[~listed[np.repeat(np.arange(len(listed)), single.lengths)]]
    return Lists(lengths, FeatureMatrix(ids, values))


def aligned(features: FeatureMatrix, ids: tuple[int, ...]) -> NDArray[np.float32]:
    """Returns the values in the columns of `ids`, which has all of theirs; NaN where they lack one."""
    if features.ids == ids:
        return features.values
    values = np.full((len(features.values), len(ids)), np.nan, np.float32)
    place = {one: index for index, one in enumerate(ids)}
    values[:, [place[one] for one in features.ids]] = features.values
    return values


def _match(action: FeatureMatrix, known: Mask, lists: Lists) -> NDArray[np.int32]:
    """Returns [n] index of the first candidate whose features equal the action's, absent = absent; NONE without one."""
    ids = tuple(dict.fromkeys(lists.features.ids + action.ids))
    candidates, wanted = aligned(lists.features, ids), aligned(action, ids)
    rows = np.repeat(np.arange(len(known)), lists.lengths)
    equal = known[rows]
    for index in range(len(ids)):
        one, other = candidates[:, index], wanted[rows, index]
        equal &= (one == other) | (np.isnan(one) & np.isnan(other))
    found = np.full(len(known), NONE, np.int32)
    starts = np.cumsum(lists.lengths) - lists.lengths
    at = np.flatnonzero(equal)[::-1]
    # Written from the last to the first: the first equal candidate stays.
    found[rows[at]] = (at - starts[rows[at]]).astype(np.int32)
    return found


def _refuse_unmatched(block: Block, name: str, rows: Mask, faults: Faults) -> None:
    column = column_of(block, name)
    where = "possible_next_actions" if name == "next_action" else "possible_actions"
    faults.add(rows, f"{name} to equal one candidate of {where}", column.value)
