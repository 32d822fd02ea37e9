"""Shards of an input: its whole episodes in equal parts, or a copy of all of them in another order for each machine.

    a timeline's files ─► whole, as hard links, to the machine with the fewest rows while they fit its equal share
    all other rows     ─► buckets by a hash of the episode ─► each bucket sorted ─► cut where a share is full ─► Parquet

Files of a timeline never share an episode. Those that fit no share (fewer files than machines, very unequal ones) are
dealt row by row like all other input. The hash orders the episodes, so the seed decides where each goes; in its bucket
the rows of an episode keep the order of the input. Memory is that of a few buckets and of the readers' blocks.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet
from numpy.typing import NDArray

from reagent_lite.data.formats.blocks import Block, Position
from reagent_lite.data.formats.files import InputFile, list_input
from reagent_lite.data.formats.reading import ALL_COLUMNS, num_threads, read_blocks
from reagent_lite.data.formats.schema import from_indices, is_text, merge_fields, to_numpy
from reagent_lite.data.rows.columns import column_of, strings
from reagent_lite.data.rows.faults import Faults
from reagent_lite.data.rows.hashes import Hashes, mix, name_hashes, row_hashes
from reagent_lite.data.stage import StageManifest, data_files, left_out, read_manifest, states_of, write_manifest
from reagent_lite.errors import DataError, Problem

KIND = "shard"
BUCKET_BYTES = 1 << 25
"""Of Arrow's form of a bucket: a thread holds three times as much while it sorts one."""
_MOST_BUCKETS = 512  # files that are open at a time
_FILES_OF_WHOLE_EPISODES = ("timeline",)
"""Kinds of stages in whose folders no two files share an episode."""
_SLACK = 0.02
"""By how much whole files may exceed an equal share."""
_ROW_GROUP_ROWS = 1 << 17

Progress = Callable[[int, int], None]
Parts = list[dict[str, dict[str, Any]]]
"""Of each shard {file name: {"rows": rows}}."""


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

    def settings(self) -> dict[str, Any]:
        """Returns what the content of the shards depends on, as manifests have it."""
        return {"layout": self.layout, "num_nodes": self.num_nodes, "seed": self.seed}

    def draw(self, copy: int = 0) -> Hashes:
        """Returns [1] a number to combine with hashes; each seed and copy has its own."""
        return mix(np.array([self.seed << 32 | copy], np.uint64))


def folder_name(shard: int) -> str:
    """Returns the name of a shard's folder."""
    return f"shard-{shard:05d}"


def part_name(number: int) -> str:
    """Returns the name of a shard's data file."""
    return f"part-{number:05d}.parquet"


def make_shards(path: str, layout: Layout, folder: Path, progress: Progress | None = None) -> tuple[StageManifest, ...]:
    """Writes every shard of an input as a stage's folder of Parquet files.

    Args:
        path: a stage's folder, or any file or folder of rows.
        layout: how many, of what.
        folder: empty; gets a folder for each shard, whole on the disk afterwards, and temporary files meanwhile.
        progress: called with (bytes done, bytes to do).

    Returns:
        The shards' manifests.

    Raises:
        DataError: an input that cannot be read, is not as its manifest says, or changes meanwhile.
    """
    files = data_files(path)
    parent = read_manifest(path) if len(files) != 1 or files[0].path != path else None
    whole: list[list[InputFile]] = [[] for _ in range(layout.num_nodes)]
    rest, room = files, np.ones(layout.num_nodes)
    if parent is not None and parent.rows and parent.kind in _FILES_OF_WHOLE_EPISODES and layout.layout == "shards":
        whole, rest, room = whole_files(files, parent, layout)
    folders = [folder / folder_name(shard) for shard in range(layout.num_nodes)]
    parts: Parts = [{} for _ in folders]
    for shard, one in enumerate(folders):
        one.mkdir()
        for number, file in enumerate(whole[shard]):
            _bring(file, one / part_name(number))
            parts[shard][part_name(number)] = {"rows": parent.files[file.name]["rows"] if parent else 0}
    states, columns = states_of(files, [file.sha256 for file in files]), parent.columns if parent else {}
    if rest:
        passes = 2 if layout.layout == "shards" else 1 + layout.num_nodes

        def shown(number: int) -> Progress | None:
            return progress and (lambda done, total: progress(number * total + done, passes * total))

        log = _survey(rest, shown(0))
        read = dict(zip(rest, log.hashes, strict=True))
        states = states_of(files, [file.sha256 or read[file] for file in files])
        columns = columns or {one.name: str(one.type) for one in log.schema}
        with tempfile.TemporaryDirectory(prefix=".spool-", dir=folder) as scratch:
            if layout.layout == "shards":
                _deal(log, layout.draw(), room, Path(scratch), folders, parts, shown(1))
            else:
                for copy, one in enumerate(folders):
                    own = parts[copy : copy + 1]
                    _deal(log, layout.draw(copy), room[:1], Path(scratch), [one], own, shown(1 + copy))
    _require_same(files, path)
    manifests = []
    for shard, one in enumerate(folders):
        manifest = StageManifest(
            kind=KIND,
            rows=sum(part["rows"] for part in parts[shard].values()),
            columns=columns,
            state_ids=parent.state_ids if parent else (),
            action_ids=parent.action_ids if parent else (),
            metric_names=parent.metric_names if parent else (),
            settings={**layout.settings(), "shard": shard},
            inputs=states,
            parent=parent.digest if parent else "",
            report={"whole_files": sum(map(len, whole)), "left_out": list(left_out(path))},
            files=parts[shard],
        )
        manifests.append(write_manifest(one, manifest))
        _require_hashes(whole[shard], manifests[-1])
    return tuple(manifests)


