"""What to do with a policy: ship it, do not ship it, or that its figures are not enough to say.

estimates from the log ───┐
returns in simulation ────┼─► findings: better, worse or undecided ─► Decision: choice, reason, next step
verdict of publish_if ────┘
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from reagent_lite.errors import counted
from reagent_lite.evaluation.cpe import CPEResult, Estimate
from reagent_lite.evaluation.gate import Gate
from reagent_lite.evaluation.interval import Interval, number
from reagent_lite.evaluation.overlap import Events, Overlap
from reagent_lite.evaluation.played import MODEL, RANDOM, Played
from reagent_lite.evaluation.verdict import Verdict
from reagent_lite.rl.estimators import ESTIMATORS

LOGGED = "logged policy"
OTHER = "other policy"
_CONTINUED = "continued by the value model"
_MOSTLY = 0.5
_MOST_EPISODES = 1e12
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
        events: how many outcomes other than the usual one the policy met; None if none is usual.
        rows: the estimates; a difference is estimate - reference, of the same episodes.
        simulated: what the estimates aim at, from simulation; None where it was not played or is another quantity.
    """

    outcome: str
    unit: str
    decides: bool
    reference_name: str = LOGGED
    reference: Interval | None
    rows: tuple[Estimate, ...]
    continued: Interval | None = None
    events: Events | None = None
    simulated: Interval | None = None

    @property
    def references(self) -> dict[str, Interval]:
        """What estimates are compared with, by name: `reference`, and where there is one `continued`."""
        references = {self.reference_name: self.reference, f"{self.reference_name} {_CONTINUED}": self.continued}
        return {name: figure for name, figure in references.items() if figure is not None}

    @property
    def title(self) -> str:
        """The quantity."""
        return f"{self.outcome}: {self.unit}{'' if self.reference else ', model minus against'}"

    @property
    def trusted(self) -> tuple[Estimate, ...]:
        """The estimates whose differences may be believed."""
        return tuple(row for row in self.rows if row.verdict is Verdict.TRUSTWORTHY and row.difference.defined)


def compared(result: CPEResult, *, simulated: Interval | None = None, decides: bool = True) -> Iterator[Comparison]:
    """Yields estimates beside the logged policy's value; those of the reward's return decide.

    Where every episode is one row, its reward is its return: it is estimated once, as a reward.

    Args:
        result: the result of the evaluated policy.
        simulated: what the estimates of the reward's return aim at.
        decides: false where the policy is compared with another model instead.
    """
    one_step = result.one_step
    for place, outcome in enumerate(result.outcomes):
        families = zip((outcome.sequential, outcome.one_step), _UNITS[place > 0], strict=True)
        for by_row, (family, unit) in enumerate(families):
            if one_step and not by_row:
                continue
            first = not place and by_row == one_step
            yield Comparison(
                outcome=_title(place, outcome.name),
                unit=unit,
                decides=decides and first,
                reference=family.logged,
                continued=family.continued,
                events=family.events,
                rows=family.estimates,
                simulated=simulated if first else None,
            )


