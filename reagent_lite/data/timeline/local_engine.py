"""The engine of this machine: sorts in this process, in a limited amount of memory and on the disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from reagent_lite.config.timeline_config import TimelineConfig
from reagent_lite.data.formats.blocks import InputFile, Show
from reagent_lite.data.formats.schema import in_one_piece, to_numpy
from reagent_lite.data.timeline.buckets import BucketGroup, Buckets, reordered_rows
from reagent_lite.data.timeline.event_spans import Counts
from reagent_lite.data.timeline.events import ORDER, EventFacts, check_events
from reagent_lite.data.timeline.pairing import Pairing
from reagent_lite.disk_room import room_in

GROUP_BYTES = 1 << 23
"""Approximate size in memory of the events that are sorted and paired at once; a larger bucket is not divided. The
process takes about eight times as much for it."""


class LocalEngine:
    """Sorts events in this process.

    Args:
        folder: temporary folder for this engine alone, on a local disk.
        memory_bytes: memory for events; further events go to the folder.
    """

    def __init__(self, folder: Path, memory_bytes: int) -> None:
        # Arrow's own pool keeps memory that threads have freed: 10 M rows take 492 MB with it and 426 MB with this one,
        # if memory_bytes is 200 MB
        self._pool = pa.default_memory_pool()
        pa.set_memory_pool(pa.system_memory_pool())
        self._folder = folder
        self._memory_bytes = memory_bytes
        self._groups: list[BucketGroup] = []

    def load(self, config: TimelineConfig, files: Sequence[InputFile], show: Show, *, texts: bool) -> EventFacts:
        """Reads and keeps the events of the files; see Engine."""
        for file in self._folder.iterdir():  # left from a first reading without strings
            file.unlink()
        with room_in(self._folder, "temporary_directory"):
            buckets = Buckets(self._folder, files, self._memory_bytes)

            def add(table: pa.Table) -> None:
                buckets.add(table, to_numpy(in_one_piece(table.column("_place"))))

            facts = check_events(config, files, 0, add, show, texts=texts)
            self._groups = buckets.groups(GROUP_BYTES)
        return facts

    def lengths(self) -> Counter[int]:
        """Returns {number of rows: number of episodes}; see Engine."""
        counts_by_length: Counter[int] = Counter()
        names = ["mdp_id", "sequence_number", "_rule"]
        for group in self._groups:
            rows = pa.concat_tables(table.select(names) for table in group.tables(last=False))
            counts = rows.group_by("mdp_id").aggregate([("sequence_number", "count_distinct"), ("_rule", "count")])
            counts_by_length.update(
                counts.filter(pc.equal(counts["_rule_count"], 0))["sequence_number_count_distinct"].to_pylist()
            )
        return counts_by_length

    def write(self, pairing: Pairing, folders: Sequence[Path], show: Show) -> tuple[list[dict[int, int]], Counts]:
        """Writes the transitions of the events in order; see Engine."""
        return pairing.write((_sort_tables(group.tables()) for group in self._groups), folders, show)

    def close(self) -> None:
        """Restores Arrow's memory pool."""
        pa.set_memory_pool(self._pool)


def _sort_tables(tables: list[pa.Table]) -> pa.Table:
    keys = pa.concat_tables(table.select(ORDER) for table in tables)
    return reordered_rows(tables, pc.sort_indices(keys, sort_keys=[(name, "ascending") for name in ORDER]))
