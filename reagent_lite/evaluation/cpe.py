"""Counterfactual policy evaluation: every estimator on one page, with interval, diagnostics and verdict.

page ─► limit: rows ─► contributions of each episode (rl.sums.Log) ─► estimates of all resamples ─► CPEResult
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import torch
from torch import Tensor

from reagent_lite.config.evaluation import EvaluationConfig
from reagent_lite.errors import counted
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
from reagent_lite.rl.sums import Estimator, Evidence, Log

WEIGHTED: Final = tuple(name for name, one in ESTIMATORS.items() if one.weighted)
MODELLED: Final = tuple(name for name, one in ESTIMATORS.items() if one.model)

# Of episodes that are laid out together, padding included; a longer one is a group of its own.
_GROUP_ROWS = 2**17
_GROUP_BYTES = 2**24
_OUTCOMES_AT_ONCE = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Basis:
    """What the interval of an estimate is made of.

    Attributes:
        samples: [1 + R] the estimate, and that of every resample.
        contributions: what each episode adds; None for an estimate that a bootstrap is all there is for.
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
        difference: estimate - logged value, of the same episodes. In both, an estimate that continues where records are
            cut is compared with the logged value continued by the same value model, Family.continued.
        verdict, reason: whether the interval may be believed.
        basis: what its intervals are made of.
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
        logged: the logged policy's own value.
        continued: that and what the value model expects after the cuts of records; None where none is cut.
        events: how many outcomes other than the usual one the evaluated policy met; None if none is usual.
        estimates: in the order of the registry; the first rests on a model alone.
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
        """Both families."""
        return self.one_step.estimates + self.sequential.estimates


@dataclass(frozen=True, slots=True, kw_only=True)
class CPEResult:
    """The evaluation of one policy on one page.

    Attributes:
        outcomes: "Reward" first, then metrics; empty where the page has no rows.
        overlap: diagnostics of weights, the same for every outcome; None where the page has no rows.
        weighted: whether the log has the propensities that weights are made of.
        level: confidence level of all intervals.
        num_episodes_left_out, num_rows_beyond_horizon: what the config's limits left unscored.
    """

    outcomes: tuple[OutcomeResult, ...]
    overlap: Overlap | None
    weighted: bool
    level: float
    num_episodes_left_out: int
    num_rows_beyond_horizon: int

    @property
    def one_step(self) -> bool:
        """Whether every scored episode is one row: its reward is its return."""
        return self.overlap is not None and self.overlap.horizon == 1


def evaluate_page(
    page: EvaluationPage,
    *,
    gamma: float,
    config: EvaluationConfig,
    generator: torch.Generator,
    missing: Mapping[str, str] | None = None,
    show: Callable[[int, int], None] = lambda done, total: None,
) -> CPEResult:
    """Evaluates the page's policy for the reward and every metric.

    Memory beside the page: 8 (1 + 2 T) bytes a row and 8 (3 + 14 T) an episode for T outcomes, at most 32 at a time; a
    few numbers a row for a moment; and a constant below 150 MB, whatever the lengths of episodes.

    Args:
        page: rows of episodes that the models of the policy were not fitted to.
        gamma: discount per step.
        config: limits, level, range of rewards and number of resamples.
        generator: draws the resamples, and the episodes where there are too many; on the CPU.
        missing: what missing_estimates returns: these are undefined and not to be used.
        show: called with the number of outcomes done and of all outcomes.
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
            log = log_of_rows(part, rows, gamma, ESTIMATORS)
            samples = log.estimates(drawn.blocks())
            overlap = overlap or measure_overlap(page, rows, log, samples[0]["mean_weight"], config)
            for number, name in enumerate(part.names):
                bounds = config.reward_range if first + number == 0 else None
                evaluated = _Outcome(
                    log,
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

    It is what is followed during training, where nothing is decided. The arguments are those of evaluate_page.
    """
    rows, _, _ = limit(page, config, generator)
    tags: dict[str, float] = {}
    if not len(rows):
        return tags
    whole = torch.ones(1, len(torch.unique_consecutive(page.episode[rows])), dtype=torch.uint8)
    for first in range(0, len(page.names), _OUTCOMES_AT_ONCE):
        part = page.only(first, first + _OUTCOMES_AT_ONCE)
        for name, estimates in zip(
            part.names, log_of_rows(part, rows, gamma, CHEAP_ESTIMATORS).estimates([whole]), strict=True
        ):
            values = {key: float(value) for key, value in estimates.items() if key not in missing}
            tags |= {f"CPE/{name}/{key}": values[key] for key in CHEAP_ESTIMATORS if key in values}
            tags[f"CPE/{name}/Logged_Reward"] = values["mean_reward"]
            tags[f"CPE/{name}/Logged_Return"] = values["mean_return"]
    return {tag: value for tag, value in tags.items() if math.isfinite(value)}


