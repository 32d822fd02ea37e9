"""Whether all ranks still hold the same numbers: one sum over the bits of every tensor, compared between them."""

from collections import Counter

import torch
from torch import Tensor, nn

from reagent_lite.distributed.group import Group
from reagent_lite.errors import PeerError, Problem

_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, so that no power of it is 0: tensors that swap places show


def checksum(module: nn.Module) -> int:
    """Returns an int64 that changes with every single bit of a module's tensors; waits for the device once."""
    sums = torch.stack([_bits(tensor).sum(dtype=torch.int64) for tensor in module.state_dict().values()])
    factors = torch.full_like(sums, _FACTOR).cumprod(0)
    return int((sums * factors).sum())


def _bits(tensor: Tensor) -> Tensor:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().contiguous().view(-1).view(kinds[tensor.element_size()])


def require_equal(module: nn.Module, group: Group, step: int) -> None:
    """Compares a module between ranks; every rank calls it, and all raise or none.

    Raises:
        PeerError: some ranks hold other numbers than most, or, where there is no majority, than rank 0.
    """
    sums = group.each(checksum(module))
    counts = Counter(sums)
    if len(counts) == 1:
        return
    usual, count = counts.most_common(1)[0]
    right = usual if count > len(sums) / 2 else sums[0]
    others = [str(rank) for rank, value in enumerate(sums) if value != right]
    alike = [str(rank) for rank, value in enumerate(sums) if value == right]
    raise PeerError(
        Problem(f"step {step}", "the same parameters on all ranks", f"parameters differ between ranks: "
                f"{', '.join(others)} from {', '.join(alike)}",
                "Memory or a kernel of one of them is at fault; the checkpoint before it is good")
    )  # fmt: skip
