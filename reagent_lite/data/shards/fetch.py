"""Fetches a shard to this machine's disk and checks every byte against shards.json.

    shared folder or bucket ─► manifest.json, then every other file, hashed and renamed ─► <local_path>

Files that were fetched before are kept if their sha256 is right: after an interruption, or if only some files were
altered. Until all files are there, readers refuse the folder, since its manifest names all of them. One process at a
time fetches to a folder; another one waits, and finds the shard there.
"""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path

from reagent_lite.data.formats.blocks import Show
from reagent_lite.data.shards.partition import KIND
from reagent_lite.data.shards.store import TODO_PLACE, ShardEntry, Store
from reagent_lite.data.stage_folder import StageManifest
from reagent_lite.disk_room import disk_errors
from reagent_lite.errors import DataError, Problem
from reagent_lite.folder_identity import names_in
from reagent_lite.manifest import FILE_NAME, file_entries
from reagent_lite.whole_files import appearing_file, made_folder, sweep, sync

_CHUNK_BYTES = 1 << 18
_THREADS = 4  # buckets answer several requests faster than one
_UNFINISHED = ".*.tmp"
"""Names of unfinished files; readers of a folder leave them out."""
_TODO = "Remove this file and run node 0, or the command without --node_index, to make the shards again"


def fetch_shard(store: Store, shard: ShardEntry, target: Path, progress: Show | None = None) -> tuple[str, ...]:
    """Makes `target` the shard's folder; writes nothing if it is the shard's folder already.

    Args:
        store: the store of the shards.
        shard: the shard to fetch.
        target: a folder on this machine's disk; an older shard there is replaced. A link to a folder stays one.
        progress: called with (bytes fetched, bytes to fetch).

    Returns:
        The names of the files that were missing or altered, and were fetched.

    Raises:
        DataError: a file is missing or altered in the store, the disk is full, or `target` is something else.
    """
    with disk_errors(str(target), "a folder for the shard that can be written", TODO_PLACE):
        target = target.resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.with_name(f".{target.name}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the system releases it when the process ends
            unaltered = _find_unaltered(target, shard)
            _require_shard(target, unaltered)
            with made_folder(target):
                return _fetch(store, shard, target, sorted(shard.files.keys() - unaltered), progress)


def _fetch(store: Store, shard: ShardEntry, target: Path, missing: list[str], progress: Show | None) -> tuple[str, ...]:
    done = 0
    total = sum(shard.files[name]["size"] for name in missing)
    with ThreadPoolExecutor(_THREADS) as pool:
        manifest = [name for name in missing if name == FILE_NAME]
        for names in (manifest, [name for name in missing if name != FILE_NAME]):
            for size in pool.map(lambda name: _fetch_file(store, shard, name, target), names):
                done += size
                if progress is not None:
                    progress(done, total)
    for name in set(names_in(target)) - shard.files.keys():
        if name.startswith("part-"):
            (target / name).unlink()
    sync(target)
    sweep(target.glob(_UNFINISHED))
    return tuple(missing)


def _require_shard(target: Path, unaltered: set[str]) -> None:
    """Raises DataError if `target` is anything but a shard, since its files would be replaced.

    Args:
        target: the folder.
        unaltered: files of the wanted shard that it contains.
    """
    if not target.exists() or (target.is_dir() and all(fnmatch(name, _UNFINISHED) for name in names_in(target))):
        return
    try:
        manifest = StageManifest.read(str(target))
    except DataError:  # altered
        manifest = None
    is_shard = bool(unaltered) if manifest is None else manifest.kind == KIND
    if not is_shard:
        todo = "Give local_path a folder of its own: it is replaced"
        raise DataError(Problem(str(target), "nothing, or a shard that was fetched before", "something else", todo))


def _find_unaltered(folder: Path, shard: ShardEntry) -> set[str]:
    """Returns the names of the shard's files that a folder has unaltered."""
    regular = [name for name in shard.files if (folder / name).is_file() and not (folder / name).is_symlink()]
    entries = file_entries(folder, regular)
    return {name for name, entry in entries.items() if entry.items() <= shard.files[name].items()}


def _fetch_file(store: Store, shard: ShardEntry, name: str, target: Path) -> int:
    """Copies one file, which appears only if its sha256 is right, and returns its size."""
    source = f"{shard.folder}/{name}"
    entry = shard.files[name]
    wanted = f"{entry['size']} bytes with sha256 {entry['sha256']}, as shards.json says"
    digest = hashlib.sha256()
    with appearing_file(target / name) as stream:
        for chunk in _chunks(store, source, wanted):
            digest.update(chunk)
            stream.write(chunk)
        size = stream.tell()
        if digest.hexdigest() != entry["sha256"]:
            got = f"{size} bytes with sha256 {digest.hexdigest()}"
            raise DataError(Problem(store.location(source), wanted, got, _TODO))
    return size


def _chunks(store: Store, name: str, wanted: str) -> Iterator[bytes]:
    with disk_errors(store.location(name), wanted, _TODO), store.open(name) as source:
        while chunk := source.read(_CHUNK_BYTES):
            yield chunk
