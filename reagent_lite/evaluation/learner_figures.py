"""Figures of a learner on logged rows: TD loss, the log's choices, the learned policy's choices."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from reagent_lite.algorithms.policy_learner import PolicyLearner, evaluating
from reagent_lite.distributed.group import Group
from reagent_lite.rl.policies import TargetPolicy
from reagent_lite.rl.td import greedy_choice, select_choice
from reagent_lite.types import TransitionBatch

_MEANS = (
    "td_loss/mean",
    "td_target/mean",
    "reward/logged/mean",
    "propensities/logged/mean",
    "value/logged/mean",
    "value/model/mean",
)


@torch.no_grad()
def figures(
    batches: Iterable[TransitionBatch],
    learner: PolicyLearner,
    group: Group,
    *,
    action_names: Sequence[str],
    policy: TargetPolicy,
) -> dict[str, float]:
    """Returns TensorBoard tags and their values, means over the rows of all ranks. Every rank calls it.

    Args:
        batches: this rank's rows, each of weight 1; may be empty.
        learner: computes values and TD loss of rows.
        group: sums over ranks.
        action_names: names of fixed actions; empty for candidates, which have no tags of their own.
        policy: the policy that is evaluated.
    """
    count = len(action_names)
    sums = torch.zeros(2 + len(_MEANS) + 4 * count, dtype=torch.float64, device=group.device)
    with evaluating(learner):
        for batch in batches:
            sums += _sums(batch, learner, count, policy)
    rows, squares, *total = group.all_reduce(sums).tolist()
    rows = max(rows, 1.0)
    names = [*_MEANS]
    for tag in ("actions/logged/{}", "actions/model/{}", "propensities/model/{}/mean", "value/model/{}/mean"):
        names += [tag.format(name) for name in action_names]
    means = {name: value / rows for name, value in zip(names, total, strict=True)}
    return means | {"td_target/variance": max(squares / rows - means["td_target/mean"] ** 2, 0.0)}


@torch.no_grad()
def mean_td_loss(batches: Iterable[TransitionBatch], learner: PolicyLearner, group: Group) -> float:
    """Returns the mean TD loss over the rows of all ranks, the same on every rank, which all call it.

    Args:
        batches: this rank's rows, each of weight 1; may be empty.
        learner: computes the loss of rows.
        group: sums over ranks.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=group.device)
    with evaluating(learner):
        for batch in batches:
            sums += torch.stack((batch.weight.sum().double(), learner.evaluate(batch).td_loss.double()))
    rows, total = group.all_reduce(sums).tolist()
    return float(total / max(rows, 1.0))


def _sums(batch: TransitionBatch, learner: PolicyLearner, count: int, policy: TargetPolicy) -> Tensor:
    evaluated = learner.evaluate(batch)
    q = evaluated.q
    choices = evaluated.choices
    greedy = greedy_choice(evaluated.scores, choices)
    target = evaluated.target.double()
    scalars = torch.stack(
        (
            batch.weight.sum().double(),
            target.square().sum(),
            evaluated.td_loss.double(),
            target.sum(),
            batch.reward.sum().double(),
            batch.propensity.sum().double(),
            select_choice(q, batch.action).sum().double(),
            select_choice(q, greedy).sum().double(),
        )
    )
    if not count:
        return scalars
    shares = (
        torch.bincount(batch.action, minlength=count),
        torch.bincount(greedy, minlength=count),
        policy.propensities(evaluated.scores, choices).sum(0),
        q.sum(0),
    )
    return torch.cat((scalars, *(share.double() for share in shares)))
