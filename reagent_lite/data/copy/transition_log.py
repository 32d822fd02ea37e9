"""The training copy of transitions: sorted, and written without the next states that are the following row's state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from reagent_lite.config.column_names import COLUMNS, EPISODE_COLUMNS
from reagent_lite.data.copy.order import index_type, take
from reagent_lite.data.copy.spooled_log import VECTORS, SpooledLog, Transitions
from reagent_lite.data.formats.blocks import Block, InputFile
from reagent_lite.data.logs import Log
from reagent_lite.data.rows.reading import Rows
from reagent_lite.data.rows.row_rules import RowRules
from reagent_lite.errors import DataError, Problem, join_names

_WRITTEN_SEPARATELY = {"sequence", "episode", "bootstrap", "truncated"}


class TransitionLog(SpooledLog[Transitions]):
    """Transitions in temporary files.

    Args:
        folder: folder of the temporary files and of the arrays.
        log: the log; single decisions that break a rule are left out and counted if its timeline drops episodes.
    """

    def __init__(self, folder: Path, log: Log) -> None:
        super().__init__(folder, log, RowRules(actions=log.actions))
        self._drops = log.timeline is not None and log.timeline.timeline.on_refused == "drop_episode"
        self._has_sequence = False
        self._first_without_sequence: str | None = None

    def read(self, block: Block) -> Rows:
        """Returns the checked rows of a block; if single decisions are dropped, those without a fault."""
        rows = super().read(block)
        if not self._drops or not rows.faults.kinds:
            return rows
        whole = ~rows.faults.rows
        kept = super().read(replace(block, table=block.table.filter(pa.array(whole)), lines=block.lines[whole]))
        return replace(kept, counts={**kept.counts, "refused_rows": rows.faults.count})

    def append(self, rows: Rows) -> None:
        """Adds a block; its faults are collected."""
        self.collect_faults(rows)
        if self.faults.kinds:
            return
        self.counts.update(rows.counts)
        self.learn_texts(rows)
        self.spool(rows)
        self.spool_next(rows, slice(None))
        self._has_sequence |= bool(rows.has_sequence.any())
        if self._first_without_sequence is None and not rows.has_sequence.all():
            self._first_without_sequence = rows.block.where(int(np.argmin(rows.has_sequence)))

    def check(self, files: Sequence[InputFile]) -> None:
        """Raises the faults that were collected, and those of the log as a whole."""
        self.faults.require_none()
        if self._has_sequence and self._first_without_sequence is not None:
            raise DataError(Problem(self._first_without_sequence, "a sequence_number, as other rows have one", "none"))
        ends = [name for name, column in COLUMNS.items() if column.needed == "ends"]
        episodes = sorted(self.seen_columns.intersection(EPISODE_COLUMNS))
        if self._drops and episodes:
            expected = "absent for transitions: it applies to events and to single decisions"
            raise DataError(
                Problem("timeline.on_refused", expected, f"drop_episode, and columns {join_names(episodes)}")
            )
        if episodes and self.seen_columns.isdisjoint(ends):
            expected = f"one of the columns {', '.join(ends)}, to know where episodes end"
            todo = f"If each row is an independent decision, leave out {' and '.join(episodes)}"
            raise DataError(Problem(files[0].location(), expected, "none of them", todo))

    def transitions(self) -> Transitions:
        """Returns the transitions of all rows."""
        order = self.order(by_sequence=self._has_sequence)
        if self.log.is_several and self.log.same_episodes:
            self.counts["repeated_rows"] = order.duplicates
            order = order.without_duplicates()
        self.counts["duplicate_rows"] = order.duplicates
        return Transitions(
            order=order,
            terminal=take(self.map_vector("bootstrap"), order.rows) == 0,
            truncated=take(self.map_vector("truncated"), order.rows) > 0,
        )

    def vectors_of(self, transitions: Transitions) -> Iterator[tuple[str, Iterable[NDArray[Any]]]]:
        """Yields (name, chunks of the vector [R]) for the vectors that the order does not give."""
        yield "bootstrap", [~transitions.terminal]
        yield "truncated", [transitions.truncated]
        for name in VECTORS.keys() - _WRITTEN_SEPARATELY:
            yield name, self.spools[name].gather_rows(transitions.order.rows)
            self.spools[name].remove()

    def write_states(self, transitions: Transitions) -> None:
        """Writes the states of all rows, then the next states that are not the state of the following row.

        state          row 0, row 1, ..., row R - 1 │ side row 0, side row 1, ...
        next_index[i]  i + 1  if row i + 1 is of the same episode and has row i's next state, bit for bit
                       i      at a true end
                       R + k  else, for the k-th such row
        """
        order = transitions.order
        rows = order.rows
        same = np.zeros(len(rows), bool)
        start = 0
        states = self.spools["state"]
        nexts = self.spools["next_state"]
        for after, state in zip(nexts.gather_rows(rows), states.gather_rows(np.roll(rows, -1)), strict=True):
            bits = np.uint8 if after.dtype == np.uint8 else np.uint32
            same[start : start + len(after)] = (after.view(bits) == state.view(bits)).all(axis=1)
            start += len(after)
        same &= ~transitions.terminal
        same[:-1] &= order.episode[:-1] == order.episode[1:]
        same[-1:] = False
        follows = same.copy()
        follows[:-1] &= order.sequence[:-1] < order.sequence[1:]
        side = np.flatnonzero(~same & ~transitions.terminal)
        total = len(rows) + len(side)
        next_index = np.arange(len(rows), dtype=index_type(total))
        next_index += same
        next_index[side] = np.arange(len(rows), total)
        self.save_next(next_index, follows, total)
        self.write_matrix("state", total, chain(states.gather_rows(rows), nexts.gather_rows(rows[side])))

    def metrics_of(self, transitions: Transitions) -> Iterable[NDArray[np.float32]]:
        """Yields chunks of the metrics [R, M]."""
        return self.spools["metrics"].gather_rows(transitions.order.rows)

    def next_of(self, name: str, transitions: Transitions, part: slice) -> NDArray[Any]:
        """Returns the values of the matrix "mask" or "lists" at the next states of some transitions."""
        return self.spools[f"next_{name}"].whole(transitions.order.rows[part])
