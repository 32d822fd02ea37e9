"""Maps {name: number} of a block as dense numpy arrays: features of states and candidates, and metrics.

A feature may have strings in place of numbers, which are categories: its column holds their codes (categories.py), and
`Faults.levels` has the strings. Strings and numbers may be mixed in one struct, a string map or a VALUES map.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from reagent_lite.categories import MOST_CHARACTERS, codes_of
from reagent_lite.data.formats.schema import VALUES, fill_nulls, find_distinct, split_pairs, valid_rows
from reagent_lite.data.rows.block_columns import (
    NONE,
    Column,
    float64,
    float_of,
    is_list,
    is_number,
    is_string,
    parse_column,
    pieces,
    strings,
)
from reagent_lite.data.rows.faults import UNREADABLE, Faults
from reagent_lite.data.rows.id_columns import split_ids
from reagent_lite.data.rows.image_columns import read_images
from reagent_lite.data.rows.levels import ONE_KIND, WORDS, add_levels
from reagent_lite.data.rows.matrices import FeatureMatrix, Lists, Mask
from reagent_lite.errors import DataError, Problem, pluralize
from reagent_lite.feature_ids import FeatureId, id_of
from reagent_lite.item_table import UNKNOWN, ItemTable

_PAIR = ["key", "value"]
_STATES = ("state_features", "next_state_features")


@dataclass(frozen=True, slots=True)
class Named:
    """Numbers by name, as a dense matrix: feature maps or metrics.

    Attributes:
        names: the names of the columns, each once.
        values: [n, names] float32, NaN where absent.
        present: [n] whether the row has a map at all.
    """

    names: tuple[str, ...]
    values: NDArray[np.float32]
    present: Mask

    def nonempty(self) -> Named:
        """Returns the columns that have a value in some row."""
        kept: Mask = ~np.all(np.isnan(self.values), axis=0)
        if kept.all():
            return self
        return Named(tuple(itertools.compress(self.names, kept)), self.values[:, kept], self.present)


def features(column: Column, faults: Faults, *, rule: str = UNREADABLE, todo: str = "") -> tuple[FeatureMatrix, Mask]:
    """Returns maps {id or name: value} as (features, [n] whether the row has a map); null and NaN count as absent.

    Strings become their codes. Infinite values break `rule`. States of a log of images are bytes.

    Raises:
        DataError: a key is neither an id nor a name; names the first line that has it.
    """
    image = faults.block.file.image
    if image is not None and column.name in _STATES:
        return read_images(column, faults, image)
    id_features = faults.block.file.id_features
    column, of_ids = split_ids(column, faults, id_features) if id_features else (column, None)
    named, levels = _named_values(column, faults, todo=todo, categories=True)
    ids = tuple(_id_of(name, column, named.values[:, index], faults) for index, name in enumerate(named.names))
    faults.features |= {feature for feature in ids if isinstance(feature, FeatureId)}
    of_name = dict(zip(named.names, ids, strict=True))
    if levels:
        by_id = {of_name[name]: counts for name, counts in levels.items()}
        add_levels(faults.levels.setdefault(column.name, {}), by_id)
    _require_finite(column, named, faults, rule)
    if of_ids is None or not of_ids.ids:
        return FeatureMatrix(ids, named.values), named.present
    return FeatureMatrix(ids + of_ids.ids, np.concatenate([named.values, of_ids.values], axis=1)), named.present


def read_candidate_features(
    column: Column, faults: Faults, *, rule: str = UNREADABLE, todo: str = ""
) -> tuple[FeatureMatrix, Mask]:
    """Returns `features` of actions or candidates, which may be ids of items if there is an item table.

    An id stands for the features of its item; an id that the table lacks is a fault.
    """
    items = faults.block.file.items
    if items is None or not are_item_ids(column):
        return features(column, faults, rule=rule, todo=todo)
    row = item_rows(column, faults, items)
    present = row >= 0
    values = np.full((len(row), len(items.feature_ids)), np.nan, np.float32)
    values[present] = items.values[row[present]]
    faults.features |= {feature for feature in items.feature_ids if isinstance(feature, FeatureId)}
    for feature, texts in items.texts.items():
        codes, counts = np.unique(values[present, items.feature_ids.index(feature)], return_counts=True)
        of_column = {texts[code]: count for code, count in zip(codes.tolist(), counts.tolist(), strict=True)}
        add_levels(faults.levels.setdefault(column.name, {}), {feature: of_column})
    return FeatureMatrix(items.feature_ids, values), present


def offered_items(lists: Lists, has_action: Mask, column: Column, faults: Faults) -> Lists:
    """Returns lists of candidates in which a row with an action and without candidates offers all items.

    Args:
        lists: the lists of `column`.
        has_action: [n] whether the row has an action.
        column: the column of lists, for the strings of the items.
        faults: faults of the block, whose file has the table; they stay as they are if its items are not always
            possible.
    """
    items = faults.block.file.items
    if items is None or not items.all_possible:
        return lists
    rows = has_action & (lists.lengths == 0)
    for feature, texts in items.texts.items():
        values = items.values[:, items.feature_ids.index(feature)].tolist()
        counts = {texts[code]: values.count(code) * int(rows.sum()) for code in texts}
        add_levels(faults.levels.setdefault(column.name, {}), {feature: counts} if rows.any() else {})
    every = Lists(np.array([len(items)]), FeatureMatrix(items.feature_ids, items.values)).distinct()
    return lists.or_same(every.features, rows)


def are_item_ids(column: Column) -> bool:
    """Whether the values of a column are ids of items rather than objects with features."""
    if column.text:
        return not any(text.startswith("{") for text in column.array.unique().drop_null().to_pylist())
    return not column.nested


def item_rows(column: Column, faults: Faults, items: ItemTable) -> NDArray[np.int64]:
    """Returns [n] the row of each id in the item table, UNKNOWN where null; ids that the table lacks are faults."""
    codes, distinct = strings(column, faults, "the id of an item, a string or an integer,")
    # pandas writes an integer as 7.0 in a CSV column that has gaps, which next_action has at the end of episodes
    rows = [items.rows((text, text.removesuffix(".0"))) for text in distinct.to_pylist()]
    row = np.array([*(exact if exact >= 0 else without_point for exact, without_point in rows), UNKNOWN])[codes]
    expected = f"an id of the {pluralize(len(items), 'item')} in the item table, in {column.name}"
    column.fault(faults, (codes >= 0) & (row < 0), expected, todo="Add the item to the table", rule="item_unknown")
    return row


def _id_of(name: str, column: Column, values: NDArray[np.float32], faults: Faults) -> int:
    try:
        feature = id_of(name)
        return next(
            (named_feature for named_feature in faults.block.file.features if named_feature == feature), feature
        )
    except ValueError as error:
        having = np.flatnonzero(~np.isnan(values))
        first = int(having[0]) if len(having) else 0
        row = first if column.rows is None else int(column.rows[first])
        raise DataError(Problem(faults.block.where(row), str(error), repr(name[:60]))) from None


def metrics(column: Column, faults: Faults) -> Named:
    """Returns a column of maps {name: number}; null counts as absent, NaN and infinite values are faults."""
    rule = f"{column.name}_not_finite"
    named = named_numbers(column, faults, nan_rule=rule)
    _require_finite(column, named, faults, rule)
    return named


def _require_finite(column: Column, named: Named, faults: Faults, rule: str) -> None:
    infinite = np.isinf(named.values)
    if infinite.any():
        first = infinite.argmax(axis=1)

        def got(at: int) -> str:
            return f"{named.values[at, first[at]]} for {named.names[first[at]]!r} as float32"

        column.fault(faults, np.any(infinite, axis=1), f"finite numbers in {column.name}", got, rule=rule)


def named_numbers(column: Column, faults: Faults, *, nan_rule: str = "") -> Named:
    """Returns a column of maps {name: number}; values that are not numbers are faults.

    Args:
        column: [m] struct, map, list of key-value structs, or JSON text.
        faults: the faults of the block.
        nan_rule: the rule that a NaN breaks; "" if NaN counts as absent, as null always does.
    """
    return _named_values(column, faults, nan_rule=nan_rule)[0]


def _named_values(
    column: Column, faults: Faults, *, nan_rule: str = "", todo: str = "", categories: bool = False
) -> tuple[Named, dict[str, dict[str, int]]]:
    """Returns (values by name, with codes of strings; {name: {text: number of its values}}).

    `todo` is advice if the values of the column are not maps, and `categories` says whether they may have strings; for
    the other arguments see `named_numbers`.
    """
    parsed = pa.map_(pa.string(), VALUES if categories else pa.float64()), _values_of if categories else _numbers_of
    if categories and is_list(column.array.type) and is_number(column.array.type.value_type):
        return _of_numbers(column), {}
    if is_list(column.array.type) or pa.types.is_map(column.array.type):
        todo = todo or 'Write pairs as [{"key": "age", "value": 0.5}], with strings or integers as keys'
    if is_string(column.array.type):
        todo = todo or """Write {"0": 0.5} as json.dumps does; Python's own text of a dict is not JSON"""
    if pa.types.is_binary(column.array.type) or pa.types.is_fixed_size_binary(column.array.type):
        todo = todo or "If states are images, give their shape as data.image"
    if is_list(column.array.type) and is_list(column.array.type.value_type):
        todo = "If states are images, give their shape as data.image"
    if is_number(column.array.type):
        todo = todo or f'A column of one feature is given in a list: "{column.name}": ["age"] of columns'
    array = parse_column(column, faults, "an object {id: number}", _is_map_type, parsed, todo)
    if pa.types.is_null(array.type):
        return Named((), np.empty((len(array), 0), np.float32), np.zeros(len(array), bool)), {}
    reading = _MapReading(Column(column.name, array, rows=column.rows), faults, nan_rule, categories)
    named = reading.of_struct() if pa.types.is_struct(array.type) else reading.of_pairs()
    return named, reading.levels


