"""Columns of a log that its training copy does not contain: a policy's probabilities, units, and weights of rows.

blocks of the column ─► numbers, objects or lists, checked ─► matched by file and line ─► in a training copy's order

A policy is given by its probability of the logged action, or of every possible action.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from reagent_lite.config.column_names import UNIT, WEIGHT, names_of
from reagent_lite.data.copy.training_copy import TrainingCopy
from reagent_lite.data.formats.blocks import Block, InputFile
from reagent_lite.data.formats.format_table import read_blocks, readers_of
from reagent_lite.data.formats.schema import find_distinct
from reagent_lite.data.logs import Log
from reagent_lite.data.rows.block_columns import Column, column_of, is_list, numbers, of_cells, pieces, whole_ids
from reagent_lite.data.rows.faults import Faults
from reagent_lite.data.rows.hashes import name_hashes
from reagent_lite.data.rows.maps import named_numbers
from reagent_lite.data.rows.matrices import PolicyColumn, in_order
from reagent_lite.data.rows.row_rules import require_columns
from reagent_lite.errors import DataError, Problem, join_names

_ROUNDING = 1e-3  # of a sum of probabilities, each of which a log may have with three digits
_MOST = 1 + 1e-6  # 1 with a rounding error of float32
_Number = TypeVar("_Number", np.int64, np.float64)
_ReadBlock = Callable[[Block], tuple[int, NDArray[np.int64], NDArray[_Number]]]


@dataclass(frozen=True, slots=True)
class _ProbabilitiesOfBlock:
    """Probabilities of a block: the number of values of each row, [n], and all values in order."""

    file: int
    lines: NDArray[np.int64]
    lengths: NDArray[np.int64]
    values: NDArray[np.float64]
    complete: bool


def read_policy_column(log: Log, name: str, copy: TrainingCopy) -> PolicyColumn:
    """Reads a column of the log that a training copy was made of.

    Args:
        log: the log.
        name: name of the column.
        copy: the training copy.

    Raises:
        DataError: there is no such column, or its values have faults; with file and line.
    """
    files = _files_of_copy(log)
    parts = list(read_blocks(files, lambda block: _part(block, name, copy), readers=readers_of((name,))))
    lengths = np.concatenate([part.lengths for part in parts])
    read = np.concatenate([_keys(part.file, part.lines) for part in parts])
    row = _rows_of_copy(log, copy, read)
    complete = parts[0].complete
    if any(part.complete != complete for part in parts):
        expected = f"numbers alone in {name}, or objects and lists alone"
        raise DataError(Problem(log.name, expected, "both", "Write the probabilities of all rows alike"))
    starts = np.cumsum(lengths) - lengths
    number = np.arange(lengths.max())
    within = number < lengths[row, None]
    table = np.zeros(within.shape, np.float32)
    table[within] = np.concatenate([part.values for part in parts])[(starts[row, None] + number)[within]]
    if complete:
        _require_possible(copy, name, table, lengths[row])
    return PolicyColumn(values=table, complete=complete)


def read_unit_column(log: Log, copy: TrainingCopy) -> NDArray[np.int64]:
    """Returns the code of each episode's unit, [episodes], from the column that the log's `columns` name.

    Args:
        log: the log that the copy was made of.
        copy: the training copy.

    Raises:
        DataError: there is no such column, a row lacks a unit, or the rows of an episode have several.
    """
    todo = "Leave mdp_id out of the columns if no decision changes later ones, or name a unit that holds whole episodes"
    return _read_by_episode(log, copy, UNIT, _units_of_block, todo)


def read_weight_column(log: Log, copy: TrainingCopy) -> NDArray[np.float64]:
    """Returns how many decisions each episode's rows stand for, [episodes], from the column that `columns` name.

    Args:
        log: the log that the copy was made of.
        copy: the training copy.

    Raises:
        DataError: there is no such column, a weight is not a positive number, or the rows of an episode have several.
    """
    todo = (
        "Leave mdp_id out of the columns if no decision changes later ones, or give all rows of an episode its weight"
    )
    return _read_by_episode(log, copy, WEIGHT, _weights_of_block, todo)


def _read_by_episode(
    log: Log, copy: TrainingCopy, field: str, read_block: _ReadBlock[_Number], todo: str
) -> NDArray[_Number]:
    """Returns the value of each episode in a column of which all rows of an episode have the same value."""
    (name,) = names_of(log.columns[field])
    parts = list(read_blocks(_files_of_copy(log), read_block, readers=readers_of((name, field))))
    read = np.concatenate([_keys(file, lines) for file, lines, _ in parts])
    of_row = np.concatenate([values for _, _, values in parts])[_rows_of_copy(log, copy, read)]
    of_episode = np.zeros(len(copy.episode_hash), of_row.dtype)
    of_episode[copy.episode] = of_row
    different = of_episode[copy.episode] != of_row
    copy.refuse(different, f"one {name} for all rows of an episode", lambda row: "several", todo)
    return of_episode


def _weights_of_block(block: Block) -> tuple[int, NDArray[np.int64], NDArray[np.float64]]:
    """Returns the file, lines and weights of a block's rows."""
    require_columns(block.table.column_names, (WEIGHT,), block.where(0))
    faults = Faults(block)
    column = column_of(block, WEIGHT)
    values = numbers(column, faults)
    positive = (values > 0) & np.isfinite(values)
    faults.add(~positive, "a positive number in every row, how many decisions it stands for", column.value)
    faults.require_none()
    return block.file_number, block.lines, values


