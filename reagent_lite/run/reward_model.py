"""Models of the reward of single decisions: fitted to the rows of all machines, and compared with a learner's values.

Every rank sends its part of the rows to rank 0, which fits the model, and all ranks get it.
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load, save
from torch import Tensor, nn

from reagent_lite.algorithms.boosting import Boosting
from reagent_lite.algorithms.policy_learner import PolicyLearner
from reagent_lite.algorithms.reward_fit import (
    FOLDS,
    MOST_VALUES,
    RewardErrors,
    RewardRows,
    TreeSettings,
    describe_explained,
    fit_linear,
    num_pairs,
)
from reagent_lite.config import WorkflowConfig
from reagent_lite.config.algorithm import BoostingConfig
from reagent_lite.console import logger, progress
from reagent_lite.data.sampling.plan import apportion
from reagent_lite.data.sampling.source import rows_in_order
from reagent_lite.distributed.group import Group
from reagent_lite.errors import needing
from reagent_lite.evaluation.behavior import fold_of
from reagent_lite.evaluation.scored_episodes import spread
from reagent_lite.models.reward_models import build_reward_model
from reagent_lite.rl.td import select_choice
from reagent_lite.run.logged import Data
from reagent_lite.types import SourceSpec, TransitionBatch

_VALUES_PER_THREAD = 10_000_000  # with fewer, LightGBM's threads wait for each other longer than they save


def fit_reward_model(learner: Boosting, config: WorkflowConfig, data: Data, group: Group) -> None:
    """Fits the learner's model to the rows that it learns from; every rank calls it.

    Of more rows than `MOST_VALUES` feature values a sample is used, spread evenly over the rows of all machines.
    """
    settings = config.section
    assert isinstance(settings, BoostingConfig)
    with needing("data", "algorithm"):
        import lightgbm  # noqa: F401
    rows = _gather_rows(_part(data, group), group)
    model = None
    with _one_rank_works(config, group):
        if rows is not None:
            with progress("fitting the reward model", "rows", brief=True):
                trees = TreeSettings(
                    most=settings.most_trees,
                    depth=settings.depth,
                    leaves=settings.leaves,
                    shrinkage=settings.shrinkage,
                    threads=group.cores if rows.inputs.numel() > _VALUES_PER_THREAD else 1,
                    seed=config.seed,
                )
                learner.fit_rows(rows, trees)
            model = save(_save(learner.model))
        learner.model.load_fitted(load(group.broadcast_bytes(model)))
    learner.to(group.device)
    data.learned.release()


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredErrors(RewardErrors):
    """Errors of a policy's values on scored rows, and those of a linear model of the rows that it learns from.

    Attributes:
        certain: whether the linear model's errors are smaller by more than two standard errors.
    """

    certain: bool

    @property
    def warning(self) -> str | None:
        """A warning if a linear model predicts rewards better than the policy's values, or None."""
        if not self.certain or not self.constant > self.linear:
            return None
        return (
            "a linear model predicts the rewards of scored rows better than this policy's values: it explains "
            f"{describe_explained(self.linear, self.constant)} of their variance, the values "
            f'{describe_explained(self.model, self.constant)}. Set algorithm to "boosting" with rl.gamma 0'
        )


@torch.no_grad()
def reward_errors(
    learner: PolicyLearner, config: WorkflowConfig, data: Data, scored: NDArray[np.int64], group: Group
) -> ScoredErrors | None:
    """Compares a learner's values of scored rows with a linear model; every rank calls it.

    None if later rewards count, if the policy learns from scored rows, or if no row is scored.

    Args:
        learner: the learner.
        config: the run's config.
        data: the rows.
        scored: [n] numbers of this rank's scored rows.
        group: the ranks.
    """
    if (config.rl.gamma and data.continues) or data.seen or not any(group.all_gather(len(scored))):
        return None
    rows = _gather_rows(_part(data, group), group)
    linear = build_reward_model(data.spec.dense)
    model = None
    with _one_rank_works(config, group):
        if rows is not None:
            fit_linear(linear, rows)
            weight = torch.ones_like(rows.reward) if rows.weight is None else rows.weight
            model = _save(linear) | {"mean": weight @ rows.reward / weight.sum()}
        tensors = load(group.broadcast_bytes(None if model is None else save(model)))
    mean = tensors.pop("mean")
    linear.load_fitted(tensors)
    linear.to(group.device).eval()
    sums = torch.zeros(8, dtype=torch.float64)
    for batch in rows_in_order(data.evaluated.rows, scored, group.device):
        target = batch.reward.double().cpu()
        boost = learner.rewards(batch)[0] - batch.reward  # a known constant is no prediction
        values = (select_choice(learner.evaluate(batch).q, batch.action) - boost).double().cpu()
        state, actions = data.spec.dense_columns(batch.state, batch.actions)
        by_line = select_choice(linear(state, actions.mask, actions.features), batch.action)
        of_values = (values - target).square()
        of_line = (by_line.squeeze(1).double().cpu() - target).square()
        gain = of_values - of_line
        constant = (target - mean).square()
        weight = batch.weight.double().cpu()
        weighted = [weight @ column for column in (torch.ones_like(gain), constant, of_line, of_values, gain)]
        squares = weight.square()
        sums += torch.stack([*weighted, squares.sum(), squares @ gain, squares @ gain.square()])
    total, constant_error, linear_error, error, gain_sum, *moments = group.all_reduce(sums).tolist()
    gain_mean = gain_sum / total
    variance = moments[2] - 2 * gain_mean * moments[1] + gain_mean**2 * moments[0]
    return ScoredErrors(
        rows=sum(group.all_gather(len(scored))),
        constant=constant_error / total,
        linear=linear_error / total,
        model=error / total,
        certain=gain_mean > 2 * math.sqrt(max(variance, 0.0)) / total,
    )


