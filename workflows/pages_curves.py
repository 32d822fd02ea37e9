"""Learning curves of the report page, from metrics.jsonl."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

from reagent_lite.evaluation.charts import thinned
from reagent_lite.evaluation.webpage_content import Curves, Line

MOST_POINTS = 500  # of a curve: more than a screen has columns for it
_HELD_POINTS = 5000  # of a tag while reading: a run that reports every step would not fit

Series = dict[str, list[tuple[float, float]]]
"""{tag: (step, value) ascending in step}; of two values at one step the later."""

_STEPS = "optimizer steps"
_ESTIMATES = "CPE/Reward/"
_ONE_STEP = "_Reward"  # how names of estimates of a row's reward end; the others are of returns
_DRAWN = {
    "simulation/return/mean": "learned policy",
    "simulation/training_return/mean": "episodes that ended while learning",
    "train/td_loss": "while learning",
    "td_loss/mean": "judged rows",
    "value/logged/mean": "logged choices",
    "value/model/mean": "learned policy's choices",
    "reward_loss/mean": "while fitting it",
}
_TOGETHER = {
    "Return in simulation": ("return", ("simulation/return/mean", "simulation/training_return/mean")),
    "TD loss": ("loss", ("train/td_loss", "td_loss/mean")),
    "Value": ("mean q", ("value/logged/mean", "value/model/mean")),
    "Loss of the reward model": ("loss", ("reward_loss/mean",)),
}


def read_series(file: Path) -> Series:
    """Returns every tag's values, without those that are not numbers, of long runs the lowest and highest of stretches.

    Where there is no file, there are none.
    """
    found: dict[str, dict[float, float]] = {}
    if not file.is_file():
        return {}
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            scalars = json.loads(line)
            step = float(scalars.pop("step"))
            for tag, value in scalars.items():
                if value is not None and math.isfinite(value):
                    values = found.setdefault(tag, {})
                    values[step] = float(value)
                    if len(values) > _HELD_POINTS:
                        found[tag] = dict(thinned(sorted(values.items()), MOST_POINTS))
    return {tag: sorted(values.items()) for tag, values in found.items()}


def curves_of(series: Series) -> tuple[Curves, ...]:
    """Returns the charts of a run; a tag with one value is no curve."""
    curved = {tag: points for tag, points in series.items() if len(points) > 1}
    charts = []
    for title, (unit, tags) in _TOGETHER.items():
        lines = tuple(_line(_DRAWN[tag], tag, curved) for tag in tags if tag in curved)
        mark = _mark("random actions", series.get("simulation/random_return/mean")) if unit == "return" else None
        charts.append(Curves(title=title, x=_STEPS, y=unit, lines=lines, mark=mark))
    charts.append(_by_name("Learned policy's actions", "share of judged rows", "actions/model/", curved))
    charts.append(_by_name("Value by action", "mean q", "value/model/", _by_action(curved)))
    reward = _mark("logged rewards", series.get("reward/logged/mean"))
    charts.append(_by_name("Reward model by action", "mean reward", "reward/model/", _by_action(curved), reward))
    estimates = {
        tag: points
        for tag, points in curved.items()
        if tag.startswith(_ESTIMATES) and tag.count("/") == 2 and not tag.endswith((_ONE_STEP, "Logged_Return"))
    }
    logged = _mark("logged policy", series.get(f"{_ESTIMATES}Logged_Return"))
    charts.append(_by_name("Estimated return of an episode", "return", _ESTIMATES, estimates, logged))
    used = {tag for _, tags in _TOGETHER.values() for tag in tags}
    for tag in sorted(curved):
        changes = len({value for _, value in curved[tag]}) > 1  # what stays the same is in the config
        if tag.startswith("train/") and tag not in used and changes:
            name = tag.removeprefix("train/").replace("_", " ")
            charts.append(Curves(title=name.capitalize(), x=_STEPS, y=name, lines=(_line(name, tag, curved),)))
    charts.append(_by_name("Time by part since the point before", "seconds", "time/", curved))
    return tuple(chart for chart in charts if chart.lines)


def _by_name(title: str, unit: str, prefix: str, curved: Series, mark: tuple[float, str] | None = None) -> Curves:
    """Returns a chart of all tags that begin so, the largest at the end first."""
    tags = sorted((tag for tag in curved if tag.startswith(prefix)), key=lambda tag: -curved[tag][-1][1])
    lines = tuple(_line(tag.removeprefix(prefix).removesuffix("/mean"), tag, curved) for tag in tags)
    return Curves(title=title, x=_STEPS, y=unit, lines=lines, mark=mark)


def _by_action(curved: Series) -> Series:
    """Returns the tags `.../{action}/mean`; an action's name may hold any letters."""
    return {tag: points for tag, points in curved.items() if tag.endswith("/mean") and tag.count("/") > 2}


def _line(name: str, tag: str, curved: Series) -> Line:
    points = thinned(curved[tag], MOST_POINTS)
    low, high = (dict(curved.get(tag.replace("/mean", end), [])) for end in ("/lower", "/upper"))
    band = tuple((low[x], high[x]) for x, _ in points if x in low and x in high)
    return Line(name=name, points=points, band=band if len(band) == len(points) and low is not high else ())


def _mark(name: str, points: Sequence[tuple[float, float]] | None) -> tuple[float, str] | None:
    return (points[-1][1], name) if points else None
