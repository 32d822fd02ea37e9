"""This process among its peers. A world of one is an ordinary value: its collectives do nothing.

Nothing here pickles: tensors are reduced, text travels as bytes.
"""

import gc
import inspect
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from reagent_lite.errors import Problem, RendezvousError

# buffers are constants here, or statistics that are synchronized by themselves; torch 2.13 renamed the argument
_BUFFERS_STAY_LOCAL: dict[str, Any] = (
    {"forward_sync_buffers": False}
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else {"broadcast_buffers": False}
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process stands, as torchrun and our launcher say it by environment variables."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    @classmethod
    def read(cls, environment: Mapping[str, str] | None = None) -> "Place | None":
        """Returns the place a launcher gave this process, or None where none launched it.

        Raises:
            RendezvousError: where the variables are incomplete or no integers.
        """
        environment = os.environ if environment is None else environment
        if "RANK" not in environment and "LOCAL_RANK" not in environment:
            return None
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        values = []
        for name in names:
            text = environment.get(name, "")
            if not text.isdigit():
                raise RendezvousError(
                    Problem(f"environment variable {name}", "an integer beside the launcher's others", repr(text),
                            f"Set all of {', '.join(names)}, or none")
                )  # fmt: skip
            values.append(int(text))
        return cls(*values)


class Group:
    """All processes of a run, seen from one of them.

    Attributes:
        place: rank and sizes.
        device: where this process computes.
    """

    def __init__(self, place: Place, device: torch.device) -> None:
        self.place = place
        self.device = device

    @property
    def rank(self) -> int:
        """Number of this process, 0 to world_size - 1."""
        return self.place.rank

    @property
    def world_size(self) -> int:
        """Count of processes."""
        return self.place.world_size

    @property
    def is_first(self) -> bool:
        """Whether this process writes files and reports."""
        return self.rank == 0

    @property
    def is_first_on_node(self) -> bool:
        """Whether this process prepares what the node's processes share on its disk."""
        return self.place.local_rank == 0

    @property
    def cores(self) -> int:
        """Processor cores for this process: its share of those that the machine gives to the run."""
        return max(len(os.sched_getaffinity(0)) // self.place.local_world_size, 1)

    def sum(self, tensor: Tensor) -> Tensor:
        """Returns the tensor summed over ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def barrier(self) -> None:
        """Waits until every rank has come here."""
        self.sum(torch.zeros(1))

    def broadcast_text(self, text: str | None) -> str:
        """Returns rank 0's text on every rank."""
        data = (text or "").encode()
        size = self.sum(torch.tensor([len(data) if self.is_first else 0]))
        block = torch.zeros(int(size), dtype=torch.uint8)
        if self.is_first:
            block = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else block
        if self.world_size > 1 and len(block):
            dist.broadcast(block, 0)
        return bytes(block.numpy()).decode()

    def wrap(self, learner: nn.Module) -> nn.Module:
        """Returns the learner with its gradients averaged over ranks and rank 0's values in every tensor."""
        if self.world_size == 1:
            return learner
        if self.device.type == "cuda":
            learner = nn.SyncBatchNorm.convert_sync_batchnorm(learner)  # type: ignore[no-untyped-call]
        return DistributedDataParallel(learner, gradient_as_bucket_view=True, **_BUFFERS_STAY_LOCAL)

    def gradients_stay_local(self, wrapped: nn.Module, *, last: bool) -> AbstractContextManager[None]:
        """Returns the context of one minibatch of a step: only the last one's backward pass averages over ranks."""
        if last or not isinstance(wrapped, DistributedDataParallel):
            return nullcontext()
        return wrapped.no_sync()


@contextmanager
def joined(place: Place, device: torch.device, timeout_seconds: float = 1800.0) -> Iterator[Group]:
    """Joins the run's process group for the duration of the block.

    Args:
        place: from Place.read; a world of one joins nothing.
        device: a CUDA device adds NCCL beside gloo.
        timeout_seconds: how long a collective waits for its peers.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if place.world_size == 1:
        yield Group(place, device)
        return
    backend = "cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds))
    try:
        yield Group(place, device)
    finally:
        gc.collect()  # wrapped modules are cycles that hold the group
        dist.destroy_process_group()
