"""Counterfactual policy evaluation: every estimator on one page, with interval, diagnostics and verdict.

page ─► limit: rows ─► terms of each episode (rl.sums.EpisodeSums) ─► estimates of all resamples ─► CPEResult
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import torch
from torch import Tensor

from reagent_lite.config.evaluation import EvaluationConfig
from reagent_lite.errors import counted
from reagent_lite.evaluation.calibration import Calibration
from reagent_lite.evaluation.interval import Interval
from reagent_lite.evaluation.overlap import Events, Overlap, matched_events, measure_overlap
from reagent_lite.evaluation.page import EvaluationPage, episode_groups, tables_of
from reagent_lite.evaluation.verdict import (
    Reasoned,
    Verdict,
    estimate_verdict,
    model_verdict,
    reliance_on_model,
    weights_verdict,
    with_calibration,
)
from reagent_lite.rl.bootstrap import percentile_interval, resamples
from reagent_lite.rl.estimators import (
    CHEAP_ESTIMATORS,
    ESTIMATORS,
    LOGGED,
    continuation,
    logged_returns,
    logged_rewards,
    mean_return,
    mean_reward,
)
from reagent_lite.rl.likelihood import Contributions, intervals
from reagent_lite.rl.sums import EpisodeSums, Estimator, Evidence

ESTIMATE: Final = 'evaluation.propensities to "estimate"'
WEIGHTED: Final = tuple(name for name, estimator in ESTIMATORS.items() if estimator.weighted)
MODELLED: Final = tuple(name for name, estimator in ESTIMATORS.items() if estimator.model)

# Limits of a group of episodes, padding included; a longer episode is a group of its own.
_GROUP_ROWS = 2**17
_GROUP_BYTES = 2**24
_OUTCOMES_AT_ONCE = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Basis:
    """Input of an estimate's interval.

    Attributes:
        samples: [1 + R] the estimate, followed by the estimate of every resample.
        contributions: contribution of each episode; None for an estimate that has only the bootstrap.
    """

    samples: Tensor
    contributions: Contributions | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """One estimator's figures for one outcome.

    Attributes:
        name: a key of rl.estimators.ESTIMATORS.
        figure: estimate and interval.
        normalized: estimate / logged value; NaN unless the logged value's interval excludes 0.
        difference: estimate - logged value, from the same episodes. In both, an estimate that continues cut records is
            compared with the logged value continued by the same value model, Family.continued.
        verdict, reason: whether to trust the interval, and why.
        basis: input of its intervals.
    """

    name: str
    figure: Interval
    normalized: float
    difference: Interval
    verdict: Verdict
    reason: str
    basis: Basis = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Estimates of one quantity: the mean reward of a row, or the mean discounted return of an episode.

    Attributes:
        logged: value of the logged policy.
        continued: the same plus the value model's expectation after cut records; None if no record is cut.
        events: events that the evaluated policy met; None if no outcome is usual.
        estimates: estimates in the order of the registry; the first rests on a model alone.
    """

    logged: Interval
    continued: Interval | None
    events: Events | None
    estimates: tuple[Estimate, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeResult:
    """All estimates of the reward or of a metric."""

    name: str
    one_step: Family
    sequential: Family

    @property
    def estimates(self) -> tuple[Estimate, ...]:
        """Estimates of both families."""
        return self.one_step.estimates + self.sequential.estimates


@dataclass(frozen=True, slots=True, kw_only=True)
class CPEResult:
    """Evaluation of a policy on a page.

    Attributes:
        outcomes: "Reward" first, then metrics; empty if the page has no rows.
        overlap: diagnostics of weights, the same for every outcome; None if the page has no rows.
        weighted: whether the log has propensities, which weights need.
        gamma: discount per step.
        level: confidence level of all intervals.
        num_episodes_left_out, num_rows_beyond_horizon: episodes and rows that the config's limits leave unscored.
    """

    outcomes: tuple[OutcomeResult, ...]
    overlap: Overlap | None
    weighted: bool
    gamma: float
    level: float
    num_episodes_left_out: int
    num_rows_beyond_horizon: int

    @property
    def calibration(self) -> Calibration | None:
        """Calibration of the propensities, if they are estimated and rows were scored."""
        return None if self.overlap is None else self.overlap.calibration

    @property
    def by_row(self) -> bool:
        """Whether rows are compared by their rewards: nothing later counts, or every scored episode is a single row."""
        return self.overlap is not None and (self.gamma == 0 or self.overlap.horizon == 1)


def evaluate_page(
    page: EvaluationPage,
    *,
    gamma: float,
    config: EvaluationConfig,
    generator: torch.Generator,
    missing: Mapping[str, str] | None = None,
    calibration: Calibration | None = None,
    show: Callable[[int, int], None] = lambda done, total: None,
) -> CPEResult:
    """Evaluates the page's policy for the reward and every metric.

    Memory in addition to the page: 8 (1 + 2 T) bytes per row and 8 (3 + 14 T) per episode for T outcomes, at most 32
    at a time; a few numbers per row for a moment; and a constant below 150 MB for any lengths of episodes.

    Args:
        page: rows of episodes that the policy's models were not fitted to.
        gamma: discount per step.
        config: limits, level, range of rewards and number of resamples.
        generator: draws the resamples, and the episodes if there are too many; on the CPU.
        missing: result of missing_estimates: these estimates are undefined and not to be used.
        calibration: that of the propensities, if they are estimated.
        show: called with the number of outcomes done and the number of all outcomes.
    """
    missing = missing or {}
    rows, left_out, beyond = limit(page, config, generator)
    outcomes: list[OutcomeResult] = []
    overlap = None
    if len(rows):
        num_episodes = len(torch.unique_consecutive(page.episode[rows]))
        # resamples of one episode are all alike: no interval rather than one of width 0
        count = config.bootstrap_resamples if num_episodes > 1 else 0
        drawn = resamples(num_episodes, count, generator)
        for first in range(0, len(page.names), _OUTCOMES_AT_ONCE):
            part = page.only(first, first + _OUTCOMES_AT_ONCE)
            sums = sums_of_rows(part, rows, gamma, ESTIMATORS)
            samples = sums.estimates(drawn.blocks())
            overlap = overlap or replace(
                measure_overlap(page, rows, sums, samples[0]["mean_weight"], config), calibration=calibration
            )
            for number, name in enumerate(part.names):
                bounds = config.reward_range if first + number == 0 else None
                evaluated = _OutcomeEstimates(
                    sums,
                    number,
                    samples[number],
                    missing=missing,
                    overlap=overlap,
                    bounds=bounds,
                    config=config,
                )
                one_step = evaluated.family(_ONE_STEP)
                sequential = evaluated.family(_SEQUENTIAL)
                outcomes.append(OutcomeResult(name=name, one_step=one_step, sequential=sequential))
                show(len(outcomes), len(page.names))
    return CPEResult(
        outcomes=tuple(outcomes),
        overlap=overlap,
        weighted=not set(WEIGHTED) <= set(missing),
        gamma=gamma,
        level=config.confidence_level,
        num_episodes_left_out=left_out,
        num_rows_beyond_horizon=beyond,
    )


def estimates_of_page(
    page: EvaluationPage,
    *,
    gamma: float,
    config: EvaluationConfig,
    generator: torch.Generator,
    missing: Mapping[str, str],
) -> dict[str, float]:
    """Returns every estimate but MAGIC, without intervals, by tag: {`CPE/{outcome}/{estimator}`: value}.

    Used during training, before anything is decided. The arguments are those of evaluate_page.
    """
    rows, _, _ = limit(page, config, generator)
    tags: dict[str, float] = {}
    if not len(rows):
        return tags
    whole = torch.ones(1, len(torch.unique_consecutive(page.episode[rows])), dtype=torch.uint8)
    for first in range(0, len(page.names), _OUTCOMES_AT_ONCE):
        part = page.only(first, first + _OUTCOMES_AT_ONCE)
        for name, estimates in zip(
            part.names, sums_of_rows(part, rows, gamma, CHEAP_ESTIMATORS).estimates([whole]), strict=True
        ):
            values = {key: float(value) for key, value in estimates.items() if key not in missing}
            tags |= {f"CPE/{name}/{key}": values[key] for key in CHEAP_ESTIMATORS if key in values}
            tags[f"CPE/{name}/Logged_Reward"] = values["mean_reward"]
            tags[f"CPE/{name}/Logged_Return"] = values["mean_return"]
    return {tag: value for tag, value in tags.items() if math.isfinite(value)}


def effective_episodes(
    page: EvaluationPage, *, gamma: float, config: EvaluationConfig, generator: torch.Generator
) -> float:
    """Returns Overlap.effective_episodes alone; the arguments are those of evaluate_page."""
    rows, _, _ = limit(page, config, generator)
    if not len(rows):
        return 0.0
    sums = sums_of_rows(page.only(0, 1), rows, gamma, {})
    return float(sums.effective_episodes()[sums.judged_step])


def missing_estimates(*, rows: int, without_propensity: int, unfitted: str, unestimated: str = "") -> dict[str, str]:
    """Returns the estimators that lack propensities or fitted models, each with the reason.

    Args:
        rows: number of rows of the log.
        without_propensity: number of rows without a propensity.
        unfitted: why the models were not fitted; empty if they were.
        unestimated: why propensities could not be estimated; empty if the config does not ask for it.
    """
    reasons = dict.fromkeys(MODELLED, unfitted) if unfitted else {}
    if without_propensity:
        rows_have = counted(rows, "row of the log has", "rows of the log have")
        why = f", and none is estimated: {unestimated}" if unestimated else f"; log it, or set {ESTIMATE}"
        reasons |= dict.fromkeys(WEIGHTED, f"{without_propensity:,} of {rows_have} no propensity{why}")
    return reasons


def differences(model: CPEResult, against: CPEResult) -> dict[str, tuple[Estimate, ...]]:
    """Returns {outcome: estimates of the first policy's value minus the second's}; {} if no rows were scored.

    Both values are estimated from the same episodes: shared errors cancel, and the interval is narrower than the two
    values suggest. The verdict is the worse one of the two estimates; if both are trustworthy, the reason says which
    policy is better.

    Args:
        model: result of the first policy.
        against: result of the second policy, on the same rows and with a generator of the same seed.
    """
    return {
        first.name: _differences(first.estimates, second.estimates, model.level)
        for first, second in zip(model.outcomes, against.outcomes, strict=True)
    }


def _differences(ours: tuple[Estimate, ...], theirs: tuple[Estimate, ...], level: float) -> tuple[Estimate, ...]:
    pairs = [(estimate.basis, other.basis) for estimate, other in zip(ours, theirs, strict=True)]
    return tuple(
        _difference(estimate, other, figure)
        for estimate, other, figure in zip(ours, theirs, figures_of(pairs, level), strict=True)
    )


def _difference(model: Estimate, against: Estimate, figure: Interval) -> Estimate:
    verdict = Verdict.TRUSTWORTHY
    reason = "the interval contains 0: no difference is shown"
    if figure.side:
        reason = "model is better" if figure.side > 0 else "against is better"
    for worse in (Verdict.SUPPORT, Verdict.DO_NOT_USE):
        for whose, estimate in (("against", against), ("model", model)):
            if estimate.verdict is worse:
                verdict = worse
                reason = f"{whose}: {estimate.reason}"
    return Estimate(
        name=model.name,
        figure=figure,
        normalized=float("nan"),
        difference=figure,
        verdict=verdict,
        reason=reason,
        basis=model.basis,
    )


def limit(page: EvaluationPage, config: EvaluationConfig, generator: torch.Generator) -> tuple[Tensor, int, int]:
    """Draws at most config.max_episodes whole episodes and the first config.max_horizon rows of each.

    Returns:
        The numbers of the rows, ascending, and how many episodes and rows are left out.
    """
    within = page.position < config.max_horizon
    beyond = int((~within).sum())
    rank = page.rank
    num_episodes = int(rank[-1]) + 1 if len(page) else 0
    if num_episodes > config.max_episodes:
        kept = torch.zeros(num_episodes, dtype=torch.bool)
        kept[torch.randperm(num_episodes, generator=generator)[: config.max_episodes]] = True
        within &= kept[rank]
    return within.nonzero().squeeze(1), max(0, num_episodes - config.max_episodes), beyond


def sums_of_rows(
    page: EvaluationPage, rows: Tensor, gamma: float, estimators: Mapping[str, Estimator] = ESTIMATORS
) -> EpisodeSums:
    """Returns the terms of some rows of a page; `rows` are numbers, in order of time within an episode."""
    # the rows of a group are copied: without a limit in bytes, many choices or outcomes would double the page
    groups = episode_groups(page.episode[rows], max_cells=min(_GROUP_ROWS, max(1, _GROUP_BYTES // page.row_bytes)))
    tables = (tables_of(page.rows(rows[group]), gamma) for group in groups)
    return EpisodeSums.of(tables, (*LOGGED, *estimators.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class _FamilySpec:
    """Estimators of a family.

    Attributes:
        sequential: whether returns of episodes are estimated instead of rewards of rows.
        logged: estimator of the logged policy's value.
        model: name of the estimator that rests on a model alone.
        check: name of the weighted estimator that checks it.
    """

    sequential: bool
    logged: Estimator
    model: str
    check: str


_ONE_STEP = _FamilySpec(
    sequential=False, logged=mean_reward, model="Direct_Method_Reward", check="Self_Normalized_IPS_Reward"
)
_SEQUENTIAL = _FamilySpec(
    sequential=True,
    logged=mean_return,
    model="Fitted_Q_Evaluation",
    check="Weighted_Per_Decision_Importance_Sampling",
)


class _OutcomeEstimates:
    """The estimates of one outcome of a log.

    Args:
        sums: terms of each episode.
        number: index of the outcome.
        samples: estimates by estimator, [1 + R].
        missing: estimators without an estimate, with the reason.
        overlap: diagnostics of weights.
        bounds: range of possible rewards, if the config gives one.
        config: confidence level, and the number of effective episodes that is enough.
    """

    def __init__(
        self,
        sums: EpisodeSums,
        number: int,
        samples: Mapping[str, Tensor],
        *,
        missing: Mapping[str, str],
        overlap: Overlap,
        bounds: tuple[float, float] | None,
        config: EvaluationConfig,
    ) -> None:
        self._sums = sums
        self._number = number
        self._samples = samples
        self._missing = missing
        self._overlap = overlap
        self._bounds = bounds
        self._config = config
        self._contributions: dict[Evidence, Contributions] = {}

    def family(self, spec: _FamilySpec) -> Family:
        """Returns the estimates of one quantity, with intervals and verdicts."""
        level = self._config.confidence_level
        names = [name for name, estimator in ESTIMATORS.items() if estimator.sequential == spec.sequential]
        logged = self._basis(spec.logged)
        continued = logged
        if spec.sequential:
            samples = logged.samples + self._samples[continuation.name]
            continued = Basis(samples=samples, contributions=self._basis(continuation).contributions)
        bases = {name: continued if ESTIMATORS[name].continues else logged for name in names}
        by_estimator = {name: self._basis(ESTIMATORS[name]) for name in names}
        questions: list[tuple[Basis, Basis | None]] = [
            (basis, None) for basis in (logged, continued, *by_estimator.values())
        ]
        questions += [(by_estimator[name], bases[name]) for name in names]
        logged_figure, continued_figure, *figures = figures_of(questions, level)
        figure_of = dict(zip(names, figures[: len(names)], strict=True))
        if not spec.sequential:  # a policy may earn returns that no logged episode has
            low, high = self._range(spec)
            figure_of = {
                name: figure if ESTIMATORS[name].evidence is None else figure.within(low, high)
                for name, figure in figure_of.items()
            }
        differences = dict(zip(names, figures[len(names) :], strict=True))
        events = self._events(spec)
        verdicts = self._verdicts(spec, figure_of, events)
        estimates = tuple(
            Estimate(
                name=name,
                figure=figure_of[name],
                normalized=figure_of[name].value / float(bases[name].samples[0])
                if logged_figure.side
                else float("nan"),
                difference=differences[name],
                verdict=verdicts[name][0],
                reason=verdicts[name][1],
                basis=by_estimator[name],
            )
            for name in names
        )
        cut = spec.sequential and self._overlap.cut_share > 0 and spec.model not in self._missing
        return Family(
            logged=logged_figure, continued=continued_figure if cut else None, events=events, estimates=estimates
        )

    def _basis(self, estimator: Estimator) -> Basis:
        samples = self._samples[estimator.name]
        if estimator.name in self._missing:
            return Basis(samples=samples * torch.nan, contributions=None)
        return Basis(samples=samples, contributions=self._evidence(estimator))

    def _evidence(self, estimator: Estimator) -> Contributions | None:
        """Returns the contributions of episodes; the same object for estimators with the same evidence."""
        evidence = estimator.evidence
        if evidence is None:
            return None
        if evidence not in self._contributions:
            contributions = evidence(self._sums, self._number)
            if self._bounds is not None:
                low, high = self._bounds
                logged = logged_returns if estimator.sequential else logged_rewards
                shift = float((logged(self._sums, self._number).outcome - contributions.outcome).mean())
                contributions = replace(contributions, bounds=(low - shift, high - shift))
            self._contributions[evidence] = contributions
        return self._contributions[evidence]

    def _range(self, spec: _FamilySpec) -> tuple[float, float]:
        """Returns the lowest and the highest outcome, observed or possible."""
        low, high = self._logged(spec).outcomes
        return (low, high) if self._bounds is None else (min(low, self._bounds[0]), max(high, self._bounds[1]))

    def _events(self, spec: _FamilySpec) -> Events | None:
        if spec.check in self._missing:
            return None
        weights = self._sums.episode_weights if spec.sequential else self._sums.per_episode("weight", self._number)
        return matched_events(weights, self._logged(spec).total)

    def _logged(self, spec: _FamilySpec) -> Contributions:
        return (logged_returns if spec.sequential else logged_rewards)(self._sums, self._number)

    def _verdicts(
        self, spec: _FamilySpec, figures: Mapping[str, Interval], events: Events | None
    ) -> dict[str, Reasoned]:
        overlap = self._overlap
        weights = weights_verdict(overlap, sequential=spec.sequential, events=events)
        check = figures[spec.check]
        low, high = self._logged(spec).outcomes
        verdicts = {}
        for name, figure in figures.items():
            if name in self._missing:
                verdicts[name] = Verdict.DO_NOT_USE, self._missing[name]
            elif name == spec.model:
                checked = Verdict.DO_NOT_USE if spec.check in self._missing else weights[0]
                verdicts[name] = model_verdict(
                    figure, overlap, sequential=spec.sequential, check=check, checked=checked
                )
            else:
                verdicts[name] = estimate_verdict(
                    figure,
                    weights=weights,
                    reliance=reliance_on_model(name, overlap),
                    constant=low == high and self._bounds is None,
                    events=events if self._bounds is None else None,
                )
            if overlap.calibration is not None and name not in self._missing:
                verdicts[name] = with_calibration(verdicts[name], overlap.calibration)
        return verdicts


def figures_of(questions: Sequence[tuple[Basis, Basis | None]], level: float) -> list[Interval]:
    """Returns each estimate, or its difference from another one, with an interval that contains it.

    Args:
        questions: an estimate, and the estimate that is subtracted from it or None.
        level: confidence level.
    """
    distinct: dict[tuple[int, int], tuple[Contributions, Contributions | None]] = {}
    keys = []
    for basis, minus in questions:
        added = basis.contributions
        subtracted = None if minus is None else minus.contributions
        key = None
        if added is not None and (minus is None or subtracted is not None):
            key = (id(added), id(subtracted))
            distinct[key] = (added, subtracted)
        keys.append(key)
    ends = dict(zip(distinct, intervals(list(distinct.values()), level), strict=True))
    figures = []
    for (basis, minus), key in zip(questions, keys, strict=True):
        samples = basis.samples if minus is None else _differences_of(basis.samples, minus.samples)
        value = float(samples[0])
        low, high = percentile_interval(samples[1:], level) if key is None else ends[key]
        figures.append(Interval(value=value, low=min(low, value), high=max(high, value)))
    return figures


def _differences_of(samples: Tensor, others: Tensor) -> Tensor:
    """Returns samples - others, [1 + R]; 0 if the difference is rounding, as sums are taken in different orders."""
    return (samples - others).masked_fill(torch.isclose(samples, others, rtol=1e-9, atol=0.0), 0.0)
