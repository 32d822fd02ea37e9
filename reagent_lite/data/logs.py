"""A log: one path or several that are read as one, and how their rows are read.

    path, columns, items, id_features, ─► Log ─► files, kind, notes ─► training copy, timeline, shard
    actions, timeline, partition

**Several logs.** Episodes of different logs are different ones: every `mdp_id` of the second log begins with `2/`, of
the third with `3/`, wherever its rows are read. Those of the first log stay as they are, but for names that begin with
a number and a slash already, which get `1/`, so that no two names become one. If the user says that the logs have the
same episodes, all names stay as they are, and rows with equal `mdp_id` and `sequence_number` count once.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reagent_lite.config.column_names import PLAIN_CSV, SERVED_COLUMNS, Columns, CsvFormat
from reagent_lite.config.paths import DataPath, logs_of, show_paths
from reagent_lite.config.timeline_config import TimelineConfig
from reagent_lite.data.formats.blocks import Block, ColumnNames, InputFile
from reagent_lite.data.formats.frames import location, paths_of
from reagent_lite.data.formats.input_files import list_input, local_path, not_read
from reagent_lite.data.served_log import require_all_decisions, waiting_in
from reagent_lite.data.stage_folder import StageManifest, find_altered
from reagent_lite.errors import ConfigError, DataError, NoRowsError, Problem, join_names, raise_any
from reagent_lite.feature_ids import FeatureId
from reagent_lite.id_values import IdFeature, ids_of_setting, ids_setting
from reagent_lite.item_table import ItemTable
from reagent_lite.manifest import FILE_NAME, STAGE
from reagent_lite.types import Image

if TYPE_CHECKING:
    from reagent_lite.data.partition import Partition  # needs Arrow

NUMBERED = "^[0-9]+/"
"""Pattern of the number that `_InOneOfSeveral` puts before an mdp_id."""
_ACTIONS = {False: "names or indices", True: "maps of features"}
_ONE_KIND = "Give logs of one kind together: all with this column, or none"


@dataclass(frozen=True, eq=False)
class Log:
    """Logged data and how it is read; files are listed, and first rows read, once, when they are needed.

    Attributes:
        path: path of a file or a folder in any format, URL or frame; or several, which are read as one. Frames are
            written to files; the attribute has their paths.
        actions: names of discrete actions in output order; None for candidates.
        columns: the log's own names for standard columns; some of several logs may have the standard names.
        items: the table of the items that actions may name.
        id_features: features whose values are ids; None if no feature is read.
        image: shape of its states if they are images; None if they have features.
        timeline: settings of the pairing of events; None for the defaults.
        directory: parent folder of the training copy that the user chose, or None.
        partition: the episodes that are read; None for all.
        same_episodes: whether an mdp_id that several logs have is one episode; None counts as false, with a warning.
    """

    path: DataPath
    _: KW_ONLY
    actions: tuple[str, ...] | None = None
    columns: Columns = field(default_factory=dict)
    items: ItemTable | None = None
    id_features: tuple[IdFeature, ...] | None = None
    image: Image | None = None
    timeline: TimelineConfig | None = None
    directory: str | None = None
    partition: Partition | None = None
    same_episodes: bool | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", paths_of(self.path))

    @property
    def paths(self) -> tuple[str, ...]:
        """The path of each log."""
        return logs_of(self.path)

    @property
    def is_several(self) -> bool:
        """Whether there are several logs, or a list of them."""
        return not isinstance(self.path, str)

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that the standard rows depend on, in addition to the files and the item table."""
        columns = {"columns": self.columns} if self.columns else {}
        several = {"same_episodes": bool(self.same_episodes)} if self.is_several else {}
        image = {"image": list(self.image.shape)} if self.image is not None else {}
        return columns | several | ids_setting(self.id_features or ()) | image

    @property
    def name(self) -> str:
        """The paths as text, for errors and messages."""
        return show_paths(self.path)

    @cached_property
    def manifest(self) -> StageManifest | None:
        """The manifest of a stage's folder; None for other paths, and for several logs."""
        return None if self.is_several else StageManifest.read(self.paths[0])

    @cached_property
    def files(self) -> tuple[InputFile, ...]:
        """The data files, those of several logs in their order, as they are at the first call.

        Files of several logs have the number of their log. Files of a stage's folder have the sha256 that its manifest
        gives, which readers check, and the standard columns.

        Raises:
            DataError: see `list_input`; files that are missing, altered or not in the folder's manifest; a file that
                two logs have; a stage's folder that was made with other features of ids; a served log of an earlier
                version that lacks decisions, see `require_all_decisions`.
            NoRowsError: all logs are empty folders, or folders whose manifest says that they have no rows.
        """
        return self._listing.files

    @cached_property
    def _listing(self) -> _Listing:
        return self._list_files()

    def _list_files(self) -> _Listing:
        from reagent_lite.data.rows.column_mapping import ColumnMapping  # needs Arrow

        names = ColumnMapping.of(self.columns, beside_others=self.is_several)
        files: dict[str, InputFile] = {}
        empty: dict[str, tuple[Problem, ...]] = {}
        for number, path in enumerate(self.paths, 1 if self.is_several else 0):
            try:
                files_of_log = _files_of(path, names, self.items, self.id_features)
            except NoRowsError as error:
                empty[path] = error.problems
                continue
            for file in files_of_log:
                if file.path in files:
                    expected = f"files that {self.path[files[file.path].log - 1]} does not have"
                    raise DataError(Problem(path, expected, file.path, "List each file in one log only"))
                files[file.path] = replace(file, log=number)
        if not files:
            raise NoRowsError([problem for problems in empty.values() for problem in problems])
        require_all_decisions(files.values())
        listed = tuple(replace(file, image=self.image) for file in files.values())
        if self.is_several and not self.same_episodes:
            listed = tuple(replace(file, columns=_InOneOfSeveral(file.log, file.columns)) for file in listed)
        return _Listing(files=listed, empty=empty)

    @property
    def read_files(self) -> tuple[InputFile, ...]:
        """The files with rows of the episodes that are read; their readers leave out other episodes."""
        return self.files if self.partition is None else self.partition.files_of(self.files, self.manifest)

    def notes(self) -> tuple[str, ...]:
        """Returns sentences about what the log lacks.

        These are entries of a folder that are not read, rows that a stage left out, decisions that wait for rewards,
        and empty logs.
        """
        from reagent_lite.data.formats.format_table import READERS

        sentences: list[str] = []
        for path in self.paths:
            if path in self._listing.empty:
                sentences += [f"{problem.where}: no rows: {problem.got}" for problem in self._listing.empty[path]]
                continue
            manifest = StageManifest.read(path)
            sentences += not_read(path, tuple(READERS))
            sentences += [] if manifest is None else _left_out_before(manifest)
            waiting = waiting_in(path)
            sentences += [] if waiting is None else [f"{local_path(path)}: {waiting}"]
        return tuple(sentences)

    def require_unchanged(self) -> None:
        """Checks that the files are still those that were read, by names, sizes and modification times.

        Raises:
            DataError: files that have changed or are gone.
        """
        expected = "a file that stays as it is while it is read"
        todo = "Run again when its writer has ended"
        present = {(file.path, file.size, file.modified_ns, file.sha256) for file in self._list_files().files}
        changed = [file for file in self.files if (file.path, file.size, file.modified_ns, file.sha256) not in present]
        raise_any([Problem(file.path, expected, "one that changed", todo) for file in changed])

    def require_apart(self, outputs: Mapping[str, Path]) -> None:
        """Checks that no output overlaps the log or another output; links are followed.

        Args:
            outputs: {config key: path}.

        Raises:
            ConfigError: two paths overlap; names both.
        """
        occupied = {Path(file.path).resolve(): "the input" for file in self.files if not file.remote}
        for path in self.paths:
            if "://" not in path and (folder := Path(path).expanduser().resolve()).is_dir():
                occupied[folder] = "the input"
        for key, output in outputs.items():
            resolved = output.resolve()
            for other, what in occupied.items():
                if resolved == other or resolved in other.parents or other in resolved.parents:
                    expected = f"a path apart from {what} in {other}"
                    raise ConfigError(Problem(key, expected, str(output), "It is replaced as a whole: choose another"))
            occupied[resolved] = key

    def first_blocks(self) -> Iterator[Block]:
        """Yields the first block of each log that has rows, with the columns that training reads.

        Raises:
            DataError: a file that cannot be read; no log has the columns that `columns` names.
        """
        from reagent_lite.data.formats.format_table import first_block

        problems: list[Problem] = []
        seen = not (self.is_several and self.columns)
        for _, group in itertools.groupby(self.files, lambda file: file.log):
            files = tuple(group)
            first = None
            if not seen:
                try:
                    first = first_block([_alone(file) for file in files])
                    seen = True
                except DataError as error:
                    problems = problems or list(error.problems)
            first = first_block(files) if first is None else first
            if first is not None:
                yield replace(first, file=files[first.file_number])
        if not seen:
            raise_any(problems)

    @cached_property
    def _kinds(self) -> tuple[_Kind, ...]:
        """The kind of each log that has rows, from its first rows."""
        return tuple(map(self._kind_of, self.first_blocks()))

    def _kind_of(self, first: Block) -> _Kind:
        from reagent_lite.data.formats.format_table import first_block
        from reagent_lite.data.rows.block_columns import column_of, holds_maps
        from reagent_lite.data.rows.row_rules import are_events

        last = [file for file in self.files if file.log == first.file.log][-1]
        events = are_events(first)
        if not events and SERVED_COLUMNS[0] in first.table.column_names and last is not first.file:
            newest = first_block([last])  # single decisions may be followed by episodes
            events = newest is not None and are_events(newest)
        return _Kind(
            name=location(self.path[first.file.log - 1] if first.file.log else self.paths[0]),
            columns=frozenset(first.table.column_names),
            events=events,
            maps=holds_maps(column_of(first, "action")),
        )

    @property
    def holds_events(self) -> bool:
        """Whether the first rows are events rather than transitions; false if there are no rows.

        Several logs are of one kind, so that the first log decides.

        Raises:
            DataError: a file that cannot be read.
        """
        try:
            return bool(self._kinds) and self._kinds[0].events
        except NoRowsError:
            return False

    def require_one_kind(self) -> None:
        """Checks by their first rows that several logs are of one kind.

        Raises:
            DataError: events and transitions, rows with an mdp_id or a sequence_number and rows without, or named
                actions and maps of features; names both logs and the column. No log has the columns that `columns`
                names.
        """
        if self.is_several:
            raise_any([problem for other in self._kinds[1:] for problem in self._kinds[0].unlike(other)])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Listing:
    """The files of a log.

    Attributes:
        files: the files with rows, of all logs.
        empty: {path of a log without rows: why}.
    """

    files: tuple[InputFile, ...]
    empty: dict[str, tuple[Problem, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """The kind of a log's rows.

    Attributes:
        name: how errors name the log.
        columns: names of the columns of its first rows.
        events: whether they are events.
        maps: whether actions are maps of features; None if no row has an action.
    """

    name: str
    columns: frozenset[str]
    events: bool
    maps: bool | None

    def unlike(self, other: _Kind) -> Iterator[Problem]:
        """Yields the differences between the first rows of a log and those of another one."""
        needed = ("mdp_id", "sequence_number") if self.events or other.events else ("sequence_number",)
        lacking = False
        for column in needed:
            if (column in self.columns) != (column in other.columns):
                lacking = True
                having, without = (self.name, other.name) if column in self.columns else (other.name, self.name)
                yield Problem(without, f"a column {column!r}, as {having} has", "none", _ONE_KIND)
        if self.events != other.events and not lacking:
            of_events, of_transitions = (self.name, other.name) if self.events else (other.name, self.name)
            expected = f"transitions, with a column 'next_state_features' or 'next_action' as {of_transitions} has"
            todo = "Make transitions of the events first, with workflows.timeline, or give logs of one kind together"
            yield Problem(of_events, expected, "events", todo)
        if None not in (self.maps, other.maps) and self.maps != other.maps:
            expected = f"{_ACTIONS[bool(self.maps)]} in action, as {self.name} has"
            yield Problem(other.name, expected, _ACTIONS[bool(other.maps)])


@dataclass(frozen=True, slots=True)
class _InOneOfSeveral:
    """Reads the rows of one of several logs with an mdp_id that no other log has; see ColumnNames.

    Attributes:
        log: number of the log, from 1.
        names: the user's own names of columns; None if they are the standard ones.
    """

    log: int
    names: ColumnNames | None

    @property
    def csv(self) -> CsvFormat:
        """How CSV files are written."""
        return PLAIN_CSV if self.names is None else self.names.csv

    @property
    def own_names(self) -> bool:
        """Whether columns may have names of the user's own."""
        return self.names is not None

    @property
    def raw(self) -> tuple[str, ...]:
        """Names of the columns whose values are read from their texts."""
        return () if self.names is None else self.names.raw

    def meaning(self, name: str) -> str:
        """Returns the field that a column holds; see ColumnNames."""
        return name if self.names is None else self.names.meaning(name)

    def read(self, block: Block) -> Block:
        """Returns a block with the standard columns."""
        import pyarrow as pa
        import pyarrow.compute as pc

        from reagent_lite.data.rows.block_columns import column_of, texts
        from reagent_lite.data.rows.faults import Faults

        if self.names is not None:
            block = self.names.read(block)
        faults = Faults(block)
        ids = texts(column_of(block, "mdp_id"), faults)
        number = block.table.schema.get_field_index("mdp_id")
        if number < 0 or faults.count:  # the fault is reported when the rows are checked
            return block
        numbered = pc.binary_join_element_wise(f"{self.log}/", ids, "")
        if self.log == 1:
            are_numbered = pc.match_substring_regex(ids, NUMBERED)
            if not pc.any(are_numbered).as_py():
                return block
            numbered = pc.if_else(are_numbered, numbered, ids)
        table = block.table.set_column(number, pa.field("mdp_id", pa.string()), numbered)
        return replace(block, table=table)


def _alone(file: InputFile) -> InputFile:
    """Returns a file of several logs as that of a single log, which has to have the user's own columns."""
    from reagent_lite.data.rows.column_mapping import ColumnMapping

    names = file.columns.names if isinstance(file.columns, _InOneOfSeveral) else file.columns
    return replace(file, columns=replace(names, beside_others=False) if isinstance(names, ColumnMapping) else names)


def _files_of(
    path: str, names: ColumnNames | None, items: ItemTable | None, id_features: tuple[IdFeature, ...] | None
) -> tuple[InputFile, ...]:
    """Returns the files of a single log; those of a stage's folder have the standard columns."""
    from reagent_lite.data.formats.format_table import READERS

    manifest = StageManifest.read(path)
    if manifest is None:
        listed = _list_log(path, tuple(READERS))
        return tuple(replace(file, columns=names, items=items, id_features=id_features or ()) for file in listed)
    read = ids_of_setting(manifest.settings)
    if read:
        _require_ids(path, read, id_features)
    if not manifest.rows:
        got = "; ".join([f"none, as its {FILE_NAME} says", *_left_out_before(manifest)])
        todo = "Correct the log, or the settings of the stage that made the folder"
        raise NoRowsError(Problem(local_path(path), "rows of data", got, todo))
    files = list_input(path, tuple(READERS))
    problems = find_altered(local_path(path), manifest, {file.name: file.size for file in files})
    for file in files:
        if os.path.islink(file.path):
            problems.append(
                Problem.stating(file.path, f"a symbolic link, where {FILE_NAME} lists a regular file", STAGE.damaged)
            )
        if file.name not in manifest.files:
            todo = "Remove it, or give it a folder of its own"
            problems.append(Problem(file.path, f"a file of {FILE_NAME}", "one it does not name", todo))
    raise_any(problems)
    named = tuple(feature for feature in (*manifest.state_ids, *manifest.action_ids) if isinstance(feature, FeatureId))
    sealed_files = (replace(file, sha256=manifest.files[file.name]["sha256"]) for file in files)
    # rows of a stage that read ids have their codes
    remaining = () if read else id_features or ()
    return tuple(replace(file, features=named, items=items, id_features=remaining) for file in sealed_files)


def _require_ids(path: str, read: tuple[IdFeature, ...], id_features: tuple[IdFeature, ...] | None) -> None:
    """Checks that a stage has read ids as they are to be read now.

    Raises:
        DataError: the stage was made with other embeddings.
    """
    if id_features is None or set(read) == set(id_features):
        return
    expected = f"embeddings of {join_names(str(of.feature) for of in read)}, with the lengths and scores of its stage"
    got = join_names(str(of.feature) for of in id_features) if id_features else "none"
    todo = "Set data.embeddings as in the config of the stage, or make the folder again"
    raise DataError(Problem(local_path(path), expected, got, todo))


def _list_log(path: str, extensions: tuple[str, ...]) -> tuple[InputFile, ...]:
    """Returns `list_input`; if a served log has no file yet, the error says how many decisions wait."""
    try:
        return list_input(path, extensions)
    except NoRowsError as error:
        waiting = waiting_in(path)
        if waiting is None:
            raise
        todo = "Train when they have been written: a server has to run on this log for that time"
        raise NoRowsError([replace(problem, got=str(waiting), todo=todo) for problem in error.problems]) from None


def _left_out_before(manifest: StageManifest) -> list[str]:
    sentences = manifest.report.get("left_out")
    return [sentence for sentence in sentences if isinstance(sentence, str)] if isinstance(sentences, list) else []
