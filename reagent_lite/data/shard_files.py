"""One machine's rows of a log as a stage's folder of Parquet files.

    its episodes (partition.py), or all rows ─► chunks, in memory one after the other ─► part-00000.parquet, ...

Columns and their values stay as they are; values without a common type in a chunk become JSON texts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from reagent_lite.config.shard_config import ShardConfig
from reagent_lite.console import machine_logger
from reagent_lite.data.formats.blocks import Block, InputFile, Show
from reagent_lite.data.formats.format_table import ALL_COLUMNS, first_block, read_blocks
from reagent_lite.data.formats.schema import TEXT_METADATA, conform, merge_fields
from reagent_lite.data.log_shares import shares_in_words, shares_of
from reagent_lite.data.logs import separate_logs
from reagent_lite.data.partition import Partition, episode_hashes
from reagent_lite.data.rows.hashes import Hashes, mix
from reagent_lite.data.stage_folder import StageManifest, data_files, notes_of_input, require_unchanged, states_of
from reagent_lite.data.writing.part_files import PARQUET, ROW_GROUP_ROWS, part_name
from reagent_lite.errors import NoRowsError

KIND = "shard"
CHUNK_BYTES = 1 << 25
"""Size in memory of the rows of one file."""


def shard_settings(config: ShardConfig) -> dict[str, Any]:
    """Returns the settings that the content of an input's shard depends on, as its manifest has them."""
    columns = {"columns": config.columns} if config.columns else {}
    numbers = {"num_nodes": config.num_nodes, "node": config.node_index or 0, "seed": config.seed}
    return {"layout": config.layout, **numbers, **columns}


def write_shard(config: ShardConfig, folder: Path, progress: Show | None = None) -> StageManifest:
    """Writes the rows of one machine as a stage's folder of Parquet files.

    Args:
        config: the input, the number of machines and of this one, the layout, and the seed.
        folder: an empty folder, which is synced.
        progress: called with (bytes done, total bytes).

    Returns:
        The manifest of the folder.

    Raises:
        DataError: the input cannot be read, differs from its manifest, or changes while it is read.
        NoRowsError: the input has no rows.
    """
    path = config.training_data_path
    files = data_files(path, config.columns)
    logs = separate_logs(files, path, folder)
    for note in logs.notes:
        machine_logger.warning(note)
    read = logs.files
    node = config.node_index or 0
    if config.layout == "shards":
        read = Partition(num_nodes=config.num_nodes, node=node, seed=config.seed).files_of(read, path)
    hashes: list[str] = []
    rows_of_logs: Counter[int] = Counter()
    rows: dict[str, dict[str, Any]] = {}
    fields: dict[str, pa.Field] = {}
    for part, (table, episodes) in enumerate(_chunks(_read(read, progress, hashes, rows_of_logs))):
        fields = merge_fields(fields, {field.name: field for field in table.schema})
        if config.layout == "replicas":
            salt = mix(np.array([config.seed << 32 | node], np.uint64))
            table = table.take(pa.array(np.argsort(mix(episodes ^ salt), kind="stable")))
        rows[part_name(part)] = {"rows": table.num_rows}
        pa.parquet.write_table(table, folder / part_name(part), ROW_GROUP_ROWS, **PARQUET)
    require_unchanged(files, path, config.columns)
    report: dict[str, Any] = {"left_out": list(notes_of_input(path))}
    if shares := shares_of(path, rows_of_logs):
        machine_logger.info(f"rows by log: {shares_in_words(shares)}")
        report |= {"logs": {log: number for log, number, _ in shares}, "notes": list(logs.notes)}
    sha256 = {file.path: digest for file, digest in zip(read, hashes, strict=True)}
    manifest = StageManifest(
        kind=KIND,
        rows=sum(entry["rows"] for entry in rows.values()),
        columns={field.name: str(field.type) for field in fields.values()},
        settings=shard_settings(config),
        inputs=states_of(files, [sha256.get(file.path, file.sha256) for file in files]),
        report=report,
        files=rows,
    )
    parent = StageManifest.of_input(path)
    if parent is not None:
        names = {name: getattr(parent, name) for name in ("state_ids", "action_ids", "metric_names")}
        manifest = replace(manifest, **names, parent=parent.digest)
    else:  # some of several logs may be folders of stages
        manifest = replace(manifest, state_ids=tuple(sorted({feature for file in files for feature in file.features})))
    return manifest.write(folder)


def _read(
    files: tuple[InputFile, ...], progress: Show | None, hashes: list[str], rows_of_logs: Counter[int]
) -> Iterator[tuple[pa.Table, Hashes]]:
    """Yields the rows of blocks and the hashes of their episodes; none for a machine without episodes."""

    def transform(block: Block) -> tuple[int, pa.Table, Hashes]:
        return block.file.log, block.table, episode_hashes(block)

    try:
        for log, table, episodes in read_blocks(files, transform, progress, ALL_COLUMNS, hashes):
            rows_of_logs[log] += table.num_rows
            yield table, episodes
    except NoRowsError:
        if first_block([replace(file, selection=None) for file in files]) is None:
            raise


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
