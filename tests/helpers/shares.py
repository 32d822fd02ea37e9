"""A share that processes lose and get back: a folder mounted in namespaces of its own."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class Share:
    """A folder that processes of `pid`'s namespaces see at `path` while it is mounted there.

    Attributes:
        stored: where the test itself sees what is on the share, mounted or not.
        path: the mount point; the test sees what was written below it.
        pid: the process that holds the namespaces.
    """

    def __init__(self, folder: Path, pid: int) -> None:
        self.stored, self.path, self.pid = folder / "stored", folder / "share", pid
        self.stored.mkdir()
        self.path.mkdir()
        self.mount()

    def mount(self) -> None:
        """Mounts it, as at first or again."""
        self._run("mount", "--bind", str(self.stored), str(self.path))

    def unmount(self) -> None:
        """Unmounts it, also while its files are open."""
        self._run("umount", "--lazy", str(self.path))

    def _run(self, *command: str) -> None:
        subprocess.run(["nsenter", "--target", str(self.pid), "--mount", *command], check=True)


@contextmanager
def mounted_share(folder: Path) -> Iterator[Share]:
    """Yields a mounted share; skips where that is not allowed."""
    program = ["unshare", "--mount", "--net", "--uts", "sh", "-c", "mount --make-rprivate / && echo ready && read -r _"]
    if os.getuid():
        pytest.skip("needs root that may mount")
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        if holder.stdout.readline() != "ready\n":
            pytest.skip("needs the right to make namespaces and to mount (CAP_SYS_ADMIN)")
        yield Share(folder, holder.pid)  # the holder ends with its standard input
