"""Counterfactual policy evaluation: every estimator on one page, with interval, diagnostics and verdict.

page ─► limit: rows ─► terms of each episode (rl.sums.EpisodeSums) ─► estimates of all resamples ─► CPEResult
"""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

import numpy as np
import torch
from torch import Tensor

from reagent_lite.config.evaluation import EvaluationConfig
from reagent_lite.errors import pluralize
from reagent_lite.evaluation.calibration import Calibration
from reagent_lite.evaluation.evaluation_rows import EvaluationRows, episode_groups, tables_of
from reagent_lite.evaluation.hidden_cause import HiddenCause
from reagent_lite.evaluation.interval import Interval
from reagent_lite.evaluation.overlap import (
    Overlap,
    RareOutcomes,
    match_rare_outcomes,
    measure_overlap,
    outlying_outcomes,
)
from reagent_lite.evaluation.segment import StateFeatures
from reagent_lite.evaluation.shared_draws import Repeats, SharedDraws, is_sorted, shared_draws
from reagent_lite.evaluation.verdict import (
    Reasoned,
    Verdict,
    estimate_verdict,
    model_verdict,
    moved_by_untried,
    reliance_on_model,
    reliance_on_propensities,
    untried_decisions,
    weights_verdict,
    with_calibration,
)
from reagent_lite.memory import give_back_memory
from reagent_lite.rl.bootstrap import Resamples, percentile_interval, resamples
from reagent_lite.rl.estimators import (
    CHEAP_ESTIMATORS,
    ESTIMATORS,
    LOGGED,
    continuation,
    logged_returns_of,
    logged_rewards,
    mean_return,
    mean_reward,
    mean_weight,
)
from reagent_lite.rl.likelihood import Alternatives, Contributions, Question, intervals
from reagent_lite.rl.sums import EVERY, OF_LOG, EpisodeSums, Estimator, Evidence
from reagent_lite.rl.td import expected_value

ESTIMATE: Final = 'evaluation.propensities to "estimate"'
WEIGHTED: Final = tuple(name for name, estimator in ESTIMATORS.items() if estimator.weighted)
MODELED: Final = tuple(name for name, estimator in ESTIMATORS.items() if estimator.model)

