"""Values as people write them in tables, and the numbers and categories that stand for them.

    2026-01-31 10:30 ─► weekday 5, hour 10        $1,234.50 ─► 1234.5        12 % ─► 0.12
    red|blue         ─► red 1, blue 1, green 0    Mail      ─► mail

A training config says in `columns` which columns are written so. The same functions read them in training, evaluation,
scores, bundles and the server. A value that is read already stays as it is.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date, datetime
from typing import Any, Literal

from reagent_lite.errors import Problem

RawKind = Literal["", "date", "time", "list", "currency", "percent"]
Value = Any
"""A number, the text of a category, or None."""
_SPACES = str.maketrans(dict.fromkeys("\u00a0\u202f\u2009", " ") | {"\u2212": "-", "\u2019": "'"})
_NUMBERS = {
    mark: re.compile(rf"(?:[0-9]{{1,3}}(?:{group}[0-9]{{3}})+|(?:[0-9]+))(?:{re.escape(mark)}[0-9]+)?")
    for mark, group in ((".", "[, ']"), (",", "[. ']"))
}
"""Unsigned numbers by their decimal mark, with or without marks between groups of three digits."""
_MISSING = ("NAType", "NaTType")  # the classes of pandas.NA and pandas.NaT, which is not imported for them
TODO = "Correct the value, leave it out, or say by `map` in columns what it stands for"


@dataclass(frozen=True, slots=True, kw_only=True)
class RawColumn:
    """A column whose values are not read as they are.

    Attributes:
        column: name of the column.
        kind: the kind of its values; "" for other values that `map` replaces.
        format: format of dates and times as of `datetime.strptime`; "" for ISO 8601.
        unit: sign or code of a currency; amounts in another one are refused.
        decimal: decimal mark of amounts and per cent.
        levels: elements of lists that get a feature each.
        separator: sign between the elements of a list that is a text; a text that begins with [ is a list of JSON or as
            Python writes it.
        map: values that stand for others, before they are read.
    """

    column: str
    kind: RawKind = ""
    format: str = ""
    unit: str = ""
    decimal: str = "."
    levels: tuple[str, ...] = ()
    separator: str = "|"
    map: Mapping[str, Value] | None = field(default=None, hash=False)

    @classmethod
    def of(cls, described: Mapping[str, Any]) -> RawColumn:
        """Returns the column that an object of `columns` describes."""
        return cls(**{**described, "levels": tuple(described.get("levels", ()))})

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the features that the column has."""
        if self.kind == "date":
            return (f"{self.column}_weekday",)
        if self.kind == "time":
            return (f"{self.column}_weekday", f"{self.column}_hour")
        if self.kind == "list":
            return tuple(f"{self.column}={level}" for level in self.levels)
        return (self.column,)

    def read(self, value: Any) -> tuple[Value, ...]:
        """Returns the value of each feature; None for all if the value is missing.

        Weekdays are 0 for Monday to 6, hours 0 to 23 as the time is written; per cent are divided by 100.

        Raises:
            ValueError: the value is not of the column's kind; the message says what was expected.
        """
        if self.map:
            value = self.map.get(_key(value), value)
        if value is None or value != value or type(value).__name__ in _MISSING:
            return (None,) * len(self.features)
        return _READERS[self.kind](self, value)


def raw_columns(source: Any) -> tuple[RawColumn, ...]:
    """Returns the columns of a field of `columns` that are not read as they are."""
    sources = source if isinstance(source, list | tuple) else [source]
    return tuple(RawColumn.of(described) for described in sources if isinstance(described, dict))


def read_map(
    columns: Iterable[RawColumn], features: Mapping[Any, Any], where: str
) -> tuple[Mapping[Any, Any], list[Problem]]:
    """Returns (a map of features with those of raw columns in place of these, values that are not of their kind)."""
    raw = [column for column in columns if column.column in features]
    if not raw:
        return features, []
    read = dict(features)
    problems = []
    for column in raw:
        value = read.pop(column.column)
        try:
            read |= dict(zip(column.features, column.read(value), strict=True))
        except ValueError as error:
            problems.append(Problem(f"{where}, column {column.column}", str(error), f"{value!r:.60}", TODO))
    return read, problems


def _key(value: Any) -> str:
    """Returns the text by which a map knows a value."""
    if isinstance(value, str):
        return value
    with suppress(TypeError, ValueError, OverflowError):
        if int(value) == value and not isinstance(value, bool):
            return str(int(value))
    return str(value)


def _as_it_is(column: RawColumn, value: Any) -> tuple[Value, ...]:
    return (value,)


def _date(column: RawColumn, value: Any) -> tuple[Value, ...]:
    return (_day(column, value).weekday(),)


def _time(column: RawColumn, value: Any) -> tuple[Value, ...]:
    day = _day(column, value)
    return day.weekday(), day.hour if isinstance(day, datetime) else None


def _day(column: RawColumn, value: Any) -> date:
    """Returns a day, or a time if the value has one, in the time zone in which it is written."""
    if isinstance(value, date):
        return value
    if isinstance(value, int) and column.format:
        value = str(value)
    expected = (
        f"a date as {column.format}" if column.format else "a date or time such as 2026-01-31 or 2026-01-31T10:30"
    )
    if not isinstance(value, str):
        raise ValueError(expected)
    text = value.strip()
    try:
        if column.format:
            return datetime.strptime(text, column.format)
        return date.fromisoformat(text) if len(text) <= len("2026-01-31") else datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(expected) from None


def _list(column: RawColumn, value: Any) -> tuple[Value, ...]:
    present = {str(element).strip() for element in elements_of(value, column.separator)}
    return tuple(int(level in present) for level in column.levels)


def elements_of(value: Any, separator: str) -> list[Any]:
    """Returns the elements of a list, an array, or a text of one.

    Raises:
        ValueError: the value is none of these; the message says what was expected.
    """
    elements = value
    if isinstance(value, str):
        text = value.strip()
        elements = _written_list(text) if text.startswith("[") else text.split(separator)
    elif hasattr(value, "tolist"):  # an array of NumPy
        elements = value.tolist()
    if not isinstance(elements, list | tuple) or any(isinstance(element, list | dict) for element in elements):
        raise ValueError(f'a list, as ["a", "b"] or a{separator}b')
    return [*elements]


def _written_list(text: str) -> Any:
    """Returns a list that is written in JSON, or as Python and so pandas writes it; None for other text."""
    with suppress(ValueError):
        return json.loads(text)
    with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
        return ast.literal_eval(text)
    return None


def _currency(column: RawColumn, value: Any) -> tuple[Value, ...]:
    if not isinstance(value, str):
        return (value,)
    amount = amount_of(value, column.unit, column.decimal)
    if amount is None:
        raise ValueError(f"an amount such as {_EXAMPLES[column.decimal]} {column.unit}, or a number")
    return (amount,)


def _percent(column: RawColumn, value: Any) -> tuple[Value, ...]:
    if not isinstance(value, str):
        return (value,)
    text = plain_spaces(value)
    number = number_of(text.removesuffix("%").strip(), column.decimal)
    if not text.endswith("%") or number is None:
        raise ValueError(f"per cent such as 12{column.decimal}5 %, or a number")
    return (number / 100,)


_EXAMPLES = {".": "1,234.50", ",": "1.234,50"}
_READERS: dict[str, Callable[[RawColumn, Any], tuple[Value, ...]]] = {
    "": _as_it_is,
    "date": _date,
    "time": _time,
    "list": _list,
    "currency": _currency,
    "percent": _percent,
}


def plain_spaces(text: str) -> str:
    """Returns a number's text with a plain space, minus sign and apostrophe in place of typographic ones."""
    return text.translate(_SPACES).strip()


def number_of(text: str, decimal: str) -> float | None:
    """Returns a number with a sign and marks between groups of three digits; None if the text is no number."""
    text = plain_spaces(text)
    unsigned = text.lstrip("+-")
    if len(text) - len(unsigned) > 1 or not _NUMBERS[decimal].fullmatch(unsigned.strip()):
        return None
    digits = re.sub(f"[^0-9{re.escape(decimal)}]", "", unsigned).replace(decimal, ".")
    return -float(digits) if text.startswith("-") else float(digits)


def amount_of(text: str, unit: str, decimal: str) -> float | None:
    """Returns a number before or after a unit, in parentheses if negative; None if the text is none."""
    words = plain_spaces(text)
    in_parentheses = words.startswith("(") and words.endswith(")")
    words = words[1:-1].strip() if in_parentheses else words
    sign = words[:1] if words[:1] in ("+", "-") else ""
    unsigned = words.removeprefix(sign).strip()
    without = unsigned.removeprefix(unit) if unsigned.startswith(unit) else unsigned.removesuffix(unit)
    number = number_of(without.strip(), decimal)
    if number is None or ((sign or in_parentheses) and without.strip()[:1] in "+-") or (sign and in_parentheses):
        return None
    return -number if in_parentheses or sign == "-" else number
