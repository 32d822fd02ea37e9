"""Several sources as one: a minibatch of each, joined to one batch.

part 0 ─► rows · share 0 ─┐
part 1 ─► rows · share 1 ─┴► one TransitionBatch; errors of its rows go back to their parts
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from reagent_lite.types import Actions, BatchSource, TransitionBatch


class MixedSource:
    """Batches with the rows of one batch of every part; parts may differ in candidates per row and in metrics.

    Args:
        parts: sources, and each one's share of the loss; shares that sum to 1 keep the sum of weights.
    """

    def __init__(self, parts: tuple[tuple[BatchSource, float], ...]) -> None:
        self._sources = tuple(source for source, _ in parts)
        self._shares = tuple(share for _, share in parts)
        self._sizes: list[int] = []

    def __next__(self) -> TransitionBatch:
        batches = [next(source) for source in self._sources]
        self._sizes = [len(batch) for batch in batches]
        return join_batches(batches, self._shares)

    def record_errors(self, row_errors: Tensor) -> None:
        """Passes the errors [B] of a batch's rows to their parts."""
        for source, errors in zip(self._sources, torch.split(row_errors, self._sizes), strict=True):
            source.record_errors(errors)

    def state_dict(self) -> dict[str, Any]:
        """Returns the states of the parts by number."""
        return {str(number): source.state_dict() for number, source in enumerate(self._sources)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues every part."""
        for number, source in enumerate(self._sources):
            source.load_state_dict(state[str(number)])


def join_batches(batches: Sequence[TransitionBatch], shares: Sequence[float]) -> TransitionBatch:
    """Returns the rows of all batches, weights multiplied by the batches' shares.

    Missing candidates are not allowed and have features 0; missing metrics are 0.
    """
    plain = ("state", "action", "reward", "steps", "bootstrap", "next_state", "next_action", "propensity")
    columns: dict[str, Any] = {name: torch.cat([getattr(batch, name) for batch in batches]) for name in plain}
    return TransitionBatch(
        **columns,
        actions=_joined_choices([batch.actions for batch in batches]),
        next_actions=_joined_choices([batch.next_actions for batch in batches]),
        metrics=_stack_choices([batch.metrics for batch in batches]),
        weight=torch.cat([batch.weight * share for batch, share in zip(batches, shares, strict=True)]),
    )


def _joined_choices(parts: Sequence[Actions]) -> Actions:
    features = [part.features for part in parts if part.features is not None]
    return Actions(
        mask=_stack_choices([part.mask for part in parts]), features=_stack_choices(features) if features else None
    )


def _stack_choices(parts: Sequence[Tensor]) -> Tensor:
    """Returns the rows of all parts, [B, K, ...], with zeros up to the largest K."""
    size = max(part.shape[1] for part in parts)
    return torch.cat([pad(part, (0, 0) * (part.dim() - 2) + (0, size - part.shape[1])) for part in parts])
