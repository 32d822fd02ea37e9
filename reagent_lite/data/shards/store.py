"""Where shards lie for all machines: a folder they share, or a bucket.

    <shards_path>/shards.json                       names the generation that counts; replaced last
                  <generation>/shard-00000/         a stage's folder: manifest.json and Parquet files
                               shard-00001/

A generation is never changed, so whoever reads what shards.json named never sees a mixture. The generation before stays
for those who read it still; older ones are removed. Readers hold every byte to shards.json.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import socket
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from reagent_lite.data.formats.files import POINTER, local_path
from reagent_lite.data.formats.input_state import InputState
from reagent_lite.data.formats.stage import StageManifest
from reagent_lite.data.shards.dealing import folder_name
from reagent_lite.errors import BundleError, DataError, Problem
from reagent_lite.files import sync, write_whole
from reagent_lite.manifest import FILE_NAME, SCHEMA_VERSION, open_regular, opened, require_names, sealed

_MAKING = ".making-"
_ABANDONED_AFTER_SECONDS = 86_400.0
_GENERATION = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardEntry:
    """One shard: its folder below shards_path, its rows, and size and sha256 of each of its files."""

    folder: str
    rows: int
    files: dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pointer:
    """What shards.json says.

    Attributes:
        generation: folder of the shards.
        settings: layout, num_nodes and seed.
        inputs: what they were made from.
        shards: in their order.
    """

    generation: str
    settings: dict[str, Any]
    inputs: tuple[InputState, ...]
    shards: tuple[ShardEntry, ...]


class Store(Protocol):
    """A place for files that all machines see; names have "/" in them."""

    @property
    def where(self) -> str:
        """The place, as errors name it."""
        ...

    def read(self, name: str) -> bytes:
        """Returns a small file; FileNotFoundError where there is none."""
        ...

    def open(self, name: str) -> IO[bytes]:
        """Opens a file for reading; FileNotFoundError where there is none."""
        ...

    def sizes(self, folder: str) -> dict[str, int]:
        """Returns the size of each file of a folder; nothing where there is no such folder."""
        ...

    def building(self) -> AbstractContextManager[Path]:
        """Gives an empty folder to build a generation in; gone afterwards."""
        ...

    def publish(self, built: Path, generation: str) -> None:
        """Gives a built folder its name, or copies it there."""
        ...

    def write(self, name: str, data: bytes) -> None:
        """Replaces a small file whole."""
        ...

    def generations(self) -> list[str]:
        """Returns the names of all generations."""
        ...

    def remove(self, generation: str) -> None:
        """Removes a generation."""
        ...


class FolderStore:
    """A local folder, or one of a network file system."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @property
    def where(self) -> str:
        """The folder."""
        return str(self._root)

    def read(self, name: str) -> bytes:
        """Returns a file's bytes."""
        with self.open(name) as stream:
            return stream.read()

    def open(self, name: str) -> IO[bytes]:
        """Opens a file."""
        return open_regular(self._root / name)

    def sizes(self, folder: str) -> dict[str, int]:
        """Returns {name: bytes}."""
        try:
            return _sizes(self._root / folder)
        except FileNotFoundError:
            return {}

    @contextmanager
    def building(self) -> Iterator[Path]:
        """Gives a folder on the same disk, so that a rename publishes it."""
        self._root.mkdir(parents=True, exist_ok=True)
        self._sweep()
        folder = self._root / f"{_MAKING}{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _sweep(self) -> None:
        """Removes what killed processes left: of this host at once, of others after a day."""
        for left in self._root.glob(f"{_MAKING}*"):
            host, _, pid = left.name.removeprefix(_MAKING).rsplit("-", 1)[0].rpartition("-")
            dead = host == socket.gethostname() and pid.isdigit() and not _lives(int(pid))
            if dead or time.time() - left.stat().st_mtime > _ABANDONED_AFTER_SECONDS:
                shutil.rmtree(left, ignore_errors=True)

    def publish(self, built: Path, generation: str) -> None:
        """Renames; where the same generation stands whole already, it stays."""
        target = self._root / generation
        for folder in sorted(built.iterdir()):
            sync(folder)
        sync(built)
        if target.exists():
            if all(self.sizes(f"{generation}/{one.name}") == _sizes(one) for one in built.iterdir()):
                return
            target.rename(built.with_name(f"{built.name}.old"))
        built.rename(target)
        sync(self._root)
        shutil.rmtree(built.with_name(f"{built.name}.old"), ignore_errors=True)

    def write(self, name: str, data: bytes) -> None:
        """Replaces by rename."""
        write_whole(self._root / name, data)

    def generations(self) -> list[str]:
        """Returns folders named as generations are."""
        return [entry.name for entry in os.scandir(self._root) if entry.is_dir() and _GENERATION.fullmatch(entry.name)]

    def remove(self, generation: str) -> None:
        """Removes the folder."""
        shutil.rmtree(self._root / generation, ignore_errors=True)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _sizes(folder: Path) -> dict[str, int]:
    return {entry.name: entry.stat(follow_symlinks=False).st_size for entry in os.scandir(folder)}


