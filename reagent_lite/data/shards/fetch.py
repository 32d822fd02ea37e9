"""Fetches a shard to this machine's disk and checks every byte against shards.json.

    shared folder or bucket ─► .<name>.fetching/ file by file, hashed ─► <local_path>

What was fetched before and has its sha256 is kept: after an interruption, and where one file of many was altered. One
process at a time fetches to a place; another waits, and finds the shard there.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from reagent_lite.data.formats.blocks import Show
from reagent_lite.data.shards.dealing import KIND
from reagent_lite.data.shards.store import NO_PLACE, ShardEntry, Store
from reagent_lite.data.stage import StageManifest
from reagent_lite.errors import DataError, Problem
from reagent_lite.files import disk_errors, sync
from reagent_lite.manifest import FILE_NAME, file_entries

_CHUNK_BYTES = 1 << 18
_THREADS = 4  # buckets answer several requests faster than one


def fetch_shard(store: Store, shard: ShardEntry, target: Path, progress: Show | None = None) -> tuple[str, ...]:
    """Makes `target` the shard's folder; writes nothing if it is the shard's folder already.

    Args:
        store: where the shards lie.
        shard: which one.
        target: a folder on this machine's disk; an older shard there is replaced. A link to a folder stays one.
        progress: called with (bytes fetched, bytes to fetch).

    Returns:
        The names of the files that were missing or altered, and were fetched.

    Raises:
        DataError: a file that is missing or altered at the store, a full disk, or something else at `target`.
    """
    with disk_errors(str(target), "a folder for the shard that can be written", NO_PLACE):
        target = target.resolve()  # a link stays; the folder that it names is replaced, on that folder's own disk
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.with_name(f".{target.name}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the system releases it when the process ends
            return _fetch(store, shard, target, progress)


def _fetch(store: Store, shard: ShardEntry, target: Path, progress: Show | None) -> tuple[str, ...]:
    fetching, aside = (target.with_name(f".{target.name}.{end}") for end in ("fetching", "old"))
    shutil.rmtree(aside, ignore_errors=True)
    here = _unaltered(target, shard)
    _require_shard(target, here)
    if here == _names(target) == set(shard.files):
        return ()
    fetching.mkdir(exist_ok=True)
    kept = _unaltered(fetching, shard)
    for name in _names(fetching) - kept:
        (fetching / name).unlink()
    for name in here - kept:
        os.link(target / name, fetching / name)
    missing = sorted(set(shard.files) - here - kept)
    done, total = 0, sum(shard.files[name]["size"] for name in missing)
    with ThreadPoolExecutor(_THREADS) as pool:
        for size in pool.map(lambda name: _fetch_file(store, shard, name, fetching / name), missing):
            done += size
            if progress is not None:
                progress(done, total)
    sync(fetching)
    if target.exists():
        target.rename(aside)
    fetching.rename(target)
    sync(target.parent)
    shutil.rmtree(aside, ignore_errors=True)
    return tuple(missing)


def _require_shard(target: Path, here: set[str]) -> None:
    """Raises DataError where `target` holds anything but a shard: it would be replaced.

    Args:
        target: the place.
        here: files of the wanted shard that it holds.
    """
    names = _names(target)
    if not names and (target.is_dir() or not target.exists()):
        return
    named = FILE_NAME in names and all(name == FILE_NAME or name.startswith("part-") for name in names)
    try:
        manifest = StageManifest.read(str(target))
        ours = named and bool(here) if manifest is None else manifest.kind == KIND
    except DataError:  # an altered manifest
        ours = named
    if not ours:
        todo = "Give local_path a folder of its own: it is replaced"
        raise DataError(Problem(str(target), "nothing, or a shard that was fetched before", "something else", todo))


def _names(folder: Path) -> set[str]:
    return {entry.name for entry in os.scandir(folder)} if folder.is_dir() else set()


def _unaltered(folder: Path, shard: ShardEntry) -> set[str]:
    """Returns the names of the shard's files that a folder holds unaltered."""
    regular = (one for one in map(folder.joinpath, shard.files) if one.is_file() and not one.is_symlink())
    found = file_entries(folder, [one.name for one in regular])
    return {name for name, entry in found.items() if entry.items() <= shard.files[name].items()}


def _fetch_file(store: Store, shard: ShardEntry, name: str, target: Path) -> int:
    """Copies one file, gives it its name when its sha256 is right, and returns its size."""
    digest, temporary = hashlib.sha256(), target.with_name(f"{name}.part")
    with temporary.open("wb") as stream:
        for chunk in _chunks(store, shard, name):
            digest.update(chunk)
            stream.write(chunk)
        size = stream.tell()
        stream.flush()
        os.fsync(stream.fileno())
    if digest.hexdigest() != shard.files[name]["sha256"]:
        temporary.unlink()
        raise _altered(store, shard, name, f"{size} bytes with sha256 {digest.hexdigest()}")
    temporary.rename(target)
    return size


def _chunks(store: Store, shard: ShardEntry, name: str) -> Iterator[bytes]:
    try:
        with store.open(f"{shard.folder}/{name}") as source:
            while chunk := source.read(_CHUNK_BYTES):
                yield chunk
    except OSError as error:
        raise _altered(store, shard, name, error.strerror or str(error)) from error


def _altered(store: Store, shard: ShardEntry, name: str, got: str) -> DataError:
    where, entry = f"{store.where}/{shard.folder}/{name}", shard.files[name]
    wanted = f"{entry['size']} bytes with sha256 {entry['sha256']}, as shards.json says"
    todo = "Remove this file and run node 0, or the command without --node_index, to make the shards again"
    return DataError(Problem(where, wanted, got, todo))
