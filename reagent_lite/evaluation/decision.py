"""The recommendation about a policy: ship it, do not ship it, or not enough to say.

estimates from the log ───┐
returns in simulation ────┼─► findings: better, worse or undecided ─► ShipDecision: choice, reason, next
verdict of publish_if ────┘
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from reagent_lite.config.algorithm import ways_nearer
from reagent_lite.config.evaluation import GuardrailConfig
from reagent_lite.errors import pluralize
from reagent_lite.evaluation.cpe import ESTIMATE, CPEResult, Estimate
from reagent_lite.evaluation.gate import Gate
from reagent_lite.evaluation.interval import Interval, number, percent
from reagent_lite.evaluation.overlap import FEWEST_SIZES, Overlap, RareOutcomes
from reagent_lite.evaluation.played import MODEL, RANDOM, EstimatedReturn, Played
from reagent_lite.evaluation.verdict import Verdict, has_small_propensities, untried_decisions
from reagent_lite.export.exploration import EXPLORE, lack_of_exploration
from reagent_lite.rl.estimators import ESTIMATORS
from reagent_lite.rl.likelihood import ENOUGH_TRIES

LOGGED = "logged policy"
OTHER = "other policy"
_CONTINUED = "continued by the value model"
_MOSTLY = 0.5
# Policies that decide otherwise in less than a thousandth of the decisions, with as small a difference, do the same:
# with enough rows any difference is shown, and this one is worth no change.
_ALIKE_SHARE = 1e-3
_STRONGEST = 100.0  # HiddenCause.strength
_MOST_EPISODES = 1e12
_UNITS = (("discounted return per episode", "reward per row"), ("discounted sum per episode", "mean per row"))
"""Averaged quantities: of the reward and of a metric; over episodes and over rows."""


_PER = {
    "reward per row": "a decision",
    "mean per row": "a decision",
    "discounted return per episode": "an episode (discounted)",
    "discounted sum per episode": "an episode (discounted)",
}


class Choice(StrEnum):
    """A recommendation."""

    SHIP = "ship"
    DO_NOT_SHIP = "do not ship"
    NOT_ENOUGH = "not enough to say"
    DISCUSS = "discuss"


class FindingSource(StrEnum):
    """The evidence behind a finding, the strongest first."""

    GATE = "publish_if"
    GUARDRAIL = "guardrails"
    LOG = "From the log"
    BESIDE = "In simulation, in addition to the log"
    SIMULATION = "In simulation"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Estimates of a quantity compared with a reference.

    Attributes:
        outcome: "Reward", or "Metric" and its name, which may be "reward" as well.
        unit: averaged quantity, such as "discounted return per episode".
        decides: whether the decision rests on this comparison.
        reference_name: name of the reference.
        reference: value of the reference; None if the estimates are differences themselves.
        continued: reference for estimates that continue cut records; None if no record is cut.
        events: rare outcomes that the policy met; None if no outcome is usual.
        outlying: outcomes that do not show how far one may lie; empty if there are none.
        rows: the estimates; a difference is estimate - reference, from the same episodes.
        simulated: the same quantity in simulation; None if nothing was simulated or it is not comparable.
    """

    outcome: str
    unit: str
    decides: bool
    reference_name: str = LOGGED
    reference: Interval | None
    rows: tuple[Estimate, ...]
    continued: Interval | None = None
    events: RareOutcomes | None = None
    outlying: str = ""
    simulated: Interval | None = None

    @property
    def references(self) -> dict[str, Interval]:
        """References by name: `reference` and, if there is one, `continued`."""
        references = {self.reference_name: self.reference, f"{self.reference_name} {_CONTINUED}": self.continued}
        return {name: figure for name, figure in references.items() if figure is not None}

    @property
    def title(self) -> str:
        """Name of the quantity."""
        return f"{self.outcome}: {self.unit}{'' if self.reference else ', model minus against'}"

    @property
    def trusted(self) -> tuple[Estimate, ...]:
        """Estimates with a trustworthy difference."""
        return tuple(row for row in self.rows if row.verdict is Verdict.TRUSTWORTHY and row.difference.defined)


