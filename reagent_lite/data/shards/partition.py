"""Shards of an input: each machine gets a part of the episodes, or all episodes in an order of its own.

    a timeline's files ─► whole, as hard links, to the machine with the fewest rows
    all other rows     ─► to the machine chosen by a hash of the mdp_id ─► Parquet, a file for each chunk of rows

Files of a timeline never share an episode. If there are too few of them, or they are very unequal, their rows are
divided like those of all other input, which is read once. In memory are one chunk and the blocks of the readers.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from numpy.typing import NDArray

from reagent_lite.config.shard_config import ShardConfig
from reagent_lite.console import machine_logger
from reagent_lite.data.formats.blocks import Block, Show, num_threads
from reagent_lite.data.formats.format_table import ALL_COLUMNS, read_blocks, require_hash
from reagent_lite.data.formats.input_files import InputFile
from reagent_lite.data.formats.schema import TEXT_METADATA, conform, merge_fields
from reagent_lite.data.log_shares import shares_in_words, shares_of
from reagent_lite.data.logs import separate_logs
from reagent_lite.data.rows.block_columns import column_of, strings
from reagent_lite.data.rows.faults import Faults
from reagent_lite.data.rows.hashes import Hashes, hashes_of_codes, mix, name_hashes, row_hashes
from reagent_lite.data.stage_folder import StageManifest, data_files, notes_of_input, require_unchanged, states_of
from reagent_lite.data.writing.part_files import PARQUET, ROW_GROUP_ROWS, part_name

KIND = "shard"
CHUNK_BYTES = 1 << 25
"""Size in memory of a chunk, rows that are written at once; each machine gets a file with its part of them."""
_FILES_OF_WHOLE_EPISODES = ("timeline",)
"""Kinds of stages in whose folders no two files share an episode."""
_SLACK = 0.1
"""Largest excess of whole files over an equal share: a machine with more rows makes the others wait at every step."""


def settings(config: ShardConfig) -> dict[str, Any]:
    """Returns the settings that the content of an input's shards depends on, as manifests have them."""
    columns = {"columns": config.columns} if config.columns else {}
    return {"layout": config.layout, "num_nodes": config.num_nodes, "seed": config.seed, **columns}


def folder_name(shard: int) -> str:
    """Returns the name of a shard's folder."""
    return f"shard-{shard:05d}"


def make_shards(config: ShardConfig, folder: Path, progress: Show | None = None) -> tuple[StageManifest, ...]:
    """Writes every shard of an input as a stage's folder of Parquet files.

    Args:
        config: the input, the number and layout of shards, and the seed.
        folder: an empty folder; gets a synced folder for each shard.
        progress: called with (bytes done, total bytes).

    Returns:
        The shards' manifests.

    Raises:
        DataError: the input cannot be read, differs from its manifest, or changes while it is read.
    """
    path = config.training_data_path
    separated = separate_logs(data_files(path, config.columns), path, folder)
    for note in separated.notes:
        machine_logger.warning(note)
    files = separated.files
    parent = StageManifest.of_input(path)
    folders = [folder / folder_name(number) for number in range(config.num_nodes)]
    for shard in folders:
        shard.mkdir()
    manifest = StageManifest(kind=KIND, rows=0, columns={}, settings={}, inputs=(), report={}, files={})
    if parent is not None:
        manifest = replace(parent, kind=KIND, parent=parent.digest)
    elif named := {
        feature for file in files for feature in file.features
    }:  # some of several logs are folders of stages
        manifest = replace(manifest, state_ids=tuple(sorted(named)))
    whole = None if parent is None else whole_files(files, parent, config)
    hashes = [file.sha256 for file in files]
    logs: dict[int, int] = {}
    if whole is None:
        rows, hashes, schema, logs = _write_rows(files, config, folders, progress)
        manifest = replace(manifest, columns={field.name: str(field.type) for field in schema})
    else:
        rows = [_link_files(some, shard, manifest) for some, shard in zip(whole, folders, strict=True)]
    require_unchanged(files, path, config.columns)
    report: dict[str, Any] = {"whole_files": 0 if whole is None else len(files), "left_out": list(notes_of_input(path))}
    if shares := shares_of(path, logs):
        machine_logger.info(f"rows by log: {shares_in_words(shares)}")
        report |= {"logs": {log: number for log, number, _ in shares}, "notes": list(separated.notes)}
    manifest = replace(manifest, inputs=states_of(files, hashes), report=report)
    manifests = []
    for number, shard in enumerate(folders):
        entries: dict[str, dict[str, Any]] = {name: {"rows": count} for name, count in rows[number].items()}
        manifests.append(
            replace(
                manifest, settings={**settings(config), "shard": number}, rows=sum(rows[number].values()), files=entries
            ).write(shard)
        )
        for part, file in enumerate([] if whole is None else whole[number]):
            require_hash(file, manifests[number].files[part_name(part)]["sha256"])
    return tuple(manifests)


def whole_files(
    files: tuple[InputFile, ...], parent: StageManifest, config: ShardConfig
) -> list[list[InputFile]] | None:
    """Returns the files of each machine, or None if rows have to be divided.

    Files stay whole if no two share an episode, and no machine gets clearly more than an equal share of the rows.
    """
    if parent.kind not in _FILES_OF_WHOLE_EPISODES or config.layout != "shards":
        return None
    rows = {file: int(parent.files[file.name]["rows"]) for file in files}
    tie_breaker = dict(
        zip(files, mix(name_hashes(file.sha256 for file in files) ^ _salt(config)).tolist(), strict=True)
    )
    machines: list[list[InputFile]] = [[] for _ in range(config.num_nodes)]
    held = [0] * config.num_nodes
    for file in sorted(files, key=lambda file: (-rows[file], tie_breaker[file])):
        number = held.index(min(held))
        held[number] += rows[file]
        machines[number].append(file)
    if max(held) > (1 + _SLACK) * parent.rows / config.num_nodes:
        return None
    return [sorted(some, key=files.index) for some in machines]


