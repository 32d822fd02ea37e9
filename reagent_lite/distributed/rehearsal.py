"""A backward pass that counts for nothing, so that every one that counts adds gradients in the same order.

[m] DistributedDataParallel rebuilds its buckets after the first backward pass, in the order in which gradients became
ready. gloo's ring adds a bucket's parts in an order that depends on where they lie, so with three processes and more
the first step of a process differs in its last bits from the same step taken later: stopping and resuming would show.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def rehearse(wrapped: nn.Module, loss: Callable[[], Tensor]) -> None:
    """Runs forward and backward once where buckets will be rebuilt, without a trace but for that.

    Args:
        wrapped: what Group.wrap returned, before its first step.
        loss: computes a loss through `wrapped`.
    """
    parameters = list(wrapped.parameters())
    # only gloo's sums are promised to be the same bits; a GPU's forward pass may have running statistics to spoil
    if not isinstance(wrapped, DistributedDataParallel) or parameters[0].device.type != "cpu":
        return
    with torch.random.fork_rng(devices=()):
        loss()  # which makes the wrapper expect gradients
        # a graph of its own: the order of gradients must not depend on how a batch's loss is computed
        torch.stack([p.sum() for p in parameters if p.requires_grad]).sum().backward()  # type: ignore[no-untyped-call]
    for parameter in parameters:
        parameter.grad = None