def compare_with_log(
    result: CPEResult, *, simulated: Interval | None = None, decides: bool = True
) -> Iterator[Comparison]:
    """Yields comparisons with the logged policy's value; that of the reward's return decides.

    Only the reward per row is compared if nothing later counts (gamma 0) or every episode is a single row.

    Args:
        result: result of the evaluated policy.
        simulated: discounted return in simulation, if it is comparable.
        decides: false if the decision rests on the comparison with another model instead.
    """
    for index, outcome in enumerate(result.outcomes):
        families = zip((False, True), (outcome.sequential, outcome.one_step), _UNITS[index > 0], strict=True)
        for by_row, family, unit in families:
            if result.by_row and not by_row:
                continue
            primary = index == 0 and by_row == result.by_row
            yield Comparison(
                outcome=_title(index, outcome.name),
                unit=unit,
                decides=decides and primary,
                reference=family.logged,
                continued=family.continued,
                events=family.events,
                outlying=family.outlying,
                rows=family.estimates,
                simulated=simulated if primary else None,
            )


def compare_models(differences: Mapping[str, Sequence[Estimate]], *, by_row: bool) -> Iterator[Comparison]:
    """Yields comparisons of two models; that of the reward's return decides.

    Args:
        differences: result of `cpe.differences`.
        by_row: whether only rewards per row are compared, `CPEResult.by_row`.
    """
    for index, (name, estimates) in enumerate(differences.items()):
        for sequential, unit in zip((True, False), _UNITS[index > 0], strict=True):
            if by_row and sequential:
                continue
            yield Comparison(
                outcome=_title(index, name),
                unit=unit,
                decides=index == 0 and sequential != by_row,
                reference_name=OTHER,
                reference=None,
                rows=tuple(row for row in estimates if ESTIMATORS[row.name].sequential == sequential),
            )


def _title(index: int, name: str) -> str:
    return f"Metric {name}" if index else name  # the reward comes first; a metric may have the same name


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Results of evaluating a policy.

    Attributes:
        result: all estimates from the log; None without a log.
        seen: whether scored episodes were in the policy's training data.
        other_seen: whether scored episodes were in the training data of the model it is compared with.
        comparisons: comparisons of the estimates.
        played: returns in simulation.
        gate: decision of publish_if.
        guardrails: limits on metrics, by the name of the metric.
    """

    result: CPEResult | None = None
    seen: bool = False
    other_seen: bool = False
    comparisons: tuple[Comparison, ...] = ()
    played: Played | None = None
    gate: Gate | None = None
    guardrails: Mapping[str, GuardrailConfig] = field(default_factory=dict)

    @property
    def overlap(self) -> Overlap | None:
        """Diagnostics of the log's weights; None without a log or without propensities."""
        return self.result.overlap if self.result is not None and self.result.weighted else None


def evidence_of(
    result: CPEResult | None,
    played: Played | None,
    estimated: EstimatedReturn,
    *,
    differences: Mapping[str, Sequence[Estimate]] | None = None,
    seen: bool = False,
    other_seen: bool = False,
    gate: Gate | None = None,
    guardrails: Mapping[str, GuardrailConfig] | None = None,
) -> Evidence:
    """Returns the evidence about a policy with all comparisons of its estimates.

    Args:
        result: all estimates from the log; None without a log.
        played: returns in simulation; None without one.
        estimated: the return that the log's estimates estimate.
        differences: result of `cpe.differences` if the comparison with another model decides.
        seen: whether scored episodes were in the policy's training data.
        other_seen: whether scored episodes were in the training data of the model it is compared with.
        gate: decision of publish_if.
        guardrails: limits on metrics, by the name of the metric.
    """
    comparisons: list[Comparison] = []
    if result is not None:
        models = compare_models(differences or {}, by_row=result.by_row)
        simulated = None if played is None else estimated.find_simulated(played)
        comparisons = [*compare_with_log(result, simulated=simulated, decides=not differences)]
        # the same outcomes of the same log
        comparisons += [
            replace(other, events=logged.events, outlying=logged.outlying)
            for other, logged in zip(models, comparisons, strict=False)
        ]
    return Evidence(
        result=result,
        seen=seen,
        other_seen=other_seen,
        comparisons=tuple(comparisons),
        played=played,
        gate=gate,
        guardrails=guardrails or {},
    )