def _numbers_of(value: object) -> list[tuple[str, float | None]] | None:
    if not isinstance(value, dict) or not all(inner is None or float_of(inner) is not None for inner in value.values()):
        return None
    return [(name, float_of(inner)) for name, inner in value.items()]


_OF_IDS = "If these are a list of ids or ids with scores, declare the feature in data.embeddings, elsewhere embeddings"


def _of_numbers(column: Column) -> Named:
    """Returns lists of numbers as features 0, 1, ..."""
    lengths = np.where(column.present, fill_nulls(pc.list_value_length(column.array), 0), 0)
    elements = float32(column.array.flatten())
    width = int(lengths.max(initial=0))
    values = np.full((len(lengths), width), np.nan, np.float32)
    values[np.arange(width) < lengths[:, None]] = elements
    return Named(tuple(map(str, range(width))), values, column.present)


def _values_of(value: object) -> list[tuple[str, dict[str, object]]] | None:
    if isinstance(value, list):
        value = {str(index): element for index, element in enumerate(value)} if _are_numbers(value) else None
    if not isinstance(value, dict) or not all(
        inner is None or isinstance(inner, str) or float_of(inner) is not None for inner in value.values()
    ):
        return None
    return [
        (name, {"text": inner} if isinstance(inner, str) else {"number": float_of(inner)})
        for name, inner in value.items()
    ]


