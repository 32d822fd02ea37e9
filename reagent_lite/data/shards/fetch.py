"""A shard brought to this machine's disk, every byte held to what shards.json says of it.

    shared folder or bucket ─► .<name>.fetching/ file by file, hashed ─► <local_path>

What was fetched before and has its sha256 is kept: after an interruption, and where one file of many was altered. One
process at a time fetches to a place; another waits, and finds the shard there.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reagent_lite.data.formats.stage import read_manifest
from reagent_lite.data.shards.dealing import KIND, Steps
from reagent_lite.data.shards.store import ShardEntry, Store, told
from reagent_lite.errors import DataError, Problem
from reagent_lite.files import sync
from reagent_lite.manifest import FILE_NAME

_CHUNK_BYTES = 1 << 18
_THREADS = 4  # buckets answer several requests faster than one


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """What a fetch took: names of the files that were not there, and of those that were there and altered.

    Attributes:
        new: not there, or another shard's.
        altered: files of this shard that had other bytes.
        replaced: whether another shard, or this one as it was made before, stood there.
    """

    new: tuple[str, ...]
    altered: tuple[str, ...]
    replaced: bool = False


def fetch_shard(
    store: Store, shard: ShardEntry, target: Path, progress: Callable[[int, int], None] | None = None
) -> Fetched:
    """Makes `target` the shard's folder; where it is already, nothing is written.

    Args:
        store: where the shards lie.
        shard: which one.
        target: a folder on this machine's disk; an older shard there is replaced. A link to a folder stays one.
        progress: called with (bytes fetched, bytes to fetch).

    Raises:
        DataError: a file that is missing or altered at the store, a disk that is full, or other things at `target`.
    """
    with told(str(target), "a folder for the shard that can be written"):
        target = target.resolve()  # the folder that a link names is replaced, on its own disk, and not the link
        with _alone(target):
            return _fetch(store, shard, target, progress)


@contextmanager
def _alone(target: Path) -> Iterator[None]:
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_name(f".{target.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the system ends it with the process
        yield


def _fetch(store: Store, shard: ShardEntry, target: Path, progress: Callable[[int, int], None] | None) -> Fetched:
    fetching, aside = (target.with_name(f".{target.name}.{end}") for end in ("fetching", "old"))
    shutil.rmtree(aside, ignore_errors=True)
    here = _right(target, shard)
    _require_ours(target, some_right=bool(here))
    wrong = tuple(sorted(name for name in shard.files if name not in here and (target / name).exists()))
    replaced = bool(wrong) and (not here or _is_another(target, here))
    altered = () if replaced else wrong
    if len(here) == len(shard.files) and _names(target) == set(shard.files):
        return Fetched(new=(), altered=())
    fetching.mkdir(exist_ok=True)
    kept = _right(fetching, shard)
    for name in _names(fetching) - kept:
        (fetching / name).unlink()
    for name in here - kept:
        os.link(target / name, fetching / name)
    missing = sorted(set(shard.files) - here - kept)
    steps = Steps(progress, sum(shard.files[name]["size"] for name in missing))
    with ThreadPoolExecutor(_THREADS) as pool:
        for done in [pool.submit(_take, store, shard, name, fetching / name, steps) for name in missing]:
            done.result()
    sync(fetching)
    if target.exists():
        target.rename(aside)
    fetching.rename(target)
    sync(target.parent)
    shutil.rmtree(aside, ignore_errors=True)
    return Fetched(new=tuple(name for name in missing if name not in altered), altered=altered, replaced=replaced)


def _require_ours(target: Path, *, some_right: bool) -> None:
    """Refuses a folder that holds anything but a shard, which would be replaced."""
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    names = _names(target)
    like_ours = FILE_NAME in names and all(name == FILE_NAME or name.startswith("part-") for name in names)
    try:
        manifest = read_manifest(str(target)) if target.is_dir() else None
        ours = manifest.kind == KIND if manifest is not None else like_ours and some_right
    except DataError:  # a shard's, altered
        ours = like_ours
    if not ours:
        raise DataError(
            Problem(str(target), "nothing, or a shard that was fetched before", "something else",
                    "Give local_path a folder of its own: it is replaced")
        )  # fmt: skip


def _is_another(target: Path, here: set[str]) -> bool:
    """Whether a folder holds another shard, or this one as it was made before: its own manifest is whole."""
    try:
        return FILE_NAME not in here and read_manifest(str(target)) is not None
    except DataError:
        return False


def _names(folder: Path) -> set[str]:
    return {entry.name for entry in os.scandir(folder)} if folder.is_dir() else set()


def _right(folder: Path, shard: ShardEntry) -> set[str]:
    """Returns the names of the files that are as they should be."""
    names = sorted(_names(folder) & set(shard.files))
    with ThreadPoolExecutor(_THREADS) as pool:
        return {
            name for name, right in zip(names, pool.map(lambda one: _is_right(folder, shard, one), names), strict=True)
            if right
        }  # fmt: skip


def _is_right(folder: Path, shard: ShardEntry, name: str) -> bool:
    with (folder / name).open("rb") as stream:
        if os.fstat(stream.fileno()).st_size != shard.files[name]["size"]:
            return False
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    return bool(found == shard.files[name]["sha256"])


def _take(store: Store, shard: ShardEntry, name: str, target: Path, steps: Steps) -> None:
    """Copies one file, and gives it its name when its sha256 is right."""
    expected: dict[str, Any] = shard.files[name]
    where = f"{store.where}/{shard.folder}/{name}"
    digest, temporary = hashlib.sha256(), target.with_name(f"{name}.part")
    try:
        source = store.open(f"{shard.folder}/{name}")
    except OSError as error:
        raise _altered(where, expected, error.strerror or str(error)) from error
    with source, temporary.open("wb") as stream:
        while chunk := _chunk(source, where):
            digest.update(chunk)
            stream.write(chunk)
            steps(len(chunk))
        stream.flush()
        os.fsync(stream.fileno())
    if digest.hexdigest() != expected["sha256"]:
        got = f"{temporary.stat().st_size} bytes with sha256 {digest.hexdigest()}"
        temporary.unlink()
        raise _altered(where, expected, got)
    temporary.rename(target)


def _chunk(source: Any, where: str) -> bytes:
    try:
        chunk: bytes = source.read(_CHUNK_BYTES)
    except OSError as error:
        raise DataError(Problem(where, "a file that can be read", error.strerror or str(error))) from error
    return chunk


def _altered(where: str, expected: dict[str, Any], got: str) -> DataError:
    wanted = f"{expected['size']} bytes with sha256 {expected['sha256']}, as shards.json says"
    todo = "Remove shards.json and run node 0, or the command without --node_index, to make the shards again"
    return DataError(Problem(where, wanted, got, todo))
