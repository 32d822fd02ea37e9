"""A process's rank and its collectives with the other processes. In a single process collectives do nothing.

Nothing here uses pickle: tensors are reduced, or sent as bytes like text.
"""

import atexit
import gc
import inspect
import json
import math
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _set_pg_timeout  # torch has no public way; exists since 2.1
from torch.nn.parallel import DistributedDataParallel

from reagent_lite.console import log_as, machine_logger
from reagent_lite.distributed.divided import DividedOverGpus
from reagent_lite.distributed.worker import ProgressReport
from reagent_lite.errors import Problem, RendezvousError, first_line, pluralize

# buffers are constants here, or statistics that synchronize themselves; torch 2.13 renamed the argument
_BUFFERS_STAY_LOCAL: dict[str, Any] = (
    {"forward_sync_buffers": False}
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else {"broadcast_buffers": False}
)

ATTEMPT_VARIABLE = "TORCHELASTIC_RESTART_COUNT"
_LOG_SECONDS = 10.0
_PART_BYTES = 1 << 26  # largest size of a message


@dataclass(frozen=True, slots=True)
class ProcessRanks:
    """Rank and sizes of a process, from the environment variables of torchrun or our launcher."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node: int = 0
    num_nodes: int = 1

    @classmethod
    def read(cls, environment: Mapping[str, str] | None = None) -> "ProcessRanks | None":
        """Returns the ranks that a launcher gave this process, or None without a launcher.

        A launcher that does not number its machines is assumed to start the same number of processes on each.

        Raises:
            RendezvousError: the variables are incomplete or not integers.
        """
        environment = os.environ if environment is None else environment
        if "RANK" not in environment and "LOCAL_RANK" not in environment:
            return None
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        values = []
        for name in names:
            text = environment.get(name, "")
            if not text.isdigit():
                expected = "an integer, like the launcher's other variables"
                todo = f"Set all of {', '.join(names)}, or none"
                raise RendezvousError(Problem(f"environment variable {name}", expected, repr(text), todo))
            values.append(int(text))
        rank, world, local, local_world = values
        node = environment.get("GROUP_RANK", "")
        nodes = environment.get("GROUP_WORLD_SIZE", "")
        if node.isdigit() and nodes.isdigit():
            return cls(rank, world, local, local_world, int(node), int(nodes))
        return cls(rank, world, local, local_world, rank // local_world, -(-world // local_world))


def attempt_here() -> int:
    """Returns the number of restarts of the run before this start."""
    return int(os.environ.get(ATTEMPT_VARIABLE) or 0)


class Group:
    """All processes of a run, seen from one of them.

    Args:
        progress: reports this process's progress to its launcher; None reports nothing.

    Attributes:
        ranks: rank and sizes; the next four attributes are copies of its fields.
        rank: number of this process, 0 to world_size - 1.
        world_size: count of processes.
        node: number of this process's machine.
        num_nodes: count of machines.
        is_first: whether this process writes files and reports.
        is_first_on_node: whether this process prepares the shared files on the machine's disk.
        cores: number of processor cores of this process, its share of the run's cores on the machine.
        device: device of this process.
        gpus: number of GPUs over which this process divides its batches, beginning with `device`.
    """

    def __init__(
        self, ranks: ProcessRanks, device: torch.device, progress: ProgressReport | None = None, *, gpus: int = 1
    ) -> None:
        self.gpus = gpus
        self.ranks = ranks
        self.device = device
        self.rank = ranks.rank
        self.world_size = ranks.world_size
        self.node = ranks.node
        self.num_nodes = ranks.num_nodes
        self.is_first = ranks.rank == 0
        self.is_first_on_node = ranks.local_rank == 0
        self.cores = max(len(os.sched_getaffinity(0)) // ranks.local_world_size, 1)
        self._wrapped: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._progress = progress

    def enter_collective(self, step: int | None = None) -> None:
        """Reports to the launcher that this process enters a collective. Every rank calls it equally often.

        Args:
            step: optimizer steps done; None if the number has not changed.
        """
        if self._progress is not None:
            self._progress.enter_collective(step)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Returns the tensor summed over ranks, in place."""
        if self.world_size > 1:
            self.enter_collective()
            dist.all_reduce(tensor)
        return tensor

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        """Returns the elementwise maximum over ranks; NaN if a rank has NaN, which gloo keeps of rank 0 only."""
        if self.world_size == 1:
            return tensor
        self.enter_collective()
        if not tensor.is_floating_point():
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
            return tensor
        is_nan = tensor.isnan()
        values = torch.stack((tensor.masked_fill(is_nan, -torch.inf), is_nan.to(tensor.dtype)))
        dist.all_reduce(values, dist.ReduceOp.MAX)
        return values[0].masked_fill(values[1] > 0, torch.nan)

    def barrier(self) -> None:
        """Waits until every rank calls it."""
        self.all_reduce(torch.zeros(1))

    def broadcast_bytes(self, data: bytes | None, source: int = 0) -> bytes:
        """Returns the bytes of rank `source` on every rank; data of other ranks is ignored."""
        if self.world_size == 1:
            return data or b""
        size = self.all_gather(len(data or b""))[source]
        block = _block(data or b"") if self.rank == source else torch.empty(size, dtype=torch.uint8)
        for part in torch.split(block, _PART_BYTES):
            dist.broadcast(part, source)
        return block.numpy().tobytes()

    def broadcast_text(self, text: str | None) -> str:
        """Returns rank 0's text on every rank."""
        return self.broadcast_bytes((text or "").encode()).decode()

    def all_gather(self, number: int) -> tuple[int, ...]:
        """Returns the numbers of all ranks, in their order, on every rank."""
        table = torch.zeros(self.world_size, dtype=torch.int64)
        table[self.rank] = number
        return tuple(self.all_reduce(table).tolist())

    def gather_text(self, text: str) -> list[str]:
        """Returns the strings of all ranks, in their order, on every rank."""
        return list(json.loads(self.broadcast_text(json.dumps([d.decode() for d in self.gather_bytes(text.encode())]))))

    def gather_bytes(self, data: bytes) -> Iterator[bytes]:
        """Yields the bytes of all ranks, in their order, on rank 0, and nothing on the others.

        One rank's bytes are sent at a time, so rank 0 never holds more than the largest. Every rank must exhaust the
        iterator.
        """
        for block in self.gather(_block(data)):
            yield block.numpy().tobytes()

    def gather(self, tensor: Tensor) -> Iterator[Tensor]:
        """Yields the tensors of all ranks, in their order, on rank 0, and nothing on the others.

        Tensors are on the CPU for any device. Type and number of dimensions are the same on every rank; the sizes of
        dimensions may differ. One rank's tensor is sent at a time. Every rank must exhaust the iterator.
        """
        shapes = list(zip(*(self.all_gather(size) for size in tensor.shape), strict=True))
        if not self.is_first:
            # a dimension of size one may have any stride, which a view as bytes does not accept
            _send(tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8), 0)
            return
        yield tensor
        for rank, shape in enumerate(shapes[1:], start=1):
            yield _receive(math.prod(shape) * tensor.element_size(), rank).view(tensor.dtype).view(shape)

    def scatter_bytes(self, parts: Iterator[bytes] | None) -> bytes:
        """Returns this rank's part of rank 0's data; rank 0 takes one part at a time from `parts`, its own first."""
        if not self.is_first:
            size = torch.zeros(1, dtype=torch.int64)
            dist.recv(size, 0)
            return _receive(int(size), 0).numpy().tobytes()
        assert parts is not None
        first_part = next(parts)
        for rank in range(1, self.world_size):
            data = next(parts)
            dist.send(torch.tensor([len(data)]), rank)
            _send(_block(data), rank)
        return first_part

    @contextmanager
    def waiting_at_most(self, seconds: float, *, then: float) -> Iterator[None]:
        """Sets the timeout of collectives to `seconds` during the block, and to `then` after it.

        Timeouts are long while one rank may work alone, and short otherwise.
        """
        self._set_timeout(seconds)
        try:
            yield
        finally:
            self._set_timeout(then)

    def _set_timeout(self, seconds: float) -> None:
        if self._progress is not None:
            self._progress.set_limit(seconds)
        if self.world_size > 1:
            _set_pg_timeout(timedelta(seconds=seconds))

    def wrap(self, learner: nn.Module) -> nn.Module:
        """Returns the learner with its gradients averaged over ranks and rank 0's values in every tensor.

        If one process has several GPUs, the learner divides its batches over them.
        """
        if self.world_size == 1:
            devices = [torch.device("cuda", index) for index in range(self.gpus)]
            return learner if self.gpus == 1 else DividedOverGpus(learner, devices)
        wrapped = DistributedDataParallel(learner, gradient_as_bucket_view=True, **_BUFFERS_STAY_LOCAL)
        self._wrapped.add(wrapped)
        return wrapped

    def gradients_stay_local(self, wrapped: nn.Module, *, last: bool) -> AbstractContextManager[None]:
        """Returns the context of a minibatch: only the backward pass of a step's last minibatch averages over ranks."""
        if last or not isinstance(wrapped, DistributedDataParallel):
            return nullcontext()
        return wrapped.no_sync()


