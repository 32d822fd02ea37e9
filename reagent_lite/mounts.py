"""The file system of a path."""

from dataclasses import dataclass
from pathlib import Path

import psutil

from reagent_lite.folder_identity import nearest_existing

_NETWORK = (
    "nfs", "cifs", "smb", "ceph", "lustre", "gpfs", "beegfs", "9p", "virtiofs", "afs", "weka", "orangefs", "pvfs",
    "gfs", "ocfs", "fuse.",
)  # fmt: skip
_LONG_CACHE_SECONDS = 60  # Linux' own bound for attributes of folders: acdirmax of nfs(5)
_CACHE_OPTIONS = ("actimeo", "acregmax", "acdirmax")


@dataclass(frozen=True, slots=True)
class Mount:
    """A mounted file system.

    Attributes:
        device: the mounted device, such as server:/export.
        folder: the mount point.
        kind: kind of the file system, such as nfs4 or ext4.
        options: options of the mount.
    """

    device: str
    folder: str
    kind: str
    options: tuple[str, ...]

    @property
    def is_network(self) -> bool:
        """Whether other machines may mount it as well."""
        return self.kind.startswith(_NETWORK)

    def warnings(self) -> list[tuple[str, str]]:
        """Returns options that may disturb a rendezvous through a file on this file system, each with advice."""
        warnings = []
        if self.kind.startswith("nfs") and ("soft" in self.options or "softerr" in self.options):
            warnings.append(("a soft mount: a slow server causes errors instead of delays", "Mount it with hard"))
        for option in self.options:
            name, _, seconds = option.partition("=")
            if name in _CACHE_OPTIONS and seconds.isdigit() and int(seconds) > _LONG_CACHE_SECONDS:
                warnings.append((f"{option}: a new file may stay hidden for {seconds} s", f"Lower {name}"))
        return warnings

    def __str__(self) -> str:
        return f"{self.kind} ({self.device} at {self.folder}; {','.join(self.options)})"


def find_mount(path: Path) -> Mount | None:
    """Returns the file system of a path, or of the nearest folder above it that exists; None if it is unknown."""
    resolved = nearest_existing(path).resolve()
    above = [mounted for mounted in psutil.disk_partitions(all=True) if resolved.is_relative_to(mounted.mountpoint)]
    if not above:
        return None
    best = sorted(above, key=lambda mounted: len(mounted.mountpoint))[
        -1
    ]  # of several mounts at one folder, the last hides the others
    return Mount(best.device, best.mountpoint, best.fstype, tuple(best.opts.split(",")))
