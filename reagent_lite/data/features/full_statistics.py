"""Statistics of every feature over all rows in one pass, and a sample of the rows for what needs sorting.

    files ─► blocks ─► states, candidates ─► in threads: moments, least, largest, whole, few distinct ─┐
                            │                                                    merged in their order ─┴─► Summary
                            └─► rows of least hash ─► sample ──────────────────────────────────────────────┘

Counts, least and largest values and distinct values are exact. Mean and squares are float64 sums merged by Chan: they
do not depend on threads, and in the last digits only on where blocks end. The sample depends on the rows alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from reagent_lite.data.features.hash_sample import Hashes, HashSample, Sample, row_hashes
from reagent_lite.data.features.normalization import MISSING
from reagent_lite.data.features.statistics import SMALLEST_STDDEV, Floats, Moments
from reagent_lite.data.formats.blocks import Block, Position
from reagent_lite.data.formats.files import InputFile
from reagent_lite.data.formats.reading import read_blocks
from reagent_lite.data.formats.schema import MAX_PROBLEMS, nearest, valid_rows
from reagent_lite.data.rows.columns import (
    Column,
    Faults,
    Mask,
    column_of,
    is_number,
    is_string,
    pieces,
)
from reagent_lite.data.rows.named import named_numbers
from reagent_lite.data.rows.parametric import aligned
from reagent_lite.data.rows.transitions import FeatureMatrix, feature_matrix
from reagent_lite.errors import DataError, Problem, counted

STATE, ACTION = "state_features", "action"
_COPIED_COLUMNS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureSummary:
    """The present values of one feature in all rows.

    Attributes:
        moments: count, mean, squares.
        low, high: least and largest; inf and -inf where there are none.
        whole: whether all are integers.
        distinct: the distinct values ascending, None where there are more than were wanted.
    """

    moments: Moments
    low: float
    high: float
    whole: bool
    distinct: Floats | None

    @classmethod
    def of(cls, values: NDArray[np.float32], most_distinct: int) -> Self:
        """Returns the summary of raw values [n], NaN and the missing value left out; 0 distinct values: not wanted."""
        present = values[~np.isnan(values) & (values != MISSING)]
        few = np.unique(present).astype(np.float64) if most_distinct else None
        return cls(
            moments=Moments.of(present.astype(np.float64)),
            low=float(present.min(initial=np.inf)),
            high=float(present.max(initial=-np.inf)),
            whole=bool((present == np.floor(present)).all()),
            distinct=few if few is not None and len(few) <= most_distinct else None,
        )

    def merge(self, other: Self, most_distinct: int) -> Self:
        """Returns the summary of both parts together."""
        both = None
        if self.distinct is not None and other.distinct is not None:
            both = np.union1d(self.distinct, other.distinct)
        return replace(
            self,
            moments=self.moments.merge(other.moments),
            low=min(self.low, other.low),
            high=max(self.high, other.high),
            whole=self.whole and other.whole,
            distinct=both if both is not None and len(both) <= most_distinct else None,
        )

    @property
    def is_constant(self) -> bool:
        """Whether all are one value, or too close together for a float32 standard deviation."""
        return self.low == self.high or self.moments.stddev < SMALLEST_STDDEV


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnSummary:
    """The features of states, or of candidates as often as rows list them.

    Attributes:
        rows: rows or candidates.
        features: by id, ascending.
        sample: of rows or candidates.
    """

    rows: int
    features: dict[int, FeatureSummary]
    sample: Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a data set's features are.

    Attributes:
        rows: of the data.
        parametric: whether actions are candidates with features.
        columns: "state_features" and, of parametric rows, "action"; those that were wanted.
        rows_by_position: rows without mdp_id or sequence_number, whose place in the sample depends on their position.
        hashes: sha256 of each file.
    """

    rows: int
    parametric: bool
    columns: dict[str, ColumnSummary]
    rows_by_position: int
    hashes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a pass over the data looks for.

    Attributes:
        columns: "state_features", "action" or both.
        parametric: None takes it from the action column.
        num_samples: rows, and candidates, of the sample.
        most_distinct: distinct values to keep of a feature.
        seed: of the sample.
    """

    columns: tuple[str, ...]
    parametric: bool | None
    num_samples: int
    most_distinct: int
    seed: int


def summarize(
    files: tuple[InputFile, ...], wanted: Wanted, progress: Callable[[int, int], None] | None = None
) -> Summary:
    """Reads all rows once and returns what their features are.

    Args:
        files: events, transitions, or whatever else has a column state_features.
        wanted: which columns, and how much of them.
        progress: called with (bytes read, bytes in all).

    Raises:
        DataError: with file and line: no state_features, infinite values, ids that are no integers (20 faults, and how
            many there are in all); no rows; actions of two kinds.
    """
    reading = _Reading(wanted)
    positions = [Position() for _ in files]
    for part in read_blocks(files, reading.read, positions, progress):
        reading.add(part)
    reading.require_no_fault(files[0].path)
    return reading.finish(tuple(position.sha256 for position in positions))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One column of a block: its summaries, and those of its rows that may be in the sample."""

    rows: int
    features: dict[int, FeatureSummary]
    hashes: Hashes
    sampled: FeatureMatrix


