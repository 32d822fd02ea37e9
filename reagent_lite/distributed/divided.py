"""One process on several GPUs: torch's DataParallel over rows whose weights already make their losses a sum.

batch ─► rows divided ─► a replica on each GPU ─► losses summed on the first; its gradients are those of the whole batch
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from reagent_lite.types import TransitionBatch

Loss = tuple[Tensor, dict[str, Tensor]]
Rows = TransitionBatch | Tensor | Mapping[str, TransitionBatch]
"""Rows of a batch, or of a batch for each type of agents."""


def divided(inputs: Sequence[Rows], devices: Sequence[torch.device]) -> list[tuple[Any, ...]]:
    """Returns the inputs' rows as consecutive parts, one for each device that gets any; sizes differ by one at most."""
    return list(zip(*(_parts(each, devices) for each in inputs), strict=True))


def _parts(rows: Rows, devices: Sequence[torch.device]) -> list[Any]:
    if isinstance(rows, Mapping):
        by_type = {name: _parts(own, devices) for name, own in rows.items()}
        return [dict(zip(by_type, parts, strict=True)) for parts in zip(*by_type.values(), strict=True)]
    total = len(rows)
    used = devices[: len(rows)]
    counts = [total * (i + 1) // len(used) - total * i // len(used) for i in range(len(used))]
    return [part.to(device) for part, device in zip(rows.split(counts), used, strict=True)]


def summed(losses: Sequence[Loss], device: torch.device) -> Loss:
    """Returns the sum of losses and of each metric on a device; weights are shares of the whole batch."""
    total = torch.stack([loss.to(device) for loss, _ in losses]).sum()
    return total, {name: torch.stack([one[name].to(device) for _, one in losses]).sum() for name in losses[0][1]}


class DividedOverGpus(nn.DataParallel):  # type: ignore[type-arg]
    """A learner whose batch is divided over GPUs; forward gives what the learner's own gives for the whole batch.

    Args:
        learner: on the first device; `row_errors` of its modules are those of the whole batch afterwards.
        devices: the GPUs.
    """

    def __init__(self, learner: nn.Module, devices: Sequence[torch.device]) -> None:
        super().__init__(learner, device_ids=[device.index for device in devices])
        self._devices = tuple(devices)

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        """Divides rows; see `divided`."""
        parts = divided(inputs, self._devices)
        return parts, [{}] * len(parts)

    def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> list[Any]:
        """Computes all parts at once and takes the errors of their rows from the replicas."""
        losses = super().parallel_apply(replicas, inputs, kwargs)
        for module, *copies in zip(self.module.modules(), *(replica.modules() for replica in replicas), strict=True):
            if "row_errors" in vars(module):
                module.row_errors = torch.cat([copy.row_errors.to(self._devices[0]) for copy in copies])
        return losses

    def gather(self, outputs: Any, output_device: Any) -> Any:
        """Sums losses; see `summed`."""
        return summed(outputs, self._devices[0])
