"""What to do with a policy: ship it, do not ship it, or that its figures are not enough to say.

estimates from the log ───┐
returns in simulation ────┼─► findings: better, worse or undecided ─► Decision: choice, reason, next step
verdict of publish_if ────┘
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from reagent_lite.evaluation.cpe import Estimate
from reagent_lite.evaluation.gate import Gate
from reagent_lite.evaluation.interval import Interval
from reagent_lite.evaluation.verdict import Verdict

LOGGED, OTHER_MODEL = "logged policy", "other model"


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
        unit: what is averaged, such as "discounted return of an episode".
        decides: whether the decision rests on it.
        reference_name: what the estimates are compared with.
        reference: its value; None where the estimates are differences themselves.
        rows: the estimates; a difference is estimate - reference, resampled in pairs.
        simulated: what the estimates aim at, from simulation; None where it was not played or is another quantity.
    """

    outcome: str
    unit: str
    decides: bool
    reference_name: str = LOGGED
    reference: Interval | None
    rows: tuple[Estimate, ...]
    simulated: Interval | None = None

    @property
    def title(self) -> str:
        """The quantity."""
        return f"{self.outcome}: {self.unit}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """Returns of one policy in simulation; None where a figure is unknown.

    Attributes:
        name: of the policy.
        returns: mean return of an episode, the plain sum of its rewards.
        discounted: mean discounted return.
        length: mean steps of an episode.
        cut_share: share of episodes that the time limit ended.
        difference: returns of the first policy minus this one's, paired.
        random: whether its actions are uniformly random, which nobody would keep.
    """

    name: str
    returns: Interval
    discounted: Interval | None = None
    length: float | None = None
    cut_share: float | None = None
    difference: Interval | None = None
    random: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One reason for or against a policy.

    Attributes:
        source: what it rests on.
        side: 1 where the policy is shown to be better, -1 worse, 0 neither.
        reason: which estimate against which reference, in words.
        next_step: what would settle it.
        weak: whether the policy was only compared with random actions.
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


def decide(findings: Sequence[Finding]) -> Decision:
    """Returns what findings add up to.

    publish_if that is not fulfilled decides alone. Otherwise findings for and against a policy contradict each other,
    and one side alone decides. Being better than random actions is not enough where the comparison with another policy
    is undecided.

    Args:
        findings: the strongest first.
    """
    better, worse, undecided = ([one for one in findings if one.side == side] for side in (1, -1, 0))
    if worse and (worse[0].source is Source.GATE or not better):
        choice, used = Choice.DO_NOT_SHIP, worse[:1]
    elif better and not worse and not (better[0].weak and undecided):
        choice, used = Choice.SHIP, better[:1]
    else:
        choice, used = Choice.NOT_ENOUGH, [*worse[:1], *better[:1]] if worse else undecided[:1]
    steps = [one.next_step for one in used] or ["set evaluation.calc_cpe_in_training, or run workflows.evaluate."]
    return Decision(
        choice=choice,
        reason="; but ".join(one.reason for one in used) or "nothing was evaluated",
        next_step=steps[0] if len(steps) == 1 else _TRY_BOTH,
        findings=tuple(findings),
    )


_TRY = "give it a small share of the decisions, with their propensities logged."
_TRY_BOTH = "give each policy a share of the decisions (an A/B test)."
_LEARN = (
    "keep the policy in use; learn longer (epochs) or from more data, or raise rl.cql_alpha, which keeps a policy "
    "near the log."
)
_NEXT = {
    (Source.GATE, 1): _TRY,
    (Source.LOG, 1): _TRY,
    (Source.LOG, 0): "gather more episodes, which narrows the intervals, or run an A/B test.",
    (Source.BESIDE, 1): _TRY,
    (Source.SIMULATION, 1): "compare it with the policy in use: data_path or against of workflows.evaluate.",
}
"""The next step after a finding, by its source and side; after others it is to learn on."""


def _finding(source: Source, side: int, reason: str, *, weak: bool = False) -> Finding:
    return Finding(source=source, side=side, reason=reason, next_step=_NEXT.get((source, side), _LEARN), weak=weak)


def findings_of(
    comparisons: Sequence[Comparison],
    simulated: Sequence[Simulated],
    *,
    overlap: Mapping[str, Any] | None = None,
    gate: Gate | None = None,
) -> tuple[Finding, ...]:
    """Returns what speaks for and against a policy, the strongest kind first.

    Args:
        comparisons: from the log; those that decide are used.
        simulated: the evaluated policy, then what it is compared with.
        overlap: of the log's weights, as report.as_json gives it; it says which next step helps.
        gate: the verdict of publish_if.
    """
    found = []
    if gate is not None:
        verb = "is fulfilled" if gate.passed else "holds the model back"
        found.append(_finding(Source.GATE, 1 if gate.passed else -1, f"publish_if {verb}: {gate.reason}"))
    for one in comparisons:
        if one.decides:
            found.append(_from_log(one, overlap))
            if one.simulated is not None and one.reference is not None:
                values = f"{one.simulated}, against {one.reference} of the logged policy in the log"
                side = _order(one.simulated, one.reference)
                found.append(_finding(Source.BESIDE, side, f"in simulation its discounted return is {values}"))
    if simulated:
        found.append(_from_simulation(*simulated[:2]))
    return tuple(found)


def _from_log(comparison: Comparison, overlap: Mapping[str, Any] | None) -> Finding:
    """Rests on the trustworthy estimates: all of their differences lie on one side of 0, or they do not decide."""
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
        return Finding(source=Source.LOG, side=0, reason=reason, next_step=_mended_by(overlap))
    if {1, -1} <= sides:
        reason = f"trustworthy estimates contradict each other about the {name}"
        return Finding(source=Source.LOG, side=0, reason=reason, next_step=_TRY_BOTH)
    side = sides.pop() if len(sides) == 1 else 0
    # the estimate that says the least
    row = min(trusted, key=lambda one: (one.difference.side != 0, _nearest(one.difference)))
    what = f"{row.name.replace('_', ' ')} estimates a"
    if comparison.reference is None:
        reason = f"{what} difference of {row.difference} from the {name} in {comparison.unit}"
    else:
        reason = (
            f"{what} {comparison.unit} of {row.figure} against {comparison.reference} of the {name}, "
            f"a difference of {row.difference}{'' if side else ', which may be 0'}"
        )
    return _finding(Source.LOG, side, reason)


def _mended_by(overlap: Mapping[str, Any] | None) -> str:
    """Returns what makes estimates of a policy trustworthy whose weights are as given."""
    if overlap is None:
        return "evaluate on a log with whole episodes of the policy in use."
    if overlap["unsupported_share"] is None or overlap["unsupported_share"] > 0.5:
        return (
            "log the probability of every action that is taken (action_probability), of a policy that tries all of "
            "them now and then, and evaluate again."
        )
    return (
        "gather more exploratory data, that is, episodes in which every action has a probability well above 0, and "
        "check that action_probability is right; or run a simulation or an A/B test. A larger rl.cql_alpha or "
        "rl.temperature keeps the policy nearer to the log."
    )


def _from_simulation(first: Simulated, other: Simulated | None = None) -> Finding:
    side, reason = 0, f"its return in simulation is {first.returns}"
    if other is not None:
        side = _order(first.returns, other.returns) if other.difference is None else other.difference.side
        paired = "" if other.difference is None else f", a paired difference of {other.difference}"
        reason += f", against {other.returns} of {other.name[:1].lower()}{other.name[1:]}{paired}"
    return _finding(Source.SIMULATION, side, reason, weak=other is None or other.random)


def _nearest(difference: Interval) -> float:
    return min(abs(difference.low), abs(difference.high))


def _order(one: Interval, other: Interval) -> int:
    """Returns 1 or -1 where the first lies above or below the other with its whole interval, else 0."""
    return int(one.low > other.high) - int(one.high < other.low)