@dataclass(frozen=True, slots=True, kw_only=True)
class _BlockParts:
    where: str
    rows: int
    rows_by_position: int
    parametric: bool | None
    columns: dict[str, _Part]
    problems: Sequence[Problem]
    num_faults: int


@dataclass(slots=True)
class _Tally:
    """The parts of a column so far; `many` are the ids with more distinct values than wanted."""

    sample: HashSample
    rows: int = 0
    features: dict[int, FeatureSummary] = field(default_factory=dict)
    many: set[int] = field(default_factory=set)


class _Reading:
    """`read` runs in threads and looks at the tallies only to save work; `add` is called in the order of the blocks."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._tallies = {name: _Tally(HashSample(wanted.num_samples)) for name in (STATE, ACTION)}
        self._parametric = wanted.parametric
        self._rows = self._rows_by_position = self._num_faults = 0
        self._problems: list[Problem] = []

    def read(self, block: Block) -> _BlockParts:
        faults, parts = Faults(block), {}
        rows = block.table.num_rows
        hashes, by_position, kind = np.empty(0, np.uint64), 0, None
        if rows:
            hashes, by_position = row_hashes(block, faults, self._wanted.seed)
            kind = self._wanted.parametric if self._wanted.parametric is not None else _has_features(block)
        if rows and STATE in self._wanted.columns:
            parts[STATE] = self._part(STATE, _states(block, faults), hashes, faults)
        if rows and kind and ACTION in self._wanted.columns:
            listed, features = candidates(block, faults)
            parts[ACTION] = self._part(ACTION, features, hashes[listed], faults)
        return _BlockParts(
            where=block.where(0) if rows else block.file.path, rows=rows, rows_by_position=by_position,
            parametric=kind, columns=parts, problems=faults.first(), num_faults=faults.count,
        )  # fmt: skip

    def _part(self, name: str, matrix: FeatureMatrix, hashes: Hashes, faults: Faults) -> _Part:
        tally = self._tallies[name]
        features = {}
        if not faults.count:
            for one, values in _columns(matrix):
                features[one] = FeatureSummary.of(values, 0 if one in tally.many else self._wanted.most_distinct)
        kept = tally.sample.wanted(hashes)
        sampled = FeatureMatrix(matrix.ids, matrix.values[kept])
        return _Part(rows=len(matrix.values), features=features, hashes=hashes[kept], sampled=sampled)

    def add(self, part: _BlockParts) -> None:
        self._rows += part.rows
        self._rows_by_position += part.rows_by_position
        self._num_faults += part.num_faults
        self._problems += part.problems[: MAX_PROBLEMS - len(self._problems)]
        if part.parametric is not None:
            if self._parametric is not None and self._parametric != part.parametric:
                kinds = ("names", "objects {id: number}")
                raise DataError(Problem(part.where, f"actions that are {kinds[self._parametric]}, as before",
                                        f"actions that are {kinds[part.parametric]}"))  # fmt: skip
            self._parametric = part.parametric
        if self._num_faults:
            return
        for name, column in part.columns.items():
            self._merge(self._tallies[name], column)

    def _merge(self, tally: _Tally, column: _Part) -> None:
        most = self._wanted.most_distinct
        tally.rows += column.rows
        tally.sample.add(column.hashes, column.sampled)
        for one, summary in column.features.items():
            merged = tally.features[one].merge(summary, most) if one in tally.features else summary
            tally.features[one] = merged
            if merged.distinct is None:
                tally.many.add(one)

    def require_no_fault(self, where: str) -> None:
        if not self._num_faults:
            return
        more = self._num_faults - len(self._problems)
        total = Problem(
            where, "rows without fault", f"{counted(self._num_faults, 'row')} with one, {more:,} more than shown"
        )
        raise DataError([*self._problems, *([total] if more else [])])

    def finish(self, hashes: tuple[str, ...]) -> Summary:
        names = [STATE, ACTION] if self._parametric else [STATE]
        columns = {}
        for name in names:
            if name in self._wanted.columns:
                tally = self._tallies[name]
                features = dict(sorted(tally.features.items()))
                columns[name] = ColumnSummary(rows=tally.rows, features=features, sample=tally.sample.finish())
        return Summary(
            rows=self._rows, parametric=bool(self._parametric), columns=columns,
            rows_by_position=self._rows_by_position, hashes=hashes,
        )  # fmt: skip


def _columns(matrix: FeatureMatrix) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Yields each feature's values in one piece, which is gone through several times; a few are copied together."""
    for start in range(0, len(matrix.ids), _COPIED_COLUMNS):
        some = slice(start, start + _COPIED_COLUMNS)
        yield from zip(matrix.ids[some], np.ascontiguousarray(matrix.values[:, some].T), strict=True)


