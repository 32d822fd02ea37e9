"""Builds a training copy: blocks are checked and spooled in the files' order, then written in the copy's order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import DTypeLike, NDArray

from reagent_lite.data.copy.lists import ListSpool, share, write_candidates
from reagent_lite.data.copy.order import find_order
from reagent_lite.data.copy.place import Seals
from reagent_lite.data.copy.spool import ColumnSpool, K, Keys, MatrixReader, MatrixSpool, NpyWriter, chunks
from reagent_lite.data.formats.blocks import Block, Position
from reagent_lite.data.formats.files import InputFile
from reagent_lite.data.formats.reading import read_blocks
from reagent_lite.data.formats.schema import KNOWN_COLUMNS, MAX_PROBLEMS, TIMELINE_COLUMNS, any_true
from reagent_lite.data.rows.discrete import discrete_rows
from reagent_lite.data.rows.parametric import parametric_rows
from reagent_lite.data.rows.transitions import Rows, require_columns
from reagent_lite.errors import DataError, Problem, counted

COLUMNS: dict[str, DTypeLike] = {
    "action": np.int32,
    "next_action": np.int32,
    "reward": np.float32,
    "time_diff": np.float32,
    "step": np.uint8,
    "propensity": np.float32,
    "bootstrap": np.float32,
    "truncated": np.uint8,
    "sequence": np.int64,
}
LOGGED_COLUMNS = ("reward", "time_diff", "step", "propensity", "sequence")
LIST_COLUMNS: dict[str, DTypeLike] = {"start": np.int64, "length": np.int64, "first": np.uint64, "second": np.uint64}
NEEDED_FOR_ENDS = ("terminal", "possible_next_actions", "next_action")


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """What a build says about itself; names as in TrainingCopy and its Manifest."""

    rows: int
    hashes: tuple[str, ...]
    files: dict[str, dict[str, Any]]
    state_ids: tuple[int, ...]
    action_ids: tuple[int, ...]
    metric_names: tuple[str, ...]
    counts: dict[str, int]
    notes: tuple[str, ...]


def build(
    files: tuple[InputFile, ...],
    actions: tuple[str, ...] | None,
    folder: Path,
    progress: Callable[[int, int], None] | None,
) -> Built:
    """Writes the arrays of a training copy of `files` into `folder`.

    Args:
        files: the input.
        actions: names of discrete actions, or None for parametric ones.
        folder: empty; holds the arrays alone afterwards.
        progress: called with (bytes read, bytes in all).

    Raises:
        DataError: with file and line, up to 20 faults and how many there are in all.
    """
    checked: set[int] = set()

    def transform(block: Block) -> Rows | None:
        if not block.table.num_rows:
            return None
        if block.file_number not in checked:
            require_columns(block)
            checked.add(block.file_number)
        return parametric_rows(block) if actions is None else discrete_rows(block, actions)

    positions = [Position() for _ in files]
    with ExitStack() as streams:
        spool = Spool(folder, streams, parametric=actions is None)
        for rows in read_blocks(files, transform, positions, progress):
            if rows is not None:
                spool.append(rows)
        spool.check(files[0].path)
        with Seals() as seals:
            return Writer(spool, folder, actions, seals).write(tuple(position.sha256 for position in positions))


class Spool:
    """The rows of all blocks in the order of the files, in temporary files beside the arrays to be."""

    def __init__(self, folder: Path, streams: ExitStack, *, parametric: bool) -> None:
        def column(name: str, dtype: DTypeLike) -> ColumnSpool:
            return ColumnSpool(streams, folder / f"{name}.spool", dtype)

        def matrix(name: str, keys: Keys[K], dtype: DTypeLike = np.float32) -> MatrixSpool[K]:
            return MatrixSpool(streams, folder / f"{name}.spool", keys, dtype)

        self.columns = {name: column(name, dtype) for name, dtype in COLUMNS.items()}
        self.episode = column("episode", np.int64)
        self.origin_file, self.origin_line = column("origin_file", np.int32), column("origin_line", np.int64)
        self.state_keys: Keys[int] = Keys()
        self.action_keys: Keys[int] = Keys()
        self.metric_keys: Keys[str] = Keys()
        self.mask_keys: Keys[int] = Keys()
        self.state, self.next_state = (matrix(name, self.state_keys) for name in ("state", "next_state"))
        self.metrics = matrix("metrics", self.metric_keys)
        self.mask, self.next_mask = (matrix(name, self.mask_keys, np.uint8) for name in ("mask", "next_mask"))
        self.candidates = matrix("candidates", self.action_keys)
        self.now, self.after = (
            ListSpool({k: column(f"{side}_{k}", v) for k, v in LIST_COLUMNS.items()}, self.candidates)
            for side in ("now", "after")
        )
        self.parametric = parametric
        self.mdp_ids: list[pa.Array] = []
        self.num_mdp_ids = 0
        self.num_rows = 0
        self.counts: Counter[str] = Counter()
        self.seen_columns: set[str] = set()
        self.problems: list[Problem] = []
        self.num_faults = 0
        self.has_sequence = False
        self.first_without_sequence: str | None = None

    def append(self, rows: Rows) -> None:
        """Adds a block; its faults are collected."""
        self.seen_columns |= rows.columns
        self.counts.update(rows.counts)
        self.num_faults += rows.num_faults
        self.problems += rows.problems[: MAX_PROBLEMS - len(self.problems)]
        if self.num_faults:
            return
        for name, column in self.columns.items():
            column.append(getattr(rows.logged if name in LOGGED_COLUMNS else rows, name))
        self._append_origin(rows)
        self.state.append(rows.state.ids, _canonical(rows.state.values))
        self.next_state.append(rows.next_state.ids, _canonical(rows.next_state.values))
        self.metrics.append(rows.logged.metrics.names, rows.logged.metrics.values)
        if rows.lists is not None and rows.next_lists is not None:
            self.now.append(rows.lists)
            self.after.append(rows.next_lists)
        else:
            names = tuple(range(rows.mask.shape[1]))
            self.mask.append(names, rows.mask)
            self.next_mask.append(names, rows.next_mask)
        self.num_rows += len(rows)

    def _append_origin(self, rows: Rows) -> None:
        logged = rows.logged
        self.episode.append(np.where(logged.episode < 0, -1, logged.episode.astype(np.int64) + self.num_mdp_ids))
        self.mdp_ids.append(logged.mdp_ids)
        self.num_mdp_ids += len(logged.mdp_ids)
        self.origin_file.append(np.full(len(rows), rows.block.file_number, np.int32))
        self.origin_line.append(rows.block.lines)
        self.has_sequence |= bool(logged.has_sequence.any())
        if self.first_without_sequence is None and not logged.has_sequence.all():
            self.first_without_sequence = rows.block.where(int(np.argmin(logged.has_sequence)))

    def check(self, where: str) -> None:
        """Raises the faults that were collected, and those of the log as a whole."""
        if self.num_faults:
            more = self.num_faults - len(self.problems)
            summary = Problem(
                where, "rows without fault", f"{counted(self.num_faults, 'row')} with one, {more:,} more than shown"
            )
            raise DataError([*self.problems, *([summary] if more else [])])
        if self.has_sequence and self.first_without_sequence is not None:
            raise DataError(Problem(self.first_without_sequence, "a sequence_number, as other rows have one", "none"))
        if not self.seen_columns & set(NEEDED_FOR_ENDS):
            expected = f"one of the columns {', '.join(NEEDED_FOR_ENDS)}, to tell where episodes end"
            raise DataError(Problem(where, expected, "none of them"))


def _canonical(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Gives every NaN the same bits, so that rows can be compared by their bits."""
    absent = np.isnan(values)
    return np.where(absent, np.float32(np.nan), values) if absent.any() else values


