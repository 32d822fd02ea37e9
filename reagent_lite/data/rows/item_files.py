"""An item table read from a file of any format: a row for each item, a column with its id, the others its features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from reagent_lite.data.faults_by_kind import MAX_EXAMPLES, FaultKind, FaultsByKind
from reagent_lite.data.formats.blocks import Block
from reagent_lite.data.formats.csv import typed_cells
from reagent_lite.data.formats.format_table import ALL_COLUMNS, READERS, read_blocks
from reagent_lite.data.formats.input_files import list_input
from reagent_lite.data.formats.jsonl import in_one_column
from reagent_lite.data.formats.schema import is_text
from reagent_lite.data.rows.block_columns import Column, column_of, strings, whole_ids
from reagent_lite.data.rows.column_mapping import OriginalNames
from reagent_lite.data.rows.faults import Faults
from reagent_lite.data.rows.levels import SIDE_OF, Levels, Vocabulary, add_levels, texts_of
from reagent_lite.data.rows.maps import features
from reagent_lite.data.rows.matrices import FeatureMatrix
from reagent_lite.errors import DataError, NoRowsError, Problem, join_names
from reagent_lite.feature_ids import is_list_column
from reagent_lite.id_values import IdFeature
from reagent_lite.item_table import ItemTable

_TABLE = "the item table"
ACTION = "action"
"""The column of a log whose features the table has."""
ROW_LABELS = ("Unnamed: ", "__index_level_")
"""Prefixes of columns that hold a frame's row labels, which are not features."""


def given_items(
    path: str | None, id_column: str, possible: str | None, id_features: tuple[IdFeature, ...] = ()
) -> ItemTable | None:
    """Returns the item table that a config names with `possible_items`; None if it names none. See `read_items`."""
    return None if path is None else replace(read_items(path, id_column, id_features), all_possible=possible == "all")


def read_items(path: str, id_column: str, id_features: tuple[IdFeature, ...] = ()) -> ItemTable:
    """Returns the items of a file or folder, in its order.

    Every column but that of the ids is a feature, with a number for every item, or with a text for every item.

    Args:
        path: local path or URL, in any format that a log may have.
        id_column: name of the column with the ids.
        id_features: features whose values are ids; the item's own id is one if its column is among them.

    Raises:
        DataError: a file that cannot be read; no items or no features; an item without an id, an id twice, a feature
            that is absent or no finite number, or with numbers and strings, with file and line.
    """
    listed = list_input(path, tuple(READERS))
    files = tuple(replace(file, columns=OriginalNames(), id_features=id_features) for file in listed)
    try:
        parts = list(read_blocks(files, partial(_read, id_column), None, ALL_COLUMNS))
    except NoRowsError as error:
        (problem,) = error.problems
        raise DataError(replace(problem, expected="an item table with a row for each item")) from error
    faults = FaultsByKind()
    for part in parts:
        faults.merge(part.faults.by_kind())
    faults.require_none()
    levels: Levels = {}
    vocabulary = Vocabulary()
    for part in parts:
        add_levels(levels, part.levels)
        vocabulary.require_one_kind(SIDE_OF[ACTION], part.features, part.levels, part.faults.block)
    feature_ids = tuple(sorted({feature for part in parts for feature in part.features.ids}))
    if not feature_ids:
        raise DataError(Problem(files[0].location(), f"columns of features besides {id_column!r}", "none"))
    table = ItemTable(
        ids=tuple(item for part in parts for item in part.ids),
        feature_ids=feature_ids,
        values=np.concatenate([part.features.align(feature_ids) for part in parts]),
        texts=texts_of(levels),
    )
    _require_whole(table, [(part.faults.block, row) for part in parts for row in range(len(part.ids))])
    return table


@dataclass(frozen=True, slots=True, kw_only=True)
class _ItemsOfBlock:
    """The items of a block."""

    faults: Faults
    ids: list[str]
    features: FeatureMatrix

    @property
    def levels(self) -> Levels:
        return self.faults.levels.get(_TABLE, {})


def _read(id_column: str, block: Block) -> _ItemsOfBlock:
    names = block.table.column_names
    if id_column not in names:
        got = f"columns {join_names(sorted(names))}"
        todo = "Set item_id, in training data.item_id, to the name of the table's column of ids"
        raise DataError(Problem(block.where(0), f"a column {id_column!r} with the ids of the items", got, todo))
    faults = Faults(block)
    ids = column_of(block, id_column)
    codes, distinct = strings(replace(ids, array=whole_ids(ids)), faults)
    faults.add(codes < 0, f"an id in {id_column}", lambda _: "null")
    texts = [*distinct.to_pylist(), ""]  # the last, for code -1: rows without an id, which are faults
    of_ids = {str(feature.feature) for feature in block.file.id_features}
    has_own_id = id_column in of_ids
    used = [name for name in names if (name != id_column or has_own_id) and not name.startswith(ROW_LABELS)]
    matrix = _features(block, used, faults)
    return _ItemsOfBlock(faults=faults, ids=[texts[code] for code in codes.tolist()], features=matrix)


def _features(block: Block, names: list[str], faults: Faults) -> FeatureMatrix:
    if not names:
        return FeatureMatrix((), np.empty((block.table.num_rows, 0), np.float32))
    parts = {name: (block.table.schema.field(name), column_of(block, name).array) for name in names}
    if block.file.cells:
        parts = {name: typed_cells(name, cells, "value") for name, (_, cells) in parts.items()}
    field, array = in_one_column(_TABLE, parts, np.ones(block.table.num_rows, bool))
    todo = "Give every item a number, or a string, for each feature, and leave out columns that are none"
    return features(Column(field.name, array, is_text(field)), faults, todo=todo)[0]


def _require_whole(table: ItemTable, rows: Sequence[tuple[Block, int]]) -> None:
    """Checks that each id occurs once and has a value for every feature.

    Args:
        table: the table.
        rows: (block, row of the block) of each item.

    Raises:
        DataError: with file and line of the first items for which this is not so.
    """

    def where(number: int) -> str:
        block, row = rows[number]
        return block.where(row)

    def require_none(faulty: dict[int, str], expected: str, todo: str) -> None:
        if faulty:
            examples = [(where(number), got) for number, got in list(faulty.items())[:MAX_EXAMPLES]]
            kind = FaultKind(expected=expected, todo=todo, count=len(faulty), examples=examples)
            raise DataError(kind.problem())

    repeated = {}
    first: dict[str, int] = {}
    for number, item in enumerate(table.ids):
        if first.setdefault(item, number) != number:
            repeated[number] = f"{item!r} again, first at {where(first[item])}"
    require_none(repeated, "each id once", "Keep one row for each item")
    absent = np.isnan(table.values) & [not is_list_column(feature) for feature in table.feature_ids]
    lacking = {
        number: f"no {join_names(table.feature_ids[column] for column in np.flatnonzero(absent[number]))}"
        for number in np.flatnonzero(absent.any(axis=1)).tolist()
    }
    todo = "Give the item a value for it, or leave the feature's column out"
    require_none(lacking, "a number for every feature of the item table", todo)
