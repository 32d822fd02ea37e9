"""Feature ids: integers, as in ReAgent 2019, or names.

A log may call a feature `3` or `age`. The id of a name is a hash of the name, so that files, machines and executors
agree without a table. Code computes with integers; an id that has a name is shown and written as the name.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

_ID = re.compile(r"0|-?[1-9][0-9]{0,17}")
_NAME = re.compile(r"[^\W\d][^\x00-\x1f\x7f]{0,99}")
_LIST_COLUMN = re.compile(r"\[[0-9]+\]( score)?$")
EXPECTED = "as a feature id an integer of at most 18 digits or a name that begins with a letter"


class FeatureId(int):
    """An id with a name: equal to an int, and its string is the name.

    Attributes:
        name: name of the feature in the log.
    """

    name: str

    def __new__(cls, name: str) -> FeatureId:
        """Returns the id of a name."""
        # 56 bits: at most 17 digits, fewer than an id without a name may have
        self = super().__new__(cls, int.from_bytes(hashlib.sha256(name.encode()).digest()[:7]))
        self.name = name
        return self

    def __getnewargs__(self) -> tuple[str]:  # type: ignore[override] # the arguments of copy and pickle to __new__
        return (self.name,)

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return repr(self.name)


def id_of(key: str | int) -> int:
    """Returns the id of a key in a feature map or in a normalization file.

    Raises:
        ValueError: the key is neither an id nor a name; the message is EXPECTED.
    """
    if isinstance(key, int) or _ID.fullmatch(key):
        return key if isinstance(key, FeatureId) else int(key)
    if not _NAME.fullmatch(key):
        raise ValueError(EXPECTED)
    return FeatureId(key)


def write_ids(ids: Iterable[int]) -> list[str | int]:
    """Returns ids for JSON: names as strings, other ids as integers."""
    return [feature.name if isinstance(feature, FeatureId) else int(feature) for feature in ids]


def read(keys: object) -> tuple[int, ...]:
    """Returns the ids of a list from `write_ids`; raises ValueError for anything else."""
    if not isinstance(keys, list) or not all(type(key) in (int, str) for key in keys):
        raise ValueError("expected a list of ids and names")
    ids = tuple(id_of(key) for key in keys)
    if write_ids(ids) != keys:
        raise ValueError("expected ids as integers and names as strings")
    return ids


def list_columns(feature: int, length: int, *, scores: bool = False) -> tuple[int, ...]:
    """Returns the ids of the columns of a feature that has up to `length` ids, and with `scores` as many scores.

    A single id without a score has the feature's own column.
    """
    if length == 1 and not scores:
        return (feature,)
    name = str(feature) if isinstance(feature, FeatureId) else f"feature {feature}"
    ids = tuple(FeatureId(f"{name}[{index}]") for index in range(length))
    return ids + tuple(FeatureId(f"{name}[{index}] score") for index in range(length if scores else 0))


def is_list_column(feature: int) -> bool:
    """Whether a column is one of several of a feature, as `list_columns` names them."""
    return isinstance(feature, FeatureId) and bool(_LIST_COLUMN.search(feature.name))
