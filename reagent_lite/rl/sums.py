"""Estimates in every resample of logged episodes.

Episodes [n_k, L_k], k = 1 ... ─► what each adds to every sum ─► counts [R, n] @ that, block by block ─► estimates [R]

Every estimator is a formula in sums over the episodes of a sample. What an episode adds is computed once; the sums of a
block of samples are one matrix product per group k. Groups of episodes of about the same length hardly hold padding.

Notation: w_t = pi(a_t) / mu(a_t); rho_t = w_0 ... w_t; omega_t^i = rho_t^i / sum_j rho_t^j over all n episodes; D_t the
discount from the start. rho_t is held constant after an episode ends: a weight of 0 there would hand the ended
episode's share to the others and overestimate (Precup, Sutton & Singh, 2000). Ratios of rho are kept in logarithms, so
that long episodes neither overflow nor vanish.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from reagent_lite.rl.likelihood import Contributions

_TAIL = 0.05  # share of discounted time beyond the step at which weights of whole episodes are evaluated
_NUMBERS_AT_ONCE = 2**19  # sums by step of the samples that are worked on together: 4 MB, held a few times


@dataclass(frozen=True, kw_only=True)
class Episodes:
    """Logged episodes beside each other, float64; past an episode's end weight is 1 and everything else 0.

    Attributes:
        running: [n, L] 1 where the episode has a row, else 0.
        weight: [n, L] w_t of the logged action.
        discount: [n, L] gamma to the power of the time since the episode's start.
        reward: [n, L].
        reward_taken: [n, L] reward model at the logged action.
        reward_expected: [n, L] reward model, mean over the evaluated policy.
        value_taken: [n, L] q of the logged action.
        value_expected: [n, L] v, mean of q over the evaluated policy.
        tail: [n, L] discounted v of the next state at the last row of an episode that was cut, 0 elsewhere.
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


Values = Callable[[Episodes], Tensor]
"""What the rows of episodes add to a sum, [n, L] or [n, 1]."""
Finish = Callable[[Tensor, "Log", int], Tensor]
"""From what `combine` gives for all samples, [R, m], the log and the number of the outcome to estimates [R]."""
Evidence = Callable[["Log", int], Contributions]
"""From the log and the number of the outcome to what each episode adds to an estimate."""


