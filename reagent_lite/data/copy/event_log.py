"""The training copy of events: sorted once, paired as a timeline pairs them, but without a timeline's files.

checked events, spooled ─► sorted by episode ─► kept, complete, spans (timeline/event_spans.py) ─► arrays of the copy
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import DTypeLike, NDArray

from reagent_lite.config.column_names import SERVED_COLUMNS, TRAINING_COLUMNS
from reagent_lite.config.timeline_config import TimelineConfig
from reagent_lite.data.copy.lists import SharedLists
from reagent_lite.data.copy.order import Order, index_type
from reagent_lite.data.copy.spool import Indices, Spool, parts_of
from reagent_lite.data.copy.spooled_log import VECTORS, SpooledLog, Transitions
from reagent_lite.data.formats.blocks import Block, InputFile, Reader
from reagent_lite.data.formats.format_table import readers_of
from reagent_lite.data.formats.schema import to_numpy
from reagent_lite.data.logs import Log
from reagent_lite.data.rows.block_columns import NONE
from reagent_lite.data.rows.matrices import Mask
from reagent_lite.data.rows.reading import NEXT_ACTION, Rows, read_rows
from reagent_lite.data.timeline.event_spans import MAX_DUPLICATES, Counts, Ends, Episodes
from reagent_lite.data.timeline.events import EventFacts, row_rules_of, select_rows
from reagent_lite.data.timeline.report import (
    log_figures,
    longest_rows,
    none_complete,
    report_of,
    require_rows,
    require_selected,
)
from reagent_lite.errors import DataError, Problem, pluralize

_EVENTS_AT_ONCE = 1 << 16
PAIRED: dict[str, DTypeLike] = {
    "row": np.int64,
    "episode": np.int32,
    "sequence": np.int64,
    "reward": np.float64,
    "time_diff": np.float64,
    "step": np.uint8,
    "terminal": np.bool_,
    "truncated": np.bool_,
    "following": np.int64,
    "cut": np.int64,
}
"""Types of the vectors of paired events, which are in files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedEvents(Transitions):
    """R transitions made from events. Rows are numbered in the order of the files. Vectors are memory-mapped.

    Attributes:
        order: the copy's order, of the transitions' first rows.
        terminal, truncated: [R] as in SpannedRows.
        reward: [R] float64, summed over the span if the config has a discount.
        time_diff: [R] float64.
        step: [R] uint8, number of rows that the transition spans.
        following: [R] the row that follows; arbitrary if none does.
        cut: [R] index of the transition's last row among all rows that a limit cut; arbitrary for other rows.
    """

    reward: NDArray[np.float64]
    time_diff: NDArray[np.float64]
    step: NDArray[np.uint8]
    following: NDArray[np.int64]
    cut: NDArray[np.int64]

    def goes_on(self, part: slice) -> Mask:
        """Returns whether a row follows the transitions of a part."""
        return ~self.terminal[part] & ~self.truncated[part]