def _units_of_block(block: Block) -> tuple[int, NDArray[np.int64], NDArray[np.int64]]:
    """Returns the file, lines and codes of the units of a block's rows."""
    require_columns(block.table.column_names, (UNIT,), block.where(0))
    faults = Faults(block)
    column = column_of(block, UNIT)
    faults.add(~column.present, "a unit in every row", lambda _: "null")
    faults.require_none()
    distinct, codes = find_distinct(whole_ids(column).cast(pa.string()))
    return block.file_number, block.lines, name_hashes(distinct.to_pylist())[codes].view(np.int64)


def _files_of_copy(log: Log) -> tuple[InputFile, ...]:
    """Returns the files that the copy's rows are from, with all their rows: episodes are not read again."""
    return tuple(replace(file, selection=None) for file in log.read_files)


def _rows_of_copy(log: Log, copy: TrainingCopy, read: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns for each row of a copy the index of the row that was read, given the keys of those."""
    wanted = _keys(copy.origin_file, copy.origin_line)
    order = np.argsort(read)
    row: NDArray[np.int64] = order[np.searchsorted(read[order], wanted).clip(max=len(read) - 1)]
    if (read[row] != wanted).any():
        raise DataError(Problem(log.name, "the rows that were read before", "others", "Start again"))
    return row


def _keys(file: int | NDArray[np.int32], line: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.asarray(file, np.int64) << 40 | line


def _part(block: Block, name: str, copy: TrainingCopy) -> _ProbabilitiesOfBlock:
    """Returns the probabilities of a block.

    Raises:
        DataError: values that are not probabilities.
    """
    require_columns(block.table.column_names, (name,), block.where(0))
    faults = Faults(block)
    column = of_cells(column_of(block, name), "actions")
    kind = _kind(column)
    lengths = np.ones(len(block.lines), np.int64)
    values = np.zeros(len(lengths))
    if kind is float:
        values = numbers(column, faults)
    elif kind is list and copy.parametric:
        lengths, elements = pieces(column, faults, "a list of probabilities")
        values = numbers(elements, faults)
    elif kind is dict and not copy.parametric:
        values = _of_actions(column, faults, copy.action_names).flatten()
        lengths *= len(copy.action_names)
    else:
        form = "a list as long as possible_actions" if copy.parametric else "an object {action: probability}"
        faults.add(column.present, f"a number or {form} in {name}", column.value)
    faults.add(~column.present, f"a probability in {name}", lambda _: "null")
    rows = np.repeat(np.arange(len(lengths)), lengths)
    outside = np.bincount(rows, ~((values >= 0) & (values <= _MOST)), len(lengths)) > 0  # NaN is outside too
    faults.add(outside, f"probabilities from 0 to 1 in {name}", column.value)
    sums = np.bincount(rows, values, len(lengths))
    if kind is not float:
        wrong = np.abs(sums - 1) > _ROUNDING
        faults.add(wrong, f"probabilities in {name} whose sum is 1", lambda row: f"{sums[row]:g}")
    faults.require_none()
    return _ProbabilitiesOfBlock(block.file_number, block.lines, lengths, values, kind is not float)


def _of_actions(column: Column, faults: Faults, actions: tuple[str, ...]) -> NDArray[np.float64]:
    """Returns the probabilities [n, A] of objects {action: probability}, 0 where an object lacks an action."""
    named = named_numbers(column, faults)
    unknown = [number for number, name in enumerate(named.names) if name not in actions]
    wrong = np.any(~np.isnan(named.values[:, unknown]), axis=1)
    faults.add(wrong, f"probabilities of {join_names(actions)} in {column.name}", column.value)
    values: NDArray[np.float64] = in_order(named.values, named.names, actions, absent=0.0).astype(np.float64)
    return np.nan_to_num(values)


def _kind(column: Column) -> type:
    """Returns whether a column holds numbers, lists or objects; of JSON texts, by the first of them."""
    kind = column.array.type
    if column.text:
        first = json.loads(column.array[int(column.present.argmax())].as_py() or "null")
        return type(first) if isinstance(first, list | dict) else float
    if is_list(kind) and not pa.types.is_struct(kind.value_type):  # a list of structs is a map
        return list
    return dict if column.nested else float


def _require_possible(copy: TrainingCopy, name: str, table: NDArray[np.float32], lengths: NDArray[np.int64]) -> None:
    """Checks that the probabilities belong to the row's possible actions.

    Raises:
        DataError: they do not; names the first such row.
    """
    if copy.parametric:
        counts = np.diff(copy.list_offsets)[np.asarray(copy.actions_list)]
        expected = f"as many probabilities in {name} as possible_actions has"
        copy.refuse(lengths != counts, expected, lambda row: str(lengths[row]))
    else:
        most = np.where(np.asarray(copy.mask) > 0, 0.0, table).max(axis=1)
        expected = f"probability 0 in {name} of actions that are not possible"
        copy.refuse(most > 0, expected, lambda row: f"{most[row]:g}")
