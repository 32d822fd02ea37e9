"""Shards of an input: its whole episodes in equal parts, or a copy of all of them in another order for each machine.

    a timeline's files ─► whole, as hard links, to the machine with the fewest rows while they fit its equal share
    all other rows     ─► buckets by a hash of the episode ─► each sorted ─► cut where a share is full ─► Parquet

Files of a timeline never share an episode. Those that fit no share (fewer files than machines, very unequal ones) are
dealt row by row like all other input, which is read once. The hash orders the episodes, so the seed decides where each
goes; the rows of an episode keep the order of the input. Memory is that of two groups of buckets, a chunk on its way
to them, and the readers' blocks.
"""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from numpy.typing import NDArray

from reagent_lite.config.shard import ShardConfig
from reagent_lite.data.buckets import Buckets, in_order
from reagent_lite.data.formats.blocks import Block, Position, Show, num_threads
from reagent_lite.data.formats.files import InputFile
from reagent_lite.data.formats.reading import ALL_COLUMNS, read_blocks, require_hash
from reagent_lite.data.formats.schema import conformed, in_one_piece, merge_fields, to_numpy
from reagent_lite.data.rows.columns import column_of, strings
from reagent_lite.data.rows.faults import Faults
from reagent_lite.data.rows.hashes import Hashes, mix, name_hashes, row_hashes
from reagent_lite.data.stage import StageManifest, data_files, left_out, require_unchanged, states_of
from reagent_lite.data.writing.part_files import PARQUET, ROW_GROUP_ROWS, part_name

KIND = "shard"
GROUP_BYTES = 3 << 22
"""Size in memory of the rows that are sorted together and go to one file; two threads hold three times as much each."""
_MEMORY_BYTES = 1 << 26
"""What rows take in memory, at most, before they go to the disk."""
_FILES_OF_WHOLE_EPISODES = ("timeline",)
"""Kinds of stages in whose folders no two files share an episode."""
_SLACK = 0.02
"""By how much whole files may exceed an equal share."""


def settings(config: ShardConfig) -> dict[str, Any]:
    """Returns the settings that the content of an input's shards depends on, as manifests have them."""
    columns = {"columns": config.columns} if config.columns else {}
    return {"layout": config.layout, "num_nodes": config.num_nodes, "seed": config.seed, **columns}


def _salt(seed: int, copy: int = 0) -> Hashes:
    """Returns [1] a number to combine with hashes; each seed and copy has its own."""
    return mix(np.array([seed << 32 | copy], np.uint64))


def folder_name(shard: int) -> str:
    """Returns the name of a shard's folder."""
    return f"shard-{shard:05d}"


@dataclass(slots=True, kw_only=True)
class _Shard:
    """A shard that is being made.

    Attributes:
        folder: where its files go.
        whole: files of the input that it gets as they are.
        lacking: rows it gets in addition; only its proportion to that of the other shards counts.
        rows: {file name: rows} of its files.
    """

    folder: Path
    whole: list[InputFile] = field(default_factory=list)
    lacking: float = 1.0
    rows: dict[str, int] = field(default_factory=dict)


