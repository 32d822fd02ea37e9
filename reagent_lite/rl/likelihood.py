"""Confidence intervals of weighted means by empirical likelihood, which allow for outcomes that a log does not contain.

A bootstrap has no width if the evaluated policy met no rare outcome in the log. Here such an outcome can still happen:
any pair of an observed weight and an observed outcome may carry probability, as a corner. For a value v,

    L(v) = max over a, b of sum_p count_p log(1 + a' u_p + b (x_p - v n_p))

over n episodes, which count 1, and the corners, which count _CORNER. A point adds x_p to the numerator of the estimate
and n_p to its denominator; u_p = n_p (w_p - 1) is 0 in expectation. The interval is

    {v : 2 (L(v) - max over a of L with b = 0) <= z^2 (1 + 0.6 / sqrt(k + 0.42))},

where z is the normal quantile of the level and k the number of episodes that inform about the error of the estimate
(`Contributions.informative`).

Owen (2001), Empirical Likelihood; Karampatziakis, Langford & Mineiro (2020), Empirical Likelihood for Contextual
Bandits, where the mean weight is a constraint and outcomes lie between bounds. The last factor is ours: the likelihood
ratio of a count of k outcomes misses on one side in up to 14 % of all logs (k = 0). The factor agrees within 3 % with
that of the exact interval of a Poisson count; Garwood (1936).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import NormalDist
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import pad

_CORNER = 0.01  # count of a corner; an episode counts 1
_NEGLIGIBLE = 0.1  # of the standard error of a mean weight: a share of rows that is left out of the largest weight
_BEYOND = 0.05  # share of all deviation of weights from 1 that lies above the largest weight of a corner
_HIGH = 10  # one in so many is looked at first
_SURELY = 1 + 1e-9
_TOLERANCE = 1e-4  # of the distance from the center to an end of an interval
_BEFORE_LAST = 1e-3  # the same before the last step of Newton's method, which squares it
_ZERO = 1e-12  # of the largest contribution, below which the end of an interval is 0
_ROUNDING = 1e-18  # mean of squared residuals, relative to the largest before the fit, below which they count as 0
_FIRST_HIGHEST = 4096  # alternatives that are looked at first
_MERGED_SAMPLE = 4096  # points that tell whether many are equal
_MOSTLY_DISTINCT = 0.75
_LEAST_PROBABILITY = 1e-6  # of an alternative; probabilities are float32
_SIMILAR = 2.0  # factor between weights up to which rows with one of them show what is earned with the other
_OUTER_STEPS = 60
_INNER_STEPS = 50
_HALVINGS = 30
_POINTS_AT_ONCE = 2**17  # points of several problems; with more, a problem is solved by itself
_POINTS_IN_CACHE = 2**15  # 1 MB of four coordinates; 30 % slower in one piece of 2**20


ENOUGH_TRIES: Final = 5.0
"""Expected number of tries; fewer than 1 % of the logs have none then."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Alternatives:
    """The actions that could have been logged in N rows in place of those that were, all of a row taken as one.

    If there are several, one of them may have a larger weight than all together; how their probability is divided is
    not in the log.

    Attributes:
        wanted: [N] probability of the alternatives under the policy, 1 - pi.
        probability: [N] probability of the alternatives in the log, 1 - p.
        weight: [N] their ratio, at most N: a larger weight would give the same intervals.
    """

    wanted: Tensor
    probability: Tensor
    weight: Tensor

    @classmethod
    def of(cls, evaluated: Tensor, logged: Tensor) -> "Alternatives":
        """Returns the alternatives to actions with these probabilities, [N] each, under the policy and in the log."""
        wanted = torch.where(1 - evaluated > _LEAST_PROBABILITY, 1 - evaluated, 0.0)
        probability = (1 - logged).clamp(min=0)
        weight = (wanted / probability).nan_to_num(0.0, posinf=torch.inf).clamp(max=len(logged))
        return cls(wanted=wanted, probability=probability, weight=weight)

    @cached_property
    def hardly_tried(self) -> Tensor:
        """Numbers of the rows whose alternatives the log hardly tries, by descending weight.

        Weights above c are hardly tried if fewer than ENOUGH_TRIES tries are expected in all rows with weights above
        c / _SIMILAR. This does not depend on what happened to be tried.
        """
        count = min(_FIRST_HIGHEST, len(self.weight))
        while True:  # nearly always the answer is among few high ones
            least = self.weight.kthvalue(len(self.weight) - count + 1).values
            high = (self.weight >= least).nonzero().squeeze(1)
            weight, order = self.weight[high].sort(descending=True, stable=True)
            last = int((self.probability[high[order]].cumsum(0) < ENOUGH_TRIES).sum())
            if last < len(high) or len(high) == len(self.weight):
                break
            count = min(16 * count, len(self.weight))
        limit = _SIMILAR * max(float(weight[last]) if last < len(weight) else 0.0, 1.0)
        return high[order[: int((weight > limit).sum())]]

    def largest(self, share: float) -> int | None:
        """Returns the row with the largest weight that the log hardly tries.

        Args:
            share: share of the policy's decisions, those with the largest weights, that is passed over.

        Returns:
            The number of the row; None if no more than this share is hardly tried.
        """
        passed = self.wanted[self.hardly_tried].cumsum(0)
        count = int((passed <= share * len(self.weight)).sum())
        return None if count == len(passed) else int(self.hardly_tried[count])