# Limits of a group of episodes, padding included; a longer episode is a group of its own.
_GROUP_ROWS = 2**17
_GROUP_BYTES = 2**24
_OUTCOMES_AT_ONCE = 32
# More episodes are drawn in so many bags of equal size: the deviation of a resampled mean is off by 0.7 % then, by
# 2.2 % with the fewest bags, which limit memory if episodes are long.
_MOST_BAGS = 10_000
_FEWEST_BAGS = 1_000
_CHECKS = {False: "Self_Normalized_IPS_Reward", True: "Weighted_Per_Decision_Importance_Sampling"}
"""The weighted estimate that checks an estimate by a model alone; the key is `Estimator.sequential`."""
_CHECK_OF_CUT: Final = "Weighted_Sequential_Doubly_Robust"
"""The weighted estimate that checks it if records are cut: it continues them as the model does."""
_REASONS = {
    1: "model is better",
    0: "the interval contains 0: no difference is shown",
    -1: "against is better",
}
"""Reasons by the side of 0 on which a difference lies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalInput:
    """Input of an estimate's interval.

    Attributes:
        samples: [1 + R] the estimate, followed by the estimate of every resample.
        question: contributions of the episodes, for its likelihood interval; None if the bootstrap gives the interval.
        missing: why there is no estimate; empty if there is one.
    """

    samples: Tensor
    question: Question | None
    missing: str = ""

    @property
    def emptied(self) -> "IntervalInput":
        """The basis without what intervals come from, which is as large as the log."""
        return replace(self, samples=self.samples[:0].clone(), question=None)

    def minus(self, other: "IntervalInput") -> "IntervalInput":
        """Returns the basis of the difference from another estimate, from the same episodes."""
        question = None
        if self.question is not None and other.question is not None:
            question = (self.question[0], other.question[0])
        # sums are taken in different orders: what differs by rounding is equal
        equal = torch.isclose(self.samples, other.samples, rtol=1e-9, atol=0.0)
        return IntervalInput(samples=(self.samples - other.samples).masked_fill(equal, 0.0), question=question)


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
    basis: IntervalInput = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReturnOrReward:
    """Estimates of one quantity: the mean reward of a row, or the mean discounted return of an episode.

    Attributes:
        logged: value of the logged policy.
        continued: the same plus the value model's expectation after cut records; None if no record is cut.
        events: rare outcomes that the evaluated policy met; None if no outcome is usual.
        outlying: result of outlying_outcomes; empty if the possible rewards are known.
        estimates: estimates in the order of the registry; the first rests on a model alone.
    """

    logged: Interval
    continued: Interval | None
    events: RareOutcomes | None
    outlying: str = ""
    estimates: tuple[Estimate, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeResult:
    """All estimates of the reward or of a metric."""

    name: str
    one_step: ReturnOrReward
    sequential: ReturnOrReward

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
        num_episodes_left_out, num_rows_beyond_horizon: number of episodes and rows not scored because of the limits
            in the config.
        hidden_cause: rows for the strength of a hidden cause; None unless every episode is one row with a propensity.
    """

    outcomes: tuple[OutcomeResult, ...]
    overlap: Overlap | None
    weighted: bool
    gamma: float
    level: float
    num_episodes_left_out: int
    num_rows_beyond_horizon: int
    hidden_cause: HiddenCause | None = field(default=None, repr=False, compare=False)

    @property
    def calibration(self) -> Calibration | None:
        """Calibration of the propensities, if they are estimated and rows were scored."""
        return None if self.overlap is None else self.overlap.calibration

    def without_bases(self) -> "CPEResult":
        """Returns the result with emptied bases: it cannot be compared with another policy's."""

        def bare(family: ReturnOrReward) -> ReturnOrReward:
            estimates = (replace(row, basis=row.basis.emptied) for row in family.estimates)
            return replace(family, estimates=tuple(estimates))

        outcomes = (
            replace(outcome, one_step=bare(outcome.one_step), sequential=bare(outcome.sequential))
            for outcome in self.outcomes
        )
        return replace(self, outcomes=tuple(outcomes))

    @property
    def by_row(self) -> bool:
        """Whether rows are compared by their rewards: nothing later counts, or every scored episode is a single row."""
        return self.overlap is not None and (self.gamma == 0 or self.overlap.horizon == 1)


def evaluate_reward(
    page: EvaluationRows,
    *,
    gamma: float,
    config: EvaluationConfig,
    generator: torch.Generator,
    estimator: Estimator,
    missing: Mapping[str, str],
    calibration: Calibration | None,
    features: StateFeatures | None,
    shared: SharedDraws,
) -> tuple[ReturnOrReward, Overlap]:
    """Evaluates the page's policy for the reward by one weighted estimator without a model.

    Args:
        page: a row or more, and none beyond the horizon.
        gamma: as in `evaluate_page`, like all arguments that are not listed otherwise.
        config: the same.
        generator: the same.
        estimator: the estimator; the others are undefined.
        missing: the same.
        calibration: the same.
        features: the same.
        shared: result of `find_shared_draws` for the whole log.
    """
    others = (name for name in ESTIMATORS if name != estimator.name)
    missing = {**missing, **dict.fromkeys(others, "not asked for")}
    page = page.only(0, 1)
    alternatives = _alternatives(page)
    sums = sums_of_page(page, gamma, OF_LOG)
    (samples,) = _Draws.of(page, config, generator).estimates(sums, missing)
    overlap = replace(
        measure_overlap(page, sums, samples["mean_weight"], alternatives, config),
        calibration=calibration,
        untried_segment=_untried_segment(page, alternatives, features),
        shared_draws=shared,
    )
    give_back_memory()
    observed = _Observed.of_rows(page, 0)
    if estimator.sequential:
        observed = _Observed.of_episodes(sums, 0, observed)
    bases = _bases(sums, 0, samples, missing, config.reward_range, alternatives, page.outcomes[:, 0])
    del sums  # intervals take as much memory
    give_back_memory()
    family = _family(bases, {}, overlap, observed, sequential=estimator.sequential, is_reward=True, level=config.level)
    return family, overlap


