"""Where shards lie for all machines: a folder they share, or a bucket.

    <shards_path>/shards.json                       names the generation that counts; replaced last
                  <generation>/shard-00000/         a stage's folder: manifest.json and Parquet files
                               shard-00001/

A generation never changes, so a reader of the one that shards.json named never sees a mixture. The previous generation
stays for processes that still read it; older ones are removed. Readers check every byte against shards.json.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import fsspec

from reagent_lite.data.formats.files import POINTER, local_path
from reagent_lite.data.shards.dealing import folder_name
from reagent_lite.data.stage import FIELDS, InputState, StageManifest, typed
from reagent_lite.errors import DataError, Problem
from reagent_lite.files import disk_errors, sync, work_folder, write_whole
from reagent_lite.manifest import (
    FILE_NAME,
    SCHEMA_VERSION,
    SHARDS,
    file_entries,
    open_regular,
    opened,
    require_files,
    require_names,
    sealed,
)

NO_PLACE = "Make room or give another place, and run again"
_GENERATION = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardEntry:
    """One shard: its folder below shards_path, its rows, and size and sha256 of each of its files."""

    folder: str
    rows: int
    files: dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pointer:
    """The content of shards.json.

    Attributes:
        generation: folder of the shards.
        settings: layout, num_nodes and seed.
        inputs: what they were made from.
        shards: in their order.
    """

    __pydantic_config__ = FIELDS

    generation: str
    settings: dict[str, Any]
    inputs: tuple[InputState, ...]
    shards: tuple[ShardEntry, ...]


class Store:
    """A place for files that all machines see: a folder, or a bucket through fsspec; names have "/" in them.

    A generation for a folder is built on the same disk and renamed; one for a bucket, which has no rename, is built on
    this machine's disk and uploaded. Readers find it only after shards.json names it.

    Attributes:
        where: the folder or URL, as errors name it.
    """

    def __init__(self, path: str) -> None:
        """Opens a place; nothing is made there yet.

        Raises:
            DataError: a protocol that is not allowed, or whose package is not installed.
        """
        self.where = local_path(path).rstrip("/")
        self._folder = None if "://" in self.where else Path(self.where)
        try:
            self._files, self._root = fsspec.core.url_to_fs(self.where)
        except (ImportError, ValueError, OSError) as error:
            raise DataError(Problem(path, "a reachable bucket", f"{type(error).__name__}: {error}")) from error

    def read(self, name: str) -> bytes:
        """Returns a small file; FileNotFoundError where there is none."""
        self._files.invalidate_cache()
        with self.open(name) as stream:
            return stream.read()

    def open(self, name: str) -> IO[bytes]:
        """Opens a file for reading; FileNotFoundError where there is none."""
        if self._folder is not None:
            return open_regular(self._folder / name)
        stream: IO[bytes] = self._files.open(f"{self._root}/{name}", "rb")
        return stream

    def sizes(self, folder: str) -> dict[str, int]:
        """Returns the size of each file and folder in a folder; nothing where there is no such folder."""
        try:
            entries = self._files.ls(f"{self._root}/{folder}".rstrip("/"), detail=True)
        except FileNotFoundError:
            return {}
        return {str(one["name"]).rstrip("/").rsplit("/", 1)[-1]: int(one["size"] or 0) for one in entries}

    @contextmanager
    def building(self) -> Iterator[Path]:
        """Yields an empty folder to build a generation in and removes it afterwards; for a bucket it is in TMPDIR."""
        with work_folder(self._folder or Path(tempfile.gettempdir()), "making") as folder:
            built = folder / "shards"  # readable by others, unlike the temporary folder around it
            built.mkdir()
            yield built

    def publish(self, built: Path, generation: str) -> None:
        """Renames or uploads a built folder; keeps the same generation if it is there and complete."""
        sizes = {one.name: {file.name: file.lstat().st_size for file in one.iterdir()} for one in built.iterdir()}
        if all(self.sizes(f"{generation}/{name}") == files for name, files in sizes.items()):
            return
        if self._folder is None:
            for file in sorted(built.glob("*/*")):
                target = f"{self._root}/{generation}/{file.parent.name}"
                self._files.makedirs(target, exist_ok=True)
                self._files.put_file(str(file), f"{target}/{file.name}")
            return
        for folder in (*sorted(built.iterdir()), built):
            sync(folder)
        with suppress(FileNotFoundError):
            (self._folder / generation).rename(built.with_name("replaced"))
        built.rename(self._folder / generation)
        sync(self._folder)

    def write(self, name: str, data: bytes) -> None:
        """Replaces a small file in one step; in a bucket every write is one."""
        if self._folder is None:
            self._files.pipe_file(f"{self._root}/{name}", data)
        else:
            write_whole(self._folder / name, data)

    def keep(self, generations: set[str]) -> None:
        """Removes all other generations."""
        for other in filter(_GENERATION.fullmatch, self.sizes("").keys() - generations):
            with suppress(OSError):  # someone may still read the files; the next publication removes them
                self._files.rm(f"{self._root}/{other}", recursive=True)


def read_pointer(store: Store) -> Pointer | None:
    """Returns the content of shards.json, or None if there is no such file.

    Raises:
        DataError: it was altered, or cannot be read.
    """
    where = f"{store.where}/{POINTER}"
    with disk_errors(where, "a file that can be read", NO_PLACE):
        try:
            data = store.read(POINTER)
        except FileNotFoundError:
            return None
    pointer = typed(Pointer, opened(data, where, SHARDS), where, SHARDS)
    require_names([pointer.generation], where, SHARDS, _GENERATION.pattern)
    for number, one in enumerate(pointer.shards):
        require_names([one.folder], where, SHARDS, f"{pointer.generation}/{folder_name(number)}")
        require_files(one.files, where, SHARDS)
    return pointer


def publish(store: Store, built: Path, manifests: Sequence[StageManifest], settings: dict[str, Any]) -> Pointer:
    """Publishes built shards: shards.json names them afterwards.

    Args:
        store: where to.
        built: a folder with one folder per shard, on the disk.
        manifests: the manifests of the shards.
        settings: the settings of all of them.
    """
    before = read_pointer(store)
    folders = [folder_name(number) for number in range(len(manifests))]
    own = [file_entries(built / folder, [FILE_NAME]) for folder in folders]
    generation = hashlib.sha256("".join(one[FILE_NAME]["sha256"] for one in own).encode()).hexdigest()[:16]
    entries = tuple(
        ShardEntry(folder=f"{generation}/{folder}", rows=manifest.rows, files=manifest.files | files)
        for folder, manifest, files in zip(folders, manifests, own, strict=True)
    )
    pointer = Pointer(generation=generation, settings=settings, inputs=manifests[0].inputs, shards=entries)
    store.publish(built, generation)
    store.write(POINTER, sealed({"schema_version": SCHEMA_VERSION, **asdict(pointer)}))
    store.keep({generation, before.generation if before else generation})
    return pointer


def is_whole(store: Store, pointer: Pointer) -> bool:
    """Returns whether every file of every shard is there with its size."""
    return all(
        store.sizes(shard.folder) == {name: one["size"] for name, one in shard.files.items()}
        for shard in pointer.shards
    )