@dataclass(frozen=True, eq=False, kw_only=True)
class Contributions:
    """Contributions of n episodes to an estimate sum(total) / sum(size).

    The expectation of `total` is size * (offset + weight * outcome).

    Attributes:
        total: [n] added to the numerator.
        size: [n] added to the denominator: the episode's number of rows, or 1.
        weight: [n] importance weight per unit of size; its expectation is 1.
        outcome: [n] weighted part, per unit of size.
        offset: unweighted part, per unit of size.
        bounds: lowest and highest possible outcome, if outcomes other than the observed ones are possible.
        earned: [n] outcome before a model's prediction is subtracted; None if that is `outcome`.
        alternatives: actions that could have been logged in each row; None without weights.
        of_row: lowest and highest outcome of a single row, which the row of an alternative may have; None if
            `outcome` is that of whole episodes.
    """

    total: Tensor
    size: Tensor
    weight: Tensor
    outcome: Tensor
    offset: float = 0.0
    bounds: tuple[float, float] | None = None
    earned: Tensor | None = None
    alternatives: Alternatives | None = None
    of_row: tuple[float, float] | None = None

    def join(self, unit: Tensor) -> "Contributions":
        """Returns the contributions of units, given the number of each episode's unit, [n]: those of their episodes."""
        count = int(unit.max()) + 1

        def add(values: Tensor) -> Tensor:
            return values.new_zeros(count).index_add_(0, unit, values)

        size = add(self.size)
        return replace(
            self,
            total=add(self.total),
            size=size,
            weight=add(self.size * self.weight) / size,
            outcome=add(self.size * self.outcome) / size,
            earned=None if self.earned is None else add(self.size * self.earned) / size,
        )

    def equals(self, other: "Contributions") -> bool:
        """Returns whether another estimate has the same contributions and possible outcomes, but for rounding."""
        tensors = ("total", "size", "weight", "outcome")
        return (
            math.isclose(self.offset, other.offset, rel_tol=_ZERO)
            and self.outcomes == other.outcomes
            and (self.alternatives is None) == (other.alternatives is None)
            and (self.alternatives is None or self.untried_outcomes == other.untried_outcomes)
            and all(_are_equal(getattr(self, name), getattr(other, name)) for name in tensors)
            and _are_equal(*(part.outcome if part.earned is None else part.earned for part in (self, other)))
        )

    @cached_property
    def value(self) -> float:
        """The estimate."""
        return float(self.total.sum() / self.size.sum())

    @cached_property
    def is_logged(self) -> bool:
        """Whether all weights are 1."""
        return bool((self.weight == 1).all())

    @property
    def control(self) -> Tensor:
        """[n] size * (weight - 1), whose expectation is 0."""
        return self.size * (self.weight - 1)

    @cached_property
    def outcomes(self) -> tuple[float, float]:
        """The lowest and the highest outcome, observed or possible."""
        low, high = self.bounds or (torch.inf, -torch.inf)
        return min(low, float(self.outcome.min())), max(high, float(self.outcome.max()))

    @property
    def untried_outcomes(self) -> tuple[float, float]:
        """The lowest and the highest outcome of an alternative that the log hardly tries."""
        low, high = self.outcomes
        row = self.of_row or (low, high)
        return min(low, row[0]), max(high, row[1])

    @cached_property
    def extreme_episodes(self) -> tuple[int, int]:
        """Indices of the lowest weight, and of the highest but those above which 5 % of all deviation from 1 lies."""
        return int(self.weight.argmin()), _highest(self.weight - 1)

    @cached_property
    def largest(self) -> float:
        """Largest magnitude of an episode's contribution."""
        return float((self.total / self.size).abs_().max())

    @cached_property
    def informative(self) -> float:
        """Effective number of episodes that show the error of the estimate, (sum d^2)^2 / sum d^4.

        d is an episode's deviation from the estimate that its weight does not explain. For a rare outcome the number is
        how often the evaluated policy met it; for normally distributed outcomes it is a third of the effective
        episodes. Predictions of a model do not count: they say nothing about outcomes that were never met.
        """
        control = self.control.unsqueeze(0)
        informative = _informative(self.total - self.value * self.size, control)
        if self.earned is None:
            return informative
        weighted = self.size * self.weight
        mean = (weighted * self.earned).sum() / weighted.sum()
        return min(informative, _informative(weighted * (self.earned - mean), control))


