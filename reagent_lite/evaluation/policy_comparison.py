"""A rollout: two policies compared unit by unit, at every unit, from the rows of the log alone.

    rows ─► units, in the order in which they began ─► relative difference x (return - center) ─► sequences ─► decision

A unit is an episode, or a decision without an episode. It counts once it has ended and all units before it have: were
it counted when it ends, the counted units would be chosen by their outcomes. The center is the mean return of earlier
units, so that it cannot depend on the unit.
"""

import json
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from reagent_lite.config.rollout_config import ComparisonConfig
from reagent_lite.errors import DataError, Problem, pluralize
from reagent_lite.evaluation.interval import Interval, none_if_infinite
from reagent_lite.rl.sequences import (
    FRACTIONS,
    AsymptoticSequence,
    BettingSequence,
    difference_grid,
    ratio_capitals,
)
from reagent_lite.rl.two_policies import difference_bounds, log_ratio_of, mixed_propensity, relative_difference

if TYPE_CHECKING:
    from reagent_lite.data.rollout_rows import RolloutRows

Floats = NDArray[np.float64]
REWARD: Final = "reward"
RATIO_LEVEL: Final = 0.001
"""Probability that the sample ratio is ever said to be wrong if it is right."""
_PROPENSITY_TOLERANCE = 1e-6  # relative; a log may have been stored as float32
_ROUNDING = 1e-9  # of the width of a range, by which a sum of discounted rewards may be outside
_GROWTH = 1.05  # of the number of units from one entry of the history to the next
_FORESEEABLE = 1000.0  # times the present number of units; more are no forecast

RolloutDecision = Literal["better", "worse", "not told apart", "invalid"]


@dataclass(slots=True)
class _Unit:
    begun: int
    is_new: bool
    share: float
    outcomes: Floats
    log_ratio: float = 0.0
    discount: float = 1.0
    has_steps: bool = False
    has_ended: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """N units in the order in which they began.

    Attributes:
        is_new: [N] whether the new policy had the unit.
        share: [N] probability with which it was given it.
        log_ratio: [N] log of the ratio of both policies' probabilities of all its actions.
        outcomes: [N, 1 + M] its return, and the sums of the metrics.
    """

    is_new: NDArray[np.bool_]
    share: Floats
    log_ratio: Floats
    outcomes: Floats

    def part(self, start: int, end: int) -> "Units":
        """Returns the units from `start` to `end`."""
        return Units(**{name: getattr(self, name)[start:end] for name in self.__slots__})


