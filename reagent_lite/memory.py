"""Free memory, memory given back, and sizes as text."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:  # a process that only reads configs and data does not wait for torch
    import torch

_UNKNOWN = 2**62
_CGROUP = Path("/sys/fs/cgroup")


def free_bytes(device: torch.device) -> int:
    """Returns the bytes that can be allocated on a device; on a CPU within a container's limit."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    return free_host_bytes()


def free_host_bytes() -> int:
    """Returns the bytes that can be allocated on this machine, within a container's limit."""
    return min(psutil.virtual_memory().available, _free_container_bytes())


def oom_kills() -> int:
    """Returns the number of processes of this control group that were killed for lack of memory; 0 if unknown."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    control_group = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    for folder in (_CGROUP / control_group, _CGROUP):
        try:
            events = (folder / "memory.events").read_text().splitlines()
        except OSError:
            continue
        return next((int(line.split()[1]) for line in events if line.startswith("oom_kill ")), 0)
    return 0


def size_text(count: float) -> str:
    """Returns a number of bytes as text."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _free_container_bytes() -> int:
    """Returns the bytes left in this control group (https://docs.kernel.org/admin-guide/cgroup-v2.html)."""
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = (_CGROUP / "memory.current").read_text().strip()
        statistics = (_CGROUP / "memory.stat").read_text().splitlines()
    except OSError:
        return _UNKNOWN
    if limit == "max":
        return _UNKNOWN
    cache = next((int(line.split()[1]) for line in statistics if line.startswith("inactive_file ")), 0)
    return max(int(limit) - int(used) + cache, 0)


def give_back_memory() -> None:
    """Returns freed memory to the system: Arrow and glibc keep it, and it counts as this process's memory."""
    if pa := sys.modules.get("pyarrow"):  # not loaded if nothing was read
        pa.default_memory_pool().release_unused()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it
    if trim is not None:
        trim(0)
