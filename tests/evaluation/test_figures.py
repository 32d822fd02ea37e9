"""Figures of two rows by hand, for an unrestricted and for a restricted learner."""

import math

import pytest
import torch
from oracles.batches import make_batch
from oracles.bundles import Habit
from oracles.runs import ALONE
from torch import Tensor, nn

from reagent_lite.algorithms.dqn import DQN, DQNSettings
from reagent_lite.distributed.group import Group, ProcessRanks
from reagent_lite.evaluation.figures import figures
from reagent_lite.models.value_heads import ScalarHead
from reagent_lite.rl.policies import Softmax

# Q(s, .) is the state itself; rewards 0 and 1 end both episodes
ROWS = make_batch([[3.0, 4.0], [4.0, 2.0]], [[0.0, 0.0]] * 2, [0, 1], [0.0, 1.0], bootstrap=torch.zeros(2),
                  weight=torch.ones(2))  # fmt: skip


class Table(nn.Module):
    needs_candidate_list = False

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, state: Tensor, mask: Tensor, features: Tensor | None = None) -> Tensor:
        return (state * self.scale).unsqueeze(2)


def figures_of(behavior_cloning: nn.Module | None) -> dict[str, float]:
    learner = DQN(
        Table(), ScalarHead(), DQNSettings(gamma=0.9, target_update_rate=0.1), behavior_cloning=behavior_cloning
    )
    return figures([ROWS], learner, ALONE, action_names=("a", "b"), policy=Softmax(1.0))


def test_any_action() -> None:
    result = figures_of(None)
    # errors 3 - 0 and 2 - 1
    assert result["td_loss/mean"] == pytest.approx((9 + 1) / 2)
    # targets are the rewards 0 and 1
    assert (result["td_target/mean"], result["td_target/variance"]) == (0.5, 0.25)
    assert (result["actions/model/a"], result["actions/model/b"]) == (0.5, 0.5)
    assert result["value/model/mean"] == 4
    a = (1 / (1 + math.e) + math.e**2 / (1 + math.e**2)) / 2
    assert result["propensities/model/a/mean"] == pytest.approx(a)


def test_target_variance_is_that_of_the_rows_of_all_ranks() -> None:
    """Two other rows with targets 4 and 5 on another rank: 0, 1, 4, 5 have mean 2.5 and variance 4.25."""

    class Another(Group):
        def all_reduce(self, tensor: Tensor) -> Tensor:
            other = torch.zeros_like(tensor)
            # rows, squared targets, targets
            other[0] = 2
            other[1] = 41
            other[3] = 9
            return tensor + other

    learner = DQN(Table(), ScalarHead(), DQNSettings(gamma=0.9, target_update_rate=0.1))
    group = Another(ProcessRanks(), ALONE.device)
    result = figures([ROWS], learner, group, action_names=("a", "b"), policy=Softmax(1.0))
    assert (result["td_target/mean"], result["td_target/variance"]) == (2.5, 4.25)


def test_a_restricted_policy_is_evaluated_as_it_plays() -> None:
    """The share of b relative to a is 0.04 / 0.96, below 0.1: only a is allowed, with values 3 and 4."""
    result = figures_of(Habit([0.96, 0.04]))
    assert (result["actions/model/a"], result["actions/model/b"]) == (1, 0)
    assert (result["propensities/model/a/mean"], result["propensities/model/b/mean"]) == (1, 0)
    assert result["value/model/mean"] == 3.5
    # what the log did and what the network says of each action is as before
    assert (result["actions/logged/b"], result["value/model/b/mean"]) == (0.5, 3)
