"""Features of ids in a column of maps: taken out of the maps, and read as columns of codes and scores.

column of maps ─┬─► the other features, as a column of maps ─► maps.features
                └─► one array for each feature of ids ─► ids and scores, row after row ─► [n, length] codes, scores
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from reagent_lite.categories import MOST_CHARACTERS, codes_of
from reagent_lite.data.formats.schema import (
    fill_nulls,
    find_distinct,
    split_pairs,
    take_or_null,
    to_numpy,
    valid_rows,
)
from reagent_lite.data.rows.block_columns import Column, column_of, float64, is_list, is_number, is_string, of_cells
from reagent_lite.data.rows.faults import Faults
from reagent_lite.data.rows.matrices import FeatureMatrix
from reagent_lite.feature_ids import FeatureId
from reagent_lite.feature_values import LARGEST
from reagent_lite.id_values import IdFeature

_PAIR = {"key", "value"}
_ID_COLUMNS_OF = {"state_features": "", "next_state_features": "next_"}
"""Prefixes of ID_COLUMNS, by the column of the same states."""
_IDS = pa.list_(pa.string())
_SCORES = pa.list_(pa.float64())


@dataclass(frozen=True, slots=True)
class _Ids:
    """The ids of n rows, one row after the other.

    Attributes:
        lengths: [n] number of ids.
        ids: their texts.
        scores: their scores, or None.
        wrong: [n] whether the row has another value.
    """

    lengths: NDArray[np.int64]
    ids: pa.Array
    scores: NDArray[np.float64] | None
    wrong: NDArray[np.bool_]


def split_ids(column: Column, faults: Faults, features: tuple[IdFeature, ...]) -> tuple[Column, FeatureMatrix]:
    """Returns a column of maps without the features of ids, and the columns of these.

    Args:
        column: [n] struct, map, list of key-value structs, or JSON text.
        faults: the faults of the block.
        features: the features of ids.
    """
    of_name = {str(feature.feature): feature for feature in features if not feature.column}
    rest, arrays = _split(column, set(of_name))
    if column.name in _ID_COLUMNS_OF:
        arrays |= _from_id_columns(column.name, faults, features)
    of_name |= {str(feature.feature): feature for feature in features}
    parts = [
        _matrix(Column(column.name, array, rows=column.rows), name, faults, of_name[name])
        for name, array in arrays.items()
    ]
    ids = tuple(column_id for part in parts for column_id in part.ids)
    values = [np.empty((len(column.array), 0), np.float32), *(part.values for part in parts)]
    return rest, FeatureMatrix(ids, np.concatenate(values, axis=1))


def split_written_ids(
    column: Column, faults: Faults, features: tuple[IdFeature, ...]
) -> tuple[Column, dict[int, pa.Array]]:
    """Returns a column of maps without the features of ids, and {feature: [n] its values as strings, null if absent}.

    An id is itself; lists and ids with scores are JSON, as in the log of a server. No id is left out.
    """
    of_name = {str(feature.feature): feature for feature in features}
    rest, arrays = _split(column, set(of_name))
    texts = {}
    for name, array in arrays.items():
        feature = of_name[name]
        read = _read_checked(replace(column, array=array), name, faults, feature)
        if faults.count:  # they are reported before the strings are needed
            continue
        ids = iter(read.ids.to_pylist())
        scores = iter(() if read.scores is None else read.scores.tolist())
        values = [feature.canonical(_take_value(ids, scores, feature, length)) for length in read.lengths.tolist()]
        plain = feature.length == 1 and not feature.scores
        written = [value if value is None or plain else json.dumps(value) for value in values]
        texts[feature.feature] = pa.array(written, pa.string())
        faults.features |= {feature.feature} if isinstance(feature.feature, FeatureId) else set()
    return rest, texts


def _take_value(ids: Iterator[str], scores: Iterator[float], feature: IdFeature, length: int) -> list[Any]:
    """Returns the next `length` ids, or pairs of ids and scores."""
    of_value = list(itertools.islice(ids, length))
    return list(zip(of_value, scores, strict=False)) if feature.scores else of_value


def _from_id_columns(name: str, faults: Faults, features: tuple[IdFeature, ...]) -> dict[str, pa.Array]:
    """Returns the features of states that are in columns of their own; see ID_COLUMNS."""
    arrays: dict[str, pa.Array] = {}
    for source in dict.fromkeys(feature.column for feature in features if feature.column):
        column = of_cells(column_of(faults.block, f"{_ID_COLUMNS_OF[name]}{source}"), "features")
        prefix = f"{source}."
        names = {str(of.feature).removeprefix(prefix) for of in features if of.column == source}
        _, of_column = _split(column, names)
        arrays |= {f"{prefix}{key}": array for key, array in of_column.items()}
    return arrays


def _split(column: Column, names: set[str]) -> tuple[Column, dict[str, pa.Array]]:
    array = column.array
    kind = array.type
    if column.text:
        return _split_texts(column, names)
    if pa.types.is_struct(kind):
        children = dict(zip((member.name for member in kind), array.flatten(), strict=True))
        if names.isdisjoint(children):
            return column, {}
        others = [(name, child) for name, child in children.items() if name not in names]
        absent = pa.array(~column.present)
        if others:
            rest = pa.StructArray.from_arrays([child for _, child in others], [name for name, _ in others], mask=absent)
        else:
            rest = pa.array([{} if present else None for present in column.present.tolist()], pa.struct([]))
        return replace(column, array=rest), {name: child for name, child in children.items() if name in names}
    if pa.types.is_map(kind) or (is_list(kind) and pa.types.is_struct(kind.value_type)):
        return _split_pairs(column, names)
    return column, {}


def _split_texts(column: Column, names: set[str]) -> tuple[Column, dict[str, pa.Array]]:
    distinct, index = find_distinct(column.array)
    values = [json.loads(text) for text in distinct.to_pylist()]
    of_names: dict[str, list[Any]] = {}
    rest = []
    for number, value in enumerate(values):
        if isinstance(value, dict):
            for name in names & value.keys():
                of_names.setdefault(name, [None] * len(values))[number] = value[name]
            value = {name: inner for name, inner in value.items() if name not in names}
        rest.append(json.dumps(value))
    arrays = {
        name: take_or_null(pa.array([None if v is None else json.dumps(v) for v in of_name], pa.string()), index)
        for name, of_name in of_names.items()
    }
    tagged = {name: _as_text(array) for name, array in arrays.items()}
    return replace(column, array=take_or_null(pa.array(rest, pa.string()), index)), tagged


def _as_text(array: pa.Array) -> pa.Array:
    """Marks an array of JSON texts, which otherwise could not be told from ids."""
    return pa.StructArray.from_arrays([array], ["json"], mask=pa.array(~valid_rows(array)))


def _split_pairs(column: Column, names: set[str]) -> tuple[Column, dict[str, pa.Array]]:
    array = column.array
    if not pa.types.is_map(array.type) and {member.name for member in array.type.value_type} != _PAIR:
        return column, {}
    keys, items, row = split_pairs(array)
    if pa.types.is_binary(keys.type) or pa.types.is_large_binary(keys.type):
        return column, {}
    texts = keys.cast(pa.string())
    kept = np.ones(len(texts), bool)
    arrays = {}
    for name in sorted(names):
        is_name = fill_nulls(pc.equal(texts, name), 0).astype(bool)
        if is_name.any():
            kept &= ~is_name
            index = np.full(len(array), -1, np.int64)
            index[row[is_name]] = np.flatnonzero(is_name)
            arrays[name] = items.take(pa.array(index, mask=index < 0))
    if not arrays:
        return column, {}
    counts = np.bincount(row[kept], minlength=len(array))
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    mask = pa.array(starts, mask=np.append(~column.present, False))
    others = [part.filter(pa.array(kept)) for part in (texts, items)]
    if pa.types.is_nested(items.type) and not _is_value(items.type):
        others[1] = pa.nulls(len(others[0]), pa.float32())  # values of this type are no features
    rest = pa.MapArray.from_arrays(mask, *others)
    return replace(column, array=rest), arrays


def _is_value(kind: pa.DataType) -> bool:
    return bool(pa.types.is_struct(kind) and kind.names == ["number", "text"])


def _matrix(column: Column, name: str, faults: Faults, feature: IdFeature) -> FeatureMatrix:
    """Returns the columns of a feature, whose values in the rows are those of `column`."""
    read = _read_checked(column, name, faults, feature)
    row = np.repeat(np.arange(len(read.lengths)), read.lengths)
    starts = np.cumsum(read.lengths) - read.lengths
    position = np.arange(len(row)) - starts[row]
    kept = position < feature.length
    faults.ids_left_out += int((~kept).sum())
    values = np.full((len(read.lengths), len(feature.columns)), np.nan, np.float32)
    distinct, index = find_distinct(read.ids)
    codes = np.append(codes_of(distinct.to_pylist()), np.float32(np.nan))
    values[row[kept], position[kept]] = codes[index][kept]
    if read.scores is not None:
        values[row[kept], feature.length + position[kept]] = read.scores[kept]
    faults.features |= {column_id for column_id in feature.columns if isinstance(column_id, FeatureId)}
    return FeatureMatrix(feature.columns, values)


def _read_checked(column: Column, name: str, faults: Faults, feature: IdFeature) -> _Ids:
    """Returns the ids of a feature, whose values in the rows are those of `column`; other values are faults."""
    read = _read(column.array, feature)
    expected = f"{feature.expected}, for {name!r} in {column.name}"
    column.fault(faults, read.wrong, expected)
    long = fill_nulls(pc.greater(pc.utf8_length(read.ids), MOST_CHARACTERS), 0).astype(bool)
    if long.any():
        row = np.repeat(np.arange(len(read.lengths)), read.lengths)
        rows = np.isin(np.arange(len(read.lengths)), row[long])
        column.fault(faults, rows, f"ids of at most {MOST_CHARACTERS} characters, for {name!r} in {column.name}")
    return read


def _read(array: pa.Array, feature: IdFeature) -> _Ids:
    """Returns the ids of an array of any type that such values have."""
    kind = array.type
    present = valid_rows(array)
    if pa.types.is_null(kind):
        none = np.zeros(len(array), np.int64)
        return _Ids(none, pa.array([], pa.string()), np.zeros(0) if feature.scores else None, ~present & False)
    if not feature.scores:
        if _is_id(kind) and not (is_string(kind) and feature.length > 1 and _has_json(array)):
            return _Ids(present.astype(np.int64), _texts(array.filter(pa.array(present))), None, present & False)
        if is_list(kind) and (_is_id(kind.value_type) or pa.types.is_null(kind.value_type)):
            lengths, elements = _elements(array)
            if not elements.null_count:
                return _Ids(lengths, _texts(elements), None, present & False)
    elif pa.types.is_map(kind) or (
        is_list(kind) and pa.types.is_struct(kind.value_type) and {m.name for m in kind.value_type} == _PAIR
    ):
        lengths, pairs = _elements(array)
        keys, scores = (pc.struct_field(pairs, index) for index in ("key", "value"))
        if _is_id(keys.type) and is_number(scores.type) and not keys.null_count:
            numbers = float64(scores)
            row = np.repeat(np.arange(len(array)), lengths)
            wrong = np.zeros(len(array), bool)
            wrong[row[~(np.abs(numbers) <= LARGEST)]] = True
            return _Ids(lengths, _texts(keys), numbers, wrong)
    return _read_in_python(array, feature)


def _is_id(kind: pa.DataType) -> bool:
    return is_string(kind) or bool(pa.types.is_integer(kind))


def _texts(ids: pa.Array) -> pa.Array:
    return ids.cast(pa.string())


def _has_json(array: pa.Array) -> bool:
    return bool(pc.any(pc.match_substring_regex(array, r"^\s*\["), min_count=0).as_py())


def _elements(array: pa.Array) -> tuple[NDArray[np.int64], pa.Array]:
    """Returns the lengths of lists or maps, 0 where null, and all elements; those of maps are structs."""
    offsets = to_numpy(array.offsets).astype(np.int64)
    inner = array.values
    if pa.types.is_map(array.type):
        inner = pa.StructArray.from_arrays([array.keys, array.items], ["key", "value"])
    elements = inner[int(offsets[0]) : int(offsets[-1])]
    lengths = np.diff(offsets)
    present = valid_rows(array)
    if lengths[~present].any():
        elements = elements.filter(pa.array(np.repeat(present, lengths)))
        lengths = np.where(present, lengths, 0)
    return lengths, elements


def _read_in_python(array: pa.Array, feature: IdFeature) -> _Ids:
    """Returns the ids of an array of another type, such as JSON texts; each distinct text is read once."""
    tagged = pa.types.is_struct(array.type) and array.type.names == ["json"]
    texts = pc.struct_field(array, 0) if tagged else array
    index = np.arange(len(texts))
    if is_string(texts.type):
        texts, codes = find_distinct(texts)
        index = np.where(codes < 0, len(texts), codes)
    has_lists = feature.length > 1 or feature.scores
    values = [*texts.to_pylist(maps_as_pydicts="lossy"), None]
    ids: list[list[str]] = []
    scores: list[list[float]] = []
    wrong = []
    for value in values:
        try:
            value = _plain(value)
            if isinstance(value, str) and (tagged or (has_lists and value.lstrip().startswith(("[", "{")))):
                value = json.loads(value)
            of_value, of_scores = feature.read(value)
            wrong.append(False)
        except ValueError:
            of_value, of_scores = [], []
            wrong.append(True)
        ids.append(of_value)
        scores.append(of_scores)
    at = pa.array(index)
    lengths, elements = _elements(pa.array(ids, _IDS).take(at))
    numbers = to_numpy(_elements(pa.array(scores, _SCORES).take(at))[1]) if feature.scores else None
    return _Ids(lengths, elements, numbers, np.array(wrong)[index])


def _plain(value: Any) -> Any:
    """Returns a value without the form in which a column has numbers and strings, or without the nulls of a struct."""
    if not isinstance(value, dict):
        return value
    if value.keys() == {"number", "text"}:
        return value["number"] if value["text"] is None else value["text"]
    return {name: inner for name, inner in value.items() if inner is not None}