def rehearse(wrapped: nn.Module, loss: Callable[[], Tensor]) -> None:
    """Runs forward and backward once, so that every later backward pass adds gradients in the same order.

    DistributedDataParallel rebuilds its buckets after the first backward pass, in the order in which gradients became
    ready. gloo's ring adds parts of a bucket in an order that depends on their position: with three or more processes
    the first step of a process differs in its last bits from the same step later, as after resuming (measured).

    Args:
        wrapped: result of Group.wrap, before its first step.
        loss: computes a loss through `wrapped`.
    """
    parameters = list(wrapped.parameters())
    # only gloo's sums must have the same bits; on a GPU the forward pass could change running statistics
    if not isinstance(wrapped, DistributedDataParallel) or parameters[0].device.type != "cpu":
        return
    with torch.random.fork_rng(devices=()):
        loss()  # makes the wrapper expect gradients
        # a separate graph: the order of gradients must not depend on the computation of a batch's loss
        torch.stack([p.sum() for p in parameters if p.requires_grad]).sum().backward()  # type: ignore[no-untyped-call]
    for parameter in parameters:
        parameter.grad = None


# Process groups of wrapped modules that may live longer, for example in the frames of an error. torch ends a group with
# its last reference. If a module has this reference, torch holds the GIL while it waits for a thread that may need the
# GIL. The groups end before the interpreter does: a thread that needs the GIL afterwards aborts the process.
_OUTLIVED: list[Any] = []
atexit.register(_OUTLIVED.clear)


