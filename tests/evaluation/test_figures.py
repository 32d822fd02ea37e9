"""Figures of two rows by hand, for an unrestricted and for a restricted learner."""

import math
from unittest.mock import Mock

import pytest
import torch
from helpers.batches import StateValues, make_batch
from helpers.bundles import Habit
from helpers.runs import ALONE
from torch import nn

from reagent_lite.algorithms.dqn import DQN, DQNSettings
from reagent_lite.distributed.group import Group
from reagent_lite.evaluation.learner_figures import figures
from reagent_lite.models.value_heads import ScalarHead
from reagent_lite.rl.policies import Softmax

# Q(s, .) is the state itself; rewards 0 and 1 end both episodes
ROWS = make_batch([[3.0, 4.0], [4.0, 2.0]], [[0.0, 0.0]] * 2, [0, 1], [0.0, 1.0], bootstrap=torch.zeros(2),
                  weight=torch.ones(2))  # fmt: skip


def figures_of(behavior_cloning: nn.Module | None = None, group: Group = ALONE) -> dict[str, float]:
    settings = DQNSettings(gamma=0.9, target_update_rate=0.1)
    learner = DQN(StateValues(), ScalarHead(), settings, behavior_cloning=behavior_cloning)
    return figures([ROWS], learner, group, action_names=("a", "b"), policy=Softmax(1.0))


ANY_ACTION = {
    "td_loss/mean": (9 + 1) / 2,  # errors 3 - 0 and 2 - 1
    "td_target/mean": 0.5, "td_target/variance": 0.25,  # targets are the rewards 0 and 1
    "reward/logged/mean": 0.5, "propensities/logged/mean": 1, "actions/logged/a": 0.5, "actions/logged/b": 0.5,
    "actions/model/a": 0.5, "actions/model/b": 0.5,
    "propensities/model/a/mean": (1 / (1 + math.e) + math.e**2 / (1 + math.e**2)) / 2,
    "propensities/model/b/mean": (math.e / (1 + math.e) + 1 / (1 + math.e**2)) / 2,
    "value/logged/mean": 2.5, "value/model/mean": 4, "value/model/a/mean": 3.5, "value/model/b/mean": 3,
}  # fmt: skip


@pytest.mark.parametrize(
    ("behavior_cloning", "changes"),
    [
        (None, {}),
        # the share of b relative to a is 0.04 / 0.96, below 0.1: only a is allowed, with values 3 and 4; what the log
        # did and what the network says of each action is as before
        (Habit([0.96, 0.04]), {
            "actions/model/a": 1, "actions/model/b": 0, "propensities/model/a/mean": 1, "propensities/model/b/mean": 0,
            "value/model/mean": 3.5,
        }),
    ],
    ids=["any action", "restricted"],
)  # fmt: skip
def test_a_policy_is_evaluated_as_it_plays(behavior_cloning: Habit | None, changes: dict[str, float]) -> None:
    assert figures_of(behavior_cloning) == pytest.approx(ANY_ACTION | changes)


def test_target_variance_is_that_of_the_rows_of_all_ranks() -> None:
    """Two other rows with targets 4 and 5 on another rank: 0, 1, 4, 5 have mean 2.5 and variance 4.25."""
    others = torch.tensor([2.0, 41.0, 0.0, 9.0])  # rows, squared targets, losses, targets
    group = Mock(device=ALONE.device, all_reduce=lambda sums: sums + nn.functional.pad(others, (0, len(sums) - 4)))
    result = figures_of(group=group)
    assert (result["td_target/mean"], result["td_target/variance"]) == (2.5, 4.25)