Question = tuple[Contributions, Contributions | None]
"""An estimate, and None or another estimate from the same episodes, which is subtracted from it."""


def intervals(questions: Sequence[Question], level: float) -> list[tuple[float, float]]:
    """Returns the interval of each estimate or difference.

    Both ends are NaN if a number is not finite, or if all outcomes are equal and no other is known to be possible.

    Args:
        questions: estimates and differences, all from the same number of episodes.
        level: confidence level.
    """
    ends = [(torch.nan, torch.nan)] * len(questions)
    small: dict[int, _IntervalProblem] = {}
    for index, (first, minus) in enumerate(questions):
        problem = _IntervalProblem.of(first, minus, level)
        if problem is None:
            continue
        if len(problem.counts) > _POINTS_AT_ONCE // 2:  # solved at once, so that memory holds one of them
            (ends[index],) = _ends([problem])
        else:
            small[index] = problem
    size = max(1, _POINTS_AT_ONCE // max((len(problem.counts) for problem in small.values()), default=1))
    indices = [*small]
    for start in range(0, len(indices), size):
        part = indices[start : start + size]
        for index, pair in zip(part, _ends([small[index] for index in part]), strict=True):
            ends[index] = pair
    return [
        (_without_rounding(low, first), _without_rounding(high, first))
        for (low, high), (first, _) in zip(ends, questions, strict=True)
    ]


def _are_equal(values: Tensor, others: Tensor) -> bool:
    """Returns whether values differ by rounding only; products over steps are computed by logarithms."""
    return bool(torch.dist(values, others, torch.inf) <= _ZERO * torch.linalg.vector_norm(others, torch.inf))


def _without_rounding(end: float, contributions: Contributions) -> float:
    """Returns the end of an interval, or 0 if it differs from 0 by rounding only."""
    return 0.0 if abs(end) < _ZERO * contributions.largest else end


@dataclass(frozen=True, slots=True, kw_only=True)
class _IntervalProblem:
    """Episodes and corners as P points; equal ones are merged.

    Attributes:
        points: [k, P] numerator, denominator, and one or two controls with expectation 0.
        counts: [P] how often each point counts.
        critical: root of twice the likelihood ratio at both ends of the interval.
    """

    points: Tensor
    counts: Tensor
    critical: float

    @classmethod
    def of(cls, first: Contributions, minus: Contributions | None, level: float) -> "_IntervalProblem | None":
        """Returns the problem of an estimate or of a difference; None if it has no interval."""
        parts = (first,) if minus is None else (first, minus)
        total = first.total if minus is None else first.total - minus.total
        controls = torch.stack([part.control for part in parts if not part.is_logged] or [first.control])
        low, high = first.outcomes
        if not (total.isfinite().all() and controls.isfinite().all()) or low == high:
            return None
        informative = [part.informative for part in parts if minus is None or not part.is_logged]
        if minus is not None:
            informative.append(_informative(total - float(total.sum() / first.size.sum()) * first.size, controls))
        corners = _corners(parts)
        points = total.new_empty(2 + len(controls), len(total) + corners.shape[1])
        for row, (episodes, of_corners) in zip(
            points, zip((total, first.size, *controls), corners, strict=True), strict=True
        ):
            torch.cat((episodes, of_corners), out=row)
        counts = torch.ones_like(points[0])
        counts[-corners.shape[1] :] = _CORNER
        points, counts = _merge_points(points, counts)
        critical = NormalDist().inv_cdf((1 + level) / 2) * (1 + 0.6 / (min(informative) + 0.42) ** 0.5) ** 0.5
        return cls(points=points, counts=counts, critical=critical)


def _corners(parts: Sequence[Contributions]) -> Tensor:
    """Returns the points of every extreme outcome with every extreme weight, [2 + controls, c]."""
    size = float(parts[0].size.mean())
    observed = _extreme_weights(parts)
    corners = []
    for number, weights in enumerate([*observed, *_untried_weights(parts, observed)]):
        tried = number < len(observed)
        for outcomes in zip(*(part.outcomes if tried else part.untried_outcomes for part in parts), strict=True):
            added = [
                part.offset + weight * outcome for part, weight, outcome in zip(parts, weights, outcomes, strict=True)
            ]
            controls = [
                size * (weight - 1) for part, weight in zip(parts, weights, strict=True) if not part.is_logged
            ] or [0.0]
            corners.append([size * (added[0] - sum(added[1:])), size, *controls])
    return parts[0].total.new_tensor(corners).T


def _extreme_weights(parts: Sequence[Contributions]) -> list[list[float]]:
    """Returns the weights of the extreme episodes of each part, the most different weights, and 1.

    A larger weight than the highest of `extreme_episodes` of few episodes, combined with
    an outcome of few episodes, would be a corner far from almost all logs: intervals of sequential estimates were up to
    twice as wide and covered the truth no more often.
    """
    weights = [part.weight for part in parts]
    lowest, highest = zip(*(part.extreme_episodes for part in parts), strict=True)
    chosen = [*lowest, *highest]
    if len(parts) > 1:
        more = weights[0] - weights[1]
        chosen += [highest[0] if parts[1].is_logged else _highest(more), _highest(-more)]
    return [[1.0] * len(parts), *([float(weight[index]) for weight in weights] for index in chosen)]


def _untried_weights(parts: Sequence[Contributions], observed: list[list[float]]) -> list[list[float]]:
    """Returns weights of alternatives that are larger than the corners' observed weights.

    One row of an episode differs from the others, so that of `size` rows one has the weight.
    """
    if all(part.alternatives is None for part in parts):
        return []
    rows = max(len(part.alternatives.weight) for part in parts if part.alternatives is not None)
    size = float(parts[0].size.mean())
    ones = parts[0].weight.new_ones(rows)
    weights = torch.stack([ones if part.alternatives is None else part.alternatives.weight for part in parts])
    corners = []
    for number, part in enumerate(parts):
        largest = max(corner[number] for corner in observed)
        alternatives = part.alternatives
        if alternatives is None:
            continue
        # rows that are passed over move an estimate by a tenth of its standard error, unless rewards lie far out
        share = _NEGLIGIBLE * float((part.weight - 1).square().mean() / len(part.weight)) ** 0.5
        row = alternatives.largest(share)
        if row is not None and 1 + (float(weights[number, row]) - 1) / size > largest:
            corners.append((1 + (weights[:, row] - 1) / size).tolist())
    return corners


def _highest(deviation: Tensor) -> int:
    """Returns the index of the episode above whose deviation 5 % of all deviation lies."""
    size = deviation.abs()
    total = size.sum()
    if not total > 0:
        return 0
    # nearly always the answer is among few high ones: sorting these takes an eighth of the time
    least = deviation.kthvalue(len(deviation) - len(deviation) // _HIGH).values
    high = (deviation >= least).nonzero().squeeze(1)
    if size[high].sum() <= _BEYOND * total * _SURELY:
        high = torch.arange(len(deviation))
    ascending, order = deviation[high].sort(stable=True)
    passed = total - size[high].sum() + ascending.abs().cumsum(0)
    index = int((passed < (1 - _BEYOND) * total).sum())
    return int(high[order[min(index, len(high) - 1)]])


def _merge_points(points: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Returns distinct points [k, P] and how often each counts, [P].

    A log with few different weights and rewards has few distinct points, however long it is.
    """
    generator = torch.Generator().manual_seed(0)
    direction = torch.rand(len(points), generator=generator, dtype=points.dtype)
    direction /= torch.linalg.vector_norm(points, torch.inf, 1).clamp(min=torch.finfo(points.dtype).tiny)
    some = direction @ points[:, :: -(-len(counts) // _MERGED_SAMPLE)]
    if len(counts) > _POINTS_AT_ONCE and len(torch.unique(some)) > _MOSTLY_DISTINCT * len(some):
        return points, counts  # fewer points would not be worth the search
    _, number = torch.unique(direction @ points, return_inverse=True)
    size = int(number.max()) + 1
    representative = number.new_zeros(size).scatter_(0, number, torch.arange(len(number)))
    return points[:, representative], counts.new_zeros(size).index_add_(0, number, counts)


def _informative(residual: Tensor, controls: Tensor) -> float:
    """Returns the effective number of residuals [n] after the part that controls [k, n] explain is removed."""
    scale = residual.abs().max()
    if not scale > 0:
        return 0.0
    residual = residual / scale
    controls = _scale(controls)
    explained = torch.linalg.lstsq(controls @ controls.T, controls @ residual, driver="gelsd").solution
    squares = residual.sub_(explained @ controls).square_()
    total = float(squares.sum())
    return total**2 / float(squares @ squares) if total > _ROUNDING * len(squares) else 0.0


def _scale(values: Tensor) -> Tensor:
    """Scales values so that the largest magnitude on the last axis is 1; zeros stay zeros."""
    largest: Tensor = torch.linalg.vector_norm(values, torch.inf, -1, keepdim=True)
    return values / largest.clamp(min=torch.finfo(values.dtype).tiny)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Likelihood:
    """sum_p count_p log(1 + m' x_p) of B problems at a multiplier m of each.

    Attributes:
        value: [B]; -infinity where a logarithm is undefined.
        gradient: [B, k] sum_p count_p x_p / (1 + m' x_p).
        curvature: [B, k, k] sum_p count_p x_p x_p' / (1 + m' x_p)^2.
    """

    value: Tensor
    gradient: Tensor
    curvature: Tensor

    def replace(self, rows: Tensor, other: "_Likelihood") -> "_Likelihood":
        """Returns the likelihoods with those of another at the rows where a flag [B] is true."""
        return _Likelihood(
            value=torch.where(rows, other.value, self.value),
            gradient=torch.where(rows.view(-1, 1), other.gradient, self.gradient),
            curvature=torch.where(rows.view(-1, 1, 1), other.curvature, self.curvature),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Points:
    """Points of B problems, and how often each counts.

    Attributes:
        points: [B, k, P] numerators, denominators, and controls.
        counts: [B, P].
    """

    points: Tensor
    counts: Tensor

    @classmethod
    def of(cls, problems: Sequence[_IntervalProblem]) -> "_Points":
        """Returns the points of problems, whose controls are scaled; those of a single problem are not copied."""
        if len(problems) == 1:
            points = problems[0].points.unsqueeze(0)
            counts = problems[0].counts.unsqueeze(0)
        else:
            most = max(len(problem.counts) for problem in problems)
            missing = [(0, most - len(problem.counts), 0, 4 - len(problem.points)) for problem in problems]
            points = torch.stack([pad(problem.points, sides) for problem, sides in zip(problems, missing, strict=True)])
            counts = torch.stack(
                [pad(problem.counts, sides[:2]) for problem, sides in zip(problems, missing, strict=True)]
            )
        points[:, 2:] = _scale(points[:, 2:])
        return cls(points=points, counts=counts)

    def rows(self, index: Tensor) -> "_Points":
        """Returns the points of some problems, by their indices; without a copy if these are all."""
        if len(index) == len(self.points):
            return self
        return _Points(points=self.points[index], counts=self.counts[index])

    def at(self, multipliers: Tensor) -> _Likelihood:
        """Returns the likelihood at multipliers [B, k]; points are read once, in parts that fit in the cache."""
        size, k, _ = self.points.shape
        tiny = torch.finfo(self.points.dtype).tiny
        value = self.points.new_zeros(size)
        gradient = self.points.new_zeros(size, k)
        curvature = self.points.new_zeros(size, k, k)
        least = self.points.new_full((size,), torch.inf)
        for points, counts in self._parts():
            inside = torch.bmm(multipliers.unsqueeze(1), points).squeeze(1).add_(1)
            least = torch.minimum(least, inside.amin(1))
            inside.clamp_(min=tiny)
            value += torch.linalg.vecdot(counts, inside.log())
            shares = counts / inside
            gradient += torch.bmm(points, shares.unsqueeze(2)).squeeze(2)
            curvature += torch.bmm(points * shares.div_(inside).unsqueeze(1), points.transpose(1, 2))
        return _Likelihood(value=torch.where(least > 0, value, -torch.inf), gradient=gradient, curvature=curvature)

    def subtract_explained(self, multipliers: Tensor, likelihood: _Likelihood) -> Tensor:
        """Subtracts from the numerators what denominators and controls explain, and returns the centers, [B].

        The likelihood ratio does not change: its multipliers do. Without this step an estimate far from 0 would have
        an interval that is lost in rounding, if its rewards hardly differ.

        Args:
            multipliers: [B, k] multipliers of the controls at the maximum.
            likelihood: the likelihood there.
        """
        center = likelihood.gradient[:, 0] / likelihood.gradient[:, 1]
        curvature = likelihood.curvature
        shared = curvature[:, 2:, 0] - center.unsqueeze(1) * curvature[:, 2:, 1]
        among = curvature[:, 2:, 2:]
        ridge = torch.diag_embed(1e-12 * among.diagonal(dim1=1, dim2=2) + torch.finfo(center.dtype).tiny)
        slopes = torch.linalg.solve(among + ridge, shared)
        factors = torch.cat((center.unsqueeze(1), slopes), 1)
        for points, _ in self._parts():
            points[:, 0] -= torch.bmm(factors.unsqueeze(1), points[:, 1:]).squeeze(1)
        return center

    def _parts(self) -> Iterator[tuple[Tensor, Tensor]]:
        size = max(1, _POINTS_IN_CACHE // len(self.points))
        return zip(torch.split(self.points, size, 2), torch.split(self.counts, size, 1), strict=True)


def _ends(problems: Sequence[_IntervalProblem]) -> list[tuple[float, float]]:
    """Returns both ends of the interval of each problem, whose points are changed."""
    points = _Points.of(problems)
    size, k, _ = points.points.shape
    controls = torch.eye(k, dtype=points.points.dtype)[2:].expand(size, k - 2, k)
    start, likelihood = _maximize(points, controls, controls.new_zeros(size, k - 2))
    multipliers = pad(start, (2, 0))
    center = points.subtract_explained(multipliers, likelihood)
    begun = points.at(multipliers)
    total = begun.gradient[:, 1]
    moved = begun.gradient[:, 0] / total  # by rounding, and by the error of the maximum of the controls
    numerator = pad(torch.stack((torch.ones_like(moved), -moved), 1), (0, k - 2)).unsqueeze(1)
    spread = (numerator @ begun.curvature @ numerator.transpose(1, 2)).view(-1).clamp(min=0).sqrt()
    numerator /= spread.clamp(min=torch.finfo(spread.dtype).tiny).view(-1, 1, 1)
    critical = center.new_tensor([problem.critical for problem in problems])
    guess = torch.where(spread > 0, critical / total, 0.0)
    down, up = (
        _distance(points, torch.cat((controls, side * numerator), 1), start, begun, critical, guess) for side in (-1, 1)
    )
    low = center + moved - spread * down
    high = center + moved + spread * up
    return list(zip(low.tolist(), high.tolist(), strict=True))


def _distance(
    points: _Points, directions: Tensor, start: Tensor, begun: _Likelihood, critical: Tensor, guess: Tensor
) -> Tensor:
    """Returns the distance from a center of 0 at which the likelihood ratio reaches its critical value, [B].

    Newton's method on the ratio's root, which is nearly linear. Each step stays between the nearest distances known to
    be too small and too large.

    Args:
        points: the points.
        directions: [B, c, k] what the coordinates of a point add to its controls, and last to its numerator relative
            to the center, which is negative for the distance below the center.
        start: [B, c - 1] multipliers of the controls at the maximum without a condition on the value.
        begun: the likelihood there.
        critical: [B] root of twice the likelihood ratio.
        guess: [B] initial distance; 0 if all points are equal.
    """
    distance = guess.clone()
    below = torch.zeros_like(guess)
    above = torch.full_like(guess, torch.inf)
    multipliers = pad(start, (0, 1))
    remaining = guess.nonzero().squeeze(1)
    for step in range(_OUTER_STEPS):
        if not len(remaining):
            break
        target = critical[remaining]
        current = distance[remaining]
        unconditional = begun.value[remaining]
        conditions = directions[remaining]
        conditions[:, -1, 1] -= current
        maximum, likelihood = _maximize(
            points.rows(remaining),
            conditions,
            multipliers[remaining],
            unconditional + 2 * target.square(),
            begun if not step and len(remaining) == len(guess) else None,
        )
        multipliers[remaining] = maximum
        root = (2 * (likelihood.value - unconditional)).clamp(min=0).sqrt()
        slope = -maximum[:, -1] * likelihood.gradient[:, 1] / root
        low = torch.where(root < target, current, below[remaining])
        high = torch.where(root < target, above[remaining], current)
        newton = current + (target - root) / slope
        between = torch.where(high.isfinite(), (low + high) / 2, 4 * current)
        newton = torch.where((newton > low) & (newton < high) & (newton < 8 * current), newton, between)
        reached = (root - target).abs() < _BEFORE_LAST * target
        enclosed = high - low < _TOLERANCE * high
        below[remaining] = low
        above[remaining] = high
        distance[remaining] = torch.where(enclosed & ~reached, high, newton)
        remaining = remaining[~(reached | enclosed)]
    return distance


def _maximize(
    points: _Points,
    conditions: Tensor,
    start: Tensor,
    enough: Tensor | None = None,
    begun: _Likelihood | None = None,
) -> tuple[Tensor, _Likelihood]:
    """Maximizes sum_p count_p log(1 + m' C x_p) over m by Newton's method with halved steps.

    Args:
        points: the x.
        conditions: [B, c, k] the C.
        start: [B, c] initial m; 0 replaces it if it is not feasible.
        enough: [B] value above which the search ends, because a maximum may not exist.
        begun: the likelihood at the start, if it is known.

    Returns:
        The multipliers m [B, c], and the likelihood there, with derivatives by m' C.
    """

    def at(multipliers: Tensor) -> _Likelihood:
        return points.at(torch.bmm(multipliers.unsqueeze(1), conditions).squeeze(1))

    multipliers = start
    best = at(start) if begun is None else begun
    feasible = best.value > -torch.inf
    if not feasible.all():
        multipliers = torch.where(feasible.unsqueeze(1), start, 0.0)
        best = at(multipliers)
    for _ in range(_INNER_STEPS):
        gradient = torch.bmm(conditions, best.gradient.unsqueeze(2)).squeeze(2)
        curvature = torch.bmm(torch.bmm(conditions, best.curvature), conditions.transpose(1, 2))
        ridge = torch.diag_embed(1e-12 * curvature.diagonal(dim1=1, dim2=2) + torch.finfo(start.dtype).tiny)
        step = torch.linalg.solve(curvature + ridge, gradient)
        gain = (gradient * step).sum(1)
        active = gain > 1e-8
        if enough is not None:
            active &= best.value < enough
        if not active.any():
            break
        length = active.to(step.dtype)
        for _ in range(_HALVINGS):
            tried = multipliers + length.unsqueeze(1) * step
            likelihood = at(tried)
            short = active & ~(likelihood.value >= best.value + 0.25 * length * gain - 1e-12 * best.value.abs())
            if not short.any():
                break
            length = torch.where(short, length / 2, length)
        multipliers = torch.where(short.unsqueeze(1), multipliers, tried)
        best = best.replace(~short, likelihood)
    return multipliers, best
