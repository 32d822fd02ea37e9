"""Features of all rows of a log, summarised in one pass over its files.

files ─► blocks ─► in threads: states, candidates, hashes of rows ─► ColumnSummary ─► merged in order ─► LogSummary
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from reagent_lite.config.norm_params import NormParams
from reagent_lite.data.faults_by_kind import FaultsByKind
from reagent_lite.data.features.summary import ColumnSummary, Merge
from reagent_lite.data.formats.blocks import Block, Position, Show
from reagent_lite.data.formats.files import InputFile
from reagent_lite.data.formats.reading import read_blocks
from reagent_lite.data.rows.columns import column_of, holds_maps, sequence_numbers, strings
from reagent_lite.data.rows.contract import require_columns, require_present
from reagent_lite.data.rows.faults import Faults
from reagent_lite.data.rows.hashes import Hashes, name_hashes, row_hashes
from reagent_lite.data.rows.levels import SIDE_OF, Levels, Vocabulary, add_levels, texts_of
from reagent_lite.data.rows.maps import candidate_features, candidate_lists, features
from reagent_lite.data.rows.matrices import FeatureMatrix
from reagent_lite.errors import DataError, Problem

STATE, ACTION = "state_features", "action"
_LINE_BITS = 40  # of a position: lines of a file, below the number of the file
_KINDS = ("names", "objects {id: number}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSummary:
    """The features of a log.

    Attributes:
        rows: number of rows of the data.
        parametric: whether actions are candidates with features.
        columns: summaries of "state_features" and, with candidates, "action", where the settings name them.
        rows_by_position: rows without mdp_id or sequence_number, whose place in the sample depends on their position.
        hashes: sha256 of each file.
        logs: rows of each of several logs, by its number.
    """

    rows: int
    parametric: bool
    columns: dict[str, ColumnSummary]
    rows_by_position: int
    hashes: tuple[str, ...]
    logs: dict[int, int]


def summarize_log(
    files: tuple[InputFile, ...],
    settings: NormParams,
    *,
    parametric: bool | None = None,
    seed: int = 0,
    progress: Show | None = None,
) -> LogSummary:
    """Reads all rows once and returns a summary of their features.

    Args:
        files: events, transitions, or other rows with a column state_features.
        settings: which columns, how large a sample, and how many distinct values.
        parametric: whether actions are candidates; None decides by the action column.
        seed: the seed of the sample.
        progress: called with (bytes read, total bytes).

    Raises:
        DataError: with file and line: no state_features, infinite values, keys that are neither ids nor names, actions
            of two kinds; no rows.
    """
    most = settings.max_unique_enum_values
    merges: dict[str, Merge] = {name: Merge(settings.num_samples, most) for name in settings.cols_to_norm}
    positions = [Position() for _ in files]
    rows = by_position = 0
    refused, known = FaultsByKind(), parametric
    vocabulary = Vocabulary()
    logs: Counter[int] = Counter()
    read = partial(_summarized, settings, parametric, seed)
    for faults, unnamed, with_features, columns, row_of in read_blocks(files, read, positions, progress):
        rows, by_position = rows + len(faults.rows), by_position + unnamed
        logs[faults.block.file.log] += len(faults.rows)
        refused.merge(faults.by_kind())
        if with_features is not None and known not in (None, with_features):
            before, now = (f"actions that are {_KINDS[one]}" for one in (not with_features, with_features))
            raise DataError(Problem(faults.block.where(0), f"{before}, as before", now))
        known = known if with_features is None else with_features
        for name, summary in columns.items():
            where = partial(_place, faults.block, row_of[name])
            vocabulary.require_one_kind(SIDE_OF[name], summary.sample, summary.levels, where)
            merges[name].add(summary)
    refused.require_none()
    return LogSummary(
        rows=rows,
        parametric=bool(known),
        columns={
            name: merges[name].summary() for name in (STATE, ACTION) if name in merges and (name == STATE or known)
        },
        rows_by_position=by_position,
        hashes=tuple(position.sha256 for position in positions),
        logs=dict(logs),
    )


def _summarized(
    settings: NormParams, parametric: bool | None, seed: int, block: Block
) -> tuple[Faults, int, bool | None, dict[str, ColumnSummary], dict[str, NDArray[np.int64]]]:
    """Returns what is known of a block.

    Returns:
        (faults, rows known by position, whether actions are candidates, columns, [n] the row of each of a column's
        states or candidates).
    """
    faults, found = Faults(block), dict[str, tuple[FeatureMatrix, Hashes]]()
    row_of = {STATE: np.arange(block.table.num_rows)}
    hashes, unnamed = _hashes(block, faults, seed)
    with_features = _has_features(block) if parametric is None else parametric
    if STATE in settings.cols_to_norm:
        require_columns(block.table.column_names, (STATE,), block.where(0))
        states, present = features(column_of(block, STATE), faults)
        require_present(STATE, present, faults)
        found[STATE] = states, hashes
    if with_features and ACTION in settings.cols_to_norm:
        row_of[ACTION], candidates = _candidates(block, faults)
        found[ACTION] = candidates, hashes[row_of[ACTION]]
    most = settings.max_unique_enum_values
    texts = {name: texts_of(levels) for name, levels in _levels_by_side(faults).items()}
    columns = {} if faults.count else {name: ColumnSummary.of(*one, most, texts[name]) for name, one in found.items()}
    return faults, unnamed, with_features, columns, row_of


def _levels_by_side(faults: Faults) -> dict[str, Levels]:
    levels: dict[str, Levels] = {STATE: {}, ACTION: {}}
    for column, of_column in faults.levels.items():
        add_levels(levels[STATE if SIDE_OF[column] == "state" else ACTION], of_column)
    return levels


def _place(block: Block, row_of: NDArray[np.int64], index: int) -> str:
    return block.where(int(row_of[index]))


def _hashes(block: Block, faults: Faults, seed: int) -> tuple[Hashes, int]:
    """Returns ([n] hash of each row, rows without a name, which are known by the number of file and line)."""
    codes, distinct = strings(column_of(block, "mdp_id"), faults)
    sequence, present = sequence_numbers(column_of(block, "sequence_number"), faults)
    named = (codes >= 0) & present
    episode = np.append(name_hashes(distinct.to_pylist()), np.uint64(0))[np.where(named, codes, -1)]
    position = (block.file_number << _LINE_BITS) + block.lines
    return row_hashes(episode, np.where(named, sequence, position), seed), int((~named).sum())


def _has_features(block: Block) -> bool | None:
    """Returns whether actions are objects with features, or items that have some; None if the block has no action."""
    maps = holds_maps(column_of(block, ACTION))
    return maps if maps is None or block.file.items is None else True


def _candidates(block: Block, faults: Faults) -> tuple[NDArray[np.int64], FeatureMatrix]:
    """Returns ([c] row of each candidate, their features); the action alone where a row lists none, as in training.

    Raises:
        DataError: a key that is neither an id nor a name; other faults are noted.
    """
    action, taken = candidate_features(column_of(block, ACTION), faults, todo="Or set parametric to false")
    lists = candidate_lists(column_of(block, "possible_actions"), faults)
    lists = lists.or_alone(action, taken, lists.lengths == 0)
    return lists.rows, lists.features
