"""Shards of an input: its whole episodes in equal parts, or a copy of all of them in another order for each machine.

    a timeline's files ─► whole, as hard links, to the machine with the fewest rows while they fit its equal share
    all other rows     ─► buckets by a hash of the episode ─► neighbours sorted ─► cut where a share is full ─► Parquet

Files of a timeline never share an episode. Those that fit no share (fewer files than machines, very unequal ones) are
dealt row by row like all other input, which is read once. The hash orders the episodes, so the seed decides where each
goes; the rows of an episode keep the order of the input. Memory is that of a few buckets and of the readers' blocks.
"""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from numpy.typing import NDArray

from reagent_lite.config.shard import ShardConfig
from reagent_lite.data.formats.blocks import Block, Position, Show
from reagent_lite.data.formats.files import InputFile, list_input
from reagent_lite.data.formats.reading import ALL_COLUMNS, num_threads, parses_of, read_blocks, require_hash
from reagent_lite.data.formats.schema import conformed, from_indices, in_one_piece, merge_fields, to_numpy
from reagent_lite.data.rows.columns import column_of, strings
from reagent_lite.data.rows.faults import Faults
from reagent_lite.data.rows.hashes import Hashes, mix, name_hashes, row_hashes
from reagent_lite.data.stage import StageManifest, data_files, left_out, states_of
from reagent_lite.data.writing.part_files import ROW_GROUP_ROWS, columns_worth_a_dictionary, part_name
from reagent_lite.errors import Problem, raise_any

KIND = "shard"
GROUP_BYTES = 1 << 25
"""Size in memory of the buckets that are sorted together; a thread holds twice as much while it sorts."""
_MOST_BUCKETS = 512  # files that are open at a time
_FILES_OF_WHOLE_EPISODES = ("timeline",)
"""Kinds of stages in whose folders no two files share an episode."""
_SLACK = 0.02
"""By how much whole files may exceed an equal share."""
_KEY = pa.field("hash of the episode", pa.uint64())
"""The last column of rows that wait in their bucket."""

Parts = list[dict[str, dict[str, Any]]]
"""{file name: {"rows": rows}} of each shard."""


def settings(config: ShardConfig) -> dict[str, Any]:
    """Returns what the content of the shards of an input depends on, as manifests have it."""
    columns = {"columns": config.columns} if config.columns else {}
    return {"layout": config.layout, "num_nodes": config.num_nodes, "seed": config.seed, **columns}


def _draw(seed: int, copy: int = 0) -> Hashes:
    """Returns [1] a number to combine with hashes; each seed and copy has its own."""
    return mix(np.array([seed << 32 | copy], np.uint64))


def folder_name(shard: int) -> str:
    """Returns the name of a shard's folder."""
    return f"shard-{shard:05d}"


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
    files = data_files(path, config.columns)
    parent = StageManifest.read(path) if len(files) != 1 or files[0].path != path else None
    manifest = StageManifest(kind=KIND, rows=0, columns={}, settings={}, inputs=(), report={}, files={})
    whole: list[list[InputFile]] = [[] for _ in range(config.num_nodes)]
    rest, room = files, np.ones(config.num_nodes)
    if parent is not None:
        manifest = replace(parent, kind=KIND, parent=parent.digest)
        if parent.rows and parent.kind in _FILES_OF_WHOLE_EPISODES and config.layout == "shards":
            whole, rest, room = whole_files(files, parent, config)
    folders = [folder / folder_name(shard) for shard in range(config.num_nodes)]
    parts: Parts = [{} for _ in folders]
    for one in folders:
        one.mkdir()
    for one, own, named in zip(folders, whole, parts, strict=True):
        for number, file in enumerate(own):
            _bring(file, one / part_name(number))
            named[part_name(number)] = {"rows": manifest.files[file.name]["rows"]}
    hashes = {file: file.sha256 for file in files}
    if rest:
        found, schema = _deal(rest, config, room, folders, parts, progress)
        hashes |= dict(zip(rest, found, strict=True))
        manifest = replace(manifest, columns=manifest.columns or {one.name: str(one.type) for one in schema})
    _require_same(files, path)
    report = {"whole_files": sum(map(len, whole)), "left_out": list(left_out(path))}
    manifest = replace(manifest, inputs=states_of(files, list(hashes.values())), report=report)
    return tuple(
        _written(replace(manifest, settings={**settings(config), "shard": shard}), *of_shard)
        for shard, of_shard in enumerate(zip(folders, parts, whole, strict=True))
    )


