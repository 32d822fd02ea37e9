"""The columns of a log in its first rows, under the log's own names."""

from __future__ import annotations

import json
import unicodedata
from collections import Counter
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from datetime import date
from decimal import Decimal
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from reagent_lite.categories import MOST_CHARACTERS
from reagent_lite.config.column_names import ONE_VALUE, Columns
from reagent_lite.config.defaults import MOST_LEVELS
from reagent_lite.data.features.column_fits import NUMERAL
from reagent_lite.data.features.feature_types import few_levels
from reagent_lite.data.formats.blocks import InputFile
from reagent_lite.data.formats.csv import json_cell, words_as_texts
from reagent_lite.data.formats.format_table import read_blocks
from reagent_lite.data.formats.schema import is_text, microseconds_of
from reagent_lite.data.inspection.raw_columns import Raw, is_read, raw_column_of
from reagent_lite.data.rows.block_columns import ANSWERS
from reagent_lite.data.rows.column_mapping import OriginalNames, csv_of
from reagent_lite.raw_values import RawColumn

ValueKind = Literal["flag", "integer", "number", "time", "text", "map", "list", "mixed", "empty", "other"]
Values = list[Any]
LARGEST = float(np.finfo(np.float32).max)
_SENTINELS = (99, 999, 9999, 99999, 999999)
_SHARE_OF_LEVELS = 0.9
"""Smallest share of a category's values that get a column of their own."""
_FLAGS = {"true": True, "false": False}
_KINDS: dict[type, ValueKind] = {
    bool: "flag", int: "integer", float: "number", Decimal: "number", date: "time", str: "text", dict: "map",
    list: "list",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class LogColumn:
    """A column of a log.

    Attributes:
        name: name in the log.
        kind: the kind of its values; "mixed" if they are of several kinds.
        values: [n] values of the rows read, None where absent.
        counts: {value as text, in CSV its cell: number of rows}, the most frequent first.
        raw: how its values are written, as `columns` says it, if they are not read as they are; `values` of amounts and
            per cent are numbers.
    """

    name: str
    kind: ValueKind
    values: Values = field(repr=False)
    counts: dict[str, int] = field(repr=False)
    raw: Raw | None = None

    @property
    def present(self) -> list[Any]:
        """Values that are not absent."""
        return [value for value in self.values if value is not None]

    @property
    def share_present(self) -> float:
        """Share of the rows that have a value."""
        return len(self.present) / len(self.values)

    @property
    def distinct(self) -> int:
        """Number of different values."""
        return len(self.counts)

    @property
    def is_number(self) -> bool:
        """Whether values are numbers, or true and false."""
        return self.kind in ("flag", "integer", "number")

    @property
    def is_answers(self) -> bool:
        """Whether values are strings that say yes or no."""
        return self.kind == "text" and all(text.strip().lower() in ANSWERS for text in self.counts)

    @property
    def near_equal(self) -> dict[str, str]:
        """{text: the most frequent text without spare spaces that differs from it in case and spaces only}."""
        first: dict[str, str] = {}
        texts = self.counts if self.kind == "text" else ()
        for text in sorted(texts, key=lambda text: text != " ".join(text.split())):
            first.setdefault(_fold(text), text)
        return {text: first[_fold(text)] for text in self.counts if first.get(_fold(text), text) != text}

    @property
    def sentinel(self) -> float | None:
        """A value such as -999 that is in several rows and far from all others, so that it may mean absent."""
        if self.kind not in ("integer", "number") or not are_finite(self.present):
            return None
        others = {value for value in self.present if abs(value) not in _SENTINELS}
        spread = max(others) - min(others) if len(others) > 1 else 0
        for value in {value for value in self.present if abs(value) in _SENTINELS}:
            gap = min(abs(value - other) for other in (min(others, default=0), max(others, default=0)))
            if spread and gap > spread and self.present.count(value) > 1:
                return float(value)
        return None

    @property
    def is_whole(self) -> bool:
        """Whether values are whole numbers, also in a column with gaps, which pandas writes as 7.0."""
        if self.kind == "integer":
            return True
        return (
            self.kind == "number"
            and are_finite(self.present)
            and all(float(value).is_integer() for value in self.present)
        )

    @property
    def is_numerals(self) -> bool:
        """Whether values are strings that look like numbers or times; strings of digits alone may be codes."""
        return self.kind == "text" and all(
            NUMERAL.fullmatch(text) and not (text.isascii() and text.isdigit()) for text in self.counts
        )

    @property
    def is_category(self) -> bool:
        """Whether values are strings, each in several rows, and nearly all of them are among a few."""
        if self.kind != "text" or self.is_numerals or max(map(len, self.counts)) > MOST_CHARACTERS:
            return False
        of_levels = sum(list(self.counts.values())[:MOST_LEVELS])
        return of_levels >= _SHARE_OF_LEVELS * len(self.present) and 2 * self.distinct <= len(self.present)

    @property
    def note(self) -> str:
        """Advice on a column of categories or whole numbers; "" for others."""
        if self.raw is not None:
            return ""
        if self.is_category:
            levels = f", the {MOST_LEVELS} most frequent" if self.distinct > MOST_LEVELS else ""
            return f"{self.distinct} distinct strings: treated as categories{levels}"
        if not self.is_whole or self.distinct <= 2 or min(self.present) < 0:
            return ""
        if self.distinct <= MOST_LEVELS and few_levels(self.counts.values()):
            return "few distinct integers: treated as categories, unless norm_params.feature_overrides says CONTINUOUS"
        return "integers: treated as a number, unless norm_params.feature_overrides says ENUM"


def first_columns(files: Sequence[InputFile], rows: int, given: Columns) -> tuple[tuple[LogColumn, ...], bool]:
    """Returns the columns of the first rows of files, and whether these are all rows.

    Args:
        files: the files.
        rows: number of rows.
        given: columns that the user named, and the format of CSV files.

    Raises:
        DataError: a file that cannot be read, with file and line.
        NoRowsError: no file has rows.
    """
    plain = tuple(replace(file, columns=OriginalNames(csv_of(given))) for file in files)
    values: dict[str, Values] = {}
    counts: dict[str, Counter[str]] = {}
    read = 0
    whole = True
    with closing(read_blocks(plain, lambda block: block)) as blocks:
        for block in blocks:
            part = block.table.slice(0, rows - read)
            whole = part.num_rows == block.table.num_rows
            for index, field_of_column in enumerate(part.schema if part.num_rows else ()):
                column = values.setdefault(field_of_column.name, [None] * read)
                texts, of_block = _values(part.column(index), field_of_column, cells=block.file.cells)
                column += of_block
                present = (text for text, value in zip(texts, of_block, strict=True) if value is not None)
                counts.setdefault(field_of_column.name, Counter()).update(map(write_value, present))
            read += part.num_rows
            for column in values.values():
                column += [None] * (read - len(column))
            if not whole:
                break
    raw = {described["column"]: described for source in given.values() for described in _describe(source)}
    return tuple(_column(name, values[name], counts[name], raw.get(name)) for name in values), whole


def _describe(source: Any) -> list[Raw]:
    sources = source if isinstance(source, list) else [source]
    return [part for part in sources if isinstance(part, dict) and "column" in part]


def _fold(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _column(name: str, values: Values, counts: Counter[str], given: Raw | None) -> LogColumn:
    raw = given or raw_column_of(name, values, counts)
    if raw is not None and raw.get("kind", "") in ONE_VALUE and is_read(raw, values):
        column = RawColumn.of(raw)
        values = [column.read(value)[0] for value in values]
        counts = Counter(write_value(value) for value in values if value is not None) if column.map else counts
    return LogColumn(name=name, kind=_kind_of_values(values), values=values, counts=dict(counts.most_common()), raw=raw)


def column_of_values(name: str, values: Values) -> LogColumn:
    """Returns the values of a feature in maps as a column; they are read as they are."""
    counts = Counter(write_value(value) for value in values if value is not None)
    return LogColumn(name=name, kind=_kind_of_values(values), values=values, counts=dict(counts.most_common()))


def _kind_of_values(values: Values) -> ValueKind:
    kinds = {_kind(type_) for type_ in set(map(type, values)) - {type(None)}}
    kind: ValueKind = "empty"
    if len(kinds) == 1:
        (kind,) = kinds
    elif kinds == {"integer", "number"}:
        kind = "number"
    elif kinds:
        kind = "mixed"
    if kind == "text" and all(microseconds_of(value) is not None for value in values if value is not None):
        kind = "time"
    return kind


def _kind(of: type) -> ValueKind:
    return next((kind for type_, kind in _KINDS.items() if issubclass(of, type_)), "other")


def write_value(value: Any) -> str:
    """Returns a value as text: the name if it is a named action, else JSON."""
    if type(value) in (int, float):
        return repr(value)
    return str(value) if isinstance(value, str | date) else json.dumps(value, default=str)


def _values(chunks: pa.ChunkedArray, column: pa.Field, *, cells: bool) -> tuple[Values, Values]:
    """Returns (values of a column, or its cells; values as Python has them); NaN is absent, as in training."""
    try:
        values = chunks.to_pylist()
    except (ArithmeticError, ValueError, pa.ArrowException):  # Python has no such value: a time after the year 9999
        return [None] * len(chunks), [None] * len(chunks)
    if pa.types.is_map(column.type):
        values = [
            None if mapping is None else {write_value(key): value for key, value in mapping} for mapping in values
        ]
    read = values
    cells = cells and pa.types.is_string(column.type) and not is_text(column)
    if is_text(column):
        read = [None if value is None else json.loads(value) for value in values]
    elif cells:
        distinct = list({value: None for value in values if value is not None})
        of_cell = dict(zip(distinct, words_as_texts([_cell(cell) for cell in distinct], distinct), strict=True))
        read = [of_cell.get(value) for value in values]
    read = [None if value is None or value != value else _plain(value) for value in read]
    return values if cells else read, read


def _plain(value: Any) -> Any:
    """Parses a text that is a JSON map or list, and removes null members, which Arrow adds to a row's map."""
    if isinstance(value, str) and value.lstrip().startswith(("{", "[")):
        value = json_cell(value)
    return {key: inner for key, inner in value.items() if inner is not None} if isinstance(value, dict) else value


def _cell(value: str) -> Any:
    """Returns the value that a cell of CSV stands for."""
    if value.lower() in _FLAGS:
        return _FLAGS[value.lower()]
    for read in (int, float):
        with suppress(ValueError):
            return read(value) if value.isascii() and "_" not in value else value  # as training reads it
    return value


def are_finite(values: Sequence[Any]) -> bool:
    """Whether all values are numbers that float32 holds."""
    return all(abs(value) < LARGEST for value in values)
