"""Figures of a learner on logged rows: TD loss, what the log does, what the learned policy would do."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from reagent_lite.algorithms.dqn import DQN
from reagent_lite.distributed.group import Group
from reagent_lite.rl.policies import TargetPolicy
from reagent_lite.rl.td import chosen, greedy_choice
from reagent_lite.types import TransitionBatch


@torch.no_grad()
def figures(
    batches: Iterable[TransitionBatch],
    learner: DQN,
    group: Group,
    *,
    action_names: Sequence[str],
    policy: TargetPolicy,
) -> dict[str, float]:
    """Returns TensorBoard tags and their values, means over the rows of all ranks. Every rank calls it.

    Args:
        batches: this rank's rows, weight 1 each, or none.
        learner: gives values and TD loss of rows.
        group: sums over ranks.
        action_names: names of fixed actions; empty for candidates, which have no tags of their own.
        policy: the policy that is evaluated.
    """
    count = len(action_names)
    sums = torch.zeros(6 + 4 * count, dtype=torch.float64, device=group.device)
    learner.train(False)
    for batch in batches:
        sums += _sums(batch, learner, count, policy)
    learner.train()
    total = group.sum(sums).tolist()
    rows = max(total[0], 1.0)
    names = ["td_loss/mean", "reward/logged/mean", "propensities/logged/mean", "value/logged/mean", "value/model/mean"]
    for tag in ("actions/logged/{}", "actions/model/{}", "propensities/model/{}/mean", "value/model/{}/mean"):
        names += [tag.format(name) for name in action_names]
    return {name: value / rows for name, value in zip(names, total[1:], strict=True)}


def _sums(batch: TransitionBatch, learner: DQN, count: int, policy: TargetPolicy) -> Tensor:
    q, choices, td_loss = learner.evaluate(batch)
    greedy = greedy_choice(q, choices)
    scalars = torch.stack(
        (
            batch.weight.sum(),
            td_loss,
            batch.reward.sum(),
            batch.propensity.sum(),
            chosen(q, batch.action).sum(),
            chosen(q, greedy).sum(),
        )
    ).double()
    if not count:
        return scalars
    shares = (
        torch.bincount(batch.action, minlength=count),
        torch.bincount(greedy, minlength=count),
        policy.propensities(q, choices).sum(0),
        q.sum(0),
    )
    return torch.cat((scalars, *(share.double() for share in shares)))