class Writer:
    """Writes spooled rows in the copy's order."""

    def __init__(self, spool: Spool, folder: Path, actions: tuple[str, ...] | None, seals: Seals) -> None:
        self.spool, self.folder, self.actions, self.seals = spool, folder, actions, seals
        sequence = spool.columns.pop("sequence").take()
        self.order = find_order(spool.episode.take(), spool.mdp_ids, sequence if spool.has_sequence else None)
        self.counts: Counter[str] = Counter(spool.counts)

    def write(self, hashes: tuple[str, ...]) -> Built:
        """Writes every array; the spools are gone afterwards."""
        spool, order = self.spool, self.order
        terminal = self._write_column("bootstrap", spool.columns.pop("bootstrap")) == 0
        with ThreadPoolExecutor(1) as pool:
            columns = pool.submit(self._write_columns)
            self._write_states(terminal)
            self._write_metrics()
            self._write_masks()
            self._write_lists()
            columns.result()
        self.counts.update(
            rows=spool.num_rows,
            episodes=order.num_episodes,
            terminal_rows=int(terminal.sum()),
            duplicate_rows=order.duplicates,
        )
        return Built(
            rows=spool.num_rows,
            hashes=hashes,
            files=self.seals.entries(),
            state_ids=spool.state_keys.ascending()[0],
            action_ids=spool.action_keys.ascending()[0],
            metric_names=spool.metric_keys.ascending()[0],
            counts=dict(self.counts),
            notes=notes(self.counts, spool.seen_columns),
        )

    def _write_columns(self) -> None:
        spool, order = self.spool, self.order
        truncated = self._write_column("truncated", spool.columns.pop("truncated"))
        self.counts["truncated_rows"] = int(truncated.sum())
        for name, column in spool.columns.items():
            self._write_column(name, column)
        self._write_column("origin_file", spool.origin_file)
        self._write_column("origin_line", spool.origin_line)
        self._save("episode", order.episode)
        self._save("sequence", order.sequence)
        self._save("episode_hash", order.episode_hashes())

    def _write_column(self, name: str, column: ColumnSpool) -> NDArray[Any]:
        values = np.take(column.take(), self.order.rows)
        self._save(name, values)
        return values

    def _save(self, name: str, values: NDArray[Any]) -> None:
        file = self.folder / f"{name}.npy"
        np.save(file, values, allow_pickle=False)
        self.seals.add(file)

    @contextmanager
    def _writer(self, name: str, row_shape: tuple[int, ...], dtype: DTypeLike) -> Iterator[NpyWriter]:
        file = self.folder / f"{name}.npy"
        with NpyWriter(file, row_shape, dtype) as writer:
            yield writer
        self.seals.add(file)

    def _write_states(self, terminal: NDArray[np.bool_]) -> None:
        rows = self.order.rows
        with self._writer("state", (len(self.spool.state_keys),), np.float32) as state:
            reader = self.spool.state.reader()
            for start, stop in chunks(len(rows), reader.chunk_rows()):
                state.append(reader.gather(rows[start:stop]))
            reader.close()
            reader = self.spool.next_state.reader()
            next_index, follows = self._link(state, reader, terminal)
            reader.close()
        self.counts["side_rows"] = state.num_rows - len(rows)
        dtype = np.int32 if state.num_rows < 2**31 else np.int64
        self._save("next_index", next_index.astype(dtype))
        self._save("follows", follows)

    def _link(
        self, state: NpyWriter, reader: MatrixReader, terminal: NDArray[np.bool_]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Finds each row's next state among the rows, or appends it to `state`; returns next_index and follows."""
        rows, episode, sequence = self.order.rows, self.order.episode, self.order.sequence
        num = len(rows)
        next_index, follows = np.arange(num), np.zeros(num, bool)
        for start, stop in chunks(num, reader.chunk_rows()):
            after = reader.gather(rows[start:stop])
            end = min(stop, num - 1)
            following = state.read(start + 1, end + 1)
            inside = slice(start, end)
            same = np.zeros(stop - start, bool)
            same[: end - start] = equal_bits(after[: end - start], following)
            same[: end - start] &= episode[inside] == episode[start + 1 : end + 1]
            same &= ~terminal[start:stop]
            follows[inside] = same[: end - start] & (sequence[start + 1 : end + 1] > sequence[inside])
            next_index[start:stop][same] += 1
            side = ~same & ~terminal[start:stop]
            next_index[start:stop][side] = state.num_rows + np.arange(int(side.sum()))
            state.append(after[side])
        return next_index, follows

    def _write_metrics(self) -> None:
        reader = self.spool.metrics.reader()
        with self._writer("metrics", (len(self.spool.metric_keys),), np.float32) as writer:
            for start, stop in chunks(len(self.order.rows), reader.chunk_rows()):
                values = reader.gather(self.order.rows[start:stop])
                self.counts["metrics_absent_values"] += int(np.isnan(values).sum())
                writer.append(np.nan_to_num(values, nan=0.0))
        reader.close()

    def _write_masks(self) -> None:
        for name, spool in (("mask", self.spool.mask), ("next_mask", self.spool.next_mask)):
            reader = spool.reader()
            with self._writer(name, (len(self.actions or ()),), np.uint8) as writer:
                for start, stop in chunks(len(self.order.rows), reader.chunk_rows()):
                    none = np.zeros((stop - start, 0), np.uint8)
                    writer.append(none if self.actions is None else reader.gather(self.order.rows[start:stop]))
            reader.close()

    def _write_lists(self) -> None:
        rows = self.order.rows if self.spool.parametric else np.zeros(0, np.int64)
        shared = share(self.spool.now.take(rows), self.spool.after.take(rows))
        with self._writer("candidates", (len(self.spool.action_keys),), np.float32) as writer:
            write_candidates(shared, self.spool.candidates, writer)
        self._save("list_offsets", np.concatenate((np.zeros(1, np.int64), np.cumsum(shared.length))))
        self._save("actions_list", shared.now)
        self._save("next_list", shared.after)
        if self.spool.parametric:
            self.counts.update(lists=len(shared.length), candidates=writer.num_rows)


def equal_bits(one: NDArray[np.float32], other: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Returns [n], whether rows of two [n, S] matrices have the same bits."""
    return ~any_true(one.view(np.uint32) != other.view(np.uint32))


def notes(counts: Counter[str], columns: set[str]) -> tuple[str, ...]:
    """Returns sentences about what a user should know of a log."""
    of_all = counted(counts["rows"], "row has", "rows have")
    found: list[str] = []
    if absent := counts["propensity_absent_rows"]:
        found.append(f"{absent:,} of {of_all} no propensity; it counts as 1, so importance weights are meaningless")
    if unknown := counts["unknown_action_rows"]:
        found.append(f"{unknown:,} of {of_all} no action and no part in training")
    if unlisted := counts["candidates_unknown_rows"]:
        found.append(
            f"{unlisted:,} of {of_all} an empty possible_actions; the action taken is the only candidate there"
        )
    if duplicates := counts["duplicate_rows"]:
        found.append(f"{counted(duplicates, 'row shares', 'rows share')} mdp_id and sequence_number with another row")
    if lacking := counts["metrics_absent_values"]:
        found.append(
            f"{counted(lacking, 'metric value is absent and counts', 'metric values are absent and count')} as 0"
        )
    if impossible := counts["next_action_not_possible_rows"]:
        found.append(
            f"{counted(impossible, 'row has', 'rows have')} a next_action that is not among possible_next_actions"
        )
    if nameless := counts["rows_without_mdp_id"]:
        found.append(f"{counted(nameless, 'row has', 'rows have')} no mdp_id; each counts as an episode of its own")
    if ignored := sorted(columns - {*KNOWN_COLUMNS, *TIMELINE_COLUMNS}):
        found.append(f"columns that are not used: {', '.join(ignored)}")
    return tuple(found)
