"""The identity of a folder, which holds although the folder may be unmounted for a while."""

import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from reagent_lite.console import Waiting

T = TypeVar("T")
_MARKER = ".folder-"


@dataclass(frozen=True, slots=True)
class FolderIdentity:
    """The folder that a path led to; once a share is unmounted, the path leads elsewhere.

    A folder with a marker is identified by it: a share that is mounted again may have another device number. A folder
    without a marker is identified by device and inode, until a run marks it.

    Attributes:
        folder: the path.
        marker: name of an empty file in the folder, unique to it; "" if there is none.
        device, inode: stat of the folder, or of the nearest one above it that exists.
    """

    folder: Path
    marker: str
    device: int
    inode: int

    @classmethod
    def of(cls, folder: Path) -> "FolderIdentity":
        """Returns the identity of the folder at a path, which need not exist yet."""
        status = nearest_existing(folder).stat()
        return cls(folder, min(_markers(folder), default=""), status.st_dev, status.st_ino)

    @classmethod
    def mark(cls, folder: Path) -> "FolderIdentity":
        """Returns the identity of an existing folder; marks it if it has no marker."""
        if not _markers(folder):
            (folder / f"{_MARKER}{uuid.uuid4().hex[:12]}").touch(exist_ok=False)
        return cls.read_mark(folder)

    @classmethod
    def read_mark(cls, folder: Path) -> "FolderIdentity":
        """Returns the identity of a folder that a run has marked.

        Raises:
            OSError: the folder has no marker; a bare mount point, for example, has none.
        """
        identity = cls.of(folder)
        if not identity.marker:
            raise identity._elsewhere()
        return identity

    def require(self) -> None:
        """Checks that the path still leads to the folder.

        Raises:
            OSError: the path leads elsewhere; nothing may be written.
        """
        if self.marker:
            same = (self.folder / self.marker).exists()
        else:
            nearest = nearest_existing(self.folder)
            same = bool(_markers(self.folder)) or any(self._is(path) for path in (nearest, *nearest.parents))
        if not same:
            raise self._elsewhere()

    def names(self) -> list[str]:
        """Returns the names in a marked folder.

        Raises:
            OSError: the path leads elsewhere now.
        """
        names = names_in(self.folder)
        if self.marker not in names:
            raise self._elsewhere()
        return names

    def _is(self, folder: Path) -> bool:
        status = folder.stat()
        return (status.st_dev, status.st_ino) == (self.device, self.inode)

    def _elsewhere(self) -> OSError:
        return OSError(
            f"{self.folder} is no longer the folder that it was when the run began: its share is not mounted, or the "
            "folder was replaced"
        )


def _markers(folder: Path) -> list[str]:
    return [name for name in names_in(folder) if name.startswith(_MARKER)]


def names_in(folder: Path) -> list[str]:
    """Returns the names in a folder that may not exist; on NFS, a listing finds new files that a look-up may not."""
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []


def sentence_of(error: OSError, folder: Path) -> str:
    """Returns why a folder cannot be used, as a sentence without its full stop."""
    return f"{folder} cannot be used: {error.strerror}" if error.strerror else str(error)


def wait_for(work: Callable[[], T], folder: Path, key: str) -> T:
    """Returns the result of `work`, which is called again while it raises an OSError.

    Args:
        work: uses the folder.
        folder: a folder that this run has used before.
        key: the config key that names the folder.

    Raises:
        UnavailableError: `work` raises errors for ten minutes.
    """
    waiting = Waiting()
    while True:
        try:
            return work()
        except OSError as error:
            waiting.sleep(sentence_of(error, folder), key)


def nearest_existing(path: Path) -> Path:
    """Returns a path, or the nearest folder above it that exists."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path