def evaluate_page(
    page: EvaluationRows,
    *,
    gamma: float,
    config: EvaluationConfig,
    generator: torch.Generator,
    missing: Mapping[str, str] | None = None,
    calibration: Calibration | None = None,
    features: StateFeatures | None = None,
    left_out: int = 0,
    show: Callable[[int, int], None] = lambda done, total: None,
) -> CPEResult:
    """Evaluates the page's policy for the reward and every metric.

    Memory in addition to the page: for T outcomes, at most 32 at a time, 8 (1 + 2 T) bytes per row, 8 (3 + 14 T) per
    episode and a few numbers per row for a moment; and less than 150 MB for any lengths of episodes.

    Args:
        page: rows of episodes that the policy's models were not fitted to.
        gamma: discount per step.
        config: horizon, level, range of rewards and number of resamples.
        generator: draws the resamples; on the CPU.
        missing: result of missing_estimates: these estimates are undefined and not to be used.
        calibration: calibration of the propensities, if they are estimated.
        features: state features of the rows that `page.number` names; None if they are unknown.
        left_out: number of the log's episodes that are not on the page because of config.max_episodes.
        show: called with the number of outcomes done and the number of all outcomes.
    """
    missing = missing or {}
    weighted = not set(WEIGHTED) <= set(missing)
    page, beyond = limit(page, config)
    outcomes: list[OutcomeResult] = []
    overlap = None
    if len(page):
        shared = find_shared_draws(page, features)
        alternatives = _alternatives(page)
        draws = _Draws.of(page, config, generator)
        for first in range(0, len(page.names), _OUTCOMES_AT_ONCE):
            part = page.only(first, first + _OUTCOMES_AT_ONCE)
            sums = sums_of_page(part, gamma, OF_LOG if set(MODELED) <= set(missing) else EVERY)
            samples = draws.estimates(sums, missing)
            overlap = overlap or replace(
                measure_overlap(page, sums, samples[0]["mean_weight"], alternatives, config),
                calibration=calibration,
                untried_segment=_untried_segment(page, alternatives, features),
                shared_draws=shared,
            )
            give_back_memory()
            for index, name in enumerate(part.names):
                bounds = config.reward_range if first + index == 0 else None
                bases = _bases(sums, index, samples[index], missing, bounds, alternatives, part.outcomes[:, index])
                observed = _Observed.of_both(part, sums, index)
                if index == len(part.names) - 1:
                    del sums  # intervals take as much memory
                    give_back_memory()
                ends: dict[Question, tuple[float, float]] = {}
                one_step, sequential = (
                    _family(
                        bases,
                        ends,
                        overlap,
                        observed[by_episode],
                        sequential=by_episode,
                        is_reward=first + index == 0,
                        level=config.level,
                    )
                    for by_episode in (False, True)
                )
                outcomes.append(OutcomeResult(name=name, one_step=one_step, sequential=sequential))
                show(len(outcomes), len(page.names))
    return CPEResult(
        outcomes=tuple(outcomes),
        overlap=overlap,
        weighted=weighted,
        gamma=gamma,
        level=config.level,
        num_episodes_left_out=left_out,
        num_rows_beyond_horizon=beyond,
        hidden_cause=_hidden_cause(page) if overlap is not None and overlap.horizon == 1 and weighted else None,
    )


