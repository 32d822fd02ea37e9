"""What to do with a policy: ship it, do not ship it, or that its figures are not enough to say.

estimates from the log ───┐
returns in simulation ────┼─► findings: better, worse or undecided ─► Decision: choice, reason, next step
verdict of publish_if ────┘
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from reagent_lite.evaluation.cpe import CPEResult, Estimate
from reagent_lite.evaluation.gate import Gate
from reagent_lite.evaluation.interval import Interval
from reagent_lite.evaluation.overlap import Overlap
from reagent_lite.evaluation.played import MODEL, RANDOM, Played
from reagent_lite.evaluation.verdict import Verdict
from reagent_lite.rl.estimators import ESTIMATORS

LOGGED, OTHER_MODEL = "logged policy", "other model"
_CONTINUED = "continued by the value model"
_UNITS = (("discounted return per episode", "reward per row"), ("discounted sum per episode", "mean per row"))
"""What is averaged: of the reward, and of a metric; over episodes, and over rows."""


class Choice(StrEnum):
    """What to do with a policy."""

    SHIP = "ship"
    DO_NOT_SHIP = "do not ship"
    NOT_ENOUGH = "not enough to say"


class Source(StrEnum):
    """What a finding rests on, the strongest first."""

    GATE = "publish_if"
    LOG = "From the log"
    BESIDE = "In simulation, beside the log"
    SIMULATION = "In simulation"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Estimates of one quantity beside what they are compared with.

    Attributes:
        outcome: "Reward", or "Metric" and its name, which may be "reward" as well.
        unit: what is averaged, such as "discounted return per episode".
        decides: whether the decision rests on it.
        reference_name: what the estimates are compared with.
        reference: its value; None where the estimates are differences themselves.
        continued: what estimates that continue where records are cut are compared with; None where none is cut.
        rows: the estimates; a difference is estimate - reference, resampled in pairs.
        simulated: what the estimates aim at, from simulation; None where it was not played or is another quantity.
    """

    outcome: str
    unit: str
    decides: bool
    reference_name: str = LOGGED
    reference: Interval | None
    rows: tuple[Estimate, ...]
    continued: Interval | None = None
    simulated: Interval | None = None

    @property
    def references(self) -> dict[str, Interval]:
        """What estimates are compared with, by name: `reference`, and where there is one `continued`."""
        found = {self.reference_name: self.reference, f"{self.reference_name} {_CONTINUED}": self.continued}
        return {name: one for name, one in found.items() if one is not None}

    @property
    def title(self) -> str:
        """The quantity."""
        return f"{self.outcome}: {self.unit}{'' if self.reference else ', model minus against'}"


def compared(result: CPEResult, *, simulated: Interval | None = None, decides: bool = True) -> Iterator[Comparison]:
    """Yields estimates beside the logged policy's value; those of the reward's return decide.

    Args:
        result: the result of the evaluated policy.
        simulated: what the estimates of the reward's return aim at.
        decides: false where the policy is compared with another model instead.
    """
    for place, outcome in enumerate(result.outcomes):
        families = (outcome.sequential, outcome.one_step)
        for number, (family, unit) in enumerate(zip(families, _UNITS[place > 0], strict=True)):
            first = not place and not number
            yield Comparison(
                outcome=_title(place, outcome.name),
                unit=unit,
                decides=decides and first,
                reference=family.logged,
                continued=family.continued,
                rows=family.estimates,
                simulated=simulated if first else None,
            )


def compared_models(found: Mapping[str, Sequence[Estimate]]) -> Iterator[Comparison]:
    """Yields what `cpe.differences` returns; those of the reward's return decide."""
    for place, (name, estimates) in enumerate(found.items()):
        for sequential, unit in zip((True, False), _UNITS[place > 0], strict=True):
            yield Comparison(
                outcome=_title(place, name),
                unit=unit,
                decides=not place and sequential,
                reference_name=OTHER_MODEL,
                reference=None,
                rows=tuple(one for one in estimates if ESTIMATORS[one.name].sequential == sequential),
            )


