"""The training copy of events: sorted once, paired as a timeline pairs them, but without a timeline's files.

checked events, spooled ─► sorted by episode ─► kept, complete, spans (timeline/episodes.py) ─► arrays of the copy
"""

from __future__ import annotations

import heapq
import itertools
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
from reagent_lite.data.copy.order import Order
from reagent_lite.data.copy.spooled_log import VECTORS, SpooledLog, Transitions
from reagent_lite.data.formats.blocks import Block, InputFile, Reader
from reagent_lite.data.formats.format_table import readers_of
from reagent_lite.data.formats.schema import fill_nulls
from reagent_lite.data.rows.block_columns import NONE
from reagent_lite.data.rows.matrices import Mask
from reagent_lite.data.rows.reading import NEXT_ACTION, Rows, read_rows
from reagent_lite.data.timeline.event_spans import MAX_DUPLICATES, Counts, Ends, Episodes, SpannedRows
from reagent_lite.data.timeline.events import EventFacts, contract_of, select_rows
from reagent_lite.data.timeline.report import (
    log_figures,
    longest_rows,
    none_complete,
    report_of,
    require_rows,
    require_selected,
)
from reagent_lite.errors import DataError, Problem, pluralize

_ROWS_AT_ONCE = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedEvents(Transitions):
    """R transitions made from events. Rows are numbered in the order of the files.

    Attributes:
        order: the copy's order, of the transitions' first rows.
        events: [n] rows of the events that are kept, in order.
        spans: the span of each transition among these events.
        goes_on: [R] whether a row follows the transition.
        terminal, truncated: [R] as in SpannedRows.
        following: [R] the row that follows; arbitrary if none does.
        cut: [R] index of the transition's last row among all rows that a limit cut; arbitrary for other rows.
    """

    events: NDArray[np.int64]
    spans: SpannedRows
    goes_on: Mask
    following: NDArray[np.int64]
    cut: NDArray[np.int64]

    @classmethod
    def of(cls, order: Order, kept: NDArray[np.int64], spans: SpannedRows, cut: NDArray[np.int64]) -> PairedEvents:
        """Returns the transitions of the events with the indices `kept`; `cut` are the rows that a limit cut."""
        events = order.rows[kept]
        last = len(kept) - 1
        codes, episode = np.unique(order.episode[kept][spans.at], return_inverse=True)
        terminal = spans.terminal
        truncated = spans.truncated
        return cls(
            order=Order(
                rows=events[spans.at],
                episode=episode.astype(np.int32),
                sequence=spans.episodes.sequence[spans.at],
                mdp_ids=order.mdp_ids.take(pa.array(codes)),
                alone=np.empty(0, np.int64),
                duplicates=0,
            ),
            events=events,
            spans=spans,
            goes_on=~terminal & ~truncated,
            terminal=terminal,
            truncated=truncated,
            following=events[np.minimum(spans.end + 1, last)],
            cut=np.searchsorted(cut, events[spans.end]),
        )


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

    def __init__(self, folder: Path, config: TimelineConfig) -> None:
        super().__init__(folder, contract_of(config))
        self.config = config
        self.report: dict[str, Any] = {}
        self._facts_of_blocks: list[EventFacts] = []
        self._refused: dict[str, set[str]] = {}
        self._cut: list[NDArray[np.int64]] = []
        self._other_items = 0
        self._facts = EventFacts()
        self._files: Sequence[InputFile] = ()

    @property
    def readers(self) -> dict[str, Reader]:
        """Readers of what training reads, dates, extra columns of the config, and hashes of item tables."""
        columns = (*TRAINING_COLUMNS, "ds", *self.contract.extra)
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
        rows = read_rows(block, self.contract)
        facts.unlisted = rows.counts["candidates_unknown_rows"]
        self._facts_of_blocks.append(facts)
        if rows.faults.kinds:
            whole = ~rows.faults.rows
            block = replace(block, table=block.table.filter(pa.array(whole)), lines=block.lines[whole])
            kept = read_rows(block, self.contract)
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
        self._cut.append(cut + self.num_rows)
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
        names = ("bootstrap", "truncated", "has_next_state", "without_choice")
        bootstrap, *further = (self.read_vector(name, order.rows) for name in names)
        section = self.config.timeline
        ends = Ends(bootstrap == 0, *(vector > 0 for vector in further))
        episodes = Episodes.of(section, order.episode, order.sequence, ends)
        at, duplicates = episodes.without_duplicates(self._of_whole_episodes(order, counts), counts)
        require_rows(self.config, self._facts, counts)
        counts.duplicates = self._first_lines(order.rows[duplicates])
        distinct = episodes.only(at)
        longest = longest_rows(self.config, lambda: distinct.lengths)
        at, kept = distinct.without_outliers(longest, at, counts)
        counts.figures.update(kept.figures(self.spools["reward"].whole(order.rows[at])))
        log_figures(self.config, self._facts, counts, self._files)
        pairs = PairedEvents.of(order, at, kept.spans(), np.concatenate(self._cut))
        self.report = report_of(self.config, self._facts, longest, counts, [len(pairs.order.rows)])
        if not len(pairs.order.rows):
            raise none_complete(self.config, self._facts, counts)
        self._require_choices(pairs)
        return pairs

    def _of_whole_episodes(self, order: Order, counts: Counts) -> Mask:
        """Returns [R] whether the row's episode has no refused row; counts the others."""
        counts.refused.update({rule: len(names) for rule, names in self._refused.items()})
        refused = pa.array(sorted(set().union(*self._refused.values())), pa.string())
        number = fill_nulls(pc.index_in(order.mdp_ids, refused), -1)
        whole: Mask = (number < 0)[order.episode]
        return whole

    def _first_lines(self, rows: NDArray[np.int64]) -> list[tuple[int, int]]:
        file, line = (self.spools[name].whole(rows).tolist() for name in ("origin_file", "origin_line"))
        return heapq.nsmallest(MAX_DUPLICATES, zip(file, line, strict=True))

    def _require_choices(self, pairs: PairedEvents) -> None:
        possible = self.read_vector("possible")
        lacking = pairs.goes_on & (possible[pairs.following] == 0)
        if lacking.any():
            file, line = self._first_lines(pairs.order.rows[lacking])[0]
            got = f"none, nor in {pluralize(int(lacking.sum()) - 1, 'other row')}"
            raise DataError(Problem(self._files[file].location(line), NEXT_ACTION, got))

    def vectors_of(self, transitions: PairedEvents) -> Iterator[tuple[str, NDArray[Any]]]:
        """Yields (name, vector [R]) for the vectors that the order does not give."""
        rows = transitions.order.rows
        spans = transitions.spans
        action = self.read_vector("action")
        propensity = self.read_vector("propensity", rows)
        gamma = self.config.timeline.gamma
        reward = self.read_vector("reward")
        absent = np.isnan(propensity)
        self.counts.update(
            unknown_action_rows=int((action[rows] == NONE).sum()),
            propensity_absent_rows=int(absent.sum()),
            next_action_not_possible_rows=0,
            rows_without_mdp_id=0,
        )
        yield "action", action[rows]
        yield "next_action", np.where(transitions.goes_on, action[transitions.following], NONE)
        yield "reward", reward[rows] if gamma is None else spans.summed(reward[transitions.events], gamma)
        yield "time_diff", spans.time_diff.astype(np.float64)
        yield "step", spans.steps
        yield "propensity", np.where(absent, 1, propensity)
        yield "bootstrap", ~transitions.terminal
        yield "truncated", transitions.truncated
        for name in ("origin_file", "origin_line"):
            yield name, self.read_vector(name, rows)

    def write_states(self, transitions: PairedEvents) -> None:
        """Writes the states of the transitions' first rows, then all other next states, each once."""
        rows = transitions.order.rows
        following = transitions.following
        goes_on = transitions.goes_on
        total = len(rows)
        position = np.full(self.num_rows, -1)
        position[rows] = np.arange(total)
        not_first = np.unique(following[goes_on & (position[following] < 0)])
        position[not_first] = total + np.arange(len(not_first))
        limits, limit = np.unique(transitions.cut[transitions.truncated], return_inverse=True)
        numbers = np.arange(total)
        next_index = np.where(goes_on, position[following], numbers)
        next_index[transitions.truncated] = total + len(not_first) + limit
        total += len(not_first) + len(limits)
        self.save_next(next_index, goes_on & (next_index == numbers + 1), total)
        states = self.spools["state"]
        nexts = self.spools["next_state"]
        used = np.concatenate((rows, not_first))
        if len(used) < self.num_rows or len(limits) < nexts.num_rows:
            self._drop_empty_columns("state", (("state", used), ("next_state", limits)))
        self.write_matrix("state", total, chain(states.gather_rows(used), nexts.gather_rows(limits)))

    def metrics_of(self, transitions: PairedEvents) -> Iterable[NDArray[np.float32]]:
        """Yields chunks of the metrics [R, M]."""
        spool = self.spools["metrics"]
        timeline = self.config.timeline
        if timeline.steps > 1 and "metrics" in timeline.rewardColumns:
            values = spool.whole(transitions.events).astype(np.float64)
            return [transitions.spans.summed(values, timeline.gamma or 0.0).astype(np.float32)]
        self._drop_empty_columns("metric", (("metrics", transitions.order.rows),))
        return spool.gather_rows(transitions.order.rows)

    def next_of(self, name: str, transitions: PairedEvents) -> Iterator[NDArray[Any]]:
        """Yields values at the next state: of the following row, or the row's own ones at a limit; 0 at a true end."""
        for start in range(0, len(transitions.cut), _ROWS_AT_ONCE):
            part = slice(start, start + _ROWS_AT_ONCE)
            values = self.spools[name].whole(transitions.following[part])
            values[~transitions.goes_on[part]] = 0
            cut = transitions.truncated[part]
            values[cut] = self.spools[f"next_{name}"].whole(transitions.cut[part][cut])
            yield values

    def write_lists(self, shared: SharedLists) -> None:
        """Writes the lists of rows and of their next states."""
        self._drop_empty_columns("action", (("candidates", rows) for rows in shared.candidates()))
        super().write_lists(shared)

    def _drop_empty_columns(self, key: str, used: Iterable[tuple[str, NDArray[np.int64]]]) -> None:
        """Removes the columns of matrices that have no value in the used rows, given as (spool, its rows)."""
        columns = self.keys[key]
        names = sorted(columns)
        present = np.zeros(len(columns), bool)
        for spool, rows in used:
            for values in self.spools[spool].gather_rows(rows):
                present |= ~np.isnan(values).all(axis=0)
        for name in itertools.compress(names, ~present):
            del columns[name]


def _of_other_items(block: Block) -> int:
    """Returns the number of rows that a server decided with another item table than that of the file."""
    items = block.file.items
    table = block.table
    if items is None or not {*SERVED_COLUMNS} <= {*table.column_names} or not pa.types.is_string(table["items"].type):
        return 0
    return int(pc.sum(pc.not_equal(table["items"], items.sha256)).as_py() or 0)
