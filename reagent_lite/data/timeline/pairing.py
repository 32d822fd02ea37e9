"""Rows of whole episodes become transitions, in Python alone: an engine only sorts them.

    sorted events ─► whole episodes ─► kept: no refused episode, one row per (mdp_id, sequence_number), no outlier
                                       paired: each row with what follows its span, up to `steps` rows
                                       written: files of Parquet, whole episodes each

Row t is complete when it is known where it led: to the next row, to a true end, or, cut by a limit, to a state that the
row itself has. A transition spans complete rows only, and ends with the first that ends the episode.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from reagent_lite.config.timeline import TimelineConfig
from reagent_lite.data.buckets import HASHES
from reagent_lite.data.formats.blocks import Show
from reagent_lite.data.formats.schema import filled, in_one_piece, to_numpy, valid_rows
from reagent_lite.data.rows.matrices import Mask
from reagent_lite.data.rows.table import type_of
from reagent_lite.data.timeline.events import Checked, event_columns
from reagent_lite.data.writing.part_files import PartFiles

OUTPUTS = ("timeline.outputTableName", "timeline.evalTableName")
"""Config keys of the folders of a timeline, in their order."""
MAX_DUPLICATES = 3
"""Duplicates whose place the log names."""
_TYPES = {"flag": pa.bool_(), "integer": pa.int64(), "number": pa.float64(), "text": pa.string()}
Indices = NDArray[np.int64]


@dataclass(slots=True)
class Counts:
    """What was counted while episodes were paired; counts of parts add up.

    Attributes:
        figures: the figures of all rows, by name.
        outliers: "episodes" and "rows" left out since they are longer than others.
        refused: episodes by the rule that a row of theirs breaks.
        ids: {column: {feature: rows or candidates that have a value}}.
        duplicates: (file, line) of the first rows that have the mdp_id and sequence_number of another.
    """

    figures: Counter[str] = field(default_factory=Counter)
    outliers: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    ids: dict[str, Counter[int]] = field(default_factory=dict)
    duplicates: list[tuple[int, int]] = field(default_factory=list)

    def add(self, other: Counts) -> None:
        """Adds the counts of other episodes."""
        self.figures.update(other.figures)
        self.outliers.update(other.outliers)
        self.refused.update(other.refused)
        for column, ids in other.ids.items():
            self.ids.setdefault(column, Counter()).update(ids)
        self.duplicates = heapq.nsmallest(MAX_DUPLICATES, self.duplicates + other.duplicates)


def whole_episodes(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Yields sorted rows in tables that end with an episode; an episode has to fit into memory."""
    held: list[pa.RecordBatch] = []
    for batch in batches:
        ids = batch.column("mdp_id")
        last = batch.num_rows - pc.sum(pc.equal(ids, ids[-1])).as_py() if batch.num_rows else 0
        if last:
            yield pa.Table.from_batches([*held, batch.slice(0, last)]).combine_chunks()
            held = []
        held.append(batch.slice(last))
    if held:
        yield pa.Table.from_batches(held).combine_chunks()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairing:
    """Makes the transitions of one timeline.

    Attributes:
        config: what is made.
        found: what reading the events found.
        files: the files of each folder.
        longest: rows of the longest episodes that are kept; None keeps all.
    """

    config: TimelineConfig
    found: Checked
    files: int
    longest: float | None

    def write(
        self, tables: Iterable[pa.Table], folders: Sequence[Path], show: Show
    ) -> tuple[list[dict[int, int]], Counts]:
        """Writes the transitions of sorted events as files part-00000.parquet and so on.

        Args:
            tables: whole episodes of events each, sorted by events.ORDER.
            folders: where the files go, by the events' number of a folder.
            show: called with (events done, events in all).

        Returns:
            (rows of each file that has some, by folder; what was counted).
        """
        counts, done = Counts(), 0

        def write(paired: Future[pa.RecordBatch]) -> None:
            batch = paired.result()
            for number, output in enumerate(outputs):
                alone = len(outputs) == 1
                output.write(batch if alone else batch.filter(pc.equal(batch.column("_folder"), number)))

        waiting: deque[Future[None]] = deque()
        with ExitStack() as stack, ThreadPoolExecutor(1, "pair") as pairing, ThreadPoolExecutor(1, "write") as writing:
            outputs = [stack.enter_context(self.output(*one)) for one in zip(folders, OUTPUTS, strict=False)]
            for rows in tables:
                # these are paired while those before them are written
                waiting.append(writing.submit(write, pairing.submit(self.paired, rows, counts)))
                if len(waiting) > 2:
                    waiting.popleft().result()
                done += rows.num_rows
                show(min(done, self.found.taken), self.found.taken)
            for one in waiting:
                one.result()
        return [output.rows for output in outputs], counts

    def output(self, folder: Path, key: str) -> PartFiles:
        """Returns what writes the files of a folder, which a config key names."""
        columns = self.paired(event_columns(self.config).empty_table(), Counts()).schema
        return PartFiles(folder, key, columns.names[:-2], columns)

    def paired(self, events: pa.Table, counts: Counts) -> pa.RecordBatch:
        """Returns the transitions of whole episodes, with `_folder` and `part` as the last columns, and counts them."""
        rows = self._kept(events, counts)
        _count(rows, counts)
        _count_ids(rows, counts)
        steps = _spans(rows, self.config)
        at = np.flatnonzero(rows.complete)
        limit = self.config.timeline.timeWindowLimit
        if limit is not None:
            at = at[rows.since_first[at] <= limit]
        return _transitions(rows, _Span(rows=rows, at=at, steps=steps[at]), self)

    def _kept(self, events: pa.Table, counts: Counts) -> _Rows:
        rows = _Rows.of(events, self.config)
        if events.column("_rule").null_count < events.num_rows:
            rule = in_one_piece(events.column("_rule"))
            for name in pc.unique(rule.drop_null()).to_pylist():
                counts.refused[name] += len(np.unique(rows.number[filled(pc.equal(rule, name), 0).astype(bool)]))
            rows = rows.without(np.isin(rows.number, rows.number[valid_rows(rule)]))
        twice = np.zeros(len(rows), bool)
        twice[1:] = (rows.number[1:] == rows.number[:-1]) & (rows.sequence[1:] == rows.sequence[:-1])
        counts.figures.update(rows=len(rows), duplicate_rows=int(twice.sum()))
        if twice.any():
            file, line = (to_numpy(in_one_piece(rows.table.column(name)))[twice] for name in ("_file", "_line"))
            counts.add(Counts(duplicates=list(zip(file.tolist(), line.tolist(), strict=True))))
            rows = rows.without(twice)
        if self.longest is not None:
            outliers = (rows.stop - rows.start) > self.longest
            counts.outliers.update(episodes=len(np.unique(rows.number[outliers])), rows=int(outliers.sum()))
            rows = rows.without(outliers)
        return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """Events of whole episodes in order.

    Attributes:
        table: n events.
        config: the config of the timeline.
        number: [n] of the row's episode, from 0.
        start, stop: [n] the first row of its episode, and the row behind the last.
        sequence: [n] sequence_number, 0 where it is null.
        terminal, truncated: [n].
    """

    table: pa.Table
    config: TimelineConfig
    number: Indices
    start: Indices
    stop: Indices
    sequence: Indices
    terminal: Mask
    truncated: Mask

    @classmethod
    def of(cls, table: pa.Table, config: TimelineConfig) -> _Rows:
        codes = to_numpy(in_one_piece(table.column("mdp_id")).dictionary_encode().indices)
        first = np.append(True, codes[1:] != codes[:-1])[: len(codes)]
        starts = np.flatnonzero(first)
        number = np.cumsum(first) - 1
        ends = {name: filled(in_one_piece(table.column(name)), 0).astype(bool) for name in ("terminal", "truncated")}
        return cls(
            table=table,
            config=config,
            number=number,
            start=starts[number],
            stop=np.append(starts[1:], len(codes))[number],
            sequence=filled(in_one_piece(table.column("sequence_number")), 0),
            **ends,
        )

    def __len__(self) -> int:
        return len(self.number)

    def without(self, rows: Mask) -> _Rows:
        """Returns the events without some, counted anew."""
        return _Rows.of(self.table.filter(pa.array(~rows)), self.config) if rows.any() else self

    def column(self, name: str) -> pa.Array:
        """Returns a column in one piece."""
        return in_one_piece(self.table.column(name))

    def present(self, name: str) -> Mask:
        """[n] whether the row has a value."""
        return valid_rows(self.column(name))

    @property
    def over(self) -> Mask:
        """[n] whether the episode ends with the row, by its own flags."""
        return self.terminal | self.truncated

    @property
    def followed(self) -> Mask:
        """[n] whether a row of the same episode follows."""
        return np.arange(1, len(self) + 1) < self.stop

    @property
    def complete(self) -> Mask:
        """[n] whether it is known where the row led."""
        cut = self.truncated & self.present("next_state_features")
        goes_on = self.followed | self.config.timeline.addTerminalStateRow
        return self.terminal | cut | (~self.over & goes_on)

    @property
    def since_first(self) -> Indices:
        """[n] sequence numbers since the first row of the episode."""
        return self.sequence - self.sequence[self.start]


