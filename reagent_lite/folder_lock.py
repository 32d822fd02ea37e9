"""Locks of folders, and the record of who holds them."""

import errno
import fcntl
import json
import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from reagent_lite.console import logger
from reagent_lite.errors import ConfigError, FolderInUseError, Problem

LOCK = ".lock"
"""The file that a run locks in its folder."""
_RECORD_BYTES = 10_000  # a lock file has fewer
_ENDING_SECONDS = 5.0  # a killed process first frees its memory, then its locks
_LEASE_SECONDS = 120.0  # an NFSv4 server keeps the locks of a dead machine for 90 s
_POLL_SECONDS = 0.2

_ATTEMPTS = 10


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
