"""The training copy: a log's transitions as memory-mapped arrays, written once next to the data.

    inputs ─► 1 blocks of Arrow columns ─► 2 checked rows ─► 3 spooled in file order ─► 4 sorted, written, renamed
              formats/                     rows/               build.py                   build.py, location.py

A copy is reused while its inputs are unchanged by names, sizes and modification times, or else by sha256. A next state
that is the following row's state is not stored again, which halves the bytes.
"""

from __future__ import annotations

import dataclasses
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reagent_lite.data.copy.location import CopyManifest
from reagent_lite.data.copy.spool import parts_of
from reagent_lite.data.formats.frames import location
from reagent_lite.data.rows.levels import Levels
from reagent_lite.errors import DataError, Problem, raise_any
from reagent_lite.feature_ids import id_of
from reagent_lite.id_values import IdFeature, ids_of_setting
from reagent_lite.manifest import TRAINING_COPY
from reagent_lite.whole_files import scratch_folder


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingCopy:
    """R transitions, sorted by (mdp_id, sequence_number) if the log has both, else in file order.

    Arrays are memory-mapped for reading. S state features, A discrete actions, L lists of candidates, C candidates
    in total, F candidate features, M metrics, E side rows, I input files.

    Attributes:
        folder: folder of manifest.json and the arrays, which never change; a copy of other inputs has another folder.
        files: paths of the I input files.
        action_names: names of discrete actions; empty for parametric ones.
        state_ids: S feature ids, ascending: all seen in state_features or next_state_features.
        action_ids: F feature ids of candidates, ascending; empty for discrete actions.
        metric_names: M names, sorted.
        state: [R+E, S] float32, raw, NaN = absent; uint8 if states are images. Rows from R on are logged next states
            that are no row's successor.
        next_index: [R] int32 or int64, row of `state` that holds the next state; a terminal row's own number.
        follows: [R] bool, whether row i+1 continues row i: same episode, not after an end, its state is this row's next
            state bit for bit, and its sequence number is larger.
        action: [R] int32, index of the action or of the candidate in the row's list; -1 unknown.
        next_action: [R] int32, the same at the next state; -1 none.
        reward: [R] float32.
        time_diff: [R] float32, 0 if the log has none.
        step: [R] uint8, rows of the log that the transition spans; 1 if the log has no such column.
        propensity: [R] float32 in (0, 1], 1 if the log has none.
        bootstrap: [R] float32, 0 after a true end, else 1.
        truncated: [R] uint8, whether the log says that a limit cut the episode here.
        mask: [R, A] uint8, possible actions; A is 0 for parametric actions.
        next_mask: [R, A] uint8, possible actions at the next state; zeros on terminal rows.
        list_offsets: [L+1] int64, list l is rows list_offsets[l] to list_offsets[l+1] of `candidates`; L is 0 for
            discrete actions.
        candidates: [C, F] float32, NaN = absent.
        actions_list: [R] int32, the row's list; [0] for discrete.
        next_list: [R] int32, the list at the next state, an empty one on terminal rows; [0] for discrete.
        metrics: [R, M] float32, 0 where absent.
        episode: [R] int32, number of the episode in the order of mdp_id; a row without mdp_id is an episode of its own.
        episode_hash: [episodes] uint64, stable hash of mdp_id (BLAKE2b, 8 bytes, little endian).
        sequence: [R] int64, sequence_number, else the row's number in the input.
        origin_file: [R] int32, number of the input file.
        origin_line: [R] int64, line (Parquet: row) in it, from 1.
        counts: figures of the log by name, rows first.
        notes: sentences about the log that a user should read.
        levels: {"state" or "action": {id: {text: number of its values}}} of the features whose values are strings;
            their columns have the strings' codes (categories.py).
        without_value: ids of features without a value in any row, by "state" and "action".
        id_features: features whose values are ids, in several columns each.
    """

    folder: Path
    files: tuple[str, ...]
    action_names: tuple[str, ...]
    state_ids: tuple[int, ...]
    action_ids: tuple[int, ...]
    metric_names: tuple[str, ...]
    state: NDArray[Any]
    next_index: NDArray[np.int32] | NDArray[np.int64]
    follows: NDArray[np.bool_]
    action: NDArray[np.int32]
    next_action: NDArray[np.int32]
    reward: NDArray[np.float32]
    time_diff: NDArray[np.float32]
    step: NDArray[np.uint8]
    propensity: NDArray[np.float32]
    bootstrap: NDArray[np.float32]
    truncated: NDArray[np.uint8]
    mask: NDArray[np.uint8]
    next_mask: NDArray[np.uint8]
    list_offsets: NDArray[np.int64]
    candidates: NDArray[np.float32]
    actions_list: NDArray[np.int32]
    next_list: NDArray[np.int32]
    metrics: NDArray[np.float32]
    episode: NDArray[np.int32]
    episode_hash: NDArray[np.uint64]
    sequence: NDArray[np.int64]
    origin_file: NDArray[np.int32]
    origin_line: NDArray[np.int64]
    counts: dict[str, int]
    notes: tuple[str, ...]
    levels: dict[str, Levels]
    without_value: dict[str, tuple[int, ...]]
    id_features: tuple[IdFeature, ...] = ()

    def __len__(self) -> int:
        return len(self.action)

    @property
    def parametric(self) -> bool:
        """Whether choices are candidates with features."""
        return not self.action_names

    @property
    def has_images(self) -> bool:
        """Whether states are images."""
        return bool(self.state.dtype == np.uint8)

    @property
    def feature_of_column(self) -> dict[int, int]:
        """{id of a column: id of its feature} of the features whose values are ids."""
        return {column: feature.feature for feature in self.id_features for column in feature.columns}

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays."""
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, np.ndarray))

    def rows_of(self, episodes: NDArray[np.bool_], *, with_action: bool = False) -> NDArray[np.integer[Any]]:
        """Returns the numbers of the rows of episodes, [n] int32 or int64, in small parts.

        Args:
            episodes: [episodes] which ones.
            with_action: leaves out rows whose action is unknown.
        """
        kind = np.int32 if len(self) < 2**31 else np.int64
        numbers = [np.zeros(0, kind)]
        for part in parts_of(len(self)):
            chosen = episodes[self.episode[part]]
            if with_action:
                chosen &= self.action[part] >= 0
            numbers.append((part.start + np.flatnonzero(chosen)).astype(kind))
        return np.concatenate(numbers)

    def release(self) -> None:
        """Lets the system take back the pages that were read, which count as this process's memory until then."""
        for value in vars(self).values():
            release(value)

    def source_line(self, row: int) -> str:
        """Returns "file:line" of a row, for errors."""
        return location(self.files[int(self.origin_file[row])], int(self.origin_line[row]))

    def refuse(self, rows: NDArray[np.bool_], expected: str, got: Callable[[int], str], todo: str = "") -> None:
        """Raises DataError if a row is true in `rows` [R]; `got` returns the value of a row, for the message."""
        if rows.any():
            first = int(rows.argmax())
            more = f"{got(first)} ({int(rows.sum())} such rows)"
            raise DataError(Problem(self.source_line(first), expected, more, todo))


