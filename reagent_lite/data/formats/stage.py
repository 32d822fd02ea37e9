"""Folders that a stage leaves: data files, and a sealed manifest that says what they hold and what they were made from.

    <folder>/manifest.json        kind, rows, columns, feature ids, settings, inputs, report, files with size and sha256
             part-00000.parquet   data

A folder appears by rename and is never changed. A stage whose folder stands, made by the same settings from unchanged
inputs, has nothing to do. Whoever reads such a folder holds every file to its manifest: names and sizes before, sha256
while reading.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from reagent_lite.data.formats.files import InputFile, list_input, local_path, not_read
from reagent_lite.data.formats.input_state import InputState, unchanged
from reagent_lite.data.formats.reading import READERS
from reagent_lite.errors import BundleError, DataError, NoRowsError, Problem
from reagent_lite.files import write_whole
from reagent_lite.manifest import FILE_NAME, SCHEMA_VERSION, canonical, opened, require_names, sealed

_AGAIN = "Copy the folder again, or remove it: the stage that made it makes it again"
_HASH_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StageManifest:
    """What a stage's folder holds.

    Attributes:
        kind: name of the stage, such as "timeline".
        rows: of all data files.
        columns: {name: Arrow type} of the data files, in their order.
        state_ids, action_ids, metric_names: features of states and candidates and names of metrics, ascending.
        settings: what the content depends on, JSON.
        inputs: what it was made from; their names tell files of several inputs apart.
        parent: sha256 of the manifest of the folder it was made from; "" where that had none.
        report: what was read, kept, refused and why, JSON.
        files: {name: {"size": bytes, "sha256": hex, "rows": rows}} of the data files.
    """

    kind: str
    rows: int
    columns: dict[str, str]
    state_ids: tuple[int, ...] = ()
    action_ids: tuple[int, ...] = ()
    metric_names: tuple[str, ...] = ()
    settings: dict[str, Any]
    inputs: tuple[InputState, ...]
    parent: str = ""
    report: dict[str, Any]
    files: dict[str, dict[str, Any]]

    @property
    def digest(self) -> str:
        """sha256 of the manifest but for modification times: equal for equal content made from equal inputs."""
        timeless = replace(self, inputs=tuple(replace(one, modified_ns=0) for one in self.inputs))
        return hashlib.sha256(canonical(json.loads(json.dumps(asdict(timeless))))).hexdigest()


def write_manifest(folder: Path, manifest: StageManifest) -> StageManifest:
    """Writes manifest.json into a folder that is about to appear, and returns it with its data files hashed.

    Args:
        folder: holds the data files, and nothing else.
        manifest: its `files` say {name: {"rows": rows}}; sizes and sha256 are added. An entry that has both is that of
            a file whose writer hashed it on the way and brought it to the disk.
    """
    names = sorted(manifest.files)
    with ThreadPoolExecutor(4) as pool:
        entries = pool.map(lambda name: {} if "sha256" in manifest.files[name] else _entry(folder / name), names)
        whole = {name: {**manifest.files[name], **entry} for name, entry in zip(names, entries, strict=True)}
    manifest = replace(manifest, files=whole)
    document = {"schema_version": SCHEMA_VERSION, **asdict(manifest)}
    write_whole(folder / FILE_NAME, sealed(json.loads(json.dumps(document))))
    return manifest


def _entry(file: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(_HASH_CHUNK_BYTES):
            digest.update(chunk)
        os.fsync(stream.fileno())
    return {"size": file.stat().st_size, "sha256": digest.hexdigest()}


def read_manifest(folder: str) -> StageManifest | None:
    """Returns the manifest of a stage's folder, or None where there is none of ours.

    Args:
        folder: local path or URL of an allowed protocol.

    Raises:
        DataError: a manifest that was altered, or that another version wrote.
    """
    where = f"{local_path(folder).rstrip('/')}/{FILE_NAME}"
    try:
        data = _bytes_at(where)
    except (FileNotFoundError, NotADirectoryError, FileExistsError):  # the last as fsspec says it of a file's child
        return None
    except (OSError, ImportError, ValueError) as error:
        raise DataError(Problem(where, "a readable file", f"{type(error).__name__}: {error}")) from error
    if not _is_ours(data):
        return None
    try:
        document = opened(data, where)
        document["inputs"] = tuple(InputState(**one) for one in document["inputs"])
        for name in ("state_ids", "action_ids", "metric_names"):
            document[name] = tuple(document[name])
        require_names(document["files"], where)
        return StageManifest(**{key: value for key, value in document.items() if key != "schema_version"})
    except BundleError as error:
        problem = error.problems[0]
        raise DataError(Problem(where, problem.expected, problem.got, _AGAIN)) from error
    except (TypeError, KeyError) as error:
        raise DataError(
            Problem(where, "the manifest of a stage", f"one without or with other keys: {error}")
        ) from error


def _bytes_at(path: str) -> bytes:
    if "://" not in path:
        if not os.path.isfile(path):  # a FIFO among others, which would wait for ever
            raise FileNotFoundError(path)
        return Path(path).read_bytes()
    import fsspec  # only remote paths pay for its import

    with fsspec.open(path, "rb") as stream:
        data: bytes = stream.read()
    return data


def _is_ours(data: bytes) -> bool:
    """Whether the bytes look like a stage's manifest; users keep manifests of their own beside data."""
    return all(f'"{one.name}"'.encode() in data for one in fields(StageManifest))


