"""Files and folders that appear once they are complete.

Writing: temporary name ─► fsync of every file ─► rename ─► fsync of the parent.
"""

import ctypes
import errno
import glob
import hashlib
import itertools
import os
import re
import shutil
import socket
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import IO

from reagent_lite.folder_identity import FolderIdentity

_ATTEMPTS = 10
_DAY_SECONDS = 86_400.0
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2  # of renameat2(2)


@contextmanager
def appearing_folder(target: Path, *, served: bool = False, within: "FolderIdentity | None" = None) -> Iterator[Path]:
    """Yields a temporary folder that becomes `target` if the block succeeds, and is removed if it fails.

    An older folder of that name is removed last; the caller has checked that it may be removed. The system exchanges
    the two in one step if the filesystem can; otherwise, as on NFS, the older one is renamed first. If `target` is a
    symbolic link, the folder it leads to is replaced. Temporary names are unique on all machines of a share.

    Args:
        target: final name.
        served: other processes read the folder at any time, so `target` must always lead to a complete folder. If the
            filesystem cannot exchange names, `target` is a link to a hidden folder near it, and the link is replaced.
        within: the parent or a folder above it, which must stay the same; without it, missing parents are created.

    Raises:
        OSError: among others, `within` is another folder than before, at the start or at the end of the block.
    """
    target = _follow_links(target)
    with _parent(target, within):
        yield from _appearing(target, served=served)


@contextmanager
def _parent(target: Path, within: "FolderIdentity | None") -> Iterator[None]:
    if within is None:
        with made_folder(target.parent):
            yield
    else:
        within.require()
        yield
        within.require()  # else the target is below a mount point


def _appearing(target: Path, *, served: bool) -> Iterator[Path]:
    """Yields the folder to write into.

    .NAME.mark.tmp   written ─► synced ─► exchanged with NAME; without exchange, NAME first becomes .NAME.mark.old
    .NAME.mark.now   served and no exchange: the folder stays here, and NAME is a link to it, replaced by a new link
    a failure        removes the new folder, and renames .NAME.mark.old back
    """
    _sweep(target)
    unique = process_mark()
    temporary, aside, hidden = (target.with_name(f".{target.name}.{unique}.{end}") for end in ("tmp", "old", "now"))
    older = target.resolve()
    temporary.mkdir()
    try:
        linked = target.is_symlink() or (served and not _can_exchange(temporary, aside))
        folder = temporary.rename(hidden) if linked else temporary
        yield folder
        for file in sorted(folder.rglob("*")):
            sync(file)
        sync(folder)
        if linked:
            temporary.symlink_to(hidden.name)
        _put(temporary, target, aside)
        sync(target.parent)
        if linked and older != target:
            shutil.rmtree(older, ignore_errors=True)
    finally:
        for left in (temporary, hidden):
            if left.is_symlink():
                left.unlink()
            elif left != target.resolve():
                shutil.rmtree(left, ignore_errors=True)
        if target.exists():
            shutil.rmtree(aside, ignore_errors=True)
        elif aside.exists():
            aside.rename(target)


def _follow_links(target: Path) -> Path:
    """Returns a path with its links followed, except a last one that `appearing_folder` made."""
    target = target.resolve()
    hidden = re.fullmatch(r"\.(.+)\.\d+-[0-9a-f]{12}\.now", target.name)
    return target.with_name(hidden[1]) if hidden else target


def _put(temporary: Path, target: Path, aside: Path) -> None:
    """Renames a folder, or a link to one, even while another process does the same."""
    for attempt in itertools.count():
        if target.is_dir() and not target.is_symlink():
            if _exchange(temporary, target):
                return
            target.rename(aside)
        try:
            temporary.rename(target)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.EISDIR) or attempt == _ATTEMPTS:
                raise
            shutil.rmtree(aside, ignore_errors=True)


