"""Which features have ids, lists of ids or ids with scores, and the vectors that a config gives them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reagent_lite.config.defaults import MOST_LEVELS
from reagent_lite.data.inspection.log_columns import LogColumn, column_of_values
from reagent_lite.errors import pluralize
from reagent_lite.feature_ids import id_of
from reagent_lite.id_values import IdFeature

_EPISODES_OF_ID = 5
_SHARE_OF_VALUES = 0.5
_LONGEST = 50
_SHARE_IN_TABLE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class IdColumn:
    """The ids of a feature in the rows of a log.

    Attributes:
        name: the feature.
        episodes: {id: number of episodes that have it}.
        lengths: number of ids of each value that is a list or a map; none if values are single ids.
        scores: whether each id has a score.
        recurring: share of the values whose id is in several episodes, so that its vector can be learned.
    """

    name: str
    episodes: Mapping[str, int]
    lengths: Sequence[int]
    scores: bool
    recurring: float

    @property
    def is_learnable(self) -> bool:
        """Whether most values have an id that recurs."""
        return self.recurring >= _SHARE_OF_VALUES

    @property
    def has_few(self) -> bool:
        """Whether values are single ids of which a column each is better than a vector."""
        return not self.lengths and len(self.episodes) <= MOST_LEVELS

    @property
    def section(self) -> dict[str, Any]:
        """The feature's settings in `data.embeddings`."""
        length = {"length": min(max(2, *self.lengths), _LONGEST)} if self.lengths else {}
        return length | ({"scores": True, "pooling": "sum"} if self.scores else {})

    def describe(self) -> str:
        """Returns the counts of its ids and values in words."""
        ids = pluralize(len(self.episodes), "id")
        if not self.lengths:
            return ids
        values = "ids with scores, " if self.scores else ""
        lists = f"{min(self.lengths):,} to {max(self.lengths):,} of {ids} in a row"
        cut = sum(length > _LONGEST for length in self.lengths)
        return f"{values}{lists}" + (
            f", the first {_LONGEST} of which are read in {pluralize(cut, 'row')}" if cut else ""
        )


def id_column_of(column: LogColumn, episodes: Sequence[Any]) -> IdColumn | None:
    """Returns the ids of a column; None if its values are none, or are vectors.

    Args:
        column: the column.
        episodes: [n] the episode of each row.
    """
    kind = column.kind
    present = column.present
    if kind not in ("text", "integer", "number", "list", "map") or not present:
        return None
    several = kind in ("list", "map")
    scores = kind == "map" or (several and any(isinstance(each, dict) for value in present for each in value))
    try:
        feature = IdFeature(id_of(column.name), _LONGEST if several else 1, scores)
        ids = [feature.read(value)[0] for value in column.values]
    except ValueError:
        return None
    of_values = [read for read, value in zip(ids, column.values, strict=True) if value is not None]
    if several and _are_vectors(of_values, present):
        return None
    pairs = {(name, episode) for of_row, episode in zip(ids, episodes, strict=True) for name in of_row}
    counts = Counter(name for name, _ in pairs)
    total = sum(map(len, ids))
    recurring = sum(counts[name] >= _EPISODES_OF_ID for of_row in ids for name in of_row)
    return IdColumn(
        name=column.name,
        episodes=counts,
        lengths=[len(of_row) for of_row in of_values] if several else (),
        scores=scores,
        recurring=recurring / total if total else 0.0,
    )


def _are_vectors(ids: Sequence[Sequence[str]], values: Sequence[Any]) -> bool:
    """Whether values are maps with the same keys in all rows, or lists of as many numbers in all rows."""
    if isinstance(values[0], dict):
        return all(set(of_row) == set(ids[0]) for of_row in ids)
    numbers = all(isinstance(element, int) for value in values for element in value)
    return numbers and len(values) > 1 and len({len(of_row) for of_row in ids}) == 1


def columns_of_maps(maps: Sequence[Any]) -> Iterator[LogColumn]:
    """Yields the features in maps {feature: value} as columns; rows without a map have no value."""
    names = {name: None for of_row in maps if isinstance(of_row, dict) for name in of_row}
    for name in names:
        values = [of_row.get(name) if isinstance(of_row, dict) else None for of_row in maps]
        yield column_of_values(name, values)


def embeddings_of(columns: Collection[IdColumn]) -> dict[str, dict[str, Any]]:
    """Returns `data.embeddings` of features; those that share ids share a table."""
    sections: dict[str, dict[str, Any]] = {}
    firsts: list[IdColumn] = []
    for column in columns:
        sections[column.name] = column.section
        first = next((other for other in firsts if share_ids(column, other)), None)
        if first is None:
            firsts.append(column)
            continue
        for name in (first.name, column.name):
            sections[name] |= {"table": first.name}
    return sections


def share_ids(column: IdColumn, other: IdColumn) -> bool:
    """Whether at least half of the ids of the column with fewer ids are ids of the other.

    Ids that are all digits are not compared: numbers of users and of items are different ids.
    """
    smaller, larger = sorted((column.episodes.keys(), other.episodes.keys()), key=len)
    if not smaller or all(name.isdigit() for name in smaller):
        return False
    return len(smaller & larger) >= _SHARE_IN_TABLE * len(smaller)
