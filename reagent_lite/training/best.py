"""The best state of a learner during a run, which is evaluated and exported in place of the last one."""

from collections.abc import Mapping, Sequence
from typing import Any

from safetensors.torch import load
from torch import Tensor, nn

from reagent_lite.training.checkpoint_folder import Tree, flat, nest

KEPT = "kept"
"""Entry of evaluation.json."""
BEST = "best"
"""Name of the best state among the evaluators of a checkpoint."""


class BestState:
    """Keeps a copy of a learner's tensors from the epoch with the lowest loss or the highest return.

    Every rank has one. The figures are the same on all ranks, so all of them keep the same epoch. NaN is never better,
    and of equal figures the first is kept.

    Args:
        learner: the learner that is copied.
        tags: tags of the compared figures; their sum counts.
        lowest: whether the lowest sum is the best; otherwise the highest.
        patience: number of epochs without a better one after which the run ends, or None.
        unit: what an epoch is called.
        described: the compared figure, in words.
    """

    def __init__(
        self,
        learner: nn.Module,
        *,
        tags: Sequence[str],
        lowest: bool,
        patience: int | None,
        unit: str,
        described: str,
    ) -> None:
        self._learner = learner
        self._tags = tuple(tags)
        self._sign = 1.0 if lowest else -1.0
        self._patience = patience
        self._unit = unit
        self._described = described
        self._epochs = 0
        self._best_epoch = 0
        self._best = float("inf")
        self._tensors: dict[str, Tensor] = {}

    def compare(self, scalars: Mapping[str, float]) -> None:
        """Counts an epoch, and keeps the learner's state if it is the best so far.

        Args:
            scalars: figures of the epoch by tag.
        """
        self._epochs += 1
        value = self._sign * sum(scalars[tag] for tag in self._tags)
        if value < self._best:
            self._best = value
            self._best_epoch = self._epochs
            self._tensors = {name: tensor.detach().clone() for name, tensor in self._learner.state_dict().items()}

    @property
    def exhausted(self) -> bool:
        """Whether so many epochs without a better one have passed that the run ends."""
        return self._patience is not None and self._epochs - self._best_epoch >= self._patience

    @property
    def is_last(self) -> bool:
        """Whether the last epoch is the best."""
        return self._best_epoch == self._epochs

    def restore(self) -> None:
        """Copies the kept tensors into the learner's, which keep their addresses."""
        if self._tensors:
            self._learner.load_state_dict(self._tensors)

    def document(self) -> dict[str, Any]:
        """Returns the entry of evaluation.json; empty if no epoch has been kept."""
        if not self._best_epoch:
            return {}
        entry = {"unit": self._unit, "number": self._best_epoch, "of": self._epochs, "by": self._described}
        return {KEPT: {**entry, "value": self._sign * self._best}}

    def state_dict(self) -> Tree:
        """Returns the state for a checkpoint, with the kept tensors."""
        state = {"epochs": self._epochs, "best_epoch": self._best_epoch, "best": self._best}
        return {**state, "learner": dict(self._tensors)}

    def load_state_dict(self, state: Tree) -> None:
        """Restores a state that `state_dict` returned; an empty one changes nothing."""
        if not state:
            return
        self._epochs = int(state["epochs"])
        self._best_epoch = int(state["best_epoch"])
        self._best = float(state["best"])
        tensors = self._learner.state_dict()
        kept = flat(state.get("learner", {}))
        self._tensors = {name: kept[name].to(tensors[name].device) for name in tensors} if kept else {}


def kept_tensors(evaluators: bytes | None) -> dict[str, Tensor]:
    """Returns the learner's kept tensors in a checkpoint's file of evaluators, if there is one; empty if none are."""
    if evaluators is None:
        return {}
    return flat(nest(load(evaluators)).get(BEST, {}).get("learner", {}))