def standing(folder: Path, kind: str, settings: dict[str, Any], inputs: Sequence[InputFile]) -> StageManifest | None:
    """Returns the manifest of a folder that need not be made again, or None where it must.

    It stands when it is whole (every file there with its size) and was made by the same settings from the same inputs.
    """
    try:
        manifest = read_manifest(str(folder))
    except DataError:
        return None
    if manifest is None or manifest.kind != kind:
        return None
    if manifest.settings != json.loads(json.dumps(settings)) or _altered(str(folder), manifest, _sizes(folder)):
        return None
    return manifest if unchanged(manifest.inputs, inputs) else None


def _sizes(folder: Path) -> dict[str, int]:
    return {entry.name: entry.stat().st_size for entry in os.scandir(folder) if entry.is_file(follow_symlinks=False)}


def _altered(folder: str, manifest: StageManifest, sizes: dict[str, int]) -> list[Problem]:
    """Returns what is not as the manifest says, by names and sizes."""
    problems = []
    for name, entry in manifest.files.items():
        if sizes.get(name) != entry["size"]:
            got = f"{sizes[name]} bytes" if name in sizes else "no such file"
            problems.append(Problem(f"{folder.rstrip('/')}/{name}", f"{entry['size']} bytes, as {FILE_NAME} says", got,
                                    _AGAIN))  # fmt: skip
    return problems


def data_files(path: str) -> tuple[InputFile, ...]:
    """Returns the data files of a path; those of a stage's folder carry the sha256 that readers hold them to.

    Raises:
        DataError: see readers_input.list_input; files that are missing, altered or not in the folder's manifest.
        NoRowsError: a folder whose manifest says that it has no rows.
    """
    manifest = read_manifest(path) if _may_be_folder(path) else None
    if manifest is None:
        return list_input(path, tuple(READERS))
    if not manifest.files:
        raise NoRowsError(Problem(local_path(path), "rows of data", f"none, as its {FILE_NAME} says"))
    files = list_input(path, tuple(READERS))
    problems = _altered(local_path(path), manifest, {file.name: file.size for file in files})
    problems += [
        Problem(file.path, f"a regular file, as {FILE_NAME} names it", "a link", _AGAIN)
        for file in files if os.path.islink(file.path)
    ]  # fmt: skip
    problems += [
        Problem(
            file.path, f"a file of {FILE_NAME}", "one it does not name", "Remove it, or give it a folder of its own"
        )
        for file in files
        if file.name not in manifest.files
    ]
    if problems:
        raise DataError(problems[:20])
    return tuple(replace(file, sha256=manifest.files[file.name]["sha256"]) for file in files)


def left_out(path: str) -> tuple[str, ...]:
    """Returns sentences about what lies at a path and is not read, and what the stage that made it left out before."""
    manifest = read_manifest(path) if _may_be_folder(path) else None
    before = () if manifest is None else manifest.report.get("left_out", ())
    return (*not_read(path, tuple(READERS)), *before)


def _may_be_folder(path: str) -> bool:
    resolved = local_path(path)
    return os.path.isdir(resolved) or "://" in resolved