def whole_files(
    files: Sequence[InputFile], parent: StageManifest, layout: Layout
) -> tuple[list[list[InputFile]], tuple[InputFile, ...], NDArray[np.float64]]:
    """Returns how files that never share an episode go to machines as they are.

    Returns:
        The files of each machine; those that fit no machine's share; and [machines] the rows that each still lacks.
    """
    rows = {file: int(parent.files[file.name]["rows"]) for file in files}
    share = sum(rows.values()) / layout.num_nodes
    rank = dict(zip(files, mix(name_hashes(file.sha256 for file in files) ^ layout.draw()).tolist(), strict=True))
    machines = np.argsort(mix(np.arange(layout.num_nodes, dtype=np.uint64) ^ layout.draw())).tolist()
    held, owner = [0] * layout.num_nodes, {}
    for file in sorted(files, key=lambda file: (-rows[file], rank[file])):
        machine = min(machines, key=held.__getitem__)
        if held[machine] + rows[file] <= share * (1 + _SLACK):
            held[machine] += rows[file]
            owner[file] = machine
    whole = [[file for file in files if owner.get(file) == machine] for machine in range(layout.num_nodes)]
    return whole, tuple(file for file in files if file not in owner), np.maximum(share - np.array(held), 0)


def _bring(file: InputFile, target: Path) -> None:
    """Gives a file another name, or copies it from a bucket, another disk, or where there are no links."""
    try:
        os.link(file.path, target)
    except OSError:
        with file.open() as source, target.open("wb") as stream:
            shutil.copyfileobj(source, stream)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Log:
    """What a first pass over files finds out: a schema that holds all values, and bytes in Arrow's form."""

    files: tuple[InputFile, ...]
    hashes: tuple[str, ...]
    schema: pa.Schema
    num_bytes: int


def _survey(files: tuple[InputFile, ...], progress: Progress | None) -> _Log:
    fields: dict[str, pa.Field] = {}
    num_bytes, positions = 0, [Position() for _ in files]
    for table in read_blocks(files, lambda block: block.table, positions, progress, ALL_COLUMNS):
        fields = merge_fields(fields, {one.name: _plain(one) for one in table.schema})
        num_bytes += table.nbytes
    hashes = tuple(position.sha256 for position in positions)
    return _Log(files=files, hashes=hashes, schema=pa.schema(list(fields.values())), num_bytes=num_bytes)


def _plain(field: pa.Field) -> pa.Field:
    if is_text(field):
        return field
    return pa.field(field.name, field.type.value_type if pa.types.is_dictionary(field.type) else field.type)


