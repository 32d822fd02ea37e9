"""Where a training copy lies, whether it still fits its inputs, and how a new one takes its place.

    <data>/.reagent-lite/<name>-<key>/manifest.json      names the build that counts; replaced by rename
                                      <build>/*.npy      never changed once named
                                              normalized_*.npy   made of these arrays, see normalized.py

Two processes that build the same copy write two builds; the manifest that is renamed last counts.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import time
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from reagent_lite.data.formats.files import InputFile
from reagent_lite.data.formats.input_state import InputState, with_times
from reagent_lite.errors import BundleError, DataError, Problem
from reagent_lite.files import NO_ROOM, free_disk_bytes, sync, user_cache
from reagent_lite.manifest import require_names

SCHEMA_VERSION = 3
MANIFEST = "manifest.json"
FOLDER = ".reagent-lite"
ABANDONED_AFTER_SECONDS = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The description of a copy, as manifest.json holds it.

    Attributes:
        schema_version: of this layout.
        build: folder of the arrays.
        rows: transitions.
        inputs: what it was made from.
        files: {name: {"size": bytes, "sha256": hex}} of the arrays.
        paths: the inputs' paths, as errors name them.
        actions: names of discrete actions, None for parametric.
        state_ids, action_ids, metric_names, counts, notes: as in TrainingCopy.
    """

    schema_version: int
    build: str
    rows: int
    inputs: tuple[InputState, ...]
    files: dict[str, dict[str, Any]]
    paths: tuple[str, ...]
    actions: tuple[str, ...] | None
    state_ids: tuple[int, ...]
    action_ids: tuple[int, ...]
    metric_names: tuple[str, ...]
    counts: dict[str, int]
    notes: tuple[str, ...]


def candidate_folders(
    path: str, files: tuple[InputFile, ...], actions: tuple[str, ...] | None, directory: str | None
) -> list[Path]:
    """Returns the folders a copy may lie in, best first.

    Args:
        path: the input as `local_path` gives it.
        files: its files.
        actions: names of discrete actions, None for parametric: other options, another copy.
        directory: parent folder that the user chose, or None.
    """
    options = json.dumps([SCHEMA_VERSION, actions, path])
    name = re.sub(r"[^A-Za-z0-9._-]", "_", path.rstrip("/").rsplit("/", 1)[-1]).lstrip(".")
    folder = f"{name}-{hashlib.sha256(options.encode()).hexdigest()[:16]}"
    if directory is not None:
        return [Path(directory).expanduser().absolute() / folder]
    cache = user_cache() / folder
    return [cache] if files[0].remote else [Path(path).parent / FOLDER / folder, cache]


def is_writable(folder: Path) -> bool:
    """Whether files can be made in `folder`, or it can be made.

    A folder without any write bit counts as not writable for root too, whom the system would let write.
    """
    while not folder.exists():
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK) and bool(folder.stat().st_mode & 0o222)


def read_manifest(folder: Path) -> Manifest | None:
    """Returns the description of the copy in `folder`, or None where there is none that is whole.

    Whole means: readable, of this schema version, with names of our own, and every array there with its size.
    """
    try:
        document = json.loads((folder / MANIFEST).read_bytes())
        if document["schema_version"] != SCHEMA_VERSION:
            return None
        document["inputs"] = tuple(InputState(**one) for one in document["inputs"])
        for name in ("paths", "state_ids", "action_ids", "metric_names", "notes"):
            document[name] = tuple(document[name])
        document["actions"] = None if document["actions"] is None else tuple(document["actions"])
        manifest = Manifest(**document)
        require_names([manifest.build], str(folder / MANIFEST), r"build-[0-9a-f]{32}")
        require_names(manifest.files, str(folder / MANIFEST), r"\w+\.npy")
        stats = {name: (folder / manifest.build / name).lstat() for name in manifest.files}
        whole = all(stat.S_ISREG(stats[name].st_mode) and stats[name].st_size == one["size"]
                    for name, one in manifest.files.items())  # fmt: skip
        return manifest if whole and not (folder / manifest.build).is_symlink() else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError, BundleError):
        return None


def remember_times(folder: Path, manifest: Manifest, files: tuple[InputFile, ...]) -> None:
    """Notes new modification times of unchanged inputs, so that they are not hashed every time."""
    inputs = with_times(manifest.inputs, files)
    if inputs != manifest.inputs and is_writable(folder):
        replace_manifest(folder, replace(manifest, inputs=inputs))


@contextmanager
def new_build(folder: Path) -> Iterator[Path]:
    """Gives a temporary folder inside `folder` for the arrays of a build; removed when the block fails.

    Raises:
        DataError: the disk is full, or a limit of the system is reached.
    """
    temporary = folder / f".tmp-{uuid.uuid4().hex}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(".tmp-*"):
            if time.time() - left.stat().st_mtime > ABANDONED_AFTER_SECONDS:
                shutil.rmtree(left, ignore_errors=True)
        temporary.mkdir()
        yield temporary
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        written = sum(file.stat().st_size for file in temporary.glob("*"))
        free = free_disk_bytes(folder)
        raise DataError(
            Problem(str(folder), f"room for the training copy, more than {written:,} bytes",
                    f"{error.strerror or error}: {written + free:,} bytes free before, {free:,} now",
                    "Make room, or let data.training_copy_dir name a folder on another disk")
        ) from error  # fmt: skip
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def seal(build: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Returns {name: size and sha256} of the arrays of a build as they are now, and brings them to the disk."""
    ordered = sorted(names)
    with ThreadPoolExecutor(4) as pool:
        return dict(zip(ordered, pool.map(lambda name: _entry(build / name), ordered), strict=True))


def _entry(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256")
        os.fsync(stream.fileno())
        return {"size": stream.tell(), "sha256": digest.hexdigest()}


def publish(folder: Path, temporary: Path, manifest: Manifest) -> None:
    """Makes a sealed build the one that counts, and removes the one that counted before.

    Where another process has published the same arrays in the meantime, as machines do that share the folder, its build
    stays: somebody reads it.
    """
    before = read_manifest(folder)
    if before is not None and _same(before, manifest):
        return
    temporary.rename(folder / manifest.build)
    try:
        replace_manifest(folder, manifest)
    except OSError:
        shutil.rmtree(folder / manifest.build, ignore_errors=True)
        raise
    if before is not None and before.build != manifest.build:
        shutil.rmtree(folder / before.build, ignore_errors=True)


def _same(one: Manifest, other: Manifest) -> bool:
    inputs = [[(file.name, file.sha256) for file in manifest.inputs] for manifest in (one, other)]
    return inputs[0] == inputs[1] and one.files == other.files


def replace_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes manifest.json so that it appears whole."""
    temporary = folder / f".{uuid.uuid4().hex}.json"
    try:
        temporary.write_text(json.dumps(asdict(manifest), indent=1) + "\n")
        sync(temporary)
        temporary.replace(folder / MANIFEST)
        sync(folder)
    finally:
        temporary.unlink(missing_ok=True)
