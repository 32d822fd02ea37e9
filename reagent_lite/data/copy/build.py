"""Builds a training copy: blocks are checked, spooled in the order of the files, and written in the copy's order."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from reagent_lite.data.copy.location import KIND, CopyManifest
from reagent_lite.data.copy.spooled_log import SpooledLog
from reagent_lite.data.formats.blocks import InputFile, Show
from reagent_lite.data.formats.format_table import read_blocks
from reagent_lite.data.log_shares import rows_by_log
from reagent_lite.data.rows.levels import MOST_LEVELS, Levels, most_frequent
from reagent_lite.data.stage_folder import states_of


def build(
    files: tuple[InputFile, ...],
    log: SpooledLog[Any],
    progress: Show | None,
    settings: dict[str, Any],
    log_notes: tuple[str, ...] = (),
    inputs: tuple[InputFile, ...] = (),
) -> CopyManifest:
    """Writes the arrays of a training copy of `files` into the log's folder, and returns its manifest.

    Args:
        files: the input; none for the copy of a machine without rows.
        log: an empty log, into which the files are read; afterwards its folder contains the arrays only.
        progress: called with (bytes read, total bytes).
        settings: the settings of the copy, see `location.CopyLocation`.
        log_notes: sentences about the logs, if the files are of several.
        inputs: all files of the input, if `files` are those of one machine; the others have the sha256 of a manifest.

    Raises:
        DataError: rows have faults; with file and line of a few rows of each kind, and how many there are.
    """
    hashes: list[str] = []
    if files:
        for rows in read_blocks(files, log.read, progress, log.readers, hashes):
            log.append(rows)
        log.check(files)
    log.write()
    read = {file.path: sha256 for file, sha256 in zip(files, hashes, strict=True)}
    log.counts.update(rows_by_log(files, np.load(log.folder / "origin_file.npy")))
    return CopyManifest(
        kind=KIND,
        rows=log.counts["rows"],
        columns={},
        state_ids=tuple(sorted(log.keys["state"])),
        action_ids=tuple(sorted(log.keys["action"])),
        metric_names=tuple(sorted(log.keys["metric"])),
        settings=settings,
        inputs=states_of(inputs or files, [read.get(file.path, file.sha256) for file in inputs or files]),
        report=log.report,
        files={file.name: {} for file in log.folder.iterdir()},
        paths=tuple(file.path for file in files),
        action_names=log.actions or (),
        counts=dict(log.counts),
        notes=(*log_notes, *log.notes),
        levels={side: _levels_json(levels, log.keys[side]) for side, levels in log.vocabulary.levels.items()},
        without_value={side: log.vocabulary.without_value(side, log.keys[side]) for side in log.vocabulary.levels},
    )


def _levels_json(levels: Levels, ids: Collection[int]) -> dict[str, dict[str, int]]:
    """Returns the texts of the features `ids` for the manifest."""
    return {
        str(feature): dict(sorted(most_frequent(counts, MOST_LEVELS)))
        for feature, counts in sorted(levels.items())
        if feature in ids
    }
