"""A report as a self-contained HTML document."""

from typing import Any

from reagent_lite.evaluation.decision import Choice, ShipDecision
from reagent_lite.report.content import Report
from reagent_lite.report.templates import fill_template

_STATES = {
    Choice.SHIP: ("good", "✓"),
    Choice.DO_NOT_SHIP: ("bad", "✕"),
    Choice.NOT_ENOUGH: ("unclear", "?"),
    Choice.DISCUSS: ("unclear", "?"),
}


def render(report: Report) -> str:
    """Returns the page as an HTML document without scripts or requests; all text is escaped."""
    sections = [section for section in report.sections if section]
    return render_template("page.html.j2", report.decision, report=report, sections=sections)


def render_template(template: str, decision: ShipDecision | None, **figures: Any) -> str:
    """Returns a rendered template of this folder; it gets the CSS class and the sign of the decision."""
    state, sign = ("", "") if decision is None else _STATES[decision.choice]
    return fill_template(template, state=state, sign=sign, **figures)