def _are_numbers(values: list[object]) -> bool:
    return all(value is None or float_of(value) is not None for value in values)


def _is_map_type(kind: pa.DataType) -> bool:
    types = pa.types
    if is_list(kind):  # a list of pairs, named as Arrow, Parquet, Spark, DuckDB and Polars name the pairs of a map
        pair = kind.value_type
        return (
            types.is_struct(pair)
            and sorted(member.name for member in pair) == _PAIR
            and _is_key(pair.field("key").type)
        )
    return bool(types.is_struct(kind) or (types.is_map(kind) and _is_key(kind.key_type)))


def _is_key(kind: pa.DataType) -> bool:
    readable = (is_string, pa.types.is_integer, pa.types.is_binary, pa.types.is_large_binary)
    return any(is_kind(kind) for is_kind in readable)


def _name_of(key: str | int | bytes) -> str | None:
    try:
        return key.decode() if isinstance(key, bytes) else str(key)
    except UnicodeDecodeError:
        return None


@dataclass(frozen=True, slots=True)
class _MapReading:
    """Converts one column of maps to a dense matrix, and collects its faults and texts."""

    column: Column
    faults: Faults
    nan_rule: str
    categories: bool
    levels: dict[str, dict[str, int]] = field(default_factory=dict)

    def of_struct(self) -> Named:
        array = self.column.array
        values = np.empty((len(array), array.type.num_fields), np.float32)
        for index, (child, member) in enumerate(zip(array.flatten(), array.type, strict=True)):
            items = Column(self.column.name, child, rows=self.column.rows)
            if self.categories and is_string(child.type):
                values[:, index] = self._codes(items, (member.name,), np.zeros(len(child), np.int64))
            else:
                values[:, index] = self._floats(items, member.name)
        names = tuple(member.name for member in array.type)
        if twice := [name for name in names if names.count(name) > 1]:
            self._refuse_twice(self.column.present, lambda _: f"{twice[0]!r} twice")
        return Named(names, values, self.column.present)

    def of_pairs(self) -> Named:
        array = self.column.array
        present = self.column.present
        keys, items, row = split_pairs(array)
        rows = row if self.column.rows is None else self.column.rows[row]
        distinct, key = find_distinct(keys)
        decoded = [_name_of(name) for name in distinct.to_pylist()]
        unnamed = np.array([*(name is None for name in decoded), True])[key]
        names = tuple(str(name) for name in decoded)
        values_of_pairs = self._of_items(Column(self.column.name, items, rows=rows), names, np.maximum(key, 0))
        values = np.full((len(array), len(names)), np.nan, np.float32)
        kept = present[row]
        Column(self.column.name, keys, rows=rows).fault(
            self.faults, unnamed & kept, f"keys in UTF-8, none of them null, in {self.column.name}"
        )
        kept &= ~unnamed
        cells = row[kept], key[kept]
        values[cells] = values_of_pairs[kept]
        is_set = np.zeros(values.shape, bool)
        is_set[cells] = True
        self._refuse_twice(is_set.sum(axis=1) < np.bincount(cells[0], minlength=len(array)))
        return Named(names, values, present)

    def _refuse_twice(self, twice: Mask, got: Callable[[int], object] | None = None) -> None:
        self.column.fault(self.faults, twice, f"each id once in {self.column.name}", got)

    def _of_items(self, items: Column, names: tuple[str, ...], key: NDArray[Any]) -> NDArray[np.float32]:
        """Returns [n] the values of key-value pairs, with codes of strings; `key` [n] are indices of `names`."""
        if self.categories and is_string(items.array.type):
            return self._codes(items, names, key)
        if not self.categories or not _are_values(items.array.type):
            return self._floats(items, "")
        numbers, texts = (
            Column(items.name, pc.struct_field(items.array, name), rows=items.rows) for name in VALUES.names
        )
        is_text = texts.present
        both = is_text & numbers.present
        numbers.fault(self.faults, both, f"a number or a string in {items.name}, not both")
        # a feature is of strings if most of its values in the block are
        num_texts = np.bincount(key[is_text], minlength=len(names))
        num_numbers = np.bincount(key[numbers.present], minlength=len(names))
        of_texts = num_texts > num_numbers
        wrong = np.where(of_texts[key], numbers.present, is_text) if len(key) else np.zeros(0, bool)
        for number in np.unique(key[wrong]).tolist():
            expected = f"{WORDS[int(of_texts[number])]} for {names[number]!r} in {items.name}, as in other rows"
            values = numbers if of_texts[number] else texts
            values.fault(self.faults, wrong & (key == number), expected, todo=ONE_KIND)
        codes = self._codes(
            Column(items.name, pc.if_else(pa.array(wrong), None, texts.array), rows=items.rows), names, key
        )
        return np.where(wrong, np.float32(np.nan), np.where(is_text, codes, self._floats(numbers, "")))

    def _codes(self, items: Column, names: tuple[str, ...], key: NDArray[Any]) -> NDArray[np.float32]:
        """Returns the codes of strings, [n]; NaN for null. `key` [n] indexes `names`, the features' names."""
        distinct, code = find_distinct(items.array)
        texts = distinct.to_pylist()
        number = code.astype(np.int64)
        long = np.array([*(len(text) > MOST_CHARACTERS for text in texts), False])
        expected = f"categories of at most {MOST_CHARACTERS} characters in {items.name}"
        items.fault(self.faults, long[number], expected, todo="Leave prose out of the features")
        pairs, counts = np.unique(key[number >= 0] * len(texts) + number[number >= 0], return_counts=True)
        for pair, count in zip(pairs.tolist(), counts.tolist(), strict=True):
            index, text = divmod(pair, len(texts))
            self.levels.setdefault(names[index], {})[texts[text]] = count
        return np.append(codes_of(texts), np.float32(np.nan))[number]

    def _floats(self, items: Column, name: str) -> NDArray[np.float32]:
        label = f"{f'a number for {name!r}' if name else 'numbers'} in {items.name}"
        array = items.array
        if pa.types.is_null(array.type):
            return np.full(len(array), np.nan, np.float32)
        if not is_number(array.type):
            todo = _OF_IDS if pa.types.is_nested(array.type) else ""
            items.fault(self.faults, items.present, label, todo=todo)
            return np.full(len(array), np.nan, np.float32)
        if self.nan_rule and pa.types.is_floating(array.type):
            nan = valid_rows(array) & np.isnan(fill_nulls(array, np.nan))
            items.fault(self.faults, nan, f"finite numbers in {items.name}", lambda _: "NaN", rule=self.nan_rule)
        return float32(array)


