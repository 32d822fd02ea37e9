"""Events from Parquet, read in place by Spark: whatever forms a log's writer chose, in the contract's types.

This process reads the footers, which are small, and so knows every file's types before Spark starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet

from reagent_lite.data.formats.files import InputFile
from reagent_lite.data.rows.columns import is_number, is_string
from reagent_lite.data.rows.contract import Contract
from reagent_lite.data.rows.table import schema
from reagent_lite.data.timeline.engine import OPTIONAL_COLUMNS, EventColumns
from reagent_lite.data.timeline.spark_json import STRINGS_ALONE, uri
from reagent_lite.data.timeline.spark_sql import (
    SOURCE_FILE,
    Cell,
    candidates,
    fault,
    features,
    first_of,
    literal,
    metrics,
    propensity,
    quote,
)
from reagent_lite.errors import DataError, Problem

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LARGEST_WHOLE = 2**53
PROPENSITIES = ("action_probability", "propensity")
_PLACES = ("fault", "source_file", "source_line")


def parquet_events(
    session: SparkSession, files: Sequence[InputFile], discrete: bool, indices: bool, extra: tuple[str, ...]
) -> tuple[str, EventColumns]:
    """Returns the query for the events of Parquet files, and their columns.

    Raises:
        DataError: a damaged file, a column that is missing or of a type that is not the contract's, further columns
            that differ between files, an id that is no integer.
    """
    footers = {file.path: _footer(file) for file in files}
    for path, found in footers.items():
        Contract(actions=(), events=True, extra=extra).require_columns(found.names, path)
    _require_alike(footers, extra)
    names = [field.name for field in schema(discrete=discrete, extra=()) if field.name not in _PLACES]
    groups: dict[str, list[str]] = {}
    for path, found in footers.items():
        read = [found.field(name) for name in (*names, "propensity", *extra) if name in found.names]
        read = [field for field in read if not pa.types.is_null(field.type)]
        groups.setdefault(", ".join(f"{quote(one.name)} {_spark_type(one, path)}" for one in read), []).append(path)
    selects = []
    for number, (types, paths) in enumerate(groups.items()):
        frame = session.read.schema(types).parquet(*map(uri, paths))
        frame.selectExpr("*", SOURCE_FILE, "_metadata.row_index + 1 AS source_line") \
            .createOrReplaceTempView(f"scan{number}")  # fmt: skip
        cells = _cells(footers[paths[0]], names, discrete, paths[0])
        if discrete and not indices and not is_string(footers[paths[0]].field("action").type):
            integers = fault("action IS NOT NULL", f"{STRINGS_ALONE} in action", "CAST(action AS STRING)")
            cells["action"] = Cell(value=cells["action"].value, faults=(integers,))
        bad_ids = [one for cell in cells.values() for one in cell.bad_ids]
        _require_integer_ids(session, bad_ids, f"scan{number}")
        columns = [f"{cell.value} AS {quote(name)}" for name, cell in cells.items()] + [quote(one) for one in extra]
        faults = first_of([one for cell in cells.values() for one in cell.faults])
        selects.append(f"SELECT {', '.join(columns)}, {faults} AS fault, source_file, source_line FROM scan{number}")
    there = {field.name for found in footers.values() for field in found if not pa.types.is_null(field.type)}
    there |= {PROPENSITIES[0]} if PROPENSITIES[1] in there else set()
    optional = frozenset(OPTIONAL_COLUMNS) & there
    return " UNION ALL ".join(selects), EventColumns(discrete=discrete, optional=optional, extra=extra)


def _footer(file: InputFile) -> pa.Schema:
    try:
        found = pa.parquet.read_schema(file.path).remove_metadata()
    except (pa.ArrowException, OSError) as error:
        got = f"one that ends early or is damaged: {str(error).splitlines()[0]}"
        raise DataError(Problem(file.path, "a complete Parquet file", got, "Copy the file again")) from error
    twice = sorted({name for name in found.names if found.names.count(name) > 1})
    if twice:
        raise DataError(Problem(file.path, "every column once", f"several columns {', '.join(map(repr, twice))}"))
    return found


def _require_alike(footers: dict[str, pa.Schema], extra: tuple[str, ...]) -> None:
    """Checks that further columns, which are taken as they are, have one type in all files.

    Raises:
        DataError: naming the file that differs from the first.
    """
    (first, wanted), *others = footers.items()
    for name in extra:
        for path, found in others:
            if found.field(name).type != wanted.field(name).type:
                expected = f"{wanted.field(name).type} in {name}, as in {first}"
                raise DataError(Problem(path, expected, str(found.field(name).type)))


def _require_integer_ids(session: SparkSession, bad_ids: list[str], relation: str) -> None:
    if not bad_ids:
        return
    found = (
        f"SELECT source_file, source_line, bad FROM (SELECT *, {first_of(bad_ids)} AS bad FROM {relation}) checked "
        "WHERE bad IS NOT NULL ORDER BY source_file, source_line LIMIT 1"
    )
    for file, line, bad in session.sql(found).collect():
        raise DataError(Problem(f"{file}:{line}", "integers as feature ids", repr(bad)))


def _spark_type(field: pa.Field, path: str) -> str:
    """Returns the type in Spark's words.

    Raises:
        DataError: one that Spark does not read.
    """
    return _nested_type(field.type) or _refused(path, field)


def _refused(path: str, field: pa.Field) -> str:
    todo = "Run workflows.convert first, or let engine duckdb read it"
    raise DataError(Problem(path, f"a type that Spark reads in {field.name}", str(field.type), todo))


def _nested_type(kind: pa.DataType) -> str:
    types = pa.types
    if types.is_dictionary(kind):
        kind = kind.value_type
    if types.is_map(kind):
        inner = [_nested_type(kind.key_type), _nested_type(kind.item_type)]
        return f"MAP<{', '.join(inner)}>" if all(inner) else ""
    if types.is_list(kind) or types.is_large_list(kind):
        element = _nested_type(kind.value_type)
        return f"ARRAY<{element}>" if element else ""
    if types.is_struct(kind):
        fields = [(one.name, _nested_type(one.type)) for one in kind if not types.is_null(one.type)]
        return f"STRUCT<{', '.join(f'{quote(name)}: {one}' for name, one in fields)}>" if all(
            one for _, one in fields) else ""  # fmt: skip
    if types.is_timestamp(kind):
        return "" if kind.unit == "ns" else "TIMESTAMP" if kind.tz else "TIMESTAMP_NTZ"
    if types.is_decimal(kind):
        return f"DECIMAL({kind.precision}, {kind.scale})"
    return "STRING" if is_string(kind) else _SCALARS.get(kind, "")


_SCALARS = {
    pa.bool_(): "BOOLEAN", pa.int8(): "TINYINT", pa.int16(): "SMALLINT", pa.int32(): "INT", pa.int64(): "BIGINT",
    pa.uint8(): "SMALLINT", pa.uint16(): "INT", pa.uint32(): "BIGINT", pa.uint64(): "DECIMAL(20, 0)",
    pa.float32(): "FLOAT", pa.float64(): "DOUBLE", pa.binary(): "BINARY", pa.date32(): "DATE",
}  # fmt: skip


def _cells(found: pa.Schema, names: list[str], discrete: bool, path: str) -> dict[str, Cell]:
    cells: dict[str, Cell] = {}
    nothing = {field.name: _nested_type(field.type) for field in schema(discrete=discrete, extra=())}
    for name in names:
        one = _cell(found, name, discrete, path)
        if name == PROPENSITIES[0]:
            one = propensity(one, _cell(found, PROPENSITIES[1], discrete, path))
        cells[name] = one or Cell(value=f"CAST(NULL AS {nothing[name]})")
    return cells


def _cell(found: pa.Schema, name: str, discrete: bool, path: str) -> Cell | None:
    """Returns the cell of a column; None where the file lacks it.

    Raises:
        DataError: a type that the contract does not know there.
    """
    if name not in found.names or pa.types.is_null(found.field(name).type):
        return None
    kind, value = found.field(name).type, quote(name)
    if name in ("mdp_id", "ds") or (discrete and name == "action"):
        cell, expected = _text(name, value, kind), "texts or integers"
    elif name == "sequence_number":
        cell, expected = _integer(name, value, kind), "integers"
    elif name in ("reward", *PROPENSITIES):
        cell, expected = Cell(value=f"CAST({value} AS DOUBLE)") if is_number(kind) else None, "numbers"
    elif name in ("terminal", "truncated"):
        cell, expected = _flag(name, value, kind), "true and false"
    elif name == "metrics":
        entries = _entries(kind, value, path, ids=False)
        cell, expected = metrics(name, value, entries) if entries else None, "maps or structs of numbers"
    elif name in ("possible_actions", "possible_next_actions"):
        cell, expected = _choices(name, value, kind, discrete, path)
    else:
        cell, expected = _features(name, value, kind, path), "maps or structs {id: number}"
    if not cell:
        raise DataError(Problem(path, f"{expected} in {name}", str(kind)))
    return cell


def _text(name: str, value: str, kind: pa.DataType) -> Cell | None:
    if is_string(kind):
        return Cell(value=value)
    whole = _integer(name, value, kind)
    return whole and Cell(value=f"CAST({whole.value} AS STRING)", faults=whole.faults)


def _integer(name: str, value: str, kind: pa.DataType) -> Cell | None:
    if pa.types.is_integer(kind):
        return Cell(value=f"CAST({value} AS BIGINT)")
    if not pa.types.is_floating(kind):
        return None
    # pandas makes integers with a gap floats, and the gap NaN
    absent = f"({value} IS NULL OR ISNAN({value}))"
    good = f"(NOT {absent} AND {value} = FLOOR({value}) AND ABS({value}) < {_LARGEST_WHOLE})"
    wrong = fault(f"NOT {absent} AND NOT {good}", f"an integer in {name}", f"CAST({value} AS STRING)")
    return Cell(value=f"CASE WHEN {good} THEN CAST({value} AS BIGINT) END", faults=(wrong,))


def _flag(name: str, value: str, kind: pa.DataType) -> Cell | None:
    if pa.types.is_boolean(kind):
        return Cell(value=value)
    if not is_number(kind):
        return None
    present = f"({value} IS NOT NULL AND NOT ISNAN({value}))"
    wrong = fault(f"{present} AND {value} NOT IN (0, 1)", f"true or false in {name}", f"CAST({value} AS STRING)")
    return Cell(value=f"CASE WHEN {present} THEN {value} = 1 END", faults=(wrong,))


def _choices(name: str, value: str, kind: pa.DataType, discrete: bool, path: str) -> tuple[Cell | None, str]:
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return None, "lists"
    if discrete:
        wrong = fault(f"EXISTS({value}, e -> e IS NULL)", f"a list of action names in {name}", f"TO_JSON({value})")
        return Cell(value=value, faults=(wrong,)) if is_string(kind.value_type) else None, "lists of action names"
    if _is_native(kind.value_type):
        return Cell(value=f"CAST({value} AS ARRAY<MAP<BIGINT, FLOAT>>)"), ""
    entries = _entries(kind.value_type, "c", path, ids=True)
    return candidates(name, value, entries) if entries else None, "lists of maps or structs {id: number}"


def _features(name: str, value: str, kind: pa.DataType, path: str) -> Cell | None:
    if _is_native(kind):
        return Cell(value=f"CAST({value} AS MAP<BIGINT, FLOAT>)")
    entries = _entries(kind, value, path, ids=True)
    return features(name, value, entries) if entries else None


def _is_native(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_map(kind) and types.is_integer(kind.key_type) and types.is_float32(kind.item_type))


def _entries(kind: pa.DataType, value: str, path: str, *, ids: bool) -> str | None:
    """Returns SQL for the entries (key as text, value) of a map, struct or list of pairs; None for other types."""
    types, pair = pa.types, "STRUCT(CAST({} AS STRING) AS key, CAST({} AS DOUBLE) AS value)".format
    if types.is_map(kind) and is_number(kind.item_type):
        return f"TRANSFORM(MAP_ENTRIES({value}), p -> {pair('p.key', 'p.value')})"
    is_list = types.is_list(kind) or types.is_large_list(kind)
    if is_list and types.is_struct(kind.value_type) and kind.value_type.num_fields == 2:
        key, item = (quote(kind.value_type.field(number).name) for number in (0, 1))
        return f"TRANSFORM({value}, p -> {pair(f'p.{key}', f'p.{item}')})"
    if not types.is_struct(kind):
        return None
    there = [one for one in kind if not types.is_null(one.type)]
    if not all(is_number(one.type) for one in there):
        return None
    if not there:
        return "CAST(ARRAY() AS ARRAY<STRUCT<key: STRING, value: DOUBLE>>)"
    for one in there if ids else ():
        if not one.name.lstrip("-").isdigit() or str(int(one.name)) != one.name:
            raise DataError(Problem(path, "integers as feature ids", repr(one.name)))
    return f"ARRAY({', '.join(pair(literal(one.name), f'{value}.{quote(one.name)}') for one in there)})"
