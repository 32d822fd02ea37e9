"""The rules for the values of a row, and the words of their errors; config/column_names.py lists the columns.

Events are logged decisions; transitions also have what followed. Rules for their values:

    action               null if unknown
    features             null and NaN count as absent
    possible_actions     names, or 0 or 1 for each named action; in parametric rows candidates, equal ones count once
    reward, metrics      finite
    propensity           above 0 and at most 1
    next_state_features, possible_next_actions   in events only used if `truncated` is true: as seen at the limit
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from reagent_lite.config.column_names import COLUMNS, EVENT_COLUMNS, TRANSITION_COLUMNS
from reagent_lite.data.formats.blocks import Block
from reagent_lite.data.rows.block_columns import (
    NONE,
    WRONG,
    Column,
    column_of,
    flags,
    is_string,
    numbers,
    of_cells,
    per_distinct,
)
from reagent_lite.data.rows.faults import Faults
from reagent_lite.data.rows.maps import match, offered_items, read_candidate_features, read_candidate_lists
from reagent_lite.data.rows.matrices import FeatureMatrix, Lists, Mask
from reagent_lite.errors import DataError, Problem, join_names, raise_any, suggest_nearest

_OTHER_NAMES = (
    "If its columns have other names, or one for each feature, python -m workflows.inspect --data {path} --output "
    "config.json finds out which is which; or give them as `columns`: docs/data.md"
)
PROPENSITIES = tuple(name for name, column in COLUMNS.items() if "action_probability" in (name, column.alias_of))
"""The two names of the column of propensities; if a log has both, their values must be equal."""
TODO_NAMES = (
    "Names and indices are actions of workflows.dqn, in Python of a config with `actions`, "
    "and of timelines with actionDiscrete true; ids of items need the item table, data.items"
)
TODO_MAPS = "Maps are actions of workflows.parametric_dqn, and of timelines with actionDiscrete false"
ALONE = "each row is an independent decision, as no column says what follows one; a discount (gamma) has no effect"
"""Note about a log that has none of EPISODE_COLUMNS."""
COMPARED = "They are compared by their features"
_NUMERAL = re.compile("0|[1-9][0-9]{0,17}")
_NUMBER = re.compile(r"\s*[0-9]+(\.0*)?\s*")
_NUMERAL_BESIDE_GAPS = re.compile(r"(0|-?[1-9][0-9]{0,17})\.0")
"""An integer as pandas writes it to CSV if its column has gaps, which next_action has at the end of episodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRules:
    """The kind of the rows of one log.

    Attributes:
        actions: names of discrete actions, () if any name is allowed; None: actions are maps, chosen from candidates.
        events: whether rows are events; else transitions.
        extra: further columns that a timeline copies or sums.
        rewards: the extra columns that are rewards: finite numbers, or null.
        dated: whether every event must have a date.
        choices: whether possible_actions are used; else they are only checked.
        texts: whether features in a table of events may have strings as values.
    """

    actions: tuple[str, ...] | None
    events: bool = False
    extra: tuple[str, ...] = ()
    rewards: tuple[str, ...] = ()
    dated: bool = False
    choices: bool = True
    texts: bool = False

    def require_columns(self, block: Block) -> None:
        """Checks that a file has the columns that every log has, and the extra ones; see `require_columns` below.

        Rows of JSON lines have columns of their own, so that only the file's first block has to have all of them.
        """
        if not block.file.own_columns or block.lines[0] == 1:
            wanted = (*(EVENT_COLUMNS if self.events else TRANSITION_COLUMNS), *self.extra)
            require_columns(block.table.column_names, wanted, block.where(0))


def require_columns(
    names: Sequence[str], wanted: Iterable[str], where: str, field_of: Mapping[str, str] | None = None
) -> None:
    """Checks that a file has columns.

    Args:
        names: columns of the file.
        wanted: columns that it must have.
        where: name of the file, for errors.
        field_of: {column: the field it stands for} if a config names the columns; else None.

    Raises:
        DataError: columns are missing; says which there are, and how to give other names.
    """
    got = f"columns {join_names(sorted(names))}"
    missing = [name for name in dict.fromkeys(wanted) if name not in names]
    near = {name: suggest_nearest(name, names, "Nearest column: {!r}") for name in missing}
    if field_of:
        raise_any([
            Problem(where, f"a column {name!r}, as columns.{field_of[name]} says", got, near[name]) for name in missing
        ])  # fmt: skip
    elif missing:
        expected = f"a column {missing[0]!r}" if len(missing) == 1 else f"the columns {join_names(missing)}"
        todo = _OTHER_NAMES.format(path=re.sub(r":\d+$", "", where))
        if len(missing) == 1 and near[missing[0]]:
            todo = f"{near[missing[0]]}. {todo}"
        raise DataError(Problem(where, expected, got, todo))


