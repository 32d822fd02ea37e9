"""Shards of an input: parts of whole episodes, as equal as these allow, or shuffled copies of all of it.

    1 files ─► episode of every row ─► 2 which rows go where ─► 3 parts, written beside each other ─► 4 manifests

Parquet whose episodes stand in one piece moves as row groups, in an order that the seed draws; only the groups that a
shard's end cuts are decoded (sharding_plan.py, sharding_groups.py). Everything else, and copies in an order of episodes
of their own, goes row by row (sharding_rows.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from reagent_lite.data.formats.files import InputFile, list_input, sha256_of
from reagent_lite.data.formats.input_state import states_of
from reagent_lite.data.formats.reading import num_threads
from reagent_lite.data.formats.stage import StageManifest, data_files, left_out, read_manifest, write_manifest
from reagent_lite.data.shards.groups import cut_by_groups
from reagent_lite.data.shards.plan import file_plan, group_plan, in_groups
from reagent_lite.data.shards.rows import Made, cut_by_rows
from reagent_lite.errors import DataError, Problem

KIND = "shard"
_FILES_OF_WHOLE_EPISODES = ("timeline",)
"""Kinds of stages in whose folders no two files share an episode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How an input is laid out over machines.

    Attributes:
        layout: parts of the rows, or a copy of all of them for each machine.
        num_nodes: machines.
        seed: draws which episodes go where, or the order of each copy.
    """

    layout: Literal["shards", "replicas"]
    num_nodes: int
    seed: int

    def settings(self, shard: int | None = None) -> dict[str, Any]:
        """Returns what the content of all shards, or of one, depends on, as manifests have it."""
        own = {} if shard is None else {"shard": shard}
        return {"layout": self.layout, "num_nodes": self.num_nodes, "seed": self.seed, **own}


class Steps:
    """Counts bytes over threads, and passes the sum on.

    Args:
        progress: called with (bytes done, bytes in all).
        total: bytes in all.
    """

    def __init__(self, progress: Callable[[int, int], None] | None, total: int) -> None:
        self._progress, self._total, self._done, self._lock = progress, total, 0, threading.Lock()

    def __call__(self, amount: int) -> None:
        """Adds bytes that are done."""
        with self._lock:
            self._done = min(self._total, self._done + amount)
            if self._progress is not None:
                self._progress(self._done, self._total)


def folder_name(shard: int) -> str:
    """Returns the name of a shard's folder."""
    return f"shard-{shard:05d}"


def make_shards(
    path: str, layout: Layout, folder: Path, progress: Callable[[int, int], None] | None = None
) -> tuple[StageManifest, ...]:
    """Writes every shard of an input as a stage's folder of Parquet files.

    Memory: 4 bytes per row and the episodes' names, and some 100 MB.

    Args:
        path: a stage's folder, or any file or folder of rows.
        layout: how many, of what.
        folder: empty; gets a folder for each shard, whole on the disk afterwards.
        progress: called with (bytes done, bytes in all).

    Returns:
        The shards' manifests.

    Raises:
        DataError: an input that cannot be read, is not as its manifest says, or changes meanwhile.
    """
    files = data_files(path)
    parent = read_manifest(path) if len(files) != 1 or files[0].path != path else None
    without = left_out(path)
    folders = [folder / folder_name(shard) for shard in range(layout.num_nodes)]
    for one in folders:
        one.mkdir()
    steps = Steps(progress, sum(file.size for file in files))
    with ThreadPoolExecutor(num_threads()) as pool:
        if layout.layout == "shards" and in_groups(files):
            hashes = [pool.submit(sha256_of, file) for file in files] if parent is not None else []
            planned = file_plan if parent is not None and parent.kind in _FILES_OF_WHOLE_EPISODES else group_plan
            plan = planned(files, layout.num_nodes, layout.seed)
            made = None if plan is None else cut_by_groups(plan, folders, steps, hashes)
        else:
            made = None
        made = made or cut_by_rows(files, layout.layout, layout.seed, folders, progress)
        _require_same(files, made.hashes, path)
        written = pool.map(
            lambda shard: write_manifest(folders[shard], _manifest(made, layout, shard, files, parent, without)),
            range(layout.num_nodes),
        )
        return tuple(written)


def _manifest(
    made: Made,
    layout: Layout,
    shard: int,
    files: Sequence[InputFile],
    parent: StageManifest | None,
    left_out: Sequence[str],
) -> StageManifest:
    parts = made.parts[shard]
    return StageManifest(
        kind=KIND,
        rows=sum(one["rows"] for one in parts.values()),
        columns=made.columns,
        state_ids=parent.state_ids if parent else (),
        action_ids=parent.action_ids if parent else (),
        metric_names=parent.metric_names if parent else (),
        settings=layout.settings(shard),
        inputs=states_of(files, made.hashes),
        parent=parent.digest if parent else "",
        report={
            "moved_as": made.moved_as,
            "rows_of_input": made.rows,
            "episodes_of_input": made.episodes,
            "left_out": list(left_out),
        },
        files=parts,
    )


def _require_same(files: Sequence[InputFile], hashes: Sequence[str], path: str) -> None:
    """Holds what was read to the input's own manifest, and to what it was at the beginning."""
    problems = [
        Problem(file.path, f"bytes with sha256 {file.sha256}, as its manifest says", f"sha256 {found}",
                "Copy the folder again, or let the stage that made it make it again")
        for file, found in zip(files, hashes, strict=True)
        if file.sha256 and file.sha256 != found
    ]  # fmt: skip
    now = {
        file.name: (file.size, file.modified_ns) for file in list_input(path, tuple({one.extension for one in files}))
    }
    problems += [
        Problem(file.path, "a file that stays the same while shards are made of it", "one that was changed",
                "Run again when whatever writes it has ended")
        for file in files
        if now.get(file.name) != (file.size, file.modified_ns)
    ]  # fmt: skip
    if problems:
        raise DataError(problems[:20])