def effective_episodes(
    page: EvaluationPage, *, gamma: float, config: EvaluationConfig, generator: torch.Generator
) -> float:
    """Returns how many episodes the weights leave, as Overlap has them; the arguments are those of evaluate_page."""
    rows, _, _ = limit(page, config, generator)
    if not len(rows):
        return 0.0
    log = log_of_rows(page.only(0, 1), rows, gamma, {})
    return float(log.effective_episodes()[log.judged_step])


def missing_estimates(*, rows: int, without_propensity: int, unfitted: str) -> dict[str, str]:
    """Returns the estimators that a log or its fitted models cannot feed, with the reason.

    Args:
        rows: the rows of the log.
        without_propensity: how many of these are without a propensity.
        unfitted: why the models were never fitted; empty if they were.
    """
    reasons = dict.fromkeys(MODELLED, unfitted) if unfitted else {}
    if without_propensity:
        of = counted(rows, "row of the log has", "rows of the log have")
        reasons |= dict.fromkeys(WEIGHTED, f"{without_propensity:,} of {of} no propensity")
    return reasons


def differences(model: CPEResult, against: CPEResult) -> dict[str, tuple[Estimate, ...]]:
    """Returns {outcome: estimates of the first policy's value minus the second's}; {} where no rows were scored.

    Both are estimated from the same episodes: what they share cancels, and the interval is narrower than those of the
    two values suggest. A verdict is the worse of both estimates' own; where both may be believed, the reason says which
    policy is better.

    Args:
        model: the result of the first policy.
        against: the result of the second, on the same rows and with a generator of the same seed.
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
    """Chooses at most so many whole episodes, up to so many rows of each.

    Returns:
        The rows' numbers, ascending, and what was left out: episodes and rows.
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


