"""The report page's first words: what a reader may conclude, from the log and from simulation."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from reagent_lite.evaluation.verdict import Verdict
from reagent_lite.evaluation.webpage_content import Comparison, Estimated, Interval, Report, State, number, spread


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
    signs = {_sign(row) for row in trusted}
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


def _from_simulation(simulated: Sequence[tuple[str, Interval]], note: str) -> Headline:
    (name, figure), *others = simulated
    because = (f"{name}: {spread(figure)}.", *(f"{other}: {spread(one)}." for other, one in others), note)
    state: State = "unclear"
    sentence = f"Returns {number(figure.value)} in simulation."
    if others and figure.defined and others[0][1].defined:
        other, one = others[0]
        assert figure.low is not None and figure.high is not None and one.low is not None and one.high is not None  # noqa: PT018
        if figure.low > one.high:
            state, sentence = "good", f"Better than {other.lower()} in simulation."
        elif figure.high < one.low:
            state, sentence = "bad", f"Worse than {other.lower()} in simulation."
        else:
            sentence = f"No difference from {other.lower()} is shown in simulation."
    return Headline(source="In simulation", state=state, sentence=sentence,
                    because=tuple(one for one in because if one))  # fmt: skip


def _sign(row: Estimated) -> int:
    """Returns 1 or -1 where the whole interval of the difference lies on one side of 0, else 0."""
    assert row.difference is not None
    low, high = row.difference.low, row.difference.high
    return int(low is not None and low > 0) - int(high is not None and high < 0)


def _difference(row: Estimated) -> str:
    assert row.difference is not None
    return f"{row.name.replace('_', ' ')} {spread(row.difference)}"


def _reasons(rows: Sequence[Estimated]) -> str:
    counted = Counter(row.reason for row in rows).most_common()
    return "; ".join(f"{reason} ({count} of {len(rows)})" for reason, count in counted)
