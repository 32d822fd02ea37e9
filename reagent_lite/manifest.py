"""Manifests of folders that are written once: files with size and SHA-256, and a SHA-256 of the manifest itself.

    document ─► canonical JSON ─► SHA-256 of it, added as "sha256" ─► canonical JSON in manifest.json

Exported models, checkpoints, folders of stages, training copies and shards have one, with different keys besides
`files`. Bytes that are not in canonical form are refused, so that no byte of manifest.json can change unnoticed. The
seal protects against damage and mix-ups, not against deliberate changes: it is no signature. Standard library only.
"""

import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, Final

from reagent_lite.errors import BundleError, DataError, Problem, raise_any

FILE_NAME: Final = "manifest.json"
SCHEMA_VERSION: Final = 1
_SEAL: Final = "sha256"
_NAME: Final = r"[A-Za-z0-9_][A-Za-z0-9._-]*"


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderKind:
    """Texts of errors for one kind of folder.

    Attributes:
        name: name of such a folder.
        damaged: advice for a damaged folder.
        outdated: advice for a folder of another schema version.
        error: class of the errors.
    """

    name: str
    damaged: str
    outdated: str
    error: type[BundleError | DataError]


BUNDLE: Final = FolderKind(
    name="the folder of an exported model",
    damaged="Copy the original bundle again, or export it again",
    outdated="Load the bundle with the release of reagent-lite that its manifest names under versions",
    error=BundleError,
)
CHECKPOINT: Final = FolderKind(
    name="the folder of a checkpoint",
    damaged="Copy the original checkpoint again, or use another one",
    outdated="Continue with the release of reagent-lite that wrote the checkpoint, or use another checkpoint",
    error=BundleError,
)
POLICY: Final = FolderKind(
    name="the folder of a published policy",
    damaged="Remove the folder; the learner will publish another policy",
    outdated="Use the same release of reagent-lite for collectors and learners",
    error=BundleError,
)
STAGE: Final = FolderKind(
    name="the folder of a stage",
    damaged="Copy the folder again, or remove it; its stage will write it again",
    outdated="Remove the folder; its stage will write it again",
    error=DataError,
)
TRAINING_COPY: Final = FolderKind(
    name="a whole training copy",
    damaged="Remove the folder; the copy will be built again",
    outdated="Remove the folder; the copy will be built again",
    error=DataError,
)


def canonical(document: Mapping[str, Any]) -> bytes:
    """Returns the canonical text of a JSON object: sorted keys, two spaces, ASCII, a final newline.

    Raises:
        ValueError: a value is NaN or infinite, which JSON does not have.
    """
    return json.dumps(document, indent=2, sort_keys=True, allow_nan=False).encode() + b"\n"


def seal(document: Mapping[str, Any]) -> bytes:
    """Returns the canonical bytes of the document with its own hash added."""
    return canonical({**document, _SEAL: hashlib.sha256(canonical(document)).hexdigest()})


def open_sealed(data: bytes, where: str, kind: FolderKind) -> dict[str, Any]:
    """Returns the document of sealed bytes, without its seal.

    Raises:
        BundleError, DataError: the bytes are not a JSON object, not canonical, altered, or of another schema version.
    """
    try:
        document: dict[str, Any] = json.loads(data)
        is_canonical = isinstance(document, dict) and canonical(document) == data
    except (ValueError, RecursionError) as error:
        raise kind.error(Problem(where, "JSON", str(error), kind.damaged)) from error
    if not is_canonical:
        raise kind.error(Problem(where, "a JSON object in canonical form", "other bytes", kind.damaged))
    seal = document.pop(_SEAL, None)
    digest = hashlib.sha256(canonical(document)).hexdigest()
    if seal != digest:
        raise kind.error(Problem(where, f"the manifest's own SHA-256 {seal}", digest, kind.damaged))
    version = document.get("schema_version")
    if version != SCHEMA_VERSION:
        raise kind.error(Problem(where, f"schema version {SCHEMA_VERSION}", repr(version), kind.outdated))
    return document


def require_files(files: object, where: str, kind: FolderKind) -> dict[str, dict[str, Any]]:
    """Checks and returns `files` of a manifest: {name: {size, sha256, ...}} of files next to it.

    Raises:
        BundleError, DataError: `files` has another form, or a name could lead out of the folder.
    """
    if not isinstance(files, dict) or not all(
        isinstance(entry, dict)
        and isinstance(entry.get("sha256"), str)
        and type(entry.get("size")) is type(entry.get("rows", 0)) is int
        for entry in files.values()
    ):
        raise kind.error(Problem(f"{where}, files", "{name: {size, sha256}}", f"{files!r:.200}", kind.damaged))
    expected = f"names of files in its own folder ({_NAME})"
    wrong = [name for name in files if not re.fullmatch(_NAME, name)]
    raise_any([Problem(where, expected, repr(name)[:200], kind.damaged) for name in wrong], kind.error)
    return files


