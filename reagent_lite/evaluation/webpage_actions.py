"""The report page's section on choices: shares of named actions, or features of the candidates that are chosen."""

from reagent_lite.evaluation.charts import MOST_BARS, bar_chart
from reagent_lite.evaluation.webpage_candidates import Candidates
from reagent_lite.evaluation.webpage_content import Report, number, percent
from reagent_lite.evaluation.webpage_table import facts, more, table

_MOST_ACTIONS = 200
_MOST_FEATURES = 100  # of candidates, those that differ most


def actions(report: Report) -> str:
    """Returns the section's body, empty where nothing is known of choices."""
    return _named(report) + ("" if report.candidates is None else _candidates(report.candidates, report.beside))


def _named(report: Report) -> str:
    if not report.actions:
        return ""
    rows = [(one.name, percent(one.logged), percent(one.greedy), percent(one.propensity)) for one in report.actions]
    head = ("Action", "Log", "Learned policy's choice", "Mean propensity of the evaluated policy")
    used = [place for place in range(3) if any(row[place + 1] != "–" for row in rows)]
    legend = "".join(
        f'<li><svg class="swatch" viewBox="0 0 34 12" aria-hidden="true"><rect class="bar b{place}" x="1" y="2" '
        f'width="32" height="8"/></svg>{head[place + 1]}</li>'
        for place in used
    )
    columns = (0, *(place + 1 for place in used))
    kept = [tuple(row[column] for column in columns) for row in rows]
    most = f"<p>The {MOST_BARS} most frequent are drawn.</p>" if len(rows) > MOST_BARS else ""
    return (
        f'<div class="cards"><figure class="card">{bar_chart(report.actions)}<ul class="legend">{legend}</ul>{most}'
        f"</figure></div>"
        + table("Shares of actions on judged rows", [head[column] for column in columns], kept[:_MOST_ACTIONS],
                figures=(1, 2, 3))
        + more(len(kept) - _MOST_ACTIONS, "actions", report.beside)
    )  # fmt: skip


def _candidates(found: Candidates, beside: str) -> str:
    summary = (
        ("Rows counted", f"{found.rows:,}"),
        ("Rows in which the policy's likeliest candidate is the logged one", percent(found.same)),
        ("Mean propensity of the logged candidate", percent(found.propensity)),
        ("The policy's mean probability of it", percent(found.policy)),
    )
    return (
        "<p>Candidates have no names. What the log chose and what the policy would choose is told apart by their "
        "features; a difference of one is a standard deviation.</p>"
        + facts([one for one in summary if one[1] != "–"]) + _features(found, beside) + _bins(found)
        + table("Candidates to choose from", ("Number of candidates", "Share of rows"),
                [(name, percent(share)) for name, share in found.lengths], figures=(1,))
    )  # fmt: skip


def _features(found: Candidates, beside: str) -> str:
    rows = [
        (one.name, _mean(one.logged), _mean(one.policy), number(one.difference))
        for one in found.features[:_MOST_FEATURES]
    ]
    if not rows:
        return ""
    head = ("Feature", "Log: mean (standard deviation)", "Policy: mean (standard deviation)", "Difference")
    caption = "Features of chosen candidates, largest difference first"
    return table(caption, head, rows, figures=(1, 2, 3)) + more(len(found.features) - len(rows), "features", beside)


def _mean(figure: tuple[float | None, float | None]) -> str:
    return f"{number(figure[0])} ({number(figure[1])})"


def _bins(found: Candidates) -> str:
    rows = [
        (f"{one.low:.0%} to {one.high:.0%}", percent(one.rows), percent(one.propensity), percent(one.policy))
        for one in found.bins
    ]
    if not rows:
        return ""
    head = ("Logged propensity", "Share of rows", "Mean propensity", "The policy's mean probability")
    return table("Probability of the logged candidate, under the log and under the policy", head, rows,
                 figures=(1, 2, 3))  # fmt: skip
