"""Room and permission to write: checks before work, and errors in words."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from reagent_lite.errors import ConfigError, DataError, Problem, UnavailableError
from reagent_lite.folder_identity import nearest_existing, wait_for
from reagent_lite.whole_files import missing_folders, process_mark, remove_empty_folders

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_ROOM_BYTES = 1 << 20  # for the small files that a restarted run writes


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
    made = missing_folders(folder)

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
            remove_empty_folders(made)
