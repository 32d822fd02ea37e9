"""Reads, checks and selects events for an engine to sort, and collects facts about them.

    files ─► readers ─► rows/typed_columns.py: checked columns ─► dates, sample of episodes ─► an engine

Every row gets additional columns: `_folder` and `_place` come from a hash of mdp_id, so that an episode is in one file,
in whatever order its rows come; `_rule` is the rule that the row breaks, or null; `_file` and `_line` are its origin.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Annotated

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pydantic import PlainSerializer, PlainValidator

from reagent_lite.config.column_names import EPISODE_COLUMNS, SERVED_COLUMNS
from reagent_lite.config.timeline_config import TimelineConfig
from reagent_lite.data.faults_by_kind import FaultsByKind
from reagent_lite.data.formats.blocks import Block, InputFile, Show
from reagent_lite.data.formats.format_table import ALL_COLUMNS, read_blocks
from reagent_lite.data.formats.schema import find_distinct, in_one_piece, valid_rows
from reagent_lite.data.rows.block_columns import column_of, texts
from reagent_lite.data.rows.faults import Faults
from reagent_lite.data.rows.row_rules import RowRules
from reagent_lite.data.rows.typed_columns import event_schema, event_table, typed_column
from reagent_lite.data.timeline.buckets import HASHES
from reagent_lite.feature_ids import read, write_ids

_SAMPLE = 0
_EVAL = 1
_PLACE = 2
"""Indices of the 32-bit words of md5(mdp_id) that decide if an episode is read, its folder, and its place there."""
_PLACED = {"_place": pa.int64(), "_folder": pa.int32(), "_rule": pa.string(), "_file": pa.int32(), "_line": pa.int64()}
ORDER = ("_place", "mdp_id", "sequence_number", "_file", "_line")
"""Columns that an engine sorts events by."""
Features = Annotated[set[int], PlainValidator(lambda keys: set(read(keys))), PlainSerializer(write_ids)]


def row_rules_of(config: TimelineConfig, *, texts: bool = False) -> RowRules:
    """Returns the rules of the events; `texts`: whether some features are strings."""
    rewards = tuple(name for name in config.timeline.rewardColumns if name not in ("reward", "metrics"))
    return RowRules(
        actions=config.query.actions if config.timeline.actionDiscrete else None,
        events=True,
        extra=(*rewards, *config.timeline.extraFeatureColumns),
        rewards=rewards,
        dated=bool(config.timeline.startDs or config.timeline.endDs),
        choices=config.timeline.includePossibleActions,
        texts=texts,
    )


@dataclass(slots=True)
class EventFacts:
    """Facts about events, collected while they are read.

    Attributes:
        rows: number of rows in the files.
        selected: number of rows with the dates and episodes that the config asks for.
        logs: {number of a log: its rows}, if there are several logs.
        alone: number of rows that are decisions of their own.
        first_alone: location of the first such row.
        served_alone: whether all such rows are of workflows.serve, which had no decision with an mdp_id until then.
        hashes: sha256 of each file.
        days: first and last value of ds; empty if the config does not depend on it.
        seen: columns that have a value in some row.
        kinds: {extra column: kinds of its values}, see rows/typed_columns.py.
        features: feature ids that have a name.
        texts: whether some features have strings as values.
        unlisted: number of rows with an action and an empty list of candidates.
        metrics: names of all metrics.
        orders: as in Faults.
        faults: the rows that break a rule.
    """

    rows: int = 0
    selected: int = 0
    logs: dict[int, int] = field(default_factory=dict)
    alone: int = 0
    first_alone: str = ""
    served_alone: bool = True
    hashes: list[str] = field(default_factory=list)
    days: list[str] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    kinds: dict[str, set[str]] = field(default_factory=dict)
    features: Features = field(default_factory=set)
    texts: bool = False
    unlisted: int = 0
    metrics: set[str] = field(default_factory=set)
    orders: dict[str, str] = field(default_factory=dict)
    faults: FaultsByKind = field(default_factory=FaultsByKind)

    def add(self, other: EventFacts) -> None:
        """Adds the facts of later rows."""
        self.rows += other.rows
        self.selected += other.selected
        for log, rows in other.logs.items():
            self.logs[log] = self.logs.get(log, 0) + rows
        self.alone += other.alone
        self.first_alone = self.first_alone or other.first_alone
        self.served_alone &= other.served_alone
        self.hashes += other.hashes
        days = self.days + other.days
        self.days = [min(days), max(days)] if days else []
        self.seen |= other.seen
        for name, kinds in other.kinds.items():
            self.kinds.setdefault(name, set()).update(kinds)
        self.features |= other.features
        self.texts |= other.texts
        self.unlisted += other.unlisted
        self.metrics |= other.metrics
        self.orders = {**other.orders, **self.orders}
        self.faults.merge(other.faults)


def event_columns(config: TimelineConfig, *, texts: bool) -> pa.Schema:
    """Returns the columns of checked events; `texts`: whether some features are strings."""
    return pa.schema([*event_schema(row_rules_of(config, texts=texts)), *map(pa.field, _PLACED, _PLACED.values())])


def check_events(
    config: TimelineConfig,
    files: Sequence[InputFile],
    first: int,
    add: Callable[[pa.Table], None],
    show: Show | None,
    *,
    texts: bool,
) -> EventFacts:
    """Reads files of any format, checks their rows and passes the selected ones to `add`, in bounded memory.

    Without `texts`, reading ends at the first block that has some, and `EventFacts.texts` is true.

    Args:
        config: the config of the timeline.
        files: files with events, in order.
        first: number of the first file among all files of the input.
        add: called with some rows at a time, in order, with the columns of event_columns.
        show: called with (bytes read, total bytes).
        texts: whether features of the tables may be texts.

    Raises:
        DataError: a file that cannot be read or lacks a column, with file and line; no rows in any file.
    """
    rules = row_rules_of(config, texts=texts)

    def transform(block: Block) -> tuple[pa.Table, EventFacts]:
        block, facts_of_block = select_rows(block, config)
        return _place_rows(config, block, first, facts_of_block, *event_table(block, rules))

    facts = EventFacts()
    hashes: list[str] = []
    with closing(read_blocks(tuple(files), transform, show, ALL_COLUMNS, hashes)) as blocks:
        for table, facts_of_block in blocks:
            facts.add(facts_of_block)
            if facts.texts and not texts:
                return facts
            add(table)
    facts.hashes = hashes
    return facts


def select_rows(block: Block, config: TimelineConfig) -> tuple[Block, EventFacts]:
    """Returns the rows of a block with the dates and episodes that the config asks for, and their numbers.

    Rows without mdp_id or date are selected too, so that they are reported as faults.

    Raises:
        DataError: a column is missing.
    """
    rules = row_rules_of(config)
    rows = block.table.num_rows
    facts = EventFacts(rows=rows)
    selection = np.ones(rows, bool)
    facts.logs = {block.file.log: rows} if block.file.log else {}
    if not set(EPISODE_COLUMNS).intersection(block.table.column_names):
        facts.alone = rows
        facts.first_alone = block.where(0)
        facts.served_alone = SERVED_COLUMNS[0] in block.table.column_names
        block = _as_episodes(block)
    rules.require_columns(block)
    if config.query.tableSample < 100:
        ids = texts(column_of(block, "mdp_id"), Faults(block))
        limit = round(config.query.tableSample / 100 * HASHES)
        selection &= np.asarray(ids.is_null()) | (_hashes(ids)[:, _SAMPLE] < limit)
    if rules.dated:
        days = typed_column(column_of(block, "ds"), Faults(block)).cast(pa.string())
        facts.days = [day for day in pc.min_max(days).as_py().values() if day is not None]
        for bound, compare in ((config.timeline.startDs, pc.greater_equal), (config.timeline.endDs, pc.less_equal)):
            if bound is not None:
                selection &= np.asarray(pc.fill_null(compare(days, bound), True))
    facts.selected = int(selection.sum())
    if facts.selected < rows:
        block = replace(block, table=block.table.filter(pa.array(selection)), lines=block.lines[selection])
    return block, facts


def _as_episodes(block: Block) -> Block:
    """Returns rows that are decisions of their own as episodes of one row, named after their file and line."""
    rows = block.table.num_rows
    names = [f"{block.file.label}:{line}" for line in block.lines.tolist()]
    columns = {"mdp_id": pa.array(names, pa.string()), "sequence_number": pa.array(np.zeros(rows, np.int64))}
    columns["terminal"] = pa.array(np.ones(rows, bool))
    table = block.table
    for name, values in columns.items():
        table = table.append_column(name, values)
    return replace(block, table=table)


def _place_rows(
    config: TimelineConfig,
    block: Block,
    first: int,
    facts: EventFacts,
    table: pa.Table,
    faults: Faults,
    kinds: dict[str, str],
) -> tuple[pa.Table, EventFacts]:
    """Returns the rows that have an mdp_id, with the additional columns, and completes the facts of the block."""
    ids = in_one_piece(table.column("mdp_id"))
    rows = table.num_rows
    hashes = _hashes(ids)
    facts.seen = {name for name in table.column_names if table.column(name).null_count < rows}
    facts.kinds = {name: {kind} for name, kind in kinds.items()}
    facts.features = faults.features
    facts.texts = bool(faults.levels)
    facts.orders = faults.orders
    facts.unlisted = int(faults.unlisted.sum())
    facts.faults = faults.by_kind()
    in_eval = hashes[:, _EVAL] < round(config.timeline.eval_percent / 100 * HASHES)
    folder = in_eval & (config.timeline.evalTableName is not None)
    file = np.full(rows, first + block.file_number, np.int32)
    additional = (hashes[:, _PLACE].astype(np.int64), folder.astype(np.int32), faults.rules(), file, block.lines)
    for (name, kind), values in zip(_PLACED.items(), additional, strict=True):
        table = table.append_column(name, pa.array(values, kind))
    named = valid_rows(ids)
    table = table if named.all() else table.filter(pa.array(named))
    facts.metrics = set(pc.unique(in_one_piece(table.column("metrics")).keys).to_pylist()) if rows else set()
    return table, facts


def _hashes(ids: pa.Array) -> NDArray[np.uint32]:
    """Returns the md5 of each mdp_id as [n, 4] 32-bit words; zeros for null."""
    names, codes = find_distinct(ids)
    digests = [hashlib.md5(name.encode(), usedforsecurity=False).digest() for name in names.to_pylist()]
    hashes: NDArray[np.uint32] = np.frombuffer(b"".join([*digests, bytes(16)]), ">u4").reshape(-1, 4).astype(np.uint32)
    return hashes[codes]
