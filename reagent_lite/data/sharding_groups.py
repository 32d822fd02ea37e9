"""Shards of Parquet in row groups: which group goes where, and the moving.

groups      0 | 1 | 2 | 3 | 4 ...        groups that share an episode are tied
chains      [0] [1 2] [3] [4]            laid out in the order of md5(seed, first episode)
laid out    [3] [0] | [1 2] [4]          cut at the episode's end nearest to each N-th of the rows
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from numpy.typing import NDArray

from reagent_lite.data.parquet_groups import (
    Footer,
    GroupedFile,
    copied_bytes,
    damaged,
    footer_of,
    is_whole,
    moved_bytes,
    open_groups,
)
from reagent_lite.data.readers import num_threads
from reagent_lite.data.readers_input import InputFile
from reagent_lite.data.readers_parquet import sha256_of
from reagent_lite.data.sharding_episodes import Episodes, parquet_ids
from reagent_lite.data.sharding_rows import Made, columns_of, no_rows, part_name

_BATCH_VALUES = 1 << 19
_COMPRESSION = "zstd"


@dataclass(frozen=True, slots=True)
class Slice:
    """Rows [start, stop) of a row group of a file."""

    file: int
    group: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """What goes where.

    Attributes:
        files: the input.
        shards: slices of each shard, in the order of its rows.
        rows, episodes: of the input.
    """

    files: tuple[GroupedFile, ...]
    shards: tuple[tuple[Slice, ...], ...]
    rows: int
    episodes: int


def in_groups(files: Sequence[InputFile]) -> bool:
    """Whether all files have row groups."""
    return all(file.extension == ".parquet" and not file.compression for file in files)


def group_plan(files: Sequence[InputFile], num_shards: int, seed: int) -> GroupPlan | None:
    """Returns how row groups of Parquet files make shards, or None where some episode does not stand in one piece.

    Raises:
        DataError: a file that cannot be read.
        NoRowsError: files without rows.
    """
    with ThreadPoolExecutor(num_threads()) as pool:
        opened = tuple(pool.map(open_groups, files))
        episodes = Episodes.of([chunk for chunks in pool.map(parquet_ids, files) for chunk in chunks])
    if not len(episodes.codes):
        raise no_rows(files)
    starts = episodes.starts()
    if starts is None:
        return None
    bounds = np.cumsum([0, *(rows for one in opened for rows in one.rows)])
    whole = bounds[np.cumsum([0, *(len(one.rows) for one in opened)])] if len(files) >= num_shards else bounds
    chains = _chains(whole, starts)
    order = sorted(range(len(chains)), key=lambda number: episodes.key(chains[number][0], seed))
    laid = [chains[number] for number in order]
    places = [(file, number) for file, one in enumerate(opened) for number in range(len(one.rows))]
    shards = tuple(
        tuple(
            Slice(*places[group], start - int(bounds[group]), stop - int(bounds[group]))
            for group, start, stop in _by_group(rows, bounds)
        )
        for rows in _cut(laid, starts, num_shards)
    )
    return GroupPlan(files=opened, shards=shards, rows=int(bounds[-1]), episodes=len(starts))


def _chains(bounds: NDArray[np.int64], starts: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Returns the ranges of rows between bounds of groups or files at which an episode starts."""
    inner = np.unique(bounds[bounds < bounds[-1]])
    free = inner[starts[np.searchsorted(starts, inner, "right") - 1] == inner]
    return list(zip(free.tolist(), [*free[1:].tolist(), int(bounds[-1])], strict=True))


def _cut(laid: list[tuple[int, int]], starts: NDArray[np.int64], num_shards: int) -> list[list[tuple[int, int]]]:
    """Returns the ranges of rows of each shard.

    Args:
        laid: ranges of rows, in their order.
        starts: first row of each episode, ascending.
        num_shards: how many.
    """
    ends = np.cumsum([stop - start for start, stop in laid])
    total = int(ends[-1]) if len(ends) else 0
    cuts = [0]
    for number in range(1, num_shards):
        wanted = total * number / num_shards
        chain = min(int(np.searchsorted(ends, wanted, "right")), len(laid) - 1)
        first, last = laid[chain]
        offset = int(ends[chain]) - (last - first)
        row = first + wanted - offset
        after = int(np.searchsorted(starts, row, "right"))
        near = (int(starts[after - 1]), min(last, int(starts[after])) if after < len(starts) else last)
        cuts.append(offset + min(near, key=lambda one: abs(one - row)) - first)
    cuts.append(total)
    shards = []
    for begin, end in itertools.pairwise(cuts):
        ranges = []
        for (first, last), stop in zip(laid, ends.tolist(), strict=True):
            offset = stop - (last - first)
            low, high = max(begin, offset), min(end, stop)
            if low < high:
                ranges.append((first + low - offset, first + high - offset))
        shards.append(ranges)
    return shards


