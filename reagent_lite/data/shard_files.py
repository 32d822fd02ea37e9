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
from reagent_lite.data.logs import Log
from reagent_lite.data.partition import Partition, episode_hashes
from reagent_lite.data.rows.hashes import Hashes, mix
from reagent_lite.data.stage_folder import StageManifest, states_of
from reagent_lite.data.writing.part_files import PARQUET, ROW_GROUP_ROWS, part_name
from reagent_lite.errors import NoRowsError

KIND = "shard"
CHUNK_BYTES = 1 << 25
"""Size in memory of the rows of one file."""


def shard_settings(config: ShardConfig, log: Log) -> dict[str, Any]:
    """Returns the settings that the content of a log's shard depends on, as its manifest has them."""
    numbers = {"num_nodes": config.num_nodes, "node": config.node_index or 0, "seed": config.seed}
    return {"layout": config.layout, **numbers, **log.settings}


def log_of_shard(config: ShardConfig) -> Log:
    """Returns the log, of which this machine keeps its own episodes, or all."""
    part = None
    if config.layout == "shards":
        part = Partition(num_nodes=config.num_nodes, node=config.node_index or 0, seed=config.seed)
    return Log(config.data_path, columns=config.columns, partition=part)


def write_shard(config: ShardConfig, log: Log, folder: Path, progress: Show | None = None) -> StageManifest:
    """Writes the rows of one machine as a stage's folder of Parquet files.

    Args:
        config: the number of machines and of this one, the layout, and the seed.
        log: the log, of `log_of_shard`.
        folder: an empty folder, which is synced.
        progress: called with (bytes done, total bytes).

    Returns:
        The manifest of the folder.

    Raises:
        DataError: the input cannot be read, differs from its manifest, or changes while it is read.
        NoRowsError: the input has no rows.
    """
    log.require_one_kind()
    node = config.node_index or 0
    hashes: list[str] = []
    rows_of_logs: Counter[int] = Counter()
    rows: dict[str, dict[str, Any]] = {}
    fields: dict[str, pa.Field] = {}
    for part, (table, episodes) in enumerate(_chunks(_read(log.read_files, progress, hashes, rows_of_logs))):
        fields = merge_fields(fields, {field.name: field for field in table.schema})
        if config.layout == "replicas":
            salt = mix(np.array([config.seed << 32 | node], np.uint64))
            table = table.take(pa.array(np.argsort(mix(episodes ^ salt), kind="stable")))
        rows[part_name(part)] = {"rows": table.num_rows}
        pa.parquet.write_table(table, folder / part_name(part), ROW_GROUP_ROWS, **PARQUET)
    log.require_unchanged()
    report: dict[str, Any] = {"left_out": list(log.notes())}
    if shares := shares_of(log.path, rows_of_logs):
        machine_logger.info(f"rows by log: {shares_in_words(shares)}")
        report |= {"logs": {path: number for path, number, _ in shares}}
    sha256 = {file.path: digest for file, digest in zip(log.read_files, hashes, strict=True)}
    manifest = StageManifest(
        kind=KIND,
        rows=sum(entry["rows"] for entry in rows.values()),
        columns={field.name: str(field.type) for field in fields.values()},
        settings=shard_settings(config, log),
        inputs=states_of(log.files, [sha256.get(file.path, file.sha256) for file in log.files]),
        report=report,
        files=rows,
    )
    parent = log.manifest
    if parent is not None:
        names = {name: getattr(parent, name) for name in ("state_ids", "action_ids", "metric_names")}
        manifest = replace(manifest, **names, parent=parent.digest)
    else:  # some of several logs may be folders of stages
        manifest = replace(
            manifest, state_ids=tuple(sorted({feature for file in log.files for feature in file.features}))
        )
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