def make_shards(config: ShardConfig, folder: Path, progress: Show | None = None) -> tuple[StageManifest, ...]:
    """Writes every shard of an input as a stage's folder of Parquet files.

    Args:
        config: the input, how many shards, of what, and the seed.
        folder: empty; gets a folder for each shard, whole on the disk afterwards, and temporary files meanwhile.
        progress: called with (bytes done, bytes to do).

    Returns:
        The shards' manifests.

    Raises:
        DataError: an input that cannot be read, is not as its manifest says, or changes meanwhile.
    """
    path = config.training_data_path
    files, parent = data_files(path, config.columns), StageManifest.read(path)
    shards = [_Shard(folder=folder / folder_name(number)) for number in range(config.num_nodes)]
    for one in shards:
        one.folder.mkdir()
    rest = files
    manifest = StageManifest(kind=KIND, rows=0, columns={}, settings={}, inputs=(), report={}, files={})
    if parent is not None:
        manifest = replace(parent, kind=KIND, parent=parent.digest)
        if parent.rows and parent.kind in _FILES_OF_WHOLE_EPISODES and config.layout == "shards":
            whole, rest, lacking = whole_files(files, parent, config)
            for one, one.whole, one.lacking in zip(shards, whole, lacking.tolist(), strict=True):
                for number, file in enumerate(one.whole):
                    _link_or_copy(file, one.folder / part_name(number))
                    one.rows[part_name(number)] = parent.files[file.name]["rows"]
    hashes = {file: file.sha256 for file in files}
    if rest:
        found, schema = _deal(rest, config, shards, progress)
        hashes |= dict(zip(rest, found, strict=True))
        manifest = replace(manifest, columns=manifest.columns or {one.name: str(one.type) for one in schema})
    require_unchanged(files, path, config.columns)
    report = {"whole_files": sum(len(one.whole) for one in shards), "left_out": list(left_out(path))}
    manifest = replace(manifest, inputs=states_of(files, list(hashes.values())), report=report)
    return tuple(
        _written(replace(manifest, settings={**settings(config), "shard": number}), one)
        for number, one in enumerate(shards)
    )


def _written(manifest: StageManifest, shard: _Shard) -> StageManifest:
    """Writes the manifest of a shard's folder, and checks its whole files against the input's manifest."""
    files: dict[str, dict[str, Any]] = {name: {"rows": rows} for name, rows in shard.rows.items()}
    manifest = replace(manifest, rows=sum(shard.rows.values()), files=files).write(shard.folder)
    for number, file in enumerate(shard.whole):
        require_hash(file, manifest.files[part_name(number)]["sha256"])
    return manifest


def whole_files(
    files: Sequence[InputFile], parent: StageManifest, config: ShardConfig
) -> tuple[list[list[InputFile]], tuple[InputFile, ...], NDArray[np.float64]]:
    """Deals files that never share an episode to machines as they are.

    Returns:
        The files of each machine, the files that fit no machine's share, and [machines] the rows that each still lacks.
    """
    rows = {file: int(parent.files[file.name]["rows"]) for file in files}
    share = sum(rows.values()) / config.num_nodes
    rank = dict(zip(files, mix(name_hashes(file.sha256 for file in files) ^ _salt(config.seed)).tolist(), strict=True))
    machines = np.argsort(mix(np.arange(config.num_nodes, dtype=np.uint64) ^ _salt(config.seed))).tolist()
    held, owner = [0] * config.num_nodes, {}
    for file in sorted(files, key=lambda file: (-rows[file], rank[file])):
        machine = min(machines, key=held.__getitem__)
        if held[machine] + rows[file] <= share * (1 + _SLACK):
            held[machine] += rows[file]
            owner[file] = machine
    whole = [[file for file in files if owner.get(file) == machine] for machine in range(config.num_nodes)]
    return whole, tuple(file for file in files if file not in owner), np.maximum(share - np.array(held), 0)


def _link_or_copy(file: InputFile, target: Path) -> None:
    """Links a file to another name, or copies it where no link is possible, as from a bucket or another disk."""
    try:
        os.link(file.path, target)
    except OSError:
        with file.open() as source, target.open("wb") as stream:
            shutil.copyfileobj(source, stream)


def _deal(
    files: tuple[InputFile, ...], config: ShardConfig, shards: list[_Shard], progress: Show | None
) -> tuple[tuple[str, ...], pa.Schema]:
    """Writes the rows of files to shards, reading them once for all shards or once for each copy.

    Returns:
        The sha256 of each file, and the columns.
    """
    orders = [shards] if config.layout == "shards" else [[one] for one in shards]
    positions = [Position() for _ in files]
    for number, targets in enumerate(orders):
        show = progress and partial(_show_part, progress, number, len(orders))
        with tempfile.TemporaryDirectory(prefix=".spool-", dir=shards[0].folder.parent) as scratch:
            buckets = Buckets(Path(scratch), files, _MEMORY_BYTES)
            schema = _spread(files, _salt(config.seed, number), buckets, positions, show)
            _write(schema, buckets, targets)
    return tuple(position.sha256 for position in positions), schema