class BucketStore:
    """A bucket, through fsspec; there is no rename, so a generation is built on this machine's disk."""

    def __init__(self, url: str) -> None:
        import fsspec  # only remote paths pay for its import

        self._url = url.rstrip("/")
        self._files, self._root = fsspec.core.url_to_fs(self._url)
        self._files.invalidate_cache()

    @property
    def where(self) -> str:
        """The URL."""
        return self._url

    def read(self, name: str) -> bytes:
        """Returns an object."""
        self._files.invalidate_cache()
        data: bytes = self._files.cat_file(f"{self._root}/{name}")
        return data

    def open(self, name: str) -> IO[bytes]:
        """Opens an object."""
        stream: IO[bytes] = self._files.open(f"{self._root}/{name}", "rb")
        return stream

    def sizes(self, folder: str) -> dict[str, int]:
        """Returns {name: bytes}."""
        try:
            entries = self._files.ls(f"{self._root}/{folder}", detail=True)
        except FileNotFoundError:
            return {}
        return {str(one["name"]).rstrip("/").rsplit("/", 1)[-1]: int(one["size"] or 0) for one in entries}

    @contextmanager
    def building(self) -> Iterator[Path]:
        """Gives a folder for temporary files (TMPDIR)."""
        with tempfile.TemporaryDirectory(prefix="reagent-lite-shards-") as folder:
            yield Path(folder)

    def publish(self, built: Path, generation: str) -> None:
        """Uploads data first, manifests last."""
        files = sorted(built.glob("*/*"), key=lambda file: (file.name == FILE_NAME, file))
        for file in files:
            target = f"{self._root}/{generation}/{file.parent.name}"
            self._files.makedirs(target, exist_ok=True)
            self._files.put_file(str(file), f"{target}/{file.name}")

    def write(self, name: str, data: bytes) -> None:
        """Replaces an object, which buckets do whole."""
        self._files.pipe_file(f"{self._root}/{name}", data)

    def generations(self) -> list[str]:
        """Returns prefixes named as generations are."""
        return [name for name in self.sizes("") if _GENERATION.fullmatch(name)]

    def remove(self, generation: str) -> None:
        """Removes the objects."""
        self._files.rm(f"{self._root}/{generation}", recursive=True)


def open_store(path: str) -> Store:
    """Returns the place that a path or URL names; nothing is made there yet.

    Raises:
        DataError: a protocol that is not allowed, or whose package is not installed.
    """
    resolved = local_path(path)
    if "://" not in resolved:
        return FolderStore(Path(resolved))
    try:
        return BucketStore(resolved)
    except (ImportError, ValueError, OSError) as error:
        raise DataError(Problem(path, "a reachable bucket", f"{type(error).__name__}: {error}")) from error


@contextmanager
def told(where: str, expected: str) -> Iterator[None]:
    """Turns errors of disks and networks into one that says what was to be done."""
    try:
        yield
    except OSError as error:
        got = f"{error.strerror or error}" + (f" ({error.filename})" if error.filename else "")
        raise DataError(Problem(where, expected, got, "Make room or give another place, and run again")) from error


def read_pointer(store: Store) -> Pointer | None:
    """Returns what shards.json says, or None where there is none.

    Raises:
        DataError: it was altered, or cannot be read.
    """
    where = f"{store.where}/{POINTER}"
    with told(where, "a file that can be read"):
        try:
            data = store.read(POINTER)
        except FileNotFoundError:
            return None
    try:
        document = opened(data, where)
        document.pop("schema_version")
        document["inputs"] = tuple(InputState(**one) for one in document["inputs"])
        document["shards"] = tuple(ShardEntry(**one) for one in document["shards"])
        pointer = Pointer(**document)
        require_names([pointer.generation], where, _GENERATION.pattern)
        for number, one in enumerate(pointer.shards):
            require_names([one.folder], where, f"{pointer.generation}/{folder_name(number)}")
            require_names(one.files, where)
        return pointer
    except (BundleError, TypeError, KeyError) as error:
        got = error.problems[0].got if isinstance(error, BundleError) else f"other keys: {error}"
        todo = "Remove it and run node 0, or the command without --node_index, again"
        raise DataError(Problem(where, f"the {POINTER} of this version", got, todo)) from error


def publish(store: Store, built: Path, manifests: Sequence[StageManifest], settings: dict[str, Any]) -> Pointer:
    """Makes built shards the ones that count.

    Args:
        store: where to.
        built: a folder with one folder per shard, on the disk.
        manifests: of the shards.
        settings: of all of them.
    """
    before = read_pointer(store)
    own = [_entry(built / folder_name(number) / FILE_NAME) for number in range(len(manifests))]
    generation = hashlib.sha256("".join(one["sha256"] for one in own).encode()).hexdigest()[:16]
    entries = tuple(
        ShardEntry(
            folder=f"{generation}/{folder_name(number)}",
            rows=manifest.rows,
            files={**manifest.files, FILE_NAME: own[number]},
        )
        for number, manifest in enumerate(manifests)
    )
    pointer = Pointer(generation=generation, settings=settings, inputs=manifests[0].inputs, shards=entries)
    store.publish(built, generation)
    document = {"schema_version": SCHEMA_VERSION, **asdict(pointer)}
    store.write(POINTER, sealed(json.loads(json.dumps(document))))
    kept = {generation, before.generation if before else generation}
    for other in store.generations():
        if other not in kept:
            store.remove(other)
    return pointer


def _entry(file: Path) -> dict[str, Any]:
    data = file.read_bytes()
    return {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def is_whole(store: Store, pointer: Pointer) -> bool:
    """Whether every file of every shard is there with its size."""
    return all(
        store.sizes(shard.folder) == {name: one["size"] for name, one in shard.files.items()}
        for shard in pointer.shards
    )