def _states(block: Block, faults: Faults) -> FeatureMatrix:
    names = block.table.column_names
    if STATE not in names:
        here = f"columns {', '.join(sorted(names))}"
        raise DataError(Problem(block.where(0), f"a column {STATE!r}", here, nearest(STATE, names)))
    named = named_numbers(column_of(block, STATE), faults)
    faults.add(~named.present, STATE, lambda _: "none")
    return feature_matrix(named, faults)


def _has_features(block: Block) -> bool | None:
    """Whether actions are objects with features; None where the block has none to tell by."""
    column = column_of(block, ACTION)
    kind = column.array.type
    if pa.types.is_null(kind) or not column.present.any():
        return None
    if not column.text:
        return not (is_number(kind) or is_string(kind))
    return column.value(int(np.flatnonzero(column.present)[0])).startswith("{")


def candidates(block: Block, faults: Faults) -> tuple[NDArray[np.int64], FeatureMatrix]:
    """Returns ([c] row of each candidate, their features); the action alone where a row lists none.

    Raises:
        DataError: an id that is no integer; other faults are noted.
    """
    column = column_of(block, ACTION)
    if not column.text and (is_number(column.array.type) or is_string(column.array.type)):
        faults.add(column.present, "an object {id: number} in action", column.value, "Or set parametric to false")
        return np.empty(0, np.int64), FeatureMatrix((), np.empty((0, 0), np.float32))
    action = named_numbers(column, faults)
    lists = column_of(block, "possible_actions")
    listed = lists.present
    alone = np.flatnonzero(action.present & ~listed)
    single = feature_matrix(action, faults)
    single = FeatureMatrix(single.ids, single.values[alone])
    if not listed.any():
        return alone, single
    return _joined((alone, single), _of_lists(lists, faults))


def _of_lists(lists: Column, faults: Faults) -> tuple[NDArray[np.int64], FeatureMatrix]:
    taken = pieces(lists, faults, "a list of objects {id: number}")
    rows = taken.rows
    empty: Mask = np.zeros(len(lists.array), bool)
    empty[rows[~valid_rows(taken.elements)]] = True
    faults.add(empty, f"an object for every candidate in {lists.name}", lambda _: "null")
    named = named_numbers(Column(lists.name, taken.elements, taken.text), faults, rows=rows)
    return rows, feature_matrix(named, faults, rows)


def _joined(
    one: tuple[NDArray[np.int64], FeatureMatrix], other: tuple[NDArray[np.int64], FeatureMatrix]
) -> tuple[NDArray[np.int64], FeatureMatrix]:
    """Returns both in the order of their rows."""
    if not len(one[0]):
        return other
    ids = tuple(dict.fromkeys(one[1].ids + other[1].ids))
    rows = np.concatenate((one[0], other[0]))
    values = np.concatenate((aligned(one[1], ids), aligned(other[1], ids)))
    order = np.argsort(rows, kind="stable")
    return rows[order], FeatureMatrix(ids, values[order])
