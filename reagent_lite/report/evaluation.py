"""What an evaluation found, as headlines and sections: the page, the model card and an evaluation's page share them.

evaluation.json ─► Comparison, Simulated ─► headlines
                                        └─► sections: estimates, returns in simulation, weights, actions
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reagent_lite.errors import counted
from reagent_lite.evaluation.cpe import Estimate
from reagent_lite.evaluation.interval import UNDEFINED, Interval, number, percent
from reagent_lite.evaluation.verdict import Verdict
from reagent_lite.report.charts import Curves, Line, curve_chart, thinned, whisker_chart
from reagent_lite.report.content import Chart, Fact, Headline, Section, State, Table, left_out

_MOST_COMPARISONS = 12  # six outcomes
_MOST_ACTIONS = 200
_MOST_FEATURES = 100  # of candidates, those that differ most
_MOST_POINTS = 500  # of a curve by step
_SIGN = {Verdict.TRUSTWORTHY: "●", Verdict.WIDE: "◇", Verdict.DO_NOT_USE: "✕"}
_UNITS = (
    (("sequential", "discounted return of an episode"), ("one_step", "reward of a row")),
    (("sequential", "discounted sum over an episode"), ("one_step", "mean of a row")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Estimates of one quantity beside what they are compared with.

    Attributes:
        outcome: "Reward", or "Metric" and its name, which may be "reward" as well.
        unit: what is averaged, such as "discounted return of an episode".
        decides: whether the headline rests on it; the first that does is used.
        reference_name: what the estimates are compared with.
        reference: its value.
        rows: the estimates; a difference is estimate - reference, resampled in pairs.
        simulated: what the estimates aim at, from simulation; None where it was not played or is another quantity.
    """

    outcome: str
    unit: str
    decides: bool
    reference_name: str = "logged policy"
    reference: Interval
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
        returns: mean sum of an episode's rewards.
        discounted: mean discounted sum.
        length: mean steps of an episode.
        cut_share: share of episodes that the time limit ended.
        difference: returns of the first policy minus this one's, paired.
    """

    name: str
    returns: Interval
    discounted: Interval | None = None
    length: float | None = None
    cut_share: float | None = None
    difference: Interval | None = None


def compared(cpe: Mapping[str, Any] | None) -> tuple[Comparison, ...]:
    """Returns the comparisons of an evaluation, as evaluation.report.as_json gives it; returns of episodes decide."""
    return tuple(
        Comparison(
            outcome=f"Metric {outcome['name']}" if place else outcome["name"],
            unit=unit,
            decides=family == "sequential",
            reference=Interval.read(outcome[family]["logged"]),
            rows=tuple(map(_estimate, outcome[family]["estimates"])),
        )
        for place, outcome in enumerate(cpe["outcomes"] if cpe else ())
        for family, unit in _UNITS[place > 0]
    )


def _estimate(row: Mapping[str, Any]) -> Estimate:
    ratio = row["normalized"]
    return Estimate(
        name=row["name"],
        figure=Interval.read(row["figure"]),
        normalized=UNDEFINED.value if ratio is None else ratio,
        difference=Interval.read(row["difference"]),
        verdict=Verdict(row["verdict"]),
        reason=row["reason"],
    )


def unscored(cpe: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Returns sentences on what an evaluation left out, none where it left out nothing."""
    if not cpe:
        return ()
    if cpe["overlap"] is None:
        return ("No held-out rows: nothing could be estimated from the log.",)
    episodes, rows = cpe["num_episodes_left_out"], cpe["num_rows_beyond_horizon"]
    if not episodes and not rows:
        return ()
    return (f"Not scored: {counted(episodes, 'episode')}, and {counted(rows, 'row')} beyond the horizon.",)


def headlines(comparisons: Sequence[Comparison], simulated: Sequence[Simulated], note: str) -> tuple[Headline, ...]:
    """Returns a conclusion from the log and one from simulation, as far as there are any.

    Args:
        comparisons: from the log.
        simulated: the evaluated policy first; the second is what it is compared with.
        note: how it was simulated.
    """
    found = [_from_log(one) for one in comparisons if one.decides][:1]
    return (*found, _from_simulation(simulated, note)) if simulated else tuple(found)


