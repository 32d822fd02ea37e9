"""Row groups of Parquet files to shards, as planned: whole files are copied, whole groups moved, pieces decoded."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from reagent_lite.data.formats.files import InputFile, sha256_of
from reagent_lite.data.formats.reading import num_threads
from reagent_lite.data.shards.parquet_groups import (
    Footer,
    GroupedFile,
    copied_bytes,
    damaged,
    footer_of,
    is_whole,
    moved_bytes,
)
from reagent_lite.data.shards.plan import GroupPlan, Slice
from reagent_lite.data.shards.rows import Made, columns_of, part_name
from reagent_lite.files import write_all

_BATCH_VALUES = 1 << 19
_COMPRESSION = "zstd"


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
                write_all(stream, piece)
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
