"""GPUs of this machine as the driver lists them, without creating a CUDA context."""

import subprocess
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU as the driver lists it; memory in bytes."""

    name: str
    uuid: str
    driver: str
    free: int
    total: int


def list_gpus() -> tuple[Gpu, ...]:
    """Returns the machine's GPUs in the driver's order; empty if nvidia-smi is missing or fails."""
    fields = "--query-gpu=name,uuid,driver_version,memory.free,memory.total"
    query = ["nvidia-smi", fields, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ()
    return parse_gpus(done.stdout)


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """Returns the GPUs of nvidia-smi's lines `name, uuid, driver, free MiB, total MiB`; a size may be [N/A]."""
    gpus = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 5:
            free, total = (int(field) << 20 if field.isdigit() else 0 for field in fields[3:])
            gpus.append(Gpu(name=fields[0], uuid=fields[1], driver=fields[2], free=free, total=total))
    return tuple(gpus)


def used_gpus(count: int) -> tuple[str, ...]:
    """Returns the UUIDs of the first `count` GPUs that this process sees; CUDA's order is not nvidia-smi's."""
    visible = range(min(count, torch.cuda.device_count()))
    return tuple(f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in visible)
