"""Builds a training copy: blocks are checked, spooled in the order of the files, and written in the copy's order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import DTypeLike, NDArray

from reagent_lite.config.columns import COLUMNS, EPISODE_COLUMNS
from reagent_lite.data.copy.lists import SharedLists, list_records, share
from reagent_lite.data.copy.place import KIND, CopyManifest
from reagent_lite.data.copy.spool import Spool, write_npy
from reagent_lite.data.faults_by_kind import FaultsByKind
from reagent_lite.data.formats.blocks import Block, Reader, Show
from reagent_lite.data.formats.files import InputFile
from reagent_lite.data.formats.reading import read_blocks
from reagent_lite.data.formats.schema import to_numpy
from reagent_lite.data.log_shares import rows_by_log
from reagent_lite.data.rows.columns import require_one_order
from reagent_lite.data.rows.contract import ALONE, Contract
from reagent_lite.data.rows.hashes import mix, name_hashes
from reagent_lite.data.rows.levels import MOST_LEVELS, SIDE_OF, Levels, Vocabulary, most_frequent
from reagent_lite.data.rows.matrices import Lists, Mask
from reagent_lite.data.rows.reading import Rows, read_rows
from reagent_lite.data.stage import states_of
from reagent_lite.errors import DataError, Problem, counted, listed

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
"""Type of each matrix, and the keys of its columns; see `SpooledLog.keys`."""
_PLACES = {"origin_file", "origin_line", "episode"}
_RECORD = (0, 1, 2, 3)  # columns of what `list_records` returns
_NAMES_AT_ONCE = 1 << 16


def build(
    files: tuple[InputFile, ...],
    log: SpooledLog,
    progress: Show | None,
    settings: dict[str, Any],
    log_notes: tuple[str, ...] = (),
) -> CopyManifest:
    """Writes the arrays of a training copy of `files` into the log's folder, and returns its manifest.

    Args:
        files: the input; none for the copy of a machine without rows.
        log: the log that they are, without rows yet; its folder holds the arrays alone afterwards.
        progress: called with (bytes read, total bytes).
        settings: the settings of the copy, see `place.Place`.
        log_notes: sentences about several logs that the files are of.

    Raises:
        DataError: with file and line of a few rows of each kind of fault, and how many there are.
    """
    hashes: list[str] = []
    if files:
        for rows in read_blocks(files, log.read, progress, log.readers, hashes):
            log.append(rows)
        log.check(files)
    log.write()
    log.counts.update(rows_by_log(files, np.load(log.folder / "origin_file.npy")))
    return CopyManifest(
        kind=KIND,
        rows=log.counts["rows"],
        columns={},
        state_ids=tuple(sorted(log.keys["state"])),
        action_ids=tuple(sorted(log.keys["action"])),
        metric_names=tuple(sorted(log.keys["metric"])),
        settings=settings,
        inputs=states_of(files, hashes),
        report=log.report,
        files={file.name: {} for file in log.folder.iterdir()},
        paths=tuple(file.path for file in files),
        action_names=log.actions or (),
        counts=dict(log.counts),
        notes=(*log_notes, *log.notes),
        levels={side: _written(of_side, log.keys[side]) for side, of_side in log.vocabulary.levels.items()},
        without_value={side: log.vocabulary.without_value(side, log.keys[side]) for side in log.vocabulary.levels},
    )


def _written(levels: Levels, ids: Collection[int]) -> dict[str, dict[str, int]]:
    """Returns the texts of features as JSON has them."""
    return {
        str(feature): dict(sorted(most_frequent(counts, MOST_LEVELS)))
        for feature, counts in sorted(levels.items())
        if feature in ids
    }


class SpooledLog:
    """The transitions of all blocks in the order of the files, in temporary files until the arrays are written.

    Attributes:
        folder: where they and the arrays are.
        actions: names of discrete actions; None for parametric ones.
        keys: {key: column} of matrices: ids of features of states and candidates and names of metrics as found,
            choices, and the columns of records of lists.
        vocabulary: texts of features.
        counts, notes: as in TrainingCopy, once the arrays are written.
        report: rows read and left out of a log of events, as in the manifest; empty for transitions.
    """

    vectors: ClassVar[dict[str, DTypeLike]] = VECTORS

    def __init__(self, folder: Path, actions: tuple[str, ...] | None, contract: Contract | None = None) -> None:
        self.folder = folder
        self.actions = actions
        self.contract = contract or Contract(actions=actions)
        self._checked: set[int] = set()
        choices = {number: number for number in range(len(actions or ()))}
        record = {column: column for column in _RECORD}
        numbered = {name: dict[Any, int]() for name in ("state", "action", "metric")}
        self.keys: dict[str, dict[Any, int]] = {**numbered, "choice": choices, "record": record}
        self.spools: dict[str, Spool[Any]] = {
            **{name: Spool(folder / f"{name}.spool", dtype) for name, dtype in self.vectors.items()},
            **{name: Spool(folder / f"{name}.spool", dtype, self.keys[key]) for name, (dtype, key) in MATRICES.items()},
        }
        self.vocabulary = Vocabulary()
        self.mdp_ids: list[pa.Array] = []
        self.num_mdp_ids = 0
        self.num_rows = 0
        self.counts: Counter[str] = Counter()
        self.report: dict[str, Any] = {}
        self.seen_columns: set[str] = set()
        self.faults = FaultsByKind()
        self.has_sequence = False
        self.orders: dict[str, str] = {}
        self.first_without_sequence: str | None = None

    @property
    def readers(self) -> dict[str, Reader] | None:
        """Readers of the files; None: those of the columns that training reads."""
        return None

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about the log that a user should read."""
        return notes(self.counts, self.seen_columns)

    def read(self, block: Block) -> Rows:
        """Returns the checked rows of a block; called in any thread."""
        if block.file_number not in self._checked:
            self.contract.require_columns(block.table.column_names, block.where(0))
            self._checked.add(block.file_number)
        return read_rows(block, self.contract)

    def append(self, rows: Rows) -> None:
        """Adds a block; its faults are collected."""
        self.collect_faults(rows)
        if self.faults.kinds:
            return
        self.counts.update(rows.counts)
        self.learn_texts(rows)
        self.spool(rows)
        every = slice(None)
        self.spool_next(rows, every)
        self.has_sequence |= bool(rows.has_sequence.any())
        if self.first_without_sequence is None and not rows.has_sequence.all():
            self.first_without_sequence = rows.block.where(int(np.argmin(rows.has_sequence)))

    def collect_faults(self, rows: Rows) -> None:
        """Adds the faults of a block, its columns, and whether its sequence numbers are integers or times."""
        self.seen_columns |= set(rows.block.table.column_names)
        self.orders = {**rows.faults.orders, **self.orders}
        self.faults.merge(rows.faults.by_kind())

    def learn_texts(self, rows: Rows) -> None:
        """Adds the texts of features of a block.

        Raises:
            DataError: a feature with numbers in some rows and texts in others.
        """
        self.vocabulary.add(rows.faults.levels)
        texts: dict[str, set[int]] = {"state": set(), "action": set()}
        for column, levels in rows.faults.levels.items():
            texts[SIDE_OF[column]] |= levels.keys()
        for matrix in (rows.state, rows.next_state):
            self.vocabulary.require_one_kind("state", matrix, texts["state"], rows.block)
        for lists in (rows.lists, rows.next_lists):
            if lists is not None:
                self.vocabulary.require_one_kind("action", lists.features, texts["action"], rows.block, lists.rows)

    def spool(self, rows: Rows, **other: NDArray[Any]) -> None:
        """Adds the rows' own values, and `other` values by name in place of those that they have."""
        for name in self.vectors.keys() - _PLACES:
            self.spools[name].append(other[name] if name in other else getattr(rows, name))
        self.spools["origin_file"].append(np.full(len(rows), rows.block.file_number))
        self.spools["origin_line"].append(rows.block.lines)
        episode = rows.episode.astype(np.int64) + self.num_mdp_ids
        self.spools["episode"].append(np.where(rows.episode < 0, -1, episode))
        self.spools["state"].append(_canonical(rows.state.values), rows.state.ids)
        self.spools["metrics"].append(rows.metrics.values, rows.metrics.names)
        self.spools["mask"].append(rows.mask, tuple(range(rows.mask.shape[1])))
        self._spool_lists("lists", rows.lists)
        self.mdp_ids.append(rows.mdp_ids)
        self.num_mdp_ids += len(rows.mdp_ids)
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

    def check(self, files: Sequence[InputFile]) -> None:
        """Raises the faults that were collected, and those of the log as a whole."""
        self.faults.require_none()
        if self.has_sequence and self.first_without_sequence is not None:
            raise DataError(Problem(self.first_without_sequence, "a sequence_number, as other rows have one", "none"))
        ends = [name for name, column in COLUMNS.items() if column.needed == "ends"]
        episodes = sorted(self.seen_columns.intersection(EPISODE_COLUMNS))
        if episodes and self.seen_columns.isdisjoint(ends):
            expected = f"one of the columns {', '.join(ends)}, to know where episodes end"
            todo = f"If each row is a decision of its own, leave out {' and '.join(episodes)}"
            raise DataError(Problem(files[0].place(), expected, "none of them", todo))

    def write(self) -> None:
        """Writes every array in the copy's order, and removes the spools.

        Raises:
            DataError: sequence numbers that do not say in which order rows happened.
        """
        order = self.order()
        self.save("episode", order.episode)
        self.save("sequence", order.sequence)
        self.save("episode_hash", order.episode_hashes())
        ends = {name: self.read_vector(name, order.rows) for name in ("bootstrap", "truncated")}
        for name in VECTORS:
            if name not in ("sequence", "episode"):
                self.save(name, ends[name] if name in ends else self.read_vector(name, order.rows))
        terminal = ends["bootstrap"] == 0
        self.count(order, terminal, ends["truncated"])
        self.counts["duplicate_rows"] = order.duplicates
        self._write_logged_states(order, terminal)
        self.write_matrix("metrics", len(order.rows), self.metrics(self.spools["metrics"].gathered(order.rows)))
        for name in ("mask", "next_mask"):
            self.write_matrix(name, len(order.rows), self.spools[name].gathered(order.rows))
        lists = order.rows if self.actions is None else order.rows[:0]
        self.write_lists(share(self.spools["lists"].whole(lists), self.spools["next_lists"].whole(lists)))
        self.remove()

    def order(self) -> Order:
        """Returns the order of all rows."""
        sequence = self.read_vector("sequence")
        slots = self.read_vector("episode")
        order = find_order(slots, self.mdp_ids, sequence if self.has_sequence else None)
        require_one_order(self.orders, order.duplicates)
        return order

    def count(self, order: Order, terminal: Mask, truncated: NDArray[np.uint8]) -> None:
        """Counts rows, episodes and ends of the copy."""
        self.counts.update(
            rows=len(order.rows),
            episodes=order.num_episodes,
            terminal_rows=int(terminal.sum()),
            truncated_rows=int(truncated.sum()),
        )

    def read_vector(self, name: str, rows: NDArray[np.int64] | None = None) -> NDArray[Any]:
        """Returns some rows of a vector, or all, and removes its spool."""
        values = self.spools[name].whole(rows)
        self.spools[name].remove()
        return values

    def save(self, name: str, values: NDArray[Any]) -> None:
        """Writes a vector as the copy has it."""
        with (self.folder / f"{name}.npy").open("wb") as stream:
            write_npy(stream, values.dtype, values.shape, [values])

    def write_matrix(self, name: str, rows: int, chunks: Iterable[NDArray[Any]]) -> None:
        """Writes a matrix with the columns of its spool."""
        spool = self.spools[name]
        with (self.folder / f"{name}.npy").open("wb") as stream:
            write_npy(stream, spool.dtype, (rows, spool.width), chunks)

    def remove(self) -> None:
        """Removes the spools that are left."""
        for spool in self.spools.values():
            spool.remove()

    def _write_logged_states(self, order: Order, terminal: NDArray[np.bool_]) -> None:
        """Writes the states of all rows, then the next states that are not the state of the following row.

        state          row 0, row 1, ..., row R - 1 │ side row 0, side row 1, ...
        next_index[i]  i + 1  where row i + 1 is of the same episode and has row i's next state, bit for bit
                       i      at a true end
                       R + k  else, of the k-th such row
        """
        rows = order.rows
        same = np.zeros(self.num_rows, bool)
        start = 0
        states = self.spools["state"]
        nexts = self.spools["next_state"]
        for after, state in zip(nexts.gathered(rows), states.gathered(np.roll(rows, -1)), strict=True):
            same[start : start + len(after)] = (after.view(np.uint32) == state.view(np.uint32)).all(axis=1)
            start += len(after)
        same &= ~terminal
        same[:-1] &= order.episode[:-1] == order.episode[1:]
        same[-1:] = False
        follows = same.copy()
        follows[:-1] &= order.sequence[:-1] < order.sequence[1:]
        side = np.flatnonzero(~same & ~terminal)
        total = self.num_rows + len(side)
        next_index = np.arange(self.num_rows) + same
        next_index[side] = np.arange(self.num_rows, total)
        self.save_next(next_index, follows, total)
        self.write_matrix("state", total, chain(states.gathered(rows), nexts.gathered(rows[side])))
        for spool in (states, nexts):
            spool.remove()

    def save_next(self, next_index: NDArray[np.int64], follows: Mask, total: int) -> None:
        """Writes where next states are, of `total` states."""
        self.save("next_index", next_index.astype(np.int32 if total < 2**31 else np.int64))
        self.save("follows", follows)
        self.counts["side_rows"] = total - len(follows)

    def metrics(self, chunks: Iterable[NDArray[np.float32]]) -> Iterator[NDArray[np.float32]]:
        """Yields metrics with 0 for those that are absent, which it counts."""
        for values in chunks:
            self.counts["metrics_absent_values"] += int(np.isnan(values).sum())
            yield np.nan_to_num(values, nan=0.0)

    def write_lists(self, shared: SharedLists) -> None:
        """Writes the lists of rows and of their next states."""
        total = int(shared.length.sum())
        self.save("list_offsets", np.concatenate((np.zeros(1, np.int64), np.cumsum(shared.length))))
        self.save("actions_list", shared.now)
        self.save("next_list", shared.after)
        chunks = chain.from_iterable(map(self.spools["candidates"].gathered, shared.candidates()))
        self.write_matrix("candidates", total, chunks)
        if self.actions is None:
            self.counts.update(lists=len(shared.length), candidates=total)


