"""Models of the reward of a decision: a linear model, products of features, and trees.

named actions   score[a] = w_a . s + b_a + s' M_a s + trees_a(s)
candidates      score[c] = w . s + v . c + s' P c + c' M c + b + trees(s, c)

q is the score. If rewards have two values only, as events have, it is low + span * sigmoid(score).
"""

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from reagent_lite.models.forest import Forest
from reagent_lite.types import SourceSpec


class Products(nn.Module):
    """Sums of weighted products of two features.

    Args:
        first: [P] int64, columns of the input.
        second: [P] int64, columns of the input.
        weight: [G, P] float32.
    """

    def __init__(self, first: Tensor, second: Tensor, weight: Tensor) -> None:
        super().__init__()
        self.first = nn.Buffer(first)
        self.second = nn.Buffer(second)
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        """Returns [N, G] for x [N, W]."""
        return linear(x.index_select(1, self.first) * x.index_select(1, self.second), self.weight)


class TwoValues(nn.Module):
    """Expected values of rewards that are either `low` or `low + span`.

    Args:
        low: [G] float32.
        span: [] float32.
    """

    def __init__(self, low: Tensor, span: Tensor) -> None:
        super().__init__()
        self.low = nn.Buffer(low)
        self.span = nn.Buffer(span)

    def forward(self, score: Tensor) -> Tensor:
        """Returns values [B, K] for the log-odds of the higher reward, [B, K]; K is G, or any number if G is 1."""
        return self.low + self.span * score.sigmoid()


class RewardModel(nn.Module):
    """Base of both models: expected rewards, which are 0 until the model is fitted.

    Attributes:
        outputs: number of named actions; 1 for candidates.
        products: products of features of the state, or of candidates; an identity if there are none.
        trees: trees; an identity if there are none.
        link: from scores to expected rewards.
    """

    needs_candidate_list: Final[bool] = False
    outputs: int
    bias: nn.Parameter

    def __init__(self) -> None:
        super().__init__()
        self.products: nn.Module = nn.Identity()
        self.trees: nn.Module = nn.Identity()
        self.link: nn.Module = nn.Identity()

    @torch.no_grad()
    def add(self, values: Tensor) -> None:
        """Adds constants [outputs] to expected rewards."""
        target = self.link.low if isinstance(self.link, TwoValues) else self.bias
        target.add_(values.to(target))

    def load_fitted(self, tensors: Mapping[str, Tensor]) -> None:
        """Loads the state_dict of a fitted model."""
        if "products.weight" in tensors:
            self.products = Products(*(tensors[f"products.{name}"] for name in ("first", "second", "weight")))
        if "trees.value" in tensors:
            tables = (tensors[f"trees.{name}"] for name in ("feature", "threshold", "value"))
            self.trees = Forest(*tables, outputs=self.outputs)
        if "link.low" in tensors:
            self.link = TwoValues(tensors["link.low"], tensors["link.span"])
        self.load_state_dict(dict(tensors))


class ActionRewards(RewardModel):
    """Expected reward of all K actions from the state."""

    def __init__(self, spec: SourceSpec) -> None:
        super().__init__()
        self.outputs = len(spec.action_names)
        self.weight = nn.Parameter(torch.zeros(self.outputs, spec.num_state_features))
        self.bias = nn.Parameter(torch.zeros(self.outputs))

    def forward(self, state: Tensor, mask: Tensor, features: Tensor | None = None) -> Tensor:
        """Returns [B, K, 1] for state [B, S]."""
        scores = linear(state, self.weight, self.bias)
        if isinstance(self.products, Products):
            scores = scores + self.products(state)
        if isinstance(self.trees, Forest):
            scores = scores + self.trees(state)
        values: Tensor = self.link(scores)
        return values.unsqueeze(2)


class CandidateRewards(RewardModel):
    """Expected reward of each candidate from state and candidate."""

    def __init__(self, spec: SourceSpec) -> None:
        super().__init__()
        self.outputs = 1
        self.state_weight = nn.Parameter(torch.zeros(1, spec.num_state_features))
        self.bias = nn.Parameter(torch.zeros(1))
        self.item_weight = nn.Parameter(torch.zeros(spec.num_action_features))
        self.pair_weight = nn.Parameter(torch.zeros(spec.num_action_features, spec.num_state_features))

    def forward(self, state: Tensor, mask: Tensor, features: Tensor | None = None) -> Tensor:
        """Returns [B, K, 1] for state [B, S] and features [B, K, F]."""
        assert features is not None
        weights = linear(state, self.pair_weight, self.item_weight).unsqueeze(1)
        scores = (features * weights).sum(2) + linear(state, self.state_weight, self.bias)
        if isinstance(self.products, Products):
            scores = scores + self.products(features.flatten(0, 1)).view(scores.shape)
        if isinstance(self.trees, Forest):
            repeated = state.unsqueeze(1).expand(-1, features.shape[1], -1)
            inputs = torch.cat((repeated, features), 2).flatten(0, 1)
            scores = scores + self.trees(inputs).view(scores.shape)
        values: Tensor = self.link(scores)
        return values.unsqueeze(2)


def build_reward_model(spec: SourceSpec) -> RewardModel:
    """Returns the model of a source's decisions, not fitted yet."""
    return CandidateRewards(spec) if spec.parametric else ActionRewards(spec)
