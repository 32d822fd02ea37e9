"""Entropy of a softmax policy: how near it is to greedy or uniform, and which temperature gives another entropy."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from reagent_lite.distributed.group import Group
from reagent_lite.evaluation.interval import number
from reagent_lite.rl.policies import LOWEST, Softmax, entropy, temperature_with

_NEARLY_GREEDY = 0.05
_NEARLY_UNIFORM = 0.95


class SoftmaxRows:
    """Scores on the rows of all ranks, and the entropy of their softmax by temperature; every rank calls each method.

    Args:
        parts: this rank's scores [n, K] and choices [n, K] that the policy may take.
        group: all ranks.
    """

    def __init__(self, parts: Iterable[tuple[Tensor, Tensor]], group: Group) -> None:
        pairs = [(scores.double().cpu(), mask.cpu()) for scores, mask in parts]
        longest = max((mask.shape[1] for _, mask in pairs), default=1)
        empty = torch.zeros(0, longest)
        self._scores = torch.cat([empty.double(), *(pad(rows, (0, longest - rows.shape[1])) for rows, _ in pairs)])
        self._mask = torch.cat([empty.bool(), *(pad(mask, (0, longest - mask.shape[1])) for _, mask in pairs)])
        self._group = group
        self._count = max(float(group.all_reduce(torch.tensor(float(len(self._mask)), dtype=torch.float64))), 1.0)

    def mean_entropy(self, temperature: float) -> float:
        """Returns the mean entropy in nats at a temperature."""
        total = entropy(Softmax(temperature).propensities(self._scores, self._mask)).sum()
        return float(self._group.all_reduce(total)) / self._count

    def largest_entropy(self) -> float:
        """Returns the mean entropy of uniform choices."""
        return float(self._group.all_reduce(self._mask.sum(1).clamp(min=1).double().log().sum())) / self._count

    def temperature(self, wanted: float) -> float:
        """Returns the temperature at which the mean entropy is `wanted` nats, the same on every rank."""
        highest = self._scores.masked_fill(~self._mask, LOWEST).amax(1)
        lowest = self._scores.masked_fill(~self._mask, -LOWEST).amin(1)
        spread = (highest - lowest)[self._mask.any(1)]
        scale = self._group.all_reduce_max(torch.cat((spread, spread.new_zeros(1))).max())
        return temperature_with(wanted, self.mean_entropy, float(scale))


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyEntropy:
    """Entropy of a softmax policy and of the logging policy, in nats.

    Attributes:
        policy: the policy.
        entropy: mean entropy of the policy.
        largest: mean entropy of uniform choices.
        logged: mean entropy of the logging policy; None if its propensities are unknown.
        aim: the logging policy's entropy, or half of the largest if that is unknown, nearly greedy or nearly uniform.
        other_temperature: temperature at which the mean entropy is `aim`.
    """

    policy: Softmax
    entropy: float
    largest: float
    logged: float | None
    aim: float
    other_temperature: float

    @classmethod
    def of(cls, rows: SoftmaxRows, policy: Softmax, logged: float | None) -> "PolicyEntropy":
        """Returns the entropy of a policy over rows; every rank calls it."""
        largest = rows.largest_entropy()
        aim = largest / 2 if logged is None or _extreme(logged, largest) else logged
        return cls(
            policy=policy,
            entropy=rows.mean_entropy(policy.temperature),
            largest=largest,
            logged=logged,
            aim=aim,
            other_temperature=rows.temperature(aim),
        )

    def json(self) -> dict[str, Any]:
        """Returns the figures as JSON types."""
        return {
            "temperature": self.policy.temperature,
            "entropy": self.entropy,
            "largest_entropy": self.largest,
            "logged_entropy": self.logged,
            "other_temperature": self.other_temperature,
            "notes": list(self.notes),
        }

    @property
    def notes(self) -> tuple[str, ...]:
        """A sentence if the policy is nearly uniform, or nearly greedy and the logging policy is not."""
        kind = _extreme(self.entropy, self.largest)
        if not kind or (kind == "greedy" and self.logged is not None and _extreme(self.logged, self.largest) == kind):
            return ()
        origin = ', as in the log (rl.temperature "auto")' if self.aim == self.logged else ""
        return (
            f"{self.policy} is nearly {kind}: its mean entropy is {self.entropy / self.largest:.1%} of that of "
            f"uniform choices; at temperature {number(self.other_temperature)} it is "
            f"{self.aim / self.largest:.1%}{origin}",
        )


def _extreme(nats: float, largest: float) -> str:
    """Returns "greedy" or "uniform" if an entropy is nearly that of such choices, else ""."""
    if not largest:  # there is nothing to choose
        return ""
    if nats >= _NEARLY_UNIFORM * largest:
        return "uniform"
    return "greedy" if nats <= _NEARLY_GREEDY * largest else ""