def _block(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _send(block: Tensor, rank: int) -> None:
    for part in torch.split(block, _PART_BYTES):
        dist.send(part, rank)


def _receive(size: int, rank: int) -> Tensor:
    block = torch.empty(size, dtype=torch.uint8)
    for part in torch.split(block, _PART_BYTES):
        dist.recv(part, rank)
    return block


@contextmanager
def join_group(
    ranks: ProcessRanks, device: torch.device, timeout_seconds: float = 7200.0, *, gpus: int = 1
) -> Iterator[Group]:
    """Joins the run's process group for the duration of the block.

    Args:
        ranks: from ProcessRanks.read; a single process joins nothing.
        device: a CUDA device adds NCCL to gloo.
        timeout_seconds: time that a process waits for its peers; Group.waiting_at_most changes it.
        gpus: number of GPUs of a process without peers.

    Raises:
        RendezvousError: some processes are missing; the message names them.
    """
    log_as(ranks.rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if ranks.world_size == 1:
        yield Group(ranks, device, gpus=gpus)
        return
    # imported before a group exists: DistributedDataParallel imports this module, whose functions have the current
    # group as a default argument, and would keep it until the interpreter ends
    from torch.distributed.nn import functional  # noqa: F401

    backend = "cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_seconds)
    try:
        store, *_ = next(dist.rendezvous("env://", timeout=timeout))  # type: ignore[attr-defined]
    except dist.DistError as error:
        raise _absent(ranks, timeout, "not all", error) from error
    # node 0's store outlives an attempt
    store = dist.PrefixStore(f"attempt_{attempt_here()}", store)  # type: ignore[attr-defined]
    _arrive(store, ranks, timeout)
    dist.init_process_group(backend, store=store, rank=ranks.rank, world_size=ranks.world_size, timeout=timeout)
    group = Group(ranks, device, ProgressReport(timeout_seconds))
    total = int(group.all_reduce(torch.ones(1)))
    if total != ranks.world_size:
        raise RendezvousError(Problem("first sum over all ranks", str(ranks.world_size), str(total)))
    try:
        yield group
    finally:
        gc.collect()  # wrapped modules are cycles that hold the group
        if group._wrapped:
            _OUTLIVED.append(dist.group.WORLD)
        dist.destroy_process_group()


def _arrive(store: Any, ranks: ProcessRanks, timeout: timedelta) -> None:
    """Waits for all ranks. Unlike the process group's own wait, its error names the missing ranks."""
    keys = [f"arrived/{rank}" for rank in range(ranks.world_size)]
    store.set(keys[ranks.rank], "1")
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        left = deadline - time.monotonic()
        try:
            store.wait(keys, timedelta(seconds=min(max(left, 0.001), _LOG_SECONDS)))
            return
        except dist.DistError as error:
            absent = [rank for rank, key in enumerate(keys) if not store.check([key])]
            missing = ", ".join(map(str, absent))
            if left <= _LOG_SECONDS:
                raise _absent(ranks, timeout, f"no sign of rank {missing}", error) from error
            if all(rank in absent for rank in range(ranks.rank)):  # only the lowest rank that has arrived logs it
                machine_logger.info(
                    f"start of {pluralize(ranks.world_size, 'process')}: waiting for rank {missing}; "
                    f"{left - _LOG_SECONDS:.0f} s left"
                )


def _absent(ranks: ProcessRanks, timeout: timedelta, got: str, error: Exception) -> RendezvousError:
    where = f"start of {pluralize(ranks.world_size, 'process')}"
    expected = f"all of them within {timeout.total_seconds():g} s"
    return RendezvousError(Problem(where, expected, got, first_line(error)))