def _show_part(progress: Show, number: int, count: int, done: int, total: int) -> None:
    progress(number * total + done, count * total)


def _spread(
    files: tuple[InputFile, ...], salt: Hashes, buckets: Buckets, positions: list[Position], show: Show | None
) -> pa.Schema:
    """Puts rows into buckets, with the hash of a row's episode as the last column.

    Returns:
        The columns that hold the values of all rows; tables of the buckets have the columns of their rows.
    """
    fields = dict[str, pa.Field]()

    def hashed(block: Block) -> tuple[pa.Table, Hashes]:
        return block.table, episode_hashes(block, salt)

    for table, hashes in read_blocks(files, hashed, positions, show, ALL_COLUMNS):
        fields = merge_fields(fields, {one.name: one for one in table.schema})
        buckets.add(table.append_column("hash", pa.array(hashes)), hashes >> np.uint64(32))
    return pa.schema(list(fields.values()))


def _sorted(tables: list[pa.Table], schema: pa.Schema) -> tuple[pa.Table, NDArray[np.int64]]:
    """Returns the rows of a group by episode, and the first row of each episode and the end of the last."""
    fields = {one.name: one for one in schema}
    keys = np.concatenate([to_numpy(in_one_piece(one.column(one.num_columns - 1))) for one in tables])
    order = np.argsort(keys, kind="stable")
    starts = np.flatnonzero(np.diff(keys[order])) + 1
    rows = [conformed(one.remove_column(one.num_columns - 1), fields) for one in tables]
    return in_order(rows, pa.array(order)), np.concatenate(([0], starts, [len(keys)]))


def _write(schema: pa.Schema, buckets: Buckets, shards: Sequence[_Shard]) -> None:
    """Writes the rows of buckets in the order of their hashes, and to each shard as many as it lacks."""
    groups = buckets.groups(GROUP_BYTES)
    ends = np.cumsum([group.rows for group in groups])
    wanted = np.cumsum([one.lacking for one in shards])
    wanted = wanted[:-1] * (ends[-1] / wanted[-1])

    def finish(number: int) -> None:
        table, starts = _sorted(groups[number].tables(), schema)
        cuts = _cuts(starts, wanted - (ends[number] - table.num_rows)).tolist()
        for one, (start, stop) in zip(shards, itertools.pairwise(cuts), strict=True):
            if start < stop:
                name = part_name(len(one.whole) + number)
                one.rows[name] = stop - start
                pa.parquet.write_table(table.slice(start, stop - start), one.folder / name, ROW_GROUP_ROWS, **PARQUET)

    with ThreadPoolExecutor(min(2, num_threads())) as pool:
        list(pool.map(finish, range(len(groups))))


def episode_hashes(block: Block, salt: Hashes) -> Hashes:
    """Returns [n] a hash of each row's episode; a row without mdp_id is an episode of its own.

    Raises:
        DataError: an mdp_id that is neither a string nor an integer, with file and line.
    """
    faults = Faults(block)
    codes, names = strings(column_of(block, "mdp_id"), faults)
    faults.require_none()
    alone = row_hashes(np.array([block.file_number], np.uint64), block.lines, 0)
    named = np.append(name_hashes(names.to_pylist()), np.uint64(0))[codes]
    return mix(np.where(codes < 0, alone, named) ^ salt)


def _cuts(starts: NDArray[np.int64], wanted: NDArray[np.float64]) -> NDArray[np.int64]:
    """Returns the bounds of each folder's rows in a bucket: the episodes' ends nearest to wanted rows."""
    wanted = np.clip(wanted, 0, starts[-1])
    after = np.searchsorted(starts, wanted)
    before = np.maximum(after - 1, 0)
    nearest = np.where(wanted - starts[before] < starts[after] - wanted, starts[before], starts[after])
    return np.concatenate(([0], nearest, starts[-1:]))
