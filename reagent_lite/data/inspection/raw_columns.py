"""Which columns of strings are dates, lists, amounts of money or per cent, and how they are written."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, datetime
from typing import Any

from reagent_lite.data.inspection.csv_format import decimal_of
from reagent_lite.errors import join_names
from reagent_lite.feature_ids import id_of
from reagent_lite.raw_values import RawColumn, elements_of, plain_spaces

Raw = dict[str, Any]
"""An object of `columns`, see RawColumnConfig."""
_DAYS = (
    "%d.%m.%Y", "%d.%m.%y", "%d/%m/%Y", "%m/%d/%Y", "%d/%m/%y", "%m/%d/%y", "%Y/%m/%d", "%d-%m-%Y", "%m-%d-%Y",
    "%d %b %Y", "%d %B %Y", "%d-%b-%Y", "%d-%b-%y", "%b %d, %Y", "%B %d, %Y",
)  # fmt: skip
_HOURS = ("", " %H:%M", " %H:%M:%S", " %I:%M %p", " %I:%M:%S %p")
_COMPACT = "%Y%m%d"
_FIRST_COMPACT = 1900_01_01
_LAST_COMPACT = 2100_12_31
_SEPARATORS = ("|", ";", ",")
_NUMBER = re.compile(r"[0-9](?:[0-9.,' \u00a0\u202f\u2019]*[0-9])?")
_MOST_LISTED = 100
_CODES = (
    "USD", "EUR", "GBP", "JPY", "CHF", "CNY", "INR", "AUD", "CAD", "SEK", "NOK", "DKK", "PLN", "CZK", "HUF", "RON",
    "BGN", "UAH", "TRY", "RUB", "ILS", "AED", "SAR", "ZAR", "BRL", "MXN", "ARS", "CLP", "COP", "KRW", "SGD", "HKD",
    "TWD", "NZD", "THB", "IDR", "MYR", "PHP", "VND", "kr", "kr.", "zł", "Kč", "Ft", "Fr.", "Rs", "Rs.",
)  # fmt: skip
"""Codes of currencies, and signs that are letters."""
_MEASURES = {
    "kg", "g", "mg", "t", "lb", "lbs", "oz", "km", "m", "cm", "mm", "mi", "ft", "in", "yd", "l", "L", "dl", "cl", "ml",
    "gal", "h", "hr", "hrs", "min", "mins", "s", "sec", "ms", "d", "days", "weeks", "months", "years", "kWh", "MWh",
    "kW", "W", "°C", "°F", "K", "km/h", "mph", "kB", "KB", "MB", "GB", "TB", "kcal", "kJ",
}  # fmt: skip
"""Units that may differ in one column."""
_SCALES = ("k", "K", "M", "B", "bn", "mln", "Mio", "Mio.", "Mrd", "Mrd.", "Tsd", "Tsd.", "тыс", "тыс.", "млн", "млн.")
"""Signs that multiply the number before them."""
_WITH_UNIT = re.compile(r"\s*[-+\u2212]?[0-9][0-9.,'\s]*[°µ]?[^\W\d_]+(?:/[^\W\d_]+)?[²³]?\s*")
"""A number and a unit after it."""
_ROWS_OF_LEVEL = 2


def raw_column_of(name: str, values: Sequence[Any], cells: Mapping[str, int]) -> Raw | None:
    """Returns how a column is written, if it is one of dates, lists or amounts; else None.

    Args:
        name: name of the column.
        values: values of its rows, None where absent.
        cells: {value as text, in CSV its cell: number of rows}.
    """
    present = [value for value in values if value is not None]
    kinds = {type(value) for value in present}
    if any(issubclass(kind, date) for kind in kinds):
        raw: Raw | None = {"column": name, "kind": "time" if datetime in {*kinds} else "date"}
    elif kinds == {int}:
        raw = _of_compact_dates(name, present)
    elif list in kinds and kinds <= {list, str} and all(_opens_list(value) for value in present):
        raw = _of_lists(name, present, "")
    elif str in kinds and kinds <= {str, int, float}:
        texts = [*cells]
        raw = _of_dates(name, texts) or _of_amounts(name, texts)
        separator = next((sign for sign in _SEPARATORS if any(sign in text for text in texts)), "")
        if raw is None and kinds == {str} and separator:
            raw = _of_lists(name, present, separator)
        elif raw is None and kinds == {str} and all(map(_opens_list, present)):
            raw = _of_lists(name, present, "")
    else:
        raw = None
    return raw if raw is not None and _has_names(raw) else None


def _has_names(raw: Raw) -> bool:
    try:
        return all(id_of(feature) for feature in RawColumn.of(raw).features)
    except ValueError:
        return False


def is_read(raw: Raw, values: Iterable[Any]) -> bool:
    """Whether all values are of a raw column's kind."""
    column = RawColumn.of(raw)
    try:
        for value in values:
            column.read(value)
    except ValueError:
        return False
    return True


