"""The words in which engines differ, side by side; what they mean is said in engine.Dialect."""

from __future__ import annotations

from reagent_lite.data.timeline.spark_sql import literal, quote


class DuckDBDialect:
    """DuckDB's words."""

    types = {
        "text": "VARCHAR", "integer": "BIGINT", "number": "DOUBLE", "single": "FLOAT", "flag": "BOOLEAN",
        "features": "MAP(BIGINT, FLOAT)", "named": "MAP(VARCHAR, DOUBLE)", "names": "VARCHAR[]",
        "candidates": "MAP(BIGINT, FLOAT)[]",
    }  # fmt: skip

    def quote(self, name: str) -> str:
        """Returns a quoted identifier."""
        return '"' + name.replace('"', '""') + '"'

    def literal(self, value: str | float) -> str:
        """Returns a text or a number as SQL."""
        if isinstance(value, str):
            return "'" + value.replace("'", "''") + "'"
        return f"CAST('{value!r}' AS DOUBLE)"

    def hash32(self, text: str, number: int) -> str:
        """Returns SQL for four bytes of md5(text)."""
        return f"CAST(CONCAT('0x', SUBSTR(MD5({text}), {8 * number + 1}, 8)) AS BIGINT)"

    def entries(self, column: str, relation: str) -> str:
        """Returns a query for (k, v)."""
        return f"SELECT UNNEST(MAP_KEYS({column})) AS k, UNNEST(MAP_VALUES({column})) AS v FROM {relation}"

    def elements(self, column: str, relation: str) -> str:
        """Returns a query for e."""
        return f"SELECT UNNEST({column}) AS e FROM {relation}"

    def holds(self, names: str, name: str) -> str:
        """Returns SQL for membership."""
        return f"LIST_CONTAINS({names}, {name})"

    def holds_features(self, candidates: str, features: str) -> str:
        """Returns SQL for membership; to DuckDB maps are equal whose entries stand in the same order."""
        entries = "LIST_SORT(MAP_ENTRIES({}))".format
        sorted_too = f"LIST_CONTAINS(LIST_TRANSFORM({candidates}, LAMBDA c: {entries('c')}), {entries(features)})"
        return f"LIST_CONTAINS({candidates}, {features}) OR {sorted_too}"

    def length(self, elements: str) -> str:
        """Returns SQL for the length of a list."""
        return f"LEN({elements})"

    def list_of(self, element: str) -> str:
        """Returns SQL for a list of one."""
        return f"[{element}]"

    def infinite(self, number: str) -> str:
        """Returns SQL for not finite."""
        return f"NOT ISFINITE({number})"

    def any_infinite(self, features: str) -> str:
        """Returns SQL for an infinite value in a map."""
        return f"LEN(LIST_FILTER(MAP_VALUES({features}), LAMBDA v: ISINF(v))) > 0"

    def any_not_finite(self, numbers: str) -> str:
        """Returns SQL for NaN or an infinite value in a map."""
        return f"LEN(LIST_FILTER(MAP_VALUES({numbers}), LAMBDA v: NOT ISFINITE(v))) > 0"

    def empty(self, like: str) -> str:
        """Returns SQL for an empty list of a column's type."""
        return f"{like}[1:0]"

    def value_of(self, named: str, key: str) -> str:
        """Returns SQL for a value of a map."""
        return f"{named}[{self.literal(key)}]"

    def map_of(self, values: dict[str, str]) -> str:
        """Returns SQL for a map without nulls."""
        entries = ", ".join(f"{{'k': {self.literal(name)}, 'v': {value}}}" for name, value in values.items())
        kept = f"LIST_FILTER([{entries}], LAMBDA e: e.v IS NOT NULL)"
        return f"CASE WHEN LEN({kept}) > 0 THEN MAP_FROM_ENTRIES({kept}) END" if values else "NULL"

    def in_doubt(self) -> str:
        """Returns SQL that orders rows by file and line."""
        return "source_file, source_line"


class SparkDialect:
    """Spark's words."""

    types = {
        "text": "STRING", "integer": "BIGINT", "number": "DOUBLE", "single": "FLOAT", "flag": "BOOLEAN",
        "features": "MAP<BIGINT, FLOAT>", "named": "MAP<STRING, DOUBLE>", "names": "ARRAY<STRING>",
        "candidates": "ARRAY<MAP<BIGINT, FLOAT>>",
    }  # fmt: skip

    def quote(self, name: str) -> str:
        """Returns a quoted identifier."""
        return quote(name)

    def literal(self, value: str | float) -> str:
        """Returns a text or a number as SQL."""
        return literal(value) if isinstance(value, str) else f"CAST('{value!r}' AS DOUBLE)"

    def hash32(self, text: str, number: int) -> str:
        """Returns SQL for four bytes of md5(text)."""
        return f"CAST(CONV(SUBSTR(MD5(CAST({text} AS BINARY)), {8 * number + 1}, 8), 16, 10) AS BIGINT)"

    def entries(self, column: str, relation: str) -> str:
        """Returns a query for (k, v)."""
        return f"SELECT EXPLODE({column}) AS (k, v) FROM {relation}"

    def elements(self, column: str, relation: str) -> str:
        """Returns a query for e."""
        return f"SELECT EXPLODE({column}) AS e FROM {relation}"

    def holds(self, names: str, name: str) -> str:
        """Returns SQL for membership."""
        return f"ARRAY_CONTAINS({names}, {name})"

    def holds_features(self, candidates: str, features: str) -> str:
        """Returns SQL for membership; Spark does not compare maps."""
        entries = "ARRAY_SORT(MAP_ENTRIES({}))".format
        return f"ARRAY_CONTAINS(TRANSFORM({candidates}, c -> {entries('c')}), {entries(features)})"

    def length(self, elements: str) -> str:
        """Returns SQL for the length of a list."""
        return f"SIZE({elements})"

    def list_of(self, element: str) -> str:
        """Returns SQL for a list of one."""
        return f"ARRAY({element})"

    def infinite(self, number: str) -> str:
        """Returns SQL for not finite."""
        return f"(ISNAN({number}) OR ABS({number}) = CAST('Infinity' AS DOUBLE))"

    def any_infinite(self, features: str) -> str:
        """Returns SQL for an infinite value in a map."""
        return f"EXISTS(MAP_VALUES({features}), v -> ABS(v) = CAST('Infinity' AS FLOAT))"

    def any_not_finite(self, numbers: str) -> str:
        """Returns SQL for NaN or an infinite value in a map."""
        return f"EXISTS(MAP_VALUES({numbers}), v -> ISNAN(v) OR ABS(v) = CAST('Infinity' AS DOUBLE))"

    def empty(self, like: str) -> str:
        """Returns SQL for an empty list of a column's type."""
        return f"SLICE({like}, 1, 0)"

    def value_of(self, named: str, key: str) -> str:
        """Returns SQL for a value of a map."""
        return f"TRY_ELEMENT_AT({named}, {literal(key)})"

    def map_of(self, values: dict[str, str]) -> str:
        """Returns SQL for a map without nulls."""
        entries = ", ".join(f"NAMED_STRUCT('k', {literal(name)}, 'v', {value})" for name, value in values.items())
        kept = f"FILTER(ARRAY({entries}), e -> e.v IS NOT NULL)"
        return f"CASE WHEN SIZE({kept}) > 0 THEN MAP_FROM_ENTRIES({kept}) END" if values else "NULL"

    def in_doubt(self) -> str:
        """Returns SQL that orders rows by file and line."""
        return "source_file, source_line"
