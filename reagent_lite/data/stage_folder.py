"""Output folders of stages: data files, and a manifest of their content and inputs.

    <folder>/manifest.json        kind, rows, columns, feature ids, settings, inputs, report, files with size and sha256
             part-00000.parquet   data

A folder appears by rename, and its data never change. It is up to date, and its stage has nothing to do, if it was made
with the same settings from inputs that are unchanged. A training copy is such a folder too. Readers check every file
against the manifest: name and size before reading (logs.py), sha256 while reading.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar, cast

from pydantic import ConfigDict, TypeAdapter, ValidationError

from reagent_lite.data.formats.blocks import InputFile
from reagent_lite.data.formats.input_files import local_path, read_bytes, sha256_of
from reagent_lite.data.rows.matrices import FeatureIds
from reagent_lite.disk_room import is_writable
from reagent_lite.errors import ConfigError, DataError, Problem
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
        return find_altered(str(folder), self, sizes)

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


def find_altered(folder: str, manifest: StageManifest, sizes: dict[str, int]) -> list[Problem]:
    """Returns a problem for each file whose name or size differs from the manifest."""
    problems = []
    for name, entry in manifest.files.items():
        if sizes.get(name) != entry["size"]:
            got = f"{sizes[name]} bytes" if name in sizes else "no such file"
            where = f"{folder.rstrip('/')}/{name}"
            expected = f"{entry['size']} bytes, as {FILE_NAME} says"
            problems.append(Problem(where, expected, got, manifest.folder_kind.damaged))
    return problems


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