def _count(rows: _Rows, counts: Counts) -> None:
    new = np.append(False, rows.number[1:] == rows.number[:-1])[: len(rows)]  # a row follows another of its episode
    gap = np.diff(rows.sequence, prepend=rows.sequence[:1])
    single = rows.stop - rows.start == 1
    unfinished, cut = ~rows.followed & ~rows.over, rows.truncated & ~rows.present("next_state_features")
    figures = {
        "paired_rows": np.ones(len(rows), bool),
        "episodes": ~new,
        "one_row_episodes": single,
        "gaps": new & (gap > 1),
        "rows_after_an_end": new & np.roll(rows.over, 1),
        "terminal_rows": rows.terminal,
        "truncated_rows": rows.truncated,
        "last_rows_without_an_end": unfinished,
        "truncated_rows_without_next_state": cut,
        "complete_rows": rows.complete,
    }
    counts.figures.update({name: int(mask.sum()) for name, mask in figures.items()})


def _count_ids(rows: _Rows, counts: Counts) -> None:
    discrete = rows.config.timeline.actionDiscrete
    for name in ("state_features", "next_state_features", *(() if discrete else ("action", "possible_actions"))):
        maps = rows.column(name)
        maps = maps.flatten() if pa.types.is_list(maps.type) else maps
        span = slice(maps.offsets[0].as_py(), maps.offsets[-1].as_py()) if len(maps) else slice(0, 0)
        values, numbers = pc.value_counts(maps.keys[span]).flatten()
        found = dict(zip(values.to_pylist(), numbers.to_pylist(), strict=True))
        counts.add(Counts(ids={name: Counter(found)}))