def _by_group(ranges: list[tuple[int, int]], bounds: NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """Returns (group, first row, end) of ranges of rows."""
    found = []
    for start, stop in ranges:
        group = int(np.searchsorted(bounds, start, "right")) - 1
        while start < stop:
            end = min(stop, int(bounds[group + 1]))
            if end > start:
                found.append((group, start, end))
            start, group = end, group + 1
    return found


def cut_by_groups(
    plan: GroupPlan, folders: Sequence[Path], moved: Callable[[int], None], known: Sequence[Future[str]] = ()
) -> Made:
    """Writes the parts of every shard.

    Args:
        plan: what goes where.
        folders: of the shards, empty.
        moved: called with bytes that have been written.
        known: sha256 of every input file, where whole ones may be hard links, as those of a stage's folder, which are
            never changed; they are hashed while the plan is made.

    Raises:
        DataError: a file that ends early or is damaged.
    """
    with ThreadPoolExecutor(num_threads()) as pool:
        parts = [_parts(plan, slices) for slices in plan.shards]
        copied = {part[0].file for shard in parts for part in shard if _is_copy(plan, part)}
        hashes = dict(enumerate(known)) or {
            number: pool.submit(sha256_of, one.file) for number, one in enumerate(plan.files) if number not in copied
        }
        footers = {number: footer_of(one.file) for number, one in enumerate(plan.files) if number not in copied}
        writing = _Writing(plan=plan, footers=footers, moved=moved, known=known)
        tasks = [
            [pool.submit(writing.write, part, folder / part_name(number)) for number, part in enumerate(shard)]
            for shard, folder in zip(parts, folders, strict=True)
        ]
        entries = [[task.result() for task in shard] for shard in tasks]
        found = {number: one.result() for number, one in hashes.items()}
    for shard, written in zip(parts, entries, strict=True):  # a copy has its original's sha256
        copies = {part[0].file: one["sha256"] for part, one in zip(shard, written, strict=True) if _is_copy(plan, part)}
        found = copies | found
    return Made(
        parts=tuple({part_name(number): one for number, one in enumerate(written)} for written in entries),
        columns=columns_of([one.schema for one in plan.files]),
        hashes=tuple(found[number] for number in range(len(plan.files))),
        rows=plan.rows,
        episodes=plan.episodes,
        moved_as="row groups",
    )


def _parts(plan: GroupPlan, slices: Sequence[Slice]) -> list[list[Slice]]:
    """Returns the slices of each file to write: pieces before, whole groups by the file they come from, pieces behind.

    An episode that goes over the bound of two groups has its rows in the order of the parts' names.
    """
    whole: dict[int, list[Slice]] = {}
    pieces: tuple[list[list[Slice]], list[list[Slice]]] = ([], [])
    for one in slices:
        if one.stop - one.start == plan.files[one.file].rows[one.group]:
            whole.setdefault(one.file, []).append(one)
        else:
            pieces[bool(whole)].append([one])
    return [*pieces[0], *whole.values(), *pieces[1]]


def _moves(plan: GroupPlan, part: list[Slice]) -> bool:
    return part[0].stop - part[0].start == plan.files[part[0].file].rows[part[0].group]


def _is_copy(plan: GroupPlan, part: list[Slice]) -> bool:
    return _moves(plan, part) and is_whole(plan.files[part[0].file], [one.group for one in part])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Writing:
    """Writes parts; footers are those of the files that are taken apart."""

    plan: GroupPlan
    footers: dict[int, Footer]
    moved: Callable[[int], None]
    known: Sequence[Future[str]]

    def write(self, part: list[Slice], target: Path) -> dict[str, Any]:
        """Writes a part to the disk and returns its entry of the manifest."""
        source, rows = self.plan.files[part[0].file], sum(one.stop - one.start for one in part)
        if not _moves(self.plan, part):
            _write_piece(source, part[0], target)
            sha256 = self._hashed(target)
        elif not _is_copy(self.plan, part):
            pieces = moved_bytes(source, self.footers[part[0].file], [one.group for one in part])
            sha256 = self._written(pieces, target)
        elif self.known and _linked(source.file, target):
            sha256 = self.known[part[0].file].result()
            self.moved(source.file.size)
        else:
            sha256 = self._written(copied_bytes(source.file), target)
        return {"rows": rows, "size": target.stat().st_size, "sha256": sha256}

    def _written(self, pieces: Iterable[bytes | memoryview], target: Path) -> str:
        digest = hashlib.sha256()
        with target.open("wb", buffering=0) as stream:
            for piece in pieces:
                digest.update(piece)
                _write_all(stream, piece)
                self.moved(len(piece))
            os.fsync(stream.fileno())
        return digest.hexdigest()

    def _hashed(self, target: Path) -> str:
        with target.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256")
            os.fsync(stream.fileno())
        self.moved(target.stat().st_size)
        return digest.hexdigest()


def _linked(file: InputFile, target: Path) -> bool:
    try:
        os.link(file.path, target)
    except OSError:  # a bucket, another disk, a file system without links, or too many of them
        return False
    return True


def _write_all(stream: IO[bytes], piece: bytes | memoryview) -> None:
    left = memoryview(piece)
    while left:  # on a full disk a raw stream takes a part first, and raises then
        left = left[stream.write(left) :]


def _write_piece(source: GroupedFile, piece: Slice, target: Path) -> None:
    """Decodes and encodes a piece of a row group, batch by batch."""
    place = 0
    try:
        with source.file.open() as stream:
            parquet = pa.parquet.ParquetFile(stream, pre_buffer=False)
            group = parquet.metadata.row_group(piece.group)
            values = sum(group.column(number).num_values for number in range(group.num_columns))
            rows = max(1, _BATCH_VALUES * group.num_rows // max(1, values))
            with pa.parquet.ParquetWriter(target, source.schema, compression=_COMPRESSION) as writer:
                for batch in parquet.iter_batches(rows, row_groups=[piece.group]):
                    low, high = max(piece.start - place, 0), min(piece.stop - place, batch.num_rows)
                    if low < high:
                        writer.write_batch(batch.slice(low, high - low))
                    place += batch.num_rows
                    if place >= piece.stop:
                        break
    except pa.ArrowException as error:
        raise damaged(source.file, error) from error
