"""A log of any format copied to any other, row for row.

files ─► blocks ─► settled tables ─► 1 survey: columns, kinds, feature ids  (where the target must know them first)
                                     2 copy: rows as the target's types, in the order of the input
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from reagent_lite.data.formats.blocks import Block, Position
from reagent_lite.data.formats.files import InputFile
from reagent_lite.data.formats.reading import ALL_COLUMNS, read_blocks
from reagent_lite.data.writing.event_log import table_writer
from reagent_lite.data.writing.minari import MinariForm, MinariWriter, ids_in
from reagent_lite.data.writing.tables import column_of_table, conformed, merged, settled
from reagent_lite.errors import DataError, Problem
from reagent_lite.files import appearing_folder

Progress = Callable[[int, int], None]


@dataclass(slots=True)
class Survey:
    """What a log holds.

    Attributes:
        rows: how many.
        fields: columns with the types that hold all values.
        state_ids, action_ids: features seen in states and in actions taken.
    """

    rows: int = 0
    fields: dict[str, pa.Field] = field(default_factory=dict)
    state_ids: set[int] = field(default_factory=set)
    action_ids: set[int] = field(default_factory=set)

    @property
    def names(self) -> list[str]:
        """Columns that have a value in some row."""
        return [name for name, one in self.fields.items() if not pa.types.is_null(one.type)]

    @property
    def parametric(self) -> bool:
        """Whether actions are maps."""
        return "action" in self.fields and pa.types.is_map(self.fields["action"].type)

    @property
    def indexed(self) -> bool:
        """Whether actions are integers: indices, not names."""
        return "action" in self.fields and pa.types.is_integer(self.fields["action"].type)


def survey(files: tuple[InputFile, ...], progress: Progress | None) -> Survey:
    """Reads a log once and returns what it holds.

    Raises:
        DataError: what is wrong in it, with file and line; columns whose values have no type in common.
    """
    found = Survey()
    for table, where in read_blocks(files, _settled, [Position() for _ in files], progress, ALL_COLUMNS):
        found.fields = merged(found.fields, table, where)
        found.rows += table.num_rows
        for name, ids in (("state_features", found.state_ids), ("next_state_features", found.state_ids),
                          ("action", found.action_ids)):  # fmt: skip
            index = table.schema.get_field_index(name)
            if index >= 0:
                ids.update(ids_in(column_of_table(table, index)))
    return found


def _settled(block: Block) -> tuple[pa.Table, str]:
    return settled(block), block.where(0)


def copy_log(
    files: tuple[InputFile, ...], target: Path, fields: dict[str, pa.Field] | None, progress: Progress | None
) -> int:
    """Writes the rows of a log to a file that appears whole or not at all, and returns how many.

    Args:
        files: of the log.
        target: its name ends in one of event_log.SINKS.
        fields: columns of the survey; None for JSON lines, where each row may have its own.
        progress: called with (stored bytes read, stored bytes in all).

    Raises:
        DataError: what is wrong in the log, with file and line; a target that cannot be written.
    """
    rows = 0
    with table_writer(target) as writer:
        for table, _ in read_blocks(files, _settled, [Position() for _ in files], progress, ALL_COLUMNS):
            writer.write(table if fields is None else conformed(table, fields))
            rows += table.num_rows
    return rows


def copy_to_minari(
    files: tuple[InputFile, ...], target: Path, form: MinariForm, progress: Progress | None
) -> MinariWriter:
    """Writes a log as a Minari dataset, whole or not at all, and returns what its writer counted.

    Raises:
        DataError: see MinariWriter; a target that cannot be written.
    """
    try:
        with appearing_folder(target) as folder:
            writer = MinariWriter(folder, form)
            for table, where in read_blocks(files, _settled_lines, [Position() for _ in files], progress, ALL_COLUMNS):
                writer.write(table, where)
            writer.close()
    except OSError as error:
        raise DataError(Problem(str(target), "a folder that can be written", error.strerror or str(error))) from error
    return writer


def _settled_lines(block: Block) -> tuple[pa.Table, list[str]]:
    return settled(block), [f"{block.file.path}:{line}" for line in block.lines.tolist()]