def _spans(rows: _Rows, config: TimelineConfig) -> Indices:
    """Returns [n] how many rows the transition of each row spans."""
    steps, going = np.ones(len(rows), np.int64), np.ones(len(rows), bool)
    over, complete, number = rows.over, rows.complete, np.arange(len(rows))
    for k in range(1, config.timeline.steps):
        before, now = np.minimum(number + k - 1, len(rows) - 1), np.minimum(number + k, len(rows) - 1)
        going &= ~over[before] & (number + k < rows.stop) & complete[now]
        steps += going
    return steps


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    """The rows of m transitions.

    Attributes:
        rows: n events.
        at: [m] the first row of each.
        steps: [m] how many rows it spans.
    """

    rows: _Rows
    at: Indices
    steps: Indices

    @property
    def end(self) -> Indices:
        """[m] the last row of each."""
        return self.at + self.steps - 1

    @property
    def terminal(self) -> Mask:
        """[m] whether the last row is a true end; without another word the last of an episode is one."""
        end = self.end
        return self.rows.terminal[end] | ~(self.rows.over | self.rows.followed)[end]

    @property
    def truncated(self) -> Mask:
        """[m] whether a limit cut the episode after the last row."""
        return self.rows.truncated[self.end]

    def own(self, column: pa.Array) -> pa.Array:
        """Returns [m] what the first row has."""
        return column if len(self.at) == len(self.rows) else column.take(pa.array(self.at))

    def after(self, column: pa.Array, beyond: pa.Array | None = None, at_end: pa.Array | None = None) -> pa.Array:
        """Returns [m] what follows the span in a column [n].

        Args:
            column: the column of the events.
            beyond: [n] what a row has that a limit cut; None: nothing.
            at_end: [1] what there is behind a true end where the first row has a value in `column`; None: nothing.
        """
        num, terminal, truncated = len(self.rows), self.terminal, self.truncated
        sources = [column, *([] if beyond is None or not truncated.any() else [beyond.cast(column.type)])]
        following, some = self.end + 1, ~terminal & ~truncated
        if len(sources) == 2:
            following, some = np.where(truncated, num + self.end, following), some | truncated
        if at_end is not None:
            there = terminal & valid_rows(column)[self.at]
            following, some = np.where(there, sum(map(len, sources)), following), some | there
            sources.append(at_end)
        source = pa.concat_arrays(sources) if len(sources) > 1 else column
        return source.take(pa.array(following, mask=~some))

    def summed(self, values: NDArray[np.float64], gamma: float) -> NDArray[np.float64]:
        """Returns [m, ...] Σ_k γ^k · values[k] over the rows of the span; Sutton & Barto (2018), eq. 7.1."""
        total = np.nan_to_num(values[self.at])
        for k in range(1, int(self.steps.max(initial=1))):
            spanned = (self.steps > k).reshape(-1, *[1] * (values.ndim - 1))
            later = np.nan_to_num(values[np.minimum(self.at + k, len(values) - 1)])
            total = total + np.where(spanned, gamma**k * later, 0)
        return total


