"""Opens a log's training copy, and builds it first if there is none; see training_copy.py."""

from __future__ import annotations

import dataclasses

from reagent_lite.data.copy.doubts import doubts
from reagent_lite.data.copy.location import locations_of
from reagent_lite.data.copy.training_copy import TrainingCopy, open_training_copy
from reagent_lite.data.formats.blocks import Show
from reagent_lite.data.logs import Log
from reagent_lite.disk_room import is_writable
from reagent_lite.errors import DataError, Problem, pluralize
from reagent_lite.item_table import ItemTable
from reagent_lite.memory import give_back_memory


def prepare_training_copy(log: Log, progress: Show | None = None) -> TrainingCopy:
    """Opens the training copy of a log, and builds it first if it does not exist or its inputs have changed.

    The copy is in the log's `directory`; else in `.reagent-lite` next to local data, if it can be written; else in
    the user's cache folder. Memory: at most 40 bytes a row and about 200 MB, in addition to mapped files.

    Args:
        log: the log.
        progress: called with (bytes read, total bytes) while building.

    Raises:
        DataError: faults of the data, with file and line of a few rows of each kind, and how many there are; files that
            change while they are read; no folder that can be written.
    """
    locations = locations_of(log)
    standing = (location.up_to_date_copy(log.files) for location in locations)
    folder = next((folder for folder in standing if folder is not None), None)
    if folder is None:
        chosen = next((location for location in locations if is_writable(location.parent)), None)
        if chosen is None:
            parents = ", ".join(str(location.parent) for location in locations)
            raise DataError(Problem(parents, "a folder that can be written, for the training copy", "none"))
        with chosen.building() as temporary:
            from reagent_lite.data.copy.build import build

            manifest = build(log, temporary, chosen.settings, progress)
            log.require_unchanged()
            folder = chosen.publish(temporary, manifest)
        give_back_memory()
    copy = open_training_copy(folder)
    if log.items is not None:
        _require_choices(copy, log.name, log.items)
    # entries that are not read may have been added since the copy was built
    return dataclasses.replace(copy, notes=(*copy.notes, *log.notes(), *doubts(copy)))


def _require_choices(copy: TrainingCopy, where: str, items: ItemTable) -> None:
    """Checks that a log of items offers a choice in more than a few rows.

    Raises:
        DataError: nearly all rows offer a single item.
    """
    single = copy.counts.get("single_candidate_rows", 0)
    from reagent_lite.data.copy.spooled_log import NEARLY_ALL

    if single < NEARLY_ALL * len(copy) or not len(copy):
        return
    got = f"a single one in {single:,} of {pluralize(len(copy), 'row')}"
    todo = (
        f'Set possible_items, in training data.possible_items, to "all" if each row could have had any of the '
        f"{pluralize(len(items), 'item')}; else log the ids that were possible, in a column possible_actions"
    )
    raise DataError(Problem(where, "several possible items in a row", got, todo))
