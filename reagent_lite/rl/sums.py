"""Estimates in every resample of logged episodes.

EpisodeTable [n_k, L_k], k = 1 ... ─► EpisodeGroup: terms of every sum ─► counts [R, n] @ terms ─► estimates [R]

Every estimator is a formula in sums over the episodes of a sample. The terms of each episode are computed once; the
sums of a block of samples are one matrix product per group k. If the episodes of a group have about the same length,
the group has little padding.

Notation: w_t = pi(a_t) / mu(a_t); rho_t = w_0 ... w_t; omega_t^i = rho_t^i / sum_j rho_t^j over all n episodes; D_t the
discount from the start. rho_t is held constant after an episode ends: with a weight of 0 the ended episode's share
would go to the others, which overestimates (Precup, Sutton & Singh, 2000). Ratios of rho are kept as logarithms, so
that long episodes neither overflow nor vanish.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import torch
from torch import Tensor

from reagent_lite.rl.likelihood import Contributions

_TAIL = 0.05  # share of discounted time after the step at which weights of whole episodes are evaluated
_NUMBERS_AT_ONCE = 2**19  # sums by step of the samples in one block: 4 MB, with a few copies


@dataclass(frozen=True, kw_only=True)
class EpisodeTable:
    """Logged episodes padded to the same length, float64; after an episode's end weight is 1 and all else is 0.

    Attributes:
        running: [n, L] 1 if the episode has a row at this step, else 0.
        weight: [n, L] w_t of the logged action.
        discount: [n, L] gamma to the power of the time since the episode's start.
        reward: [n, L].
        reward_taken: [n, L] reward model at the logged action.
        reward_expected: [n, L] reward model, mean over the evaluated policy.
        value_taken: [n, L] q of the logged action.
        value_expected: [n, L] v, mean of q over the evaluated policy.
        tail: [n, L] discounted v of the next state at the last row of a cut episode, 0 elsewhere.
    """

    running: Tensor
    weight: Tensor
    discount: Tensor
    reward: Tensor
    reward_taken: Tensor
    reward_expected: Tensor
    value_taken: Tensor
    value_expected: Tensor
    tail: Tensor

    @cached_property
    def log_rho(self) -> Tensor:
        """[n, L] log rho_t."""
        return self.weight.log().cumsum(1)

    @cached_property
    def rho(self) -> Tensor:
        """[n, L] rho_t, at most e^600 so that sums stay finite."""
        return self.log_rho.clamp(max=600).exp()


SWITCH_TAU: Final = 10.0
"""Largest weight at which Switch_Doubly_Robust_Reward corrects the reward model by the logged reward."""
SHRINKAGE: Final = 100.0
"""lambda of Shrunk_Doubly_Robust_Reward."""

Values = Callable[[EpisodeTable], Tensor]
"""Returns the terms of a sum, [n, L] or [n, 1]."""


def switch_weights(tau: float) -> Values:
    """Returns w (r - r_hat) [w <= tau] of every row."""
    return lambda e: torch.where(e.weight <= tau, e.weight, 0) * (e.reward - e.reward_taken)


def shrunk(shrinkage: float) -> Values:
    """Returns s (r - r_hat) of every row, s = lambda w / (w^2 + lambda); lambda 0 gives DM, infinity DR."""
    return lambda e: shrinkage * e.weight / (e.weight.square() + shrinkage) * (e.reward - e.reward_taken)


def doubly_robust_steps(e: EpisodeTable) -> Tensor:
    """Returns D_t [rho_t (r_t - q_t) + rho_{t-1} v_t], rho_{-1} = 1, and rho_t D_{t+1} v_{t+1} at a cut."""
    previous = torch.cat((torch.ones_like(e.rho[:, :1]), e.rho[:, :-1]), 1)
    return e.discount * (e.rho * (e.reward - e.value_taken) + previous * e.value_expected) + e.rho * e.tail


def corrections(e: EpisodeTable) -> Tensor:
    """Returns D_t (r_t - q_t) + D_{t+1} v_{t+1}; v_{t+1} is 0 after a true end."""
    values = e.discount * e.value_expected
    following = torch.cat((values[:, 1:], torch.zeros_like(values[:, :1])), 1) + e.tail
    return e.discount * (e.reward - e.value_taken) + following


SUMS: Final[dict[str, Values]] = {
    "reward": lambda e: e.reward,
    "rows": lambda e: e.running,
    "discounted_reward": lambda e: e.discount * e.reward,
    "episodes": lambda e: e.running[:, :1],
    "tail": lambda e: e.tail,
    "weight": lambda e: e.weight * e.running,
    "reward_expected": lambda e: e.reward_expected,
    "weighted_reward": lambda e: e.weight * e.reward,
    "residual": lambda e: e.weight * (e.reward - e.reward_taken),
    "unweighted_residual": lambda e: e.reward - e.reward_taken,
    "switched_residual": switch_weights(SWITCH_TAU),
    "shrunk_residual": shrunk(SHRINKAGE),
    "first_value": lambda e: e.value_expected[:, :1],
    "decisions": lambda e: e.discount * e.rho * e.reward,
    "doubly_robust_steps": doubly_robust_steps,
    "unweighted_corrections": corrections,
}
"""Terms of sums over all rows of a sample."""
MEANS: Final[dict[str, Values]] = {"discounted_rewards": SUMS["discounted_reward"], "corrections": corrections}
"""Terms of means by step, weighted by omega."""
OF_LOG: Final = (
    "reward", "rows", "discounted_reward", "episodes", "tail", "weight", "weighted_reward", "decisions",
    "discounted_rewards",
)  # fmt: skip
"""The sums and means that need no fitted model."""
EVERY: Final = (*SUMS, *MEANS)
"""All sums and means."""
Finish = Callable[[Tensor, "EpisodeSums", int], Tensor]
"""Returns estimates [R] from the results of `combine` for all samples [R, m], the sums, and the outcome's index."""
Evidence = Callable[["EpisodeSums", int], Contributions]
"""Returns each episode's contribution to an estimate from the sums and the outcome's index."""


