"""Target policies over [B, K] choices: functions from values to propensities.

A run has a single policy, which is evaluated on logs, simulated and exported.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

LOWEST: Final = torch.finfo(torch.float32).min
"""Value of a choice that is not allowed; unlike -inf it can be subtracted from itself."""

_MOST_RATIO = 1e6
_BISECTIONS = 50


@dataclass(frozen=True, slots=True)
class Softmax:
    """softmax(q / temperature) over the allowed choices."""

    kind: ClassVar[str] = "softmax"
    epsilon: ClassVar[float] = 0.0
    temperature: float

    def propensities(self, q: Tensor, mask: Tensor) -> Tensor:
        """Returns the probability of each choice, [B, K]; a row with none allowed gives zeros."""
        masked = q.masked_fill(~mask, LOWEST)
        # the largest is subtracted first: large values divided by a small temperature would lose all digits
        return ((masked - masked.amax(1, keepdim=True)) / self.temperature).softmax(1) * mask

    def __str__(self) -> str:
        return f"softmax of q at temperature {self.temperature:g}"


@dataclass(frozen=True, slots=True)
class EpsilonGreedy:
    """The largest allowed q, and with probability epsilon a uniform draw from the allowed choices."""

    kind: ClassVar[str] = "epsilon_greedy"
    temperature: ClassVar[float] = 0.0
    epsilon: float = 0.0

    def propensities(self, q: Tensor, mask: Tensor) -> Tensor:
        """Returns the probability of each choice, [B, K]; ties go to the lowest index, none allowed gives zeros."""
        allowed = mask.to(q.dtype)
        uniform = allowed / allowed.sum(1, keepdim=True).clamp(min=1)
        largest = q.masked_fill(~mask, LOWEST).argmax(1, keepdim=True)
        greedy = (torch.arange(q.shape[1], device=q.device) == largest).to(q.dtype)
        return self.epsilon * uniform + (1 - self.epsilon) * greedy * allowed

    def __str__(self) -> str:
        return f"epsilon-greedy at epsilon {self.epsilon:g}" if self.epsilon else "greedy"


TargetPolicy = Softmax | EpsilonGreedy


def entropy(propensities: Tensor) -> Tensor:
    """Returns the entropy of each row in nats, [B], of probabilities [B, K]."""
    nats: Tensor = torch.special.entr(propensities).sum(1)
    return nats


def temperature_with(wanted: float, mean_entropy: Callable[[float], float], scale: float) -> float:
    """Returns the temperature of a softmax with a mean entropy, by bisection of its logarithm.

    Temperatures from a millionth of the scale to a million times the scale are searched. If none of them has the
    wanted entropy, the nearest end of the range is returned.

    Args:
        wanted: mean entropy in nats.
        mean_entropy: returns the mean entropy at a temperature; it increases with the temperature.
        scale: largest difference of two values of a row; if it is 0 every temperature gives the same policy.
    """
    if not scale > 0:
        return 1.0
    low, high = math.log(scale / _MOST_RATIO), math.log(scale * _MOST_RATIO)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if mean_entropy(math.exp(middle)) < wanted:
            low = middle
        else:
            high = middle
    return math.exp((low + high) / 2)


def policy_json(policy: TargetPolicy) -> dict[str, Any]:
    """Returns {"kind": ...} with the policy's parameter, as in a bundle's manifest."""
    return {"kind": policy.kind, **asdict(policy)}


def policy_of(document: Mapping[str, Any]) -> TargetPolicy:
    """Returns the policy of a document from `policy_json`."""
    parameters = {name: value for name, value in document.items() if name != "kind"}
    return {policy.kind: policy for policy in (Softmax, EpsilonGreedy)}[document["kind"]](**parameters)


def likely_enough(logits: Tensor, mask: Tensor, threshold: float) -> Tensor:
    """Returns the allowed choices whose probability is at least threshold times the largest, [B, K] bool.

    Discrete BCQ's filter: Fujimoto et al. (2019), Benchmarking Batch Deep RL, eq. 10. Softmax ratios are
    exp(logit - largest logit), so nothing is normalized.
    """
    masked = logits.masked_fill(~mask, LOWEST)
    return mask & ((masked - masked.amax(1, keepdim=True)).exp() >= threshold)
