"""A cache of compiled code on disk, keyed by everything that its bytes depend on.

A file's name is `<key>-<digest of its bytes><suffix>`: a single rename writes file and digest together, concurrent
builders cannot mix them, and a file that a full disk has truncated is noticed and built again.

Compiled code is executed, so only files that this user or root wrote are used, in a folder that nobody else can write.
"""

import atexit
import functools
import hashlib
import os
import platform
import stat
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path

from reagent_lite.console import logger
from reagent_lite.errors import KernelBuildError, Problem
from reagent_lite.shipped import user_cache
from reagent_lite.whole_files import scratch_folder, work_folder

_DIGITS = 32


def cache_folder() -> Path:
    """Returns the folder of compiled code: $REAGENT_LITE_CACHE, else a folder in the user's cache."""
    chosen = os.environ.get("REAGENT_LITE_CACHE")
    return Path(chosen).expanduser() if chosen else user_cache() / "kernels"


def make_key(parts: Iterable[str]) -> str:
    """Returns a hash of the parts; each part is preceded by its length, so that ("ab", "c") and ("a", "bc") differ."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(f"{len(data)}:".encode() + data)
    return digest.hexdigest()[:_DIGITS]


def machine() -> str:
    """Returns the processor's description, on which `-march=native` depends; machines may share a home folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = ("flags", "Features", "vendor_id", "cpu family", "model", "CPU implementer", "CPU part")
    features = sorted({line for line in lines if line.split(":")[0].strip() in names})
    return "\n".join((platform.system(), platform.machine(), platform.processor(), *features))


def find_or_build(key: str, suffix: str, build: Callable[[Path], None], folder: Path | None = None) -> Path:
    """Returns the compiled file of a key and builds it if there is no intact one.

    If other users can write to the folder, a warning is logged and the file is built in a folder of this process.

    Args:
        key: from `make_key`.
        suffix: the suffix of the file, such as `.so`.
        build: writes the compiled file to the path it is given.
        folder: folder of compiled files; None means `cache_folder()`.

    Raises:
        KernelBuildError: the folder cannot be written, or `build` raised it.
    """
    folder = folder or cache_folder()
    with ExitStack() as closing:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not _is_private(folder.stat()):
                folder = _process_folder(folder)
            for file in sorted(folder.glob(f"{key}-*{suffix}")):
                if _is_private(file.lstat()) and file.name == _name(key, file.read_bytes(), suffix):
                    return file
                file.unlink(missing_ok=True)
            temporary = closing.enter_context(work_folder(folder, "building"))
        except OSError as error:
            raise KernelBuildError(
                Problem(
                    str(folder),
                    "a writable folder for compiled code",
                    error.strerror or str(error),
                    "Set REAGENT_LITE_CACHE to another folder",
                )
            ) from error
        built = temporary / f"built{suffix}"
        build(built)
        built.chmod(0o600)
        target = folder / _name(key, built.read_bytes(), suffix)
        os.replace(built, target)
    return target


def _is_private(status: os.stat_result) -> bool:
    """Returns whether only this user and root can write to a folder or file; links are refused."""
    return (
        status.st_uid in (0, os.geteuid())
        and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        and not stat.S_ISLNK(status.st_mode)
    )


@functools.cache
def _process_folder(instead_of: Path) -> Path:
    """Returns a temporary folder of this process in place of an unsafe one, and warns once."""
    status = instead_of.stat()
    problem = Problem(
        str(instead_of),
        "a folder for compiled code that only this user can write to",
        f"owner {status.st_uid}, mode {stat.S_IMODE(status.st_mode):04o}; compiling for this process alone",
        "Remove it, or set REAGENT_LITE_CACHE to another folder",
    )
    logger.warning(problem)
    until_exit = ExitStack()
    atexit.register(until_exit.close)
    return until_exit.enter_context(scratch_folder())


def _name(key: str, data: bytes, suffix: str) -> str:
    return f"{key}-{hashlib.sha256(data).hexdigest()[:_DIGITS]}{suffix}"
