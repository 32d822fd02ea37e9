"""The rows of a log in temporary files, which become the arrays of a training copy.

blocks ─► checked rows ─► append: a spool for each vector and matrix ─► write: each in the order of the copy

Logs of transitions and of events spool different values and make transitions in different ways: transition_log.py,
event_log.py.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from reagent_lite.config.column_names import COLUMNS, EPISODE_COLUMNS
from reagent_lite.data.copy.lists import SharedLists, list_records, share_lists
from reagent_lite.data.copy.order import Order, find_order
from reagent_lite.data.copy.spool import Indices, Spool, TextSpool, parts_of, write_npy
from reagent_lite.data.faults_by_kind import FaultsByKind
from reagent_lite.data.formats.blocks import Block, InputFile, Reader
from reagent_lite.data.logs import Log
from reagent_lite.data.rows.block_columns import require_one_order
from reagent_lite.data.rows.levels import SIDE_OF, Vocabulary
from reagent_lite.data.rows.matrices import Lists, Mask
from reagent_lite.data.rows.reading import Rows, read_rows
from reagent_lite.data.rows.row_rules import ALONE, RowRules
from reagent_lite.errors import join_names, pluralize

VECTORS: dict[str, DTypeLike] = {
    "action": np.int32,
    "next_action": np.int32,
    "reward": np.float32,
    "time_diff": np.float32,
    "step": np.uint8,
    "propensity": np.float32,
    "bootstrap": np.float32,
    "truncated": np.uint8,
    "sequence": np.int64,
    "origin_file": np.int32,
    "origin_line": np.int64,
    "episode": np.int64,
}
MATRICES: dict[str, tuple[DTypeLike, str]] = {
    "state": (np.float32, "state"),
    "next_state": (np.float32, "state"),
    "mask": (np.uint8, "choice"),
    "next_mask": (np.uint8, "choice"),
    "metrics": (np.float32, "metric"),
    "candidates": (np.float32, "action"),
    "lists": (np.int64, "record"),
    "next_lists": (np.int64, "record"),
}
"""Type of each matrix, and the kind of its columns; see `SpooledLog.keys`."""
NEARLY_ALL = 0.95
"""Share of rows with a single candidate from which there is nothing to choose in a log."""
_NOT_IN_ROWS = {"origin_file", "origin_line", "episode"}  # vectors that `spool` computes
_RECORD = (0, 1, 2, 3)  # columns of the result of `list_records`


@dataclass(frozen=True, slots=True, kw_only=True)
class Transitions:
    """The R transitions of a copy.

    Attributes:
        order: their first rows, in the copy's order.
        terminal, truncated: [R] how they end.
    """

    order: Order
    terminal: Mask
    truncated: Mask


T = TypeVar("T", bound=Transitions)


class SpooledLog(ABC, Generic[T]):
    """The rows of all blocks in temporary files, until the arrays are written.

    Attributes:
        folder: the folder of the temporary files and of the arrays.
        log: the log whose rows they are.
        actions: names of discrete actions; None for parametric ones.
        keys: {kind of columns: {key: column}}. Keys are feature ids of states and candidates, names of metrics, numbers
            of actions ("choice"), and columns of `list_records`.
        vocabulary: strings of features.
        counts: as in TrainingCopy, once the arrays are written.
        report: rows read and left out of a log of events, as in the manifest; empty for transitions.
    """

    vectors: ClassVar[dict[str, DTypeLike]] = VECTORS

    def __init__(self, folder: Path, log: Log, rules: RowRules) -> None:
        self.folder = folder
        self.log = log
        self.actions = rules.actions
        self.rules = rules
        self._checked: set[int] = set()
        choices = {number: number for number in range(len(self.actions or ()))}
        record = {column: column for column in _RECORD}
        numbered = {name: dict[Any, int]() for name in ("state", "action", "metric")}
        self.keys: dict[str, dict[Any, int]] = {**numbered, "choice": choices, "record": record}
        self.spools: dict[str, Spool[Any]] = {
            **{name: Spool(folder / f"{name}.spool", dtype) for name, dtype in self.vectors.items()},
            **{name: Spool(folder / f"{name}.spool", dtype, self.keys[key]) for name, (dtype, key) in MATRICES.items()},
        }
        if log.image is not None:
            for name in ("state", "next_state"):
                self.spools[name] = Spool(folder / f"{name}.spool", np.uint8, self.keys["state"])
        self.vocabulary = Vocabulary()
        self._mdp_ids = TextSpool(folder / "mdp_ids.spool")
        self.num_rows = 0
        self.counts: Counter[str] = Counter()
        self.report: dict[str, Any] = {}
        self.seen_columns: set[str] = set()
        self.faults = FaultsByKind()
        self._orders: dict[str, str] = {}
        self._of_several: tuple[str, ...] = ()

    @property
    def readers(self) -> dict[str, Reader] | None:
        """Readers of the files; None for readers of the columns that training needs."""
        return None

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about the log that a user should read, once the arrays are written."""
        return (*self._of_several, *_notes(self.counts, self.seen_columns))

    def read(self, block: Block) -> Rows:
        """Returns the checked rows of a block; called in any thread."""
        if block.file_number not in self._checked:
            self.rules.require_columns(block)
            self._checked.add(block.file_number)
        return read_rows(block, self.rules)

    @abstractmethod
    def append(self, rows: Rows) -> None:
        """Adds a block; its faults are collected."""

    @abstractmethod
    def check(self, files: Sequence[InputFile]) -> None:
        """Raises the faults that were collected, and those of the log as a whole."""

    @abstractmethod
    def transitions(self) -> T:
        """Returns the transitions of all rows."""

    @abstractmethod
    def vectors_of(self, transitions: T) -> Iterator[tuple[str, Iterable[NDArray[Any]]]]:
        """Yields (name, chunks of the vector [R]) for the vectors that the order does not give."""

    @abstractmethod
    def write_states(self, transitions: T) -> None:
        """Writes the states, and the position of each next state among them."""

    @abstractmethod
    def metrics_of(self, transitions: T) -> Iterable[NDArray[np.float32]]:
        """Yields chunks of the metrics [R, M]."""

    @abstractmethod
    def next_of(self, name: str, transitions: T, part: slice) -> NDArray[Any]:
        """Returns the values of the matrix "mask" or "lists" at the next states of some transitions."""

    def drop_absent_features(self, shared: SharedLists) -> None:
        """Removes the features of candidates that have no value in the lists."""
        return

    def collect_faults(self, rows: Rows) -> None:
        """Adds the faults of a block, its columns, and whether its sequence numbers are integers or times."""
        of_ids = {f"{prefix}{name}" for name in rows.block.file.id_columns for prefix in ("", "next_")}
        self.seen_columns |= set(rows.block.table.column_names) - of_ids
        self._orders = {**rows.faults.orders, **self._orders}
        self.faults.merge(rows.faults.by_kind())
        if rows.faults.ids_left_out:
            self.counts["ids_left_out"] += rows.faults.ids_left_out

    def learn_texts(self, rows: Rows) -> None:
        """Adds the strings of features of a block.

        Raises:
            DataError: a feature with numbers in some rows and strings in others.
        """
        self.vocabulary.add(rows.faults.levels)
        texts: dict[str, set[int]] = {"state": set(), "action": set()}
        for column, levels in rows.faults.levels.items():
            texts[SIDE_OF[column]] |= levels.keys()
        for matrix in (rows.state, rows.next_state) if self.log.image is None else ():
            self.vocabulary.require_one_kind("state", matrix, texts["state"], rows.block)
        for lists in (rows.lists, rows.next_lists):
            if lists is not None:
                self.vocabulary.require_one_kind("action", lists.features, texts["action"], rows.block, lists.rows)

    def spool(self, rows: Rows, **other: NDArray[Any]) -> None:
        """Adds the values of rows; vectors in `other` replace those of the rows."""
        for name in self.vectors.keys() - _NOT_IN_ROWS:
            self.spools[name].append(other[name] if name in other else getattr(rows, name))
        self.spools["origin_file"].append(np.full(len(rows), rows.block.file_number))
        self.spools["origin_line"].append(rows.block.lines)
        episode = rows.episode.astype(np.int64) + len(self._mdp_ids)
        self.spools["episode"].append(np.where(rows.episode < 0, -1, episode))
        self.spools["state"].append(_canonical(rows.state.values), rows.state.ids)
        self.spools["metrics"].append(rows.metrics.values, rows.metrics.names)
        self.spools["mask"].append(rows.mask, tuple(range(rows.mask.shape[1])))
        self._spool_lists("lists", rows.lists)
        self._mdp_ids.append(rows.mdp_ids)
        self.num_rows += len(rows)

    def spool_next(self, rows: Rows, which: slice | NDArray[np.int64]) -> None:
        """Adds the next values of some of the rows."""
        self.spools["next_state"].append(_canonical(rows.next_state.values[which]), rows.next_state.ids)
        self.spools["next_mask"].append(rows.next_mask[which], tuple(range(rows.mask.shape[1])))
        self._spool_lists("next_lists", rows.next_lists, which)

    def _spool_lists(self, name: str, lists: Lists | None, which: slice | NDArray[np.int64] = slice(None)) -> None:
        if lists is not None:
            candidates = self.spools["candidates"]
            self.spools[name].append(list_records(lists, candidates.num_rows)[which], _RECORD)
            candidates.append(lists.features.values, lists.features.ids)

    def write(self) -> None:
        """Writes every array in the copy's order, and removes the spools.

        Raises:
            DataError: sequence numbers do not determine the order of the rows, or a row is followed by one without a
                possible action.
            NoRowsError: no event leads to a known state.
        """
        transitions = self.transitions()
        order = transitions.order
        num = len(order.rows)
        self.save("episode_hash", order.episode_hashes())
        order = replace(
            order, episode=self.save("episode", order.episode), sequence=self.save("sequence", order.sequence)
        )
        transitions = replace(transitions, order=order)
        for name, chunks in self.vectors_of(transitions):
            self._write(name, VECTORS[name], (num,), chunks)
        self.counts.update(
            rows=num,
            episodes=order.num_episodes,
            terminal_rows=int(transitions.terminal.sum()),
            truncated_rows=int(transitions.truncated.sum()),
        )
        self.write_states(transitions)
        for name in ("state", "next_state"):
            self.spools[name].remove()  # early, as they are most of the bytes
        self.write_matrix("metrics", num, self._without_gaps(self.metrics_of(transitions)))
        self.write_matrix("mask", num, self.spools["mask"].gather_rows(order.rows))
        parts = parts_of(num, len(self.keys["choice"]))
        self.write_matrix("next_mask", num, (self.next_of("mask", transitions, part) for part in parts))
        self._write_lists(transitions)
        for spool in self.spools.values():
            spool.remove()

    def order(self, *, by_sequence: bool) -> Order:
        """Returns the order of all rows, by sequence number or as in the files."""
        sequence = self.map_vector("sequence")
        slots = self.map_vector("episode")
        order = find_order(slots, self._mdp_ids.map_texts(), sequence if by_sequence else None)
        self._mdp_ids.remove()
        require_one_order(self._orders, order.duplicates)
        if self.log.is_several and self.log.same_episodes is None and by_sequence:
            self._of_several = _of_shared_pairs(self.log, order.pairs_in_several_logs())
        return order

    def map_vector(self, name: str) -> NDArray[Any]:
        """Returns a vector of all rows as a memory map, and removes its spool."""
        values = self.spools[name].map_rows()
        self.spools[name].remove()
        return values

    def save(self, name: str, values: NDArray[Any]) -> NDArray[Any]:
        """Writes a vector as the copy has it, and returns it as a memory map."""
        return self._write(name, values.dtype, values.shape, [values])

    def save_next(self, next_index: Indices, follows: Mask, total: int) -> None:
        """Writes the positions of next states among all `total` states."""
        self.save("next_index", next_index)
        self.save("follows", follows)
        self.counts["further_next_states"] = total - len(follows)

    def write_matrix(self, name: str, rows: int, chunks: Iterable[NDArray[Any]]) -> None:
        """Writes a matrix with the columns of its spool."""
        spool = self.spools[name]
        self._write(name, spool.dtype, (rows, spool.width), chunks)

    def _write(
        self, name: str, dtype: DTypeLike, shape: tuple[int, ...], chunks: Iterable[NDArray[Any]]
    ) -> NDArray[Any]:
        file = self.folder / f"{name}.npy"
        with file.open("wb") as stream:
            write_npy(stream, dtype, shape, chunks)
        return np.asarray(np.load(file, mmap_mode="r" if math.prod(shape) else None))

    def _write_lists(self, transitions: T) -> None:
        """Writes the lists of rows and of their next states."""
        rows = transitions.order.rows if self.actions is None else transitions.order.rows[:0]
        records: Spool[int] = Spool(self.folder / "records.spool", np.int64, self.keys["record"])
        for part in parts_of(len(rows)):
            now = self.spools["lists"].whole(rows[part])
            both = np.stack((now, self.next_of("lists", transitions, part)), axis=1)
            records.append(both.reshape(-1, len(_RECORD)), _RECORD)
        start, length = (Spool[int](self.folder / f"list_{name}.spool", np.int64) for name in ("start", "length"))
        shared = share_lists(records.map_rows(), start, length)
        total = int(shared.length.sum())
        offsets = np.zeros(len(shared.length) + 1, np.int64)
        np.cumsum(shared.length, out=offsets[1:])
        self.save("list_offsets", offsets)
        self.save("actions_list", shared.now)
        self.save("next_list", shared.after)
        self.drop_absent_features(shared)
        chunks = chain.from_iterable(map(self.spools["candidates"].gather_rows, shared.candidates()))
        self.write_matrix("candidates", total, chunks)
        if self.actions is None:
            single = sum(int((shared.length[shared.now[part]] == 1).sum()) for part in parts_of(len(rows)))
            self.counts.update(lists=len(shared.length), candidates=total, single_candidate_rows=single)
        for spool in (records, start, length):
            spool.remove()

    def _without_gaps(self, chunks: Iterable[NDArray[np.float32]]) -> Iterator[NDArray[np.float32]]:
        """Yields metrics with 0 in place of absent values, and counts these."""
        for values in chunks:
            self.counts["metrics_absent_values"] += int(np.isnan(values).sum())
            yield np.nan_to_num(values, nan=0.0)