def seal_folder(
    folder: Path, document: Mapping[str, Any], files: Mapping[str, Mapping[str, Any]] | None = None
) -> dict[str, dict[str, Any]]:
    """Hashes the files of a new folder, syncs them, and writes manifest.json.

    Args:
        folder: the folder, which contains only its files.
        document: keys of the manifest besides `files`.
        files: {name: keys of its entry}; size and sha256 are added unless the entry has both. None: all files.

    Returns:
        The entries of all files.
    """
    given = {path.name: {} for path in folder.iterdir()} if files is None else files
    missing = [name for name, entry in given.items() if not entry.keys() >= {"size", "sha256"}]
    hashed = file_entries(folder, missing)
    entries = {name: {**entry, **hashed.get(name, {})} for name, entry in given.items()}
    data = seal({**document, "schema_version": SCHEMA_VERSION, "files": entries})
    (folder / FILE_NAME).write_bytes(data)
    return entries


def read_document(folder: Path, kind: FolderKind) -> dict[str, Any]:
    """Returns the document of a folder's manifest.json.

    Raises:
        OSError: it cannot be read, or is not a regular file.
        BundleError, DataError: see `open_sealed` and `require_files`.
    """
    with open_regular(folder / FILE_NAME) as stream:
        document = open_sealed(stream.read(), str(folder / FILE_NAME), kind)
    require_files(document.get("files"), str(folder / FILE_NAME), kind)
    return document


def open_regular(file: Path) -> BufferedReader:
    """Opens a file that a manifest names.

    Raises:
        OSError: the file cannot be read, or is a link, which may lead anywhere, or a FIFO or device, which may never
            end.
    """
    if not stat.S_ISREG(os.lstat(file).st_mode):
        raise OSError(errno.EINVAL, "not a regular file, but a link, folder, FIFO or device", str(file))
    return open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")


def file_entries(folder: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Returns {name: {size in bytes, sha256}} of files in a folder, and syncs them."""
    ordered = sorted(names)
    with ThreadPoolExecutor(4) as pool:
        return dict(zip(ordered, pool.map(lambda name: _entry_of(folder / name, sync=True), ordered), strict=True))


def verify_folder(
    folder: Path, kind: FolderKind, keep: Collection[str] = (), *, if_present: Collection[str] = ()
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Compares every file of a folder with its manifest; the returned bytes are those that were hashed.

    Args:
        folder: the folder of manifest.json.
        kind: the kind of the folder.
        keep: names of files to return.
        if_present: names of further files to return, which the folder may lack.

    Returns:
        The manifest's document, and {name: bytes} of the files in `keep` and `if_present`.

    Raises:
        BundleError, DataError: the manifest is altered, or files are missing, unlisted or altered; lists all of them.
    """
    try:
        manifest = read_document(folder, kind)
        present = {path.name for path in folder.iterdir()} - {FILE_NAME}
    except OSError as error:
        below = ", ".join(str(path.parent) for path in sorted(folder.glob(f"*/{FILE_NAME}")))
        advice = f"Name the folder that contains {FILE_NAME}{below and f': {below}'}"
        raise kind.error(Problem(str(folder), kind.name, f"{FILE_NAME}: {error.strerror or error}", advice)) from error
    entries = manifest["files"]
    kept: dict[str, bytes] = {}

    def problem(name: str, expected: str, got: str) -> Problem:
        return Problem(str(folder / name), expected, got, kind.damaged)

    problems = [problem(name, "a file in the manifest", "an unlisted file") for name in present - entries.keys()]
    for name, entry in entries.items():
        try:
            if name in keep or name in if_present:
                with open_regular(folder / name) as stream:
                    kept[name] = stream.read()
                actual = {"size": len(kept[name]), "sha256": hashlib.sha256(kept[name]).hexdigest()}
            else:
                actual = _entry_of(folder / name)
        except OSError as error:
            problems.append(problem(name, _describe(entry), str(error)))
            continue
        if _describe(actual) != _describe(entry):
            problems.append(problem(name, _describe(entry), _describe(actual)))
    problems += [problem(name, "a file in the manifest", "no such file") for name in set(keep) - entries.keys()]
    raise_any(problems, kind.error)
    return manifest, kept


def _entry_of(file: Path, *, sync: bool = False) -> dict[str, Any]:
    """Returns the entry of a file that may be larger than memory."""
    with open_regular(file) as stream:
        digest = hashlib.file_digest(stream, "sha256")
        if sync:
            os.fsync(stream.fileno())
        return {"size": stream.tell(), "sha256": digest.hexdigest()}


def _describe(entry: dict[str, Any]) -> str:
    return f"{entry['size']} bytes with SHA-256 {entry['sha256']}"
