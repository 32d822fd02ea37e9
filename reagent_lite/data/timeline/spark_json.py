"""Events from JSON lines, parsed by Spark: every line, with its number, in the contract's types.

    lines ─► from_json with the contract's columns ─► Parquet, once ─► relation events
             what is no text, number or flag as such is a VARIANT, whose type is then looked at

Spark reads a file in blocks, each in one task in the order of its lines: a line's number is that of its block's first
line, from the lines of the blocks before, and its place in the block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from reagent_lite.data.formats.files import InputFile
from reagent_lite.data.rows.contract import EVENT_COLUMNS as REQUIRED
from reagent_lite.data.rows.contract import Contract
from reagent_lite.data.timeline.engine import OPTIONAL_COLUMNS, EventColumns
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
    short,
)
from reagent_lite.errors import DataError, NoRowsError, Problem, counted

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_MAP, _TEXTS = "MAP<STRING, DOUBLE>", "ARRAY<VARIANT>"
_CORRUPT = "corrupt_record"
_KINDS = {"BOOLEAN": "BOOLEAN", "BIGINT": "BIGINT", "DECIMAL": "DOUBLE", "DOUBLE": "DOUBLE"}
"""Types of a further column by the kind that its VARIANTs have."""
_LARGEST_WHOLE = 2**53
STRINGS_ALONE = "names as strings, since an integer may be the index of another action"


def json_events(
    session: SparkSession,
    files: Sequence[InputFile],
    discrete: bool,
    indices: bool,
    extra: tuple[str, ...],
    spool: Callable[[str], str],
) -> tuple[str, EventColumns]:
    """Returns the query for the events of JSON lines, and their columns.

    Args:
        session: to run SQL in.
        files: .json, .jsonl or .ndjson, plain or .gz, .bz2, .zst.
        discrete: actions are names.
        indices: integers may be among them.
        extra: further columns.
        spool: runs a query once and returns one for its rows.

    Raises:
        DataError: a column that a file lacks, an id that is no integer.
    """
    lines = session.read.text([uri(file.path) for file in files]).selectExpr(
        "value", SOURCE_FILE, "_metadata.file_block_start AS block", "monotonically_increasing_id() AS at"
    )
    lines.createOrReplaceTempView("json_lines")
    kept = spool(_parsed(discrete, indices, extra))
    places = _places(session, kept, files)
    seen = _seen(session, kept, files, extra, places)
    columns = [quote(name) for name in _contract(discrete)] + ["fault", "source_file"]
    columns += [f"{_typed(quote(name), seen[f'kind {name}'])} AS {quote(name)}" for name in extra]
    numbers = ", ".join(f"({literal(file)}, {block}L, {shift}L)" for (file, block), shift in places.items())
    query = (
        f"SELECT {', '.join(columns)}, at + shift AS source_line FROM ({kept}) kept JOIN (VALUES {numbers}) AS "
        "places(file, begin, shift) ON source_file = file AND block = begin WHERE NOT blank"
    )
    there = frozenset(name for name in OPTIONAL_COLUMNS if seen[name])
    return query, EventColumns(discrete=discrete, optional=there, extra=extra)


def uri(path: str) -> str:
    """Returns a local path as Spark takes it: with what would be a pattern for several files escaped."""
    return "file://" + "".join(f"\\{one}" if one in "{}[]*?\\" else one for one in path)


def _contract(discrete: bool) -> dict[str, str]:
    """Columns of the events, and as what each is parsed."""
    action, choices = ("VARIANT", _TEXTS) if discrete else (_MAP, f"ARRAY<{_MAP}>")
    return {
        "mdp_id": "VARIANT", "sequence_number": "VARIANT", "ds": "VARIANT", "state_features": _MAP, "action": action,
        "reward": "DOUBLE", "possible_actions": choices, "action_probability": "DOUBLE", "metrics": _MAP,
        "terminal": "VARIANT", "truncated": "VARIANT", "next_state_features": _MAP, "possible_next_actions": choices,
    }  # fmt: skip


def _parsed(discrete: bool, indices: bool, extra: tuple[str, ...]) -> str:
    """Returns the query that parses lines: contract columns, texts and kinds of further ones, fault, bad_id."""
    types = {**_contract(discrete), "propensity": "DOUBLE", **dict.fromkeys(extra, "VARIANT"), _CORRUPT: "STRING"}
    schema = ", ".join(f"{quote(name)} {kind}" for name, kind in types.items())
    # NaN and Infinity are not JSON; no reader here takes them
    options = f"MAP('mode', 'PERMISSIVE', 'columnNameOfCorruptRecord', '{_CORRUPT}', 'allowNonNumericNumbers', 'false')"
    parsed = f"SELECT *, FROM_JSON(value, {literal(schema)}, {options}) AS j FROM json_lines"
    cells = {name: _cell(name, kind) for name, kind in _contract(discrete).items()}
    cells["action_probability"] = propensity(_cell("action_probability", "DOUBLE"), _cell("propensity", "DOUBLE"))
    if discrete and not indices:
        action = "j.action"
        wrong = _wrong("action", action, f"{_kind(action)} = 'STRING'", STRINGS_ALONE)
        cells["action"] = Cell(value=cells["action"].value, faults=wrong)
    faults = [_whole_fault(), *(one for cell in cells.values() for one in cell.faults)]
    bad_ids = [one for cell in cells.values() for one in cell.bad_ids]
    columns = [f"{cell.value} AS {quote(name)}" for name, cell in cells.items()]
    for number, name in enumerate(extra):
        value = f"j.{quote(name)}"
        text = f"CASE WHEN {_kind(value)} IS NOT NULL THEN TO_JSON({value}) END"
        columns += [f"{_kind(value)} AS kind{number}", f"{text} AS {quote(name)}"]
    return (
        f"SELECT source_file, block, at, TRIM(value) = '' AS blank, {', '.join(columns)}, {first_of(faults)} AS fault, "
        f"{first_of(bad_ids)} AS bad_id FROM ({parsed}) parsed"
    )


def _whole_fault() -> str:
    line, corrupt = "TRIM(value)", f"j.{_CORRUPT} IS NOT NULL"
    whole = "COALESCE(SCHEMA_OF_VARIANT(TRY_PARSE_JSON(value)) LIKE 'OBJECT%', FALSE)"
    return first_of([
        fault(f"{line} <> '' AND NOT {whole}", "a JSON object in this line, without a key twice", short(line)),
        fault(corrupt, "values of the columns' types", short(line)),
    ])  # fmt: skip


def _cell(name: str, kind: str) -> Cell:
    value = f"j.{quote(name)}"
    if kind == _MAP:
        read = metrics if name == "metrics" else features
        return read(name, value, f"MAP_ENTRIES({value})")
    if kind == f"ARRAY<{_MAP}>":
        return candidates(name, value, "MAP_ENTRIES(c)")
    if kind == _TEXTS:
        wrong = f"EXISTS({value}, e -> NOT (SCHEMA_OF_VARIANT(e) <=> 'STRING'))"
        found = fault(wrong, f"a list of action names in {name}", short(f"TO_JSON({value})"))
        return Cell(value=f"TRANSFORM({value}, e -> {_get('e', 'string')})", faults=(found,))
    if kind == "DOUBLE":
        return Cell(value=value)
    if name == "sequence_number":
        return _integer(name, value)
    return _flag(name, value) if name in ("terminal", "truncated") else _text(name, value)


def _get(value: str, kind: str) -> str:
    return f"TRY_VARIANT_GET({value}, '$', '{kind}')"


def _kind(value: str) -> str:
    """SQL for the name of a VARIANT's type, without its parameters; null for null."""
    return f"NULLIF(REGEXP_EXTRACT(SCHEMA_OF_VARIANT({value}), '^[A-Z]+', 0), 'VOID')"