def _written(
    manifest: StageManifest, folder: Path, parts: dict[str, dict[str, Any]], whole: list[InputFile]
) -> StageManifest:
    """Writes the manifest of a shard's folder, and checks its whole files against the input's manifest."""
    rows = sum(one["rows"] for one in parts.values())
    manifest = replace(manifest, rows=rows, files=parts).write(folder)
    for number, file in enumerate(whole):
        require_hash(file, manifest.files[part_name(number)]["sha256"])
    return manifest


def whole_files(
    files: Sequence[InputFile], parent: StageManifest, config: ShardConfig
) -> tuple[list[list[InputFile]], tuple[InputFile, ...], NDArray[np.float64]]:
    """Returns how files that never share an episode go to machines as they are.

    Returns:
        The files of each machine; those that fit no machine's share; and [machines] the rows that each still lacks.
    """
    rows = {file: int(parent.files[file.name]["rows"]) for file in files}
    share = sum(rows.values()) / config.num_nodes
    rank = dict(zip(files, mix(name_hashes(file.sha256 for file in files) ^ _draw(config.seed)).tolist(), strict=True))
    machines = np.argsort(mix(np.arange(config.num_nodes, dtype=np.uint64) ^ _draw(config.seed))).tolist()
    held, owner = [0] * config.num_nodes, {}
    for file in sorted(files, key=lambda file: (-rows[file], rank[file])):
        machine = min(machines, key=held.__getitem__)
        if held[machine] + rows[file] <= share * (1 + _SLACK):
            held[machine] += rows[file]
            owner[file] = machine
    whole = [[file for file in files if owner.get(file) == machine] for machine in range(config.num_nodes)]
    return whole, tuple(file for file in files if file not in owner), np.maximum(share - np.array(held), 0)


def _bring(file: InputFile, target: Path) -> None:
    """Links a file to another name, or copies it where no link is possible, as from a bucket or another disk."""
    try:
        os.link(file.path, target)
    except OSError:
        with file.open() as source, target.open("wb") as stream:
            shutil.copyfileobj(source, stream)


def _deal(
    files: tuple[InputFile, ...],
    config: ShardConfig,
    room: NDArray[np.float64],
    folders: Sequence[Path],
    parts: Parts,
    progress: Show | None,
) -> tuple[tuple[str, ...], pa.Schema]:
    """Writes the rows of files to shards, or to every copy, and adds the files to `parts`.

    Args:
        files: to read, once for all shards and once for each copy.
        config: which of the two.
        room: [shards] rows that each shard gets, or anything in proportion to them, but for whole episodes.
        folders: where data files go, behind those that `parts` names; temporary files lie beside them.
        parts: of each folder.
        progress: called with (bytes read, bytes to read).

    Returns:
        The sha256 of each file, and the columns.
    """
    orders = [(_draw(config.seed), folders, parts, room)]
    if config.layout == "replicas":
        each = enumerate(zip(folders, parts, strict=True))
        orders = [(_draw(config.seed, copy), [folder], [named], np.ones(1)) for copy, (folder, named) in each]
    positions = [Position() for _ in files]
    for number, (draw, targets, own, shares) in enumerate(orders):
        show = progress and partial(_show_part, progress, number, len(orders))
        with tempfile.TemporaryDirectory(prefix=".spool-", dir=folders[0].parent) as scratch:
            buckets = _Buckets.of(files, draw, Path(scratch), positions, show)
            _write(buckets, targets, own, shares)
    return tuple(position.sha256 for position in positions), pa.schema(list(buckets.fields.values()))


