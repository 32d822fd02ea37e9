"""Learners of several types of agents as one module: one optimizer, one DDP wrap, one checkpoint, one loop.

batch of each type ─► its learner ─► loss ─┐
                                           └► sum: parameters are disjoint, so each gets the gradient of its own loss
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from reagent_lite.algorithms.policy_learner import PolicyLearner
from reagent_lite.types import TransitionBatch

_PREFIX = "type_"


class Learners(nn.Module):
    """A learner for each type of agents.

    Args:
        by_type: learners by the names of their types.

    Attributes:
        by_type: as given.
        row_errors: [B] priorities of the rows of the last batches, by type.
    """

    def __init__(self, by_type: Mapping[str, PolicyLearner]) -> None:
        super().__init__()
        # prefixed, as a key must not be the name of a method of ModuleDict; checkpoints have these names
        self.learners = nn.ModuleDict({f"{_PREFIX}{name}": learner for name, learner in by_type.items()})

    @property
    def by_type(self) -> dict[str, PolicyLearner]:
        """Learners by the names of their types."""
        return {key.removeprefix(_PREFIX): learner for key, learner in self.learners.items()}  # type: ignore[misc]

    @property
    def row_errors(self) -> dict[str, Tensor]:
        """Priorities [B] of the rows of the last batches, by type."""
        return {name: learner.row_errors for name, learner in self.by_type.items()}

    def forward(self, batches: Mapping[str, TransitionBatch]) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the sum of the learners' losses, its td_loss, and all parts as <type>.<part>."""
        losses: list[Tensor] = []
        metrics: dict[str, Tensor] = {}
        for name, learner in self.by_type.items():
            loss, parts = learner(batches[name])
            losses.append(loss)
            metrics |= {f"{name}.{part}": value for part, value in parts.items()}
        metrics["td_loss"] = torch.stack([metrics[f"{name}.td_loss"] for name in self.by_type]).sum()
        return torch.stack(losses).sum(), metrics

    def after_step(self) -> None:
        """Moves every target network."""
        for learner in self.by_type.values():
            learner.after_step()


Learner = PolicyLearner | Learners


def learners_of(learner: Learner) -> dict[str, PolicyLearner]:
    """Returns learners by type; "" is the only type if there are no several types."""
    return learner.by_type if isinstance(learner, Learners) else {"": learner}
