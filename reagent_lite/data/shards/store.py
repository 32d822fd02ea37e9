"""The store of shards for all machines: a shared folder, or a bucket.

    <shards_path>/shards/shards.json      inputs, and size and sha256 of every file
                         shard-00000/     a stage's folder: manifest.json and Parquet files
                         shard-00001/

Like an exported model, the folder appears by rename and replaces an older one. A bucket has no rename: shards.json is
removed first and written last. A process that reads while shards are replaced finds files that differ from its
shards.json.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import fsspec

from reagent_lite.data.formats.input_files import POINTER, local_path
from reagent_lite.data.shards.partition import folder_name
from reagent_lite.data.stage_folder import FIELDS, InputState, StageManifest, parse_document
from reagent_lite.disk_room import disk_errors
from reagent_lite.errors import DataError, Problem
from reagent_lite.manifest import (
    FILE_NAME,
    SCHEMA_VERSION,
    SHARDS,
    file_entries,
    open_regular,
    open_sealed,
    require_files,
    seal,
)
from reagent_lite.whole_files import appearing_folder, scratch_folder

TODO_PLACE = "Make room or give another place, and run again"
_FOLDER = "shards"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardEntry:
    """One shard: its number, its rows, and size and sha256 of each of its files."""

    number: int
    rows: int
    files: dict[str, dict[str, Any]]

    @property
    def folder(self) -> str:
        """The name of its folder."""
        return folder_name(self.number)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pointer:
    """The content of shards.json.

    Attributes:
        settings: layout, num_nodes and seed.
        inputs: states of the files that the shards were made from.
        shards: the shards, in their order.
    """

    __pydantic_config__ = FIELDS

    settings: dict[str, Any]
    inputs: tuple[InputState, ...]
    shards: tuple[ShardEntry, ...]

    @property
    def generation(self) -> str:
        """Hash of the content of all shards."""
        manifests = "".join(shard.files[FILE_NAME]["sha256"] for shard in self.shards)
        return hashlib.sha256(manifests.encode()).hexdigest()[:16]


class Store:
    """A place for shards that all machines see: a folder, or a bucket through fsspec.

    Names of files are relative, such as "shard-00000/manifest.json".

    Attributes:
        where: the folder or URL, as errors name it.
    """

    def __init__(self, path: str) -> None:
        """Opens the filesystem of a place; creates nothing there.

        Raises:
            DataError: a protocol that is not allowed, or whose package is not installed.
        """
        self.where = local_path(path).rstrip("/")
        self._folder = None if "://" in self.where else Path(self.where) / _FOLDER
        try:
            self._files, root = fsspec.core.url_to_fs(self.where)
        except (ImportError, ValueError, OSError) as error:
            raise DataError(Problem(path, "a reachable bucket", f"{type(error).__name__}: {error}")) from error
        self._root = f"{root}/{_FOLDER}"

    def open(self, name: str) -> IO[bytes]:
        """Opens a file for reading; raises FileNotFoundError if there is none."""
        if self._folder is not None:
            return open_regular(self._folder / name)
        stream: IO[bytes] = self._files.open(f"{self._root}/{name}", "rb")
        return stream

    def location(self, name: str) -> str:
        """Returns the path or URL of a file, for errors."""
        return f"{self.where}/{_FOLDER}/{name}"

    def pointer(self) -> Pointer | None:
        """Returns the content of shards.json, or None if there is no such file.

        Raises:
            DataError: it was altered, or cannot be read.
        """
        where = self.location(POINTER)
        self._files.invalidate_cache()
        with disk_errors(where, "a file that can be read", TODO_PLACE):
            try:
                with self.open(POINTER) as stream:
                    data = stream.read()
            except FileNotFoundError:
                return None
        pointer = parse_document(Pointer, open_sealed(data, where, SHARDS), where, SHARDS)
        for shard in pointer.shards:
            require_files(shard.files, where, SHARDS)
        return pointer

    def is_whole(self, pointer: Pointer) -> bool:
        """Whether every file of every shard is there with its size."""
        return all(
            self._sizes(shard.folder) == {name: entry["size"] for name, entry in shard.files.items()}
            for shard in pointer.shards
        )

    def _sizes(self, folder: str) -> dict[str, int]:
        try:
            entries = self._files.ls(f"{self._root}/{folder}", detail=True)
        except FileNotFoundError:
            return {}
        return {str(entry["name"]).rsplit("/", 1)[-1]: int(entry["size"] or 0) for entry in entries}

    @contextmanager
    def replacing(self) -> Iterator[Path]:
        """Yields an empty folder, whose files replace those of the store when the block ends.

        For a bucket the folder is in TMPDIR, and its files are uploaded.
        """
        if self._folder is not None:
            with appearing_folder(self._folder) as folder:
                yield folder
            return
        with scratch_folder() as folder:
            yield folder
            if self._files.exists(self._root):
                self._files.rm(f"{self._root}/{POINTER}")
                self._files.rm(self._root, recursive=True)
            for file in (*sorted(folder.glob("*/*")), folder / POINTER):
                self._files.makedirs(f"{self._root}/{file.parent.relative_to(folder)}", exist_ok=True)
                self._files.put_file(str(file), f"{self._root}/{file.relative_to(folder)}")


def describe(folder: Path, manifests: Sequence[StageManifest], settings: dict[str, Any]) -> Pointer:
    """Writes shards.json into a folder of shards and returns its content.

    Args:
        folder: a folder with one folder per shard.
        manifests: the manifests of the shards.
        settings: the settings of all of them.
    """
    shards = tuple(
        ShardEntry(
            number=number,
            rows=manifest.rows,
            files=manifest.files | file_entries(folder / folder_name(number), [FILE_NAME]),
        )
        for number, manifest in enumerate(manifests)
    )
    pointer = Pointer(settings=settings, inputs=manifests[0].inputs, shards=shards)
    (folder / POINTER).write_bytes(seal({"schema_version": SCHEMA_VERSION, **asdict(pointer)}))
    return pointer
