"""Files and folders that appear once they are complete, and locks of folders.

Writing: temporary name ─► fsync of every file ─► rename ─► fsync of the parent.
"""

import ctypes
import errno
import fcntl
import glob
import hashlib
import itertools
import json
import os
import re
import shutil
import socket
import stat
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, TypeVar

from reagent_lite.console import Waiting, logger
from reagent_lite.errors import ConfigError, DataError, FolderInUseError, Problem, UnavailableError

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
T = TypeVar("T")
_MARKER = ".folder-"
_ROOM_BYTES = 1 << 20  # for the small files that a restarted run writes
_ATTEMPTS = 10
_DAY_SECONDS = 86_400.0
LOCK = ".lock"
"""The file that a run locks in its folder."""
_RECORD_BYTES = 10_000  # a lock file has fewer
_ENDING_SECONDS = 5.0  # a killed process first frees its memory, then its locks
_LEASE_SECONDS = 120.0  # an NFSv4 server keeps the locks of a dead machine for 90 s
_POLL_SECONDS = 0.2
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2  # of renameat2(2)


def user_cache() -> Path:
    """Returns the folder for files that can be computed again: `reagent-lite` in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "reagent-lite"


@contextmanager
def appearing_folder(target: Path, *, served: bool = False, within: "FolderIdentity | None" = None) -> Iterator[Path]:
    """Yields a temporary folder that becomes `target` if the block succeeds, and is removed if it fails.

    An older folder of that name is removed last; the caller has checked that it may be removed. The system exchanges
    the two in one step if the filesystem can; otherwise, as on NFS, the older one is renamed first. If `target` is a
    symbolic link, the folder it leads to is replaced. Temporary names are unique on all machines of a share.

    Args:
        target: final name.
        served: other processes read the folder at any time, so `target` must always lead to a complete folder. If the
            filesystem cannot exchange names, `target` is a link to a hidden folder beside it, and the link is replaced.
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
    """Removes leftovers of killed processes beside a folder."""
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
        return cls.used(folder)

    @classmethod
    def used(cls, folder: Path) -> "FolderIdentity":
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


def find_shipped(name: str) -> Path:
    """Returns the shipped folder "kernels" or "configs": that of the checkout, else the installed one."""
    checkout = Path(__file__).resolve().parents[1] / name
    return checkout if checkout.is_dir() else Path(sys.prefix).resolve() / "share" / "reagent-lite" / name


@contextmanager
def disk_errors(where: str, expected: str, todo: str = "") -> Iterator[None]:
    """Turns errors of disks and networks into a DataError.

    Args:
        where: the file, folder or URL.
        expected: the expectation in the error, such as "a folder that can be written".
        todo: advice to the user.
    """
    try:
        yield
    except OSError as error:
        got = f"{error.strerror or error}" + (f" ({error.filename})" if error.filename else "")
        raise DataError(Problem(where, expected, got, todo)) from error


@contextmanager
def room_in(folder: Path, key: str, *, again: bool = False) -> Iterator[None]:
    """Turns the error of a full disk into an error with the config key, the free bytes, and advice.

    Args:
        folder: the folder to write to.
        key: the config key that names it.
        again: whether an earlier start of this run had room there; a later start may have it again.

    Raises:
        ConfigError: the disk is full.
        UnavailableError: the disk is full, with `again`.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        got = f"{error.strerror}: {free_disk_bytes(folder):,} bytes are free"
        problem = Problem(key, f"room in {folder}", got, "Make room, and run the same command again")
        raise (UnavailableError if again else ConfigError)(problem) from error


def nearest_existing(path: Path) -> Path:
    """Returns a path, or the nearest folder above it that exists."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def free_disk_bytes(folder: Path) -> int:
    """Returns the free bytes for this user on the disk of a folder, which need not exist yet."""
    return shutil.disk_usage(nearest_existing(folder)).free


def is_writable(folder: Path) -> bool:
    """Whether files can be created in `folder`, or it can be created.

    A folder without any write bit is not writable, even for root.
    """
    folder = nearest_existing(folder)
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK) and bool(folder.stat().st_mode & 0o222)


def require_writable(folder: Path, key: str, *, keep: bool = False, again: bool = False) -> None:
    """Writes a file into a folder and removes it, so that a long run does not fail at its end.

    Args:
        folder: created if it does not exist.
        key: the config key that names it.
        keep: whether a created folder stays; by default it is removed, since the run may still be refused.
        again: whether an earlier start of this run could write there; if so, waits until the folder can be written.

    Raises:
        ConfigError: the folder is not writable.
        UnavailableError: with `again`; see `wait_for`.
    """
    made = _missing(folder)

    def write() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".writable.{process_mark()}.tmp"
        with probe.open("xb") as stream:  # a new file, never one of others and never through a link
            try:
                stream.write(bytes(_ROOM_BYTES if again else 0))
            finally:
                probe.unlink(missing_ok=True)

    if again:
        wait_for(write, folder, key)
        return
    try:
        write()
    except OSError as error:
        raise ConfigError(
            Problem(key, "a writable folder", f"{folder}: {error.strerror or error}", "Choose another folder")
        ) from error
    finally:
        if not keep:
            _remove_empty(made)


