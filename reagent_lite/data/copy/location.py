"""Where a training copy is, whether it fits its inputs, and how a new one replaces it.

    <data>/.reagent-lite/<name>-<options>-<content>/manifest.json
                                                    *.npy              never changed
                                                    normalized_*.npy   made of these arrays, see sampling/normalized.py

`<options>` is a hash of the path and the settings, `<content>` a hash of inputs and arrays: two machines that build the
same copy at the same time make the same folder.
"""

from __future__ import annotations

import glob
import hashlib
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from reagent_lite.config.paths import DataPath, logs_of
from reagent_lite.data.formats.blocks import InputFile
from reagent_lite.data.formats.input_files import local_path
from reagent_lite.data.logs import Log
from reagent_lite.data.rows.matrices import FeatureIds
from reagent_lite.data.stage_folder import StageManifest
from reagent_lite.data.timeline.settings import items_setting, pairing_settings
from reagent_lite.disk_room import NO_ROOM, free_disk_bytes
from reagent_lite.errors import DataError, Problem
from reagent_lite.manifest import TRAINING_COPY, FolderKind
from reagent_lite.shipped import user_cache
from reagent_lite.whole_files import made_folder, process_mark, sweep, sync

KIND = "training copy"
LAYOUT = 12
FOLDER = ".reagent-lite"
_CONTENT = "[0-9a-f]" * 16


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyManifest(StageManifest):
    """The manifest of a training copy.

    Attributes:
        paths: paths of the input files, for errors.
        action_names, counts, notes: as in TrainingCopy.
        levels: {"state" or "action": {feature: {text: number of its values}}} of features whose values are texts.
        without_value: {"state" or "action": features that have no value in any row}.
    """

    folder_kind: ClassVar[FolderKind] = TRAINING_COPY

    paths: tuple[str, ...]
    action_names: tuple[str, ...]
    counts: dict[str, int]
    notes: tuple[str, ...]
    levels: dict[str, dict[str, dict[str, int]]]
    without_value: dict[str, FeatureIds]


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyLocation:
    """A folder that may hold the training copies of a path.

    Attributes:
        parent: the folder.
        stem: first part of the names of the path's copies.
        settings: settings that a copy's content depends on, in addition to its inputs.
    """

    parent: Path
    stem: str
    settings: dict[str, Any]

    def copies(self) -> list[Path]:
        """Returns the folders of all copies of the path."""
        return sorted(self.parent.glob(f"{glob.escape(self.stem)}-{_CONTENT}"))

    def up_to_date_copy(self, files: Sequence[InputFile]) -> Path | None:
        """Returns the folder of the copy that was made from these files, unchanged; None if there is none."""
        return next(
            (folder for folder in self.copies() if CopyManifest.up_to_date(folder, KIND, self.settings, files)), None
        )

    @contextmanager
    def building(self) -> Iterator[Path]:
        """Yields a temporary folder for the arrays of a copy and removes it afterwards.

        Raises:
            DataError: the disk is full, or a limit of the system is reached.
        """
        temporary = self.parent / f".{self.stem}-{process_mark()}.tmp"
        with made_folder(self.parent):
            try:
                sweep(self.parent.glob(f".{glob.escape(self.stem)}-*.tmp"))
                temporary.mkdir()
                yield temporary
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                written = sum(file.stat().st_size for file in temporary.glob("*"))
                free = free_disk_bytes(self.parent)
                expected = f"room for the training copy, more than {written:,} bytes"
                got = f"{error.strerror or error}: {written + free:,} bytes free before, {free:,} now"
                todo = "Make room, or let data.training_copy_dir name a folder on another disk"
                raise DataError(Problem(str(self.parent), expected, got, todo)) from error
            finally:
                shutil.rmtree(temporary, ignore_errors=True)

    def publish(self, temporary: Path, manifest: CopyManifest) -> Path:
        """Renames a built copy to its name, removes copies of other inputs, and returns the folder.

        A folder that another process has published for the same copy meanwhile stays, as it may be in use already.
        """
        manifest = manifest.write(temporary)
        sync(temporary)
        folder = self.parent / f"{self.stem}-{manifest.digest[:16]}"
        for attempts_left in (2, 1, 0):
            try:
                temporary.rename(folder)
                break
            except OSError:  # for example, a folder of this name exists
                if CopyManifest.matching(folder, KIND, self.settings) is not None:
                    break
                if not attempts_left:
                    raise
                shutil.rmtree(folder, ignore_errors=True)
        sync(self.parent)
        for other in self.copies():
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)
        return folder


def locations_of(log: Log) -> list[CopyLocation]:
    """Returns the locations that a log's copy may have, the preferred one first."""
    part = {"partition": log.partition.settings} if log.partition is not None else {}
    paired = {"timeline": pairing_settings(log.timeline)} if log.timeline is not None else {}
    settings = {"layout": LAYOUT, "actions": log.actions, **log.settings, **paired, **items_setting(log.items), **part}
    paths = [local_path(path) for path in log.paths]
    name = re.sub(r"[^A-Za-z0-9._-]", "_", paths[0].rstrip("/").rsplit("/", 1)[-1]).lstrip(".")
    input_paths = paths if log.is_several else paths[0]
    options = hashlib.sha256(json.dumps([settings, input_paths]).encode()).hexdigest()[:16]
    parents = parents_of(log.path if log.partition is None else None, log.directory)
    return [CopyLocation(parent=parent, stem=f"{name}-{options}", settings=settings) for parent in parents]


def parents_of(path: DataPath | None, directory: str | None) -> list[Path]:
    """Returns the folders for files made from data, the preferred one first.

    It is the user's choice; else one next to local data (of several logs, the first), and one in the user's cache.

    Args:
        path: the path of the data; None for files that do not belong next to it.
        directory: data.training_copy_dir, or None.
    """
    if directory is not None:
        return [Path(directory).expanduser().absolute()]
    log = None if path is None else local_path(logs_of(path)[0])
    if log is None or "://" in log:
        return [user_cache()]
    return [Path(log).parent / FOLDER, user_cache()]
