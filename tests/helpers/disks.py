"""Disks of a test's own, so small that they fill up, and shares that are away."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, *, size: str, files: int) -> Iterator[Path]:
    """Makes the folder and mounts a disk of so many bytes and files there; skips where that is not allowed."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size},nr_inodes={files}", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False) if os.getuid() == 0 else None
    if done is None or done.returncode:
        pytest.skip(f"needs root that may mount: {done.stderr.strip() if done else 'not root'}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def unmount(share: Path) -> None:
    """Leaves an empty folder, as the mount point of a share that is not mounted; beside it is what the share has."""
    share.rename(share.with_name("unmounted"))
    share.mkdir()