class UnitCollector:
    """Collects the rows of units; yields those that count.

    Attributes:
        rows: number of rows so far.
        late_rows: rows of units that had ended before, or whose first row the log does not have.
        wrong_propensities: rows whose propensity in the log is not that of a unit that stays with its policy.
        measured: number of rows with the reward, and with each metric; 0 before the first row.
        first, last: times of the first and the last row in microseconds since 1970; 0 without times.
    """

    def __init__(self, gamma: float, episode_seconds: float) -> None:
        self._gamma = gamma
        self._longest = int(episode_seconds * 1e6)
        self._open: dict[str, _Unit] = {}
        self._waiting: deque[_Unit] = deque()
        self._ended: set[str] = set()  # names of units in rows without their step
        self.measured: Any = 0
        self.rows = self.late_rows = self.wrong_propensities = self.first = self.last = 0

    @property
    def waiting(self) -> int:
        """Number of units that do not count yet."""
        return len(self._waiting)

    def add(self, rows: "RolloutRows") -> Units:
        """Adds rows; returns the units that count from now on.

        Raises:
            DataError: a unit changes its policy or its share.
        """
        steps = zip(
            rows.unit,
            rows.is_new.tolist(),
            rows.share.tolist(),
            rows.current.tolist(),
            rows.new.tolist(),
            log_ratio_of(rows.current, rows.new).tolist(),
            rows.propensity.tolist(),
            [None] * len(rows.unit) if rows.step is None else rows.step.tolist(),
            [0] * len(rows.unit) if rows.decided is None else rows.decided.tolist(),
            rows.ends.tolist(),
            np.nan_to_num(rows.outcomes),
            strict=True,
        )
        self.measured = self.measured + np.isfinite(rows.outcomes).sum(0)
        for name, is_new, share, current, new, log_ratio, propensity, step, decided, ends, outcomes in steps:
            self.rows += 1
            self.first = self.first or decided
            self.last = max(self.last, decided)
            self._end_late(decided)
            unit = None if name is None else self._open.get(name)
            if unit is None:
                if step or name in self._ended:
                    self.late_rows += 1
                    continue
                unit = _Unit(decided, is_new, share, np.zeros(len(outcomes)), has_steps=step is not None)
                self._waiting.append(unit)
                if name is not None:
                    self._open[name] = unit
            if (unit.is_new, unit.share) != (is_new, share):
                got = f"{name!r} with another policy or share than before"
                raise DataError(Problem(rows.where, "units that keep their policy and share", got))
            mixed = mixed_propensity(share, unit.log_ratio, current, new)
            if abs(propensity - mixed) > _PROPENSITY_TOLERANCE * mixed:  # false for NaN: a log without it
                self.wrong_propensities += 1
            unit.outcomes += unit.discount * outcomes
            unit.discount *= self._gamma
            unit.log_ratio += log_ratio
            if name is None:
                unit.has_ended = True
            elif ends:
                self._end(name)
        return self._counting()

    def end_all(self) -> Units:
        """Ends all units, those of a log without times; returns those that count from now on."""
        for name in list(self._open):
            self._end(name)
        return self._counting()

    def _end_late(self, now: int) -> None:
        while self._open:
            name, unit = next(iter(self._open.items()))
            if not unit.begun or now - unit.begun < self._longest:
                return
            self._end(name)

    def _end(self, name: str) -> None:
        unit = self._open.pop(name)
        unit.has_ended = True
        if not unit.has_steps:
            self._ended.add(name)

    def _counting(self) -> Units:
        units = []
        while self._waiting and self._waiting[0].has_ended:
            units.append(self._waiting.popleft())
        outcomes = np.array([unit.outcomes for unit in units])
        return Units(
            is_new=np.array([unit.is_new for unit in units], bool),
            share=np.array([unit.share for unit in units]),
            log_ratio=np.array([unit.log_ratio for unit in units]),
            outcomes=outcomes if units else np.zeros((0, 1)),
        )


def find_unmeasured(metrics: Sequence[str], collector: UnitCollector) -> list[str]:
    """Returns the metrics that no row has; [] before the first row."""
    return [name for name, count in zip(metrics, np.atleast_1d(collector.measured)[1:], strict=False) if not count]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeDifference:
    """The difference of an outcome per unit, new policy minus current one.

    Attributes:
        name: "reward", or the name of a metric.
        value, low, high: the difference and its interval, which holds at every moment; None if unknown.
        current, new: mean outcome of the units of each policy; None without units.
        level: probability that the interval ever misses.
        method: "betting" with a range of outcomes, otherwise "asymptotic".
        limit: the difference beyond which a guardrail is violated; None for the reward.
        units_to_go: about how many more units tell the difference from 0; None if they cannot be foreseen.
    """

    name: str
    value: float | None
    low: float | None
    high: float | None
    current: float | None
    new: float | None
    level: float
    method: Literal["betting", "asymptotic"]
    limit: float | None
    units_to_go: int | None

    @property
    def interval(self) -> Interval:
        """The difference with its interval; NaN if unknown."""
        value, low, high = (math.nan if end is None else end for end in (self.value, self.low, self.high))
        return Interval(value=value, low=low, high=high)


