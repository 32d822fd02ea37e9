"""Pieces of Spark's SQL that read one thing from the forms it has in files: values, and what is wrong with them."""

from __future__ import annotations

from dataclasses import dataclass

SOURCE_FILE = "REGEXP_REPLACE(URL_DECODE(REPLACE(_metadata.file_path, '+', '%2B')), '^file:/+', '/') AS source_file"
"""Column of a scan: the path as it was given, from the URL that Spark makes of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One column of the events as it comes from a file.

    Attributes:
        value: SQL of the contract's type.
        faults: SQL of texts, each null where nothing is wrong.
        bad_ids: SQL of texts: a feature id that is no integer, null where there is none.
    """

    value: str
    faults: tuple[str, ...] = ()
    bad_ids: tuple[str, ...] = ()


def quote(name: str) -> str:
    """Returns a quoted identifier."""
    return "`" + name.replace("`", "``") + "`"


def literal(text: str) -> str:
    """Returns a text as SQL."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def short(text: str) -> str:
    """Returns SQL for a text, or its beginning where it is long."""
    return f"CASE WHEN LENGTH({text}) > 60 THEN CONCAT(LEFT({text}, 57), '...') ELSE {text} END"


def fault(condition: str, expected: str, got: str) -> str:
    """Returns SQL for "expected ..., got ..." where a condition is true, else null; `got` is SQL of a text."""
    return f"CASE WHEN {condition} THEN CONCAT({literal(f'expected {expected}, got ')}, COALESCE({got}, 'null')) END"


def features(name: str, value: str, entries: str) -> Cell:
    """Returns the cell of a feature map.

    Args:
        name: of the column.
        value: SQL that is null where there is no map.
        entries: SQL of its entries, structs (key, value) with keys as texts; null and NaN count as absent.
    """
    good = f"FILTER({entries}, e -> {_PRESENT} AND {_IS_ID})"
    made = f"MAP_FROM_ENTRIES(TRANSFORM({good}, e -> {_TYPED}))"
    infinite = f"GET(FILTER({entries}, e -> {_INFINITE}), 0)"
    return Cell(
        value=f"CASE WHEN {value} IS NOT NULL THEN {made} END",
        faults=(fault(f"{value} IS NOT NULL AND {infinite} IS NOT NULL", f"finite numbers in {name}",
                      _got_infinite(infinite)),),
        bad_ids=(f"CASE WHEN {value} IS NOT NULL THEN GET(FILTER({entries}, e -> NOT {_IS_ID}), 0).key END",),
    )  # fmt: skip


def candidates(name: str, value: str, entries_of: str) -> Cell:
    """Returns the cell of a list of feature maps; `entries_of` is SQL of the entries of the list's element c."""
    good = f"FILTER({entries_of}, e -> {_PRESENT} AND {_IS_ID})"
    made = f"MAP_FROM_ENTRIES(TRANSFORM({good}, e -> {_TYPED}))"
    every = f"FLATTEN(TRANSFORM(FILTER({value}, c -> c IS NOT NULL), c -> {entries_of}))"
    infinite = f"GET(FILTER({every}, e -> {_INFINITE}), 0)"
    return Cell(
        value=f"TRANSFORM({value}, c -> CASE WHEN c IS NOT NULL THEN {made} END)",
        faults=(
            fault(f"EXISTS({value}, c -> c IS NULL)", f"an object for every candidate in {name}", "'null'"),
            fault(f"{infinite} IS NOT NULL", f"finite numbers in {name}", _got_infinite(infinite)),
        ),
        bad_ids=(f"GET(FILTER({every}, e -> NOT {_IS_ID}), 0).key",),
    )


def metrics(name: str, value: str, entries: str) -> Cell:
    """Returns the cell of a map of names to numbers; null counts as absent, NaN is a fault."""
    kept = f"FILTER({entries}, e -> e.value IS NOT NULL)"
    made = f"MAP_FROM_ENTRIES(TRANSFORM({kept}, e -> STRUCT(e.key AS key, CAST(e.value AS DOUBLE) AS value)))"
    wrong = f"GET(FILTER({entries}, e -> ISNAN(e.value) OR {_INFINITE}), 0)"
    return Cell(
        value=f"CASE WHEN {value} IS NOT NULL THEN {made} END",
        faults=(fault(f"{value} IS NOT NULL AND {wrong} IS NOT NULL", f"finite numbers in {name}",
                      f"CONCAT(CAST({wrong}.value AS STRING), ' for ', {wrong}.key)"),),
    )  # fmt: skip


def propensity(first: Cell | None, second: Cell | None) -> Cell:
    """Returns the cell of action_probability, which some logs call propensity; both must be alike."""
    there = [one for one in (first, second) if one is not None]
    if not there:
        return Cell(value="CAST(NULL AS DOUBLE)")
    if len(there) == 1:
        return there[0]
    one, other = there[0].value, there[1].value
    got = f"CONCAT(CAST({other} AS STRING), ' and ', CAST({one} AS STRING))"
    differ = fault(f"{one} <> {other}", "propensity and action_probability alike", got)
    return Cell(value=f"COALESCE({one}, {other})", faults=(*there[0].faults, *there[1].faults, differ))


def first_of(texts: list[str]) -> str:
    """Returns SQL for the first text that is not null."""
    return f"COALESCE({', '.join([*texts, 'CAST(NULL AS STRING)'])})"


_INFINITE = "ABS(CAST(e.value AS FLOAT)) = CAST('Infinity' AS FLOAT)"
_PRESENT = "e.value IS NOT NULL AND NOT ISNAN(e.value)"
_IS_ID = (
    "(CAST(TRY_CAST(e.key AS BIGINT) AS STRING) <=> CAST(e.key AS STRING) "
    "AND ABS(TRY_CAST(e.key AS BIGINT)) < 1000000000000000000)"
)
_TYPED = "STRUCT(TRY_CAST(e.key AS BIGINT) AS key, CAST(e.value AS FLOAT) AS value)"


def _got_infinite(entry: str) -> str:
    return f"CONCAT(CASE WHEN {entry}.value > 0 THEN 'inf' ELSE '-inf' END, ' for ', {entry}.key, ' as float32')"
