"""Facts about logged data that need no full read: the copy made of it, the row count in metadata, the first rows."""

from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from reagent_lite.config.columns import Columns
from reagent_lite.config.paths import DataPath, logs_of
from reagent_lite.config.timeline import TimelineConfig
from reagent_lite.data.copy.location import KIND, CopyManifest, locations_of
from reagent_lite.data.formats.arrow import opened_parquet
from reagent_lite.data.formats.files import InputFile
from reagent_lite.data.formats.reading import first_block
from reagent_lite.data.logs import require_one_kind
from reagent_lite.data.rows.column_mapping import OriginalNames, remembered
from reagent_lite.data.rows.contract import Contract, are_events
from reagent_lite.data.rows.reading import read_rows
from reagent_lite.data.stage import StageManifest, data_files, untouched
from reagent_lite.errors import NoRowsError
from reagent_lite.item_table import ItemTable


def remembered_columns(path: DataPath, columns: Columns) -> Columns:
    """Returns the names of a model's columns in another log, or in several; see column_mapping.remembered.

    Raises:
        DataError: files that are not there, or cannot be read.
    """
    known_columns: Columns = {}
    for log in logs_of(path) if columns else ():
        if StageManifest.read(log) is None:
            with suppress(NoRowsError):
                plain = tuple(replace(file, columns=OriginalNames()) for file in data_files(log))
                if (first := first_block(plain)) is not None:
                    known_columns |= remembered(columns, first.table.column_names)
    return known_columns


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstRows:
    """The first rows of an input that could be read and have no fault.

    Attributes:
        events: whether they are events, from which transitions are made first.
        file: path of the file that they are from, or that those of the first log are from.
        rows: how many there are.
        state_ids, action_ids: features seen, ascending.
    """

    events: bool = False
    file: str
    rows: int
    state_ids: tuple[int, ...]
    action_ids: tuple[int, ...]


def standing_copy(
    path: DataPath,
    actions: tuple[str, ...] | None,
    directory: str | None,
    columns: Columns | None = None,
    timeline: TimelineConfig | None = None,
    items: ItemTable | None = None,
) -> tuple[Path, CopyManifest] | None:
    """Returns the training copy that a run would use again, by names, sizes and times of the files, or None.

    Args:
        path: the path of the data.
        actions: names of discrete actions, None for parametric ones.
        directory: data.training_copy_dir.
        columns: data.columns.
        timeline: how events are paired; None without settings of their own.
        items: the item table.
    """
    files = data_files(path, columns)
    for place_of_copy in locations_of(path, actions, directory, columns, timeline, items):
        for folder in place_of_copy.copies():
            manifest = CopyManifest.whole(folder, KIND, place_of_copy.settings)
            if manifest is not None and untouched(manifest.inputs, files):
                return folder, manifest
    return None


def rows_by_metadata(files: tuple[InputFile, ...]) -> int | None:
    """Returns the rows of local Parquet files by their footers; None for other files, which must be counted.

    Raises:
        DataError: no Parquet file, or a damaged one.
    """
    if any(file.extension != ".parquet" or file.compression or file.remote for file in files):
        return None
    total = 0
    for file in files:
        with opened_parquet(file) as parquet:
            total += int(parquet.metadata.num_rows)
    return total


def first_rows(
    path: DataPath, actions: tuple[str, ...] | None, columns: Columns | None = None, items: ItemTable | None = None
) -> FirstRows:
    """Reads and checks the first rows of the first file that has some, of each of several logs.

    Raises:
        DataError: a file that cannot be read, or a fault in these rows, with file and line.
    """
    files = data_files(path, columns, items)
    require_one_kind(files, path)
    of_logs = [_first_rows_of(tuple(of_log), actions) for _, of_log in groupby(files, lambda file: file.log)]
    return replace(
        of_logs[0],
        rows=sum(first.rows for first in of_logs),
        state_ids=tuple(sorted({feature for first in of_logs for feature in first.state_ids})),
        action_ids=tuple(sorted({feature for first in of_logs for feature in first.action_ids})),
    )


def _first_rows_of(files: tuple[InputFile, ...], actions: tuple[str, ...] | None) -> FirstRows:
    block = first_block(files)
    if block is None:
        return FirstRows(file=files[0].path, rows=0, state_ids=(), action_ids=())
    events = are_events(block)
    contract = Contract(actions=actions, events=events)
    contract.require_columns(block.table.column_names, block.where(0))
    rows = read_rows(block, contract)
    rows.faults.require_none()
    lists = [candidates.features for candidates in (rows.lists, rows.next_lists) if candidates is not None]
    return FirstRows(
        events=events,
        file=block.file.path,
        rows=block.table.num_rows,
        state_ids=tuple(sorted({*rows.state.ids, *rows.next_state.ids})),
        action_ids=tuple(sorted({feature for matrix in lists for feature in matrix.ids})),
    )


def holds_events(path: DataPath, columns: Columns | None = None) -> bool:
    """Returns whether the first rows at a path are events and not transitions; false where there are no rows.

    Those of several logs are of one kind.
    """
    try:
        return hold_events(data_files(path, columns))
    except NoRowsError:
        return False


def hold_events(files: tuple[InputFile, ...]) -> bool:
    """Returns whether the first rows of files are events; see holds_events."""
    first = first_block(files)
    return first is not None and are_events(first)