def log_of_rows(
    page: EvaluationPage, rows: Tensor, gamma: float, estimators: Mapping[str, Estimator] = ESTIMATORS
) -> Log:
    """Returns the log of some rows of a page; `rows` are numbers, an episode's in order of time."""
    # a group's rows are copied: with many choices or outcomes as many as were the page again
    groups = episode_groups(page.episode[rows], max_cells=min(_GROUP_ROWS, max(1, _GROUP_BYTES // page.row_bytes)))
    return Log.of((tables_of(page.rows(rows[group]), gamma) for group in groups), (*LOGGED, *estimators.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """A family of estimates, by names of estimators.

    Attributes:
        sequential: whether returns of episodes are estimated, not rewards of rows.
        logged: the logged policy's own value.
        model: the estimate by a model alone.
        check: the weighted estimate that it is compared with.
    """

    sequential: bool
    logged: Estimator
    model: str
    check: str


_ONE_STEP = _Kind(
    sequential=False, logged=mean_reward, model="Direct_Method_Reward", check="Self_Normalized_IPS_Reward"
)
_SEQUENTIAL = _Kind(
    sequential=True,
    logged=mean_return,
    model="Fitted_Q_Evaluation",
    check="Weighted_Per_Decision_Importance_Sampling",
)


class _Outcome:
    """The estimates of one outcome of a log.

    Args:
        log: what each episode adds.
        number: the number of the outcome.
        samples: by estimator, [1 + R].
        missing: estimators that the log cannot feed, with the reason.
        overlap: diagnostics of weights.
        bounds: the range of rewards that are possible, if the config says it.
        config: level, and how many effective episodes are enough.
    """

    def __init__(
        self,
        log: Log,
        number: int,
        samples: Mapping[str, Tensor],
        *,
        missing: Mapping[str, str],
        overlap: Overlap,
        bounds: tuple[float, float] | None,
        config: EvaluationConfig,
    ) -> None:
        self._log = log
        self._number = number
        self._samples = samples
        self._missing = missing
        self._overlap = overlap
        self._bounds = bounds
        self._config = config
        self._contributions: dict[Evidence, Contributions] = {}

    def family(self, kind: _Kind) -> Family:
        """Returns the estimates of one quantity, with intervals and verdicts."""
        level = self._config.confidence_level
        names = [name for name, estimator in ESTIMATORS.items() if estimator.sequential == kind.sequential]
        logged = self._basis(kind.logged)
        continued = logged
        if kind.sequential:
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
        if not kind.sequential:  # a policy may earn returns that no logged episode has
            low, high = self._range(kind)
            figure_of = {
                name: figure if ESTIMATORS[name].evidence is None else figure.within(low, high)
                for name, figure in figure_of.items()
            }
        differences = dict(zip(names, figures[len(names) :], strict=True))
        events = self._events(kind)
        verdicts = self._verdicts(kind, figure_of, events)
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
        cut = kind.sequential and self._overlap.cut_share > 0 and kind.model not in self._missing
        return Family(
            logged=logged_figure, continued=continued_figure if cut else None, events=events, estimates=estimates
        )

    def _basis(self, estimator: Estimator) -> Basis:
        samples = self._samples[estimator.name]
        if estimator.name in self._missing:
            return Basis(samples=samples * torch.nan, contributions=None)
        return Basis(samples=samples, contributions=self._evidence(estimator))

    def _evidence(self, estimator: Estimator) -> Contributions | None:
        """Returns what each episode adds; the same object for estimators of the same evidence."""
        evidence = estimator.evidence
        if evidence is None:
            return None
        if evidence not in self._contributions:
            contributions = evidence(self._log, self._number)
            if self._bounds is not None:
                low, high = self._bounds
                logged = logged_returns if estimator.sequential else logged_rewards
                shift = float((logged(self._log, self._number).outcome - contributions.outcome).mean())
                contributions = replace(contributions, bounds=(low - shift, high - shift))
            self._contributions[evidence] = contributions
        return self._contributions[evidence]

    def _range(self, kind: _Kind) -> tuple[float, float]:
        """Returns the lowest and the highest outcome, observed or possible."""
        low, high = self._logged(kind).outcomes
        return (low, high) if self._bounds is None else (min(low, self._bounds[0]), max(high, self._bounds[1]))

    def _events(self, kind: _Kind) -> Events | None:
        if kind.check in self._missing:
            return None
        weights = self._log.episode_weights if kind.sequential else self._log.per_episode("weight", self._number)
        return matched_events(weights, self._logged(kind).total)

    def _logged(self, kind: _Kind) -> Contributions:
        return (logged_returns if kind.sequential else logged_rewards)(self._log, self._number)

    def _verdicts(self, kind: _Kind, figures: Mapping[str, Interval], events: Events | None) -> dict[str, Reasoned]:
        overlap = self._overlap
        weights = weights_verdict(overlap, sequential=kind.sequential, events=events)
        check = figures[kind.check]
        low, high = self._logged(kind).outcomes
        verdicts = {}
        for name, figure in figures.items():
            if name in self._missing:
                verdicts[name] = Verdict.DO_NOT_USE, self._missing[name]
            elif name == kind.model:
                checked = Verdict.DO_NOT_USE if kind.check in self._missing else weights[0]
                verdicts[name] = model_verdict(
                    figure, overlap, sequential=kind.sequential, check=check, checked=checked
                )
            else:
                verdicts[name] = estimate_verdict(
                    figure,
                    weights=weights,
                    reliance=reliance_on_model(name, overlap),
                    constant=low == high and self._bounds is None,
                    events=events if self._bounds is None else None,
                )
        return verdicts


def figures_of(questions: Sequence[tuple[Basis, Basis | None]], level: float) -> list[Interval]:
    """Returns each estimate, or its difference from another, with its interval; the interval contains it.

    Args:
        questions: an estimate, and what is subtracted from it or None.
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
    """Returns samples - others, [1 + R]; 0 where sums in another order explain the difference."""
    return (samples - others).masked_fill(torch.isclose(samples, others, rtol=1e-9, atol=0.0), 0.0)