@dataclass(frozen=True, kw_only=True)
class Estimator:
    """An estimator of a policy's value.

    Attributes:
        name: name in reports.
        takes: names of the sums and means that `combine` takes.
        combine: returns the estimate in each sample, [R], or the input of `finish`, [R, m], from the sums, [R], and the
            means by step, sum_i omega_t^i of the values, [R, H].
        finish: computes the estimate from the results of `combine` for all samples; None for most estimators.
        sequential: whether it estimates the mean discounted return per episode instead of the mean reward per row.
        model, weighted: whether it rests on fitted models, and on importance weights.
        evidence: returns the contribution of each episode if the interval comes from rl.likelihood; None if it comes
            from the bootstrap, which leaves out the error of fitted models.
    """

    name: str
    takes: tuple[str, ...]
    combine: Callable[..., Tensor]
    finish: Finish | None
    sequential: bool
    model: bool
    weighted: bool
    evidence: Evidence | None

    @property
    def continues(self) -> bool:
        """Whether the value model continues a cut record."""
        return self.sequential and self.model


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeGroup:
    """Terms of n episodes of at most L steps, for T outcomes, the S sums and the M means.

    Attributes:
        sums: [n, T, S] float64.
        weights: [n, L] rho_t divided by the largest rho_t of the group.
        steps: [n, T, M, L] values by step, times `weights`.
        log_largest: [L] log of the largest rho_t of the group; like rho, it is held constant after L.
        discount: [L] sum of D_t over the group.
    """

    sums: Tensor
    weights: Tensor
    steps: Tensor
    log_largest: Tensor
    discount: Tensor

    @classmethod
    def of(cls, tables: Sequence[EpisodeTable], names: Sequence[str]) -> "EpisodeGroup":
        """Returns the terms of episodes for the named sums and means, given one table of the episodes per outcome."""
        log_rho = tables[0].log_rho
        log_largest = log_rho.amax(0)
        weights = (log_rho - _finite_or_zero(log_largest)).exp()
        of_sums, of_means = _split_names(names)
        # a term of all episodes is adjacent in memory, as it is read at once
        sums = log_rho.new_empty(len(tables), len(of_sums), len(log_rho)).permute(2, 0, 1)
        steps = log_rho.new_empty(len(log_rho), len(tables), len(of_means), log_rho.shape[1])
        for outcome, table in enumerate(tables):
            for column, name in enumerate(of_sums):
                torch.sum(SUMS[name](table), 1, out=sums[:, outcome, column])
            for column, name in enumerate(of_means):
                torch.mul(weights, MEANS[name](table), out=steps[:, outcome, column])
        return cls(sums=sums, weights=weights, steps=steps, log_largest=log_largest, discount=tables[0].discount.sum(0))

    def scale(self, log_reference: Tensor) -> Tensor:
        """Returns the group's largest rho_t divided by a reference, [H], whose logarithms are given, [H]."""
        return (_held(self.log_largest, len(log_reference)) - _finite_or_zero(log_reference)).exp()


