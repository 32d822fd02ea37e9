"""Sections on the results of an evaluation, for the pages of runs and evaluations and for the model card."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from reagent_lite.config.evaluation import EvaluationConfig
from reagent_lite.errors import pluralize
from reagent_lite.estimator_names import ESTIMATORS_IN_WORDS
from reagent_lite.evaluation.calibration import Calibration
from reagent_lite.evaluation.cpe import CPEResult, Estimate
from reagent_lite.evaluation.decision import Choice, Comparison, Evidence, ShipDecision
from reagent_lite.evaluation.explanation import Explanation
from reagent_lite.evaluation.interval import Interval, number, percent
from reagent_lite.evaluation.overlap import Overlap
from reagent_lite.evaluation.played import MODEL, RANDOM, Played
from reagent_lite.evaluation.verdict import Verdict
from reagent_lite.export.exploration import EXPLORE, lack_of_exploration
from reagent_lite.report.charts import Curves, Line, curve_chart, interval_chart, thin
from reagent_lite.report.content import Cell, Chart, Column, PageSection, Table, format_cell, note_omitted
from reagent_lite.report.explanation_sections import explanation_sections

_MOST_COMPARISONS = 12  # six outcomes
_MOST_ACTIONS = 200
_MOST_FEATURES = 100  # of candidates, those that differ most
_MOST_POINTS = 500  # of a curve by step
_VERDICTS = {
    Choice.SHIP: Verdict.TRUSTWORTHY,
    Choice.NOT_ENOUGH: Verdict.SUPPORT,
    Choice.DISCUSS: Verdict.SUPPORT,
    Choice.DO_NOT_SHIP: Verdict.DO_NOT_USE,
}
"""Marks of decisions in the chart that ranks policies."""
_SIGN = {"trustworthy": "●", "support only": "◇", "do not use": "✕"}

Shares = Mapping[str, tuple[float | None, float | None, float | None]]
"""{action: (share in the log, share in the policy's best choices, mean propensity)}; None if unknown."""


def evaluation_notes(result: CPEResult | None) -> tuple[str, ...]:
    """Returns sentences about data that an evaluation left out, and a policy that does not explore, or ()."""
    if result is None:
        return ()
    if result.overlap is None:
        return ("No episodes could be scored: nothing was estimated from the log.",)
    notes = []
    if result.num_rows_beyond_horizon:
        rows = pluralize(result.num_rows_beyond_horizon, "row")
        notes.append(f"Not scored: {rows} beyond evaluation.max_horizon.")
    if lack := lack_of_exploration(result.overlap.certain_share):
        notes.append(f"The policy {lack}. One that explores has {EXPLORE}.")
    return tuple(notes)


def ranking_section(ranking: Sequence[tuple[str, ShipDecision, Estimate | None]], level: float) -> PageSection:
    """Returns a section with the policies of which the best is decided about, the best first.

    Args:
        ranking: path, recommendation and deciding estimate of each policy.
        level: confidence level of all intervals together.
    """
    if not ranking:
        return PageSection(title="Policies")
    unknown = Interval(value=math.nan, low=math.nan, high=math.nan)
    rows = [
        (path, *(("", unknown) if estimate is None else (_words(estimate.name), estimate.difference)), decision.choice)
        for path, decision, estimate in ranking
    ]
    drawn = [
        (path, unknown if estimate is None else estimate.difference, _VERDICTS[decision.choice])
        for path, decision, estimate in ranking[:_MOST_ACTIONS]
    ]
    choices = {verdict: choice.value for choice, verdict in _VERDICTS.items()} | {Verdict.SUPPORT: "undecided"}
    chart = interval_chart(
        "Difference from the logged policy, best first",
        drawn,
        {"logged policy": Interval(value=0.0, low=0.0, high=0.0)},
        words_of=choices,
    )
    return PageSection(
        title="Policies",
        notes=(f"All intervals hold together with {level:.0%}, so the best policy may be chosen by them.",),
        charts=(chart,),
        tables=(
            Table(
                title="Policies, best first",
                columns=(("Policy", "name"), ("Estimator", "name"), ("Difference", "number"), ("Decision", "mark")),
                rows=rows,
            ),
        ),
        in_brief=1,
    )


def evaluation_sections(
    evidence: Evidence,
    decision: ShipDecision,
    settings: EvaluationConfig,
    *,
    names: Mapping[str, str],
    note: str,
    where: str,
    explanation: Explanation,
) -> tuple[PageSection, ...]:
    """Returns estimates, who gains and who gets what, returns in simulation, and diagnostics of weights.

    Args:
        evidence: evidence for the decision.
        decision: the decision; estimates are green only if it has enough evidence.
        settings: the settings of the evaluation.
        names: names of the played policies by key, without random actions.
        note: sentence about the played episodes.
        where: name of the file with the complete figures.
        explanation: who gets what, who gains and who loses.
    """
    level = settings.level
    return (
        estimates_section(
            evidence, level, where, plain=evidence.seen or decision.choice in (Choice.NOT_ENOUGH, Choice.DISCUSS)
        ),
        *explanation_sections(explanation, where),
        simulated_section(evidence.played, names, level, note),
        weights_section(evidence.overlap, settings.min_effective_episodes),
    )


def estimates_section(evidence: Evidence, level: float, where: str, *, plain: bool) -> PageSection:
    """Returns a section with every estimate, its reference, verdict and reason.

    Args:
        evidence: comparisons, and the overlap of the log's weights.
        level: confidence level of the intervals.
        where: name of the file with the complete figures.
        plain: whether trustworthy estimates are drawn without color; estimates that do not decide always are.
    """
    comparisons = evidence.comparisons
    shown = comparisons[:_MOST_COMPARISONS]
    has_simulated = any(comparison.simulated for comparison in comparisons)
    dotted = ", the dotted line the value in simulation" if has_simulated else ""
    note = (
        f"A dot is an estimate, the line through it the {percent(level)} interval, a dashed line and band its "
        f"reference{dotted}. ● trustworthy, ◇ support only, ✕ do not use: reliability of the interval, whatever its "
        "width. An interval without an end mark continues."
    )
    row_note = ""
    if len(shown) > 1 and not (evidence.result is not None and evidence.result.by_row):
        row_note = (
            "Estimates of the reward per row compare single choices in the states of the log; they do not decide."
        )
    return PageSection(
        title="Estimates",
        notes=(_evidence_note(evidence.overlap), _cut_note(evidence.overlap), row_note),
        charts=tuple(
            _estimates_chart(comparison, plain, "" if index else note) for index, comparison in enumerate(shown)
        ),
        tables=(*(_estimates_table(comparison, level) for comparison in shown), *_glossary(shown)),
        rest=(note_omitted(len(comparisons) - len(shown), "comparisons", where),),
        in_brief=len(shown),
    )


def _glossary(comparisons: Sequence[Comparison]) -> tuple[Table, ...]:
    """Returns a table that explains the estimators of comparisons."""
    names = dict.fromkeys(row.name for comparison in comparisons for row in comparison.rows)
    rows = [(_words(name), ESTIMATORS_IN_WORDS[name]) for name in names if name in ESTIMATORS_IN_WORDS]
    columns: tuple[Column, ...] = (("Estimator", "name"), ("Description", "words"))
    return (Table(title="Estimators", columns=columns, rows=rows),) if rows else ()


def _evidence_note(overlap: Overlap | None) -> str:
    """Returns a sentence on the log's evidence about the policy, or "" if rows have no weights."""
    if overlap is None:
        return ""
    at = f" at step {overlap.effective_horizon}" if overlap.horizon > 1 else ""
    return (
        f"{pluralize(overlap.num_episodes, f'scored {overlap.scored_unit}')} with an effective sample size of "
        f"{number(overlap.effective_episodes)}{at}; the mean weight of a row is "
        f"{overlap.mean_weight.format_end(overlap.mean_weight.value)} and should be 1."
    )


def _cut_note(overlap: Overlap | None) -> str:
    """Returns a sentence on the reference of estimates of cut episodes; empty if no episode is cut."""
    if overlap is None or not overlap.cut_share:
        return ""
    return (
        f"{percent(overlap.cut_share)} of the episodes are cut before their end: estimates that add a model's value "
        "after the cut are compared with the logged return continued by the same model."
    )


def _estimates_chart(comparison: Comparison, plain: bool, note: str) -> Chart:
    chart = interval_chart(
        comparison.title,
        [(_words(row.name), row.figure, row.verdict) for row in comparison.rows],
        comparison.references or {comparison.reference_name: Interval(value=0.0, low=0.0, high=0.0)},
        comparison.simulated,
        plain=plain or not comparison.decides,
    )
    return replace(chart, note=note)


def _estimates_table(comparison: Comparison, level: float) -> Table:
    rows: list[tuple[Cell, ...]] = [(name, figure, "", "", "", "") for name, figure in comparison.references.items()]
    if comparison.simulated is not None:
        rows.append(("in simulation", comparison.simulated, "", "", "", "the value that estimates aim at"))
    groups: dict[str, list[Estimate]] = {}
    for row in comparison.rows:
        groups.setdefault(row.reason, []).append(row)
    for reason, group in groups.items():
        for index, row in enumerate(group):
            shown_reason = "as above" if index else reason
            verdict = f"{_SIGN[row.verdict]} {row.verdict}"
            rows.append((_words(row.name), row.figure, row.difference, row.normalized, verdict, shown_reason))
    return Table(
        title=f"{comparison.title}, compared with the {comparison.reference_name}",
        columns=(
            ("Estimator", "name"),
            (f"Estimate ({percent(level)} interval)", "number"),
            ("Difference", "number"),
            (f"Times the {comparison.reference_name}", "number"),
            ("Verdict", "mark"),
            ("Reason", "words"),
        ),
        rows=rows,
    )


def simulated_section(played: Played | None, names: Mapping[str, str], level: float, note: str) -> PageSection:
    """Returns a section with the returns of policies in simulation."""
    if played is None:
        return PageSection(title="Simulation")
    names = {RANDOM: "Random actions", **names}
    columns: tuple[Column, ...] = (
        ("Policy", "name"),
        ("Return", "number"),
        ("Discounted return", "number"),
        (f"Return of {names[MODEL].lower()} minus this", "number"),
        ("Mean length in steps", "number"),
        ("Cut by the time limit", "share"),
    )
    differences = {key: earned.total for key, earned in played.differences.items()}
    table = Table(
        title=f"Means per episode with {percent(level)} intervals",
        columns=columns,
        rows=[
            (names[key], policy.total, policy.discounted, differences.get(key), policy.length, policy.cut_share)
            for key, policy in played.policies.items()
        ],
        note="The return of an episode is the sum of its rewards; in the discounted return later rewards count less.",
    )
    return PageSection(title="Simulation", notes=(note,), tables=(table,), in_brief=1)


def weights_section(overlap: Overlap | None, enough: float) -> PageSection:
    """Returns a section with the diagnostics of importance weights.

    Args:
        overlap: the overlap of the evaluation; None if nothing was scored or rows have no weights.
        enough: evaluation.min_effective_episodes.
    """
    title = "Weights and overlap"
    if overlap is None:
        return PageSection(title=title)
    step = overlap.effective_horizon
    several = overlap.horizon > 1
    shares = {
        "Largest share of one row": overlap.largest_row_share,
        **({"Largest share of one episode": overlap.largest_episode_share} if several else {}),
        "Rows logged with probability 1 where the policy may choose otherwise": overlap.unsupported_share,
        "Decisions that the policy takes otherwise than the log": overlap.changed_share,
        "Episodes cut before their end": overlap.cut_share,
    }
    by_episode: tuple[tuple[str, Cell], ...] = (
        (f"Effective episodes at step {step}", overlap.effective_episodes),
        ("Mean weight of an episode there, should be 1", overlap.mean_episode_weight),
        ("Steps with enough effective episodes", f"{overlap.horizon_reached} of {overlap.horizon}"),
    )
    facts: tuple[tuple[str, Cell], ...] = (
        ("Episodes scored", overlap.num_episodes),
        ("Rows scored", overlap.num_rows),
        *(
            ()
            if overlap.effective_sample is None
            else (("Effective rows of the log, by weight", overlap.effective_sample),)
        ),
        ("Effective rows", overlap.effective_rows),
        ("Rows whose action the policy may choose", overlap.matched_rows),
        ("Mean weight of a row, should be 1", overlap.mean_weight),
        *(by_episode if several else ()),
        *((name, percent(share)) for name, share in shares.items()),
    )
    note = (
        "Weighted estimates use the actions that the log has tried. Effective rows: number of equally weighted rows "
        "with the same information."
    )
    if several:
        note += f" A return is evaluated at step {step}, by which 95% of discounted time has passed."
    by_step = (
        ("effective episodes", overlap.effective_episodes_by_step, (enough, f"enough: {number(enough)}")),
        ("mean weight", overlap.mean_weight_by_step, (1.0, "should be 1")),
    )
    charts = []
    for name, values, mark in by_step if several else ():
        points = thin([(float(step), value) for step, value in enumerate(values)], _MOST_POINTS)
        lines = (Line(name=name, points=points),)
        chart_title = f"{name.capitalize()} by step"
        charts.append(curve_chart(Curves(title=chart_title, x="step of the episode", y=name, lines=lines, mark=mark)))
    notes = [note]
    tables = []
    if overlap.calibration is not None:
        sentence = str(overlap.calibration)
        notes.append(f"{sentence[:1].upper()}{sentence[1:]}.")
        tables.append(_calibration_table(overlap.calibration))
    return PageSection(title=title, notes=tuple(notes), charts=tuple(charts), facts=facts, tables=tuple(tables))


def _calibration_table(calibration: Calibration) -> Table:
    return Table(
        title="Calibration of the estimated propensities, the groups that deviate most",
        columns=(
            ("Action", "name"),
            ("Choices", "name"),
            ("Logged", "number"),
            ("Expected", "number"),
            ("z", "number"),
        ),
        rows=[
            (group.action or "candidates", group.rows, group.observed, group.expected, group.z)
            for group in calibration.largest
        ],
    )


def actions_section(shares: Shares, where: str) -> PageSection:
    """Returns a section with the shares of named actions on evaluated rows; `where` names the file with all of them."""
    names = ("Log", "Learned policy's choice", "Mean propensity of the evaluated policy")
    used = [column for column in range(3) if any(values[column] is not None for values in shares.values())]
    shown = list(shares.items())[:_MOST_ACTIONS]
    bars: tuple[Column, ...] = tuple((names[column], "bar") for column in used)
    table = Table(
        title="Shares of actions on evaluated rows",
        columns=(("Action", "name"), *bars),
        rows=[(name, *(values[column] for column in used)) for name, values in shown],
        note=note_omitted(len(shares) - len(shown), "actions", where),
    )
    return PageSection(title="Actions", tables=(table,) if shares else ())


def candidates_section(document: Mapping[str, Any] | None, where: str) -> PageSection:
    """Returns a section on the choices among candidates, which have features instead of names.

    Args:
        document: result of evaluation.candidates.tally; None or empty if nothing was counted.
        where: name of the file with the complete figures.
    """
    if not document or not document["rows"]:
        return PageSection(title="Actions")
    shares = {
        "Rows in which the policy's likeliest candidate is the logged one": document["same"],
        "Mean propensity of the logged candidate": document["propensity"],
        "The policy's mean probability of the logged candidate": document["probability"],
    }
    features = sorted(document["features"].items(), key=lambda item: -abs(item[1]["difference"] or 0.0))
    shown = features[:_MOST_FEATURES]
    lengths: list[tuple[str, float]] = sorted(document["candidates"].items(), key=lambda item: int(item[0].split()[0]))
    items: Mapping[str, Mapping[str, float]] = document.get("items", {})
    named = list(items.items())[:_MOST_ACTIONS]
    tables = (
        Table(
            title="Shares of items on evaluated rows, most chosen first",
            columns=(("Item", "name"), ("Log", "bar"), ("Mean propensity of the evaluated policy", "bar")),
            rows=[(name, shares_of["logged"], shares_of["policy"]) for name, shares_of in named],
            note=note_omitted(len(items) - len(named), "items", where),
        ),
        Table(
            title="Features of chosen candidates, largest difference first",
            columns=(
                ("Feature", "name"),
                ("Log: mean (standard deviation)", "number"),
                ("Policy: mean (standard deviation)", "number"),
                ("Difference", "number"),
            ),
            rows=[
                (name, _moments(feature["logged"]), _moments(feature["policy"]), feature["difference"])
                for name, feature in shown
            ],
            note=note_omitted(len(features) - len(shown), "features", where),
        ),
        Table(
            title="Probability of the logged candidate, under the log and under the policy",
            columns=(
                ("Logged propensity", "name"),
                ("Share of rows", "share"),
                ("Mean propensity", "share"),
                ("The policy's mean probability", "share"),
            ),
            rows=[
                (f"{row['low']:.0%} to {row['high']:.0%}", row["rows"], row["propensity"], row["policy"])
                for row in document["by_propensity"]
            ],
        ),
        Table(
            title="Candidates to choose from",
            columns=(("Number of candidates", "name"), ("Share of rows", "share")),
            rows=lengths,
        ),
    )
    known_by = "Items are known by their features, which" if items else "Candidates have no names: their features"
    note = f"{known_by} show how the policy's choices differ from the log's. A difference of 1 is a standard deviation."
    facts = ((name, format_cell(share, "share")) for name, share in shares.items() if share is not None)
    return PageSection(
        title="Actions",
        notes=(note,),
        facts=(("Rows counted", document["rows"]), *facts),
        tables=tuple(table for table in tables if table.rows),
    )


def _moments(feature: Mapping[str, float | None]) -> str:
    return f"{number(feature['mean'])} ({number(feature['stddev'])})"


def _words(name: str) -> str:
    return name.replace("_", " ")