def _transitions(rows: _Rows, span: _Span, pairing: Pairing) -> pa.RecordBatch:
    """Returns the columns of transitions, in order."""
    timeline, seen = pairing.config.timeline, pairing.found.seen
    end, sequence, terminal, truncated = span.end, rows.sequence, span.terminal, span.truncated
    following = sequence[np.minimum(end + 1, max(len(rows) - 1, 0))] if len(rows) else sequence
    # the log does not have the time of the limit: one unit after the last row
    behind = np.where(truncated, sequence[end] + 1, following)
    found: dict[str, pa.Array] = {
        "mdp_id": span.own(rows.column("mdp_id")),
        "sequence_number": pa.array(sequence[span.at]),
        "sequence_number_ordinal": pa.array(span.at - rows.start[span.at] + 1),
        "time_since_first": pa.array(rows.since_first[span.at]),
        "time_diff": pa.array(np.where(terminal, 0, behind - sequence[span.at])),
    }
    found |= {"step": pa.array(span.steps)} if timeline.steps > 1 else {}
    found |= {"ds": span.own(rows.column("ds"))} if "ds" in seen else {}
    found |= {name: span.own(rows.column(name)) for name in ("state_features", "action")}
    for name in timeline.rewardColumns:
        if name != "metrics":
            found[name] = _summed(span, rows.column(name), timeline.gamma)
    if "action_probability" in seen:
        found["action_probability"] = span.own(rows.column("action_probability"))
    if "metrics" in seen:
        sums = timeline.steps > 1 and "metrics" in timeline.rewardColumns and pairing.found.metrics
        found["metrics"] = _metrics(span, pairing) if sums else span.own(rows.column("metrics"))
    found["next_state_features"] = span.after(rows.column("state_features"), rows.column("next_state_features"))
    found["next_action"] = span.after(rows.column("action"))
    choices = rows.column("possible_actions")
    if timeline.includePossibleActions and "possible_actions" in seen:
        found["possible_actions"] = span.own(choices)
    if timeline.includePossibleActions and seen & {"possible_actions", "possible_next_actions"}:
        none = pa.array([[]], choices.type)
        found["possible_next_actions"] = span.after(choices, rows.column("possible_next_actions"), none)
    for name in timeline.extraFeatureColumns:
        kind = _TYPES[type_of(pairing.found.kinds.get(name, set()))]
        column = rows.column(name).cast(kind)
        found |= {name: span.own(column), f"next_{name}": span.after(column)}
    found |= {"terminal": pa.array(terminal), "truncated": pa.array(truncated)}
    place = to_numpy(rows.column("_place"))[span.at]
    part = pa.array((place * pairing.files // HASHES).astype(np.int32))
    return pa.RecordBatch.from_pydict(found | {"_folder": span.own(rows.column("_folder")), "part": part})


def _summed(span: _Span, column: pa.Array, gamma: float | None) -> pa.Array:
    return span.own(column) if gamma is None else pa.array(span.summed(filled(column, np.nan), gamma))


def _metrics(span: _Span, pairing: Pairing) -> pa.Array:
    """Returns [m] maps with the sum of every metric of the log."""
    names, rows = sorted(pairing.found.metrics), span.rows
    maps = rows.column("metrics")
    values = np.full((len(rows), len(names)), np.nan)
    offsets = to_numpy(maps.offsets)
    part = slice(int(offsets[0]), int(offsets[-1])) if len(rows) else slice(0, 0)
    keys = pc.index_in(maps.keys[part], pa.array(names, pa.string()))
    values[np.repeat(np.arange(len(rows)), np.diff(offsets)), to_numpy(keys)] = filled(maps.items[part], np.nan)
    sums = span.summed(values, pairing.config.timeline.gamma or 0.0)
    return pa.MapArray.from_arrays(
        pa.array(np.arange(len(sums) + 1, dtype=np.int32) * len(names)),
        pa.array(names * len(sums), pa.string()),
        pa.array(sums.reshape(-1)),
    )