@dataclass(frozen=True)
class _Observed:
    """Rows, or episodes.

    Attributes:
        weights: [n] importance weights.
        outcomes: [n] outcomes, or discounted sums of them.
        counts: [n] relative sample weights.
        unexplained: result of _measure_unexplained; empty if it is unknown.
    """

    weights: Tensor
    outcomes: Tensor
    counts: Tensor
    unexplained: Mapping[bool, float]

    @classmethod
    def of_rows(cls, page: EvaluationRows, outcome: int) -> "_Observed":
        return cls(
            page.weight, page.outcomes[:, outcome], page.relative_sample_weight, _measure_unexplained(page, outcome)
        )

    @classmethod
    def of_episodes(cls, sums: EpisodeSums, outcome: int, of_rows: "_Observed") -> "_Observed":
        if sums.num_episodes == len(of_rows.counts):
            return of_rows
        counts = sums.per_episode("episodes", outcome)
        returns = sums.per_episode("discounted_reward", outcome) / counts
        return cls(sums.episode_weights, returns, counts, {})

    @classmethod
    def of_both(cls, page: EvaluationRows, sums: EpisodeSums, outcome: int) -> tuple["_Observed", "_Observed"]:
        of_rows = cls.of_rows(page, outcome)
        return of_rows, cls.of_episodes(sums, outcome, of_rows)

    @cached_property
    def events(self) -> RareOutcomes | None:
        return match_rare_outcomes(self.weights, self.outcomes, self.counts)

    @cached_property
    def outlying(self) -> str:
        return outlying_outcomes(self.outcomes)

    def reliance(self, name: str, difference: Interval, overlap: Overlap) -> str:
        """Returns how an estimate's difference rests on estimated propensities; empty if it does not."""
        if overlap.calibration is None:
            return ""
        return reliance_on_propensities(difference, self.unexplained.get(ESTIMATORS[name].model, 0.0))