def _of_dates(name: str, texts: Sequence[str]) -> Raw | None:
    """Returns the format of dates; None if strings are no dates, or if days and months can be confused."""
    if not all(text[:1].isalnum() and any(sign.isdigit() for sign in text) for text in map(str.strip, texts)):
        return None
    for kind in ("date", "time"):
        raw = {"column": name, "kind": kind}
        if all(len(text) >= 8 for text in texts) and is_read(raw, texts):
            has_hours = kind == "time" or any(len(text.strip()) > len("2026-01-31") for text in texts)
            return {"column": name, "kind": "time" if has_hours else "date"}
    fitting = [
        raw
        for day in _DAYS
        for hour in _HOURS
        if is_read(raw := {"column": name, "kind": "time" if hour else "date", "format": day + hour}, texts)
    ]
    meanings = {tuple(RawColumn.of(raw).read(text) for text in texts) for raw in fitting}
    return fitting[0] if len(meanings) == 1 else None


def _of_compact_dates(name: str, values: Sequence[int]) -> Raw | None:
    """Returns the format of whole numbers that are all dates, such as 20260131."""
    raw = {"column": name, "kind": "date", "format": _COMPACT}
    are_dates = _FIRST_COMPACT <= min(values) < max(values) <= _LAST_COMPACT
    return raw if are_dates and is_read(raw, values) else None


def _of_amounts(name: str, texts: Sequence[str]) -> Raw | None:
    """Returns the unit of amounts, the same for every number; None if there is none, or another one."""
    numbers = [_NUMBER.search(text) for text in texts]
    units = _units_of(texts) - {""}
    if len(units) != 1:
        return None
    (unit,) = units
    decimal = decimal_of(plain_spaces(number[0]) for number in numbers if number is not None) or "."
    raw = {"column": name, "kind": "percent"} if unit == "%" else {"column": name, "kind": "currency", "unit": unit}
    raw |= {} if decimal == "." else {"decimal": decimal}
    is_unit = unit == "%" or _is_currency(unit) or (unit not in _SCALES and all(map(_WITH_UNIT.fullmatch, texts)))
    return raw if is_unit and is_read(raw, texts) else None


def _units_of(texts: Iterable[str]) -> set[str]:
    """Returns what stands next to the number of each text; empty if a text has no number."""
    if not all(map(_NUMBER.search, texts)):
        return set()
    return {re.sub(r"[-+\u2212()\s]", "", _NUMBER.sub("", text, count=1)) for text in texts}


def _is_currency(unit: str) -> bool:
    return unit in _CODES or any(unicodedata.category(sign) == "Sc" for sign in unit)


def explain_units(texts: Iterable[str]) -> str:
    """Returns why texts that are numbers with units cannot be read as numbers; "" for other texts."""
    units = _units_of(texts) - {""}
    without_sign = {unit: "".join(sign for sign in unit if unicodedata.category(sign) != "Sc") for unit in units}
    scales = sorted(unit for unit, rest in without_sign.items() if rest in _SCALES)
    are_units = all(unit in _MEASURES or _is_currency(unit) or unit in scales or unit == "%" for unit in units)
    if scales and are_units:
        return f"numbers with {join_names(scales)}, which may stand for thousands or millions; write 5000 for 5k"
    if len(units) > 1 and are_units:
        return f"numbers in several units, {join_names(sorted(units))}; write them in one"
    return ""


def _opens_list(value: Any) -> bool:
    return isinstance(value, list) or value.lstrip().startswith("[")


def _of_lists(name: str, values: Sequence[Any], separator: str) -> Raw | None:
    """Returns the elements of lists of a few strings, which are strings with a separator or lists.

    Strings with a comma or a semicolon are lists if these have fewer elements than there are texts: "red,blue" next to
    "blue,red" and "red", but not "Berlin, Germany".
    """
    try:
        lists = [elements_of(value, separator or "|") for value in values]
    except ValueError:
        return None
    if not all(isinstance(element, str) for elements in lists for element in elements):
        return None
    counts = Counter(element.strip() for elements in lists for element in elements)
    counts.pop("", None)
    few = 0 < len(counts) <= _MOST_LISTED and _ROWS_OF_LEVEL * len(counts) <= counts.total()
    if separator in (",", ";"):
        few = few and len(counts) < len({*values} - {""})
    sign = {"separator": separator} if separator in (",", ";") else {}
    return {"column": name, "kind": "list", "levels": sorted(counts), **sign} if few else None
