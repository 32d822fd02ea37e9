"""Learning curves of a run, from metrics.jsonl."""

import json
import math
from pathlib import Path

from reagent_lite.report.charts import Curves, Line, curve_chart, thin
from reagent_lite.report.content import PageSection, note_omitted

Series = dict[str, list[tuple[float, float]]]
"""{tag: (step, value) ascending in step}; the later value counts if a step has two."""

_MOST_CHARTS = 24
_MOST_POINTS = 500  # of a curve: a chart is not wider on a screen
_HELD_POINTS = 5000  # of a tag while reading: all points of a long run would not fit into memory
_STEPS = "optimizer steps"
_ESTIMATES = "CPE/Reward/"
_ONE_STEP = "_Reward"  # suffix of estimates of a row's reward; the others estimate returns
_RETURN = "Return in simulation"
_FINAL = ("CPE/", "td_loss/", "value/", "reward/", "reward_loss/", "actions/", "simulation/")
"""Tags whose last value is that of the final evaluation: of all rows instead of a sample, of other episodes, or after a
longer fit."""
_TOGETHER = {
    _RETURN: (
        "return per episode",
        {
            "simulation/return/mean": "learned policy",
            "simulation/training_return/mean": "episodes that ended while learning",
        },
    ),
    "TD loss": (
        "loss",
        {
            "train/td_loss": "while learning",
            "td_loss/mean": "evaluated rows",
            "validation/td_loss/mean": "validation rows",
        },
    ),
    "Value": (
        "discounted return",
        {"value/logged/mean": "logged choices", "value/model/mean": "learned policy's choices"},
    ),
    "Loss of the reward model": ("loss", {"reward_loss/mean": "while fitting it"}),
}
"""Charts of several tags: {title: (unit, {tag: name of its line})}."""


def read_series(file: Path) -> Series:
    """Returns every tag's finite values; for a long run, only the lowest and highest in equal intervals of steps.

    Returns {} if there is no file. Incomplete lines, as after a loss of power, are left out.
    """
    series: dict[str, dict[float, float]] = {}
    if not file.is_file():
        return {}
    with file.open("rb") as lines:
        for step, scalars in filter(None, map(_parsed_line, lines)):
            for tag, value in scalars.items():
                if math.isfinite(value):
                    values = series.setdefault(tag, {})
                    values[step] = value
                    if len(values) > _HELD_POINTS:
                        series[tag] = dict(thin(sorted(values.items()), _MOST_POINTS))
    return {tag: sorted(values.items()) for tag, values in series.items()}


def _parsed_line(line: bytes) -> tuple[float, dict[str, float]] | None:
    """Returns the step and the values of a line, or None if it is incomplete."""
    try:
        scalars = {tag: float(value) for tag, value in json.loads(line).items() if value is not None}
        return scalars.pop("step"), scalars
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def last(series: Series, tag: str) -> float | None:
    """Returns a tag's last value, or None."""
    return series[tag][-1][1] if series.get(tag) else None


def curves_section(series: Series) -> PageSection:
    """Returns the charts of a run."""
    curves = curves_of(series)
    rest = note_omitted(len(curves) - _MOST_CHARTS, "curves", "metrics.jsonl")
    return PageSection(title="Learning curves", charts=tuple(map(curve_chart, curves[:_MOST_CHARTS])), rest=(rest,))


def curves_of(series: Series) -> tuple[Curves, ...]:
    """Returns the curves of each chart; tags with a single value are left out."""
    curved = {tag: points for tag, points in series.items() if len(points) > 1}
    charts = []
    for title, (unit, names) in _TOGETHER.items():
        tags = {tag: name for tag, name in names.items() if tag in curved}
        for tag in curved:  # with several types of agents: simulation/<type>/return/mean
            group, *rest = tag.split("/")
            tag_of_all = "/".join((group, *rest[1:]))
            if group == "simulation" and len(rest) == 3 and tag_of_all in names:
                tags[tag] = f"{rest[0]}: {names[tag_of_all]}"
        lines = tuple(_line(name, tag, curved) for tag, name in tags.items())
        mark = _mark("random actions", "simulation/random_return/mean", series) if title == _RETURN else None
        charts.append(Curves(title=title, x=_STEPS, y=unit, lines=lines, mark=mark))
    by_action = {tag: points for tag, points in curved.items() if tag.endswith("/mean") and tag.count("/") > 2}
    estimates = {
        tag: points
        for tag, points in curved.items()
        if tag.startswith(_ESTIMATES) and tag.count("/") == 2 and not tag.endswith((_ONE_STEP, "Logged_Return"))
    }
    logged = _mark("logged policy", f"{_ESTIMATES}Logged_Return", series)
    reward = _mark("logged rewards", "reward/logged/mean", series)
    charts += [
        _by_name("Learned policy's actions", "share of evaluated rows", "actions/model/", curved),
        _by_name("Value by action", "discounted return", "value/model/", by_action),
        _by_name("Reward model by action", "mean reward", "reward/model/", by_action, reward),
        _by_name("Estimated discounted return per episode", "discounted return", _ESTIMATES, estimates, logged),
    ]
    used = {tag for _, names in _TOGETHER.values() for tag in names}
    for tag in sorted(curved):
        changes = len({value for _, value in curved[tag]}) > 1  # constant settings are in the config
        if tag.startswith("train/") and tag not in used and changes:
            name = tag.removeprefix("train/").replace("_", " ")
            charts.append(Curves(title=name.capitalize(), x=_STEPS, y=name, lines=(_line(name, tag, curved),)))
    charts.append(_by_name("Time by part since the point before", "seconds", "time/", curved))
    return tuple(chart for chart in charts if chart.lines)


def _by_name(title: str, unit: str, prefix: str, curved: Series, mark: tuple[float, str] | None = None) -> Curves:
    """Returns a chart of all tags with a prefix, ordered by their last value, largest first."""
    tags = sorted((tag for tag in curved if tag.startswith(prefix)), key=lambda tag: -curved[tag][-1][1])
    names = [tag.removeprefix(prefix).removesuffix("/mean") for tag in tags]
    if prefix == _ESTIMATES:
        names = [name.replace("_", " ") for name in names]
    lines = tuple(_line(name, tag, curved) for name, tag in zip(names, tags, strict=True))
    return Curves(title=title, x=_STEPS, y=unit, lines=lines, mark=mark)


def _line(name: str, tag: str, curved: Series) -> Line:
    points = thin(curved[tag], _MOST_POINTS)
    low, high = (dict(curved.get(tag.replace("/mean", end), [])) for end in ("/lower", "/upper"))
    band = tuple((low.get(x, value), high.get(x, value)) for x, value in points)  # of no width if undefined
    final = tag.startswith(_FINAL) and "training_return" not in tag
    return Line(name=name, points=points, band=band if low and tag.endswith("/mean") else (), final=final)


def _mark(name: str, tag: str, series: Series) -> tuple[float, str] | None:
    value = last(series, tag)
    return None if value is None else (value, name)
