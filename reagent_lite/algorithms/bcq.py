"""BCQ's restriction: a policy takes those of the allowed choices that a model of the log finds likely enough."""

from torch import Tensor, nn

from reagent_lite.rl.policies import likely_enough


class LikelyInTheLog(nn.Module):
    """Fujimoto et al. (2019), Benchmarking Batch Deep RL, eq. 10.

    Args:
        imitator: forward(state, mask, features) -> logits [B, K, 1] of the logged choice.
        threshold: share of the largest probability that a choice needs.
    """

    def __init__(self, imitator: nn.Module, threshold: float) -> None:
        super().__init__()
        self.imitator = imitator
        self.threshold = threshold

    def forward(self, state: Tensor, mask: Tensor, features: Tensor | None = None) -> Tensor:
        """Returns [B, K] bool, at least one where any is allowed.

        state is [B, S], mask [B, K] bool and features [B, K, F] of candidates.
        """
        return likely_enough(self.imitator(state, mask, features).squeeze(2), mask, self.threshold)