def _wrong(name: str, value: str, good: str, expected: str) -> tuple[str]:
    absent = f"{_kind(value)} IS NOT NULL AND NOT COALESCE({good}, FALSE)"
    return (fault(absent, f"{expected} in {name}", short(f"TO_JSON({value})")),)


def _whole(value: str) -> str:
    """SQL that says whether a VARIANT is a number without a fraction that a double holds exactly."""
    number = _get(value, "double")
    return (
        f"({_kind(value)} IN ('DECIMAL', 'DOUBLE') AND {number} = FLOOR({number}) AND ABS({number}) < {_LARGEST_WHOLE})"
    )


def _integer(name: str, value: str) -> Cell:
    good = f"({_kind(value)} = 'BIGINT' OR {_whole(value)})"
    return Cell(
        value=f"CASE WHEN {good} THEN {_get(value, 'bigint')} END", faults=_wrong(name, value, good, "an integer")
    )


def _text(name: str, value: str) -> Cell:
    good = f"({_kind(value)} IN ('STRING', 'BIGINT') OR {_whole(value)})"
    whole = f"CAST({_get(value, 'bigint')} AS STRING)"
    text = f"CASE WHEN {_kind(value)} = 'STRING' THEN {_get(value, 'string')} WHEN {good} THEN {whole} END"
    expected = "the name of an action" if name == "action" else "a string or an integer"
    return Cell(value=text, faults=_wrong(name, value, good, expected))


