"""The page of a rollout: a sentence, the bands of the differences over units, figures and events; without torch."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from reagent_lite.errors import pluralize
from reagent_lite.evaluation.interval import Interval, number, percent
from reagent_lite.report.charts import Curves, Line, curve_chart
from reagent_lite.report.content import Cell, Chart, Table
from reagent_lite.report.templates import fill_template

_KINDS: Final = {
    "better": ("good", "✓"), "worse": ("bad", "✕"), "invalid": ("bad", "✕"), "not told apart": ("unclear", "?"),
}  # fmt: skip
_STATES: Final = {
    "running": "The rollout runs",
    "stopped": "The rollout was stopped, and the current model decides alone",
    "promoted": "The new model was promoted, and decides alone",
    "superseded": "Another rollout has taken the place of this one",
}
_REFRESH_SECONDS = 30
_SHOWN = 20  # times the first number of units in a chart is the last one
_NO_INTERVAL = "The interval is not known yet."
_SHARE_AFTER: Final = {"stopped": 0.0, "promoted": 1.0}
_HOW_COMPARED = (
    "A unit is an episode, or a decision without one. The difference is not that of the two means: units in which both "
    "models decide alike add nothing to it, and the others count by how likely each model was to have them."
)


def render_rollout(document: Mapping[str, Any], *, refreshes: bool = True) -> str:
    """Returns the page as an HTML document that makes no other request.

    Args:
        document: the rollout as GET /rollout.json has it.
        refreshes: whether it loads itself again, which closes its tables and loses the place of the keyboard.
    """
    comparison = document.get("comparison")
    kind, sign = _KINDS[comparison["decision"] if comparison else "not told apart"]
    sentence = comparison["sentence"] if comparison and comparison["units"] else "No unit has been compared yet"
    differences = comparison["differences"] if comparison else []
    history = comparison["history"] if comparison else []
    columns = [("Time", "mark"), ("Event", "name"), ("Share", "share"), ("Cause", "words")]
    events = [
        (event["time"].replace("T", " ")[:16] + " UTC", event["event"], event["share"], event["cause"])
        for event in reversed(document["events"][-50:])
    ]
    return fill_template(
        "rollout.html.j2",
        title="Rollout of a new model",
        seconds=_REFRESH_SECONDS if refreshes else 0,
        kind=kind,
        sign=sign,
        sentence=sentence,
        more=list(_sentences(document)),
        figures=list(_facts(document)),
        charts=[chart for each in differences if (chart := _chart(each, history)) is not None],
        how=[_HOW_COMPARED],
        differences=_table(differences),
        events=Table(title="What happened, the newest first", columns=tuple(columns), rows=events),  # type: ignore[arg-type]
    )


def _sentences(document: Mapping[str, Any]) -> Iterator[str]:
    yield f"{_STATES[document['state']]}, since {document['events'][-1]['time'].replace('T', ' ')[:16]} UTC."
    comparison = document.get("comparison")
    if not comparison or not comparison["units"]:
        yield "Decisions are compared once they are in a file of the log with their rewards, after reward_seconds."
        return
    for name in document["unmeasured"]:
        yield f"No decision has the metric {name} yet, so that its limit cannot be exceeded: check its name."
    reward = comparison["differences"][0]
    if reward["low"] is None and reward["high"] is None:
        yield _NO_INTERVAL
    days = (document["last"] - document["first"]) / 86_400e6
    if reward["units_to_go"] and days > 0:
        left = reward["units_to_go"] / comparison["units"] * days
        unit = pluralize(round(left), "day") if left >= 2 else f"{max(24 * left, 0.1):,.1f} hours"
        yield f"At the present rate the difference would be known in about {unit}."


def _facts(document: Mapping[str, Any]) -> Iterator[tuple[str, Cell]]:
    yield "Share of the new model", percent(_SHARE_AFTER.get(document["state"], document["share"]))
    comparison = document.get("comparison")
    if comparison:
        yield "Units compared", comparison["units"]
        yield "Units of the new model", f"{comparison['units_new']:,} ({comparison['expected_new']:,.1f} expected)"
        yield "Units in which the models differ", comparison["differing_units"]
        yield "Units that wait", document["waiting_units"]
        if document["late_rows"]:
            yield "Decisions of ended episodes, not compared", document["late_rows"]
    if document.get("first"):
        yield "First decision", _time(document["first"])
        yield "Last compared decision", _time(document["last"])
    yield "Current model", document["current"][:12]
    yield "New model", document["new"][:12]
    yield "Id in the log", document["rollout"]


def _time(microseconds: int) -> str:
    return f"{datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=microseconds):%Y-%m-%d %H:%M} UTC"


def _chart(difference: Mapping[str, Any], history: Sequence[Mapping[str, Any]]) -> Chart | None:
    """Returns the band of a difference over units; None before it is known."""
    points = [
        each for each in history
        if each["name"] == difference["name"] and None not in (each["value"], each["low"], each["high"])
    ]  # fmt: skip
    if not points:
        return None
    points = [each for each in points if each["units"] * _SHOWN >= points[-1]["units"]]  # earlier bands are far wider
    limit = difference["limit"]
    line = Line(
        name="difference, and the interval that holds at every moment",
        points=tuple((each["units"], each["value"]) for each in points),
        band=tuple((each["low"], each["high"]) for each in points),
    )
    mark = (0.0, "no difference") if limit is None else (limit, "limit")
    title = f"{difference['name'].capitalize()} per unit"
    return curve_chart(Curves(title=title, x="units compared", y="difference", lines=(line,), mark=mark))


def _table(differences: Sequence[Mapping[str, Any]]) -> Table:
    columns = (("Outcome", "name"), ("Current", "number"), ("New", "number"), ("Difference", "number"),
               ("Limit", "number"), ("Interval by", "name"), ("Level", "number"))  # fmt: skip
    rows = []
    for each in differences:
        ends = (float("nan") if each[name] is None else each[name] for name in ("value", "low", "high"))
        value, low, high = ends
        interval = Interval(value=value, low=low, high=high)
        limit = "" if each["limit"] is None else number(each["limit"])
        rows.append((each["name"], each["current"], each["new"], interval, limit, each["method"], each["level"]))
    return Table(title="Per unit, with intervals that hold at every moment", columns=columns, rows=rows)  # type: ignore[arg-type]
