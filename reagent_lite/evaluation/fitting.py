"""Models of a policy, fitted to episodes of a log that are not scored; in training and for exported models.

episodes ─┬─► scored     (episodes.py)
          ├─► checked    a few rows whose loss decides when a long fit ends
          └─► fitted ─► reward and value models of the policy
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reagent_lite.algorithms.cpe_heads import (
    CHECKED_ROWS,
    CHECKED_SHARE,
    FEWEST_STEPS,
    CPEHeads,
    EarlyStopping,
    Policy,
    fit_heads,
)
from reagent_lite.algorithms.optimizers import optimizer_class
from reagent_lite.config.evaluation import EvaluationConfig
from reagent_lite.data.rows.hashes import mix
from reagent_lite.data.sampling.plan import ReadPlan
from reagent_lite.data.sampling.shards import Shards
from reagent_lite.distributed.group import Group, rehearse
from reagent_lite.evaluation.episodes import Scored, TrainEvalLogs, spread
from reagent_lite.evaluation.page import held_out
from reagent_lite.training.checkpoint import Tree, load_optimizer, optimizer_state, plain
from reagent_lite.types import TransitionBatch

_FINAL_PASSES = 40

Asked = tuple[TransitionBatch, Tensor]
"""Rows, and the policy's probabilities [B, K] at their next states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Partition of a log's rows by use; no episode is in two parts.

    Attributes:
        scored: the scored episodes.
        fitted: [n] row numbers in this shard's training data.
        checked: [m] row numbers of this process.
    """

    scored: Scored
    fitted: NDArray[np.int64]
    checked: NDArray[np.int64]


def split_log(sides: TrainEvalLogs, scored: Scored, settings: EvaluationConfig) -> Split:
    """Divides the episodes of a log; every rank calls it.

    Args:
        sides: training and eval data.
        scored: the scored episodes.
        settings: settings of the evaluation.
    """
    copy = sides.train
    hashes = sides.hashes(sides.train)
    unscored = ~np.isin(hashes, scored.hashes)
    checked = np.zeros(len(hashes), bool)
    counts = sides.shards.counts(int(unscored[copy.episode].sum()))
    if num_steps(fit_plan(sides.shards, counts, settings, final_passes(settings)), settings) > FEWEST_STEPS:
        checked = unscored & held_out(mix(hashes), CHECKED_SHARE)
    has_action = np.asarray(copy.action) >= 0
    return Split(
        scored=scored,
        fitted=np.flatnonzero((unscored & ~checked)[copy.episode] & has_action),
        checked=sides.shards.part(spread(np.flatnonzero(checked[copy.episode] & has_action), CHECKED_ROWS)),
    )


def final_passes(settings: EvaluationConfig) -> int:
    """Returns the passes of the fit at the end of a run."""
    return settings.final_fit_passes or _FINAL_PASSES


def fit_plan(
    shards: Shards, counts: tuple[int, ...], settings: EvaluationConfig, passes: int, seed: int = 0
) -> ReadPlan:
    """Returns the order in which models are fitted to rows.

    Args:
        shards: assignment of rows to processes.
        counts: number of fitted rows of each shard.
        settings: settings of the evaluation.
        passes: number of passes over these rows.
        seed: seed of the order.
    """
    minibatch = settings.minibatch_size * shards.group.world_size
    return ReadPlan(shards=counts, minibatch=minibatch, epochs=passes, seed=seed, reads=shards.of_rank)


def num_steps(plan: ReadPlan, settings: EvaluationConfig) -> int:
    """Returns the largest number of optimizer steps that a fit takes."""
    return min(plan.num_steps, max(settings.max_fit_rows // settings.minibatch_size, 1))


class PolicyModels:
    """Reward and value models of a policy; every rank calls every method.

    Args:
        heads: the models, on the group's device.
        settings: settings of the evaluation.
        group: the ranks that fit together.

    Attributes:
        heads: the models.
        passes: number of passes over the fitted rows so far.
    """

    def __init__(self, heads: CPEHeads, settings: EvaluationConfig, group: Group) -> None:
        self.heads = heads
        self._group = group
        self.passes = 0
        self._wrapped = group.wrap(heads)
        trained = [parameter for parameter in heads.parameters() if parameter.requires_grad]
        self._optimizer = optimizer_class("Adam")(trained, lr=settings.learning_rate, fused=True)

    def state_dict(self) -> Tree:
        """Returns the models, the optimizer's moments and the number of passes."""
        moments, _ = optimizer_state(self._optimizer)
        return {"heads": plain(self.heads), "moments": moments, "passes": self.passes}

    def load_state_dict(self, state: Tree) -> None:
        """Restores a result of `state_dict`."""
        earlier = {"mean": torch.zeros_like(self.heads.mean)}  # checkpoints of 2026-11-22 have none
        self.heads.load_state_dict({**earlier, **state["heads"]})
        load_optimizer(self._optimizer, state.get("moments", {}), {"numbers": {}})
        self.passes = int(state["passes"])

    def measure(self, batches: Iterable[TransitionBatch]) -> None:
        """Sets the scales of outcomes and values from all fitted rows."""
        sums = torch.stack([self.heads.scale_sums(batch) for batch in batches]).sum(0)
        self.heads.set_scales(self._group.sum(sums))

    def rehearse(self, rows: Asked) -> None:
        """Fixes the order in which processes add gradients; see distributed.group.rehearse."""
        rehearse(self._wrapped, lambda: self._wrapped(*rows)[0])

    def fit(
        self, batches: Iterable[TransitionBatch], policy: Policy, checked: Sequence[Asked] = ()
    ) -> dict[str, float]:
        """Takes one optimizer step per batch and returns the mean losses of all ranks.

        Args:
            batches: batches of the fitted rows.
            policy: the policy.
            checked: rows whose loss may end the fit early; if no rank has any, the fit uses all batches.
        """
        stop = None
        if sum(self._group.each(len(checked))):
            stop = EarlyStopping(self.heads, lambda: self._loss(checked))
        losses = fit_heads(self.heads, batches, policy, self._optimizer, loss=self._wrapped, stop=stop)
        return {name: float(self._group.sum(loss)) / self._group.world_size for name, loss in losses.items()}

    @torch.no_grad()
    def _loss(self, checked: Sequence[Asked]) -> float:
        total = torch.zeros(2, dtype=torch.float64, device=self._group.device)
        for batch, propensities in checked:
            total += torch.stack((self.heads(batch, propensities)[0].double(), batch.weight.sum().double()))
        loss, rows = self._group.sum(total).tolist()
        return float(loss / rows)