class EventLog(SpooledLog[PairedEvents]):
    """Events in temporary files, which become transitions when the arrays are written.

    Next states and their choices are spooled only for rows that a limit cut.

    Attributes:
        config: settings of the pairing.
        report: rows read, kept and left out, as in the manifest of a timeline; empty before `transitions`.
    """

    vectors: ClassVar[dict[str, DTypeLike]] = {
        name: kind for name, kind in VECTORS.items() if name not in ("next_action", "time_diff", "step")
    } | {"reward": np.float64, "has_next_state": np.uint8, "without_choice": np.uint8, "possible": np.uint8}

    def __init__(self, folder: Path, log: Log) -> None:
        self.config = _config_of(log)
        super().__init__(folder, log, row_rules_of(self.config))
        self.report: dict[str, Any] = {}
        self._facts_of_blocks: list[EventFacts] = []
        self._refused: dict[str, set[str]] = {}
        self.spools["cut"] = Spool(folder / "cut.spool", np.int64)
        self.spools["summed"] = Spool(folder / "summed.spool", np.float32, self.keys["metric"])
        self._other_items = 0
        self._facts = EventFacts()
        self._files: Sequence[InputFile] = ()

    @property
    def readers(self) -> dict[str, Reader]:
        """Readers of the training columns, dates, extra columns of the config, and hashes of item tables."""
        columns = (*TRAINING_COLUMNS, "ds", *self.rules.extra)
        return readers_of(columns) | {".parquet": readers_of((*columns, "items"))[".parquet"]}

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about the log that a user should read."""
        rows = pluralize(self._other_items, "row was", "rows were")
        items = f"{rows} decided with another item table than data.items; the features are those of data.items"
        return (*super().notes, *self.report["left_out"], *([items] if self._other_items else []))

    def read(self, block: Block) -> Rows:
        """Returns the checked rows of a block; of rows that break a rule, only their faults and mdp_ids."""
        block, facts = select_rows(block, self.config)
        rows = read_rows(block, self.rules)
        facts.unlisted = rows.counts["candidates_unknown_rows"]
        self._facts_of_blocks.append(facts)
        if rows.faults.kinds:
            whole = ~rows.faults.rows
            block = replace(block, table=block.table.filter(pa.array(whole)), lines=block.lines[whole])
            kept = read_rows(block, self.rules)
            rows.faults.levels = kept.faults.levels
            rows = replace(kept, faults=rows.faults, refused=rows.refused)
        return rows

    def append(self, rows: Rows) -> None:
        """Adds a block; its faults are collected."""
        self.collect_faults(rows)
        self._other_items += _of_other_items(rows.block)
        for rule, names in rows.refused.items():
            self._refused.setdefault(rule, set()).update(names)
        if self.faults.kinds and self.config.timeline.on_refused == "error":
            return
        self.learn_texts(rows)
        rows = replace(
            rows,
            state=rows.state.nonempty(),
            next_state=rows.next_state.nonempty(),
            metrics=rows.metrics.nonempty(),
        )
        cut = np.flatnonzero((rows.truncated > 0) & rows.has_next_state)
        self.spools["cut"].append(cut + self.num_rows)
        self.spool_next(rows, cut)
        possible = np.any(rows.mask, axis=1) if rows.lists is None else rows.lists.lengths > 0
        self.spool(rows, possible=possible, propensity=np.where(rows.has_propensity, rows.propensity, np.nan))

    def check(self, files: Sequence[InputFile]) -> None:
        """Raises the faults that were collected, unless their episodes are left out."""
        for facts in self._facts_of_blocks:
            self._facts.add(facts)
        self._facts.faults = self.faults
        self._files = files
        require_selected(self.config, self._facts)

    def transitions(self) -> PairedEvents:
        """Returns the transitions; counts and reports them.

        Raises:
            DataError: a row is followed by one without a possible action.
            NoRowsError: no event leads to a known state.
        """
        counts = Counts()
        if not self.num_rows:
            require_rows(self.config, self._facts, counts)
        order = self.order(by_sequence=True)
        flags = [self.map_vector(name) for name in ("bootstrap", "truncated", "has_next_state", "without_choice")]
        whole = self._whole_episodes(order, counts)
        lengths: Counter[int] = Counter()
        for _, _, episodes in self._episodes(order, flags, whole, counts):
            lengths.update(episodes.lengths)
        require_rows(self.config, self._facts, counts)
        longest = longest_rows(self.config, lambda: lengths)
        pairs = self._pairs(order, self._episodes(order, flags, whole, Counts()), longest, counts)
        log_figures(self.config, self._facts, counts, self._files)
        self.report = report_of(self.config, self._facts, longest, counts, [len(pairs.order.rows)])
        if not len(pairs.order.rows):
            raise none_complete(self.config, self._facts, counts)
        self._require_choices(pairs)
        return pairs

    def _whole_episodes(self, order: Order, counts: Counts) -> Mask:
        """Returns [episodes] whether an episode has no refused row; counts the others."""
        counts.refused.update({rule: len(names) for rule, names in self._refused.items()})
        refused = pa.array(sorted(set().union(*self._refused.values())), pa.large_string())
        masks = (to_numpy(pc.is_in(names, refused)).astype(bool) for names in order.names())
        return ~np.concatenate([np.zeros(0, bool), *masks])

    def _episodes(
        self, order: Order, flags: Sequence[NDArray[np.uint8]], whole: Mask, counts: Counts
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int32], Episodes]]:
        """Yields (rows, codes of their episodes, events) of some whole episodes at a time.

        Episodes with refused rows and duplicates are left out and counted.

        Args:
            order: the order of all rows.
            flags: whether each row bootstraps, is truncated, has a next state, and has no choice, in the files' order.
            whole: [episodes] whether the episode has no refused row.
            counts: the counts to which those of all episodes are added.
        """
        start = 0
        while start < len(order.rows):
            last = order.episode[min(start + _EVENTS_AT_ONCE, len(order.rows)) - 1]
            part = slice(start, int(np.searchsorted(order.episode, last, "right")))
            start = part.stop
            rows = order.rows[part]
            codes = order.episode[part]
            bootstrap, *further = (flag[rows] for flag in flags)
            ends = Ends(bootstrap == 0, *(flag > 0 for flag in further))
            episodes = Episodes.of(self.config.timeline, codes, order.sequence[part], ends)
            at, duplicates = episodes.without_duplicates(whole[codes], counts)
            counts.add(Counts(duplicates=self._first_lines(rows[duplicates])))
            yield rows[at].astype(np.int64), codes[at], episodes.only(at)

    def _pairs(
        self,
        order: Order,
        episodes: Iterable[tuple[NDArray[np.int64], NDArray[np.int32], Episodes]],
        longest: float | None,
        counts: Counts,
    ) -> PairedEvents:
        """Returns the transitions of the episodes that have at most `longest` rows; counts both."""
        spools = {name: Spool[int](self.folder / f"paired_{name}.spool", kind) for name, kind in PAIRED.items()}
        distinct = [order.distinct[:0]]
        limits = self.map_vector("cut")
        rewards = self.spools["reward"].map_rows()
        section = self.config.timeline
        num_episodes = 0
        for rows, codes, events in episodes:
            at, spans = events.pair(longest, rewards[rows], counts)
            rows = rows[at]
            reward = rewards[rows]
            used, episode = np.unique(codes[at][spans.at], return_inverse=True)
            vectors = {
                "row": rows[spans.at],
                "episode": num_episodes + episode,
                "sequence": spans.episodes.sequence[spans.at],
                "reward": reward[spans.at] if section.gamma is None else spans.sum_values(reward, section.gamma),
                "time_diff": spans.time_diff,
                "step": spans.steps,
                "terminal": spans.terminal,
                "truncated": spans.truncated,
                "following": rows[np.minimum(spans.end + 1, len(rows) - 1)],
                "cut": np.searchsorted(limits, rows[spans.end]),
            }
            for name, values in vectors.items():
                spools[name].append(values)
            if self._sums_metrics:
                metrics = self.spools["metrics"].whole(rows).astype(np.float64)
                summed = spans.sum_values(metrics, section.gamma or 0.0)
                self.spools["summed"].append(summed.astype(np.float32), tuple(sorted(self.keys["metric"])))
            num_episodes += len(used)
            distinct.append(order.distinct[used])
        mapped = {name: spool.map_rows() for name, spool in spools.items()}
        for spool in spools.values():
            spool.remove()
        of_pairs = replace(
            order,
            rows=mapped.pop("row"),
            episode=mapped.pop("episode"),
            sequence=mapped.pop("sequence"),
            distinct=np.concatenate(distinct),
            duplicates=0,
        )
        return PairedEvents(order=of_pairs, **mapped)

    @property
    def _sums_metrics(self) -> bool:
        """Whether metrics are summed over the rows of a transition."""
        return self.config.timeline.steps > 1 and "metrics" in self.config.timeline.rewardColumns

    def _first_lines(self, rows: Indices) -> list[tuple[int, int]]:
        file, line = (self.spools[name].map_rows()[rows].tolist() for name in ("origin_file", "origin_line"))
        return heapq.nsmallest(MAX_DUPLICATES, zip(file, line, strict=True))

    def _require_choices(self, pairs: PairedEvents) -> None:
        possible = self.map_vector("possible")
        lacking = [
            pairs.order.rows[part][pairs.goes_on(part) & (possible[pairs.following[part]] == 0)]
            for part in parts_of(len(pairs.order.rows))
        ]
        rows = np.concatenate(lacking)
        if len(rows):
            file, line = self._first_lines(rows)[0]
            got = f"none, nor in {pluralize(len(rows) - 1, 'other row')}"
            raise DataError(Problem(self._files[file].location(line), NEXT_ACTION, got))

    def vectors_of(self, transitions: PairedEvents) -> Iterator[tuple[str, Iterable[NDArray[Any]]]]:
        """Yields (name, chunks of the vector [R]) for the vectors that the order does not give."""
        rows = transitions.order.rows
        self.counts.update(
            unknown_action_rows=0,
            propensity_absent_rows=0,
            next_action_not_possible_rows=0,
            rows_without_mdp_id=0,
        )
        yield "action", self._actions(rows)
        yield "next_action", self._next_actions(transitions)
        yield "reward", [transitions.reward]
        yield "time_diff", [transitions.time_diff]
        yield "step", [transitions.step]
        yield "propensity", self._propensities(rows)
        yield "bootstrap", (~transitions.terminal[part] for part in parts_of(len(rows)))
        yield "truncated", [transitions.truncated]
        for name in ("origin_file", "origin_line"):
            yield name, self.spools[name].gather_rows(rows)

    def _actions(self, rows: Indices) -> Iterator[NDArray[np.int32]]:
        for action in self.spools["action"].gather_rows(rows):
            self.counts["unknown_action_rows"] += int((action == NONE).sum())
            yield action

    def _next_actions(self, transitions: PairedEvents) -> Iterator[NDArray[np.int32]]:
        action = self.spools["action"].map_rows()
        for part in parts_of(len(transitions.order.rows)):
            yield np.where(transitions.goes_on(part), action[transitions.following[part]], NONE)

    def _propensities(self, rows: Indices) -> Iterator[NDArray[np.float32]]:
        for propensity in self.spools["propensity"].gather_rows(rows):
            absent = np.isnan(propensity)
            self.counts["propensity_absent_rows"] += int(absent.sum())
            yield np.where(absent, 1, propensity)

    def write_states(self, transitions: PairedEvents) -> None:
        """Writes the states of the transitions' first rows, then all other next states, each once."""
        rows = transitions.order.rows
        following = transitions.following
        total = len(rows)
        kind = index_type(2 * self.num_rows + self.spools["next_state"].num_rows)
        position = np.full(self.num_rows, -1, kind)
        for part in parts_of(total):
            position[rows[part]] = np.arange(part.start, part.stop)
        others = [np.empty(0, np.int64)]
        for part in parts_of(total):
            after = following[part][transitions.goes_on(part)]
            others.append(after[position[after] < 0])
        not_first = np.unique(np.concatenate(others))
        position[not_first] = np.arange(total, total + len(not_first))
        total += len(not_first)
        limits, limit = np.unique(transitions.cut[transitions.truncated], return_inverse=True)
        next_index = np.arange(len(rows), dtype=kind)
        follows = np.zeros(len(rows), bool)
        for part in parts_of(len(rows)):
            goes_on = transitions.goes_on(part)
            next_index[part][goes_on] = position[following[part][goes_on]]
            follows[part] = goes_on & (next_index[part] == np.arange(part.start + 1, part.stop + 1))
        next_index[transitions.truncated] = total + limit
        total += len(limits)
        self.save_next(next_index.astype(index_type(total), copy=False), follows, total)
        states = self.spools["state"]
        nexts = self.spools["next_state"]
        if len(rows) + len(not_first) < self.num_rows or len(limits) < nexts.num_rows:
            used = (("state", rows), ("state", not_first), ("next_state", limits))
            self._drop_empty_columns("state", used)
        chunks = chain(states.gather_rows(rows), states.gather_rows(not_first), nexts.gather_rows(limits))
        self.write_matrix("state", total, chunks)

    def metrics_of(self, transitions: PairedEvents) -> Iterable[NDArray[np.float32]]:
        """Yields chunks of the metrics [R, M]."""
        rows = transitions.order.rows
        if self._sums_metrics:
            return self.spools["summed"].gather_rows(np.arange(len(rows)))
        self._drop_empty_columns("metric", (("metrics", rows),))
        return self.spools["metrics"].gather_rows(rows)

    def next_of(self, name: str, transitions: PairedEvents, part: slice) -> NDArray[Any]:
        """Returns values at next states: of the following row, or the row's own ones at a limit; 0 at a true end."""
        values = self.spools[name].whole(transitions.following[part])
        values[~transitions.goes_on(part)] = 0
        cut = transitions.truncated[part]
        values[cut] = self.spools[f"next_{name}"].whole(transitions.cut[part][cut])
        return values

    def drop_absent_features(self, shared: SharedLists) -> None:
        """Removes the features of candidates that have no value in the lists, as their events are left out."""
        self._drop_empty_columns("action", (("candidates", rows) for rows in shared.candidates()))

    def _drop_empty_columns(self, key: str, used: Iterable[tuple[str, Indices]]) -> None:
        """Removes the columns of matrices that have no value in the used rows, given as (spool, its rows)."""
        columns = self.keys[key]
        names = sorted(columns)
        present = np.zeros(len(columns), bool)
        for spool, rows in used:
            for values in self.spools[spool].gather_rows(rows):
                present |= ~np.isnan(values).all(axis=0) if values.dtype == np.float32 else True
        for name in itertools.compress(names, ~present):
            del columns[name]


def _config_of(log: Log) -> TimelineConfig:
    """Returns the settings of the pairing, with the path and the actions of the log."""
    config = log.timeline or TimelineConfig()
    section = {"inputTableName": log.path, "actionDiscrete": log.actions is not None}
    query = config.query.model_copy(update={"actions": log.actions or ()})
    return config.model_copy(update={"timeline": config.timeline.model_copy(update=section), "query": query})


def _of_other_items(block: Block) -> int:
    """Returns the number of rows that a server decided with another item table than that of the file."""
    items = block.file.items
    table = block.table
    if items is None or not {*SERVED_COLUMNS} <= {*table.column_names} or not pa.types.is_string(table["items"].type):
        return 0
    return int(pc.sum(pc.not_equal(table["items"], items.sha256)).as_py() or 0)
