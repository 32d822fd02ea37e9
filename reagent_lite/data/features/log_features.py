"""Summaries of the features of a log without a training copy, in one pass over its files.

files ─► blocks ─► ColumnSummary of states and candidates, in threads ─► merged in order ─► LogSummary

For a training copy see copy/features.py, which does not need Arrow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from reagent_lite.config.norm_params import NormParams
from reagent_lite.data.faults_by_kind import FaultsByKind
from reagent_lite.data.features.summary import ACTION, STATE, ColumnSummary, Merge
from reagent_lite.data.formats.blocks import Block, InputFile, Show
from reagent_lite.data.formats.format_table import read_blocks
from reagent_lite.data.rows.block_columns import column_of, holds_maps, sequence_numbers, strings
from reagent_lite.data.rows.faults import Faults
from reagent_lite.data.rows.hashes import Hashes, hashes_of_codes, row_hashes
from reagent_lite.data.rows.levels import SIDE_OF, Vocabulary, texts_of
from reagent_lite.data.rows.maps import features, offered_items, read_candidate_features, read_candidate_lists
from reagent_lite.data.rows.matrices import FeatureMatrix
from reagent_lite.data.rows.row_rules import require_columns, require_present
from reagent_lite.errors import DataError, Problem
from reagent_lite.id_values import IdFeature

_LINE_BITS = 40  # a row's position has the line in the lower 40 bits, and the number of the file above
_KINDS = ("names", "objects {id: number}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSummary:
    """The features of a log.

    Attributes:
        rows: number of rows of the data.
        parametric: whether actions are candidates with features.
        columns: summaries of "state_features" and, for candidates, "action", if the settings name them.
        rows_by_position: number of rows without mdp_id or sequence_number, which are sampled by their position.
        hashes: sha256 of each file.
        logs: {number of a log: its rows}.
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
    id_features: Mapping[IdFeature, bool] = {},
    progress: Show | None = None,
) -> LogSummary:
    """Reads all rows once and returns a summary of their features.

    Args:
        files: events, transitions, or other rows with a column state_features.
        settings: names of columns, size of the sample, and limit of distinct values.
        parametric: whether actions are candidates; None decides by the action column.
        seed: the seed of the sample.
        id_features: features of ids, and whether the ids of each are counted.
        progress: called with (bytes read, total bytes).

    Raises:
        DataError: no state_features, infinite values, keys that are neither ids nor names, or actions of two kinds,
            with file and line; or no rows.
    """
    merges: dict[str, Merge] = {
        name: Merge(settings.num_samples, settings.max_unique_enum_values) for name in settings.cols_to_norm
    }
    faults = FaultsByKind()
    vocabulary = Vocabulary()
    logs: Counter[int] = Counter()
    by_position = 0
    hashes: list[str] = []
    read = partial(_features_of, settings, id_features, parametric, seed)
    for part in read_blocks(files, read, progress, hashes=hashes):
        block = part.faults.block
        logs[block.file.log] += block.table.num_rows
        by_position += part.rows_by_position
        faults.merge(part.faults.by_kind())
        if None not in (parametric, part.parametric) and part.parametric != parametric:
            before, got = (f"actions that are {_KINDS[bool(kind)]}" for kind in (parametric, part.parametric))
            raise DataError(Problem(block.where(0), f"{before}, as before", got))
        parametric = part.parametric if parametric is None else parametric
        for name, (summary, row_of) in part.columns.items():
            vocabulary.require_one_kind(SIDE_OF[name], summary.sample[0], summary.levels, block, row_of)
            merges[name].add(summary)
    faults.require_none()
    return LogSummary(
        rows=logs.total(),
        parametric=bool(parametric),
        columns={name: merges[name].summary() for name in (STATE, ACTION)[: 1 + bool(parametric)] if name in merges},
        rows_by_position=by_position,
        hashes=tuple(hashes),
        logs=dict(logs),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _BlockFeatures:
    """The features of a block.

    Attributes:
        faults: the faults of its rows.
        rows_by_position: as in LogSummary.
        parametric: whether actions are candidates; None if the block has no action.
        columns: {name: (summary, [n] the block's row of each state or candidate)}; {} if a row has a fault.
    """

    faults: Faults
    rows_by_position: int
    parametric: bool | None
    columns: dict[str, tuple[ColumnSummary, NDArray[np.int64]]]


def _features_of(
    settings: NormParams, id_features: Mapping[IdFeature, bool], parametric: bool | None, seed: int, block: Block
) -> _BlockFeatures:
    faults = Faults(block)
    hashes, rows_by_position = _hashes(block, faults, seed)
    action = column_of(block, ACTION)
    if parametric is None:
        parametric = holds_maps(action)
        if parametric is not None and block.file.items is not None:
            parametric = True
    matrices: dict[str, tuple[FeatureMatrix, NDArray[np.int64]]] = {}
    if STATE in settings.cols_to_norm:
        require_columns(block.table.column_names, (STATE,), block.where(0))
        states, present = features(column_of(block, STATE), faults)
        require_present(STATE, present, faults)
        matrices[STATE] = states, np.arange(len(present))
    if parametric and ACTION in settings.cols_to_norm:
        logged, present = read_candidate_features(action, faults, todo="Or set parametric to false")
        possible = column_of(block, "possible_actions")
        lists = offered_items(read_candidate_lists(possible, faults), present, possible, faults)
        lists = lists.or_alone(logged, present, lists.lengths == 0)  # as in training
        matrices[ACTION] = lists.features, lists.rows
    vocabulary = Vocabulary()
    vocabulary.add(faults.levels)
    columns = {}
    for name, (matrix, row_of) in matrices.items() if not faults.count else ():
        texts = texts_of(vocabulary.levels[SIDE_OF[name]])
        most = settings.max_unique_enum_values
        columns[name] = ColumnSummary.of(matrix, hashes[row_of], most, texts, id_features), row_of
    return _BlockFeatures(faults=faults, rows_by_position=rows_by_position, parametric=parametric, columns=columns)


def _hashes(block: Block, faults: Faults, seed: int) -> tuple[Hashes, int]:
    """Returns ([n] hash of each row, number of rows without mdp_id or sequence_number, hashed by file and line)."""
    codes, ids = strings(column_of(block, "mdp_id"), faults)
    sequence, present = sequence_numbers(column_of(block, "sequence_number"), faults)
    named = (codes >= 0) & present
    episode = hashes_of_codes(np.where(named, codes, -1), ids.to_pylist())
    position = (block.file_number << _LINE_BITS) + block.lines
    return row_hashes(episode, np.where(named, sequence, position), seed), int((~named).sum())