@dataclass(frozen=True, kw_only=True)
class Estimator:
    """An estimator of a policy's value.

    Attributes:
        name: under which it is reported.
        sums: over the rows of all episodes of a sample; `combine` takes each by its name, [R].
        means: by step, sum_i omega_t^i of the values; `combine` takes each by its name, [R, H].
        also: sums that only `evidence` reads.
        combine: the estimate in each sample, [R]; with `finish`, what that takes, [R, m].
        finish: the estimate from `combine` of all samples; it is None for most.
        sequential: whether it estimates the mean discounted return of an episode, not the mean reward of a row.
        model, weighted: whether it rests on fitted models, and on importance weights.
        evidence: what each episode adds, if the interval is that of rl.likelihood; None if it is a bootstrap's, which
            leaves out what the fitted models have wrong.
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
        """Whether it counts what the value model expects after the cut of a record."""
        return self.sequential and self.model

    def __call__(self, episodes: Episodes, counts: Tensor) -> Tensor:
        """Returns the estimate in each sample, [R], given how often each episode is in it, counts [R, n]."""
        return Log.of([[episodes]], [self]).estimates([counts])[0][self.name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """What each of n episodes of at most L steps adds, for T outcomes, S sums and M means.

    Attributes:
        sums: [n, T, S] float64.
        weights: [n, L] rho_t divided by the largest of these episodes.
        steps: [n, T, M, L] values by step, times `weights`.
        log_largest: [L] log of that largest rho_t; rho and it are held constant after L.
        discount: [L] sum of D_t over these episodes.
    """

    sums: Tensor
    weights: Tensor
    steps: Tensor
    log_largest: Tensor
    discount: Tensor

    @classmethod
    def of(cls, tables: Sequence[Episodes], sums: Sequence[Values], means: Sequence[Values]) -> "Group":
        """Returns what episodes add, for tables of the same episodes, one per outcome."""
        log_rho = tables[0].log_rho
        log_largest = log_rho.amax(0)
        weights = (log_rho - _finite_or_zero(log_largest)).exp()
        columns = log_rho.new_empty(len(log_rho), len(tables), len(sums))
        steps = log_rho.new_empty(len(log_rho), len(tables), len(means), log_rho.shape[1])
        for outcome, table in enumerate(tables):
            for place, values in enumerate(sums):
                columns[:, outcome, place] = values(table).sum(1)
            for place, values in enumerate(means):
                torch.mul(weights, values(table), out=steps[:, outcome, place])
        return cls(
            sums=columns, weights=weights, steps=steps, log_largest=log_largest, discount=tables[0].discount.sum(0)
        )

    def scale(self, log_reference: Tensor) -> Tensor:
        """Returns the largest rho_t of these episodes over a reference, [H] for [H], at all steps of longer ones."""
        return (_held(self.log_largest, len(log_reference)) - _finite_or_zero(log_reference)).exp()


@dataclass(frozen=True, kw_only=True)
class Log:
    """What every episode of a log adds to the sums of some estimators.

    Attributes:
        estimators: those that can be asked for.
        groups: the groups of episodes, in the order of the columns of counts.
        log_largest: [H] log of the largest rho_t of any episode; H the steps of the longest.
        weights: [H] sum of rho_t over all episodes, divided by the largest.
        sums, means: names of those that the estimators need.
    """

    estimators: tuple[Estimator, ...]
    groups: tuple[Group, ...]
    log_largest: Tensor
    weights: Tensor
    sums: tuple[str, ...]
    means: tuple[str, ...]

    @classmethod
    def of(cls, groups: Iterable[Sequence[Episodes]], estimators: Sequence[Estimator]) -> "Log":
        """Reads episodes group by group: for each group its episodes with every outcome in turn.

        A group's tables differ in rewards and models only. Groups cost least where their episodes are about as long.
        """
        sums = {name: values for one in estimators for name, values in {**one.sums, **one.also}.items()}
        means = {name: values for one in estimators for name, values in one.means.items()}
        parts = tuple(Group.of(tables, tuple(sums.values()), tuple(means.values())) for tables in groups)
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
        """In all groups."""
        return sum(len(group.sums) for group in self.groups)

    @property
    def num_outcomes(self) -> int:
        """T."""
        return self.groups[0].sums.shape[1]

    def estimates(self, blocks: Iterable[Tensor]) -> tuple[dict[str, Tensor], ...]:
        """Returns every estimate of each outcome in every sample, [R] each, by the estimator's name.

        What a sample leaves undefined is NaN, for estimators with means too where no episode has weight at the first
        step. Of a block so many samples are worked on together that memory does not grow with steps or outcomes.

        Args:
            blocks: counts [r, n] of any type, block after block: how often each episode is in each sample.
        """
        together = max(1, _NUMBERS_AT_ONCE // ((1 + len(self.means) * self.num_outcomes) * len(self.weights)))
        samples = itertools.chain.from_iterable(torch.split(block, together) for block in blocks)
        combined, widths = zip(*(self._combined(counts) for counts in samples), strict=True)
        whole = torch.cat(combined)
        return tuple(self._finished(whole[:, outcome], widths[0], outcome) for outcome in range(self.num_outcomes))

    def _combined(self, counts: Tensor) -> tuple[Tensor, list[int]]:
        """Returns what estimators combine and, last, the weight of the first step, [R, T, F]; and their widths.

        One tensor for a block: many small ones between the large ones that are freed would fragment the memory.
        """
        sums, weights, steps = self._totals(counts)
        found: list[list[Tensor]] = []
        for outcome in range(self.num_outcomes):
            parts = dict(zip(self.sums, sums[:, outcome].unbind(1), strict=True))
            parts |= {name: safe_divide(steps[:, outcome, m], weights) for m, name in enumerate(self.means)}
            own = [one.combine(**{name: parts[name] for name in (*one.sums, *one.means)}) for one in self.estimators]
            found.append([*(values.view(len(counts), -1) for values in own), weights[:, :1]])
        return torch.stack([torch.cat(own, 1) for own in found], 1), [values.shape[1] for values in found[0]]

    def _finished(self, combined: Tensor, widths: list[int], outcome: int) -> dict[str, Tensor]:
        *found, first_weight = torch.split(combined, widths, 1)
        estimates = {}
        for one, values in zip(self.estimators, found, strict=True):
            finished = values[:, 0] if one.finish is None else one.finish(values, self, outcome)
            estimates[one.name] = torch.where(first_weight[:, 0] > 0, finished, torch.nan) if one.means else finished
        return estimates

    def _totals(self, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns sums [R, T, S], weights [R, H] and steps [R, T, M, H]; the last two divided by the largest rho_t."""
        outcomes = self.num_outcomes
        steps = len(self.weights)
        total = self.weights.new_zeros(len(counts), outcomes, len(self.sums))
        weights = self.weights.new_zeros(len(counts), steps)
        by_step = self.weights.new_zeros(len(counts), outcomes, len(self.means), steps)
        episodes = torch.split(counts, [len(group.sums) for group in self.groups], 1)
        for group, drawn in zip(self.groups, episodes, strict=True):
            own = drawn.to(total.dtype)
            length = len(group.log_largest)
            scale = group.scale(self.log_largest)
            total += torch.tensordot(own, group.sums, 1)
            held = own @ group.weights
            weights[:, :length].addcmul_(held, scale[:length])
            weights[:, length:].addcmul_(held[:, -1:], scale[length:])
            by_step[..., :length].addcmul_(torch.tensordot(own, group.steps, 1), scale[:length])
        return total, weights, by_step

    def per_episode(self, name: str, outcome: int) -> Tensor:
        """Returns one of the sums for each episode, [n]; the episodes' order is that of the groups."""
        return torch.cat([group.sums[:, outcome, self.sums.index(name)] for group in self.groups])

    def by_step(self, name: str, outcome: int) -> list[Tensor]:
        """Returns the values of one of the means for each group, [n, L], times the group's weights."""
        return [group.steps[:, outcome, self.means.index(name)] for group in self.groups]

    @cached_property
    def judged_step(self) -> int:
        """The step by which 95 % of discounted time has passed: far steps hardly count in a discounted return."""
        discount = torch.zeros_like(self.weights)
        for group in self.groups:
            discount[: len(group.discount)] += group.discount
        passed = discount.cumsum(0)
        return int((passed < (1 - _TAIL) * passed[-1]).sum())

    @property
    def episode_weights(self) -> Tensor:
        """Weight rho of every episode at the judged step, [n]; the largest at most e^600."""
        step = self.judged_step
        return self.relative_weights(step) * self.log_largest[step].clamp(max=600).exp()

    def relative_weights(self, step: int) -> Tensor:
        """Returns rho_t of every episode divided by the largest, [n]; the episodes' order is that of the groups."""
        return torch.cat(
            [
                group.weights[:, min(step, len(group.log_largest) - 1)] * group.scale(self.log_largest)[step]
                for group in self.groups
            ]
        )

    def effective_episodes(self) -> Tensor:
        """Returns (sum rho_t)^2 / sum rho_t^2 at each step, [H]; 0 where all weights are 0. Kong (1992)."""
        squares = [
            _held(group.weights.square().sum(0), len(self.weights)) * group.scale(self.log_largest).square()
            for group in self.groups
        ]
        return safe_divide(self.weights.square(), torch.stack(squares).sum(0))


def safe_divide(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Returns numerator / denominator, and 0 where the denominator is 0."""
    return numerator / torch.where(denominator > 0, denominator, torch.inf)


def _finite_or_zero(log_weights: Tensor) -> Tensor:
    """Returns logarithms, and 0 for those of weights 0."""
    return torch.where(log_weights.isfinite(), log_weights, 0)


def _held(values: Tensor, steps: int) -> Tensor:
    """Returns values by step, [L, ...], at so many steps; the last is held."""
    return values[torch.arange(steps).clamp(max=len(values) - 1)]
