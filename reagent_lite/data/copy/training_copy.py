"""The training copy: a log's transitions as memory-mapped arrays, written once beside the data.

    inputs ─► 1 blocks of Arrow columns ─► 2 checked numpy rows ─► 3 spooled in file order ─► 4 sorted, written, renamed
              readers.py                   transitions.py          training_copy_build.py     training_copy_build.py

A copy that stands is used again while its inputs are unchanged: first by names, sizes and modification times, then by
sha256. Next states are not stored where they are the following row's state, which halves the bytes.
"""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
import os
import tempfile
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from reagent_lite.data.copy.build import build
from reagent_lite.data.copy.place import (
    SCHEMA_VERSION,
    Manifest,
    candidate_folders,
    is_writable,
    new_build,
    publish,
    read_manifest,
    remember_times,
    seal,
)
from reagent_lite.data.formats.files import InputFile, local_path
from reagent_lite.data.formats.input_state import states_of, unchanged
from reagent_lite.data.formats.stage import data_files, left_out
from reagent_lite.errors import DataError, Problem
from reagent_lite.files import sync

OPEN_ATTEMPTS = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingCopy:
    """R transitions, sorted by (mdp_id, sequence_number) where the log has both, else in file order.

    Arrays are memory-mapped for reading. S state features, A discrete actions, L lists of candidates, C candidates in
    all, F candidate features, M metrics, E side rows, I input files.

    Attributes:
        folder: where the copy lies.
        build: folder inside it that holds the arrays, never changed; a copy of other inputs has another.
        files: the I input files' paths.
        action_names: names of discrete actions; empty for parametric ones.
        state_ids: S feature ids, ascending: all seen in state_features or next_state_features.
        action_ids: F feature ids of candidates, ascending; empty for discrete actions.
        metric_names: M names, sorted.
        state: [R+E, S] float32, raw, NaN = absent. Rows from R on are logged next states that are no row's successor.
        next_index: [R] int32 or int64, row of `state` that holds the next state; a terminal row's own number.
        follows: [R] bool, whether row i+1 continues row i: same episode, not after an end, its state is this row's next
            state bit for bit, and its sequence number is larger.
        action: [R] int32, index of the action or of the candidate in the row's list; -1 unknown.
        next_action: [R] int32, likewise at the next state; -1 none.
        reward: [R] float32.
        time_diff: [R] float32, 1 where the log has none.
        step: [R] uint8, rows of the log that the transition spans, 1 where it does not say.
        propensity: [R] float32 in (0, 1], 1 where the log has none.
        bootstrap: [R] float32, 0 after a true end, else 1.
        truncated: [R] uint8, whether the log says that a limit cut the episode here.
        mask: [R, A] uint8, possible actions; A is 0 for parametric actions.
        next_mask: [R, A] uint8, possible actions at the next state; zeros on terminal rows.
        list_offsets: [L+1] int64, list l is rows list_offsets[l] to list_offsets[l+1] of `candidates`; L is 0 for
            discrete actions.
        candidates: [C, F] float32, NaN = absent.
        actions_list: [R] int32, the row's list; [0] for discrete.
        next_list: [R] int32, the list at the next state, an empty one on terminal rows; [0] for discrete.
        metrics: [R, M] float32, 0 where a row lacks one.
        episode: [R] int32, number of the episode in the order of mdp_id; rows without one are episodes of their own.
        episode_hash: [episodes] uint64, stable hash of mdp_id (BLAKE2b, 8 bytes, little endian).
        sequence: [R] int64, sequence_number, else the row's number in the input.
        origin_file: [R] int32, number of the input file.
        origin_line: [R] int64, line (Parquet: row) in it, from 1.
        counts: what was counted on the way, by name.
        notes: sentences worth reporting to the user.
    """

    folder: Path
    build: Path
    files: tuple[str, ...]
    action_names: tuple[str, ...]
    state_ids: tuple[int, ...]
    action_ids: tuple[int, ...]
    metric_names: tuple[str, ...]
    state: NDArray[np.float32]
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

    def __len__(self) -> int:
        return len(self.action)

    @property
    def parametric(self) -> bool:
        """Whether choices are candidates with features."""
        return not self.action_names

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays."""
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, np.ndarray))

    def release(self) -> None:
        """Lets the system take back the pages that were read, which count as this process's memory until then."""
        for value in vars(self).values():
            pages = getattr(getattr(value, "base", None), "_mmap", None)
            if isinstance(pages, mmap.mmap):
                pages.madvise(mmap.MADV_DONTNEED)

    def source_line(self, row: int) -> str:
        """Returns "file:line" of a row, for errors."""
        return f"{self.files[int(self.origin_file[row])]}:{int(self.origin_line[row])}"