def _one_rank_works(config: WorkflowConfig, group: Group) -> AbstractContextManager[None]:
    """Returns the context in which other ranks wait long for rank 0."""
    waits = config.rendezvous
    return group.waiting_at_most(waits.startup_timeout_seconds, then=waits.step_timeout_seconds)


def _part(data: Data, group: Group) -> RewardRows:
    """Returns this rank's part of the rows, without the columns of embeddings."""
    spec = data.spec.dense
    pairs = num_pairs(spec.num_action_features, spec.num_state_features)
    width = spec.num_state_features + spec.num_action_features + pairs
    total = sum(data.counts)
    most = min(total, max(MOST_VALUES // max(width, 1), 1))
    if most < total and group.is_first:
        logger.info(f"reward model: fitted to {most:,} of {total:,} rows, spread over all")
    rows = data.learned
    shards = data.shards
    part = shards.part(spread(rows.learnable_numbers, apportion(data.counts, most)[shards.own]))
    copy = data.train.copy
    folds = fold_of(np.asarray(copy.episode_hash), FOLDS)[copy.episode] if len(copy) else np.zeros(1, np.int64)
    if not all(group.all_reduce(torch.from_numpy(np.bincount(folds[part], minlength=FOLDS).astype(np.float64)))):
        if group.is_first:
            logger.warning(
                "reward model: there are too few episodes to check it on others, so it is checked on other rows of the "
                "same ones"
            )
        folds = np.arange(len(folds)) % FOLDS
    parts = [_decisions(batch, data.spec) for batch in rows_in_order(rows, part, torch.device("cpu"))]
    joined = replace(_join_rows([_no_decisions(spec), *parts]), fold=torch.from_numpy(folds[part]))
    return joined if data.train.weights is not None else replace(joined, weight=None)


def _decisions(batch: TransitionBatch, spec: SourceSpec) -> RewardRows:
    """Returns the decisions of a batch, without folds and columns of embeddings."""
    state, actions = spec.dense_columns(batch.state, batch.actions)
    features = actions.features
    return RewardRows(
        state=state,
        chosen=None if features is None else select_choice(features, batch.action),
        action=batch.action if features is None else torch.zeros_like(batch.action),
        reward=batch.reward.double(),
        fold=torch.zeros_like(batch.action),
        weight=batch.weight.double(),
    )


def _no_decisions(spec: SourceSpec) -> RewardRows:
    """Returns the decisions of a machine without rows."""
    none = torch.zeros(0, dtype=torch.int64)
    return RewardRows(
        state=torch.zeros(0, spec.num_state_features),
        chosen=torch.zeros(0, spec.num_action_features) if spec.parametric else None,
        action=none,
        reward=none.double(),
        fold=none,
        weight=none.double(),
    )


def _join_rows(parts: Sequence[RewardRows]) -> RewardRows:
    """Returns the decisions of all parts."""
    names = [column.name for column in fields(RewardRows) if getattr(parts[0], column.name) is not None]
    return replace(parts[0], **{name: torch.cat([getattr(part, name) for part in parts]) for name in names})


def _gather_rows(part: RewardRows, group: Group) -> RewardRows | None:
    """Returns the rows of all ranks on rank 0, and None on the others."""
    names = [column.name for column in fields(RewardRows) if getattr(part, column.name) is not None]
    columns = {name: list(group.gather(getattr(part, name))) for name in names}
    return replace(part, **{name: torch.cat(column) for name, column in columns.items()}) if group.is_first else None


def _save(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