def _flag(name: str, value: str) -> Cell:
    number = _get(value, "double")
    flag = f"CASE WHEN {_kind(value)} = 'BOOLEAN' THEN {_get(value, 'boolean')} WHEN {number} = 1 THEN TRUE"
    good = f"({_kind(value)} = 'BOOLEAN' OR ({_kind(value)} <> 'STRING' AND {number} IN (0, 1)))"
    return Cell(value=f"{flag} WHEN {number} = 0 THEN FALSE END", faults=_wrong(name, value, good, "true or false"))


def _places(session: SparkSession, kept: str, files: Sequence[InputFile]) -> dict[tuple[str, int], int]:
    """Returns, by file and block, what is added to `at` of a line to give its number in the file."""
    counting = f"SELECT source_file, block, MIN(at), COUNT(*), COUNT_IF(NOT blank) FROM ({kept}) kept GROUP BY 1, 2"
    blocks = sorted(tuple(row) for row in session.sql(counting).collect())
    if not sum(block[4] for block in blocks):
        size = sum(file.size for file in files)
        raise NoRowsError(
            Problem(files[0].path, "rows of data", f"none in {counted(len(files), 'file')}, {counted(size, 'byte')}")
        )
    places = {}
    for _, of_file in groupby(blocks, key=lambda block: block[0]):
        before = 0
        for name, block, first, count, _ in of_file:
            places[name, block] = before + 1 - first
            before += count
    return places


def _seen(
    session: SparkSession, kept: str, files: Sequence[InputFile], extra: tuple[str, ...],
    places: dict[tuple[str, int], int],
) -> dict[str, Any]:  # fmt: skip
    """Returns how often each optional column has a value, and the kinds of values of further columns."""
    wanted = [*REQUIRED, *OPTIONAL_COLUMNS, *(name for name in extra if name not in REQUIRED)]
    counts = ", ".join(f"COUNT({quote(name)})" for name in wanted)
    kinds = "".join(f", COLLECT_SET(kind{number})" for number in range(len(extra)))
    bad = "MIN(STRUCT(source_file, block, at, bad_id)) FILTER (WHERE bad_id IS NOT NULL)"
    query = f"SELECT source_file, COUNT(fault), {counts}{kinds}, {bad} FROM ({kept}) kept GROUP BY source_file"
    total: dict[str, Any] = dict.fromkeys(wanted, 0) | {f"kind {name}": set() for name in extra}
    for file, faults, *values, bad_id in session.sql(query).collect():
        if bad_id is not None:
            where = f"{file}:{bad_id[2] + places[file, bad_id[1]]}"
            raise DataError(Problem(where, "integers as feature ids", repr(bad_id[3])))
        numbers = dict(zip(wanted, values, strict=False))
        missing = [name for name in wanted if name not in OPTIONAL_COLUMNS and not numbers[name]]
        if missing and not faults:
            _require_named(session, file, tuple(one for one in extra if one in missing), missing)
        for name, count in numbers.items():
            total[name] += count
        for name, found in zip(extra, values[len(wanted) :], strict=True):
            total[f"kind {name}"] |= set(found)
    return total


def _require_named(session: SparkSession, file: str, extra: tuple[str, ...], missing: list[str]) -> None:
    """Checks that columns without any value are at least named in a file's lines.

    Raises:
        DataError: naming those that are not.
    """
    keys = f"SELECT DISTINCT EXPLODE(JSON_OBJECT_KEYS(value)) FROM json_lines WHERE source_file = {literal(file)}"
    names = {row[0] for row in session.sql(keys).collect()}
    known = [name for name in REQUIRED if name not in missing]
    Contract(actions=(), events=True, extra=extra).require_columns(sorted({*names, *known}), file)


def _typed(name: str, kinds: set[str]) -> str:
    """SQL for a further column in the type that holds all its kinds of values: of several, JSON text."""
    if kinds == {"STRING"}:
        return f"CAST(PARSE_JSON({name}) AS STRING)"
    types = {_KINDS.get(kind, "STRING") for kind in kinds}
    if types == {"BIGINT", "DOUBLE"}:
        types = {"DOUBLE"}
    return f"CAST({name} AS {types.pop()})" if len(types) == 1 else name
