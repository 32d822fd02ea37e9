"""Turns rows of whole episodes into transitions, in Python alone: an engine only sorts the rows.

    sorted events ─► whole episodes ─► kept: no refused episode, one row per (mdp_id, sequence_number), no outlier
                                       paired: each row with what follows its span, up to `steps` rows
                                       written: files of Parquet, whole episodes each

The arithmetic on rows is that of event_spans.py, which the training copy shares.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from reagent_lite.config.timeline_config import TimelineConfig, TimelineSection
from reagent_lite.data.formats.blocks import Show
from reagent_lite.data.formats.schema import fill_nulls, find_distinct, in_one_piece, to_numpy, valid_rows
from reagent_lite.data.rows.typed_columns import rows_without_choice, type_of
from reagent_lite.data.timeline.buckets import HASHES
from reagent_lite.data.timeline.event_spans import Counts, Ends, Episodes, SpannedRows
from reagent_lite.data.timeline.events import EventFacts, event_columns
from reagent_lite.data.writing.part_files import PartFiles

OUTPUTS = ("timeline.outputTableName", "timeline.evalTableName")
"""Config keys of the folders of a timeline, in their order."""
_TYPES = {"flag": pa.bool_(), "integer": pa.int64(), "number": pa.float64(), "text": pa.string()}


def batch_whole_episodes(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
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
        config: the config of the timeline.
        facts: facts about the events.
        files: number of files in each folder.
        longest: largest number of rows of an episode that is kept; None keeps all.
    """

    config: TimelineConfig
    facts: EventFacts
    files: int
    longest: float | None

    def write(
        self, tables: Iterable[pa.Table], folders: Sequence[Path], show: Show
    ) -> tuple[list[dict[int, int]], Counts]:
        """Writes the rows made of sorted events as files part-00000.parquet and so on.

        Args:
            tables: tables of events of whole episodes, sorted by events.ORDER.
            folders: the output folders; `_folder` of an event is an index of them.
            show: called with (events done, total events).

        Returns:
            (rows of each file that has some, by folder; figures).
        """
        counts = Counts()
        done = 0

        def write(paired: Future[pa.RecordBatch]) -> None:
            batch = paired.result()
            for number, output in enumerate(outputs):
                only_one = len(outputs) == 1
                output.write(batch if only_one else batch.filter(pc.equal(batch.column("_folder"), number)))

        waiting: deque[Future[None]] = deque()
        with ExitStack() as stack, ThreadPoolExecutor(1, "pair") as pairing, ThreadPoolExecutor(1, "write") as writing:
            outputs = [
                stack.enter_context(self.output(*folder_and_key))
                for folder_and_key in zip(folders, OUTPUTS, strict=False)
            ]
            for rows in tables:
                # these rows are paired while earlier ones are written
                waiting.append(writing.submit(write, pairing.submit(self.pair, rows, counts)))
                if len(waiting) > 2:
                    waiting.popleft().result()
                done += rows.num_rows
                show(min(done, self.facts.selected), self.facts.selected)
            for write_of_part in waiting:
                write_of_part.result()
        return [output.rows for output in outputs], counts

    def output(self, folder: Path, key: str) -> PartFiles:
        """Returns the writer of a folder's files; a config key names the folder."""
        columns = self.pair(event_columns(self.config, texts=self.facts.texts).empty_table(), Counts()).schema
        return PartFiles(folder, key, columns.names[:-2], columns)

    def pair(self, events: pa.Table, counts: Counts) -> pa.RecordBatch:
        """Returns the rows made of whole episodes, with `_folder` and `part` as the last columns, and counts them."""
        whole, episodes = self._without_refused(events, counts)
        reward = fill_nulls(in_one_piece(events.column("reward")), np.nan)[whole]
        kept, spans = episodes.pair(self.longest, reward, counts)
        if len(kept) < events.num_rows:
            events = events.take(pa.array(whole[kept]))
        _count_ids(events, self.config, counts)
        columns = _transitions(_Transitions(events=events, spans=spans), self)
        places, folders = (to_numpy(in_one_piece(events.column(name)))[spans.at] for name in ("_place", "_folder"))
        part = (places * self.files // HASHES).astype(np.int32)
        return pa.RecordBatch.from_pydict(columns | {"_folder": pa.array(folders), "part": pa.array(part)})

    def type_of_extra(self, name: str) -> pa.DataType:
        """Returns the type that holds the values of an extra column."""
        return _TYPES[type_of(self.facts.kinds.get(name, set()))]

    def _without_refused(self, events: pa.Table, counts: Counts) -> tuple[NDArray[np.int64], Episodes]:
        """Returns the indices of rows that are no duplicates, of episodes without a refused row, and these events."""
        rows = _episodes(events, self.config.timeline)
        whole = np.ones(len(rows), bool)
        if events.column("_rule").null_count < events.num_rows:
            rule = in_one_piece(events.column("_rule"))
            for name in pc.unique(rule.drop_null()).to_pylist():
                counts.refused[name] += len(np.unique(rows.start[fill_nulls(pc.equal(rule, name), 0).astype(bool)]))
            whole = ~np.isin(rows.start, rows.start[valid_rows(rule)])
        at, duplicates = rows.without_duplicates(whole, counts)
        if len(duplicates):
            file, line = (to_numpy(in_one_piece(events.column(name)))[duplicates] for name in ("_file", "_line"))
            counts.add(Counts(duplicates=list(zip(file.tolist(), line.tolist(), strict=True))))
        return at, rows.only(at)


def _episodes(events: pa.Table, section: TimelineSection) -> Episodes:
    _, codes = find_distinct(in_one_piece(events.column("mdp_id")))
    ends = in_one_piece(events.column("terminal"))
    truncated = fill_nulls(in_one_piece(events.column("truncated")), 0) > 0
    has_next_state = valid_rows(in_one_piece(events.column("next_state_features")))
    sequence = fill_nulls(in_one_piece(events.column("sequence_number")), 0)
    listed = in_one_piece(events.column("possible_actions"))
    action = in_one_piece(events.column("action"))
    without_choice = rows_without_choice(action, listed, ends)
    return Episodes.of(
        section, codes, sequence, Ends(fill_nulls(ends, 0) > 0, truncated, has_next_state, without_choice)
    )


def _count_ids(events: pa.Table, config: TimelineConfig, counts: Counts) -> None:
    candidates = () if config.timeline.actionDiscrete else ("action", "possible_actions")
    for name in ("state_features", "next_state_features", *candidates):
        maps = in_one_piece(events.column(name))
        maps = maps.flatten() if pa.types.is_list(maps.type) else maps
        span = slice(maps.offsets[0].as_py(), maps.offsets[-1].as_py()) if len(maps) else slice(0, 0)
        values, numbers = pc.value_counts(maps.keys[span]).flatten()
        rows_by_feature = dict(zip(values.to_pylist(), numbers.to_pylist(), strict=True))
        counts.add(Counts(ids={name: Counter(rows_by_feature)}))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Transitions:
    """m transitions of n events."""

    events: pa.Table
    spans: SpannedRows

    def column(self, name: str) -> pa.Array:
        """Returns a column [n] in one piece."""
        return in_one_piece(self.events.column(name))

    def first(self, name: str) -> pa.Array:
        """Returns [m] the values of a column in the first row of each transition."""
        column = self.column(name)
        at = self.spans.at
        return column if len(at) == len(column) else column.take(pa.array(at))

    def after(self, name: str, beyond: str = "", at_end: pa.Array | None = None) -> pa.Array:
        """Returns [m] the values of a column in the row that follows each transition.

        Args:
            name: the column of the events.
            beyond: the column that has the value if a limit cut the episode; "" for null.
            at_end: [1] the value after a true end, if the first row has a value in the column; None for null.
        """
        column = self.column(name)
        end = self.spans.end
        terminal = self.spans.terminal
        truncated = self.spans.truncated
        sources = [column, *([self.column(beyond).cast(column.type)] if beyond and truncated.any() else [])]
        following = end + 1
        has_value = ~terminal & ~truncated
        if len(sources) == 2:
            following = np.where(truncated, len(column) + end, following)
            has_value = has_value | truncated
        if at_end is not None:
            ended = terminal & valid_rows(column)[self.spans.at]
            following = np.where(ended, sum(map(len, sources)), following)
            has_value = has_value | ended
            sources.append(at_end)
        source = pa.concat_arrays(sources) if len(sources) > 1 else column
        return source.take(pa.array(following, mask=~has_value))


def _transitions(rows: _Transitions, pairing: Pairing) -> dict[str, pa.Array]:
    """Returns the columns of transitions, in order."""
    timeline = pairing.config.timeline
    seen = pairing.facts.seen
    spans = rows.spans
    episodes = spans.episodes
    at = spans.at
    columns: dict[str, pa.Array] = {
        "mdp_id": rows.first("mdp_id"),
        "sequence_number": pa.array(episodes.sequence[at]),
        "sequence_number_ordinal": pa.array(at - episodes.start[at] + 1),
        "time_since_first": pa.array(episodes.since_first[at]),
        "time_diff": pa.array(spans.time_diff),
    }
    columns |= {"step": pa.array(spans.steps)} if timeline.steps > 1 else {}
    columns |= {name: rows.first(name) for name in ("ds", "state_features", "action") if name != "ds" or name in seen}
    for name in timeline.rewardColumns:
        if name != "metrics":
            summed = timeline.gamma is not None
            values = fill_nulls(rows.column(name), np.nan) if summed else None
            columns[name] = (
                rows.first(name) if values is None else pa.array(spans.sum_values(values, timeline.gamma or 0.0))
            )
    if "action_probability" in seen:
        columns["action_probability"] = rows.first("action_probability")
    if "metrics" in seen:
        sums = timeline.steps > 1 and "metrics" in timeline.rewardColumns and pairing.facts.metrics
        columns["metrics"] = _metrics(rows, pairing) if sums else rows.first("metrics")
    columns["next_state_features"] = rows.after("state_features", "next_state_features")
    columns["next_action"] = rows.after("action")
    if timeline.includePossibleActions and "possible_actions" in seen:
        columns["possible_actions"] = rows.first("possible_actions")
    if timeline.includePossibleActions and seen & {"possible_actions", "possible_next_actions"}:
        none = pa.array([[]], rows.column("possible_actions").type)
        columns["possible_next_actions"] = rows.after("possible_actions", "possible_next_actions", none)
    for name in timeline.extraFeatureColumns:
        kind = pairing.type_of_extra(name)
        columns |= {name: rows.first(name).cast(kind), f"next_{name}": rows.after(name).cast(kind)}
    return columns | {"terminal": pa.array(spans.terminal), "truncated": pa.array(spans.truncated)}


def _metrics(rows: _Transitions, pairing: Pairing) -> pa.Array:
    """Returns [m] maps with the sum of every metric of the log."""
    names = sorted(pairing.facts.metrics)
    maps = rows.column("metrics")
    values = np.full((len(maps), len(names)), np.nan)
    offsets = to_numpy(maps.offsets)
    part = slice(int(offsets[0]), int(offsets[-1])) if len(maps) else slice(0, 0)
    keys = pc.index_in(maps.keys[part], pa.array(names, pa.string()))
    values[np.repeat(np.arange(len(maps)), np.diff(offsets)), to_numpy(keys)] = fill_nulls(maps.items[part], np.nan)
    sums = rows.spans.sum_values(values, pairing.config.timeline.gamma or 0.0)
    return pa.MapArray.from_arrays(
        pa.array(np.arange(len(sums) + 1, dtype=np.int32) * len(names)),
        pa.array(names * len(sums), pa.string()),
        pa.array(sums.reshape(-1)),
    )