def _exchange(first: Path, other: Path) -> bool:
    """Exchanges two names in one step; returns false if the system or the filesystem cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)  # Linux, since glibc 2.28
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.ENOENT):
        return False
    raise OSError(number, os.strerror(number), str(other))


def _can_exchange(first: Path, other: Path) -> bool:
    """Tries to exchange an empty folder with another name, which is free again afterwards."""
    other.mkdir()
    try:
        return _exchange(first, other)
    finally:
        other.rmdir()


def _sweep(target: Path) -> None:
    """Removes leftovers of killed processes next to a folder."""
    name = f".{glob.escape(target.name)}"
    ends = (".tmp", ".now", *((".old",) if target.exists() else ()))
    beside = target.parent.glob(f"{name}.*")
    sweep(path for path in beside if path.suffix in ends and path != target.resolve())


def process_mark() -> str:
    """Returns a new part of a temporary name, unique on all machines of a share, that identifies the process."""
    return f"{os.getpid()}-{_host_mark()}{uuid.uuid4().hex[:6]}"


def _host_mark() -> str:
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:6]


def _owner_lives(path: Path) -> bool | None:
    """Returns whether the process whose `process_mark` is in a name still runs; None if that is unknown."""
    import psutil

    mark = re.search(r"(\d+)-([0-9a-f]{6})[0-9a-f]{6}\.(?:tmp|now|old|work)", path.name)
    return psutil.pid_exists(int(mark[1])) if mark is not None and mark[2] == _host_mark() else None


def sweep(paths: Iterable[Path], *, after_days: int = 1) -> None:
    """Removes what killed processes left: those of this host at once, those of other hosts after `after_days`."""
    for path in paths:
        with suppress(OSError):
            lives = _owner_lives(path)
            if lives is None:
                lives = time.time() - path.lstat().st_mtime < after_days * _DAY_SECONDS
            if lives:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()


@contextmanager
def work_folder(parent: Path, name: str) -> Iterator[Path]:
    """Yields an empty folder that is removed afterwards, after a `sweep` of older ones with this name."""
    sweep(parent.glob(f".{glob.escape(name)}.*.work"))
    folder = parent / f".{name}.{process_mark()}.work"
    with made_folder(parent):
        folder.mkdir(mode=0o700)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def scratch_folder(name: str = "reagent-lite") -> AbstractContextManager[Path]:
    """Returns a `work_folder` in TMPDIR."""
    return work_folder(Path(tempfile.gettempdir()), name)


@contextmanager
def appearing_file(target: Path, *, within: FolderIdentity | None = None) -> Iterator[IO[bytes]]:
    """Yields a stream whose bytes become the file `target` if the block succeeds.

    Leftovers of killed processes are removed, see `sweep`. For the parent and errors see `appearing_folder`.
    """
    with _parent(target, within):
        sweep(target.parent.glob(f".{glob.escape(target.name)}.*.tmp"))
        temporary = target.with_name(f".{target.name}.{process_mark()}.tmp")
        try:
            with temporary.open("xb") as stream:  # never through a link
                yield stream
            sync(temporary)
            temporary.rename(target)
            sync(target.parent)
        finally:
            temporary.unlink(missing_ok=True)


def write_whole(file: Path, data: bytes) -> None:
    """Writes a file that appears once it is complete."""
    with appearing_file(file) as stream:
        stream.write(data)


def write_synced(file: Path, data: bytes) -> None:
    """Writes a file and waits until it is on the disk."""
    with file.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def sync(path: Path) -> None:
    """Waits until the content of a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def made_folder(folder: Path) -> Iterator[None]:
    """Creates a folder; if the block fails, created folders that are still empty are removed."""
    made = missing_folders(folder)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        remove_empty_folders(made)
        raise


def missing_folders(folder: Path) -> list[Path]:
    """Returns a folder and its parents that do not exist yet, the innermost first."""
    folder = folder.absolute()
    return [parent for parent in (folder, *folder.parents) if not parent.exists()]


def remove_empty_folders(folders: Iterable[Path]) -> None:
    """Removes the folders that are empty."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()