def open_training_copy(folder: Path, *, verify: bool = False) -> TrainingCopy:
    """Opens the copy in `folder`.

    Args:
        folder: as `TrainingCopy.folder` gives it.
        verify: whether every array's sha256 is compared too; sizes always are.

    Raises:
        DataError: no copy there, or a damaged one.
    """
    # Another process may replace the build between reading its name and opening it: the new one is opened then.
    for _ in range(OPEN_ATTEMPTS):
        manifest = read_manifest(folder)
        if manifest is None:
            break
        try:
            return _opened(folder, manifest, verify)
        except FileNotFoundError:
            continue
    advice = "Remove the folder; the copy is then built again"
    raise DataError(Problem(str(folder), "a whole training copy", "none, or a damaged one", advice))


def _opened(folder: Path, manifest: Manifest, verify: bool) -> TrainingCopy:
    build = folder / manifest.build
    if verify and (altered := [k for k, one in seal(build, manifest.files).items() if manifest.files[k] != one]):
        raise DataError(Problem(str(build), "the arrays the manifest describes", f"altered {', '.join(altered)}"))
    return TrainingCopy(
        folder=folder,
        build=build,
        files=manifest.paths,
        action_names=manifest.actions or (),
        state_ids=manifest.state_ids,
        action_ids=manifest.action_ids,
        metric_names=manifest.metric_names,
        counts=manifest.counts,
        notes=manifest.notes,
        **_arrays(build, manifest.files),
    )


def empty_training_copy(actions: tuple[str, ...] | None) -> TrainingCopy:
    """Returns the copy of a machine that has no rows where others have some, in memory only.

    Args:
        actions: names of discrete actions in output order; None for parametric ones.
    """
    with tempfile.TemporaryDirectory() as folder:
        build((), actions, Path(folder), None)
        return TrainingCopy(
            folder=Path(), build=Path(), files=(), action_names=actions or (), state_ids=(), action_ids=(),
            metric_names=(), counts={}, notes=(), **_arrays(Path(folder), os.listdir(folder))
        )  # fmt: skip


def _arrays(folder: Path, names: Iterable[str]) -> dict[str, NDArray[Any]]:
    return {name.removesuffix(".npy"): _array(folder / name) for name in names}


def _array(file: Path) -> NDArray[Any]:
    """Maps a .npy file; an array without elements cannot be mapped and is read."""
    try:
        return np.asarray(np.load(file, mmap_mode="r", allow_pickle=False))
    except ValueError:
        array: NDArray[Any] = np.load(file, allow_pickle=False)
        return array


def prepare_training_copy(
    path: str,
    *,
    actions: tuple[str, ...] | None,
    directory: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> TrainingCopy:
    """Opens the training copy of a log, building it first unless one with unchanged inputs is there.

    It lies in `directory`; else in `.reagent-lite` beside local data, where that can be written; else in the user's
    cache folder. Memory: at most 1.3 times the copy's bytes and some 100 MB.

    Args:
        path: JSON lines or Parquet file, folder of shards, or URL.
        actions: names of discrete actions in output order; None for parametric ones.
        directory: parent folder of the copy.
        progress: called with (bytes read, bytes in all) while building.

    Raises:
        DataError: what is wrong in the data with file and line, up to 20 faults and how many there are in all; no
            folder that can be written.
    """
    files = data_files(path)
    folders = candidate_folders(local_path(path), files, actions, directory)
    for folder in folders:
        manifest = read_manifest(folder)
        if manifest is not None and unchanged(manifest.inputs, files):
            remember_times(folder, manifest, files)
            return _noted(open_training_copy(folder), path)
    writable = [folder for folder in folders if is_writable(folder)]
    if not writable:
        places = ", ".join(str(folder.parent) for folder in folders)
        raise DataError(Problem(places, "a folder that can be written, for the training copy", "none"))
    _build(writable[0], files, actions, progress)
    give_back_memory()
    return _noted(open_training_copy(writable[0]), path)


def _noted(copy: TrainingCopy, path: str) -> TrainingCopy:
    """Returns a copy that also says what its input does not share with it today."""
    return dataclasses.replace(copy, notes=(*copy.notes, *left_out(path)))


def _build(
    folder: Path,
    files: tuple[InputFile, ...],
    actions: tuple[str, ...] | None,
    progress: Callable[[int, int], None] | None,
) -> None:
    with new_build(folder) as temporary:
        built = build(files, actions, temporary, progress)
        manifest = Manifest(
            schema_version=SCHEMA_VERSION,
            build=f"build-{uuid.uuid4().hex}",
            rows=built.rows,
            inputs=states_of(files, built.hashes),
            files=seal(temporary, [file.name for file in temporary.iterdir()]),
            paths=tuple(file.path for file in files),
            actions=actions,
            state_ids=built.state_ids,
            action_ids=built.action_ids,
            metric_names=built.metric_names,
            counts=built.counts,
            notes=built.notes,
        )
        sync(temporary)
        publish(folder, temporary, manifest)


def give_back_memory() -> None:
    """Returns freed memory to the system: Arrow and glibc keep it, and it counts as this process's."""
    pa.default_memory_pool().release_unused()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc alone has it
    if trim is not None:
        trim(0)