def _show_part(progress: Show, number: int, count: int, done: int, total: int) -> None:
    progress(number * total + done, count * total)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Buckets:
    """Rows in Arrow streams on the disk; each bucket has an equal part of all hashes of episodes.

    Attributes:
        fields: columns that hold the values of all rows.
        streams: of each bucket, one for each schema that its rows came with, and the rows' hashes as last column.
        rows: [buckets] in each.
        num_bytes: of all rows in Arrow's form.
    """

    fields: dict[str, pa.Field]
    streams: list[list[Path]]
    rows: NDArray[np.int64]
    num_bytes: int

    @classmethod
    def of(
        cls, files: tuple[InputFile, ...], draw: Hashes, scratch: Path, positions: list[Position], show: Show | None
    ) -> Self:
        """Reads files once; a column whose type grows on the way begins new streams."""
        count = min(_MOST_BUCKETS, 1 + 2 * _arrow_bytes(files) // GROUP_BYTES)
        rows, num_bytes, streams = np.zeros(count, np.int64), 0, [list[Path]() for _ in range(count)]
        known, fields, writers = pa.schema([]), dict[str, pa.Field](), dict[int, pa.ipc.RecordBatchStreamWriter]()

        def by_bucket(block: Block) -> tuple[pa.Table, Hashes, NDArray[np.int64]]:
            keys = episode_hashes(block, draw)
            bucket = ((keys >> np.uint64(32)) * np.uint64(count)) >> np.uint64(32)
            order = np.argsort(bucket, kind="stable")
            bounds = np.searchsorted(bucket[order], np.arange(count + 1))
            return block.table.take(from_indices(order)), keys[order], bounds

        with ExitStack() as stack:
            for read, keys, bounds in read_blocks(files, by_bucket, positions, show, ALL_COLUMNS):
                fields = merge_fields(fields, {one.name: one for one in read.schema})
                schema = pa.schema(list(fields.values()))
                if not schema.equals(known, check_metadata=True):
                    stack.close()
                    writers.clear()
                    known = schema
                table = conformed(read, fields).append_column(_KEY, pa.array(keys))
                for number in np.flatnonzero(np.diff(bounds)).tolist():
                    if number not in writers:
                        path = scratch / f"{number}-{len(streams[number])}.arrow"
                        streams[number].append(path)
                        sink = stack.enter_context(pa.OSFile(str(path), "wb"))
                        writers[number] = stack.enter_context(pa.ipc.new_stream(sink, table.schema))
                    writers[number].write_table(table.slice(bounds[number], bounds[number + 1] - bounds[number]))
                rows += np.diff(bounds)
                num_bytes += table.nbytes
        return cls(fields=fields, streams=streams, rows=rows, num_bytes=num_bytes)

    def groups(self) -> list[NDArray[np.int64]]:
        """Returns the numbers of the buckets that are sorted at a time: neighbours of at most GROUP_BYTES together.

        A group takes a bucket that begins in its first half; a bucket is about half a group at most.
        """
        most_rows = max(1, GROUP_BYTES // 2 * int(self.rows.sum()) // self.num_bytes)
        group = (np.cumsum(self.rows) - self.rows) // most_rows
        return np.split(np.arange(len(group)), np.flatnonzero(np.diff(group)) + 1)

    def sorted(self, numbers: NDArray[np.int64]) -> tuple[pa.Table, NDArray[np.int64]]:
        """Returns the rows of buckets by episode, and the first row of each episode and the end of the last."""
        tables, hashes = [], [np.empty(0, np.uint64)]
        for path in itertools.chain.from_iterable(self.streams[number] for number in numbers):
            with pa.OSFile(str(path), "rb") as stream:
                table = pa.ipc.open_stream(stream).read_all()
            path.unlink()
            hashes.append(to_numpy(in_one_piece(table.column(table.num_columns - 1))))
            tables.append(conformed(table.remove_column(table.num_columns - 1), self.fields))
        keys = np.concatenate(hashes)
        order = np.argsort(keys, kind="stable")
        starts = np.flatnonzero(np.diff(keys[order])) + 1
        table, indices = pa.concat_tables(tables), from_indices(order)
        # column by column: the table is held twice meanwhile, in one piece as a whole it would be three times
        columns = [in_one_piece(column).take(indices) for column in table.columns]
        return pa.table(columns, schema=table.schema), np.concatenate(([0], starts, [len(keys)]))


def _arrow_bytes(files: tuple[InputFile, ...]) -> int:
    """Returns about how many bytes files take in Arrow's form: their size, by what the first rows take of either."""
    position = Position()
    for number, file in enumerate(files):
        with closing(parses_of(file, number, position, ALL_COLUMNS)) as blocks:
            for parse in blocks:
                size = sum(file.size for file in files)
                return int(parse().table.nbytes) * size // max(1, position.bytes_read)
    return 0


def _write(buckets: _Buckets, folders: Sequence[Path], parts: Parts, room: NDArray[np.float64]) -> None:
    """Writes the rows of buckets to folders, episodes in the order of their hash; see `_deal`."""
    groups = [numbers for numbers in buckets.groups() if buckets.rows[numbers].any()]
    sizes = np.array([buckets.rows[numbers].sum() for numbers in groups])
    begins = np.cumsum(sizes) - sizes
    wanted = np.cumsum(room)[:-1] * (sizes.sum() / room.sum())
    first_parts = [len(one) for one in parts]

    def finish(number: int) -> list[tuple[int, str, int]]:
        """Writes a group's rows to the folders they belong to, and returns (folder, file name, rows)."""
        table, starts = buckets.sorted(groups[number])
        written = []
        for folder, (start, stop) in enumerate(itertools.pairwise(_cuts(starts, wanted - begins[number]).tolist())):
            if start < stop:
                name = part_name(first_parts[folder] + number)
                part, target = table.slice(start, stop - start), folders[folder] / name
                dictionary = columns_worth_a_dictionary(part.schema)
                pa.parquet.write_table(part, target, ROW_GROUP_ROWS, compression="zstd", use_dictionary=dictionary)
                written.append((folder, name, stop - start))
        return written

    with ThreadPoolExecutor(min(2, num_threads())) as pool:
        for folder, name, num in itertools.chain.from_iterable(pool.map(finish, range(len(groups)))):
            parts[folder][name] = {"rows": num}


def episode_hashes(block: Block, draw: Hashes) -> Hashes:
    """Returns [n] a hash of each row's episode; a row without mdp_id is an episode of its own.

    Raises:
        DataError: an mdp_id that is neither a string nor an integer, with file and line.
    """
    faults = Faults(block)
    codes, names = strings(column_of(block, "mdp_id"), faults)
    faults.require_none()
    alone = row_hashes(np.array([block.file_number], np.uint64), block.lines, 0)
    named = np.append(name_hashes(names.to_pylist()), np.uint64(0))[codes]
    return mix(np.where(codes < 0, alone, named) ^ draw)


def _cuts(starts: NDArray[np.int64], wanted: NDArray[np.float64]) -> NDArray[np.int64]:
    """Returns the bounds of each folder's rows in a bucket: the episodes' ends nearest to wanted rows."""
    wanted = np.clip(wanted, 0, starts[-1])
    after = np.searchsorted(starts, wanted)
    before = np.maximum(after - 1, 0)
    nearest = np.where(wanted - starts[before] < starts[after] - wanted, starts[before], starts[after])
    return np.concatenate(([0], nearest, starts[-1:]))


def _require_same(files: Sequence[InputFile], path: str) -> None:
    """Checks that the input is what it was at the beginning."""
    now = {one.name: (one.size, one.modified_ns) for one in list_input(path, tuple({one.extension for one in files}))}
    expected, todo = "a file that stays the same while shards are made of it", "Run again when its writer has ended"
    changed = [file for file in files if now.get(file.name) != (file.size, file.modified_ns)]
    raise_any([Problem(file.path, expected, "one that was changed", todo) for file in changed])
