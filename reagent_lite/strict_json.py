"""Strict JSON: no duplicate keys, no NaN, no lone surrogates, at most 100 levels."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NoReturn

MAX_DEPTH = 100
"""Largest depth of nested objects and lists; the recursive parsers of Python and pydantic fail at a few hundred."""
_STRING = re.compile(rb'"(?:[^"\\]|\\.?)*+"?', re.DOTALL)
_BRACKETS = re.compile(rb"[^][}{]+")


def parse_json(text: bytes, *, nan: bool = False) -> Any:
    """Returns the value of a JSON text; `nan`: whether it may have NaN, which many clients write for a missing number.

    Raises:
        ValueError: the text is not JSON or not UTF-8, an object has a key twice, there are more than MAX_DEPTH levels,
            an integer is beyond the range of float64, or a string has a lone surrogate.
    """
    if is_deep(text):
        raise ValueError(f"more than {MAX_DEPTH} nested objects and lists")
    try:
        value = (_WITH_NAN if nan else _STRICT).decode(text.decode())
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at character {error.pos + 1}") from None
    if b"\\u" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start].encode("ascii", "backslashreplace").decode()
            raise ValueError(f"{half}, which is half of a character") from None
    return value


def is_deep(text: bytes) -> bool:
    """Whether a text has more than MAX_DEPTH levels; it is not parsed, and may be invalid JSON."""
    if text.count(b"[") + text.count(b"{") <= MAX_DEPTH:
        return False
    level = 0
    for bracket in _BRACKETS.sub(b"", _STRING.sub(b"", text)):
        level += 1 if bracket in b"[{" else -1
        if level > MAX_DEPTH:
            return True
    return False


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the object of these pairs, for json.loads; raises ValueError for a duplicate key."""
    document = dict(pairs)
    if len(document) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} twice in one object")
    return document


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name}, which JSON does not have")


def _nan(name: str) -> float:
    return float("nan") if name == "NaN" else _refuse_constant(name)


def _bounded_integer(digits: str) -> int:
    if len(digits) > 309:
        raise ValueError(f"an integer of {len(digits)} digits")
    return int(digits)


def _decoder(parse_constant: Callable[[str], float]) -> json.JSONDecoder:
    return json.JSONDecoder(object_pairs_hook=unique_keys, parse_constant=parse_constant, parse_int=_bounded_integer)


_STRICT = _decoder(_refuse_constant)
_WITH_NAN = _decoder(_nan)
