"""Output folders of stages: data files, and a manifest of their content and inputs.

    <folder>/manifest.json        kind, rows, columns, feature ids, settings, inputs, report, files with size and sha256
             part-00000.parquet   data

A folder appears by rename, and its data never change. It is up to date, and its stage has nothing to do, if it was made
with the same settings from inputs that are unchanged. A training copy is such a folder too. Readers check every file
against the manifest: name and size before reading, sha256 while reading.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar, cast

from pydantic import ConfigDict, TypeAdapter, ValidationError

from reagent_lite.config.column_names import Columns
from reagent_lite.config.paths import DataPath, logs_of
from reagent_lite.data.formats.blocks import ColumnNames, InputFile
from reagent_lite.data.formats.frames import Logs, paths_of
from reagent_lite.data.formats.input_files import list_input, local_path, not_read, read_bytes, sha256_of
from reagent_lite.data.rows.matrices import FeatureIds
from reagent_lite.data.served_log import require_all_decisions, waiting_in
from reagent_lite.disk_room import is_writable
from reagent_lite.errors import ConfigError, DataError, NoRowsError, Problem, join_names, raise_any
from reagent_lite.feature_ids import FeatureId
from reagent_lite.id_values import IdFeature, ids_of_setting
from reagent_lite.item_table import ItemTable
from reagent_lite.manifest import (
    FILE_NAME,
    SCHEMA_VERSION,
    STAGE,
    FolderKind,
    canonical,
    open_sealed,
    require_files,
    seal,
    seal_folder,
)
from reagent_lite.whole_files import write_whole

T = TypeVar("T")
FIELDS = ConfigDict(extra="forbid", strict=True)
"""Pydantic config of a manifest's dataclass: unknown fields and other types are errors."""


@dataclass(frozen=True, slots=True)
class InputState:
    """One input file's name, size in bytes, modification time and sha256."""

    name: str
    size: int
    modified_ns: int
    sha256: str


def states_of(files: Sequence[InputFile], hashes: Sequence[str]) -> tuple[InputState, ...]:
    """Returns the states of files with these sha256."""
    return tuple(
        InputState(file.label, file.size, file.modified_ns, sha256) for file, sha256 in zip(files, hashes, strict=True)
    )


def are_untouched(states: Sequence[InputState], files: Sequence[InputFile]) -> bool:
    """Whether files have the names, sizes and modification times of recorded states."""
    return [(state.name, state.size, state.modified_ns) for state in states] == [
        (file.label, file.size, file.modified_ns) for file in files
    ]


