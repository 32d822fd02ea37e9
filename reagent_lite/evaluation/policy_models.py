"""Models of a policy, fitted to the episodes of a log that are not scored; in training and for exported models.

episodes ─┬─► scored     (episodes.py)
          ├─► checked    a few rows whose loss decides when a long fit ends
          └─► fitted ─► reward and value models of the policy
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reagent_lite.algorithms.optimizers import optimizer_class
from reagent_lite.algorithms.reward_and_q_models import (
    CHECKED_ROWS,
    CHECKED_SHARE,
    FEWEST_STEPS,
    EarlyStopping,
    LevelCorrection,
    PolicyProbabilities,
    RewardAndQModels,
    fit_reward_and_q_models,
)
from reagent_lite.config.evaluation import EvaluationConfig
from reagent_lite.data.rows.hashes import mix
from reagent_lite.data.sampling.plan import ReadPlan
from reagent_lite.data.sampling.shards import Shards
from reagent_lite.distributed.group import Group, rehearse
from reagent_lite.evaluation.evaluation_rows import held_out
from reagent_lite.evaluation.scored_episodes import ScoredEpisodes, TrainEvalLogs, find_hashes, spread
from reagent_lite.models.embeddings import RATE_FACTOR, by_learning_rate, learned_tables
from reagent_lite.training.checkpoint_folder import Tree, copy_tensors, load_optimizer, optimizer_state
from reagent_lite.types import TransitionBatch

_FINAL_PASSES = 5
_MOST_FINAL_PASSES = 40
_EPOCH_SHARE = 1 / 8
_FINAL_SHARE = 1 / 16
_FINAL_SHARE_OF_SINGLE_STEPS = 1 / 4  # there is no bootstrapping, so that rows take half as long
_FEWEST_FINAL_STEPS = 120  # half a second
LEVEL_ROWS = 1 << 14
"""Largest number of rows by whose mean residuals predictions are shifted."""
_LEVELS = 8
_FEWEST_STEPS_PER_LEVEL = 10

RowsOfPolicy = tuple[TransitionBatch, Tensor]
"""Rows, and the policy's probabilities [B, K] at their next states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """Rows by whose mean residuals all predictions are shifted during a fit.

    Attributes:
        rows: returns this process's rows, the same at each call; they are read anew, as wide ones need much memory.
        every: number of optimizer steps between two shifts.
    """

    rows: Callable[[], Iterable[RowsOfPolicy]]
    every: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Partition of a log's rows by use; no scored episode is fitted or checked.

    Attributes:
        scored: the scored episodes of the final evaluation, which decides.
        choosing: the scored episodes of all others; the same as `scored` without evaluation.choosing_share.
        fitted: [n] row numbers in this shard's training data.
        checked: [m] row numbers of this process.
    """

    scored: ScoredEpisodes
    choosing: ScoredEpisodes
    fitted: NDArray[np.integer[Any]]
    checked: NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning:
    """How much the policy learns; fitting models should take little time in comparison.

    Attributes:
        rows: number of rows that it learns from in an epoch, on all machines.
        epochs: number of epochs.
        continues: whether any of the rows has a later reward that counts.
    """

    rows: int
    epochs: int
    continues: bool


def split_log(
    sides: TrainEvalLogs,
    scored: ScoredEpisodes,
    settings: EvaluationConfig,
    learning: Learning | None = None,
    units: NDArray[np.int64] | None = None,
) -> Split:
    """Divides the episodes of a log; every rank calls it.

    Args:
        sides: training and eval data.
        scored: the scored episodes.
        settings: settings of the evaluation.
        learning: how much the policy learns in this run; None for a policy that was learned before.
        units: [episodes of the scored data] code of each one's unit; None if each is a unit.
    """
    copy = sides.train
    choosing, deciding = scored.divide(sides, settings.choosing_share, units)
    hashes = sides.hashes(sides.train)
    unscored = find_hashes(scored.hashes, hashes) < 0
    checked = np.zeros(len(hashes), bool)
    counts = sides.shards.counts(int(unscored[copy.episode].sum()))
    if fit_steps(sides.shards, counts, settings, learning, final=True) > FEWEST_STEPS:
        checked = unscored & held_out(mix(hashes), CHECKED_SHARE)
    return Split(
        scored=deciding,
        choosing=choosing,
        fitted=copy.rows_of(unscored & ~checked, with_action=True),
        checked=sides.shards.part(spread(copy.rows_of(checked, with_action=True), CHECKED_ROWS)),
    )


