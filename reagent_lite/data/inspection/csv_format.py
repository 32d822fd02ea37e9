"""How a CSV file is written, found from its first bytes: delimiter, decimal mark, absent cells and encoding."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import pyarrow as pa

from reagent_lite.config.column_names import Decimal
from reagent_lite.data.formats.blocks import InputFile
from reagent_lite.data.formats.csv import NULLS, delimiter_of
from reagent_lite.data.formats.input_files import COMPRESSIONS
from reagent_lite.data.formats.schema import microseconds_of
from reagent_lite.data.rows.block_columns import ANSWERS
from reagent_lite.errors import DataError
from reagent_lite.raw_values import number_of, plain_spaces

_BYTES = 1 << 20
_NULL_WORDS = (
    "na", "n/a", "#n/a", "null", "(null)", "none", "nil", "-", "--", ".", "?", "missing", "k.a.", "n.v."
)  # fmt: skip
_FEW_WORDS = 2
_MARKS: dict[Decimal, re.Pattern[str]] = {
    ",": re.compile(r"[-+]?(?:[0-9]+,(?:[0-9]{1,2}|[0-9]{4,})|0,[0-9]+|[0-9]{1,3}(?:[. '][0-9]{3})+,[0-9]+)"),
    ".": re.compile(r"[-+]?(?:[0-9]+\.(?:[0-9]{1,2}|[0-9]{4,})|0\.[0-9]+|[0-9]{1,3}(?:[, '][0-9]{3})+\.[0-9]+)"),
}
"""Numbers that can have one decimal mark only: 1.234 may be either."""
_WORD = re.compile(r"(?:[^\x00-\x40\x5b-\x60\x7b-\x7f\xa0]){2,}")
"""Two or more letters, or signs beyond ASCII."""
_AROUND_WORDS = "\u20ac\u201c\u201d\u201e\u2018\u2019\u2013\u2014\u2026\u00b0\u00ab\u00bb"
"""Signs that stand before and after words."""
_GROUPS = re.compile(r"[-+]?[0-9]{1,3}(?:[,. '][0-9]{3})+(?:[,.][0-9]+)?")


def csv_format_of(file: InputFile) -> dict[str, Any]:
    """Returns the keys of CsvFormat that a CSV file needs; none for a file in UTF-8 with commas and points.

    The reader reports files that cannot be read.
    """
    try:
        with file.open() as stored:
            compression = COMPRESSIONS.get(file.compression)
            start = (stored if compression is None else pa.CompressedInputStream(stored, compression)).read(_BYTES)
    except (pa.ArrowException, OSError, DataError):
        return {}
    encoding = _encoding_of(start)
    if encoding is None:
        return {}
    text = start.decode(encoding, errors="replace")
    lines = text.splitlines(keepends=True)
    if len(start) == _BYTES:
        lines = lines[:-1]
    delimiter = delimiter_of((lines[0] if lines else "").encode())
    try:
        rows = list(csv.reader(lines, delimiter=delimiter))[1:]
    except csv.Error:
        return {}
    decimal = decimal_of(plain_spaces(cell) for row in rows for cell in row)
    null = _null_words(rows, decimal or ".")
    return {
        **({} if encoding == "utf-8" else {"encoding": encoding}),
        **({} if delimiter == "," else {"delimiter": delimiter}),
        **({} if decimal is None else {"decimal": decimal}),
        **({"null": null} if null else {}),
    }


def _encoding_of(start: bytes) -> str | None:
    """Returns utf-8, utf-16 by its mark, or cp1252 if the text has words as it then has; None for other bytes.

    In cp1251 and other encodings the same bytes are other letters, so that cp1252 would show words of letters with
    accents alone, or signs inside of words.
    """
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "utf-16"
    if b"\0" in start:
        return None
    with suppress(UnicodeDecodeError):
        start[: len(start) - 4 if len(start) == _BYTES else None].decode()  # the last character may be cut
        return "utf-8"
    with suppress(UnicodeDecodeError):
        words = [word.strip(_AROUND_WORDS) for word in _WORD.findall(start.decode("cp1252"))]
        words = [word for word in words if len(word) > 1 and not word.isascii()]
        usual = sum(word.isalpha() and any(map(str.isascii, word)) for word in words)
        if 4 * usual >= 3 * len(words):
            return "cp1252"
    return None


def decimal_of(cells: Iterable[str]) -> Decimal | None:
    """Returns the decimal mark if numbers need it to be named, as they have commas or groups; None if they differ."""
    marks = set[Decimal]()
    grouped = False
    for cell in cells:
        marks |= {mark for mark, number in _MARKS.items() if number.fullmatch(cell)}
        grouped |= bool(_GROUPS.fullmatch(cell)) and any(sign in cell for sign in ", '")
    if len(marks) != 1 or (marks == {"."} and not grouped):
        return None
    return marks.pop()


def _null_words(rows: Iterable[list[str]], decimal: Decimal) -> list[str]:
    """Returns the words for absent values in columns whose other cells are numbers or times.

    These are the usual words, and others that alone stand among numbers, several times, and in no column of texts.
    """
    values = Counter[int]()
    words: dict[int, Counter[str]] = {}
    for row in rows:
        for column, cell in enumerate(row):
            text = cell.strip()
            if not text or cell in NULLS or text.lower() == "nan":
                continue
            if number_of(text, decimal) is not None or _is_number(text) or microseconds_of(text) is not None:
                values[column] += 1
            else:
                words.setdefault(column, Counter())[cell] += 1
    null: dict[int, list[str]] = {}
    texts = set[str]()
    for column, of_column in words.items():
        unusual = {word: rows for word, rows in of_column.items() if word.strip().lower() not in _NULL_WORDS}
        if values[column] and all(_stands_for_none(word, rows) for word, rows in unusual.items()):
            null[column] = (
                [*of_column] if len(unusual) <= _FEW_WORDS and 2 * sum(unusual.values()) < values[column] else []
            )
        if not null.get(column):
            texts |= of_column.keys()
    usual = {word for of_column in null.values() for word in of_column if word.strip().lower() in _NULL_WORDS}
    return list(
        dict.fromkeys(word for of_column in null.values() for word in of_column if word in usual or word not in texts)
    )


def _stands_for_none(word: str, rows: int) -> bool:
    is_answer = word.strip().lower() in ANSWERS
    return rows > 1 and not is_answer and (word.startswith("#") or not any(sign.isdigit() for sign in word))


def _is_number(text: str) -> bool:
    try:
        return text.isascii() and "_" not in text and float(text) == float(text)
    except ValueError:
        return False