def are_unchanged(states: Sequence[InputState], files: Sequence[InputFile]) -> bool:
    """Whether files have the names and sizes of recorded states, and the same modification times or else sha256."""
    if [(state.name, state.size) for state in states] != [(file.label, file.size) for file in files]:
        return False
    if are_untouched(states, files) and all(file.modified_ns for file in files):  # 0 if the storage has none
        return True
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(sha256_of, files)) == [state.sha256 for state in states]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageManifest:
    """The manifest of a stage's folder.

    Attributes:
        kind: name of the stage, such as "timeline".
        rows: number of rows of all data files.
        columns: {name: Arrow type} of the data files, in their order.
        state_ids, action_ids, metric_names: features of states and candidates and names of metrics, ascending.
        settings: settings that the content depends on, JSON.
        inputs: states of the input files; their names distinguish the files of several inputs.
        parent: digest of the input folder's manifest; "" if the input has none.
        report: rows read, kept and refused, with reasons, JSON.
        files: {name: {"size": bytes, "sha256": hex, "rows": rows}} of the data files.
    """

    __pydantic_config__ = FIELDS
    folder_kind: ClassVar[FolderKind] = STAGE

    kind: str
    rows: int
    columns: dict[str, str]
    state_ids: FeatureIds = ()
    action_ids: FeatureIds = ()
    metric_names: tuple[str, ...] = ()
    settings: dict[str, Any]
    inputs: tuple[InputState, ...]
    parent: str = ""
    report: dict[str, Any]
    files: dict[str, dict[str, Any]]

    @classmethod
    def of_input(cls, path: DataPath) -> Self | None:
        """Returns the manifest of an input that a stage made; None for other inputs, and for several logs."""
        return cls.read(path) if isinstance(path, str) else None

    @property
    def digest(self) -> str:
        """sha256 of the manifest without modification times: equal for equal content made from equal inputs."""
        timeless = replace(self, inputs=tuple(replace(state, modified_ns=0) for state in self.inputs))
        return hashlib.sha256(canonical(timeless.document())).hexdigest()

    def document(self) -> dict[str, Any]:
        """Returns the fields of the manifest as a JSON object."""
        document: dict[str, Any] = _adapter(cast(Any, type(self))).dump_python(self, mode="json")
        return document

    @classmethod
    def read(cls, folder: str) -> Self | None:
        """Returns the manifest of a folder; None if the folder has none that a stage wrote.

        Args:
            folder: local path or URL of an allowed protocol.

        Raises:
            DataError: the manifest was altered, or was written by another version.
        """
        where = f"{local_path(folder).rstrip('/')}/{FILE_NAME}"
        try:
            data = read_bytes(where)
        except (FileNotFoundError, NotADirectoryError, FileExistsError):  # FileExistsError: fsspec, below a file
            return None
        except (OSError, ImportError, ValueError) as error:
            raise DataError(Problem(where, "a readable file", f"{type(error).__name__}: {error}")) from error
        if not all(f'"{field.name}"'.encode() in data for field in fields(cls)):  # a manifest.json of the user
            return None
        manifest = parse_document(cls, open_sealed(data, where, cls.folder_kind), where, cls.folder_kind)
        require_files(manifest.files, where, cls.folder_kind)
        return manifest

    @classmethod
    def matching(cls, folder: Path, kind: str, settings: dict[str, Any]) -> Self | None:
        """Returns the manifest of a folder that has all its files, if kind and settings are these; else None."""
        try:
            manifest = cls.read(str(folder))
            if manifest is None or manifest.kind != kind or manifest.settings != json.loads(json.dumps(settings)):
                return None
            return None if manifest.damage(folder) else manifest
        except (DataError, OSError):
            return None

    def damage(self, folder: Path) -> list[Problem]:
        """Returns a problem for each file that is missing or has another size; a link counts as missing."""
        with os.scandir(folder) as entries:
            sizes = {entry.name: entry.stat().st_size for entry in entries if entry.is_file(follow_symlinks=False)}
        return _find_altered(str(folder), self, sizes)

    @classmethod
    def up_to_date(cls, folder: Path, kind: str, settings: dict[str, Any], inputs: Sequence[InputFile]) -> Self | None:
        """Returns the manifest of a folder that is up to date; None if the folder has to be made again.

        A folder is up to date if it has all its files, with their sizes, and was made with the same settings from
        unchanged inputs. New modification times of unchanged inputs are written to the manifest, so that the inputs are
        not hashed every time.
        """
        manifest = cls.matching(folder, kind, settings)
        if manifest is None or not are_unchanged(manifest.inputs, inputs):
            return None
        states = states_of(inputs, [state.sha256 for state in manifest.inputs])
        if states != manifest.inputs and is_writable(folder):
            manifest = replace(manifest, inputs=states)
            with suppress(OSError):
                document = {"schema_version": SCHEMA_VERSION, **manifest.document()}
                write_whole(folder / FILE_NAME, seal(document))
        return manifest

    def write(self, folder: Path) -> Self:
        """Writes manifest.json into a folder that is about to appear; returns the manifest with its files hashed.

        `files` has {name: {"rows": rows}}; sizes and sha256 are added. If an entry has both already, the writer of the
        file has hashed and synced it.
        """
        return replace(self, files=seal_folder(folder, self.document(), self.files))


@functools.cache
def _adapter(model: Any) -> TypeAdapter[Any]:
    return TypeAdapter(model)


def parse_document(model: type[T], document: dict[str, Any], where: str, kind: FolderKind) -> T:
    """Returns a manifest's document as an instance of a dataclass.

    Raises:
        DataError: fields are missing, unknown or of another type.
    """
    values = {name: value for name, value in document.items() if name != "schema_version"}
    try:
        manifest: T = _adapter(cast(Any, model)).validate_json(json.dumps(values))
    except ValidationError as error:
        first = error.errors()[0]
        field = f"{where}, {'.'.join(map(str, first['loc']))}"
        got = f"{first['msg']}: {first['input']!r:.200}"
        raise kind.error(Problem(field, kind.name, got, kind.outdated)) from error
    return manifest


def _find_altered(folder: str, manifest: StageManifest, sizes: dict[str, int]) -> list[Problem]:
    """Returns a problem for each file whose name or size differs from the manifest."""
    problems = []
    for name, entry in manifest.files.items():
        if sizes.get(name) != entry["size"]:
            got = f"{sizes[name]} bytes" if name in sizes else "no such file"
            where = f"{folder.rstrip('/')}/{name}"
            expected = f"{entry['size']} bytes, as {FILE_NAME} says"
            problems.append(Problem(where, expected, got, manifest.folder_kind.damaged))
    return problems


def data_files(
    logs: Logs,
    columns: Columns | None = None,
    items: ItemTable | None = None,
    id_features: tuple[IdFeature, ...] | None = None,
) -> tuple[InputFile, ...]:
    """Returns the data files of a log, or those of several logs in their order.

    Files of several logs have the number of their log. Files of a stage's folder have the sha256 that its manifest
    gives, which readers check.

    Args:
        logs: local path, URL or frame, or a sequence of them.
        columns: the log's own names for standard columns. A stage's folder has the standard names, and so may
            some of several logs.
        items: the table of the items that actions may name.
        id_features: features whose values are ids; None if no feature is read.

    Raises:
        DataError: see `list_input`; files that are missing, altered or not in the folder's manifest; a file that two
            logs have; a served log of an earlier version that lacks decisions, see `require_all_decisions`.
        NoRowsError: all logs are empty folders, or folders whose manifest says that they have no rows.
    """
    from reagent_lite.data.rows.column_mapping import ColumnMapping

    paths = paths_of(logs)
    several = not isinstance(paths, str)
    own_names = ColumnMapping.of(columns or {}, beside_others=several)
    files: dict[str, InputFile] = {}
    empty: list[Problem] = []
    for number, path in enumerate(logs_of(paths), 1 if several else 0):
        try:
            listed = _files_of(path, own_names, items, id_features)
        except NoRowsError as error:
            empty += error.problems
            continue
        for file in listed:
            if file.path in files:
                other = paths[files[file.path].log - 1]
                expected = f"files that {other} does not have"
                raise DataError(Problem(path, expected, file.path, "List each file in one log only"))
            files[file.path] = replace(file, log=number)
    if not files:
        raise NoRowsError(empty)
    require_all_decisions(files.values())
    return tuple(files.values())


