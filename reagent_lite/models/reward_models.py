"""Models of the reward of a decision: a linear model, and trees for what it leaves.

named actions   q[a] = w_a . s + b_a + trees_a(s)
candidates      q[c] = w . s + v . c + s' M c + b + trees(s, c)
"""

from typing import Final

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from reagent_lite.models.forest import Forest
from reagent_lite.types import SourceSpec


class ActionRewards(nn.Module):
    """Expected reward of all K actions from the state; 0 until it is fitted."""

    needs_candidate_list: Final[bool] = False

    def __init__(self, spec: SourceSpec) -> None:
        super().__init__()
        self.outputs: Final[int] = len(spec.action_names)
        self.weight = nn.Parameter(torch.zeros(self.outputs, spec.num_state_features))
        self.bias = nn.Parameter(torch.zeros(self.outputs))
        self.trees: nn.Module = nn.Identity()

    def forward(self, state: Tensor, mask: Tensor, features: Tensor | None = None) -> Tensor:
        """Returns [B, K, 1] for state [B, S]."""
        values = linear(state, self.weight, self.bias)
        if isinstance(self.trees, Forest):
            values = values + self.trees(state)
        return values.unsqueeze(2)


class CandidateRewards(nn.Module):
    """Expected reward of each candidate from state and candidate; 0 until it is fitted."""

    needs_candidate_list: Final[bool] = False
    outputs: Final[int] = 1

    def __init__(self, spec: SourceSpec) -> None:
        super().__init__()
        self.state_weight = nn.Parameter(torch.zeros(1, spec.num_state_features))
        self.bias = nn.Parameter(torch.zeros(1))
        self.item_weight = nn.Parameter(torch.zeros(spec.num_action_features))
        self.pair_weight = nn.Parameter(torch.zeros(spec.num_action_features, spec.num_state_features))
        self.trees: nn.Module = nn.Identity()

    def forward(self, state: Tensor, mask: Tensor, features: Tensor | None = None) -> Tensor:
        """Returns [B, K, 1] for state [B, S] and features [B, K, F]."""
        assert features is not None
        weights = linear(state, self.pair_weight, self.item_weight).unsqueeze(1)
        values = (features * weights).sum(2) + linear(state, self.state_weight, self.bias)
        if isinstance(self.trees, Forest):
            repeated = state.unsqueeze(1).expand(-1, features.shape[1], -1)
            inputs = torch.cat((repeated, features), 2).flatten(0, 1)
            values = values + self.trees(inputs).view(values.shape)
        return values.unsqueeze(2)


RewardModel = ActionRewards | CandidateRewards


def build_reward_model(spec: SourceSpec) -> RewardModel:
    """Returns the model of a source's decisions, not fitted yet."""
    return CandidateRewards(spec) if spec.parametric else ActionRewards(spec)