class _Outcome:
    """The sequence of one outcome."""

    def __init__(
        self, name: str, level: float, bounds: tuple[float, float] | None, limit: float | None, sign: float
    ) -> None:
        self.name = name
        self.level = level
        self.bounds = bounds
        self.limit = limit
        self.sign = sign
        self.sums = np.zeros(6)  # of outcomes, differences and their squares; units of the new policy, outcomes of each
        self.outside = 0
        self.betting: BettingSequence | None = None
        self.asymptotic: AsymptoticSequence | None = None
        if bounds is None:
            self.asymptotic = AsymptoticSequence(level)
        else:
            grid = difference_grid(bounds[1] - bounds[0], [] if limit is None else [limit])
            self.betting = BettingSequence(level, grid)

    def add(self, outcome: Floats, units: Units, before: int) -> None:
        """Adds outcomes [n] of units, of which there were `before`."""
        low, high = self.bounds or (-math.inf, math.inf)
        slack = _ROUNDING * (high - low)
        self.outside += int(((outcome < low - slack) | (outcome > high + slack)).sum())
        outcome = np.clip(outcome, low, high)
        totals = np.add.accumulate(np.concatenate([self.sums[:1], outcome]))[:-1]
        counts = np.maximum(np.arange(before, before + len(outcome)), 1)
        center = np.clip(totals / counts, low, high)
        difference = relative_difference(units.share, units.log_ratio) * (outcome - center)
        if self.betting is not None:
            self.betting.add(difference, *difference_bounds(units.share, center - low, high - center))
        if self.asymptotic is not None:
            self.asymptotic.add(difference)
        new = units.is_new
        terms = np.stack([outcome, difference, difference**2, new, new * outcome, ~new * outcome], 1)
        terms = np.concatenate([self.sums[None], terms])
        self.sums = np.add.accumulate(terms, axis=0)[-1]

    @property
    def ends(self) -> tuple[float, float]:
        """The lower and the upper end of the interval."""
        sequence = self.betting or self.asymptotic
        assert sequence is not None
        return float(sequence.lower), float(sequence.upper)

    @property
    def side(self) -> int:
        """1 if the new policy is known to be above, -1 if below, 0 if not told apart."""
        low, high = self.ends
        return int(low >= 0) - int(high <= 0)

    @property
    def is_violated(self) -> bool:
        """Whether a guardrail is known to be violated."""
        low, high = self.ends
        return self.limit is not None and (low >= self.limit if self.sign > 0 else high <= self.limit)

    @property
    def is_within(self) -> bool:
        """Whether a guardrail is known to be within its limit."""
        low, high = self.ends
        return self.limit is not None and (high <= self.limit if self.sign > 0 else low >= self.limit)

    def difference(self, units: int) -> OutcomeDifference:
        """Returns the difference after so many units."""
        low, high = self.ends
        if self.bounds is not None:
            width = self.bounds[1] - self.bounds[0]
            low, high = max(low, -width), min(high, width)
        total, squares, units_new, new, current = self.sums[1:].tolist()
        mean = total / units if units else math.nan
        variance = squares / units - mean**2 if units else math.nan
        sequence = self.betting or self.asymptotic
        assert sequence is not None
        to_go: int | None = None
        if units and not self.side and mean**2 * units > variance > 0:  # beyond one standard error
            needed = sequence.values_until_told(mean, variance) - units
            to_go = max(math.ceil(needed), 1) if needed < _FORESEEABLE * units else None
        return OutcomeDifference(
            name=self.name,
            value=none_if_infinite(mean),
            low=none_if_infinite(low),
            high=none_if_infinite(high),
            current=current / (units - units_new) if units > units_new else None,
            new=new / units_new if units_new else None,
            level=self.level,
            method="asymptotic" if self.betting is None else "betting",
            limit=self.limit,
            units_to_go=to_go,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryPoint:
    """An entry of the history: the interval of an outcome after so many units."""

    units: int
    name: str
    value: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutComparison:
    """Comparison of two policies after a number of units.

    Attributes:
        decision: better or worse: told apart by the reward, or worse by a guardrail; invalid: the sample ratio is
            wrong, or a return lies outside its range, so that nothing is known.
        sentence: the decision in words, with its figures.
        units, units_new: number of units that count, and of those that the new policy had.
        expected_new: expected number of the latter, the sum of their shares.
        differing_units: number of units whose actions the two policies take with different probabilities.
        ratio_capital: evidence against the sample ratio; 2 / RATIO_LEVEL is enough.
        differences: that of the reward, then those of the guardrails.
        history: their intervals after earlier numbers of units.
    """

    decision: RolloutDecision
    sentence: str
    units: int
    units_new: int
    expected_new: float
    differing_units: int
    ratio_capital: float
    differences: tuple[OutcomeDifference, ...]
    history: tuple[HistoryPoint, ...] = field(repr=False)

    def figures(self) -> dict[str, Any]:
        """Returns all figures but the history, as JSON has them."""
        return {name: value for name, value in json.loads(json.dumps(asdict(self))).items() if name != "history"}


class Comparer:
    """Compares two policies unit by unit; the same units in other portions give the same bits."""

    def __init__(self, config: ComparisonConfig) -> None:
        level = config.level / (1 + len(config.guardrails))
        self._outcomes = [_Outcome(REWARD, level, config.reward_range, None, -1.0)]
        for name, guardrail in config.guardrails.items():
            sign = 1.0 if guardrail.better == "lower" else -1.0
            limit = sign * guardrail.at_most_worse_by
            self._outcomes.append(_Outcome(name, level, guardrail.range, limit, sign))
        self._ratio = np.ones((2, len(FRACTIONS)))
        self._ratio_highest = 1.0
        self._expected = 0.0
        self._differing = 0
        self._units = 0
        self._marks = _marks()
        self._next_mark = next(self._marks)
        self._history: list[HistoryPoint] = []

    @property
    def units(self) -> int:
        """Number of units so far."""
        return self._units

    def add(self, units: Units) -> None:
        """Adds units in their order."""
        start = 0
        while start < len(units.share):
            end = min(len(units.share), start + self._next_mark - self._units)
            self._add(units.part(start, end))
            start = end

    def _add(self, units: Units) -> None:
        capitals = ratio_capitals(self._ratio, units.is_new, units.share)
        self._ratio = capitals[-1]
        self._ratio_highest = max(self._ratio_highest, float(capitals.mean(-1).max()))
        self._expected = float(np.add.accumulate(np.concatenate([[self._expected], units.share]))[-1])
        self._differing += int((units.log_ratio != 0).sum())
        for number, outcome in enumerate(self._outcomes):
            outcome.add(units.outcomes[:, number], units, self._units)
        self._units += len(units.share)
        if self._units == self._next_mark:
            self._next_mark = next(self._marks)
            self._history += self._points()

    def _points(self) -> list[HistoryPoint]:
        differences = [outcome.difference(self._units) for outcome in self._outcomes]
        return [
            HistoryPoint(units=self._units, name=each.name, value=each.value, low=each.low, high=each.high)
            for each in differences
        ]

    def comparison(self) -> RolloutComparison:
        """Returns what is known now."""
        differences = tuple(outcome.difference(self._units) for outcome in self._outcomes)
        decision, reason = self._decision(differences)
        last = self._history[-1].units if self._history else 0
        return RolloutComparison(
            decision=decision,
            sentence=reason,
            units=self._units,
            units_new=int(self._outcomes[0].sums[3]),
            expected_new=self._expected,
            differing_units=self._differing,
            ratio_capital=min(self._ratio_highest, 1e300),
            differences=differences,
            history=(*self._history, *(self._points() if self._units > last else ())),
        )

    def _decision(self, differences: Sequence[OutcomeDifference]) -> tuple[RolloutDecision, str]:
        reward = differences[0]
        after = f"after {pluralize(self._units, 'unit')}"
        for outcome in self._outcomes:
            if outcome.outside:
                low, high = outcome.bounds or (0, 0)
                got = f"{pluralize(outcome.outside, 'unit')} with {outcome.name} outside {low:g} to {high:g}"
                return "invalid", f"Nothing is known: {got}, which the comparison was told to be impossible"
        if self._ratio_highest * RATIO_LEVEL >= 2:
            new = pluralize(int(self._outcomes[0].sums[3]), "unit")
            return "invalid", (
                f"Nothing is known: the new policy has {new} where {self._expected:,.1f} were drawn for it, which is "
                "no chance: find where units are lost"
            )
        for outcome, difference in zip(self._outcomes[1:], differences[1:], strict=True):
            if outcome.is_violated:
                return "worse", (
                    f"The new policy is worse {after}: {outcome.name} differs by {difference.interval} per unit, "
                    f"beyond its limit of {outcome.limit:g}"
                )
        if side := self._outcomes[0].side:
            word: RolloutDecision = "better" if side > 0 else "worse"
            unknown = [outcome.name for outcome in self._outcomes[1:] if word == "better" and not outcome.is_within]
            still = f"; not known yet: whether {', '.join(unknown)} is within its limit" if unknown else ""
            return word, f"The new policy is {word} {after}: the reward differs by {reward.interval} per unit{still}"
        so_far = f": the reward differs by {reward.interval} per unit" if reward.value is not None else ""
        to_go = int(float(f"{reward.units_to_go or 0:.2g}"))
        more = f", about {pluralize(to_go, 'more unit')} to go" if to_go else ""
        return "not told apart", f"Too early to say whether the new policy is better or worse, {after}{so_far}{more}"


def _marks() -> Iterator[int]:
    """Yields the numbers of units at which the history has an entry."""
    mark = 10
    while True:
        yield mark
        mark = max(mark + 10, int(mark * _GROWTH))
