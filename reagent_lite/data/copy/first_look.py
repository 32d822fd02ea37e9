"""What can be known of logged data without reading all of it: files, rows by their own word, the first rows parsed."""

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from reagent_lite.config.columns import Columns
from reagent_lite.data.copy.place import CopyManifest, places_of
from reagent_lite.data.formats.arrow import opened_parquet
from reagent_lite.data.formats.blocks import Block, Position
from reagent_lite.data.formats.files import InputFile
from reagent_lite.data.formats.reading import parses_of
from reagent_lite.data.rows.columns import column_of, flags
from reagent_lite.data.rows.contract import Contract
from reagent_lite.data.rows.faults import Faults
from reagent_lite.data.rows.reading import read_rows
from reagent_lite.data.rows.table import event_table
from reagent_lite.data.stage import data_files
from reagent_lite.errors import DataError, NoRowsError


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstRows:
    """The first rows of an input that could be read and have no fault.

    Attributes:
        events: they are events, of which transitions are made first.
        file: they are from.
        rows: how many.
        state_ids, action_ids: features seen, ascending.
    """

    events: bool = False
    file: str
    rows: int
    state_ids: tuple[int, ...]
    action_ids: tuple[int, ...]


def standing_copy(
    path: str, actions: tuple[str, ...] | None, directory: str | None, columns: Columns | None = None
) -> tuple[Path, CopyManifest] | None:
    """Returns the training copy that a run would use again, by names, sizes and times of the files, or None.

    Args:
        path: of the data.
        actions: names of discrete actions, None for parametric ones.
        directory: data.training_copy_dir.
        columns: data.columns.
    """
    files = data_files(path, columns)
    found = (place.untouched(files) for place in places_of(path, actions, directory, columns))
    return next((one for one in found if one is not None), None)


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


def first_rows(path: str, actions: tuple[str, ...] | None, columns: Columns | None = None) -> FirstRows:
    """Reads and checks the first rows of the first file that has some.

    Raises:
        DataError: a file that cannot be read, or what is wrong in these rows, with file and line.
    """
    block = _first_block(path, columns)
    if block is None:
        return FirstRows(file=data_files(path)[0].path, rows=0, state_ids=(), action_ids=())
    if _are_events(block):
        return _first_events(block, actions)
    contract = Contract(actions=actions)
    contract.require_columns(block.table.column_names, block.where(0))
    rows = read_rows(block, contract)
    if rows.problems:
        raise DataError(rows.problems)
    seen = {*rows.state.ids, *rows.next_state.ids}
    candidates = {feature for one in (rows.lists, rows.next_lists) if one is not None for feature in one.features.ids}
    return FirstRows(
        file=block.file.path, rows=len(rows), state_ids=tuple(sorted(seen)), action_ids=tuple(sorted(candidates))
    )


def holds_events(path: str, columns: Columns | None = None) -> bool:
    """Whether the rows at a path are events and not transitions, by the first of them.

    Events say nothing of what follows them but where a limit cut the episode: they have mdp_id and sequence_number, and
    neither next_action, nor next_state_features in a row that is not truncated. Where there are no rows, as on a
    machine beside others, there are no events.
    """
    try:
        block = _first_block(path, columns)
    except NoRowsError:
        return False
    return block is not None and _are_events(block)


def _are_events(block: Block) -> bool:
    names = set(block.table.column_names)
    if not {"mdp_id", "sequence_number"} <= names or "next_action" in names:
        return False
    faults = Faults(block)
    cut = flags(column_of(block, "truncated"), faults) == 1
    return not (column_of(block, "next_state_features").present & ~cut).any()


def _first_events(block: Block, actions: tuple[str, ...] | None) -> FirstRows:
    discrete = actions is not None
    table, faults, _ = event_table(block, Contract(actions=actions, events=True))
    faults.require_none()
    columns = ["state_features"] if discrete else ["state_features", "action"]
    ids = [{key for row in table.column(name).to_pylist() for key, _ in row or ()} for name in columns]
    return FirstRows(
        events=True,
        file=block.file.path,
        rows=table.num_rows,
        state_ids=tuple(sorted(ids[0])),
        action_ids=tuple(sorted(ids[-1])) if not discrete else (),
    )


def _first_block(path: str, columns: Columns | None) -> Block | None:
    """Returns the first rows at a path; None where there are none."""
    for number, file in enumerate(data_files(path, columns)):
        with closing(parses_of(file, number, Position())) as blocks:
            for parse in blocks:
                block = parse()
                if block.table.num_rows:
                    return block
    return None
