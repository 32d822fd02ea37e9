"""Facts about logged data that need no full read: the copy made of it, the row count in metadata, the first rows."""

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from reagent_lite.config.column_names import Columns
from reagent_lite.config.paths import DataPath, logs_of
from reagent_lite.data.copy.location import KIND, CopyManifest, locations_of
from reagent_lite.data.formats.arrow import opened_parquet
from reagent_lite.data.formats.blocks import Block, InputFile
from reagent_lite.data.formats.format_table import first_block
from reagent_lite.data.logs import Log
from reagent_lite.data.rows.column_mapping import OriginalNames, csv_of, recall_columns
from reagent_lite.data.rows.reading import Rows, read_rows
from reagent_lite.data.rows.row_rules import RowRules, are_events
from reagent_lite.data.stage_folder import are_untouched
from reagent_lite.errors import NoRowsError


def remembered_columns(path: DataPath, columns: Columns) -> Columns:
    """Returns the column names of a model that apply to another log, or to several; see column_mapping.recall_columns.

    Raises:
        DataError: files are missing or cannot be read.
    """
    known_columns: Columns = {}
    for single in logs_of(path) if columns else ():
        log = Log(single)
        if log.manifest is None:
            with suppress(NoRowsError):
                plain = [replace(file, columns=OriginalNames(csv_of(columns))) for file in log.files]
                if (first := first_block(plain)) is not None:
                    known_columns |= recall_columns(columns, first.table.column_names)
    return known_columns


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstRows:
    """Facts about the first rows of an input, which have no fault.

    Attributes:
        events: whether they are events, which are paired to transitions first.
        file: path of their file; with several logs, the file of the first log.
        rows: number of rows.
        state_ids, action_ids: features that occur, ascending.
        time_diff: positive time differences; of events those between rows of one mdp_id.
    """

    events: bool = False
    file: str
    rows: int
    state_ids: tuple[int, ...]
    action_ids: tuple[int, ...]
    time_diff: NDArray[np.float32]


def standing_copy(log: Log) -> tuple[Path, CopyManifest] | None:
    """Returns the training copy that a run would reuse, or None; files are compared by names, sizes and times only."""
    for location in locations_of(log):
        for folder in location.copies():
            manifest = CopyManifest.matching(folder, KIND, location.settings)
            if manifest is not None and are_untouched(manifest.inputs, log.files):
                return folder, manifest
    return None


def rows_by_metadata(files: tuple[InputFile, ...]) -> int | None:
    """Returns the number of rows of local Parquet files, from their footers; None for other files.

    Raises:
        DataError: a file is not Parquet, or is damaged.
    """
    if any(file.extension != ".parquet" or file.compression or file.remote for file in files):
        return None
    total = 0
    for file in files:
        with opened_parquet(file) as parquet:
            total += int(parquet.metadata.num_rows)
    return total


def first_rows(log: Log, *, refuses: bool = True) -> FirstRows:
    """Reads and checks the first rows of a log, or of each log if there are several.

    Args:
        log: the log.
        refuses: whether a row that breaks a rule is an error, see timeline.on_refused.

    Raises:
        DataError: a file that cannot be read, or a fault in these rows, with file and line.
    """
    log.require_one_kind()
    of_logs = [_first_rows_of(block, log.actions, refuses=refuses) for block in log.first_blocks()]
    if not of_logs:
        nothing = np.zeros(0, np.float32)
        return FirstRows(file=log.files[0].path, rows=0, state_ids=(), action_ids=(), time_diff=nothing)
    return replace(
        of_logs[0],
        rows=sum(first.rows for first in of_logs),
        state_ids=tuple(sorted({feature for first in of_logs for feature in first.state_ids})),
        action_ids=tuple(sorted({feature for first in of_logs for feature in first.action_ids})),
        time_diff=np.concatenate([first.time_diff for first in of_logs]),
    )


def _first_rows_of(block: Block, actions: tuple[str, ...] | None, *, refuses: bool) -> FirstRows:
    events = are_events(block)
    rules = RowRules(actions=actions, events=events)
    rules.require_columns(block)
    rows = read_rows(block, rules)
    if refuses:
        rows.faults.require_none()
    lists = [candidates.features for candidates in (rows.lists, rows.next_lists) if candidates is not None]
    return FirstRows(
        events=events,
        file=block.file.path,
        rows=block.table.num_rows,
        state_ids=tuple(sorted({*rows.state.ids, *rows.next_state.ids})),
        action_ids=tuple(sorted({feature for matrix in lists for feature in matrix.ids})),
        time_diff=_time_differences(rows) if events else rows.time_diff[(rows.bootstrap > 0) & (rows.time_diff > 0)],
    )


def _time_differences(rows: Rows) -> NDArray[np.float32]:
    """Returns the positive differences of sequence numbers between events of an episode."""
    order = np.lexsort((rows.sequence, rows.episode))
    order = order[(rows.episode[order] >= 0) & rows.has_sequence[order]]
    differences = np.diff(rows.sequence[order])[np.diff(rows.episode[order]) == 0]
    return np.asarray(differences[differences > 0], np.float32)