def _from_log(comparison: Comparison) -> Headline:
    reference, rows = comparison.reference_name, comparison.rows
    trusted = [row for row in rows if row.verdict is Verdict.TRUSTWORTHY and row.difference.defined]
    what = f"{comparison.outcome}, {comparison.unit}: the {reference} has {comparison.reference}."
    if not trusted:
        reasons = "; ".join(
            f"{why} ({count} of {len(rows)})" for why, count in Counter(row.reason for row in rows).most_common()
        )
        sentence = f"The log is not enough to say whether this policy beats the {reference}."
        because = (f"No estimate is trustworthy: {reasons}.", what)
        return Headline(source="From the log", state="unclear", sentence=sentence, because=because)
    sides = {row.difference.side for row in trusted}
    state: State = "unclear"
    if sides == {1}:
        state, sentence = "good", f"Better than the {reference}."
    elif sides == {-1}:
        state, sentence = "bad", f"Worse than the {reference}."
    elif {1, -1} <= sides:
        sentence = f"Trustworthy estimates contradict each other about the {reference}."
    else:
        sentence = f"No difference from the {reference} is shown by all trustworthy estimates."
    differences = "; ".join(f"{_words(row.name)} {row.difference}" for row in trusted)
    count = f"{len(trusted)} of {len(rows)} estimates are trustworthy. Their differences: {differences}."
    return Headline(source="From the log", state=state, sentence=sentence, because=(count, what))


def _from_simulation(simulated: Sequence[Simulated], note: str) -> Headline:
    first, *others = simulated
    state: State = "unclear"
    sentence = f"Episodes earn {number(first.returns.value)} in simulation."
    if others and (side := _side(first, others[0])) is not None:
        other = f"{others[0].name[0].lower()}{others[0].name[1:]}"
        if side:
            state = "good" if side > 0 else "bad"
            sentence = f"{'Better' if side > 0 else 'Worse'} than {other} in simulation."
        else:
            sentence = f"No difference from {other} is shown in simulation."
    because = [
        f"{one.name}: {one.returns}."
        if one.difference is None
        else f"{one.name}: {one.returns}; the first policy minus this one: {one.difference}."
        for one in simulated
    ]
    return Headline(source="In simulation", state=state, sentence=sentence, because=(*because, note))


def _side(first: Simulated, other: Simulated) -> int | None:
    """Returns 1 or -1 where the first is shown to return more or less, 0 where neither, None where it is undefined.

    A paired difference decides; without one, intervals that do not meet.
    """
    if other.difference is not None:
        return other.difference.side if other.difference.defined else None
    one, two = first.returns, other.returns
    if not (one.defined and two.defined):
        return None
    return int(one.low > two.high) - int(one.high < two.low)


def estimates_section(comparisons: Sequence[Comparison], level: float, where: str) -> Section:
    """Returns every estimate beside its reference, with verdict and reason.

    Args:
        comparisons: of all outcomes.
        level: of the intervals.
        where: the file that has what is left out.
    """
    shown = comparisons[:_MOST_COMPARISONS]
    dotted = ", the dotted line the value in simulation" if any(one.simulated for one in comparisons) else ""
    note = (
        f"A dot is an estimate, its whisker the {level:.0%} interval, the dashed line and band what it is compared "
        f"with{dotted}. ● trustworthy, ◇ wide, ✕ do not use. An arrow marks a whisker that continues."
    )
    return Section(
        title="Estimates",
        notes=(note,),
        charts=tuple(map(_estimates_chart, shown)),
        tables=tuple(map(_estimates_table, shown)),
        rest=(left_out(len(comparisons) - len(shown), "comparisons", where),),
    )