def _canonical(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Sets every NaN to the same bits, so that rows can be compared by their bits."""
    absent = np.isnan(values)
    return np.where(absent, np.float32(np.nan), values) if absent.any() else values


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The copy's order: by (mdp_id, sequence_number) where the log has both, else as in the files.

    Attributes:
        rows: [R] int64, number of each row in the order of the files.
        episode: [R] int32 codes; those of rows without mdp_id follow those of `mdp_ids`.
        sequence: [R] int64.
        mdp_ids: distinct ones, ascending.
        alone: numbers of the rows without mdp_id, each an episode of its own.
        duplicates: rows that share (mdp_id, sequence_number) with the row before.
    """

    rows: NDArray[np.int64]
    episode: NDArray[np.int32]
    sequence: NDArray[np.int64]
    mdp_ids: pa.Array
    alone: NDArray[np.int64]
    duplicates: int

    @property
    def num_episodes(self) -> int:
        """Number of episodes; each row without mdp_id is one."""
        return len(self.mdp_ids) + len(self.alone)

    def episode_hashes(self) -> NDArray[np.uint64]:
        """Returns [episodes], stable hashes of the mdp_ids: BLAKE2b, 8 bytes, little endian."""
        starts = range(0, len(self.mdp_ids), _NAMES_AT_ONCE)
        names = chain.from_iterable(self.mdp_ids.slice(start, _NAMES_AT_ONCE).to_pylist() for start in starts)
        return np.concatenate((name_hashes(names), mix(self.alone.astype(np.uint64))))


def find_order(slots: NDArray[np.int64], mdp_ids: list[pa.Array], sequence: NDArray[np.int64] | None) -> Order:
    """Sorts by (mdp_id, sequence_number) where the log has both; rows that are equal in both keep their order.

    Args:
        slots: [R] number of the row's mdp_id among all of `mdp_ids`, -1 without one.
        mdp_ids: those of each block.
        sequence: [R], or None where the log has no sequence numbers.
    """
    ids = pa.chunked_array(mdp_ids, pa.string())
    distinct = ids.unique().sort()
    rank = to_numpy(pc.rank(ids, "ascending", tiebreaker="dense")).astype(np.int32) - 1
    alone = slots < 0
    numbers = np.flatnonzero(alone)
    episode = np.empty(len(slots), np.int32)
    episode[~alone] = rank[slots[~alone]]
    episode[alone] = np.arange(len(distinct), len(distinct) + len(numbers))
    rows = np.arange(len(slots))
    duplicates = 0
    if sequence is None:
        sequence = rows
    elif len(numbers) < len(slots):
        rows = np.lexsort((sequence, episode))
        episode = episode[rows]
        sequence = sequence[rows]
        duplicates = int(((np.diff(episode) == 0) & (np.diff(sequence) == 0)).sum())
    return Order(rows=rows, episode=episode, sequence=sequence, mdp_ids=distinct, alone=numbers, duplicates=duplicates)


def notes(counts: Counter[str], columns: set[str]) -> tuple[str, ...]:
    """Returns sentences about a log that a user should read."""
    rows = counted(counts["rows"], "row")
    some = [(counts[key], what) for key, what in _OF_ALL_ROWS.items() if counts[key]]
    sentences = [f"{number:,} of {rows} {'has' if number == 1 else 'have'} {what}" for number, what in some]
    if columns.isdisjoint(EPISODE_COLUMNS):
        sentences.append(ALONE)
        counts = Counter({**counts, "rows_without_mdp_id": 0})  # said already
    sentences += [f"{counted(counts[key], *words)} {what}" for key, (*words, what) in _COUNTED.items() if counts[key]]
    if ignored := sorted(columns - COLUMNS.keys()):
        sentences.append(f"columns that training does not use: {listed(ignored)}")
    return tuple(sentences)


_OF_ALL_ROWS = {
    "propensity_absent_rows": 'no propensity; weighted estimates need it, or evaluation.propensities "estimate"',
    "unknown_action_rows": "no action and no part in training",
    "candidates_unknown_rows": "an empty possible_actions; the action taken is the only candidate there",
}
_COUNTED = {
    "duplicate_rows": ("row shares", "rows share", "mdp_id and sequence_number with another row"),
    "metrics_absent_values": ("metric value is absent and counts", "metric values are absent and count", "as 0"),
    "next_action_not_possible_rows": ("row has", "rows have", "a next_action that is not among possible_next_actions"),
    "rows_without_mdp_id": ("row has", "rows have", "no mdp_id; each counts as an episode of its own"),
}