def float32(array: pa.Array) -> NDArray[np.float32]:
    """Returns an array of numbers as [n] float32, NaN where null."""
    if pa.types.is_boolean(array.type) or pa.types.is_decimal(array.type):
        array = pa.array(float64(array), mask=~valid_rows(array))
    return fill_nulls(pc.cast(array, pa.float32(), safe=False), np.nan)


def _are_values(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_struct(kind) and kind.names == VALUES.names and is_number(kind[0].type) and is_string(kind[1].type)
    )


def read_candidate_lists(column: Column, faults: Faults, todo: str = "") -> Lists:
    """Returns a column of lists of maps {id: number}; rows without a list have an empty one.

    `todo` is advice if the candidates are not maps.
    """
    elements_of_lists = "objects {id: number}" if faults.block.file.items is None else "ids of items"
    lengths, elements = pieces(column, faults, f"a list of {elements_of_lists}")
    candidates, present = read_candidate_features(elements, faults, todo=todo)
    elements.fault(faults, ~present, f"an object for every candidate in {column.name}", lambda _: "null")
    return Lists(lengths, candidates)


def match(action: FeatureMatrix, present: Mask, lists: Lists) -> NDArray[np.int32]:
    """Returns [n] index of the first candidate whose features equal the action's, absent = absent; NONE without one."""
    ids = tuple(dict.fromkeys(lists.features.ids + action.ids))
    candidates = lists.features.align(ids)
    wanted = action.align(ids)
    rows = lists.rows
    equal = present[rows]
    for index in range(len(ids)):
        of_candidates = candidates[:, index]
        of_actions = wanted[rows, index]
        equal &= (of_candidates == of_actions) | (np.isnan(of_candidates) & np.isnan(of_actions))
    indices = np.full(len(present), NONE, np.int32)
    starts = np.cumsum(lists.lengths) - lists.lengths
    at = np.flatnonzero(equal)[::-1]
    # written from the last to the first, so that the first equal candidate stays
    indices[rows[at]] = (at - starts[rows[at]]).astype(np.int32)
    return indices