class Conclusion(StrEnum):
    """Conclusion of a finding about a policy."""

    BETTER = "better"
    WORSE = "worse"
    UNDECIDED = "undecided"
    UNGUARDED = "not shown to keep a guardrail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One reason for or against a policy.

    Attributes:
        source: the evidence behind it.
        standing: its conclusion.
        reason: estimate and reference, in words.
        next_step: recommended next step.
        weak: whether the policy was compared with random actions only.
    """

    source: FindingSource
    standing: Conclusion
    reason: str
    next_step: str
    weak: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ShipDecision:
    """A recommendation with its reason.

    Attributes:
        choice: the recommendation.
        reason: the reason, in words.
        next_step: text after "Next: ".
        findings: all findings.
    """

    choice: Choice
    reason: str
    next_step: str
    findings: tuple[Finding, ...] = ()

    def __str__(self) -> str:
        return f"{self.choice.capitalize()}: {self.reason}. Next: {self.next_step}"

    def json(self) -> dict[str, str]:
        """Returns choice, reason and next step."""
        return {"choice": self.choice.value, "reason": self.reason, "next": self.next_step}


_ANY = None
_TABLE: tuple[tuple[bool | None, bool | None, bool | None, Choice, tuple[Conclusion, ...]], ...] = (
    # publish_if or a guardrail failed, better, worse: choice, the findings behind it
    (True, _ANY, _ANY, Choice.DO_NOT_SHIP, (Conclusion.WORSE,)),
    (False, False, True, Choice.DO_NOT_SHIP, (Conclusion.WORSE,)),
    (False, True, False, Choice.SHIP, (Conclusion.BETTER,)),
    (False, True, True, Choice.NOT_ENOUGH, (Conclusion.WORSE, Conclusion.BETTER)),
    (False, False, False, Choice.NOT_ENOUGH, (Conclusion.UNDECIDED,)),
)
"""The first row that fits is the decision."""


def decide_findings(evidence: Evidence) -> ShipDecision:
    """Returns the decision for all findings, by the table above.

    Being better than random actions does not count if a comparison with another policy is undecided. Estimates on
    episodes from a policy's training data flatter it and do not count in its favor.
    """
    findings = tuple(_exploring(_withdraw_flattered(finding, evidence), evidence) for finding in _findings(evidence))
    by_standing = {
        standing: [finding for finding in findings if finding.standing is standing] for standing in Conclusion
    }
    if by_standing[Conclusion.UNDECIDED]:
        by_standing[Conclusion.BETTER] = [finding for finding in by_standing[Conclusion.BETTER] if not finding.weak]
    worse = by_standing[Conclusion.WORSE]
    blocked = bool(worse) and worse[0].source in (FindingSource.GATE, FindingSource.GUARDRAIL)
    facts = (blocked, bool(by_standing[Conclusion.BETTER]), bool(worse))
    choice, standings = next(
        (choice, standings)
        for *conditions, choice, standings in _TABLE
        if all(condition in (_ANY, fact) for condition, fact in zip(conditions, facts, strict=True))
    )
    used = [by_standing[standing][0] for standing in standings]
    if choice is Choice.SHIP and by_standing[Conclusion.UNGUARDED]:
        choice = Choice.DISCUSS
        used += by_standing[Conclusion.UNGUARDED]
    return ShipDecision(
        choice=choice,
        reason="; but ".join(finding.reason for finding in used),
        next_step=used[-1].next_step if len(used) == 1 or choice is Choice.DISCUSS else _TRY_BOTH,
        findings=findings,
    )


def deciding_estimate(evidence: Evidence) -> Estimate | None:
    """Returns the estimate from the log that decides: the narrowest trustworthy difference; None without one."""
    trusted = [row for comparison in evidence.comparisons if comparison.decides for row in comparison.trusted]
    return min(trusted, key=_width, default=None)


def best_key(decision: ShipDecision, evidence: Evidence) -> tuple[int, float, float]:
    """Returns a key whose largest value is the best policy: recommendation, lower end and value of its difference."""
    estimate = deciding_estimate(evidence)
    by_choice = [Choice.DO_NOT_SHIP, Choice.NOT_ENOUGH, Choice.DISCUSS, Choice.SHIP]
    if estimate is None:
        return by_choice.index(decision.choice), -math.inf, -math.inf
    return by_choice.index(decision.choice), estimate.difference.low, estimate.difference.value


_UNSEEN = "what the logging policy saw and the log lacks cannot be checked"
_TRY = "give it a small share of the decisions, with their propensities logged (rollout of workflows.serve)."
_TRY_WITHOUT_EXPLORATION = (
    f"train it again with {EXPLORE}, before its log is to train or evaluate the next one; or give it a small share of "
    "the decisions, and the policy in use the others (an A/B test)."
)
_CHECK = (
    "check that action_probability is the probability with which each action was taken, and that every state feature "
    "was known before, and evaluate again."
)
_TRY_BOTH = "give each policy a share of the decisions (an A/B test)."
_LEARN = (
    "keep the policy in use; learn longer (epochs, if the algorithm takes steps) or from more data, or keep the "
    f"learned policy nearer to the log ({ways_nearer()})."
)
_NEARER = f"keep it nearer to the log by a larger rl.temperature or rl.epsilon ({ways_nearer()})"
_COMPARE = "compare it with the policy in use by workflows.evaluate: with its log (data_path) or its model (against)."
_ALIKE = (
    "keep the policy in use; both choose with the same probabilities in the scored rows: more will not tell them apart."
)
_SAME = "keep the policy in use: there is nothing to gain; let the policy move farther from the log to learn from it."
_SCORE_OTHERS = (
    "score it on other episodes than it learns from: train with evaluation.learn_from_scored false or with "
    "eval_data_path of other episodes, or evaluate it on a log of other episodes."
)
_SCORE_SOME = "give more episodes, or eval_data_path, in which every action is known; or run workflows.evaluate."
_LEARN_IN_SIMULATION = "keep the policy in use; learn longer: simulation.total_steps, or epochs with data."
_NEXT = {
    (FindingSource.GATE, Conclusion.WORSE): _LEARN,
    (FindingSource.GUARDRAIL, Conclusion.WORSE): _LEARN,
    (FindingSource.GUARDRAIL, Conclusion.UNGUARDED): (
        "discuss whether this risk is worth the gain, log more episodes, or give it a small share of the decisions."
    ),
    (FindingSource.LOG, Conclusion.BETTER): _TRY,
    (FindingSource.LOG, Conclusion.WORSE): _LEARN,
    (FindingSource.BESIDE, Conclusion.BETTER): _TRY,
    (FindingSource.BESIDE, Conclusion.WORSE): _LEARN,
    (FindingSource.BESIDE, Conclusion.UNDECIDED): _LEARN,
    (FindingSource.SIMULATION, Conclusion.BETTER): _COMPARE,
    (FindingSource.SIMULATION, Conclusion.WORSE): _LEARN_IN_SIMULATION,
    (FindingSource.SIMULATION, Conclusion.UNDECIDED): _LEARN_IN_SIMULATION,
}
"""Next steps by finding; those after an undecided finding from a log follow from its numbers."""
_BY_SIDE = {1: Conclusion.BETTER, -1: Conclusion.WORSE, 0: Conclusion.UNDECIDED}


def _finding(
    source: FindingSource, standing: Conclusion, reason: str, next_step: str = "", *, weak: bool = False
) -> Finding:
    next_step = next_step or _NEXT[source, standing]
    return Finding(source=source, standing=standing, reason=reason, next_step=next_step, weak=weak)


def _withdraw_flattered(finding: Finding, evidence: Evidence) -> Finding:
    """Returns the finding, or an undecided one if it favors a policy that has learned from scored episodes."""
    flattered = {
        Conclusion.BETTER: "policy" if evidence.seen else "",
        Conclusion.WORSE: OTHER if evidence.other_seen else "",
    }.get(finding.standing, "")
    if not flattered or finding.source is not FindingSource.LOG:
        return finding
    return replace(
        finding,
        standing=Conclusion.UNDECIDED,
        reason=f"{finding.reason}; but the {flattered} has learned from scored episodes, which flatters it",
        next_step=_SCORE_OTHERS,
    )


def _exploring(finding: Finding, evidence: Evidence) -> Finding:
    """Returns the finding; one that favors a policy whose log cannot evaluate another policy says so."""
    overlap = None if evidence.result is None else evidence.result.overlap
    lack = "" if overlap is None else lack_of_exploration(overlap.certain_share)
    if not lack or finding.next_step != _TRY:
        return finding
    return replace(finding, reason=f"{finding.reason}; but it {lack}", next_step=_TRY_WITHOUT_EXPLORATION)


def _findings(evidence: Evidence) -> Iterator[Finding]:
    """Yields findings for and against a policy, the strongest source first."""
    gate = evidence.gate
    if gate is not None and not gate.passed:  # a fulfilled condition says nothing about the logged policy
        yield _finding(FindingSource.GATE, Conclusion.WORSE, f"publish_if blocks the export: {gate.reason}")
    deciding = [comparison for comparison in evidence.comparisons if comparison.decides]
    violated_first = sorted(
        _check_guardrails(evidence, deciding), key=lambda finding: finding.standing is not Conclusion.WORSE
    )
    yield from violated_first
    for comparison in deciding:
        yield _from_log(comparison, evidence.result)
        if comparison.simulated is not None and comparison.reference is not None:
            simulated = comparison.simulated
            reference = comparison.reference
            side = int(simulated.low > reference.high) - int(simulated.high < reference.low)
            reason = (
                f"in simulation its discounted return is {simulated}, against {reference} of the logged policy in the "
                "log"
            )
            yield _finding(FindingSource.BESIDE, _BY_SIDE[side], reason)
    if not deciding and (evidence.result or not evidence.played):
        yield _finding(FindingSource.LOG, Conclusion.UNDECIDED, "no episodes could be scored", _SCORE_SOME)
    if evidence.played is not None:
        yield _from_simulation(evidence.played)


def _check_guardrails(evidence: Evidence, deciding: Sequence[Comparison]) -> Iterator[Finding]:
    """Yields a finding for each guardrail that is violated, or that the log does not show to be kept."""
    source = FindingSource.GUARDRAIL
    for name, guardrail in evidence.guardrails.items():
        limit = guardrail.at_most_worse_by
        trusted = [
            row
            for comparison in evidence.comparisons
            if comparison.outcome == _title(1, name) and any(_is_like(comparison, other) for other in deciding)
            for row in comparison.trusted
        ]
        if not trusted:
            reason = f"the log does not show whether metric {name} is worse by more than {number(limit)}"
            yield _finding(source, Conclusion.UNGUARDED, reason)
            continue
        row = min(trusted, key=_width)
        low, high = row.difference.low, row.difference.high
        least, most = (low, high) if guardrail.better == "lower" else (-high, -low)
        difference = f"metric {name} differs by {row.difference}"
        if least > limit:
            yield _finding(source, Conclusion.WORSE, f"{difference}, and is worse by more than {number(limit)}")
        elif most > limit:
            yield _finding(source, Conclusion.UNGUARDED, f"{difference}, and may be worse by more than {number(limit)}")


def _is_like(comparison: Comparison, other: Comparison) -> bool:
    """Returns whether a metric is compared as the reward is: per row or per episode, with the same reference."""
    units = dict(zip(_UNITS[1], _UNITS[0], strict=True))
    return units.get(comparison.unit) == other.unit and comparison.reference_name == other.reference_name


def _from_log(comparison: Comparison, result: CPEResult | None) -> Finding:
    """Returns the finding of the trustworthy estimate whose difference is narrowest, unless others contradict it.

    All trustworthy estimates are valid, so the narrowest is the best: a poor model makes a doubly robust one wide.
    """
    trusted = comparison.trusted
    name = comparison.reference_name
    if not trusted:
        reference = f"{name}'s {comparison.reference}" if comparison.reference else name
        reason = f"no estimate of the {comparison.unit} can be trusted in comparison with the {reference}"
        # the first estimate rests on a model alone, the second has the reason why weights are not enough
        reason += "".join(f": {row.reason}" for row in comparison.rows[1:2] or comparison.rows)
        return _finding(FindingSource.LOG, Conclusion.UNDECIDED, reason, _remedy(comparison, result))
    calibration = None if result is None else result.calibration
    sides = {row.difference.side for row in trusted}
    if {1, -1} <= sides:
        reason = f"trustworthy estimates contradict each other about the {name}"
        return _finding(FindingSource.LOG, Conclusion.UNDECIDED, reason, _TRY_BOTH if calibration else _CHECK)
    row = min(trusted, key=_width)
    if calibration is not None and len(sides) > 1:  # propensities are estimated: all have to agree
        row = next(other for other in trusted if not other.difference.side)
    side = row.difference.side
    if side and comparison.reference is not None and result is not None and result.overlap is not None:
        changed = result.overlap.changed_share
        if changed < _ALIKE_SHARE and _largest(row.difference) < _ALIKE_SHARE * _largest(comparison.reference):
            reason = (
                f"the policy does the same as the {name}: it takes {percent(changed)} of the decisions otherwise, and "
                f"its {comparison.unit} differs by {row.difference} from {comparison.reference}"
            )
            return _finding(FindingSource.LOG, Conclusion.UNDECIDED, reason, _SAME)
    estimates = f"{row.name.replace('_', ' ')} estimates a"
    doubt = "" if side else ", which may be 0"
    if comparison.reference is None:
        reason = f"{estimates} difference of {row.difference} from the {name} in the {comparison.unit}{doubt}"
    else:
        continues = comparison.continued is not None and ESTIMATORS[row.name].continues
        name, value = list(comparison.references.items())[1 if continues else 0]
        earner = "today's" if name == LOGGED else f"the {name}"
        change = f" ({row.difference.value / abs(value.value):+.0%})" if value.side else ""
        reason = (
            f"the new policy would earn {row.figure} {_PER[comparison.unit]}, {earner} earns {value}{change}; "
            f"{estimates} difference of {row.difference}{doubt}"
        )
    if comparison.events is not None and comparison.reference is not None:  # of two policies, only the first one's
        reason += f" ({comparison.events})"
    if calibration is not None:
        reason += f"; {calibration}; {_UNSEEN}"
    if side and result is not None and result.hidden_cause is not None and comparison.reference is not None:
        slack = row.difference.low if side > 0 else -row.difference.high
        strength = result.hidden_cause.strength(slack, side)
        least = "100 or more" if strength >= _STRONGEST else number(strength)
        reason += (
            f"; a hidden cause would have to change the odds of logged actions by a factor of {least} to undo this"
        )
    step = "" if side else _more_data(row, comparison.reference, result)
    overlap = None if result is None else result.overlap
    if not side and overlap is not None and overlap.untried_share and row.difference.low < row.difference.high:
        reason += f"; {untried_decisions(overlap)}"
        step = step if result and result.num_episodes_left_out else f"{_tries(overlap)}; or run an A/B test."
    return _finding(FindingSource.LOG, _BY_SIDE[side], reason, step)


def _largest(figure: Interval) -> float:
    """Returns the largest magnitude in an interval."""
    return max(abs(figure.low), abs(figure.high))


def _more_data(row: Estimate, reference: Interval | None, result: CPEResult | None) -> str:
    """Returns the advice to log more, with the number of episodes that would show a difference.

    The difference is the present one, or 10 % of the logged value. No number shows one between equal policies.

    The width of an interval is inversely proportional to the root of the number of episodes.
    """
    if result is None or result.overlap is None:
        return _TRY_BOTH
    count = result.overlap.num_episodes
    difference = row.difference
    if difference.low == difference.high:
        return _ALIKE
    toward_zero = difference.value - difference.low if difference.value > 0 else difference.high - difference.value
    sizes = [(toward_zero, abs(difference.value), f"a difference of {difference.format_end(abs(difference.value))}")]
    if reference is not None:
        tenth = abs(reference.value) / 10
        sizes.append(
            ((difference.high - difference.low) / 2, tenth, f"one of {number(tenth)}, 10% of the logged value")
        )
    needed = [
        f"about {number(float(f'{count * (half / size) ** 2:.2g}'))} to show {difference_text}"
        for half, size, difference_text in sizes
        if half > size > 0 and count * (half / size) ** 2 < _MOST_EPISODES
    ]
    unscored = result.num_episodes_left_out
    if unscored:
        return f"{_score(result.overlap, unscored)}{'; it takes ' if needed else ''}{', '.join(needed)}."
    unit = result.overlap.scored_unit
    if not needed:
        return f"log more {unit}s than the {count:,} that were scored, or run an A/B test."
    scored = pluralize(count, f"{unit} was", f"{unit}s were")
    return f"log more: {scored} scored, it takes {', '.join(needed)}; or run an A/B test."


def _remedy(comparison: Comparison, result: CPEResult | None) -> str:
    """Returns the advice that could make estimates of the policy trustworthy."""
    if result is None or result.overlap is None:
        return "evaluate on a log with whole episodes of the policy in use."
    overlap = result.overlap
    if result.num_episodes_left_out:
        return f"{_score(overlap, result.num_episodes_left_out)}."
    if not result.weighted or overlap.unsupported_share > _MOSTLY:
        return (
            "log the probability of every action that is taken (action_probability), of a policy that tries all of "
            f"them now and then{'' if result.weighted else f', or set {ESTIMATE}'}, and evaluate again."
        )
    if result.calibration is not None and not result.calibration.calibrated:
        return (
            "log the probability of every action that is taken (action_probability), or the features that the logging "
            "policy used, and evaluate again."
        )
    effective = min(overlap.effective_episodes, overlap.effective_rows)
    if effective < overlap.enough:
        needed = overlap.num_episodes * overlap.enough / effective if effective > 0 else math.inf
        many = f"log {_more_to_score(overlap, needed)}, or "
        return (
            f"{many if needed < _MOST_EPISODES else ''}log a policy that takes this policy's actions more often, or "
            f"{_NEARER}; or run an A/B test."
        )
    if has_small_propensities(overlap):
        return _CHECK
    if overlap.shared_draws.between:
        return (
            "name in data.columns.unit (workflows.evaluate: columns.unit) the column of the unit that is drawn as "
            "one, such as the user or the hour, and evaluate again."
        )
    if result.calibration is not None and comparison.rows[0].basis.missing:
        return (
            "log the probability of every action that is taken (action_probability), or give the policy's "
            "probabilities of all actions in its column, and evaluate again."
        )
    events = comparison.events
    if events is not None and events.unsized:
        needed = overlap.num_episodes * FEWEST_SIZES / events.unsized
        return (
            f"say in evaluation.reward_range which rewards are possible, or log {_more_to_score(overlap, needed)}, "
            f"for {FEWEST_SIZES} rare outcomes; and evaluate again."
        )
    if comparison.outlying:
        return (
            "say in evaluation.reward_range which rewards are possible, or log more "
            f"{overlap.scored_unit}s; and evaluate again."
        )
    if overlap.untried_share and any(row.verdict is Verdict.SUPPORT for row in comparison.rows[1:2]):
        return f"say in evaluation.reward_range which rewards are possible, or {_tries(overlap)}; and evaluate again."
    return (
        f"log more {overlap.scored_unit}s, or a policy that takes this policy's actions more often, or {_NEARER}; or "
        "run an A/B test."
    )


def _score(overlap: Overlap, unscored: int) -> str:
    """Returns the advice to score all episodes that the log has."""
    scored = overlap.num_episodes
    return (
        f"set evaluation.max_episodes to {scored + unscored}: {scored:,} {overlap.scored_unit}s were scored, and the "
        f"log has {unscored:,} more to score"
    )


def _more_to_score(overlap: Overlap, needed: float) -> str:
    """Returns how many scored episodes it would take in addition to the present ones."""
    return (
        f"about {number(float(f'{needed:.2g}'))} {overlap.scored_unit}s to score in place of {overlap.num_episodes:,}"
    )


def _tries(overlap: Overlap) -> str:
    """Returns the advice to try what the log hardly tries, with the number of episodes for enough tries."""
    explore = "log a policy that takes this policy's actions there more often"
    if not overlap.expected_tries > 0:
        return explore
    needed = overlap.num_episodes * ENOUGH_TRIES / overlap.expected_tries
    if needed >= _MOST_EPISODES:
        return explore
    return f"{explore}, or log {_more_to_score(overlap, needed)}, for {ENOUGH_TRIES:g} tries"


def _width(estimate: Estimate) -> tuple[float, float]:
    """Returns the width of the difference's interval, and the distance of the difference from its middle."""
    difference = estimate.difference
    return difference.high - difference.low, abs(difference.value - (difference.low + difference.high) / 2)


def _from_simulation(played: Played) -> Finding:
    other = played.other
    difference = played.differences[other].total
    reason = (
        f"its return in simulation is {played.policies[MODEL].total}, against {played.policies[other].total} of "
        f"{'random actions' if other == RANDOM else 'the other model'}, a paired difference of {difference}"
    )
    return _finding(FindingSource.SIMULATION, _BY_SIDE[difference.side], reason, weak=other == RANDOM)