def _estimates_chart(one: Comparison) -> Chart:
    marks = {one.reference_name: one.reference} | ({"in simulation": one.simulated} if one.simulated else {})
    return whisker_chart(one.title, [(_words(row.name), row.figure, row.verdict) for row in one.rows], marks)


def _estimates_table(one: Comparison) -> Table:
    rows = [(one.reference_name, str(one.reference), "", "", "", "")]
    if one.simulated is not None:
        rows.append(("in simulation", str(one.simulated), "", "", "", "the value that estimates aim at"))
    for row in one.rows:
        verdict = f"{_SIGN[row.verdict]} {row.verdict.value}"
        rows.append((row.name, str(row.figure), str(row.difference), number(row.normalized), verdict, row.reason))
    head = ("Estimator", "Estimate (interval)", "Difference", "Times as much", "Verdict", "Reason")
    title = f"{one.title}, beside the {one.reference_name}"
    return Table(title=title, head=head, rows=rows, figures=(1, 2, 3), words=(5,), short=(4,))


def simulated_section(simulated: Sequence[Simulated], level: float, note: str) -> Section:
    """Returns what policies earned in simulation; columns without a figure are left out."""
    if not simulated:
        return Section(title="Returns in simulation")
    head = (
        "Policy",
        "Sum of rewards of an episode",
        "Discounted return",
        f"{simulated[0].name} minus this policy",
        "Mean length in steps",
        "Cut by the time limit",
    )
    rows = [
        (
            one.name,
            str(one.returns),
            str(one.discounted or "–"),
            str(one.difference or "–"),
            number(one.length),
            percent(one.cut_share),
        )
        for one in simulated
    ]
    used = [column for column in range(len(head)) if column < 2 or any(row[column] != "–" for row in rows)]
    table = Table(
        title=f"Returns in simulation with {level:.0%} intervals",
        head=tuple(head[column] for column in used),
        rows=[tuple(row[column] for column in used) for row in rows],
        figures=(1, 2, 3, 4, 5),
    )
    return Section(title="Returns in simulation", notes=(note,), tables=(table,))


def weights_section(cpe: Mapping[str, Any] | None, enough: float | None) -> Section:
    """Returns the diagnostics of importance weights of an evaluation, as evaluation.report.as_json gives it.

    Args:
        cpe: the evaluation; empty where nothing was scored.
        enough: evaluation.min_effective_episodes; None draws no line.
    """
    overlap = cpe["overlap"] if cpe else None
    if overlap is None:
        return Section(title="Weights and overlap")
    step = overlap["judged_step"]
    facts = (
        ("Episodes scored", f"{overlap['num_episodes']:,}"),
        ("Rows scored", f"{overlap['num_rows']:,}"),
        ("Effective rows", number(overlap["effective_rows"])),
        (f"Effective episodes at step {step}", number(overlap["effective_episodes"])),
        ("Mean weight of a row, should be 1", str(Interval.read(overlap["mean_weight"]))),
        ("Mean weight of an episode there, should be 1", str(Interval.read(overlap["mean_episode_weight"]))),
        ("Largest share of one row", percent(overlap["largest_row_share"])),
        ("Largest share of one episode", percent(overlap["largest_episode_share"])),
        ("Rows logged as certain where the policy may differ", percent(overlap["unsupported_share"])),
        ("Steps with enough effective episodes", f"{overlap['horizon_reached']} of {overlap['horizon']}"),
        ("Episodes cut before their end", percent(overlap["cut_share"])),
    )
    note = (
        "Weighted estimates know only what the log has tried. Effective episodes: how many equally weighted ones "
        f"would tell as much. A return is evaluated at step {step}, by which 95% of discounted time has passed."
    )
    line = None if enough is None else (enough, f"enough: {number(enough)}")
    charts = (
        *_by_step("Effective episodes by step", "effective episodes", overlap["effective_episodes_by_step"], line),
        *_by_step(
            "Mean weight of episodes by step", "mean weight", overlap["mean_weight_by_step"], (1.0, "should be 1")
        ),
    )
    return Section(title="Weights and overlap", notes=(note,), charts=charts, facts=facts)