@dataclass(frozen=True, kw_only=True)
class EpisodeSums:
    """Terms of all episodes of a log.

    Attributes:
        groups: groups of episodes, in the order of the columns of counts.
        log_largest: [H] log of the largest rho_t of any episode; H is the number of steps of the longest episode.
        weights: [H] sum of rho_t over all episodes, divided by the largest.
        names: names of the S sums.
        means: names of the M means.
        unit: [n] number of each episode's unit, in the order of the groups; None if episodes are drawn.
    """

    groups: tuple[EpisodeGroup, ...]
    log_largest: Tensor
    weights: Tensor
    names: tuple[str, ...]
    means: tuple[str, ...]
    unit: Tensor | None = None

    @classmethod
    def of(cls, groups: Iterable[Sequence[EpisodeTable]], names: Sequence[str] = EVERY) -> "EpisodeSums":
        """Computes the terms group by group; a group is given as one table of its episodes per outcome.

        A group's tables differ only in rewards and models. Groups of episodes of about the same length cost least.
        """
        parts = tuple(EpisodeGroup.of(tables, names) for tables in groups)
        steps = max(len(part.log_largest) for part in parts)
        log_largest = torch.stack([_held(part.log_largest, steps) for part in parts]).amax(0)
        weights = torch.stack([_held(part.weights.sum(0), steps) * part.scale(log_largest) for part in parts]).sum(0)
        of_sums, of_means = _split_names(names)
        return cls(groups=parts, log_largest=log_largest, weights=weights, names=of_sums, means=of_means)

    def only(self, names: Sequence[str]) -> "EpisodeSums":
        """Returns some of the sums, by name, and no means."""
        columns = [self.names.index(name) for name in names]
        parts = (replace(group, sums=group.sums[..., columns], steps=group.steps[:, :, :0]) for group in self.groups)
        return replace(self, groups=tuple(parts), names=tuple(names), means=())

    def weigh(self, weight: Tensor) -> "EpisodeSums":
        """Returns the terms of episodes of which each stands for a number of episodes.

        Args:
            weight: [n] that number divided by its mean, in the order of the groups.
        """
        parts = []
        for group, counts in zip(
            self.groups, torch.split(weight, [len(group.sums) for group in self.groups]), strict=True
        ):
            factor = counts.view(-1, 1)
            sums = group.sums * factor.unsqueeze(2)
            steps = group.steps * factor.view(-1, 1, 1, 1)
            parts.append(replace(group, sums=sums, weights=group.weights * factor, steps=steps))
        scaled = [_held(part.weights.sum(0), len(self.weights)) * part.scale(self.log_largest) for part in parts]
        return replace(self, groups=tuple(parts), weights=torch.stack(scaled).sum(0))

    @property
    def num_episodes(self) -> int:
        """Number of episodes in all groups."""
        return sum(len(group.sums) for group in self.groups)

    @property
    def num_units(self) -> int:
        """Number of units, or of episodes if these are drawn."""
        return self.num_episodes if self.unit is None else int(self.unit.max()) + 1

    def by_unit(self, values: Tensor) -> Tensor:
        """Returns the sums of values [n] over the episodes of each unit; the values themselves without units."""
        return values if self.unit is None else values.new_zeros(self.num_units).index_add_(0, self.unit, values)

    @property
    def num_outcomes(self) -> int:
        """Number of outcomes, T."""
        return self.groups[0].sums.shape[1]

    def join(self, unit: Tensor, count: int) -> EpisodeGroup:
        """Returns the sums of the terms of each unit's episodes, with units for episodes.

        Args:
            unit: [n] number of each episode's unit, in the order of the groups.
            count: number of units.
        """
        steps = len(self.weights)
        outcomes = self.num_outcomes
        sums = self.weights.new_zeros(count, outcomes, len(self.names))
        weights = self.weights.new_zeros(count, steps)
        by_step = self.weights.new_zeros(count, outcomes, len(self.means), steps)
        for group, units in zip(
            self.groups, torch.split(unit, [len(group.sums) for group in self.groups]), strict=True
        ):
            length = len(group.log_largest)
            scale = group.scale(self.log_largest)
            sums.index_add_(0, units, group.sums)
            weights[:, :length].index_add_(0, units, group.weights * scale[:length])
            by_step[..., :length].index_add_(0, units, group.steps * scale[:length])
            if length < steps:
                weights[:, length:].index_add_(0, units, group.weights[:, -1:] * scale[length:])
        discount = torch.zeros_like(self.weights)
        return EpisodeGroup(sums=sums, weights=weights, steps=by_step, log_largest=self.log_largest, discount=discount)

    def estimates(
        self, blocks: Iterable[Tensor], estimators: Sequence[Estimator], units: EpisodeGroup | None = None
    ) -> tuple[dict[str, Tensor], ...]:
        """Returns, for each outcome, the estimates in every sample, [R], by the estimator's name.

        Undefined estimates are NaN. Estimators with means are also undefined if no episode has weight at the first
        step. Blocks are split so that memory does not grow with steps or outcomes.

        Args:
            blocks: blocks of counts [r, n] of any type: how often each episode, or unit, is in each sample.
            estimators: estimators to compute in every sample.
            units: result of `joined` if units of several episodes are drawn; None if episodes are.
        """
        groups = self.groups if units is None else (units,)
        samples_at_once = max(1, _NUMBERS_AT_ONCE // ((1 + len(self.means) * self.num_outcomes) * len(self.weights)))
        samples = itertools.chain.from_iterable(torch.split(block, samples_at_once) for block in blocks)
        combined, widths = zip(*(self._combine(counts, estimators, groups) for counts in samples), strict=True)
        by_outcome = []
        for outcome, columns in enumerate(torch.cat(combined).unbind(1)):
            *values, first_weight = torch.split(columns, widths[0], 1)
            estimates = {}
            for estimator, results in zip(estimators, values, strict=True):
                estimate = results[:, 0] if estimator.finish is None else estimator.finish(results, self, outcome)
                if not MEANS.keys().isdisjoint(estimator.takes):
                    estimate = torch.where(first_weight[:, 0] > 0, estimate, torch.nan)
                estimates[estimator.name] = estimate
            by_outcome.append(estimates)
        return tuple(by_outcome)

    def _combine(
        self, counts: Tensor, estimators: Sequence[Estimator], groups: Sequence[EpisodeGroup]
    ) -> tuple[Tensor, list[int]]:
        """Returns [R, T, F], the estimators' combined values and, last, the weight of the first step; and their widths.

        A block has a single tensor: many small ones between large ones that are freed would fragment the memory.
        """
        sums, weights, steps = self._totals(counts, groups)
        by_outcome: list[list[Tensor]] = []
        for outcome in range(self.num_outcomes):
            arguments = dict(zip(self.names, sums[:, outcome].unbind(1), strict=True))
            arguments |= {name: safe_divide(steps[:, outcome, m], weights) for m, name in enumerate(self.means)}
            combined = [
                estimator.combine(**{name: arguments[name] for name in estimator.takes}) for estimator in estimators
            ]
            by_outcome.append([*(values.view(len(counts), -1) for values in combined), weights[:, :1]])
        widths = [values.shape[1] for values in by_outcome[0]]
        return torch.stack([torch.cat(columns, 1) for columns in by_outcome], 1), widths

    def _totals(self, counts: Tensor, groups: Sequence[EpisodeGroup]) -> tuple[Tensor, Tensor, Tensor]:
        """Returns sums [R, T, S], weights [R, H] and steps [R, T, M, H], the last two over the largest rho_t."""
        outcomes = self.num_outcomes
        steps = len(self.weights)
        total = self.weights.new_zeros(len(counts), outcomes, len(self.names))
        weights = self.weights.new_zeros(len(counts), steps)
        by_step = self.weights.new_zeros(len(counts), outcomes, len(self.means), steps)
        episodes = torch.split(counts, [len(group.sums) for group in groups], 1)
        for group, group_counts in zip(groups, episodes, strict=True):
            drawn = group_counts.to(total.dtype)
            length = len(group.log_largest)
            scale = group.scale(self.log_largest)
            total += torch.tensordot(drawn, group.sums, 1)
            group_weights = drawn @ group.weights
            weights[:, :length].addcmul_(group_weights, scale[:length])
            weights[:, length:].addcmul_(group_weights[:, -1:], scale[length:])
            by_step[..., :length].addcmul_(torch.tensordot(drawn, group.steps, 1), scale[:length])
        return total, weights, by_step

    def per_episode(self, name: str, outcome: int) -> Tensor:
        """Returns a sum's term of each episode, [n], in the order of the groups."""
        return torch.cat([group.sums[:, outcome, self.names.index(name)] for group in self.groups])

    def by_step(self, name: str, outcome: int) -> list[Tensor]:
        """Returns the values of a mean for each group, [n, L], times the group's weights."""
        return [group.steps[:, outcome, self.means.index(name)] for group in self.groups]

    @cached_property
    def effective_horizon(self) -> int:
        """Step by which 95 % of discounted time has passed; later steps hardly count in a discounted return."""
        discount = torch.zeros_like(self.weights)
        for group in self.groups:
            discount[: len(group.discount)] += group.discount
        passed = discount.cumsum(0)
        return int((passed < (1 - _TAIL) * passed[-1]).sum())

    @property
    def episode_weights(self) -> Tensor:
        """Weight rho of every episode at `effective_horizon`, [n], at most e^600."""
        step = self.effective_horizon
        largest = self.log_largest[step].clamp(max=600).exp()
        return self.relative_weights(step) * largest / self.per_episode("episodes", 0)

    def relative_weights(self, step: int) -> Tensor:
        """Returns rho_t of every episode divided by the largest, times its sample weight, [n], in the groups' order."""
        return torch.cat(
            [
                group.weights[:, min(step, len(group.log_largest) - 1)] * group.scale(self.log_largest)[step]
                for group in self.groups
            ]
        )

    def effective_episodes(self) -> Tensor:
        """Returns (sum rho_t)^2 / sum rho_t^2 at each step, [H]; 0 if all weights are 0. Kong (1992)."""
        squares = [
            _held(group.weights.square().sum(0), len(self.weights)) * group.scale(self.log_largest).square()
            for group in self.groups
        ]
        return safe_divide(self.weights.square(), torch.stack(squares).sum(0))


def _split_names(names: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the names of sums and those of means."""
    return tuple(name for name in names if name in SUMS), tuple(name for name in names if name in MEANS)


def safe_divide(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Returns numerator / denominator; 0 if the denominator is 0."""
    return numerator / torch.where(denominator > 0, denominator, torch.inf)


def _finite_or_zero(log_weights: Tensor) -> Tensor:
    """Returns logarithms, with 0 for weights of 0."""
    return torch.where(log_weights.isfinite(), log_weights, 0)


def _held(values: Tensor, steps: int) -> Tensor:
    """Extends or cuts values by step, [L, ...], to the given number of steps; the last value is held."""
    return values[torch.arange(steps).clamp(max=len(values) - 1)]
