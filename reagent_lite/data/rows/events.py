"""Logged decisions of any format as one table: the columns of the events contract, typed, with the line of every row.

    blocks ─► EventReader, in threads ─► Arrow tables of one schema ─► whoever keeps them

    mdp_id text · sequence_number int64 · ds text · state_features map<int64, float> · action text or map ·
    reward, action_probability double · possible_actions list · metrics map<text, double> · terminal, truncated bool ·
    next_state_features, possible_next_actions · further columns as text · fault · source_file · source_line

What is wrong with a single row stands in `fault` as "expected …, got …"; whoever reads the table decides what follows.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import date, time
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from reagent_lite.data.formats.blocks import Block
from reagent_lite.data.formats.schema import filled, nearest, valid_rows
from reagent_lite.data.rows.columns import (
    Column,
    Faults,
    Mask,
    column_of,
    flags,
    integers,
    is_number,
    is_string,
    pieces,
    scalar,
    strings,
)
from reagent_lite.data.rows.named import Named, named_numbers
from reagent_lite.data.rows.transitions import feature_matrix
from reagent_lite.errors import DataError, Problem

REQUIRED = ("mdp_id", "sequence_number", "state_features", "action", "reward")
FEATURES = pa.map_(pa.int64(), pa.float32())
METRICS = pa.map_(pa.string(), pa.float64())
PROPENSITIES = ("action_probability", "propensity")
INTEGER, NUMBER, FLAG, TEXT, JSON = "integer", "number", "flag", "text", "json"
"""Kinds of values of a further column; of several kinds in one column, JSON text stands for all."""
STRINGS_ALONE = "names as strings, since an integer may be the index of another action"
_OTHER_FAULT = "expected what its column holds, got something else"


def schema(*, discrete: bool, extra: tuple[str, ...]) -> pa.Schema:
    """Returns the columns of the table, in order."""
    action = pa.string() if discrete else FEATURES
    return pa.schema([
        ("mdp_id", pa.string()), ("sequence_number", pa.int64()), ("ds", pa.string()), ("state_features", FEATURES),
        ("action", action), ("reward", pa.float64()), ("possible_actions", pa.list_(action)),
        ("action_probability", pa.float64()), ("metrics", METRICS), ("terminal", pa.bool_()), ("truncated", pa.bool_()),
        ("next_state_features", FEATURES), ("possible_next_actions", pa.list_(action)),
        *((name, pa.string()) for name in extra),
        ("fault", pa.string()), ("source_file", pa.dictionary(pa.int32(), pa.string())), ("source_line", pa.int64()),
    ])  # fmt: skip


def require_event_columns(names: list[str], where: str, extra: tuple[str, ...]) -> None:
    """Checks that a file has the columns that no event lacks, and those that the config names.

    Raises:
        DataError: naming those that are missing and the nearest that are there.
    """
    wanted = (*REQUIRED, *(name for name in extra if name not in REQUIRED))
    missing = [name for name in wanted if name not in names]
    if missing:
        here = ", ".join(sorted(names))
        raise DataError(
            Problem(where, f"a column {name!r}", f"columns {here}", nearest(name, names)) for name in missing
        )


@dataclass(slots=True)
class EventReader:
    """Makes the table of each block; safe to call from several threads.

    Attributes:
        discrete: actions are names; else maps of features.
        extra: further columns that are carried along.
        indices: integers may be among discrete actions, and become their digits.
        seen: columns that had a value in some block.
        kinds: of the values of each further column.
    """

    discrete: bool
    extra: tuple[str, ...]
    indices: bool = True
    seen: set[str] = field(default_factory=set)
    kinds: dict[str, set[str]] = field(default_factory=dict)

    def read(self, block: Block) -> pa.Table:
        """Returns a block's rows in `schema`.

        Raises:
            DataError: a column that is missing, or what makes the block unreadable.
        """
        require_event_columns(block.table.column_names, block.where(0), self.extra)
        faults = Faults(block)
        columns = self._columns(block, faults)
        self.seen |= {name for name, array in columns.items() if array.null_count < len(array)}
        columns["fault"] = _texts_of(faults)
        file = pa.array(np.zeros(block.table.num_rows, np.int32))
        columns["source_file"] = pa.DictionaryArray.from_arrays(file, pa.array([block.file.path]))
        columns["source_line"] = pa.array(block.lines)
        wanted = schema(discrete=self.discrete, extra=self.extra)
        return pa.table([columns[name].cast(wanted.field(name).type) for name in wanted.names], wanted)

    def _columns(self, block: Block, faults: Faults) -> dict[str, pa.Array]:
        action = partial(_action_names, indices=self.indices) if self.discrete else _action_features
        choices = _name_lists if self.discrete else _candidate_lists
        found = {"mdp_id": _texts(column_of(block, "mdp_id"), faults), "ds": _days(column_of(block, "ds"), faults)}
        sequence = column_of(block, "sequence_number")
        found["sequence_number"] = _masked(integers(sequence, faults), sequence.present)
        for name in ("state_features", "next_state_features"):
            found[name] = _features(column_of(block, name), faults)
        found["action"] = action(column_of(block, "action"), faults)
        for name in ("possible_actions", "possible_next_actions"):
            found[name] = choices(column_of(block, name), faults)
        found["reward"] = _numbers(column_of(block, "reward"), faults)
        found["action_probability"] = _propensity(block, faults)
        found["metrics"] = _metrics(column_of(block, "metrics"), faults)
        for name in ("terminal", "truncated"):
            values = flags(column_of(block, name), faults)
            found[name] = _masked(values == 1, ~np.isnan(values))
        for name in self.extra:
            found[name], kinds = _as_text(column_of(block, name), faults)
            self.kinds.setdefault(name, set()).update(kinds)  # by one call each, as threads share the sets
        return found


def _texts_of(faults: Faults) -> pa.Array:
    """[n] what is wrong with each row, null where nothing is."""
    words = {row: f"expected {one.expected}, got {one.got}" for row, one in reversed(faults.problems)}
    texts: list[str | None] = [None] * len(faults.rows)
    for row in np.flatnonzero(faults.rows).tolist():
        texts[row] = words.get(row, _OTHER_FAULT)
    return pa.array(texts, pa.string())


def _masked(values: NDArray[np.generic], present: Mask) -> pa.Array:
    return pa.array(values, mask=~present)


def _numbers(column: Column, faults: Faults) -> pa.Array:
    return _masked(scalar(column, faults, "a number"), column.present)


def _texts(column: Column, faults: Faults) -> pa.Array:
    indices, distinct = strings(column, faults)
    return distinct.take(pa.array(indices, mask=indices < 0))


def _propensity(block: Block, faults: Faults) -> pa.Array:
    one, other = (column_of(block, name) for name in PROPENSITIES)
    first, second = scalar(one, faults, "a number"), scalar(other, faults, "a number")
    differ = one.present & other.present & (first != second)
    expected = "propensity and action_probability alike"
    faults.add(differ, expected, lambda row: f"{second[row]:g} and {first[row]:g}", "Keep one")
    return _masked(np.where(one.present, first, second), one.present | other.present)


def _action_names(column: Column, faults: Faults, *, indices: bool) -> pa.Array:
    kind = column.array.type
    if pa.types.is_nested(kind) or pa.types.is_boolean(kind):
        todo = "Maps are actions with timeline.actionDiscrete false" if pa.types.is_nested(kind) else ""
        faults.add(column.present, "the name or the index of an action", column.value, todo)
        return pa.nulls(len(column.array), pa.string())
    if not indices and column.text:
        return _only_strings(column, faults, f"{STRINGS_ALONE} in action")
    if not indices and is_number(kind):
        faults.add(column.present, f"{STRINGS_ALONE} in action", column.value)
    return _texts(column, faults)


def _only_strings(column: Column, faults: Faults, expected: str) -> pa.Array:
    """Returns the strings among JSON texts, null where there is none; other things are faults."""
    values = [None if text is None else json.loads(text) for text in column.array.to_pylist()]
    wrong = np.array([value is not None and not isinstance(value, str) for value in values], bool)
    faults.add(wrong, expected, column.value)
    return pa.array([value if isinstance(value, str) else None for value in values], pa.string())


def _days(column: Column, faults: Faults) -> pa.Array:
    """Returns ds as text: strings as they are, dates and times at midnight as 2026-01-31, as Hive and Spark type them.

    A time with a zone is taken in its zone.
    """
    array, expected = _decoded(column.array), "a date such as 2026-01-31 in ds"
    if column.text:
        return _only_strings(column, faults, expected)
    if is_string(array.type) or pa.types.is_null(array.type):
        return _texts(column, faults)
    if pa.types.is_timestamp(array.type):
        local = array if array.type.tz is None else pc.local_timestamp(array)
        days = local.cast(pa.date32(), safe=False)
        midnight = pc.equal(days.cast(local.type), local)
        faults.add(filled(midnight, 1) == 0, expected, column.value)
        return days.cast(pa.string())
    if pa.types.is_date(array.type):
        return array.cast(pa.date32()).cast(pa.string())
    faults.add(column.present, expected, column.value)
    return pa.nulls(len(array), pa.string())


def _decoded(array: pa.Array) -> pa.Array:
    return array.cast(array.type.value_type) if pa.types.is_dictionary(array.type) else array


def _action_features(column: Column, faults: Faults) -> pa.Array:
    if not column.text and (is_number(column.array.type) or is_string(column.array.type)):
        todo = "Names are actions with timeline.actionDiscrete true"
        faults.add(column.present, "an object {id: number} in action", column.value, todo)
        return pa.nulls(len(column.array), FEATURES)
    return _features(column, faults)


def _features(column: Column, faults: Faults) -> pa.Array:
    named = named_numbers(column, faults)
    return _map(_ids(named, faults), named.values, named.present)


def _ids(named: Named, faults: Faults, rows: NDArray[np.int64] | None = None) -> pa.Array:
    return pa.array(feature_matrix(named, faults, rows).ids, pa.int64())


def _metrics(column: Column, faults: Faults) -> pa.Array:
    named = named_numbers(column, faults, nan_is_absent=False)
    return _map(pa.array(named.names, pa.string()), named.values.astype(np.float64), named.present)


def _map(keys: pa.Array, values: NDArray[np.floating], present: Mask) -> pa.Array:
    """Maps of the values [n, keys] that are no NaN; null where a row has none at all."""
    there = ~np.isnan(values)
    offsets = np.concatenate(([0], np.cumsum(there.sum(axis=1)))).astype(np.int32)
    column = np.nonzero(there)[1]
    kind = pa.map_(keys.type, pa.from_numpy_dtype(values.dtype))
    return pa.MapArray.from_arrays(
        pa.array(offsets), keys.take(pa.array(column)), pa.array(values[there]), type=kind, mask=pa.array(~present)
    )


def _name_lists(column: Column, faults: Faults) -> pa.Array:
    if not column.present.any():
        return pa.nulls(len(column.array), pa.list_(pa.string()))
    taken = pieces(column, faults, "a list of action names")
    elements = taken.elements
    if taken.text:
        values = [None if text is None else json.loads(text) for text in elements.to_pylist()]
        elements = pa.array([value if isinstance(value, str) else None for value in values], pa.string())
    elif not is_string(elements.type):
        elements = pa.nulls(len(elements), pa.string())
    wrong = np.zeros(len(column.array), bool)
    wrong[taken.rows[~valid_rows(elements)]] = True
    faults.add(wrong, f"a list of action names in {column.name}", column.value)
    return _list(elements, taken.lengths, column.present)


def _candidate_lists(column: Column, faults: Faults) -> pa.Array:
    if not column.present.any():
        return pa.nulls(len(column.array), pa.list_(FEATURES))
    taken = pieces(column, faults, "a list of objects {id: number}")
    rows = taken.rows
    named = named_numbers(Column(column.name, taken.elements, taken.text), faults, rows=rows)
    wrong = np.zeros(len(column.array), bool)
    wrong[rows[~named.present]] = True
    faults.add(wrong, f"an object for every candidate in {column.name}", column.value)
    candidates = _map(_ids(named, faults, rows), named.values, named.present)
    return _list(candidates, taken.lengths, column.present)


def _list(elements: pa.Array, lengths: NDArray[np.int64], present: Mask) -> pa.Array:
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    if pa.types.is_dictionary(elements.type):
        elements = elements.cast(pa.string())
    return pa.ListArray.from_arrays(pa.array(offsets), elements, mask=pa.array(~present))


def _as_text(column: Column, faults: Faults) -> tuple[pa.Array, set[str]]:
    """Returns a further column's values as text, and what kinds of values there are; bytes are faults."""
    array = _decoded(column.array)
    if array.null_count == len(array):
        return pa.nulls(len(array), pa.string()), set()
    for test, kind in _KINDS:
        if test(array.type) and not column.text:
            return array.cast(pa.string()), {kind}
    if column.text:
        return array.cast(pa.string()), {JSON}
    texts: list[str | None] = []
    wrong = np.zeros(len(array), bool)
    for row, value in enumerate(array.to_pylist()):
        text: str | None = None
        try:
            text = None if value is None else json.dumps(value, default=_plain)
        except _BytesError:
            wrong[row] = True
        texts.append(text)
    faults.add(wrong, f"values that can be written as text in {column.name}", lambda _: "bytes")
    return pa.array(texts, pa.string()), {JSON}


class _BytesError(Exception):
    """A value, or a part of one, is bytes."""


def _plain(value: object) -> str:
    """Returns a date or time by ISO 8601, and a decimal by its digits."""
    if isinstance(value, bytes):
        raise _BytesError
    return value.isoformat() if isinstance(value, date | time) else str(value)


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
