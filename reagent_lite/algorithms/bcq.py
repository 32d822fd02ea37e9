"""BCQ's restriction: a policy takes only allowed choices that are likely enough by a model of the log."""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from reagent_lite.rl.policies import LOWEST, likely_enough
from reagent_lite.types import SourceSpec


class BCQActionFilter(nn.Module):
    """Allows choices that are likely enough in the log; Fujimoto et al. (2019), Benchmarking Batch Deep RL, eq. 10.

    Args:
        behavior_cloning: forward(state, mask, features) -> logits [B, K, 1] of the logged choice.
        threshold: smallest probability of a choice, as a share of the largest.
    """

    def __init__(self, behavior_cloning: nn.Module, threshold: float) -> None:
        super().__init__()
        self.behavior_cloning = behavior_cloning
        self.threshold = threshold

    def forward(self, state: Tensor, mask: Tensor, features: Tensor | None = None) -> Tensor:
        """Returns [B, K] bool, with at least one choice in a row with allowed choices.

        state is [B, S], mask [B, K] bool and features [B, K, F] of candidates.
        """
        return likely_enough(self.behavior_cloning(state, mask, features).squeeze(2), mask, self.threshold)


class LoggingPolicy(nn.Module):
    """The estimated logging policy (evaluation.behavior), in place of a behavior-cloning network.

    Columns of embeddings are left out: the policy is a softmax of a linear model.

    Args:
        spec: feature and action counts.

    Attributes:
        weight: [A, S] for A actions, or A features of a candidate.
        bias: [A].
        share: [] share of uniform choices.
    """

    def __init__(self, spec: SourceSpec) -> None:
        super().__init__()
        self.has_embeddings = spec.has_embeddings
        spec = spec.dense
        width = spec.num_action_features if spec.parametric else len(spec.action_names)
        self.weight = nn.Buffer(torch.zeros(width, spec.num_state_features))
        self.bias = nn.Buffer(torch.zeros(width))
        self.share = nn.Buffer(torch.zeros(()))

    def forward(self, state: Tensor, mask: Tensor, features: Tensor | None = None) -> Tensor:
        """Returns logarithms of probabilities [B, K, 1] for state [B, S], mask [B, K] and features [B, K, F]."""
        if self.has_embeddings:
            state = state[:, : self.weight.shape[1]]
            features = None if features is None else features[..., : self.weight.shape[0]]
        utility = linear(state, self.weight, self.bias)
        if features is not None:
            utility = (features * utility.unsqueeze(1)).sum(2)
        chosen = utility.masked_fill(~mask, LOWEST).softmax(1)
        allowed = mask.to(chosen.dtype)
        uniform = allowed / allowed.sum(1, keepdim=True).clamp(min=1)
        return (chosen * (1 - self.share) + uniform * self.share).log().unsqueeze(2)