def require_present(name: str, present: Mask, faults: Faults, todo: str = "") -> None:
    """Records a fault of each row that lacks a required value."""
    words = {"mdp_id": "an mdp_id", "sequence_number": "a sequence_number", "action": "an action"}
    faults.add(~present, words.get(name, name), lambda _: "null", todo, f"{name}_absent")


def require_event(
    faults: Faults,
    *,
    named: Mask,
    ordered: Mask,
    with_state: Mask,
    empty: Mask,
    of_no_state: Mask,
    both: Mask,
    dated: Mask,
) -> None:
    """Records the faults of events that cannot be paired.

    Args:
        faults: the faults of the block.
        named: [n] whether the row has an mdp_id.
        ordered: [n] whether it has a sequence_number.
        with_state: [n] whether it has state_features.
        empty: [n] whether its state_features have no feature.
        of_no_state: [n] whether it is a state after an end, of which nothing has to be known.
        both: [n] whether the row is terminal and truncated.
        dated: [n] whether it has a date, or needs none.
    """
    require_present("mdp_id", named, faults, "It says which rows are one episode")
    require_present("sequence_number", ordered, faults, "It says in which order the rows of an episode happened")
    require_present("state_features", with_state | of_no_state, faults)
    todo = "A state of which nothing is known leads nowhere"
    faults.add(
        empty & ~of_no_state,
        "at least one feature in state_features",
        lambda _: "none",
        todo,
        "state_features_empty",
    )
    todo = "A true end is terminal; truncated says that a limit cut the episode before one"
    faults.add(both, "terminal or truncated, not both", lambda _: "both", todo, "terminal_and_truncated")
    faults.add(~dated, "a date in ds", lambda _: "null", rule="ds_absent")


def are_events(block: Block) -> bool:
    """Returns whether the rows of a block are events and not transitions.

    Events have mdp_id and sequence_number, no column next_action, and next_state_features only in truncated rows.
    """
    names = set(block.table.column_names)
    if not {"mdp_id", "sequence_number"} <= names or "next_action" in names:
        return False
    cut = flags(column_of(block, "truncated"), Faults(block)) == 1
    return not (column_of(block, "next_state_features").present & ~cut).any()


def read_numbers(column: Column, faults: Faults, *, required: Mask | bool = False) -> NDArray[np.float64]:
    """Returns [n] float64, NaN where null; NaN, values infinite as float32 and, in required rows, null are faults."""
    values = numbers(column, faults)
    with np.errstate(over="ignore"):
        wrong = column.present & ~np.isfinite(values.astype(np.float32))
    expected = f"a finite number in {column.name}"
    rule = f"{column.name}_not_finite"
    faults.add(wrong, expected, lambda row: values[row], rule=rule)
    if np.any(required):
        faults.add(~column.present & required, expected, lambda _: "null", rule=rule)
    return np.where(wrong, np.nan, values)


def further_reward(block: Block, name: str, faults: Faults) -> NDArray[np.float64]:
    """Returns `read_numbers` of an extra reward column; in CSV it is text, as it is not a standard column."""
    column = column_of(block, name)
    return read_numbers(of_cells(column, "number") if block.file.cells else column, faults)


def propensity(block: Block, faults: Faults) -> tuple[NDArray[np.float64], Mask]:
    """Returns ([n] float64 probability with which the action was taken, NaN if absent; [n] whether there is one)."""
    first_column, second_column = (column_of(block, name) for name in PROPENSITIES)
    first = numbers(first_column, faults)
    second = numbers(second_column, faults)
    differ = first_column.present & second_column.present & (first != second)
    faults.add(
        differ, f"{' and '.join(PROPENSITIES)} alike", lambda row: f"{first[row]:g} and {second[row]:g}", "Keep one"
    )
    values = np.where(first_column.present, first, second)
    with np.errstate(over="ignore"):
        single = values.astype(np.float32)
    present = first_column.present | second_column.present
    wrong = present & ~((single > 0) & (single <= 1))  # NaN, which compares false, is wrong too
    todo = "Divide probabilities in per cent by 100"
    faults.add(wrong, "a propensity above 0 and at most 1", lambda row: values[row], todo, "propensity_outside")
    return np.where(wrong, np.nan, values), present


