"""A single process on several GPUs: torch's DataParallel for losses that are sums over weighted rows.

batch ─► rows divided ─► a replica on each GPU ─► losses summed on the first GPU, with the whole batch's gradients
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from reagent_lite.types import TransitionBatch

Loss = tuple[Tensor, dict[str, Tensor]]
Rows = TransitionBatch | Tensor | Mapping[str, TransitionBatch]
"""Rows of a batch, or of a batch for each agent type."""


def divide_inputs(inputs: Sequence[Rows], devices: Sequence[torch.device]) -> list[tuple[Any, ...]]:
    """Splits the inputs' rows into consecutive parts, at most one per device; sizes differ by at most one row."""
    return list(zip(*(_parts(each, devices) for each in inputs), strict=True))


def _parts(rows: Rows, devices: Sequence[torch.device]) -> list[Any]:
    if isinstance(rows, Mapping):
        by_type = {name: _parts(typed_rows, devices) for name, typed_rows in rows.items()}
        return [dict(zip(by_type, parts, strict=True)) for parts in zip(*by_type.values(), strict=True)]
    total = len(rows)
    used = devices[:total]
    counts = [total * (i + 1) // len(used) - total * i // len(used) for i in range(len(used))]
    return [part.to(device) for part, device in zip(rows.split(counts), used, strict=True)]


def sum_losses(losses: Sequence[Loss], device: torch.device) -> Loss:
    """Returns the sums of losses and of each metric on a device; weights are shares of the whole batch."""
    total = torch.stack([loss.to(device) for loss, _ in losses]).sum()
    names = losses[0][1]
    return total, {name: torch.stack([metrics[name].to(device) for _, metrics in losses]).sum() for name in names}


class DividedOverGpus(nn.DataParallel):  # type: ignore[type-arg]
    """A learner whose batch is divided over GPUs; forward returns the learner's result for the whole batch.

    Args:
        learner: the learner, on the first device; after forward, `row_errors` of its modules cover the whole batch.
        devices: the GPUs.
    """

    def __init__(self, learner: nn.Module, devices: Sequence[torch.device]) -> None:
        super().__init__(learner, device_ids=[device.index for device in devices])
        self._devices = tuple(devices)

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        """Divides rows; see `divide_inputs`."""
        parts = divide_inputs(inputs, self._devices)
        return parts, [{}] * len(parts)

    def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> list[Any]:
        """Computes all parts in parallel and joins the replicas' `row_errors` in the learner."""
        losses = super().parallel_apply(replicas, inputs, kwargs)
        for module, *copies in zip(self.module.modules(), *(replica.modules() for replica in replicas), strict=True):
            if "row_errors" in vars(module):
                module.row_errors = torch.cat([copy.row_errors.to(self._devices[0]) for copy in copies])
        return losses

    def gather(self, outputs: Any, output_device: Any) -> Any:
        """Sums losses; see `sum_losses`."""
        return sum_losses(outputs, self._devices[0])
