"""Events of any format as one table: the columns of the contract, typed, with the faults and the line of every row.

    blocks ─► EventReader, in threads or in Spark's executors ─► Arrow tables of one schema ─► SQL

    mdp_id text · sequence_number int64 · ds text · state_features map<int64, float> · action text or map ·
    reward, action_probability double · possible_actions list · metrics map<text, double> · terminal, truncated bool ·
    next_state_features, possible_next_actions · further columns as text · fault · source_file · source_line

What is wrong with a single row stands in `fault`, by its rule and words; whoever reads the table decides what follows.
SQL has nothing left to check: it pairs, counts and sorts.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from datetime import date, time

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from reagent_lite.data.formats.blocks import Block
from reagent_lite.data.formats.schema import any_true, filled
from reagent_lite.data.rows.columns import (
    Column,
    flags,
    integers,
    is_number,
    is_string,
    list_array,
    per_distinct,
    pieces,
    strings,
    texts,
)
from reagent_lite.data.rows.contract import (
    NONE,
    WRONG,
    ActionRule,
    Contract,
    finite,
    propensity,
    require_one_end,
    require_present,
)
from reagent_lite.data.rows.faults import FAULT, Faults, Mask
from reagent_lite.data.rows.lists import Lists, candidate_lists, match
from reagent_lite.data.rows.named import FeatureMatrix, Named, features, metrics

FEATURES = pa.map_(pa.int64(), pa.float32())
METRICS = pa.map_(pa.string(), pa.float64())
INTEGER, NUMBER, FLAG, TEXT, JSON = "integer", "number", "flag", "text", "json"
"""Kinds of values of a further column; of several kinds in one column, JSON text stands for all."""


def schema(*, discrete: bool, extra: tuple[str, ...]) -> pa.Schema:
    """Returns the columns of the table, in order."""
    action = pa.string() if discrete else FEATURES
    return pa.schema(
        [
            ("mdp_id", pa.string()),
            ("sequence_number", pa.int64()),
            ("ds", pa.string()),
            ("state_features", FEATURES),
            ("action", action),
            ("reward", pa.float64()),
            ("possible_actions", pa.list_(action)),
            ("action_probability", pa.float64()),
            ("metrics", METRICS),
            ("terminal", pa.bool_()),
            ("truncated", pa.bool_()),
            ("next_state_features", FEATURES),
            ("possible_next_actions", pa.list_(action)),
            *((name, pa.string()) for name in extra),
            ("fault", FAULT),
            ("source_file", pa.dictionary(pa.int32(), pa.string())),
            ("source_line", pa.int64()),
        ]
    )


def event_table(block: Block, contract: Contract) -> tuple[pa.Table, Faults, dict[str, str]]:
    """Returns (a block's rows in `schema`, their faults, what kinds of values each further column has).

    Raises:
        DataError: a column that is missing, or what makes the block unreadable.
    """
    contract.require_columns(block.table.column_names, block.where(0))
    faults = Faults(block)
    columns, kinds = _columns(block, contract, faults)
    columns["fault"] = faults.column()
    file = pa.array(np.zeros(block.table.num_rows, np.int32))
    columns["source_file"] = pa.DictionaryArray.from_arrays(file, pa.array([block.file.path]))
    columns["source_line"] = pa.array(block.lines)
    wanted = schema(discrete=contract.discrete, extra=contract.extra)
    return pa.table([columns[name].cast(wanted.field(name).type) for name in wanted.names], wanted), faults, kinds


@dataclass(slots=True)
class EventReader:
    """Makes the table of each block; safe to call from several threads.

    Attributes:
        contract: of events.
        seen: columns that had a value in some block.
        kinds: of the values of each further column.
    """

    contract: Contract
    seen: set[str] = field(default_factory=set)
    kinds: dict[str, set[str]] = field(default_factory=dict)

    def read(self, block: Block) -> pa.Table:
        """Returns a block's rows in `schema`; raises DataError, see event_table."""
        table, _, kinds = event_table(block, self.contract)
        self.seen |= {name for name in table.column_names if table.column(name).null_count < table.num_rows}
        for name, kind in kinds.items():
            self.kinds.setdefault(name, set()).add(kind)  # by one call each, as threads share the sets
        return table


def _columns(block: Block, contract: Contract, faults: Faults) -> tuple[dict[str, pa.Array], dict[str, str]]:
    """Returns the columns: first those whose values are of the wrong type are found, then all other faults."""
    column = {name: contract.column(block, name) for name in schema(discrete=True, extra=contract.extra).names}
    kinds: dict[str, str] = {}
    found = {"mdp_id": texts(column["mdp_id"], faults), "ds": _days(column["ds"], faults)}
    numbers, placed = integers(column["sequence_number"], faults)
    found["sequence_number"] = pa.array(numbers, mask=~placed)
    state, known = features(column["state_features"], faults, rule="state_features_infinite")
    found["state_features"] = map_array(state, known)
    found["next_state_features"] = map_array(*features(column["next_state_features"], faults))
    named = metrics(column["metrics"], faults)
    found["metrics"] = map_array(named, named.present)
    terminal, truncated = (flags(column[name], faults) for name in ("terminal", "truncated"))
    for name, values in (("terminal", terminal), ("truncated", truncated)):
        found[name] = pa.array(values == 1, mask=np.isnan(values))
    for name in contract.extra:
        found[name], kind = _as_text(column[name], faults)
        kinds |= {name: kind} if kind else {}
    found |= _named(contract, column, faults) if contract.actions is not None else _parametric(column, faults)

    require_present(column["mdp_id"], column["mdp_id"].present, faults, "It says which rows are one episode")
    todo = "It says in which order the rows of an episode happened"
    require_present(column["sequence_number"], placed, faults, todo)
    require_present(column["state_features"], known, faults)
    todo = "A state of which nothing is known leads nowhere"
    empty = ~any_true(~np.isnan(state.values))
    faults.add(empty, "at least one feature in state_features", lambda _: "none", todo, "state_features_empty")
    found["reward"] = _numbers(finite(column["reward"], faults, required=True))
    if contract.dated:
        faults.add(~column["ds"].present, "a date in ds", lambda _: "null", rule="ds_absent")
    for name in contract.rewards:
        _require_finite_text(column[name], found[name], faults)
    found["action_probability"] = _numbers(propensity(block, contract, faults))
    require_one_end(terminal, truncated, faults)
    return found, kinds


def _numbers(values: NDArray[np.float64]) -> pa.Array:
    return pa.array(values, mask=np.isnan(values))


def _named(contract: Contract, column: dict[str, Column], faults: Faults) -> dict[str, pa.Array]:
    """Returns the columns of discrete actions; in rows whose list lacks the action taken that is a fault."""
    lists = {name: _names(column[name], faults) for name in ("possible_actions", "possible_next_actions")}
    codes, names = _taken(contract.actions or (), column["action"], faults)
    lengths, elements, _ = lists["possible_actions"]
    code = {name: number for number, name in enumerate(names.to_pylist())}
    of_element = per_distinct(elements, lambda name: code.get(str(name), WRONG), WRONG)
    possible = np.zeros(len(codes), bool)
    possible[np.repeat(np.arange(len(codes)), lengths)[of_element == np.repeat(codes, lengths)]] = True
    got = pa.DictionaryArray.from_arrays(pa.array(codes, mask=codes < 0), names)
    missing = (codes >= 0) & ~possible & column["possible_actions"].present
    faults.add(missing, "an action among possible_actions", lambda row: got[row].as_py(), rule="action_not_possible")
    return {"action": got.cast(pa.string()), **{name: one[2] for name, one in lists.items()}}


def _taken(actions: tuple[str, ...], column: Column, faults: Faults) -> tuple[NDArray[np.int32], pa.Array]:
    """Returns ([n] number of the action's name, negative where there is none; the names)."""
    nested = pa.types.is_nested(column.array.type)
    todo = "Maps are actions with timeline.actionDiscrete false" if nested else ""
    if not actions:
        expected = "the name or the index of an action" if nested else "a string or an integer"
        return strings(column, faults, expected, todo=todo)
    rule = ActionRule(actions)
    codes = per_distinct(column, rule.action, NONE, np.int32)
    faults.add(codes == WRONG, rule.expected, column.value, todo, "action_unknown")
    return codes, pa.array(actions, pa.string())


def _names(column: Column, faults: Faults) -> tuple[NDArray[np.int64], Column, pa.Array]:
    """Returns ([n] lengths; all names in the lists; [n] lists) of a column of lists of names."""
    lengths, elements = pieces(column, faults, "a list of action names")
    names = texts(elements, faults, "a list of action names", integers_too=False)
    inner = Column(column.name, names, rows=elements.rows)
    inner.fault(faults, ~inner.present, f"a list of action names in {column.name}", lambda _: "null")
    return lengths, inner, list_array(names, lengths, column.present)


def _parametric(column: dict[str, Column], faults: Faults) -> dict[str, pa.Array]:
    """Returns the columns of actions that are maps; in rows whose candidates lack the action taken that is a fault."""
    todo = "Names are actions with timeline.actionDiscrete true"
    action, taken = features(column["action"], faults, rule="action_infinite", todo=todo)
    found = {"action": map_array(action, taken)}
    for name in ("possible_actions", "possible_next_actions"):
        lists = candidate_lists(column[name], faults)
        found[name] = list_array(_candidates(lists), lists.lengths, column[name].present)
        if name == "possible_actions":  # of an empty list the candidates are unknown
            missing = taken & (match(action, taken, lists) == NONE) & (lists.lengths > 0)
            faults.add(missing, "an action among possible_actions", column["action"].value, rule="action_not_possible")
    return found


def _candidates(lists: Lists) -> pa.Array:
    return map_array(lists.features, np.ones(len(lists.features.values), bool))


def map_array(named: Named | FeatureMatrix, present: Mask) -> pa.Array:
    """Returns maps of the values [n, keys] that are no NaN; null where a row has none at all."""
    keys = pa.array(named.ids, pa.int64()) if isinstance(named, FeatureMatrix) else pa.array(named.names, pa.string())
    there = ~np.isnan(named.values)
    offsets = np.concatenate(([0], np.cumsum(there.sum(axis=1)))).astype(np.int32)
    return pa.MapArray.from_arrays(
        pa.array(offsets),
        keys.take(pa.array(np.nonzero(there)[1])),
        pa.array(named.values[there]),
        type=pa.map_(keys.type, pa.float32()),
        mask=pa.array(~present),
    )


def _days(column: Column, faults: Faults) -> pa.Array:
    """Returns ds as text: strings as they are, dates and times at midnight as 2026-01-31, as Hive and Spark type them.

    A time with a zone is taken in its zone.
    """
    array, expected = column.array, "a date such as 2026-01-31"
    if pa.types.is_timestamp(array.type):
        local = array if array.type.tz is None else pc.local_timestamp(array)
        days = local.cast(pa.date32(), safe=False)
        midnight = pc.equal(days.cast(local.type), local)
        faults.add(filled(midnight, 1) == 0, f"{expected} in {column.name}", column.value)
        return days.cast(pa.string())
    if pa.types.is_date(array.type):
        return array.cast(pa.date32()).cast(pa.string())
    return texts(column, faults, expected, integers_too=False)


def _as_text(column: Column, faults: Faults) -> tuple[pa.Array, str]:
    """Returns a further column's values as text, and of what kind they are, "" without any; bytes are faults."""
    array = column.array
    if array.null_count == len(array):
        return pa.nulls(len(array), pa.string()), ""
    kind = JSON if column.text else next((kind for test, kind in _KINDS if test(array.type)), "")
    if kind:
        return array.cast(pa.string()), kind
    rows: list[str | None] = []
    wrong = np.zeros(len(array), bool)
    for row, value in enumerate(array.to_pylist()):
        text: str | None = None
        try:
            text = None if value is None else json.dumps(value, default=_plain)
        except _BytesError:
            wrong[row] = True
        rows.append(text)
    faults.add(wrong, f"values that can be written as text in {column.name}", lambda _: "bytes")
    return pa.array(rows, pa.string()), JSON


class _BytesError(Exception):
    """A value, or a part of one, is bytes."""


def _plain(value: object) -> str:
    """Returns a date or time by ISO 8601, and a decimal by its digits."""
    if isinstance(value, bytes):
        raise _BytesError
    return value.isoformat() if isinstance(value, date | time) else str(value)


def _require_finite_text(column: Column, array: pa.Array, faults: Faults) -> None:
    """Records a fault where a further column has what is no finite number."""
    if is_number(column.array.type):
        finite(column, faults)
        return
    wrong = per_distinct(Column(column.name, array), lambda text: -1 if _is_finite(str(text)) else 0, -1)
    faults.add(
        wrong == 0,
        f"a finite number in {column.name}",
        lambda row: array[row].as_py(),
        rule=f"{column.name}_not_finite",
    )


def _is_finite(text: str) -> bool:
    try:
        return text in ("true", "false") or math.isfinite(float(text))
    except ValueError:
        return False


def type_of(kinds: set[str]) -> str:
    """Returns the name of the type, as dialects have it, that holds a further column's kinds of values."""
    if kinds == {FLAG}:
        return "flag"
    if kinds == {INTEGER}:
        return "integer"
    return "number" if kinds and kinds <= {INTEGER, NUMBER} else "text"


_KINDS = (
    (pa.types.is_boolean, FLAG),
    (pa.types.is_integer, INTEGER),
    (pa.types.is_floating, NUMBER),
    (is_string, TEXT),
    (pa.types.is_date, TEXT),
    (pa.types.is_time, TEXT),
    (pa.types.is_timestamp, TEXT),
    (pa.types.is_decimal, TEXT),
)