def _alternatives(page: EvaluationRows) -> Alternatives:
    alternatives = Alternatives.of(page.at_logged(page.model_propensities), page.propensity)
    return replace(alternatives, wanted=alternatives.wanted * page.relative_sample_weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draws:
    """Resamples of episodes, of units of episodes, or of bags of many of these.

    Attributes:
        samples: resamples of the bags.
        bag: [units] bag of each unit.
    """

    samples: Resamples
    bag: Tensor

    @classmethod
    def of(cls, page: EvaluationRows, config: EvaluationConfig, generator: torch.Generator) -> "_Draws":
        count = len(page.lengths) if page.unit is None else len(torch.unique(page.unit))
        bags = _bags(count, len(page), int(page.lengths.max()))
        # resamples of one unit are all alike: no interval rather than one of width 0
        samples = resamples(bags, config.bootstrap_resamples if count > 1 else 0, generator)
        bag = torch.arange(bags) if bags == count else torch.randperm(count, generator=generator) % bags
        return cls(samples=samples, bag=bag)

    def estimates(self, sums: EpisodeSums, missing: Mapping[str, str]) -> tuple[dict[str, Tensor], ...]:
        """Returns the estimates of EpisodeSums.estimates of all estimators but the missing ones.

        If every interval comes from the likelihood, only the mean weight is resampled.
        """
        estimators = [estimator for estimator in (*LOGGED, *ESTIMATORS.values()) if estimator.name not in missing]
        if all(estimator.evidence is not None or estimator is mean_weight for estimator in estimators):
            whole = sums.estimates([torch.ones(1, sums.num_episodes, dtype=torch.uint8)], estimators)
            weights = sums.only(mean_weight.takes)
            return tuple(map(operator.or_, whole, self._resample(weights, [mean_weight])))
        return self._resample(sums, estimators)

    def _resample(self, sums: EpisodeSums, estimators: Sequence[Estimator]) -> tuple[dict[str, Tensor], ...]:
        bags = self.samples.num_episodes
        of_episode = self.bag if sums.unit is None else self.bag[sums.unit]
        units = None if bags == sums.num_episodes else sums.join(of_episode, bags)
        return sums.estimates(self.samples.blocks(), estimators, units)


def _hidden_cause(page: EvaluationRows) -> HiddenCause:
    evaluated = page.at_logged(page.model_propensities) * page.relative_sample_weight
    return HiddenCause.of(page.outcomes[:, 0], evaluated, page.propensity)


def _measure_unexplained(page: EvaluationRows, outcome: int) -> dict[bool, float]:
    """Returns what estimated propensities add to estimates through rewards that features of the state predict.

    With right propensities the mean of (w - 1) h is 0 up to chance for any function h of the state. Here h predicts
    what an estimate weights: the outcome, or what a model of it leaves.

    Returns:
        The mean of (w - 1) h for estimates with and without a model of the reward; empty if nothing was predicted.
    """
    if page.predicted_reward is None:
        return {}
    model = page.reward_model[:, :, outcome]
    expected = expected_value(model, page.model_propensities)
    counts = page.relative_sample_weight
    columns = torch.stack((torch.ones_like(expected), page.predicted_reward, expected), 1)
    reward = page.outcomes[:, outcome]
    excess = counts * (page.weight - 1)
    added = {}
    for modeled, target in ((False, reward), (True, reward - page.at_logged(model))):
        root = counts.sqrt().unsqueeze(1)
        weights = torch.linalg.lstsq(columns * root, target.unsqueeze(1) * root, driver="gelsd").solution
        added[modeled] = float((excess * (columns @ weights).squeeze(1)).mean())
    return added


def _untried_segment(page: EvaluationRows, alternatives: Alternatives, features: StateFeatures | None) -> str:
    """Returns in words where the log hardly tries the policy's decisions; empty if it tries them or it is unknown."""
    hardly_tried = alternatives.hardly_tried
    if features is None or page.number is None or not len(hardly_tried):
        return ""
    inside = torch.zeros(len(page), dtype=torch.bool)
    inside[hardly_tried] = True
    own_rows = page.number >= 0
    return features.describe(page.number[own_rows].numpy(), inside[own_rows].numpy())


def find_shared_draws(page: EvaluationRows, features: StateFeatures | None) -> SharedDraws:
    """Returns which rows share draws of the action; in a log of several machines, of the first process's rows.

    Args:
        page: the scored rows.
        features: state features of the rows; without them the order of the file is unknown, and nothing is found.
    """
    if features is None or page.number is None:
        return SharedDraws()
    index = _file_order(page.number, features)
    if not len(index):
        return SharedDraws()
    context = torch.from_numpy(features.context(page.number[index].numpy())) if features.ids else None
    episode = page.episode[index]
    unit = episode if page.unit is None else page.unit[index]
    ordered = any(is_sorted(column, index) for column in (page.action, page.outcomes[:, 0], page.propensity))
    # estimated propensities leave out what a logger learned meanwhile, which repeats actions too
    are_logged = page.predicted_reward is None and bool((page.action != page.action[0]).any())
    return shared_draws(
        # s (w - 1) has expectation 0, w - 1 only in a log of which no row was dropped
        (page.relative_sample_weight * (page.weight - 1))[index],
        episode,
        unit,
        context,
        repeats=repeats_of(page, index) if are_logged else None,
        is_sorted=ordered,
    )


def repeats_of(page: EvaluationRows, index: Tensor) -> Repeats:
    """Returns the function for `shared_draws`, given the indices of the log's rows, [n]."""
    counts = page.relative_sample_weight

    def repeats(earlier: Tensor, later: Tensor) -> Tensor:
        action = page.action[index[earlier]]
        rows = index[later]
        difference = (page.action[rows] == action) / page.propensity[rows] - 1
        return torch.where(page.mask[rows, action], counts[rows] * difference, 0.0)

    return repeats


def _file_order(number: Tensor, features: StateFeatures) -> Tensor:
    """Returns the indices of the first process's rows in the order of the files, given all rows' numbers [N]."""
    index_of = torch.full((max(int(number.max()), -1) + 1,), -1)
    numbered = (number >= 0).nonzero().squeeze(1)
    index_of[number[numbered]] = numbered
    index = index_of[index_of >= 0]
    position = features.position(number[index].numpy())
    if (position[1:] >= position[:-1]).all():
        return index
    return index[torch.from_numpy(np.argsort(position, kind="stable"))]


def estimates_of_page(
    page: EvaluationRows, *, gamma: float, config: EvaluationConfig, missing: Mapping[str, str]
) -> dict[str, float]:
    """Returns every estimate but MAGIC, without intervals, by tag: {`CPE/{outcome}/{estimator}`: value}.

    Used during training, before anything is decided. The arguments are those of evaluate_page.
    """
    page, _ = limit(page, config)
    tags: dict[str, float] = {}
    if not len(page):
        return tags
    for first in range(0, len(page.names), _OUTCOMES_AT_ONCE):
        part = page.only(first, first + _OUTCOMES_AT_ONCE)
        sums = sums_of_page(part, gamma)
        whole = torch.ones(1, sums.num_episodes, dtype=torch.uint8)
        for name, estimates in zip(part.names, sums.estimates([whole], (*LOGGED, *CHEAP_ESTIMATORS)), strict=True):
            keys = [estimator.name for estimator in CHEAP_ESTIMATORS if estimator.name not in missing]
            tags |= {f"CPE/{name}/{key}": float(estimates[key]) for key in keys}
            tags[f"CPE/{name}/Logged_Reward"] = float(estimates[mean_reward.name])
            tags[f"CPE/{name}/Logged_Return"] = float(estimates[mean_return.name])
    return {tag: value for tag, value in tags.items() if math.isfinite(value)}


def effective_episodes(page: EvaluationRows, *, gamma: float, config: EvaluationConfig) -> float:
    """Returns only Overlap.effective_episodes; the arguments are those of evaluate_page."""
    page, _ = limit(page, config)
    if not len(page):
        return 0.0
    sums = sums_of_page(page.only(0, 1), gamma)
    return float(sums.effective_episodes()[sums.effective_horizon])


def missing_estimates(*, rows: int, without_propensity: int, unfitted: str, unestimated: str = "") -> dict[str, str]:
    """Returns the estimators that lack propensities or fitted models, each with the reason.

    Args:
        rows: number of rows of the log.
        without_propensity: number of rows without a propensity.
        unfitted: why the models were not fitted; empty if they were.
        unestimated: why propensities could not be estimated; empty if the config does not ask for it.
    """
    reasons = dict.fromkeys(MODELED, unfitted) if unfitted else {}
    if without_propensity:
        rows_have = pluralize(rows, "row of the log has", "rows of the log have")
        why = f", and none is estimated: {unestimated}" if unestimated else f"; log it, or set {ESTIMATE}"
        reasons |= dict.fromkeys(WEIGHTED, f"{without_propensity:,} of {rows_have} no propensity{why}")
    return reasons


def differences(model: CPEResult, against: CPEResult) -> dict[str, tuple[Estimate, ...]]:
    """Returns {outcome: estimates of the first policy's value minus the second's}; {} if no rows were scored.

    Both values are estimated from the same episodes: shared errors cancel, and the interval is narrower than the two
    values suggest. The verdict is the worse one of the two estimates; if both are trustworthy, the reason says which
    policy is better.

    Args:
        model: result of the first policy, with bases like the other.
        against: result of the second policy, on the same rows and with a generator of the same seed.
    """
    return {
        first.name: _differences(first.estimates, second.estimates, model.level)
        for first, second in zip(model.outcomes, against.outcomes, strict=True)
    }


def _differences(model: tuple[Estimate, ...], against: tuple[Estimate, ...], level: float) -> tuple[Estimate, ...]:
    bases = [estimate.basis.minus(other.basis) for estimate, other in zip(model, against, strict=True)]
    return tuple(map(_difference, model, against, figures_of(bases, level)))


def _difference(model: Estimate, against: Estimate, figure: Interval) -> Estimate:
    named = (("model", model), ("against", against))
    name, worse = max(named, key=lambda pair: pair[1].verdict.severity)
    reason = f"{name}: {worse.reason}"
    if worse.verdict is Verdict.TRUSTWORTHY:
        reason = _REASONS[figure.side]
    return replace(model, figure=figure, normalized=math.nan, difference=figure, verdict=worse.verdict, reason=reason)


def limit(page: EvaluationRows, config: EvaluationConfig) -> tuple[EvaluationRows, int]:
    """Returns the page of the first config.max_horizon rows of each episode, and how many others are left out."""
    beyond = int((page.lengths - config.max_horizon).clamp(min=0).sum())
    if not beyond:
        return page, 0
    return page.rows((page.position < config.max_horizon).nonzero().squeeze(1)), beyond


def _bags(episodes: int, rows: int, horizon: int) -> int:
    """Returns in how many bags episodes are drawn: as many as there are, if these are few.

    Sums by step of all bags take no more memory than those of the rows, or than 1 000 bags of the longest length.
    """
    return episodes if episodes <= _MOST_BAGS else min(_MOST_BAGS, max(_FEWEST_BAGS, rows // horizon))


def sums_of_page(page: EvaluationRows, gamma: float, names: Sequence[str] = EVERY) -> EpisodeSums:
    """Returns the terms of a page's episodes."""
    # the rows of a group are copied: without a limit in bytes, many choices or outcomes would double the page
    groups = episode_groups(page.lengths, max_cells=min(_GROUP_ROWS, max(1, _GROUP_BYTES // page.row_bytes)))
    sums = EpisodeSums.of((tables_of(page.rows(group), gamma) for group in groups), names)
    if page.unit is None and page.sample_weight is None:
        return sums
    first = torch.cat([group[_starts(page.episode[group])] for group in groups])
    if page.sample_weight is not None:
        weight = page.sample_weight[first]
        sums = sums.weigh(weight / weight.mean())
    if page.unit is not None:
        sums = replace(sums, unit=torch.unique(page.unit[first], return_inverse=True)[1])
    return sums


def _starts(episode: Tensor) -> Tensor:
    """Returns the indices of the first row of each episode, [n], given a code per row."""
    return torch.cat((torch.ones(1, dtype=torch.bool), episode[1:] != episode[:-1])).nonzero().squeeze(1)


def _bases(
    sums: EpisodeSums,
    outcome: int,
    samples: Mapping[str, Tensor],
    missing: Mapping[str, str],
    bounds: tuple[float, float] | None,
    alternatives: Alternatives,
    values: Tensor,
) -> dict[str, IntervalInput]:
    """Returns the basis of each figure of an outcome by its name; figures with the same evidence share its object.

    Args:
        sums: terms of each episode.
        outcome: index of the outcome.
        samples: [1 + R] estimates by estimator.
        missing: estimators without an estimate, with the reason.
        bounds: range of possible rewards, if the config gives one.
        alternatives: actions that could have been logged in the scored rows.
        values: outcome of each scored row.
    """
    contributions: dict[Evidence, Contributions] = {}
    logged = {False: logged_rewards(sums, outcome).outcome, True: logged_returns_of(sums, outcome).outcome}
    bases = {}
    for estimator in (*LOGGED, *ESTIMATORS.values()):
        name = estimator.name
        if name in missing:
            undefined = torch.full_like(samples[mean_reward.name], torch.nan)
            bases[name] = IntervalInput(samples=undefined, question=None, missing=missing[name])
            continue
        evidence = estimator.evidence
        if evidence is not None and evidence not in contributions:
            contribution = evidence(sums, outcome)
            shift = float((logged[estimator.sequential] - contribution.outcome).mean())
            if sums.unit is not None:
                contribution = contribution.join(sums.unit)
            if bounds is not None:
                contribution = replace(contribution, bounds=(bounds[0] - shift, bounds[1] - shift))
            if estimator.weighted:
                of_row = None if estimator.sequential else (float(values.min()) - shift, float(values.max()) - shift)
                contribution = replace(contribution, alternatives=alternatives, of_row=of_row)
            # returns of single rows are their rewards
            contributions[evidence] = next(filter(contribution.equals, contributions.values()), contribution)
        bases[name] = IntervalInput(
            samples=samples[name], question=None if evidence is None else (contributions[evidence], None)
        )
    return bases


def _family(
    bases: Mapping[str, IntervalInput],
    ends: dict[Question, tuple[float, float]],
    overlap: Overlap,
    observed: _Observed,
    *,
    sequential: bool,
    is_reward: bool,
    level: float,
) -> ReturnOrReward:
    """Returns the estimates of one quantity of an outcome, with intervals and verdicts.

    Args:
        bases: result of _bases.
        ends: intervals of questions as far as they are known; new ones are added.
        overlap: diagnostics of weights.
        observed: weights and outcomes of rows, or of episodes.
        sequential: whether returns of episodes are estimated instead of rewards of rows.
        is_reward: whether the reward is estimated, not a metric.
        level: confidence level.
    """
    outcomes = observed.outcomes
    names = [name for name, estimator in ESTIMATORS.items() if estimator.sequential == sequential]
    cut = sequential and overlap.cut_share > 0
    check = _CHECK_OF_CUT if cut else _CHECKS[sequential]
    logged, continued = _take_logged(bases, sequential=sequential)
    references = {name: continued if ESTIMATORS[name].continues else logged for name in names}
    named = [*(bases[name] for name in names), *(bases[name].minus(references[name]) for name in names)]
    logged_figure, continued_figure, *figures = figures_of([logged, continued, *named], level, ends)
    figure_of = dict(zip(names, figures[: len(names)], strict=True))
    difference_of = dict(zip(names, figures[len(names) :], strict=True))
    assert logged.question is not None, "the log always has outcomes"
    possible, _ = logged.question
    low = min(possible.outcomes[0], float(outcomes.min()))
    high = max(possible.outcomes[1], float(outcomes.max()))
    if not sequential:  # a policy may earn returns that no logged episode has
        figure_of |= {name: figure_of[name].within(low, high) for name in names if ESTIMATORS[name].evidence}
    ranged = possible.bounds is not None
    events = None if bases[_CHECKS[sequential]].missing else observed.events
    outlying = "" if ranged else observed.outlying
    untried = "" if ranged else untried_decisions(overlap)
    of_weights = weights_verdict(overlap, sequential=sequential, events=events, modeled=_are_modeled(bases, names))

    def assess(name: str) -> Reasoned:
        if bases[name].missing:
            return Verdict.DO_NOT_USE, bases[name].missing
        if name == names[0]:  # by a model alone
            checked = Verdict.DO_NOT_USE if bases[check].missing else of_weights[0]
            verdict = model_verdict(figure_of[name], overlap, check=figure_of[check], checked=checked)
        else:
            verdict = estimate_verdict(
                figure_of[name],
                weights=of_weights,
                reliance=reliance_on_model(name, overlap) or observed.reliance(name, difference_of[name], overlap),
                constant=low == high and not ranged,
                events=None if ranged else events,
                outlying=outlying,
                untried=untried if moved_by_untried(overlap, difference_of[name], outcomes) else "",
                is_reward=is_reward,
            )
        return verdict if overlap.calibration is None else with_calibration(verdict, overlap.calibration)

    def estimate(name: str, verdict: Verdict, reason: str) -> Estimate:
        return Estimate(
            name=name,
            figure=figure_of[name],
            normalized=figure_of[name].value / float(references[name].samples[0]) if logged_figure.side else math.nan,
            difference=difference_of[name],
            verdict=verdict,
            reason=reason,
            basis=bases[name],
        )

    return ReturnOrReward(
        logged=logged_figure,
        continued=continued_figure if cut and not bases[names[0]].missing else None,
        events=events,
        outlying=outlying,
        estimates=tuple(estimate(name, *assess(name)) for name in names),
    )


def _are_modeled(bases: Mapping[str, IntervalInput], names: Sequence[str]) -> bool:
    return any(not bases[name].missing for name in names if ESTIMATORS[name].model)


def _take_logged(bases: Mapping[str, IntervalInput], *, sequential: bool) -> tuple[IntervalInput, IntervalInput]:
    """Returns the bases of the logged value, and of that value continued by the value model after cut records."""
    if not sequential:
        return bases[mean_reward.name], bases[mean_reward.name]
    logged = bases[mean_return.name]
    rest = bases[continuation.name]
    return logged, IntervalInput(samples=logged.samples + rest.samples, question=rest.question)


def figures_of(
    bases: Sequence[IntervalInput], level: float, ends: dict[Question, tuple[float, float]] | None = None
) -> list[Interval]:
    """Returns each estimate or difference with an interval that contains it, at a confidence level.

    Args:
        bases: the estimates and differences.
        level: confidence level.
        ends: intervals of questions at this level as far as they are known; new ones are added.
    """
    ends = {} if ends is None else ends
    questions = [basis.question for basis in bases if basis.question is not None and basis.question not in ends]
    distinct = list(dict.fromkeys(questions))
    ends |= zip(distinct, intervals(distinct, level), strict=True)
    figures = []
    for basis in bases:
        value = float(basis.samples[0])
        low, high = percentile_interval(basis.samples[1:], level) if basis.question is None else ends[basis.question]
        figures.append(Interval(value=value, low=min(low, value), high=max(high, value)))
    return figures
