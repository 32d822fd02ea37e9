"""The file system under a folder, and how fast it is."""

import os
import socket
import time
import uuid
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import psutil

from reagent_lite.files import nearest_existing

_NETWORK = (
    "nfs", "cifs", "smb", "ceph", "lustre", "gpfs", "beegfs", "9p", "virtiofs", "afs", "weka", "orangefs", "pvfs",
    "gfs", "ocfs", "fuse.",
)  # fmt: skip
_LONG_CACHE_SECONDS = 60  # Linux' own bound for attributes of folders: acdirmax of nfs(5)
_CACHE_OPTIONS = ("actimeo", "acregmax", "acdirmax")
_PROBE = b"probe of the doctor\n" * 200


@dataclass(frozen=True, slots=True)
class Mount:
    """The file system that a path lies on.

    Attributes:
        device: what is mounted, such as server:/export.
        folder: where.
        kind: such as nfs4 or ext4.
        options: as the system gives them.
    """

    device: str
    folder: str
    kind: str
    options: tuple[str, ...]

    @property
    def is_network(self) -> bool:
        """Whether other machines may have it mounted too."""
        return self.kind.startswith(_NETWORK)

    def warnings(self) -> list[tuple[str, str]]:
        """Returns options that may trouble a meeting through a file here, each with what to do."""
        found = []
        if "ro" in self.options:
            found.append(("mounted read-only", "Mount it with rw: node 0 writes the file of init_method"))
        if self.kind.startswith("nfs") and ("soft" in self.options or "softerr" in self.options):
            found.append(("a soft mount: a slow server gives errors instead of waiting", "Mount it with hard"))
        for option in self.options:
            name, _, seconds = option.partition("=")
            if name in _CACHE_OPTIONS and seconds.isdigit() and int(seconds) > _LONG_CACHE_SECONDS:
                found.append((f"{option}: a new file may stay hidden for {seconds} s", f"Lower {name}"))
        return found

    def __str__(self) -> str:
        return f"{self.kind} ({self.device} at {self.folder}; {','.join(self.options)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Seconds that a folder takes for what a meeting does there."""

    write: float
    rename: float
    list: float
    read: float

    @property
    def total(self) -> float:
        """Seconds of all."""
        return self.write + self.rename + self.list + self.read

    def __str__(self) -> str:
        parts = {"write and fsync": self.write, "rename": self.rename, "list": self.list, "read back": self.read}
        return ", ".join(f"{name} {1000 * seconds:.1f} ms" for name, seconds in parts.items())


def find_mount(path: Path) -> Mount | None:
    """Returns the file system of a path, or of the nearest folder above it that exists; None if it is unknown."""
    resolved = nearest_existing(path).resolve()
    best = None
    for one in psutil.disk_partitions(all=True):
        if resolved.is_relative_to(one.mountpoint) and (
            best is None or len(one.mountpoint) >= len(best.mountpoint)  # of two at one place the later covers
        ):
            best = one
    if best is None:
        return None
    return Mount(best.device, best.mountpoint, best.fstype, tuple(best.opts.split(",")))


def probe_folder(folder: Path) -> Timings:
    """Writes, renames, lists and reads back a file, which is gone afterwards.

    Raises:
        OSError: the folder cannot be used so, or did not give back what was written.
    """
    name = f".doctor.{socket.gethostname()}.{os.getpid()}.{uuid.uuid4().hex[:8]}"
    temporary, final = folder / f"{name}.tmp", folder / name
    times = [time.perf_counter()]
    try:
        with temporary.open("xb") as stream:
            stream.write(_PROBE)
            stream.flush()
            os.fsync(stream.fileno())
        times.append(time.perf_counter())
        temporary.rename(final)
        times.append(time.perf_counter())
        listed = name in os.listdir(folder)
        times.append(time.perf_counter())
        if not listed or final.read_bytes() != _PROBE:
            raise OSError(f"{final}: not what was written there a moment before")
        times.append(time.perf_counter())
    finally:
        temporary.unlink(missing_ok=True)
        final.unlink(missing_ok=True)
    write, rename, listing, read = (after - before for before, after in pairwise(times))
    return Timings(write=write, rename=rename, list=listing, read=read)
