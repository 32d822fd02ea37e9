"""Rows of any format as a table of typed columns: for timelines and for conversion.

    text, date            text
    order                 int64
    number, flag          double, bool
    features, metrics     map<int64, float>, map<text, number>; features with strings among them map<int64, VALUES>
    action                text (names), int64 (indices) or features
    actions               lists of names, of 0 and 1, or of features

config/column_names.py has the kind of each column. A table of events has action_probability for either name of the
propensity, and extra columns as text, or as numbers if they are rewards.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import date, time
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from reagent_lite.config.column_names import COLUMNS, ColumnKind, kind_of_column
from reagent_lite.data.formats.blocks import Block
from reagent_lite.data.formats.schema import VALUES, fill_nulls, find_distinct, take_or_null, to_numpy, valid_rows
from reagent_lite.data.rows.block_columns import (
    NONE,
    WRONG,
    Column,
    column_of,
    dates,
    flags,
    integers,
    is_list,
    is_number,
    is_string,
    numbers,
    per_distinct,
    pieces,
    sequence_numbers,
    texts,
)
from reagent_lite.data.rows.faults import Faults
from reagent_lite.data.rows.id_columns import split_written_ids
from reagent_lite.data.rows.levels import Levels, add_levels, texts_of
from reagent_lite.data.rows.maps import Named, features, metrics, read_candidate_lists
from reagent_lite.data.rows.matrices import FeatureMatrix, Mask
from reagent_lite.data.rows.reading import action_mask
from reagent_lite.data.rows.row_rules import (
    ActionRule,
    RowRules,
    candidates,
    empty_strings_as_null,
    further_reward,
    propensity,
    read_numbers,
    require_event,
)
from reagent_lite.id_values import IdFeature

FEATURES = pa.map_(pa.int64(), pa.float32())
"""Features whose values are numbers."""
Texts = Mapping[int, Mapping[float, str]]
"""{id: {code: text}} of the features whose values are texts."""
_NO_NAMES: Mapping[int, str] = {}
_LISTS = tuple(name for name, column in COLUMNS.items() if column.kind == "actions")
_Integers = Callable[[Column, Faults], tuple[NDArray[np.int64], Mask]]
_NAME = 0
_INDEX = 1
_MAP = 2
_WORDS = ("a name", "an index", "a map")


def event_schema(rules: RowRules) -> pa.Schema:
    """Returns the columns of a table of events, in order."""
    types = {kind: features_type(arrow_type, texts=rules.texts) for kind, (arrow_type, _) in _KINDS.items()}
    if rules.actions is not None:
        types |= {"action": pa.string(), "actions": pa.list_(pa.string())}
    further = {name: pa.float64() if name in rules.rewards else pa.string() for name in rules.extra}
    return pa.schema({name: types[column.kind] for name, column in COLUMNS.items() if column.event} | further)


def event_table(block: Block, rules: RowRules) -> tuple[pa.Table, Faults, dict[str, str]]:
    """Returns (a block's rows in `event_schema`, their faults, the kind of the values of each extra column of text).

    If features of the block are strings (see Faults.levels) and the rules allow none, features are null.

    Raises:
        DataError: the block is unreadable.
    """
    faults = Faults(block)
    wanted = event_schema(rules)
    column = {name: column_of(block, name) for name in wanted.names}
    arrays: dict[str, pa.Array] = {}
    # values of a wrong type are recorded first, as other faults follow from them
    for name, described in COLUMNS.items():
        if described.event and described.kind in ("text", "date", "order", "features", "metrics", "flag"):
            arrays[name] = _KINDS[described.kind][1](column[name], faults)
    kinds = {}
    for name in rules.extra:
        if name not in rules.rewards:
            arrays[name], kinds[name] = as_text(column[name], faults)
    arrays |= _parametric(column, faults) if rules.actions is None else _discrete(rules.actions, column, faults)
    states = arrays["state_features"]
    both = fill_nulls(arrays["terminal"], 0) & fill_nulls(arrays["truncated"], 0)
    of_no_state = rows_without_choice(arrays["action"], arrays["possible_actions"], arrays["terminal"])
    if rules.actions is not None:  # where an action is null, as it is unknown, the rest is needed
        of_no_state &= valid_rows(arrays["possible_actions"])
    require_event(
        faults,
        named=valid_rows(arrays["mdp_id"]),
        ordered=valid_rows(arrays["sequence_number"]),
        with_state=valid_rows(states),
        empty=np.diff(to_numpy(states.offsets)) == 0,
        of_no_state=of_no_state,
        both=both.astype(bool),
        dated=valid_rows(arrays["ds"]) | (not rules.dated),
    )
    arrays["reward"] = _numbers(read_numbers(column["reward"], faults, required=~of_no_state))
    for name in rules.rewards:
        arrays[name] = _numbers(further_reward(block, name, faults))
    probability, has_propensity = propensity(block, faults)
    # the only candidate is taken with certainty
    arrays["action_probability"] = _numbers(np.where(faults.unlisted & has_propensity, 1, probability))
    table = pa.table([_cast(arrays[name], wanted.field(name).type) for name in wanted.names], wanted)
    return table, faults, {name: kind for name, kind in kinds.items() if kind}


def rows_without_choice(action: pa.Array, possible: pa.Array, terminal: pa.Array) -> Mask:
    """Returns [n] whether no action was taken and none is listed: in the last row of an episode the state after an end.

    A terminal row without a list is a decision for an unknown one of the named actions.
    """
    none_listed: Mask = np.equal(fill_nulls(pc.list_value_length(possible), 0), 0)
    if pa.types.is_string(action.type):
        none_listed &= valid_rows(possible) | (fill_nulls(terminal, 0) == 0)
    return ~valid_rows(action) & none_listed


def _cast(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """Returns an array as a type of `event_schema`; nulls if it has strings and the type does not."""
    if array.type != kind and array.type == features_type(kind, texts=True):
        return pa.nulls(len(array), kind)
    if kind == features_type(array.type, texts=True):
        return features_as(array, kind)
    return array.cast(kind)


def _discrete(actions: tuple[str, ...], column: dict[str, Column], faults: Faults) -> dict[str, pa.Array]:
    """Returns the columns of actions as names, null where unknown; any name is valid if `actions` is empty."""
    arrays = {name: _names(column[name], actions, faults) for name in _LISTS}
    lists = arrays["possible_actions"]
    logged = empty_strings_as_null(column["action"], fill_nulls(pc.list_value_length(lists), 0) == 0)
    if actions:
        codes = ActionRule(actions).codes(logged, faults)
        action = take_or_null(pa.array(actions, pa.string()), codes)
    else:
        action = texts(logged, faults, "the name or the index of an action")
    row = to_numpy(pc.list_parent_indices(lists))
    equal = fill_nulls(pc.equal(lists.flatten(), action.take(pa.array(row))), 0).astype(bool)
    missing = valid_rows(action) & valid_rows(lists)
    missing[row[equal]] = False
    faults.add(missing, "an action among possible_actions", logged.value, rule="action_not_possible")
    return {"action": action, **arrays}


def _names(column: Column, actions: tuple[str, ...], faults: Faults) -> pa.Array:
    """Returns lists of names; a list of 0 or 1 per action is converted if `actions` is not empty."""
    kind = column.array.type
    if not (actions and is_list(kind) and is_number(kind.value_type)):
        return _choices(column, _NAME, faults)
    mask = action_mask(column, actions, faults) * column.present[:, None]
    names = pa.array(actions, pa.string()).take(pa.array(np.nonzero(mask)[1]))
    return list_array(names, mask.sum(axis=1), column.present)


def _parametric(column: dict[str, Column], faults: Faults) -> dict[str, pa.Array]:
    action, present, listed, _ = candidates(column.__getitem__, faults)
    after = "possible_next_actions"
    lists = {"possible_actions": listed, after: read_candidate_lists(column[after], faults).distinct()}
    texts = texts_in(faults, "action", *lists)
    arrays = {"action": map_array(action, present, texts)}
    for name, candidates_of in lists.items():
        every = map_array(candidates_of.features, np.ones(len(candidates_of.features.values), bool), texts)
        arrays[name] = list_array(every, candidates_of.lengths, column[name].present)
    return arrays


def typed_table(block: Block) -> tuple[pa.Table, dict[str, str]]:
    """Returns (the columns of a block as the types above, Faults.orders).

    Columns other than the standard ones stay as they are. Keys of features are ids, or strings if a feature in the
    block has a name. Values of features of ids are strings, see `split_written_ids`.

    Raises:
        DataError: values are not of their column's type, or actions are of several kinds; names the lines.
    """
    ids = tuple(feature for feature in block.file.id_features if not feature.column)
    faults = Faults(replace(block, file=replace(block.file, id_features=())))
    columns = {name: typed_column(column_of(block, name), faults, ids) for name in block.table.column_names}
    faults.require_none()
    if faults.features:
        names = {int(feature): str(feature) for feature in faults.features}
        columns = {
            name: features_as(array, features_type(array.type, names=True), names) for name, array in columns.items()
        }
    return pa.table(columns), faults.orders


def features_type(kind: pa.DataType, *, names: bool = False, texts: bool = False) -> pa.DataType:
    """Returns a type of features, or of lists of them, widened to hold names or strings; other types as they are."""
    if pa.types.is_list(kind):
        return pa.list_(features_type(kind.value_type, names=names, texts=texts))
    if not pa.types.is_map(kind) or kind.item_type not in (FEATURES.item_type, VALUES):
        return kind
    return pa.map_(pa.string() if names else kind.key_type, VALUES if texts else kind.item_type)


def features_as(array: pa.Array, kind: pa.DataType, names: Mapping[int, str] = _NO_NAMES) -> pa.Array:
    """Returns features, or lists of them, as a wider type; `names` are the names of ids that have one."""
    if array.type == kind:
        return array
    if pa.types.is_list(kind):
        elements = features_as(array.values, kind.value_type, names)
        return pa.ListArray.from_arrays(array.offsets, elements, mask=array.is_null())
    keys = array.keys
    items = array.items
    if keys.type != kind.key_type:
        distinct, codes = find_distinct(keys)
        texts = [names.get(key, str(key)) for key in distinct.to_pylist()]
        keys = pa.array(texts, pa.string()).take(pa.array(codes))
    if items.type != kind.item_type:
        items = pa.StructArray.from_arrays([items, pa.nulls(len(items), pa.string())], fields=list(VALUES))
    return pa.MapArray.from_arrays(array.offsets, keys, items, type=kind, mask=array.is_null())


def texts_in(faults: Faults, *columns: str) -> dict[int, dict[float, str]]:
    """Returns {id: {code: text}} of the features in columns of a block."""
    levels: Levels = {}
    for column in columns:
        add_levels(levels, faults.levels.get(column, {}))
    return texts_of(levels)


def typed_column(column: Column, faults: Faults, ids: tuple[IdFeature, ...] = ()) -> pa.Array:
    """Returns a column as the type of its kind; values of other types are faults, and null.

    Args:
        column: the column.
        faults: the faults of the block.
        ids: features whose values are ids, which become strings.
    """
    kind = kind_of_column(column.name)
    if kind not in _KINDS or pa.types.is_null(column.array.type):
        return column.array
    if kind == "features":
        return _features(column, faults, ids)
    if kind == "action":
        return _action(column, faults, ids)
    if kind == "actions":
        return _choices(column, None, faults, ids)
    return _KINDS[kind][1](column, faults)


def _integers(column: Column, faults: Faults, read: _Integers = integers) -> pa.Array:
    values, present = read(column, faults)
    return pa.array(values, mask=~present)


def _numbers(values: NDArray[np.float64]) -> pa.Array:
    return pa.array(values, mask=np.isnan(values))


def _finite(column: Column, faults: Faults) -> pa.Array:
    values = _numbers(read_numbers(column, faults))
    return values.cast(pa.float32()) if pa.types.is_float32(column.array.type) else values


def _flags(column: Column, faults: Faults) -> pa.Array:
    values = flags(column, faults)
    return pa.array(values == 1, mask=np.isnan(values))


def _features(column: Column, faults: Faults, ids: tuple[IdFeature, ...] = ()) -> pa.Array:
    column, texts_of_ids = split_written_ids(column, faults, ids)
    matrix, present = features(column, faults, rule=f"{column.name}_infinite")
    maps = map_array(matrix, present, texts_in(faults, column.name))
    return _add_texts(maps, texts_of_ids) if texts_of_ids else maps


def _add_texts(maps: pa.MapArray, texts_of_features: Mapping[int, pa.Array]) -> pa.MapArray:
    """Returns maps of features with the strings [n] of further features, where these are not null."""
    maps = features_as(maps, features_type(maps.type, texts=True))
    row = [np.repeat(np.arange(len(maps)), np.diff(to_numpy(maps.offsets)))]
    keys = [maps.keys]
    items = [maps.items]
    for feature, values in texts_of_features.items():
        written = np.flatnonzero(valid_rows(values))
        row.append(written)
        keys.append(pa.array(np.full(len(written), int(feature), np.int64)))
        of_feature = values.take(pa.array(written))
        items.append(
            pa.StructArray.from_arrays([pa.nulls(len(written), pa.float32()), of_feature], fields=list(VALUES))
        )
    rows = np.concatenate(row)
    order = pa.array(np.argsort(rows, kind="stable"))
    offsets = np.concatenate(([0], np.cumsum(np.bincount(rows, minlength=len(maps))))).astype(np.int32)
    parts = (pa.concat_arrays(part).take(order) for part in (keys, items))
    return pa.MapArray.from_arrays(pa.array(offsets), *parts, type=maps.type, mask=maps.is_null())


def _metrics(column: Column, faults: Faults) -> pa.Array:
    named = metrics(column, faults)
    return map_array(named, named.present)


def _action(column: Column, faults: Faults, ids: tuple[IdFeature, ...] = ()) -> pa.Array:
    read = (texts, _integers, partial(_features, ids=ids))[_one_kind(column, faults)]
    return read(column, faults)


def _choices(column: Column, kind: int | None, faults: Faults, ids: tuple[IdFeature, ...] = ()) -> pa.Array:
    """Returns lists of names, flags or maps; `kind` None stands for the kind of the first element."""
    what = "a list of action names" if kind == _NAME else "a list"
    lengths, elements = pieces(column, faults, what)
    if kind is None and not len(elements.array):
        return list_array(pa.nulls(0), lengths, column.present)
    kind = _one_kind(elements, faults) if kind is None else kind
    if kind == _MAP:
        values = _features(elements, faults, ids)
    elif kind == _NAME:
        values = texts(elements, faults, what, integers_too=False)
        missing = ~valid_rows(values)
        elements.fault(faults, missing, f"{what} in {column.name}", lambda _: "null")
    else:
        flag = numbers(elements, faults)
        wrong = (flag != 0) & (flag != 1)
        elements.fault(faults, wrong, f"0 or 1 per action, names, or maps in {column.name}")
        values = pa.array((flag == 1).astype(np.int8))
    return list_array(values, lengths, column.present)


def _one_kind(column: Column, faults: Faults) -> int:
    """Returns the kind of a column's values: names, indices or maps; those of another kind are faults."""

    def code(value: object) -> int:
        if isinstance(value, int | float):
            return _INDEX
        if isinstance(value, str):
            return _NAME
        return _MAP if isinstance(value, dict) else WRONG

    kinds = per_distinct(column, code, NONE)
    present_kinds = kinds[kinds >= 0]
    first = int(present_kinds[0]) if len(present_kinds) else _NAME
    wanted = f"{_WORDS[first]} as before" if len(present_kinds) else "a name, an index or a map"
    wrong = (kinds != NONE) & (kinds != first)
    column.fault(faults, wrong, f"{wanted} in {column.name}", todo="Write actions of one kind")
    return first


_KINDS: dict[ColumnKind, tuple[pa.DataType, Callable[[Column, Faults], pa.Array]]] = {
    "text": (pa.string(), texts),
    "date": (pa.string(), dates),
    "order": (pa.int64(), partial(_integers, read=sequence_numbers)),
    "number": (pa.float64(), _finite),
    "flag": (pa.bool_(), _flags),
    "features": (FEATURES, _features),
    "metrics": (pa.map_(pa.string(), pa.float64()), _metrics),
    "action": (FEATURES, _action),
    "actions": (pa.list_(FEATURES), lambda column, faults: _choices(column, None, faults)),
}
"""{kind: (type in a table of events with candidates, function that reads a column in any table)}."""


def map_array(named: Named | FeatureMatrix, present: Mask, texts: Texts | None = None) -> pa.Array:
    """Returns the values [n, keys] as maps, without NaN; null in rows that are not `present` [n].

    With `texts`, codes become texts, and the values of the maps are VALUES.
    """
    keys = pa.array(named.ids, pa.int64()) if isinstance(named, FeatureMatrix) else pa.array(named.names, pa.string())
    has_value = ~np.isnan(named.values)
    offsets = np.concatenate(([0], np.cumsum(has_value.sum(axis=1)))).astype(np.int32)
    column = np.nonzero(has_value)[1]
    values = pa.array(named.values[has_value])
    if texts and isinstance(named, FeatureMatrix):
        values = _values(named, named.values[has_value], column, texts)
    return pa.MapArray.from_arrays(
        pa.array(offsets),
        keys.take(pa.array(column)),
        values,
        type=pa.map_(keys.type, values.type),
        mask=pa.array(~present),
    )


def _values(
    matrix: FeatureMatrix, values: NDArray[np.float32], column: NDArray[np.int64], texts: Texts
) -> pa.StructArray:
    """Returns values [m] as VALUES; `column` [m] are their columns in the matrix."""
    is_text = np.isin(column, [index for index, feature in enumerate(matrix.ids) if feature in texts])
    text = np.full(len(values), -1)
    distinct: list[str] = []
    for index, feature in enumerate(matrix.ids):
        if feature in texts:
            at = np.flatnonzero(column == index)
            codes, number = np.unique(values[at], return_inverse=True)
            text[at] = number + len(distinct)
            distinct += [texts[feature][code] for code in codes.tolist()]
    words = pa.array(distinct, pa.string()).take(pa.array(text, mask=~is_text))
    return pa.StructArray.from_arrays([pa.array(values, mask=is_text), words], fields=list(VALUES))


def list_array(elements: pa.Array, lengths: NDArray[np.int64], present: Mask | None = None) -> pa.Array:
    """Returns lists [n] of consecutive elements; null in rows that are not present, None if all are."""
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    absent = None if present is None else pa.array(~present)
    return pa.ListArray.from_arrays(pa.array(offsets), elements, mask=absent)


def as_text(column: Column, faults: Faults) -> tuple[pa.Array, str]:
    """Returns the values of an extra column as text, and their kind, "" without values; bytes are faults."""
    array = column.array
    kind = column.array.type
    types = pa.types
    if array.null_count == len(array):
        return pa.nulls(len(array), pa.string()), ""
    if column.text:
        distinct, codes = find_distinct(array)
        values = [(json.loads(text), text) for text in distinct.to_pylist()]
        texts = pa.array([value if isinstance(value, str) else text for value, text in values])
        return take_or_null(texts, codes), "text"
    if is_string(kind) or types.is_temporal(kind) or types.is_decimal(kind):
        with suppress(pa.ArrowException):  # of time zones that this machine does not know, among others
            return array.cast(pa.string()), "text"
    if is_number(kind):
        number_kind = "integer" if types.is_signed_integer(kind) else "number"
        return array.cast(pa.string()), "flag" if types.is_boolean(kind) else number_kind
    dumped = pa.array(map(_dump_scalar, array), pa.string())
    wrong = column.present & ~valid_rows(dumped)
    faults.add(wrong, f"values that can be written as text in {column.name}", column.value)
    return dumped, "text"


def _dump_scalar(scalar: pa.Scalar) -> str | None:
    """Returns a value as JSON: maps as objects, dates and times by ISO 8601, decimals as their digits.

    Returns None for null, for bytes, and for values that Python cannot represent.
    """

    def plain(value: object) -> str:
        if isinstance(value, bytes):
            raise TypeError
        return value.isoformat() if isinstance(value, date | time) else str(value)

    try:
        value = scalar.as_py()
        pairs = pa.types.is_map(scalar.type) and value is not None
        return json.dumps(dict(value) if pairs else value, default=plain) if scalar.is_valid else None
    except (TypeError, ArithmeticError, ValueError, pa.ArrowException):
        return None


def type_of(kinds: set[str]) -> str:
    """Returns the kind that holds the values of an extra column, given their kinds; text holds any."""
    if kinds == {"integer", "number"}:
        return "number"
    return min(kinds) if len(kinds) == 1 else "text"
