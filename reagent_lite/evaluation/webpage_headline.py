"""The report page's first words: what a reader may conclude, from the log and from simulation."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from reagent_lite.evaluation.verdict import Verdict
from reagent_lite.evaluation.webpage_content import (
    Comparison,
    Estimated,
    Interval,
    Report,
    Simulated,
    State,
    number,
    spread,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """A conclusion.

    Attributes:
        source: what it rests on.
        state: good, unclear or bad.
        sentence: the conclusion.
        because: sentences that carry it.
    """

    source: str
    state: State
    sentence: str
    because: tuple[str, ...]


def headlines(report: Report) -> tuple[Headline, ...]:
    """Returns a conclusion from the log and one from simulation, as far as there are any; at least one."""
    found = []
    deciding = next((one for one in report.comparisons if one.decides), None)
    if deciding is not None:
        found.append(_from_log(deciding))
    if report.simulated:
        found.append(_from_simulation(report.simulated, report.simulated_note))
    nothing = Headline(source="Evaluation", state="unclear", sentence="Nothing was evaluated.", because=())
    return tuple(found) or (nothing,)


def _from_log(comparison: Comparison) -> Headline:
    reference, rows = comparison.reference_name, comparison.rows
    trusted = [row for row in rows if row.verdict is Verdict.TRUSTWORTHY and row.difference and row.difference.defined]
    what = f"{comparison.outcome}, {comparison.unit}: the {reference} has {spread(comparison.reference)}."
    if not trusted:
        return Headline(source="From the log", state="unclear",
                        sentence=f"The log does not tell whether this policy beats the {reference}.",
                        because=(f"No estimate is trustworthy: {_reasons(rows)}.", what))  # fmt: skip
    signs = {_side(row.difference) for row in trusted if row.difference}
    if signs == {1}:
        state: State = "good"
        sentence = f"Better than the {reference}."
    elif signs == {-1}:
        state, sentence = "bad", f"Worse than the {reference}."
    elif {1, -1} <= signs:
        state, sentence = "unclear", f"Trustworthy estimates contradict each other about the {reference}."
    else:
        state, sentence = "unclear", f"No difference from the {reference} is shown by all trustworthy estimates."
    count = f"{len(trusted)} of {len(rows)} estimates are trustworthy. Their differences: "
    return Headline(source="From the log", state=state, sentence=sentence,
                    because=(count + "; ".join(map(_difference, trusted)) + ".", what))  # fmt: skip


def _from_simulation(simulated: Sequence[Simulated], note: str) -> Headline:
    first, *others = simulated
    because = [f"{one.name}: {spread(one.returns)}{_more_by(one)}." for one in simulated]
    state: State = "unclear"
    sentence = f"Returns {number(first.returns.value)} in simulation."
    if others and (sign := _apart(first, others[0])) is not None:
        other = f"{others[0].name[0].lower()}{others[0].name[1:]}"
        if sign:
            state = "good" if sign > 0 else "bad"
            sentence = f"{'Better' if sign > 0 else 'Worse'} than {other} in simulation."
        else:
            sentence = f"No difference from {other} is shown in simulation."
    return Headline(source="In simulation", state=state, sentence=sentence,
                    because=tuple(one for one in (*because, note) if one))  # fmt: skip


def _more_by(one: Simulated) -> str:
    return "" if one.difference is None else f", by which the first has more: {spread(one.difference)}"


def _apart(first: Simulated, other: Simulated) -> int | None:
    """Returns 1 or -1 where the first is shown to return more or less, 0 where neither, None where it is undefined.

    A paired difference decides; without one, intervals that do not meet.
    """
    if other.difference is not None:
        return _side(other.difference) if other.difference.defined else None
    one, two = first.returns, other.returns
    if not (one.defined and two.defined):
        return None
    assert one.low is not None and one.high is not None and two.low is not None and two.high is not None  # noqa: PT018
    return int(one.low > two.high) - int(one.high < two.low)


def _side(figure: Interval) -> int:
    """Returns 1 or -1 where the whole interval lies on one side of 0, else 0."""
    return int(figure.low is not None and figure.low > 0) - int(figure.high is not None and figure.high < 0)


def _difference(row: Estimated) -> str:
    assert row.difference is not None
    return f"{row.name.replace('_', ' ')} {spread(row.difference)}"


def _reasons(rows: Sequence[Estimated]) -> str:
    counted = Counter(row.reason for row in rows).most_common()
    return "; ".join(f"{reason} ({count} of {len(rows)})" for reason, count in counted)