def _files_of(
    path: str, own_names: ColumnNames | None, items: ItemTable | None, id_features: tuple[IdFeature, ...] | None
) -> tuple[InputFile, ...]:
    from reagent_lite.data.formats.format_table import READERS

    manifest = StageManifest.read(path)
    if manifest is None:
        listed = _list_log(path, tuple(READERS))
        return tuple(replace(file, columns=own_names, items=items, id_features=id_features or ()) for file in listed)
    read = ids_of_setting(manifest.settings)
    if read:
        _require_ids(path, read, id_features)
    if not manifest.rows:
        got = "; ".join([f"none, as its {FILE_NAME} says", *_left_out_before(manifest)])
        todo = "Correct the log, or the settings of the stage that made the folder"
        raise NoRowsError(Problem(local_path(path), "rows of data", got, todo))
    files = list_input(path, tuple(READERS))
    problems = _find_altered(local_path(path), manifest, {file.name: file.size for file in files})
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


def notes_of_input(path: DataPath) -> tuple[str, ...]:
    """Returns sentences about what an input lacks.

    These are entries of a folder that are not read, rows that a stage left out, decisions that wait for rewards, and
    empty logs.
    """
    from reagent_lite.data.formats.format_table import READERS

    sentences: list[str] = []
    for log in logs_of(path):
        try:
            _files_of(log, None, None, None)
            manifest = StageManifest.read(log)
            sentences += not_read(log, tuple(READERS))
            sentences += [] if manifest is None else _left_out_before(manifest)
            waiting = waiting_in(log)
            sentences += [] if waiting is None else [f"{local_path(log)}: {waiting}"]
        except NoRowsError as error:
            sentences += [f"{problem.where}: no rows: {problem.got}" for problem in error.problems]
    return tuple(sentences)


def _left_out_before(manifest: StageManifest) -> list[str]:
    sentences = manifest.report.get("left_out")
    return [sentence for sentence in sentences if isinstance(sentence, str)] if isinstance(sentences, list) else []


def require_own(folder: Path, kind: str, key: str) -> None:
    """Raises ConfigError, naming `key`, if a folder has files that this kind of stage did not make, or is a file."""
    present = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    manifest = None
    with suppress(DataError):
        manifest = StageManifest.read(str(folder))
    made_before = {FILE_NAME, *manifest.files} if manifest is not None and manifest.kind == kind else set()
    others = sorted(present - made_before)
    if others or (folder.exists() and not folder.is_dir()):
        got = f"{folder} with {', '.join(others[:5])}" if others else f"the file {folder}"
        expected = f"a folder that is not there, is empty, or holds a {kind} alone"
        raise ConfigError(Problem(key, expected, got, "It would be replaced: choose another"))


def require_unchanged(files: Sequence[InputFile], path: DataPath, columns: Columns | None) -> None:
    """Checks that an input still has the files that a stage has read, by names, sizes and modification times.

    Raises:
        DataError: files that have changed or are gone.
    """
    now = data_files(path, columns)
    expected = "a file that stays as it is while it is read"
    todo = "Run again when its writer has ended"
    present = {(file.path, file.size, file.modified_ns, file.sha256) for file in now}
    changed = [file for file in files if (file.path, file.size, file.modified_ns, file.sha256) not in present]
    raise_any([Problem(file.path, expected, "one that changed", todo) for file in changed])


def require_apart(source: DataPath, files: Sequence[InputFile], outputs: Mapping[str, Path]) -> None:
    """Checks that no output overlaps the input or another output; links are followed.

    Args:
        source: paths or URLs of the input.
        files: the files of the input.
        outputs: {config key: path}.

    Raises:
        ConfigError: two paths overlap; names both.
    """
    occupied = {Path(file.path).resolve(): "the input" for file in files if not file.remote}
    for log in logs_of(source):
        if "://" not in log and (folder := Path(log).expanduser().resolve()).is_dir():
            occupied[folder] = "the input"
    for key, output in outputs.items():
        resolved = output.resolve()
        for path, what in occupied.items():
            if resolved == path or resolved in path.parents or path in resolved.parents:
                expected = f"a path apart from {what} in {path}"
                raise ConfigError(Problem(key, expected, str(output), "It is replaced as a whole: choose another"))
        occupied[resolved] = key
