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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

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


Values = Callable[[EpisodeTable], Tensor]
"""Returns the terms of a sum, [n, L] or [n, 1]."""
Finish = Callable[[Tensor, "EpisodeSums", int], Tensor]
"""Returns estimates [R] from the results of `combine` for all samples [R, m], the sums, and the outcome's index."""
Evidence = Callable[["EpisodeSums", int], Contributions]
"""Returns each episode's contribution to an estimate from the sums and the outcome's index."""


@dataclass(frozen=True, kw_only=True)
class Estimator:
    """An estimator of a policy's value.

    Attributes:
        name: name in reports.
        sums: sums over the rows of all episodes of a sample; `combine` takes each by its name, [R].
        means: means by step, sum_i omega_t^i of the values; `combine` takes each by its name, [R, H].
        also: sums that only `evidence` reads.
        combine: returns the estimate in each sample, [R], or the input of `finish`, [R, m].
        finish: computes the estimate from the results of `combine` for all samples; None for most estimators.
        sequential: whether it estimates the mean discounted return per episode instead of the mean reward per row.
        model, weighted: whether it rests on fitted models, and on importance weights.
        evidence: returns the contribution of each episode if the interval comes from rl.likelihood; None if it comes
            from the bootstrap, which leaves out the error of fitted models.
    """

    name: str
    sums: Mapping[str, Values]
    means: Mapping[str, Values]
    also: Mapping[str, Values]
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

    def __call__(self, episodes: EpisodeTable, counts: Tensor) -> Tensor:
        """Returns the estimate in each sample, [R], given how often each episode is in it, counts [R, n]."""
        return EpisodeSums.of([[episodes]], [self]).estimates([counts])[0][self.name]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeGroup:
    """Terms of n episodes of at most L steps, for T outcomes, S sums and M means.

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
    def of(cls, tables: Sequence[EpisodeTable], sums: Sequence[Values], means: Sequence[Values]) -> "EpisodeGroup":
        """Returns the terms of episodes, given one table of them per outcome."""
        log_rho = tables[0].log_rho
        log_largest = log_rho.amax(0)
        weights = (log_rho - _finite_or_zero(log_largest)).exp()
        columns = log_rho.new_empty(len(log_rho), len(tables), len(sums))
        steps = log_rho.new_empty(len(log_rho), len(tables), len(means), log_rho.shape[1])
        for outcome, table in enumerate(tables):
            for column, values in enumerate(sums):
                columns[:, outcome, column] = values(table).sum(1)
            for column, values in enumerate(means):
                torch.mul(weights, values(table), out=steps[:, outcome, column])
        return cls(
            sums=columns, weights=weights, steps=steps, log_largest=log_largest, discount=tables[0].discount.sum(0)
        )

    def scale(self, log_reference: Tensor) -> Tensor:
        """Returns the group's largest rho_t divided by a reference, [H], whose logarithms are given, [H]."""
        return (_held(self.log_largest, len(log_reference)) - _finite_or_zero(log_reference)).exp()


