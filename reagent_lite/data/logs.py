"""Several logs read as one: finds rows that logs have in common, and makes mdp_ids unique among the logs.

    rows of all logs ─► mdp_id, sequence_number, hash of the content ─► in buckets by mdp_id ─► compared between logs
                                             files, read with a prefix before mdp_ids that are not unique ◄──┘

Two rows are the same if they have the same mdp_id, sequence_number, state, action, reward and propensity. If all rows
that two logs have under the same mdp_id and sequence_number are the same, one log contains rows of the other: an mdp_id
is the same episode in both, and repeated rows are treated like rows that a single log repeats. Otherwise the logs use
the same names for different episodes, and an mdp_id that both have stands for two episodes. Logs without a common
mdp_id stay as they are.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from reagent_lite.config.column_names import PLAIN_CSV, CsvFormat
from reagent_lite.config.paths import DataPath
from reagent_lite.console import progress
from reagent_lite.data.buckets import Buckets
from reagent_lite.data.formats.blocks import Block, ColumnNames, InputFile
from reagent_lite.data.formats.format_table import ALL_COLUMNS, first_block, read_blocks
from reagent_lite.data.formats.frames import location
from reagent_lite.data.formats.schema import in_one_piece, to_numpy
from reagent_lite.data.rows.block_columns import column_of, holds_maps, numbers, sequence_numbers, strings, texts
from reagent_lite.data.rows.column_mapping import ColumnMapping
from reagent_lite.data.rows.contract import are_events, propensity
from reagent_lite.data.rows.faults import Faults
from reagent_lite.data.rows.hashes import Hashes, hashes_of_codes, mix, row_hashes
from reagent_lite.data.rows.maps import features
from reagent_lite.data.rows.matrices import FeatureMatrix, Lists
from reagent_lite.errors import DataError, Problem, join_names, pluralize, raise_any
from reagent_lite.whole_files import work_folder

_MEMORY_BYTES = 1 << 28
_GROUP_BYTES = 1 << 23
_NUMBERED = re.compile(r"(\d{1,9})/")
_ACTIONS = {False: "names or indices", True: "maps of features"}
_ONE_KIND = "Give logs of one kind together: all with this column, or none"


@dataclass(frozen=True, slots=True, kw_only=True)
class SeparatedLogs:
    """Files of several logs, whose readers yield a different mdp_id for each episode.

    Attributes:
        files: the files of the input, in their order.
        notes: sentences about mdp_ids and rows that several logs have.
    """

    files: tuple[InputFile, ...]
    notes: tuple[str, ...] = ()


def separate_logs(files: tuple[InputFile, ...], path: DataPath, folder: Path) -> SeparatedLogs:
    """Compares the logs of an input, for which all rows are read once; does nothing for a single log.

    Args:
        files: the files, as `data_files` returns them.
        path: the paths of the logs.
        folder: for temporary files, on a disk with room for 40 bytes per row.

    Raises:
        DataError: logs whose rows are not of one kind; a file that cannot be read, with file and line; no rows.
    """
    if isinstance(path, str):
        return SeparatedLogs(files=files)
    require_one_kind(files, path)
    numbered: set[int] = set()
    with work_folder(folder, "logs") as work:
        buckets = Buckets(work, files, _MEMORY_BYTES)
        with progress("comparing the logs", "bytes") as show:
            for rows, starts in read_blocks(files, _rows_of, show, ALL_COLUMNS):
                numbered |= starts
                if len(rows):
                    buckets.add(rows, to_numpy(in_one_piece(rows.column("episode"))) >> np.uint64(32))
        overlaps: dict[tuple[int, int], _SharedRows] = defaultdict(_SharedRows)
        for group in buckets.groups(_GROUP_BYTES):
            _compare(pa.concat_tables(group.tables()), overlaps)
    prefixes = _prefixes(range(1, len(path) + 1), overlaps, numbered)
    prefixed = tuple(
        replace(file, columns=_WithPrefix(prefixes[file.log], file.columns)) if prefixes[file.log] else file
        for file in files
    )
    notes = _notes([location(log) for log in path], overlaps, prefixes, files)
    return SeparatedLogs(files=prefixed, notes=tuple(notes))


@dataclass(frozen=True, slots=True)
class _WithPrefix:
    """Reads the rows of a log with a prefix before each mdp_id; see ColumnNames.

    Attributes:
        prefix: the prefix.
        names: the user's own names of columns; None if they are the standard ones.
    """

    prefix: str
    names: ColumnNames | None

    @property
    def csv(self) -> CsvFormat:
        """How CSV files are written."""
        return PLAIN_CSV if self.names is None else self.names.csv

    @property
    def raw(self) -> tuple[str, ...]:
        """Names of the columns whose values are read from their texts."""
        return () if self.names is None else self.names.raw

    def meaning(self, name: str) -> str:
        """Returns the field that a column holds; see ColumnNames."""
        return name if self.names is None else self.names.meaning(name)

    def read(self, block: Block) -> Block:
        """Returns a block with the standard columns."""
        if self.names is not None:
            block = self.names.read(block)
        faults = Faults(block)
        ids = texts(column_of(block, "mdp_id"), faults)
        number = block.table.schema.get_field_index("mdp_id")
        if number < 0 or faults.count:  # the fault is reported when the rows are checked
            return block
        prefixed = pc.binary_join_element_wise(pa.scalar(self.prefix), ids, "")
        return replace(block, table=block.table.set_column(number, pa.field("mdp_id", pa.string()), prefixed))


def require_one_kind(files: tuple[InputFile, ...], path: DataPath) -> None:
    """Checks by their first rows that several logs are of one kind.

    Raises:
        DataError: events and transitions, rows with an mdp_id or a sequence_number and rows without, or named actions
            and maps of features; names both logs and the column.
    """
    if isinstance(path, str):
        return
    _require_own_columns(files)
    logs: list[tuple[str, Block]] = []
    for number, of_log in itertools.groupby(files, lambda file: file.log):
        if (first := first_block(tuple(of_log), ALL_COLUMNS)) is not None:
            logs.append((location(path[number - 1]), first))
    raise_any([problem for other in logs[1:] for problem in _unlike(*logs[0], *other)])


def _require_own_columns(files: tuple[InputFile, ...]) -> None:
    """Checks that at least one log has the columns that a config names; the other logs may have the standard names.

    Raises:
        DataError: no log has them; names those that the first log lacks.
    """
    problems: list[Problem] = []
    for _, of_log in itertools.groupby(files, lambda file: file.log):
        with_own_names = [(file, file.columns) for file in of_log if isinstance(file.columns, ColumnMapping)]
        try:
            if first_block(
                [replace(file, columns=replace(columns, beside_others=False)) for file, columns in with_own_names]
            ):
                return
        except DataError as error:
            problems = problems or list(error.problems)
    raise_any(problems)


def _unlike(name: str, block: Block, other_name: str, other_block: Block) -> Iterator[Problem]:
    """Yields the differences in kind between the first rows of a log and those of another log."""
    events = are_events(block)
    other_events = are_events(other_block)
    needed = ("mdp_id", "sequence_number") if events or other_events else ("sequence_number",)
    lacking = False
    for column in needed:
        has, other_has = (column in rows.table.column_names for rows in (block, other_block))
        if has != other_has:
            lacking = True
            having, without = (name, other_name) if has else (other_name, name)
            yield Problem(without, f"a column {column!r}, as {having} has", "none", _ONE_KIND)
    if events != other_events and not lacking:
        of_events, of_transitions = (name, other_name) if events else (other_name, name)
        expected = f"transitions, with a column 'next_state_features' or 'next_action' as {of_transitions} has"
        todo = "Make transitions of the events first, with workflows.timeline, or give logs of one kind together"
        yield Problem(of_events, expected, "events", todo)
    maps, other_maps = (holds_maps(column_of(rows, "action")) for rows in (block, other_block))
    if None not in (maps, other_maps) and maps != other_maps:
        yield Problem(other_name, f"{_ACTIONS[bool(maps)]} in action, as {name} has", _ACTIONS[bool(other_maps)])


def _rows_of(block: Block) -> tuple[pa.Table, set[int]]:
    """Returns (the rows of a block that have an mdp_id, for `_compare`; numbers that are prefixes of mdp_ids)."""
    faults = Faults(block)
    codes, distinct = strings(column_of(block, "mdp_id"), faults)
    ids = distinct.to_pylist()
    sequence, ordered = sequence_numbers(column_of(block, "sequence_number"), faults)
    rows = np.flatnonzero(codes >= 0)
    count = len(rows)
    table = pa.table(
        {
            "episode": hashes_of_codes(codes[rows], ids),
            "sequence": sequence[rows],
            "ordered": ordered[rows],
            "content": _contents(block, faults)[rows],
            "log": np.full(count, block.file.log, np.int32),
            "file": np.full(count, block.file_number, np.int32),
            "line": block.lines[rows],
        }
    )
    return table, {int(match[1]) for match in map(_NUMBERED.match, ids) if match}


def _contents(block: Block, faults: Faults) -> Hashes:
    """Returns [n] hashes of the state, action, reward and propensity of each row."""
    states, _ = features(column_of(block, "state_features"), faults)
    action = column_of(block, "action")
    if holds_maps(action):
        actions = _hashes_of(features(action, faults)[0])
    else:
        codes, distinct = strings(action, faults)
        actions = hashes_of_codes(codes, distinct.to_pylist())
    hashes = mix(_hashes_of(states) ^ actions)
    for values in (numbers(column_of(block, "reward"), faults), propensity(block, faults)[0]):
        number = np.where(np.isnan(values), np.nan, values + 0.0)  # one NaN, and 0 for -0
        hashes = mix(hashes ^ number.view(np.uint64))
    return hashes


def _hashes_of(matrix: FeatureMatrix) -> Hashes:
    return Lists(np.ones(len(matrix.values), np.int64), matrix).hashes()[0]


@dataclass(slots=True)
class _SharedRows:
    """Episodes and rows that a log has in common with an earlier log.

    Attributes:
        episodes: number of mdp_ids that both have.
        equal: number of rows, by mdp_id and sequence_number, that are the same in both.
        different: number of rows, by mdp_id and sequence_number, that differ.
        first: (file, line) of the later log's first row that is the same in both.
    """

    episodes: int = 0
    equal: int = 0
    different: int = 0
    first: tuple[int, int] = (sys.maxsize, 0)


def _compare(table: pa.Table, overlaps: dict[tuple[int, int], _SharedRows]) -> None:
    """Adds what logs have in common to `overlaps`.

    Args:
        table: all rows of some episodes, with the columns of `_rows_of`.
        overlaps: {(number of the earlier log, number of the later log): what they have in common}.
    """
    column: dict[str, NDArray[Any]] = {
        name: in_one_piece(table.column(name)).to_numpy(zero_copy_only=False) for name in table.column_names
    }
    names = row_hashes(column["episode"], column["sequence"], 0)
    named_contents = mix(names ^ mix(column["content"]))
    rows_of = {log: np.flatnonzero(column["log"] == log) for log in np.unique(column["log"]).tolist()}
    ordered_of = {log: rows[column["ordered"][rows]] for log, rows in rows_of.items()}
    for earlier, later in itertools.combinations(rows_of, 2):
        overlap = overlaps[earlier, later]
        episodes = column["episode"]
        overlap.episodes += len(np.intersect1d(episodes[rows_of[earlier]], episodes[rows_of[later]]))
        rows_earlier = ordered_of[earlier]
        rows_later = ordered_of[later]
        _, in_earlier, in_later = np.intersect1d(names[rows_earlier], names[rows_later], return_indices=True)
        # a log may have several rows of one name: one of them that the other log has too is enough
        equal = np.isin(named_contents[rows_later[in_later]], named_contents[rows_earlier])
        equal |= np.isin(named_contents[rows_earlier[in_earlier]], named_contents[rows_later])
        repeated = rows_later[in_later[equal]]
        lines = zip(column["file"][repeated].tolist(), column["line"][repeated].tolist(), strict=True)
        overlap.first = min(overlap.first, *lines)
        overlap.equal += int(equal.sum())
        overlap.different += int((~equal).sum())


def _prefixes(
    logs: Iterable[int], overlaps: Mapping[tuple[int, int], _SharedRows], numbered: set[int]
) -> dict[int, str]:
    """Returns the prefix of each log's mdp_ids: "", or a number that is not a prefix of any mdp_id yet.

    Logs that contain rows of each other share one numbering of episodes, and get the same prefix.
    """

    def between(logs: Sequence[int], others: Sequence[int]) -> list[_SharedRows]:
        pairs = ((min(log, other), max(log, other)) for log, other in itertools.product(logs, others))
        return [overlaps[pair] for pair in pairs if pair in overlaps]

    numberings: list[list[int]] = []
    for log in logs:
        joined = [log]
        for numbering in list(numberings):
            contains = any(overlap.equal and not overlap.different for overlap in between([log], numbering))
            if contains and not any(overlap.different for overlap in between(joined, numbering)):
                numberings.remove(numbering)
                joined = [*numbering, *joined]
        numberings.append(sorted(joined))
    prefixes: dict[int, str] = {}
    used = set(numbered)
    for numbering in sorted(numberings):
        prefix = ""
        if any(overlap.episodes for overlap in between(numbering, list(prefixes))):
            number = next(number for number in itertools.count(numbering[0]) if number not in used)
            used.add(number)
            prefix = f"{number}/"
        prefixes |= dict.fromkeys(numbering, prefix)
    return prefixes


def _notes(
    names: Sequence[str],
    overlaps: Mapping[tuple[int, int], _SharedRows],
    prefixes: Mapping[int, str],
    files: Sequence[InputFile],
) -> Iterator[str]:
    """Yields a sentence for each log that repeats rows of earlier logs, and for each whose mdp_ids get a prefix."""
    repeated: dict[int, dict[int, _SharedRows]] = defaultdict(dict)
    colliding: dict[int, dict[int, _SharedRows]] = defaultdict(dict)
    for (earlier, later), overlap in sorted(overlaps.items()):
        if prefixes[earlier] != prefixes[later]:
            renamed, other = (later, earlier) if prefixes[later] else (earlier, later)
            if overlap.episodes:
                colliding[renamed][other] = overlap
        elif overlap.equal:
            repeated[later][earlier] = overlap
    for log, name in enumerate(names, 1):
        if log in repeated:
            rows = sum(overlap.equal for overlap in repeated[log].values())
            file, line = min(overlap.first for overlap in repeated[log].values())
            others = join_names(names[other - 1] for other in repeated[log])
            yield f"{name}: repeats {pluralize(rows, 'row')} of {others}, the first at {files[file].location(line)}"
        if log in colliding:
            ids = sum(overlap.episodes for overlap in colliding[log].values())
            equal = sum(overlap.equal for overlap in colliding[log].values())
            rows = equal + sum(overlap.different for overlap in colliding[log].values())
            others = join_names(names[other - 1] for other in colliding[log])
            same = f", {equal:,} of {pluralize(rows, 'row')} with the same sequence_number being the same"
            yield (
                f"{name}: has {pluralize(ids, 'mdp_id')} of {others} for other episodes{same if equal else ''}; "
                f"its mdp_ids begin with {prefixes[log]!r} from here on"
            )
