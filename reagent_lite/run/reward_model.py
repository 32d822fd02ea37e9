"""Fits a model of the reward to the rows of all machines: rank 0 has a part of each, and all ranks get its model."""

import numpy as np
import torch
from safetensors.torch import load, save

from reagent_lite.algorithms.boosting import Boosting
from reagent_lite.algorithms.reward_fit import FOLDS, MOST_VALUES, Decisions, TreeSettings
from reagent_lite.config import WorkflowConfig
from reagent_lite.config.algorithm import BoostingConfig
from reagent_lite.console import logger, progress
from reagent_lite.data.sampling.plan import apportion
from reagent_lite.data.sampling.source import rows_in_order
from reagent_lite.distributed.group import Group
from reagent_lite.errors import needing
from reagent_lite.evaluation.behavior import fold_of
from reagent_lite.evaluation.episodes import spread
from reagent_lite.rl.td import chosen
from reagent_lite.run.logged import Data

_VALUES_PER_THREAD = 10_000_000  # with fewer, LightGBM's threads wait for each other longer than they save


def fit_reward_model(learner: Boosting, config: WorkflowConfig, data: Data, group: Group) -> None:
    """Fits the learner's model to the rows that it learns from; every rank calls it.

    Of more rows than `MOST_VALUES` feature values a sample is used, spread evenly over the rows of all machines.
    """
    settings = config.section
    assert isinstance(settings, BoostingConfig)
    with needing("data", "algorithm"):
        import lightgbm  # noqa: F401
    rows = _gathered(_part(data, group), group)
    model = None
    with group.waiting_at_most(config.rendezvous.startup_timeout_seconds, then=config.rendezvous.step_timeout_seconds):
        if rows is not None:
            with progress("fitting the reward model", "rows", brief=True, enabled=group.is_first):
                trees = TreeSettings(
                    most=settings.most_trees,
                    depth=settings.depth,
                    leaves=settings.leaves,
                    shrinkage=settings.shrinkage,
                    threads=group.cores if rows.inputs.numel() > _VALUES_PER_THREAD else 1,
                    seed=config.seed,
                )
                learner.fit_rows(rows, trees)
            model = save({name: tensor.contiguous() for name, tensor in learner.fitted_tensors().items()})
        learner.load_fitted(load(group.broadcast_bytes(model)))
    learner.to(group.device)
    data.learned.release()


def _part(data: Data, group: Group) -> Decisions:
    """Returns this rank's part of the rows."""
    width = data.spec.num_state_features + data.spec.num_action_features
    total = sum(data.counts)
    most = min(total, max(MOST_VALUES // max(width, 1), 1))
    if most < total and group.is_first:
        logger.info(f"reward model: fitted to {most:,} of {total:,} rows, spread over all")
    rows = data.learned
    shards = data.shards
    numbers = np.arange(len(rows.scalars)) if rows.usable is None else rows.usable.cpu().numpy()
    part = shards.part(spread(numbers, apportion(data.counts, most)[shards.own]))
    copy = data.train.copy
    folds = fold_of(np.asarray(copy.episode_hash), FOLDS)[copy.episode] if len(copy) else np.zeros(1, np.int64)
    states, items, actions, rewards = [], [], [], []
    for batch in rows_in_order(rows, part, torch.device("cpu")):
        states.append(batch.state)
        rewards.append(batch.reward.double())
        if batch.actions.features is None:
            actions.append(batch.action)
        else:
            items.append(chosen(batch.actions.features, batch.action))
            actions.append(torch.zeros_like(batch.action))
    empty = torch.zeros(0, dtype=torch.int64)
    return Decisions(
        state=torch.cat(states) if states else torch.zeros(0, data.spec.num_state_features),
        chosen=(torch.cat(items) if items else torch.zeros(0, data.spec.num_action_features))
        if data.spec.parametric
        else None,
        action=torch.cat(actions) if actions else empty,
        reward=torch.cat(rewards) if rewards else empty.double(),
        fold=torch.from_numpy(folds[part]) if len(part) else empty,
    )


def _gathered(part: Decisions, group: Group) -> Decisions | None:
    """Returns the rows of all ranks on rank 0, and None on the others."""
    columns = {}
    for name in ("state", "chosen", "action", "reward", "fold"):
        column = getattr(part, name)
        parts = [] if column is None else list(group.gather(column))
        columns[name] = torch.cat(parts) if parts else None
    return Decisions(**columns) if group.is_first else None  # type: ignore[arg-type]
