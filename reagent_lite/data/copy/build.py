"""Builds a training copy: blocks are checked, spooled in the order of the files, and written in the copy's order."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from reagent_lite.data.copy.event_log import EventLog
from reagent_lite.data.copy.location import KIND, CopyManifest
from reagent_lite.data.copy.spooled_log import SpooledLog
from reagent_lite.data.copy.transition_log import TransitionLog
from reagent_lite.data.formats.blocks import InputFile, Show
from reagent_lite.data.formats.format_table import read_blocks
from reagent_lite.data.log_shares import rows_by_log
from reagent_lite.data.logs import Log
from reagent_lite.data.rows.levels import MOST_LEVELS, Levels, most_frequent
from reagent_lite.data.stage_folder import InputState, states_of


def build(log: Log, folder: Path, settings: dict[str, Any], progress: Show | None = None) -> CopyManifest:
    """Writes the arrays of a log's training copy into an empty folder, and returns its manifest.

    Args:
        log: the log.
        folder: the folder; afterwards it contains the arrays only.
        settings: the settings of the copy, see `location.CopyLocation`.
        progress: called with (bytes read, total bytes).

    Raises:
        DataError: rows have faults; with file and line of a few rows of each kind, and how many there are.
    """
    log.require_one_kind()
    spooled: SpooledLog[Any] = EventLog(folder, log) if log.holds_events else TransitionLog(folder, log)
    files = log.read_files
    hashes: list[str] = []
    if files:
        for rows in read_blocks(files, spooled.read, progress, spooled.readers, hashes):
            spooled.append(rows)
        spooled.check(files)
    sha256 = {file.path: digest for file, digest in zip(files, hashes, strict=True)}
    inputs = states_of(log.files, [sha256.get(file.path, file.sha256) for file in log.files])
    return _write(spooled, settings, files, inputs)


def build_empty(actions: tuple[str, ...] | None, folder: Path) -> CopyManifest:
    """Writes the arrays of a copy without rows into an empty folder, and returns its manifest."""
    return _write(TransitionLog(folder, Log("", actions=actions)), {}, (), ())


def _write(
    spooled: SpooledLog[Any], settings: dict[str, Any], files: tuple[InputFile, ...], inputs: tuple[InputState, ...]
) -> CopyManifest:
    """Writes the arrays of rows that were read from `files`; `inputs` are the files of all machines' rows."""
    spooled.write()
    spooled.counts.update(rows_by_log(files, np.load(spooled.folder / "origin_file.npy")))
    is_image = {"state": spooled.log.image is not None, "action": False}
    return CopyManifest(
        kind=KIND,
        rows=spooled.counts["rows"],
        columns={},
        state_ids=tuple(sorted(spooled.keys["state"])),
        action_ids=tuple(sorted(spooled.keys["action"])),
        metric_names=tuple(sorted(spooled.keys["metric"])),
        settings=settings,
        inputs=inputs,
        report=spooled.report,
        files={file.name: {} for file in spooled.folder.iterdir()},
        paths=tuple(file.path for file in files),
        action_names=spooled.actions or (),
        counts=dict(spooled.counts),
        notes=spooled.notes,
        levels={side: _levels_json(levels, spooled.keys[side]) for side, levels in spooled.vocabulary.levels.items()},
        without_value={
            side: spooled.vocabulary.without_value(side, () if is_image[side] else spooled.keys[side])
            for side in spooled.vocabulary.levels
        },
    )


def _levels_json(levels: Levels, ids: Collection[int]) -> dict[str, dict[str, int]]:
    """Returns the strings of the features `ids` for the manifest."""
    return {
        str(feature): dict(sorted(most_frequent(counts, MOST_LEVELS)))
        for feature, counts in sorted(levels.items())
        if feature in ids
    }