def _of_shared_pairs(log: Log, count: int) -> tuple[str, ...]:
    """Returns a sentence about the pairs of mdp_id and sequence_number that several logs have, if there are any."""
    if not count:
        return ()
    pairs = pluralize(count, "pair of mdp_id and sequence_number is", "pairs of mdp_id and sequence_number are")
    return (
        f"{log.name}: {pairs} in more than one log, and belong to different episodes. Set same_episodes, in training "
        "data.same_episodes, to true if they are the same decisions, which then count once, else to false",
    )


def _canonical(values: NDArray[Any]) -> NDArray[Any]:
    """Sets every NaN to the same bits, so that rows can be compared by their bits."""
    absent = np.isnan(values) if values.dtype == np.float32 else np.zeros(0, bool)
    return np.where(absent, np.float32(np.nan), values) if absent.any() else values


def _notes(counts: Counter[str], columns: set[str]) -> tuple[str, ...]:
    """Returns sentences about a log that a user should read."""
    rows = pluralize(counts["rows"], "row")
    some = [(counts[key], what) for key, what in _OF_ALL_ROWS.items() if counts[key]]
    if counts["single_candidate_rows"] >= NEARLY_ALL * max(counts["rows"], 1):
        some.append((counts["single_candidate_rows"], "a single candidate, and nothing to choose"))
    sentences = [f"{number:,} of {rows} {'has' if number == 1 else 'have'} {what}" for number, what in some]
    if columns.isdisjoint(EPISODE_COLUMNS):
        sentences.append(ALONE)
        counts = Counter({**counts, "rows_without_mdp_id": 0})  # ALONE implies it
    sentences += [f"{pluralize(counts[key], *words)} {what}" for key, (*words, what) in _COUNTED.items() if counts[key]]
    if ignored := sorted(columns - COLUMNS.keys()):
        sentences.append(f"columns that training does not use: {join_names(ignored)}")
    return tuple(sentences)


_OF_ALL_ROWS = {
    "propensity_absent_rows": 'no propensity; weighted estimates need it, or evaluation.propensities "estimate"',
    "unknown_action_rows": "no action and no part in training",
    "candidates_unknown_rows": "an empty possible_actions; the action taken is the only candidate there",
}
_COUNTED = {
    "refused_rows": (
        "row that breaks",
        "rows that break",
        "a rule left out by timeline.on_refused, such as one without a reward",
    ),
    "repeated_rows": (
        "row repeats",
        "rows repeat",
        "the mdp_id and sequence_number of an earlier row, which counts alone, as the logs have the same episodes",
    ),
    "duplicate_rows": ("row shares", "rows share", "mdp_id and sequence_number with another row"),
    "metrics_absent_values": ("metric value is absent and counts", "metric values are absent and count", "as 0"),
    "next_action_not_possible_rows": ("row has", "rows have", "a next_action that is not among possible_next_actions"),
    "ids_left_out": ("id is", "ids are", "left out of lists that are longer than their length in embeddings"),
    "rows_without_mdp_id": ("row has", "rows have", "no mdp_id; each counts as an episode of its own"),
}
