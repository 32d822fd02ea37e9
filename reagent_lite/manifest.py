"""The manifest of a bundle: every file with its size and SHA-256, sealed by a SHA-256 of its own.

    document ─► canonical JSON ─► SHA-256 of it, added as "sha256" ─► canonical JSON on disk

Bytes that are not the canonical form of what they say are refused, so that no byte of manifest.json can change unseen
either. The seal is against damage and mix-ups, not against an author with intent: it is no signature.
Standard library only.
"""

import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Collection, Iterable
from io import BufferedReader
from pathlib import Path
from typing import Any, Final

from reagent_lite.errors import BundleError, Problem

FILE_NAME: Final = "manifest.json"
SCHEMA_VERSION: Final = 1
_SEAL: Final = "sha256"
_MOST_PROBLEMS: Final = 20
_COPY_AGAIN: Final = "Copy the bundle again from where it was written, or export it again"


def canonical(document: dict[str, Any]) -> bytes:
    """Returns the one serialisation of a JSON object: sorted keys, two spaces, ASCII, a final newline.

    Raises:
        ValueError: for NaN and infinity, which JSON does not have.
    """
    return json.dumps(document, indent=2, sort_keys=True, allow_nan=False).encode() + b"\n"


def sealed(document: dict[str, Any]) -> bytes:
    """Returns the canonical bytes of the document with its own hash added."""
    return canonical({**document, _SEAL: hashlib.sha256(canonical(document)).hexdigest()})


def opened(data: bytes, where: str) -> dict[str, Any]:
    """Returns the document of sealed bytes, without its seal.

    Raises:
        BundleError: when the bytes are no JSON object, not canonical, altered, or of another schema version.
    """
    try:
        document: dict[str, Any] = json.loads(data)
        faithful = isinstance(document, dict) and canonical(document) == data
    except (ValueError, RecursionError) as error:
        raise BundleError(Problem(where, "JSON", str(error), _COPY_AGAIN)) from error
    if not faithful:
        raise BundleError(Problem(where, "a JSON object in canonical form", "other bytes", _COPY_AGAIN))
    seal = document.pop(_SEAL, None)
    digest = hashlib.sha256(canonical(document)).hexdigest()
    if seal != digest:
        raise BundleError(Problem(where, f"the manifest's own SHA-256 {seal}", digest, _COPY_AGAIN))
    version = document.get("schema_version")
    if version != SCHEMA_VERSION:
        advice = "Load the bundle with the release of reagent-lite that its manifest names under versions"
        raise BundleError(Problem(where, f"schema version {SCHEMA_VERSION}", repr(version), advice))
    return document


def require_names(names: Iterable[Any], where: str, pattern: str = r"[A-Za-z0-9_][A-Za-z0-9._-]*") -> None:
    """Checks names that a manifest gives to files and folders beside it, before they become paths.

    Args:
        names: as they were read.
        where: the manifest, for the error.
        pattern: that each matches as a whole; none may lead out of the folder.

    Raises:
        BundleError: for those that do not.
    """
    wrong = [name for name in names if not isinstance(name, str) or not re.fullmatch(pattern, name)]
    if wrong:
        problems = [Problem(where, f"names of files in its own folder ({pattern})", repr(name)[:200]) for name in wrong]
        raise BundleError(problems[:_MOST_PROBLEMS])


def open_regular(file: Path) -> BufferedReader:
    """Opens a file that a manifest names.

    Raises:
        OSError: it cannot be read; it is a link, which may lead anywhere, or a FIFO or device, which may never end.
    """
    if not stat.S_ISREG(os.lstat(file).st_mode):
        raise OSError(errno.EINVAL, "no regular file, but a link, a folder, a FIFO or a device", str(file))
    return open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")


def file_entries(folder: Path) -> dict[str, dict[str, Any]]:
    """Returns {name: {size in bytes, sha256}} of every file of the folder."""
    return {path.name: _entry_of(path) for path in sorted(folder.iterdir())}


def verified(folder: Path, keep: Collection[str]) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Reads a bundle's manifest and compares every file with it; what is kept is what was hashed.

    Args:
        folder: the bundle.
        keep: names of the files whose bytes are wanted.

    Returns:
        The manifest, and the bytes of the files in `keep`.

    Raises:
        BundleError: for an altered manifest, and for every file that is missing, unlisted or altered.
    """
    try:
        with open_regular(folder / FILE_NAME) as stream:
            manifest = opened(stream.read(), str(folder / FILE_NAME))
        present = {path.name for path in folder.iterdir()} - {FILE_NAME}
    except OSError as error:
        advice = "Give the folder that holds manifest.json"
        raise BundleError(Problem(str(folder), "the folder of an exported model", str(error), advice)) from error
    entries = _entries_of(manifest, str(folder / FILE_NAME))
    require_names(entries, str(folder / FILE_NAME))
    kept: dict[str, bytes] = {}
    problems = [_problem(folder, name, "no such file in the manifest", "a file") for name in present - entries.keys()]
    for name, entry in entries.items():
        try:
            if name in keep:
                with open_regular(folder / name) as stream:
                    kept[name] = stream.read()
                found = _entry(kept[name])
            else:
                found = _entry_of(folder / name)
        except OSError as error:
            problems.append(_problem(folder, name, _describe(entry), str(error)))
            continue
        if found != entry:
            problems.append(_problem(folder, name, _describe(entry), _describe(found)))
    problems += [_problem(folder, name, "a file", "none in the manifest") for name in set(keep) - entries.keys()]
    if problems:
        raise BundleError(problems[:_MOST_PROBLEMS])
    return manifest, kept


def _entries_of(manifest: dict[str, Any], where: str) -> dict[str, dict[str, Any]]:
    entries = manifest.get("files")
    if not isinstance(entries, dict) or not all(
        isinstance(entry, dict) and entry.keys() == {"size", "sha256"} for entry in entries.values()
    ):
        raise BundleError(Problem(f"{where}, files", "{name: {size, sha256}}", f"{entries!r:.200}", _COPY_AGAIN))
    return entries


def _entry(data: bytes) -> dict[str, Any]:
    return {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _entry_of(file: Path) -> dict[str, Any]:
    """Returns the entry of a file that may be larger than memory."""
    with open_regular(file) as stream:
        digest = hashlib.file_digest(stream, "sha256")
        return {"size": stream.tell(), "sha256": digest.hexdigest()}


def _describe(entry: dict[str, Any]) -> str:
    return f"{entry['size']} bytes with SHA-256 {entry['sha256']}"


def _problem(folder: Path, name: str, expected: str, got: str) -> Problem:
    return Problem(str(folder / name), expected, got, _COPY_AGAIN)