def release(array: object) -> None:
    """Lets the system take back the pages of a memory-mapped array; does nothing for other objects.

    The map is found through private attributes, since numpy has no public name for it.
    """
    while array is not None and not isinstance(array, mmap.mmap):
        array = getattr(array, "_mmap", None) or getattr(array, "base", None)
    if array is not None:
        array.madvise(mmap.MADV_DONTNEED)


ARRAYS = frozenset(f"{array.name}.npy" for array in dataclasses.fields(TrainingCopy) if "NDArray" in str(array.type))


def open_training_copy(folder: Path) -> TrainingCopy:
    """Opens the copy in `folder`.

    Args:
        folder: see `TrainingCopy.folder`.

    Raises:
        DataError: the folder has no copy, or a damaged one.
    """
    manifest = CopyManifest.read(str(folder))
    if manifest is None or (wrong := manifest.files.keys() ^ ARRAYS):
        got = "none" if manifest is None else f"arrays {', '.join(sorted(wrong))} too many or few"
        raise DataError(Problem(str(folder), TRAINING_COPY.name, got, TRAINING_COPY.damaged))
    raise_any(manifest.damage(folder))
    return _open_copy(folder, manifest)


def _open_copy(folder: Path, manifest: CopyManifest) -> TrainingCopy:
    fields: dict[str, Any] = {}
    for name in ARRAYS:
        try:
            array = np.load(folder / name, mmap_mode="r", allow_pickle=False)
        except ValueError:  # an array without elements cannot be mapped
            array = np.load(folder / name, allow_pickle=False)
        fields[name.removesuffix(".npy")] = np.asarray(array)
    for name in ("action_names", "state_ids", "action_ids", "metric_names", "notes", "without_value"):
        fields[name] = getattr(manifest, name)
    levels = {
        side: {id_of(feature): counts for feature, counts in of_side.items()}
        for side, of_side in manifest.levels.items()
    }
    counts = {"rows": manifest.rows, **manifest.counts}
    ids = ids_of_setting(manifest.settings)
    return TrainingCopy(folder=folder, files=manifest.paths, counts=counts, levels=levels, id_features=ids, **fields)


def empty_training_copy(actions: tuple[str, ...] | None) -> TrainingCopy:
    """Returns a copy without rows, in memory only, for a machine without rows if other machines have some.

    Args:
        actions: names of discrete actions in output order; None for parametric ones.
    """
    from reagent_lite.data.copy.build import build_empty

    with scratch_folder() as folder:
        return dataclasses.replace(_open_copy(folder, build_empty(actions, folder)), folder=Path())