@dataclass(frozen=True, kw_only=True)
class EpisodeSums:
    """Terms of all episodes of a log, for the sums that some estimators need.

    Attributes:
        estimators: the estimators.
        groups: groups of episodes, in the order of the columns of counts.
        log_largest: [H] log of the largest rho_t of any episode; H is the number of steps of the longest episode.
        weights: [H] sum of rho_t over all episodes, divided by the largest.
        sums, means: names of the sums and means that the estimators need.
    """

    estimators: tuple[Estimator, ...]
    groups: tuple[EpisodeGroup, ...]
    log_largest: Tensor
    weights: Tensor
    sums: tuple[str, ...]
    means: tuple[str, ...]

    @classmethod
    def of(cls, groups: Iterable[Sequence[EpisodeTable]], estimators: Sequence[Estimator]) -> "EpisodeSums":
        """Computes the terms group by group; a group is given as one table of its episodes per outcome.

        A group's tables differ only in rewards and models. Groups of episodes of about the same length cost least.
        """
        sums: dict[str, Values] = {}
        means: dict[str, Values] = {}
        for estimator in estimators:
            sums |= {**estimator.sums, **estimator.also}
            means |= estimator.means
        parts = tuple(EpisodeGroup.of(tables, tuple(sums.values()), tuple(means.values())) for tables in groups)
        steps = max(len(part.log_largest) for part in parts)
        log_largest = torch.stack([_held(part.log_largest, steps) for part in parts]).amax(0)
        weights = torch.stack([_held(part.weights.sum(0), steps) * part.scale(log_largest) for part in parts]).sum(0)
        return cls(
            estimators=tuple(estimators),
            groups=parts,
            log_largest=log_largest,
            weights=weights,
            sums=tuple(sums),
            means=tuple(means),
        )

    @property
    def num_episodes(self) -> int:
        """Number of episodes in all groups."""
        return sum(len(group.sums) for group in self.groups)

    @property
    def num_outcomes(self) -> int:
        """Number of outcomes, T."""
        return self.groups[0].sums.shape[1]

    def estimates(self, blocks: Iterable[Tensor]) -> tuple[dict[str, Tensor], ...]:
        """Returns, for each outcome, the estimates in every sample, [R], by the estimator's name.

        Undefined estimates are NaN. Estimators with means are also undefined if no episode has weight at the first
        step. Blocks are split so that memory does not grow with steps or outcomes.

        Args:
            blocks: blocks of counts [r, n] of any type: how often each episode is in each sample.
        """
        together = max(1, _NUMBERS_AT_ONCE // ((1 + len(self.means) * self.num_outcomes) * len(self.weights)))
        samples = itertools.chain.from_iterable(torch.split(block, together) for block in blocks)
        combined, widths = zip(*(self._combined(counts) for counts in samples), strict=True)
        whole = torch.cat(combined)
        return tuple(self._finished(whole[:, outcome], widths[0], outcome) for outcome in range(self.num_outcomes))

    def _combined(self, counts: Tensor) -> tuple[Tensor, list[int]]:
        """Returns [R, T, F], the estimators' combined values and, last, the weight of the first step; and their widths.

        A block has a single tensor: many small ones between large ones that are freed would fragment the memory.
        """
        sums, weights, steps = self._totals(counts)
        by_outcome: list[list[Tensor]] = []
        for outcome in range(self.num_outcomes):
            arguments = dict(zip(self.sums, sums[:, outcome].unbind(1), strict=True))
            arguments |= {name: safe_divide(steps[:, outcome, m], weights) for m, name in enumerate(self.means)}
            combined = [
                estimator.combine(**{name: arguments[name] for name in (*estimator.sums, *estimator.means)})
                for estimator in self.estimators
            ]
            by_outcome.append([*(values.view(len(counts), -1) for values in combined), weights[:, :1]])
        widths = [values.shape[1] for values in by_outcome[0]]
        return torch.stack([torch.cat(columns, 1) for columns in by_outcome], 1), widths

    def _finished(self, combined: Tensor, widths: list[int], outcome: int) -> dict[str, Tensor]:
        *columns, first_weight = torch.split(combined, widths, 1)
        estimates = {}
        for estimator, values in zip(self.estimators, columns, strict=True):
            estimate = values[:, 0] if estimator.finish is None else estimator.finish(values, self, outcome)
            if estimator.means:
                estimate = torch.where(first_weight[:, 0] > 0, estimate, torch.nan)
            estimates[estimator.name] = estimate
        return estimates

    def _totals(self, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns sums [R, T, S], weights [R, H] and steps [R, T, M, H], the last two over the largest rho_t."""
        outcomes = self.num_outcomes
        steps = len(self.weights)
        total = self.weights.new_zeros(len(counts), outcomes, len(self.sums))
        weights = self.weights.new_zeros(len(counts), steps)
        by_step = self.weights.new_zeros(len(counts), outcomes, len(self.means), steps)
        episodes = torch.split(counts, [len(group.sums) for group in self.groups], 1)
        for group, group_counts in zip(self.groups, episodes, strict=True):
            drawn = group_counts.to(total.dtype)
            length = len(group.log_largest)
            scale = group.scale(self.log_largest)
            total += torch.tensordot(drawn, group.sums, 1)
            held = drawn @ group.weights
            weights[:, :length].addcmul_(held, scale[:length])
            weights[:, length:].addcmul_(held[:, -1:], scale[length:])
            by_step[..., :length].addcmul_(torch.tensordot(drawn, group.steps, 1), scale[:length])
        return total, weights, by_step

    def per_episode(self, name: str, outcome: int) -> Tensor:
        """Returns a sum's term of each episode, [n], in the order of the groups."""
        return torch.cat([group.sums[:, outcome, self.sums.index(name)] for group in self.groups])

    def by_step(self, name: str, outcome: int) -> list[Tensor]:
        """Returns the values of a mean for each group, [n, L], times the group's weights."""
        return [group.steps[:, outcome, self.means.index(name)] for group in self.groups]

    @cached_property
    def judged_step(self) -> int:
        """Step by which 95 % of discounted time has passed; later steps hardly count in a discounted return."""
        discount = torch.zeros_like(self.weights)
        for group in self.groups:
            discount[: len(group.discount)] += group.discount
        passed = discount.cumsum(0)
        return int((passed < (1 - _TAIL) * passed[-1]).sum())

    @property
    def episode_weights(self) -> Tensor:
        """Weight rho of every episode at `judged_step`, [n], at most e^600."""
        step = self.judged_step
        return self.relative_weights(step) * self.log_largest[step].clamp(max=600).exp()

    def relative_weights(self, step: int) -> Tensor:
        """Returns rho_t of every episode divided by the largest, [n], in the order of the groups."""
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


def safe_divide(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Returns numerator / denominator; 0 if the denominator is 0."""
    return numerator / torch.where(denominator > 0, denominator, torch.inf)


def _finite_or_zero(log_weights: Tensor) -> Tensor:
    """Returns logarithms, with 0 for weights of 0."""
    return torch.where(log_weights.isfinite(), log_weights, 0)


def _held(values: Tensor, steps: int) -> Tensor:
    """Extends or cuts values by step, [L, ...], to the given number of steps; the last value is held."""
    return values[torch.arange(steps).clamp(max=len(values) - 1)]
