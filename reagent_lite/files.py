"""Folders that appear whole or not at all: temporary name, fsync of every file, rename, fsync of the parent."""

import errno
import glob
import itertools
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from reagent_lite.errors import ConfigError, Problem

_ATTEMPTS = 10
_ABANDONED_AFTER_SECONDS = 86_400.0


@contextmanager
def appearing_folder(target: Path) -> Iterator[Path]:
    """Gives a temporary folder that becomes `target` when the block ends well, and vanishes when it does not.

    An older folder of that name is moved aside first and removed last, so that the name never holds half a folder: see
    to it beforehand that it is one of ours. A link is followed. Names are unique on all machines of a share.
    """
    target = target.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    _sweep(target)
    unique = f"{os.getpid()}-{uuid.uuid4().hex[:12]}"
    temporary, aside = (target.with_name(f".{target.name}.{unique}.{end}") for end in ("tmp", "old"))
    temporary.mkdir()
    try:
        yield temporary
        for file in sorted(temporary.rglob("*")):
            sync(file)
        sync(temporary)
        _put(temporary, target, aside)
        sync(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if target.exists():
            shutil.rmtree(aside, ignore_errors=True)
        elif aside.exists():
            aside.rename(target)


def _put(temporary: Path, target: Path, aside: Path) -> None:
    """Renames a folder to its name; who does the same at the same time may put his there in between."""
    for attempt in itertools.count():
        if target.exists():
            target.rename(aside)
        try:
            temporary.rename(target)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or attempt == _ATTEMPTS:
                raise
            shutil.rmtree(aside, ignore_errors=True)


def _sweep(target: Path) -> None:
    """Removes what killed processes left beside a folder that stands."""
    for left in (*target.parent.glob(f".{glob.escape(target.name)}.*.tmp"),
                 *(target.parent.glob(f".{glob.escape(target.name)}.*.old") if target.exists() else ())):  # fmt: skip
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > _ABANDONED_AFTER_SECONDS and left.is_dir():
                shutil.rmtree(left, ignore_errors=True)


@contextmanager
def appearing_file(target: Path) -> Iterator[IO[bytes]]:
    """Gives a stream whose bytes become the file `target` when the block ends well, and vanish when it does not."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}-{uuid.uuid4().hex[:12]}.tmp")
    try:
        with temporary.open("wb") as stream:
            yield stream
        sync(temporary)
        temporary.rename(target)
        sync(target.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_whole(file: Path, data: bytes) -> None:
    """Writes a file that appears whole or not at all."""
    with appearing_file(file) as stream:
        stream.write(data)


def sync(path: Path) -> None:
    """Waits until a file's or folder's content is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def require_writable(folder: Path, key: str) -> None:
    """Makes the folder and writes a file into it, so that a long run does not find out at its end.

    Raises:
        ConfigError: naming the config key and the reason.
    """
    probe = folder / f".writable.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            Problem(key, "a writable folder", f"{folder}: {error.strerror or error}", "Choose another folder")
        ) from error