def _deal(
    log: _Log,
    draw: Hashes,
    room: NDArray[np.float64],
    scratch: Path,
    folders: Sequence[Path],
    parts: Parts,
    progress: Progress | None,
) -> None:
    """Writes the rows of a log to folders, episodes in the order of their hash, and adds the files to `parts`.

    Args:
        log: the rows.
        draw: [1], decides the order.
        room: [folders] rows that each folder gets, or anything in proportion to them, but for whole episodes.
        scratch: a folder for temporary files.
        folders: where data files go, behind those that `parts` names.
        parts: of each folder.
        progress: called with (bytes read, bytes to read).
    """
    count = min(_MOST_BUCKETS, 1 + log.num_bytes // BUCKET_BYTES)
    spools = [scratch / f"{number}.arrow" for number in range(count)]
    rows = np.zeros(count, np.int64)

    def spread(block: Block) -> tuple[pa.Table, NDArray[np.int64]]:
        keys = episode_hashes(block, draw)
        bucket = ((keys >> np.uint64(32)) * np.uint64(count)) >> np.uint64(32)
        order = np.argsort(bucket, kind="stable")
        table = conformed(block.table, log.schema).append_column(_KEY, pa.array(keys))
        return table.take(from_indices(order)), np.searchsorted(bucket[order], np.arange(count + 1))

    with ExitStack() as stack:
        options = pa.ipc.IpcWriteOptions(compression="lz4")
        sinks = [stack.enter_context(pa.OSFile(str(spool), "wb")) for spool in spools]
        schema = log.schema.append(_KEY)
        writers = [stack.enter_context(pa.ipc.new_stream(sink, schema, options=options)) for sink in sinks]
        positions = [Position() for _ in log.files]
        for table, bounds in read_blocks(log.files, spread, positions, progress, ALL_COLUMNS):
            for number in np.flatnonzero(np.diff(bounds)).tolist():
                writers[number].write_table(table.slice(bounds[number], bounds[number + 1] - bounds[number]))
            rows += np.diff(bounds)
    ends = np.cumsum(rows)
    wanted = np.cumsum(room)[:-1] * (ends[-1] / room.sum())
    first_parts = [len(one) for one in parts]

    def finish(number: int) -> list[tuple[int, str, int]]:
        """Writes a bucket's rows to the folders they belong to, and returns (folder, file name, rows)."""
        table, starts = _ordered(spools[number])
        edges = _cuts(starts, wanted - (ends[number] - rows[number]))
        written = []
        for folder, (start, stop) in enumerate(itertools.pairwise(edges.tolist())):
            if start < stop:
                name = part_name(first_parts[folder] + number)
                pa.parquet.write_table(table.slice(start, stop - start), folders[folder] / name, compression="zstd",
                                       row_group_size=_ROW_GROUP_ROWS)  # fmt: skip
                written.append((folder, name, stop - start))
        return written

    with ThreadPoolExecutor(min(2, num_threads())) as pool:
        for folder, name, num in itertools.chain.from_iterable(pool.map(finish, np.flatnonzero(rows).tolist())):
            parts[folder][name] = {"rows": num}


_KEY = pa.field("hash of the episode", pa.uint64())


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


def _ordered(spool: Path) -> tuple[pa.Table, NDArray[np.int64]]:
    """Returns the rows of a bucket by episode, and the first row of each episode and the end of the last."""
    with pa.OSFile(str(spool), "rb") as stream:
        table = pa.ipc.open_stream(stream).read_all().combine_chunks()
    keys = to_numpy(table.column(table.num_columns - 1).chunk(0))
    order = np.argsort(keys, kind="stable")
    starts = np.flatnonzero(np.diff(keys[order])) + 1
    table = table.remove_column(table.num_columns - 1).take(from_indices(order))
    return table, np.concatenate(([0], starts, [len(keys)]))


def _cuts(starts: NDArray[np.int64], wanted: NDArray[np.float64]) -> NDArray[np.int64]:
    """Returns the bounds of each folder's rows in a bucket: the episodes' ends nearest to wanted rows."""
    wanted = np.clip(wanted, 0, starts[-1])
    after = np.searchsorted(starts, wanted)
    before = np.maximum(after - 1, 0)
    nearest = np.where(wanted - starts[before] < starts[after] - wanted, starts[before], starts[after])
    return np.concatenate(([0], nearest, starts[-1:]))


def conformed(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Returns rows with the columns and types of all: nulls for what they lack, JSON texts where types are mixed."""
    arrays = []
    for field in schema:
        index = table.schema.get_field_index(field.name)
        if index < 0:
            arrays.append(pa.nulls(table.num_rows, field.type))
        elif is_text(field) and not is_text(table.schema.field(index)):
            arrays.append(_texts(table.column(index)))
        else:
            arrays.append(pc.cast(table.column(index), field.type))
    return pa.table(arrays, schema=schema)


def _texts(column: pa.ChunkedArray) -> pa.Array:
    values = (_json_value(value, column.type) for value in column.to_pylist())
    return pa.array([None if value is None else json.dumps(value) for value in values], pa.string())


def _json_value(value: Any, kind: pa.DataType) -> Any:
    """Returns an Arrow value as JSON has it; of objects, what is absent is left out: Arrow gives each all keys."""
    if value is None:
        return None
    if pa.types.is_struct(kind):
        return {
            child.name: _json_value(value[child.name], child.type) for child in kind if value[child.name] is not None
        }
    if pa.types.is_map(kind):
        return {str(key): _json_value(inner, kind.item_type) for key, inner in value}
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return [_json_value(inner, kind.value_type) for inner in value]
    return value


def _require_hashes(files: Sequence[InputFile], shard: StageManifest) -> None:
    """Holds files that went to a shard as they are to what their folder's manifest says of them."""
    found = [shard.files[part_name(number)]["sha256"] for number in range(len(files))]
    problems = [
        Problem(file.path, f"bytes with sha256 {file.sha256}, as its manifest says", f"sha256 {sha256}",
                "Copy the folder again, or let the stage that made it make it again")
        for file, sha256 in zip(files, found, strict=True)
        if sha256 != file.sha256
    ]  # fmt: skip
    if problems:
        raise DataError(problems[:20])


def _require_same(files: Sequence[InputFile], path: str) -> None:
    """Checks that the input is what it was at the beginning."""
    now = {one.name: (one.size, one.modified_ns) for one in list_input(path, tuple({one.extension for one in files}))}
    problems = [
        Problem(file.path, "a file that stays the same while shards are made of it", "one that was changed",
                "Run again when whatever writes it has ended")
        for file in files
        if now.get(file.name) != (file.size, file.modified_ns)
    ]  # fmt: skip
    if problems:
        raise DataError(problems[:20])