def candidates(column: Callable[[str], Column], faults: Faults) -> tuple[FeatureMatrix, Mask, Lists, NDArray[np.int32]]:
    """Returns (features of actions, [n] whether the row has an action, lists of candidates, [n] index of the action).

    If a list is empty although an action was taken, the candidates are unknown and the action becomes the only one; see
    Faults.unlisted. A row without a list has an empty one. An action without features beside an empty list is none.
    """
    possible = column("possible_actions")
    lists = read_candidate_lists(possible, faults, TODO_NAMES).distinct()
    empty_list = possible.present & (lists.lengths == 0)
    logged = empty_strings_as_null(column("action"), lists.lengths == 0)
    action, present = read_candidate_features(logged, faults, rule="action_infinite", todo=TODO_NAMES)
    present = present & ~(empty_list & np.isnan(action.values).all(axis=1))
    lists = offered_items(lists, present, possible, faults)
    faults.unlisted = possible.present & (lists.lengths == 0) & present
    lists = lists.or_alone(action, present, faults.unlisted)
    index = match(action, present, lists)
    missing = present & (lists.lengths > 0) & (index == NONE)
    faults.add(missing, "an action among possible_actions", column("action").value, COMPARED, "action_not_possible")
    return action, present, lists, index


def empty_strings_as_null(column: Column, rows: Mask | None = None) -> Column:
    """Returns a column in which empty strings, as CSV has them, are null; in `rows` [n] only, None for all."""
    if not is_string(column.array.type):
        return column
    array = column.array.cast(pa.string())
    empty = pc.equal(array, '""' if column.text else "")
    empty = empty if rows is None else pc.and_(empty, pa.array(rows))
    array = pc.if_else(empty, pa.scalar(None, pa.string()), array)
    return Column(column.name, pa.nulls(len(array)) if array.null_count == len(array) else array, column.text)


class ActionRule:
    """Interprets logged discrete actions.

    An integer is an index, or else a name; a string is a name, or else an index.

    If a name is the number of another action, such as "1" of the first, only names are read.

    Attributes:
        expected: the allowed values in words, for errors.
    """

    def __init__(self, actions: tuple[str, ...]) -> None:
        self._index = {name: index for index, name in enumerate(actions)}
        self._num = len(actions)
        # "1", "01" or "1.0" as the name of another action than number 1: an integer is ambiguous then, so only names
        # are accepted
        self._allows_indices = not any(
            _NUMBER.fullmatch(name) and index != float(name) < self._num for name, index in self._index.items()
        )
        index = f"or an index below {self._num}"
        strings = "written as strings, exactly as listed: an integer may mean either"
        self.expected = f"one of the actions {join_names(actions)}, {index if self._allows_indices else strings}"

    def codes(self, column: Column, faults: Faults) -> NDArray[np.int32]:
        """Returns [n] the index of each action of a column, negative without one; unknown actions are faults."""
        codes = per_distinct(column, self.action, NONE, np.int32)
        kind = column.array.type
        no_name = pa.types.is_boolean(kind) or pa.types.is_floating(kind)
        todo = TODO_MAPS if column.nested else "Write names as strings" if no_name else ""
        faults.add(codes == WRONG, self.expected, column.value, todo, "action_unknown")
        return codes

    def action(self, value: object) -> int:
        """Returns the index, NONE for null, WRONG for anything else."""
        value = self._without_point(value)
        if value is None:
            return NONE
        if isinstance(value, str):
            index = self._index.get(value, _numeral(value) if self._allows_indices else None)
            return WRONG if index is None or index >= self._num else index
        number = _integer(value)
        if number is None or not self._allows_indices:
            return WRONG
        return number if 0 <= number < self._num else self._index.get(str(number), WRONG)

    def next_action(self, value: object) -> int:
        """Returns the index as `action` does, but NONE for "" and for integers from the number of actions on.

        If such an integer is a name, it means the action; the number of actions itself may mean either, and is WRONG.
        """
        value = self._without_point(value)
        index = self.action(value)
        if index != WRONG and _integer(value) != self._num:
            return index
        number = _numeral(value) if isinstance(value, str) else _integer(value)
        if value == "":
            return NONE
        if number is None or number < self._num or not self._allows_indices:
            return WRONG
        # an integer that is a name may mean the action or no action
        return WRONG if not isinstance(value, str) and str(number) in self._index else NONE

    def _without_point(self, value: object) -> object:
        """Returns "3" for "3.0", unless "3.0" is a name."""
        match = _NUMERAL_BESIDE_GAPS.fullmatch(value) if isinstance(value, str) and value not in self._index else None
        return match[1] if match else value


def _integer(value: object) -> int | None:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _numeral(text: str) -> int | None:
    return int(text) if _NUMERAL.fullmatch(text) else None