def _link_files(files: list[InputFile], folder: Path, parent: StageManifest) -> dict[str, int]:
    """Puts whole files into a shard's folder, as hard links or, from a bucket or another disk, as copies.

    Returns:
        {name in the folder: rows}.
    """
    for number, file in enumerate(files):
        try:
            os.link(file.path, folder / part_name(number))
        except OSError:
            with file.open() as source, (folder / part_name(number)).open("wb") as target:
                shutil.copyfileobj(source, target)
    return {part_name(number): parent.files[file.name]["rows"] for number, file in enumerate(files)}


def _write_rows(
    files: tuple[InputFile, ...], config: ShardConfig, folders: list[Path], progress: Show | None
) -> tuple[list[dict[str, int]], list[str], list[pa.Field], dict[int, int]]:
    """Writes the rows of files to the folders of their machines.

    Returns:
        {file name: rows} of each folder, the sha256 of each input file, the columns, and {number of a log: rows}.
    """
    hashes: list[str] = []
    logs: Counter[int] = Counter()

    def transform(block: Block) -> tuple[int, pa.Table, Hashes]:
        return block.file.log, block.table, episode_hashes(block)

    def by_log() -> Iterator[tuple[pa.Table, Hashes]]:
        for log, table, episodes in read_blocks(files, transform, progress, ALL_COLUMNS, hashes):
            logs[log] += table.num_rows
            yield table, episodes

    rows: list[dict[str, int]] = [{} for _ in folders]
    fields: dict[str, pa.Field] = {}
    with ThreadPoolExecutor(min(2, num_threads())) as pool:
        for part, (table, episodes) in enumerate(_chunks(by_log())):
            fields = merge_fields(fields, {field.name: field for field in table.schema})

            def write(machine: int, part: int = part, table: pa.Table = table, episodes: Hashes = episodes) -> None:
                numbers = _rows_of(machine, episodes, config)
                if len(numbers):
                    rows[machine][part_name(part)] = len(numbers)
                    file = folders[machine] / part_name(part)
                    pa.parquet.write_table(table.take(pa.array(numbers)), file, ROW_GROUP_ROWS, **PARQUET)

            list(pool.map(write, range(len(folders))))
    return rows, hashes, list(fields.values()), dict(logs)


def _chunks(blocks: Iterable[tuple[pa.Table, Hashes]]) -> Iterator[tuple[pa.Table, Hashes]]:
    """Yields the rows and hashes of blocks as larger tables, with types that hold the values of all their blocks."""
    held: list[tuple[pa.Table, Hashes]] = []
    for block in blocks:
        held.append(block)
        if sum(table.nbytes for table, _ in held) >= CHUNK_BYTES:
            yield _join_blocks(held)
    if held:
        yield _join_blocks(held)


def _join_blocks(blocks: list[tuple[pa.Table, Hashes]]) -> tuple[pa.Table, Hashes]:
    """Returns the rows and hashes of blocks, which are removed from the list."""
    fields: dict[str, pa.Field] = {}
    for table, _ in blocks:
        fields = merge_fields(fields, {field.name: field for field in table.schema})
    for name, field in fields.items():
        if _has_empty_struct(field.type):
            fields[name] = pa.field(name, pa.string(), metadata=TEXT_METADATA)
    rows = pa.concat_tables([conform(table, fields) for table, _ in blocks])
    hashes = np.concatenate([hashes for _, hashes in blocks])
    blocks.clear()
    return rows.combine_chunks(), hashes


def _has_empty_struct(kind: pa.DataType) -> bool:
    """Whether a type has a struct without members, of objects that are all {} in JSON: Parquet has no such type."""
    if pa.types.is_struct(kind) and not kind.num_fields:
        return True
    return any(_has_empty_struct(kind.field(number).type) for number in range(kind.num_fields))


def _rows_of(machine: int, episodes: Hashes, config: ShardConfig) -> NDArray[np.int64]:
    """Returns the rows that a machine gets, in order, given the hashes of their episodes [n]."""
    if config.layout == "replicas":
        return np.argsort(mix(episodes ^ _salt(config, machine)), kind="stable")
    return np.flatnonzero(mix(episodes ^ _salt(config)) % np.uint64(config.num_nodes) == machine)


def _salt(config: ShardConfig, copy: int = 0) -> Hashes:
    """Returns [1] a number to combine with hashes, which depends on the seed and the copy."""
    return mix(np.array([config.seed << 32 | copy], np.uint64))


def episode_hashes(block: Block) -> Hashes:
    """Returns [n] a hash of each row's episode; a row without mdp_id is an episode of its own.

    Raises:
        DataError: an mdp_id that is neither a string nor an integer, with file and line.
    """
    faults = Faults(block)
    codes, names = strings(column_of(block, "mdp_id"), faults)
    faults.require_none()
    alone = row_hashes(np.array([block.file_number], np.uint64), block.lines, 0)
    return np.where(codes < 0, alone, hashes_of_codes(codes, names.to_pylist()))