@contextmanager
def made_folder(folder: Path) -> Iterator[None]:
    """Creates a folder; if the block fails, created folders that are still empty are removed."""
    made = _missing(folder)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        _remove_empty(made)
        raise


def _missing(folder: Path) -> list[Path]:
    """Returns a folder and its parents that do not exist yet, the innermost first."""
    folder = folder.absolute()
    return [parent for parent in (folder, *folder.parents) if not parent.exists()]


def _remove_empty(folders: Iterable[Path]) -> None:
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


@contextmanager
def alone_in(folder: Path, key: str, *, again: bool = False) -> Iterator[None]:
    """Locks a folder during the block; the system keeps the lock until the process ends.

    Without support for locks in the filesystem, the block runs with a warning.

    Args:
        folder: the folder. The lock file stays: if it were removed, two runs could each lock a file of that name.
        key: the config key that names the folder.
        again: whether an earlier start of this run may still have the lock, in a disk or driver that hangs.

    Raises:
        FolderInUseError: another process has locked the folder; names its host, pid and start.
        ConfigError: the name of the lock file is a link or a file that is no lock.
    """
    with ExitStack() as closing:
        try:
            descriptor = _open_lock(folder / LOCK, key)
            closing.callback(os.close, descriptor)
            _lock(descriptor, folder, key, _LEASE_SECONDS if again else _ENDING_SECONDS)
        except OSError as error:
            logger.warning(
                f"{folder / LOCK} cannot be locked ({error.strerror or error}): make sure that no second run writes "
                "into this folder"
            )
        yield


def _open_lock(path: Path, key: str) -> int:
    """Opens a lock file, which is created if it does not exist; see `alone_in` for errors."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    for _ in range(_ATTEMPTS):
        try:
            return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            pass
        try:
            descriptor = os.open(path, flags)
        except FileNotFoundError:  # removed in between
            continue
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENXIO):  # a link, a socket
                raise
            raise _no_lock(path, key, os.strerror(error.errno)) from None
        if stat.S_ISREG(os.fstat(descriptor).st_mode) and _is_lock(descriptor):
            return descriptor
        os.close(descriptor)
        raise _no_lock(path, key, "another file")
    raise OSError(errno.EAGAIN, "it is created and removed again and again", str(path))


def _is_lock(descriptor: int) -> bool:
    """Whether a file has the content of a lock, or none, as between the creation of a lock and its content."""
    content = os.pread(descriptor, _RECORD_BYTES, 0)
    return not content or bool(_record(content))


def _no_lock(path: Path, key: str, got: str) -> ConfigError:
    return ConfigError(Problem(key, f"{path} to be a lock file", got, "Move it away, or name another folder"))


def _lock(descriptor: int, folder: Path, key: str, limit: float) -> None:
    """Locks an open file within `limit` seconds; see `alone_in`. Raises OSError if the filesystem has no locks."""
    begun = time.monotonic()
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
        holder = _record(os.pread(descriptor, _RECORD_BYTES, 0))  # none between the lock and its content
        if holder and limit != _LEASE_SECONDS and not _is_alive(holder):
            limit = _LEASE_SECONDS
            logger.info(f"{key}: {folder} is in use by {_name_holder(holder)}; waiting {limit:g} s in case it has died")
        if time.monotonic() - begun > limit:
            raise FolderInUseError(
                Problem(
                    key,
                    "a folder that no other run writes into",
                    f"{folder}, in use by {_name_holder(holder)}",
                    "Wait for that run, or end it; or name another folder",
                )
            )
        time.sleep(_POLL_SECONDS)
    if not _is_lock(descriptor):  # written since it was opened
        raise _no_lock(folder / LOCK, key, "another file")
    with suppress(OSError):  # a full disk: the lock holds without its content
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(_process_record()).encode(), 0)
        os.fsync(descriptor)


def _process_record() -> dict[str, Any]:
    since = datetime.now(UTC).isoformat(timespec="seconds")
    return {"host": socket.gethostname(), "pid": os.getpid(), "since": since}


def _is_alive(holder: dict[str, Any]) -> bool:
    """Whether the holder is a running process of this machine.

    A container that replaces another one often has the same name and pid, so a holder with this process's pid does not
    count as running.
    """
    import psutil

    pid = holder.get("pid", -1)
    return holder.get("host") == socket.gethostname() and pid != os.getpid() and psutil.pid_exists(pid)


def _record(content: bytes) -> dict[str, Any]:
    """Returns the record of a lock file; an empty one if it has none."""
    try:
        record = json.loads(content)
    except ValueError:
        return {}
    return record if isinstance(record, dict) and record.keys() >= {"host", "pid", "since"} else {}


def _name_holder(holder: dict[str, Any]) -> str:
    if not holder:
        return "another run"
    return f"the run of host {holder['host']}, pid {holder['pid']}, since {holder['since']}"
