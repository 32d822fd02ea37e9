"""The whole JSON of `workflows.inspect`: a log, and the file of a config for it."""

from collections.abc import Iterator
from typing import ClassVar

from reagent_lite.config.column_names import LogColumns
from reagent_lite.config.items import ITEM_ID, WITHOUT_ITEMS, ItemId, Items, PossibleItems
from reagent_lite.config.section import Count, LocalPath, NoEffect, Section
from reagent_lite.errors import Problem


class InspectConfig(Section):
    """`python -m workflows.inspect`: describes the columns of a log and writes a training config for it."""

    data_path: str = ""
    """The log, in any format that training reads: events, transitions or single decisions."""
    columns: LogColumns = {}
    items: Items = None
    item_id: ItemId = ITEM_ID
    possible_items: PossibleItems = None
    rows: Count = 100_000
    """Number of rows to read, from the first."""
    output_path: LocalPath = ""
    """The training config, a .json file; an older file with other content is kept under another name, with a warning.
    Empty: no config is written."""

    required: ClassVar = {"data_path": ("a path", "Or give --data")}
    no_effect: ClassVar[tuple[NoEffect, ...]] = (WITHOUT_ITEMS,)

    def rules(self) -> Iterator[Problem]:
        """Yields a Problem if the config to write is no .json file."""
        if self.output_path and not self.output_path.endswith(".json"):
            yield self.wrong("output_path", "the name of a .json file")