def compared_models(differences: Mapping[str, Sequence[Estimate]], *, one_step: bool) -> Iterator[Comparison]:
    """Yields what `cpe.differences` returns; those of the reward's return decide.

    Args:
        differences: of two models, by outcome.
        one_step: whether every episode is one row.
    """
    for place, (name, estimates) in enumerate(differences.items()):
        for sequential, unit in zip((True, False), _UNITS[place > 0], strict=True):
            if one_step and sequential:
                continue
            yield Comparison(
                outcome=_title(place, name),
                unit=unit,
                decides=not place and sequential != one_step,
                reference_name=OTHER,
                reference=None,
                rows=tuple(row for row in estimates if ESTIMATORS[row.name].sequential == sequential),
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


class Standing(StrEnum):
    """What a finding says of a policy."""

    BETTER = "better"
    WORSE = "worse"
    UNDECIDED = "undecided"
    CONTRADICTED = "contradicted"
    UNTRUSTED = "untrusted"
    UNSCORED = "unscored"
    FLATTERED = "flattered"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One reason for or against a policy.

    Attributes:
        source: what it rests on.
        standing: what it says.
        reason: which estimate against which reference, in words.
        next_step: what to do about it.
        weak: whether the policy was compared with random actions only.
    """

    source: Source
    standing: Standing
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


_ANY = None
_TABLE: tuple[tuple[bool | None, bool | None, bool | None, Choice, tuple[Standing, ...]], ...] = (
    # publish_if failed, better, worse: choice, the findings that are its reason
    (True, _ANY, _ANY, Choice.DO_NOT_SHIP, (Standing.WORSE,)),
    (False, False, True, Choice.DO_NOT_SHIP, (Standing.WORSE,)),
    (False, True, False, Choice.SHIP, (Standing.BETTER,)),
    (False, True, True, Choice.NOT_ENOUGH, (Standing.WORSE, Standing.BETTER)),
    (False, False, False, Choice.NOT_ENOUGH, (Standing.UNDECIDED,)),
)
"""The decision: the first row that fits. Every standing but better and worse counts as undecided."""


def decide(evidence: Evidence) -> Decision:
    """Returns what the findings add up to, by the table above.

    Being better than random actions does not count where the comparison with another policy is undecided. Estimates on
    episodes that a policy has learned from flatter it: they do not speak for it.
    """
    findings = tuple(_unflattered(finding, evidence) for finding in _findings(evidence))
    kinds: dict[Standing, list[Finding]] = {Standing.BETTER: [], Standing.WORSE: [], Standing.UNDECIDED: []}
    for finding in findings:
        kinds.get(finding.standing, kinds[Standing.UNDECIDED]).append(finding)
    if kinds[Standing.UNDECIDED]:
        kinds[Standing.BETTER] = [finding for finding in kinds[Standing.BETTER] if not finding.weak]
    worse = kinds[Standing.WORSE]
    facts = (bool(worse) and worse[0].source is Source.GATE, bool(kinds[Standing.BETTER]), bool(worse))
    choice, standings = next(
        (choice, standings)
        for *conditions, choice, standings in _TABLE
        if all(condition in (_ANY, fact) for condition, fact in zip(conditions, facts, strict=True))
    )
    used = [kinds[standing][0] for standing in standings]
    return Decision(
        choice=choice,
        reason="; but ".join(finding.reason for finding in used),
        next_step=used[0].next_step if len(used) == 1 else _TRY_BOTH,
        findings=findings,
    )


_TRY = "give it a small share of the decisions, with their propensities logged."
_TRY_BOTH = "give each policy a share of the decisions (an A/B test)."
_LEARN = (
    "keep the policy in use; learn longer (epochs) or from more data, or keep the learned policy near the log (dqn: a "
    "larger rl.cql_alpha; crr: a larger beta; iql: a smaller one)."
)
_NEARER = (
    "keep it nearer to the log by a larger rl.temperature (dqn: a larger rl.cql_alpha; crr: a larger beta; iql: a "
    "smaller one)"
)
_COMPARE = "compare it with the policy in use by workflows.evaluate: with its log (data_path) or its model (against)."
_SCORE_OTHERS = (
    "score it on other episodes than it learns from: train with evaluation.learn_from_scored false or with "
    "eval_data_path of other episodes, or evaluate it on a log of other episodes."
)
_SCORE_SOME = "give more episodes, or eval_data_path, in which every action is known; or run workflows.evaluate."
_LEARN_IN_SIMULATION = "keep the policy in use; learn longer: simulation.total_steps, or epochs beside data."
_NEXT = {
    (Source.GATE, Standing.BETTER): _TRY,
    (Source.GATE, Standing.WORSE): _LEARN,
    (Source.LOG, Standing.BETTER): _TRY,
    (Source.LOG, Standing.WORSE): _LEARN,
    (Source.LOG, Standing.CONTRADICTED): _TRY_BOTH,
    (Source.LOG, Standing.UNSCORED): _SCORE_SOME,
    (Source.BESIDE, Standing.BETTER): _TRY,
    (Source.BESIDE, Standing.WORSE): _LEARN,
    (Source.BESIDE, Standing.UNDECIDED): _LEARN,
    (Source.SIMULATION, Standing.BETTER): _COMPARE,
    (Source.SIMULATION, Standing.WORSE): _LEARN_IN_SIMULATION,
    (Source.SIMULATION, Standing.UNDECIDED): _LEARN_IN_SIMULATION,
}
"""The next step after a finding; that after an undecided or untrusted one from a log follows from its numbers."""


def _standing(side: int) -> Standing:
    return {1: Standing.BETTER, -1: Standing.WORSE, 0: Standing.UNDECIDED}[side]


def _finding(source: Source, standing: Standing, reason: str, next_step: str = "", *, weak: bool = False) -> Finding:
    next_step = next_step or _NEXT[source, standing]
    return Finding(source=source, standing=standing, reason=reason, next_step=next_step, weak=weak)


def _unflattered(finding: Finding, evidence: Evidence) -> Finding:
    """Returns a finding; an undecided one where it favours a policy that has learned from the scored episodes."""
    whose = {
        Standing.BETTER: "policy" if evidence.seen else "",
        Standing.WORSE: OTHER if evidence.other_seen else "",
    }.get(finding.standing, "")
    if not whose or finding.source not in (Source.GATE, Source.LOG):
        return finding
    return replace(
        finding,
        standing=Standing.FLATTERED,
        reason=f"{finding.reason}; but the {whose} has learned from scored episodes, which flatters it",
        next_step=_SCORE_OTHERS,
    )


def _findings(evidence: Evidence) -> Iterator[Finding]:
    """Yields what speaks for and against a policy, the strongest kind first."""
    if (gate := evidence.gate) is not None:
        verb = "is fulfilled" if gate.passed else "blocks the export"
        standing = Standing.BETTER if gate.passed else Standing.WORSE
        yield _finding(Source.GATE, standing, f"publish_if {verb}: {gate.reason}")
    deciding = [comparison for comparison in evidence.comparisons if comparison.decides]
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
            yield _finding(Source.BESIDE, _standing(side), reason)
    if not deciding and (evidence.result or not evidence.played):
        yield _finding(Source.LOG, Standing.UNSCORED, "no episodes could be scored")
    if evidence.played is not None:
        yield _from_simulation(evidence.played)


def _from_log(comparison: Comparison, result: CPEResult | None) -> Finding:
    """Uses the trustworthy estimates: the one whose difference has the narrowest interval, unless others contradict it.

    All of them are valid; a poor model makes a doubly robust one wide.
    """
    trusted = comparison.trusted
    name = comparison.reference_name
    if not trusted:
        beside = f"{name}'s {comparison.reference}" if comparison.reference else name
        reason = f"no estimate of the {comparison.unit} can be trusted in comparison with the {beside}"
        # the first rests on a model alone
        reason += "".join(f": {row.reason}" for row in comparison.rows[1:2] or comparison.rows)
        return _finding(Source.LOG, Standing.UNTRUSTED, reason, mended_by(comparison, result))
    sides = {row.difference.side for row in trusted}
    if {1, -1} <= sides:
        reason = f"trustworthy estimates contradict each other about the {name}"
        return _finding(Source.LOG, Standing.CONTRADICTED, reason)
    row = min(trusted, key=_width)
    side = row.difference.side
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
    if comparison.events is not None:
        reason += f" ({comparison.events})"
    step = "" if side else more_data(row, comparison.reference, result)
    return _finding(Source.LOG, _standing(side), reason, step)


def more_data(row: Estimate, reference: Interval | None, result: CPEResult | None) -> str:
    """Returns how many scored episodes would show a difference as large as this one, or of 10 % of the logged value.

    The width of an interval falls with the root of their number.
    """
    if result is None or result.overlap is None:
        return _TRY_BOTH
    count = result.overlap.num_episodes
    difference = row.difference
    toward = difference.value - difference.low if difference.value > 0 else difference.high - difference.value
    sizes = [(toward, abs(difference.value), f"a difference of {difference.written(abs(difference.value))}")]
    if reference is not None:
        tenth = abs(reference.value) / 10
        sizes.append(
            ((difference.high - difference.low) / 2, tenth, f"one of {number(tenth)}, 10% of the logged value")
        )
    needed = [
        f"about {number(float(f'{count * (half / size) ** 2:.2g}'))} to show {what}"
        for half, size, what in sizes
        if half > size > 0 and count * (half / size) ** 2 < _MOST_EPISODES
    ]
    if not needed:
        return f"log more episodes than the {count:,} that were scored, or run an A/B test."
    scored = counted(count, "episode was", "episodes were")
    return f"log more: {scored} scored, it takes {', '.join(needed)}; or run an A/B test."


def mended_by(comparison: Comparison, result: CPEResult | None) -> str:
    """Returns the step that could make estimates of the policy trustworthy."""
    if result is None or result.overlap is None:
        return "evaluate on a log with whole episodes of the policy in use."
    overlap = result.overlap
    if not result.weighted or overlap.unsupported_share > _MOSTLY:
        return (
            "log the probability of every action that is taken (action_probability), of a policy that tries all of "
            "them now and then, and evaluate again."
        )
    effective = min(overlap.effective_episodes, overlap.effective_rows)
    if effective < overlap.enough:
        needed = overlap.num_episodes * overlap.enough / effective if effective > 0 else math.inf
        many = f"log about {number(float(f'{needed:.2g}'))} episodes to score in place of {overlap.num_episodes:,}, or "
        return (
            f"{many if needed < _MOST_EPISODES else ''}log a policy that takes this policy's actions more often, or "
            f"{_NEARER}; or run an A/B test."
        )
    if overlap.mean_weight.value > 1 or overlap.mean_episode_weight.value > 1:
        return "check that action_probability is the probability with which each action was taken, and evaluate again."
    return (
        f"log more episodes, or a policy that takes this policy's actions more often, or {_NEARER}; or run an A/B test."
    )


def _width(estimate: Estimate) -> tuple[float, float]:
    """Returns the width of the difference, and how far the difference is from the middle of its interval."""
    difference = estimate.difference
    return difference.high - difference.low, abs(difference.value - (difference.low + difference.high) / 2)


def _from_simulation(played: Played) -> Finding:
    other = played.other
    difference = played.differences[other].total
    reason = (
        f"its return in simulation is {played.policies[MODEL].total}, against {played.policies[other].total} of "
        f"{'random actions' if other == RANDOM else 'the other model'}, a paired difference of {difference}"
    )
    return _finding(Source.SIMULATION, _standing(difference.side), reason, weak=other == RANDOM)