def steps_between_levels(steps: int) -> int:
    """Returns the number of steps after which predictions are shifted, in a fit of so many steps."""
    return max(steps // _LEVELS, _FEWEST_STEPS_PER_LEVEL)


def fit_passes(settings: EvaluationConfig, *, final: bool) -> int:
    """Returns the largest number of passes of the final fit, or of a fit after an epoch."""
    return (settings.models.final_fit_passes or _MOST_FINAL_PASSES) if final else (settings.models.fit_passes or 1)


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
    minibatch = settings.models.minibatch_size * shards.group.world_size
    return ReadPlan(shards=counts, minibatch=minibatch, epochs=passes, seed=seed, reads=shards.of_rank)


def num_steps(plan: ReadPlan, settings: EvaluationConfig) -> int:
    """Returns the number of a plan's steps, limited by max_fit_rows."""
    return min(plan.num_steps, max(settings.models.max_fit_rows // settings.models.minibatch_size, 1))


def fit_steps(
    shards: Shards, counts: tuple[int, ...], settings: EvaluationConfig, learning: Learning | None, *, final: bool
) -> int:
    """Returns the largest number of optimizer steps of a fit.

    If the config does not set the passes, the models are fitted to an eighth of an epoch's rows after an epoch. At the
    end they are fitted in five passes, and to at most a sixteenth of the rows that the policy learned from in all
    epochs, a quarter if no later reward counts: a row takes them about as long as it takes the policy. Few rows are
    passed over up to forty times.

    Args:
        shards: assignment of rows to processes.
        counts: number of fitted rows of each shard.
        settings: settings of the evaluation.
        learning: how much the policy learns in this run; None for a policy that was learned before.
        final: the fit at the end of a run instead of one after an epoch.
    """

    def steps_of(passes: int) -> int:
        return num_steps(fit_plan(shards, counts, settings, passes), settings)

    most = steps_of(fit_passes(settings, final=final))
    if (settings.models.final_fit_passes if final else settings.models.fit_passes) is not None:
        return most
    rows_per_step = settings.models.minibatch_size * shards.group.world_size
    if not final:
        return most if learning is None else min(most, max(round(_EPOCH_SHARE * learning.rows / rows_per_step), 1))
    steps = steps_of(_FINAL_PASSES)
    if learning is not None:
        share = _FINAL_SHARE if learning.continues else _FINAL_SHARE_OF_SINGLE_STEPS
        steps = min(steps, round(share * learning.rows * learning.epochs / rows_per_step))
    return min(most, max(steps, _FEWEST_FINAL_STEPS))


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

    def __init__(self, heads: RewardAndQModels, settings: EvaluationConfig, group: Group) -> None:
        self.heads = heads
        self._group = group
        self.passes = 0
        self._wrapped = group.wrap(heads)
        trained = [parameter for parameter in heads.parameters() if parameter.requires_grad]
        groups = by_learning_rate(trained, learned_tables(heads))
        for part in groups:
            part["lr"] = settings.models.learning_rate * part.pop(RATE_FACTOR, 1.0)
        self._optimizer = optimizer_class("Adam")(groups, lr=settings.models.learning_rate, fused=True)

    def state_dict(self) -> Tree:
        """Returns the models, the optimizer's moments and the number of passes."""
        moments, _ = optimizer_state(self._optimizer)
        return {"heads": copy_tensors(self.heads), "moments": moments, "passes": self.passes}

    def load_state_dict(self, state: Tree) -> None:
        """Restores a result of `state_dict`."""
        self.heads.load_state_dict(state["heads"])
        load_optimizer(self._optimizer, state.get("moments", {}), {"numbers": {}})
        self.passes = int(state["passes"])

    def measure(self, batches: Iterable[TransitionBatch]) -> None:
        """Sets the scales of outcomes and values from all fitted rows."""
        sums = torch.stack([self.heads.scale_sums(batch) for batch in batches]).sum(0)
        self.heads.set_scales(self._group.all_reduce(sums))

    def rehearse(self, rows: RowsOfPolicy) -> None:
        """Fixes the order in which processes add gradients; see distributed.group.rehearse."""
        rehearse(self._wrapped, lambda: self._wrapped(*rows)[0])

    def fit(
        self,
        batches: Iterable[TransitionBatch],
        policy: PolicyProbabilities,
        *,
        level: Level | None = None,
        checked: Sequence[RowsOfPolicy] = (),
    ) -> dict[str, float]:
        """Takes one optimizer step per batch and returns the mean losses of all ranks.

        Args:
            batches: batches of the fitted rows.
            policy: the policy.
            level: rows by which predictions are shifted, as in a final fit.
            checked: rows whose loss may end the fit early; if no rank has any, the fit uses all batches.
        """
        stop = None
        if sum(self._group.all_gather(len(checked))):
            stop = EarlyStopping(self.heads, lambda: self._loss(checked))
        correct = None if level is None else LevelCorrection(self.heads, lambda: self._level_sums(level), level.every)
        losses = fit_reward_and_q_models(
            self.heads, batches, policy, self._optimizer, loss=self._wrapped, correct=correct, stop=stop
        )
        return {name: float(self._group.all_reduce(loss)) / self._group.world_size for name, loss in losses.items()}

    def _level_sums(self, level: Level) -> Tensor:
        heads = self.heads
        sums = torch.zeros(2 + 2 * len(heads.mean), dtype=torch.float64, device=self._group.device)
        for rows in level.rows():
            sums += heads.residual_sums(*rows)
        return self._group.all_reduce(sums)

    @torch.no_grad()
    def _loss(self, checked: Sequence[RowsOfPolicy]) -> float:
        total = torch.zeros(2, dtype=torch.float64, device=self._group.device)
        for batch, propensities in checked:
            total += torch.stack((self.heads(batch, propensities)[0].double(), batch.weight.sum().double()))
        loss, rows = self._group.all_reduce(total).tolist()
        return float(loss / rows)