def _by_step(
    title: str, unit: str, values: Sequence[float | None], mark: tuple[float, str] | None
) -> tuple[Chart, ...]:
    points = tuple((float(step), value) for step, value in enumerate(values) if value is not None)
    lines = (Line(name=unit, points=thinned(points, _MOST_POINTS)),)
    return (
        (curve_chart(Curves(title=title, x="step of the episode", y=unit, lines=lines, mark=mark)),) if points else ()
    )


Shares = Mapping[str, tuple[float | None, float | None, float | None]]
"""Of each action: its share in the log, its share in the policy's best choices, its mean propensity; None: unknown."""


def actions_section(shares: Shares, where: str) -> Section:
    """Returns how often named actions are chosen on the evaluated rows; `where` has those that are left out."""
    if not shares:
        return Section(title="Actions")
    names = ("Log", "Learned policy's choice", "Mean propensity of the evaluated policy")
    used = [place for place in range(3) if any(values[place] is not None for values in shares.values())]
    shown = list(shares.items())[:_MOST_ACTIONS]
    table = Table(
        title="Shares of actions on evaluated rows",
        head=("Action", *(names[place] for place in used)),
        rows=[(name, *(percent(values[place]) for place in used)) for name, values in shown],
        bars=(1, 2, 3),
        note=left_out(len(shares) - len(shown), "actions", where),
    )
    return Section(title="Actions", tables=(table,))


def candidates_section(document: Mapping[str, Any] | None, where: str) -> Section:
    """Returns what is chosen among candidates, which have features in place of names.

    Args:
        document: of evaluation.candidates.CandidateTally; empty where nothing was counted.
        where: the file that has what is left out.
    """
    if not document or not document["rows"]:
        return Section(title="Actions")
    facts: tuple[Fact, ...] = (
        ("Rows counted", f"{document['rows']:,}"),
        ("Rows in which the policy's likeliest candidate is the logged one", percent(document["same"])),
        ("Mean propensity of the logged candidate", percent(document["propensity"])),
        ("The policy's mean probability of it", percent(document["probability"])),
    )
    features = sorted(document["features"].items(), key=lambda item: -abs(item[1]["difference"] or 0.0))
    shown = features[:_MOST_FEATURES]
    tables = (
        Table(
            title="Features of chosen candidates, largest difference first",
            head=("Feature", "Log: mean (standard deviation)", "Policy: mean (standard deviation)", "Difference"),
            rows=[
                (name, _moments(one["logged"]), _moments(one["policy"]), number(one["difference"]))
                for name, one in shown
            ],
            figures=(1, 2, 3),
            note=left_out(len(features) - len(shown), "features", where),
        ),
        Table(
            title="Probability of the logged candidate, under the log and under the policy",
            head=("Logged propensity", "Share of rows", "Mean propensity", "The policy's mean probability"),
            rows=[
                (
                    f"{one['low']:.0%} to {one['high']:.0%}",
                    *(percent(one[key]) for key in ("rows", "propensity", "policy")),
                )
                for one in document["by_propensity"]
            ],
            figures=(1, 2, 3),
        ),
        Table(
            title="Candidates to choose from",
            head=("Number of candidates", "Share of rows"),
            rows=[
                (name, percent(share))
                for name, share in sorted(document["candidates"].items(), key=lambda item: int(item[0].split()[0]))
            ],
            figures=(1,),
        ),
    )
    note = (
        "Candidates have no names: their features show how the policy's choices differ from the log's. A difference of "
        "1 is a standard deviation."
    )
    return Section(
        title="Actions",
        notes=(note,),
        facts=tuple(fact for fact in facts if fact[1] != "–"),
        tables=tuple(table for table in tables if table.rows),
    )


def _moments(one: Mapping[str, float | None]) -> str:
    return f"{number(one['mean'])} ({number(one['stddev'])})"


def _words(name: str) -> str:
    return name.replace("_", " ")
