"""Items by id: their features, and the file of an exported model that contains them.

data.items ─► ItemTable ─┬─► features in place of the ids in a log
                         └─► items.json of the exported model ─► features in place of the ids in requests

numpy only: an environment that loads an exported model has no Arrow.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from reagent_lite.errors import Problem, join_names
from reagent_lite.feature_ids import is_list_column, read, write_ids

ITEMS_FILE: Final = "items.json"
UNKNOWN: Final = -1
"""Row of an unknown id."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ItemTable:
    """N items with F features each; no value is missing, except that lists of ids have different lengths.

    Attributes:
        ids: [N], each once, in the order of the table.
        feature_ids: [F], ascending.
        values: [N, F] float32; strings are their codes (categories.py).
        texts: {id of a feature whose values are texts: {code: text}}; empty in a table read from ITEMS_FILE, which has
            codes only.
        all_possible: whether rows of a log that list no possible actions offer every item.
    """

    ids: tuple[str, ...]
    feature_ids: tuple[int, ...]
    values: NDArray[np.float32]
    texts: Mapping[int, Mapping[float, str]] = field(default_factory=dict)
    all_possible: bool = False

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def sha256(self) -> str:
        """sha256 of ITEMS_FILE, which depends on ids, features and values but not on the format of the table."""
        return hashlib.sha256(self.json()).hexdigest()

    @cached_property
    def _row_of(self) -> dict[str | None, int]:
        return {name: row for row, name in enumerate(self.ids)}

    def rows(self, ids: Iterable[object]) -> NDArray[np.int64]:
        """Returns the row of each id, or UNKNOWN; an integer is the text of its digits."""
        row_of = self._row_of
        return np.fromiter((row_of.get(id_text(item), UNKNOWN) for item in ids), np.int64)

    def align(self, feature_ids: Sequence[int]) -> NDArray[np.float32]:
        """Returns features [N, F] in the order of `feature_ids`; the table must have all of them, see `lacking`."""
        return self.values[:, [self.feature_ids.index(feature) for feature in feature_ids]]

    def lacking(self, feature_ids: Iterable[int], where: str) -> list[Problem]:
        """Returns a problem for each feature that the model reads and the table lacks; `where` names the table."""
        got = f"features {join_names(self.feature_ids)}"
        return [
            Problem(where, f"the item feature {feature}, which the model reads", got, "Add its column to the table")
            for feature in feature_ids
            if feature not in self.feature_ids
        ]

    def json(self) -> bytes:
        """Returns the bytes of ITEMS_FILE."""
        document = {
            "feature_ids": write_ids(self.feature_ids),
            "ids": self.ids,
            "values": [[None if value != value else value for value in row] for row in self.values.tolist()],
        }
        return json.dumps(document, allow_nan=False, separators=(",", ":")).encode() + b"\n"

    @classmethod
    def of_json(cls, data: bytes) -> ItemTable:
        """Returns the table of ITEMS_FILE.

        Raises:
            ValueError: bytes that `json` does not write.
        """
        document: Any = json.loads(data)
        if not isinstance(document, dict) or document.keys() != {"feature_ids", "ids", "values"}:
            raise ValueError("expected feature_ids, ids and values")
        ids = document["ids"]
        if not isinstance(ids, list) or not all(isinstance(item, str) for item in ids) or len(set(ids)) < len(ids):
            raise ValueError("expected ids as strings, each once")
        feature_ids = read(document["feature_ids"])
        values = np.array(document["values"], np.float32)
        optional = [is_list_column(feature) for feature in feature_ids]
        if (
            values.shape != (len(ids), len(feature_ids))
            or not (np.isfinite(values) | (np.isnan(values) & optional)).all()
        ):
            raise ValueError(f"expected a finite number for each of {len(ids)} items and {len(feature_ids)} features")
        return cls(ids=tuple(ids), feature_ids=feature_ids, values=values)


def id_text(value: object) -> str | None:
    """Returns an id as text, an integer as its digits; None for anything else."""
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return str(int(value))
    return None


def are_ids(values: object) -> bool:
    """Whether the choices of a row are ids rather than features."""
    if isinstance(values, np.ndarray):
        return values.ndim == 1 and values.dtype.kind in "iuUO" and are_ids(values.tolist())
    return isinstance(values, Sequence) and len(values) > 0 and id_text(values[0]) is not None