def _title(place: int, name: str) -> str:
    return f"Metric {name}" if place else name  # the reward comes first; a metric may have the same name


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What is known of a policy.

    Attributes:
        result: all estimates from the log; None without a log.
        seen: whether the policy has learned from episodes that they rest on.
        other_seen: whether the model that it is compared with has.
        comparisons: what they are compared with.
        played: from simulation.
        gate: the decision of publish_if.
    """

    result: CPEResult | None = None
    seen: bool = False
    other_seen: bool = False
    comparisons: tuple[Comparison, ...] = ()
    played: Played | None = None
    gate: Gate | None = None

    @property
    def overlap(self) -> Overlap | None:
        """Diagnostics of the log's weights; None without a log and where it has no propensities."""
        return self.result.overlap if self.result is not None and self.result.weighted else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One reason for or against a policy.

    Attributes:
        source: what it rests on.
        side: 1 where the policy is shown to be better, -1 worse, 0 neither.
        reason: which estimate against which reference, in words.
        next_step: what to do about it.
        weak: whether the policy was compared with random actions only.
    """

    source: Source
    side: int
    reason: str
    next_step: str
    weak: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do.

    Attributes:
        choice: the decision.
        reason: why, in words.
        next_step: what to do next, as it stands behind "Next: ".
        findings: everything that was weighed.
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


def decide(evidence: Evidence) -> Decision:
    """Returns what the findings add up to.

    publish_if that is not fulfilled decides alone. Otherwise findings for and against a policy contradict each other,
    and one side alone decides. Being better than random actions is not enough where the comparison with another policy
    is undecided. Estimates on episodes that a policy has learned from flatter it: they do not speak for it.
    """
    findings = tuple(_unflattered(one, evidence) for one in _findings(evidence))
    better, worse, undecided = ([one for one in findings if one.side == side] for side in (1, -1, 0))
    if worse and (worse[0].source is Source.GATE or not better):
        choice, used = Choice.DO_NOT_SHIP, worse[:1]
    elif better and not worse and not (better[0].weak and undecided):
        choice, used = Choice.SHIP, better[:1]
    else:
        choice, used = Choice.NOT_ENOUGH, [*worse[:1], *better[:1]] if worse else undecided[:1]
    steps = [one.next_step for one in used]
    return Decision(
        choice=choice,
        reason="; but ".join(one.reason for one in used),
        next_step=steps[0] if len(steps) == 1 else _TRY_BOTH,
        findings=findings,
    )


_TRY = "give it a small share of the decisions, with their propensities logged."
_TRY_BOTH = "give each policy a share of the decisions (an A/B test)."
_LEARN = (
    "keep the policy in use; learn longer (epochs) or from more data, or raise rl.cql_alpha, which keeps a policy "
    "near the log."
)
_COMPARE = "compare it with the policy in use by workflows.evaluate: with its log (data_path) or its model (against)."
_SCORE_OTHERS = (
    "score it on other episodes than it learns from: train with evaluation.learn_from_scored false or with "
    "eval_data_path, or evaluate it on a log of other episodes."
)
_LEARN_IN_SIMULATION = "keep the policy in use; learn longer: simulation.total_steps, or epochs beside data."
_NEXT = {
    (Source.GATE, 1): _TRY,
    (Source.LOG, 1): _TRY,
    (Source.LOG, 0): "gather more episodes, which narrows the intervals, or run an A/B test.",
    (Source.BESIDE, 1): _TRY,
    (Source.SIMULATION, 1): _COMPARE,
    (Source.SIMULATION, 0): _LEARN_IN_SIMULATION,
    (Source.SIMULATION, -1): _LEARN_IN_SIMULATION,
}
"""The next step after a finding, by its source and side; after others it is to learn on."""


def _finding(source: Source, side: int, reason: str, *, weak: bool = False) -> Finding:
    return Finding(source=source, side=side, reason=reason, next_step=_NEXT.get((source, side), _LEARN), weak=weak)


def _unflattered(finding: Finding, evidence: Evidence) -> Finding:
    """Returns a finding; an undecided one where it favours a policy that has learned from the scored episodes."""
    whose = {1: evidence.seen and "policy", -1: evidence.other_seen and OTHER_MODEL}.get(finding.side)
    if not whose or finding.source not in (Source.GATE, Source.LOG):
        return finding
    return replace(
        finding,
        side=0,
        reason=f"{finding.reason}; but the {whose} has learned from scored episodes, which flatters it",
        next_step=_SCORE_OTHERS,
    )


def _findings(evidence: Evidence) -> Iterator[Finding]:
    """Yields what speaks for and against a policy, the strongest kind first."""
    if (gate := evidence.gate) is not None:
        verb = "is fulfilled" if gate.passed else "holds the model back"
        yield _finding(Source.GATE, 1 if gate.passed else -1, f"publish_if {verb}: {gate.reason}")
    for one in evidence.comparisons:
        if one.decides:
            yield _from_log(one, evidence.result)
            if one.simulated is not None and one.reference is not None:
                values = f"{one.simulated}, against {one.reference} of the logged policy in the log"
                side = int(one.simulated.low > one.reference.high) - int(one.simulated.high < one.reference.low)
                yield _finding(Source.BESIDE, side, f"in simulation its discounted return is {values}")
    if not any(one.decides for one in evidence.comparisons) and (evidence.result or not evidence.played):
        step = "give more episodes, or eval_data_path, in which every action is known; or run workflows.evaluate."
        yield Finding(source=Source.LOG, side=0, reason="no episodes could be scored", next_step=step)
    if evidence.played is not None:
        yield _from_simulation(evidence.played)


def _from_log(comparison: Comparison, result: CPEResult | None) -> Finding:
    """Uses the trustworthy estimates: they decide if all of their differences lie on the same side of 0."""
    name, rows = comparison.reference_name, comparison.rows
    trusted = [row for row in rows if row.verdict is Verdict.TRUSTWORTHY and row.difference.defined]
    sides = {row.difference.side for row in trusted}
    if not trusted:
        why = "".join(
            f"; the most frequent reason is: {reason}"
            for reason, _ in Counter(row.reason for row in rows).most_common(1)
        )
        beside = f"{name}'s {comparison.reference}" if comparison.reference else name
        reason = f"no estimate of the {comparison.unit} can be trusted in comparison with the {beside}{why}"
        return Finding(source=Source.LOG, side=0, reason=reason, next_step=_mended_by(result))
    if {1, -1} <= sides:
        reason = f"trustworthy estimates contradict each other about the {name}"
        return Finding(source=Source.LOG, side=0, reason=reason, next_step=_TRY_BOTH)
    side = sides.pop() if len(sides) == 1 else 0
    # the estimate with the weakest evidence
    row = min(trusted, key=lambda one: (one.difference.side != 0, _nearest(one.difference)))
    what = f"{row.name.replace('_', ' ')} estimates a"
    if comparison.reference is None:
        reason = f"{what} difference of {row.difference} from the {name} in the {comparison.unit}"
    else:
        continues = comparison.continued is not None and ESTIMATORS[row.name].continues
        name, reference = [*comparison.references.items()][continues]
        reason = (
            f"{what} {comparison.unit} of {row.figure} against {reference} of the {name}, "
            f"a difference of {row.difference}{'' if side else ', which may be 0'}"
        )
    return _finding(Source.LOG, side, reason)


def _mended_by(result: CPEResult | None) -> str:
    """Returns the step that could make estimates of the policy trustworthy."""
    if result is None or result.overlap is None:
        return "evaluate on a log with whole episodes of the policy in use."
    if not result.weighted or result.overlap.unsupported_share > 0.5:
        return (
            "log the probability of every action that is taken (action_probability), of a policy that tries all of "
            "them now and then, and evaluate again."
        )
    return (
        "gather more exploratory data, that is, episodes in which every action has a probability well above 0, and "
        "check that action_probability is right; or run a simulation or an A/B test. A larger rl.cql_alpha or "
        "rl.temperature keeps the policy nearer to the log."
    )


def _from_simulation(played: Played) -> Finding:
    other = played.other
    difference = played.differences[other].total
    reason = (
        f"its return in simulation is {played.policies[MODEL].total}, against {played.policies[other].total} of "
        f"{'random actions' if other == RANDOM else 'the other model'}, a paired difference of {difference}"
    )
    return _finding(Source.SIMULATION, difference.side, reason, weak=other == RANDOM)


def _nearest(difference: Interval) -> float:
    return min(abs(difference.low), abs(difference.high))
