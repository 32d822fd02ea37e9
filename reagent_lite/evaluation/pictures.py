"""A run as pictures beside the model: the learning curve as PNG, one episode as an animated GIF.

matplotlib and Pillow are the extra `pictures`, imported where they are used: the learner runs without them. Figures are
made without pyplot, so that there is no display, no global figure and no window to leak.
"""

import io
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from reagent_lite.errors import ConfigError, DataError, Problem
from reagent_lite.evaluation.pictures_scenes import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PALE,
    PURPLE,
    SKY,
    VERMILION,
    Moving,
    Trace,
    scene_of,
)
from reagent_lite.files import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from PIL.Image import Image

__all__ = ["LearningCurve", "Trace", "curve_points", "learning_curve", "require_pictures", "rollout_frames",
           "write_learning_curve", "write_rollout"]  # fmt: skip

Array = NDArray[np.float64]

_DPI = 100
_WIDTH, _HEADER, _FOOTER, _VALUES = 480, 32, 32, 92  # pixels of a frame
_LAST_FRAME_SECONDS = 2.0  # how it ended is read before the loop starts again
_MOST_NAMES = 12  # names of choices that fit side by side
_FEW_POINTS = 40  # so few are marked: a line through one point does not show


def require_pictures() -> None:
    """Makes sure that pictures can be drawn, before a long run rather than after it.

    Raises:
        ConfigError: when matplotlib or Pillow cannot be imported; says how to install them.
    """
    try:
        import matplotlib.backends.backend_agg  # noqa: F401
        import PIL.GifImagePlugin  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            Problem(
                "simulation.pictures",
                "matplotlib and Pillow, which draw them",
                str(error),
                "Run: pip install 'reagent-lite[pictures]', or set it to false",
            )
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningCurve:
    """What a run wrote down while it learned.

    Attributes:
        unit: what `x` counts.
        evaluation: [n, 4] x, mean return, lower and upper end of its interval; NaN where there is no interval.
        training: [n, 2] x, mean return of the episodes that were learned from.
        loss: [n, 2] x, TD loss.
    """

    unit: str
    evaluation: Array
    training: Array
    loss: Array


def curve_points(metrics: Path) -> LearningCurve:
    """Reads a run's metrics.jsonl: an object a line with `step` and numbers by tag; other tags are passed over.

    x counts environment steps where the run wrote them; a line without them gets them by interpolation over `step`. It
    counts optimizer steps otherwise. Of lines for the same step the last counts: the final evaluation plays episodes
    that no earlier one has used. A last line without its end, of a run that was killed, is passed over.

    Raises:
        DataError: naming the line that is not such an object.
    """
    lines = [_parse(metrics, number, line) for number, line in _whole_lines(metrics)]
    known = _rows(lines, "simulation/env_steps")
    unit = "environment steps" if len(known) else "optimizer steps"

    def series(*tags: str) -> Array:
        rows = _rows(lines, *tags)
        if len(known):
            rows[:, 0] = np.interp(rows[:, 0], known[:, 0], known[:, 1])
        return rows

    returns = "simulation/return/"
    return LearningCurve(
        unit=unit,
        evaluation=series(returns + "mean", returns + "lower", returns + "upper"),
        training=series("simulation/training_return/mean"),
        loss=series("train/td_loss"),
    )


def write_learning_curve(
    file: Path,
    points: LearningCurve,
    *,
    title: str,
    behaviour: float | None,
    behaviour_name: str = "behaviour policy",
) -> None:
    """Writes the learning curve as PNG; the file appears whole or not at all.

    Args:
        file: where to.
        points: from `curve_points`.
        title: names the environment.
        behaviour: mean return of the policy that is to be beaten, None where there is none.
        behaviour_name: what the legend calls that policy.
    """
    data = io.BytesIO()
    with _defaults():
        # without the program's version the same run gives the same bytes
        figure = learning_curve(points, title=title, behaviour=behaviour, behaviour_name=behaviour_name)
        figure.savefig(data, format="png", metadata={"Software": None})
    write_whole(file, data.getvalue())


def learning_curve(
    points: LearningCurve, *, title: str, behaviour: float | None, behaviour_name: str = "behaviour policy"
) -> "Figure":
    """Returns the learning curve: returns above, TD loss in a lower panel where there is one.

    1080 pixels wide, letters as large as a telephone needs.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, MaxNLocator

    with_loss = len(points.loss) > 0
    figure = Figure(figsize=(5.4, 4.9 if with_loss else 3.8), dpi=200, layout="constrained")
    figure.suptitle(title, fontsize=13, fontweight="bold")
    panels = figure.subplots(1 + with_loss, sharex=True, squeeze=False, height_ratios=[3, 1][: 1 + with_loss])[:, 0]
    for axes in panels:
        axes.grid(color=PALE, linewidth=0.7)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=10)
    _draw_returns(panels[0], points)
    if behaviour is not None:
        panels[0].axhline(behaviour, color=BLACK, linewidth=1.5, linestyle="--", label=behaviour_name)
    if panels[0].get_legend_handles_labels()[0]:
        panels[0].legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False, fontsize=10, borderpad=0.1,
                         handlelength=1.5, columnspacing=1.2)  # fmt: skip
    if with_loss:
        _draw_loss(panels[1], points.loss)
    panels[-1].set_xlabel(points.unit, fontsize=11)
    panels[-1].xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    panels[-1].xaxis.set_major_formatter(EngFormatter(sep=""))
    figure.align_ylabels(list(panels))
    return figure


def write_rollout(file: Path, trace: Trace, *, frames_per_second: int = 25, most_frames: int = 300) -> None:
    """Writes an episode as an animated GIF that loops; the file appears whole or not at all.

    Args:
        file: where to.
        trace: the episode.
        frames_per_second: up to 50, beyond which viewers slow down; GIF rounds a frame to 1/100 s.
        most_frames: at least 2; a longer episode is shown by as many of its states, evenly spaced, the first and the
            last among them.
    """
    frames = list(rollout_frames(trace, most_frames=most_frames))
    duration = [max(2, round(100 / frames_per_second)) * 10] * len(frames)  # milliseconds
    duration[-1] = round(1000 * _LAST_FRAME_SECONDS)
    data = io.BytesIO()
    frames[0].save(data, format="GIF", save_all=True, append_images=frames[1:], duration=duration, loop=0)
    write_whole(file, data.getvalue())


def rollout_frames(trace: Trace, *, most_frames: int) -> Iterator["Image"]:
    """Yields the frames of an episode, 480 pixels wide, with one palette.

    Only what moves is painted again: [measured] the GIF of 200 steps of cartpole with values takes 1.4 s on one core,
    5.4 s and twice the bytes through matplotlib's own PillowWriter.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from PIL import Image

    scene = scene_of(trace)
    below = _FOOTER + (_VALUES if trace.q is not None and trace.num_steps else 0)
    height = _HEADER + scene.height + below
    palette = Image.new("P", (1, 1))
    palette.putpalette(_palette())
    with _defaults():
        figure = Figure(figsize=(_WIDTH / _DPI, height / _DPI), dpi=_DPI)
        canvas: Any = FigureCanvasAgg(figure)  # its methods have no types
        left, bottom, right = scene.margin
        box = (left, below + bottom, _WIDTH - left - right, scene.height - bottom)
        moving = scene.draw(figure.add_axes(_fractions(box, height)), trace)
        parts = [moving, draw_captions(figure, trace, scene.ending)]
        if below > _FOOTER:
            parts.append(draw_values(figure.add_axes(_fractions((20, _FOOTER + 18, _WIDTH - 40, 50), height)), trace))
        artists = [artist for part in parts for artist in part.artists]
        for artist in artists:
            artist.set_animated(True)
        canvas.draw()
        still = canvas.copy_from_bbox(figure.bbox)
        last = trace.num_steps
        for step in np.linspace(0, last, min(last + 1, most_frames)).round().astype(int).tolist():
            canvas.restore_region(still)
            for part in parts:
                part.show(step)
            for artist in artists:
                figure.draw_artist(artist)
            picture = Image.frombytes("RGBA", (_WIDTH, height), bytes(canvas.buffer_rgba()))
            yield picture.convert("RGB").quantize(palette=palette, dither=Image.Dither.NONE)


def _whole_lines(metrics: Path) -> list[tuple[int, str]]:
    lines = metrics.read_text(encoding="utf-8").splitlines(keepends=True)
    return [(i, line) for i, line in enumerate(lines, start=1) if line.endswith("\n") and line.strip()]


def _parse(metrics: Path, number: int, line: str) -> dict[str, Any]:
    try:
        tree = json.loads(line)
        if isinstance(tree, dict) and isinstance(tree["step"], int):
            return tree
    except (ValueError, KeyError):
        pass
    raise DataError(Problem(f"{metrics}:{number}", 'an object with "step"', line.strip()[:80]))


def _rows(lines: list[dict[str, Any]], first: str, *others: str) -> Array:
    """Returns [n, 2 + others] step and values of the lines that have the first tag; NaN for another that is missing."""
    rows = {
        line["step"]: (line["step"], _number(line, first), *(_number(line, tag) for tag in others))
        for line in lines
        if math.isfinite(_number(line, first))
    }
    return np.array(list(rows.values()), dtype=np.float64).reshape(len(rows), 2 + len(others))


def _number(line: dict[str, Any], tag: str) -> float:
    value = line.get(tag)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else math.nan


def _mark(rows: Array) -> dict[str, Any]:
    return {"marker": "o", "markersize": 3.5} if len(rows) <= _FEW_POINTS else {}


def _draw_returns(axes: "Axes", points: LearningCurve) -> None:
    if len(points.evaluation):
        x, mean, lower, upper = points.evaluation.T
        axes.fill_between(x, lower, upper, color=BLUE, alpha=0.25, linewidth=0, zorder=2.5)
        if len(x) == 1:  # a band around one point has no area
            axes.vlines(x, lower, upper, color=BLUE, alpha=0.5, linewidth=4)
        axes.plot(x, mean, color=BLUE, linewidth=2, label="evaluation, interval", zorder=3, **_mark(points.evaluation))
    if len(points.training):
        axes.plot(*points.training.T, color=ORANGE, linewidth=1, label="training", **_mark(points.training))
    if not len(points.evaluation) and not len(points.training):
        axes.text(0.5, 0.6, "no episode has ended", transform=axes.transAxes, ha="center", color=GREY)
    axes.set_ylabel("return (sum of rewards)", fontsize=11)


def _draw_loss(axes: "Axes", loss: Array) -> None:
    from matplotlib.ticker import NullFormatter, StrMethodFormatter

    axes.plot(*loss.T, color=PURPLE, linewidth=1.5, **_mark(loss))
    axes.set_ylabel("TD loss", fontsize=11)
    if loss[:, 1].min() > 0 and loss[:, 1].max() > 20 * loss[:, 1].min():
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())


def draw_captions(figure: "Figure", trace: Trace, ending: str) -> Moving:
    """Environment, step and return above; below, the action or how the episode ended."""
    height = figure.bbox.height
    x, top, bottom = 12 / _WIDTH, 1 - 0.5 * _HEADER / height, 0.5 * _FOOTER / height
    figure.text(x, top, _shortened(trace.env, 24), fontsize=11, fontweight="bold", va="center")
    score = figure.text(1 - x, top, "", fontsize=11, ha="right", va="center")
    below = figure.text(x, bottom, "", fontsize=11, va="center")
    total = np.concatenate([[0.0], np.cumsum(trace.reward, dtype=np.float64)])

    def show(step: int) -> None:
        score.set_text(f"step {step}/{trace.num_steps}   return {total[step]:.4g}")
        if step < trace.num_steps:
            below.set_text(f"action: {_shortened(trace.name_of(int(trace.action[step])), 50)}")
        else:
            below.set(text=_end_of(trace, ending), fontweight="bold")

    return Moving(artists=[score, below], show=show)


def _end_of(trace: Trace, ending: str) -> str:
    if trace.terminated:
        return f"terminated: {ending}" if ending else "terminated"
    return "truncated: the time limit is reached" if trace.truncated else "the recording stops here"


def draw_values(axes: "Axes", trace: Trace) -> Moving:
    """Bars of how much each choice is worth above the worst on offer; the one taken stands out, x is not on offer."""
    assert trace.q is not None
    q = np.where(np.isfinite(trace.q), trace.q, np.nan).astype(np.float64)
    above = np.nan_to_num(q - np.where(np.isfinite(q), q, np.inf).min(axis=1, keepdims=True))
    best = np.where(np.isfinite(q), q, -np.inf).max(axis=1)
    count = q.shape[1]
    bars = axes.bar(np.arange(count), np.zeros(count), 0.6, linewidth=0).patches
    (closed,) = axes.plot([], [], "x", color=GREY, markersize=5)
    span = float(above.max()) or 1.0
    axes.set(xlim=(-0.5, count - 0.5), ylim=(0, 1.02 * span))
    axes.spines[["left", "right", "top"]].set_visible(False)
    axes.spines["bottom"].set_color(GREY)
    names = [_shortened(trace.name_of(k), 60 // count) for k in range(count)] if count <= _MOST_NAMES else []
    axes.set_xticks(range(len(names)), names, fontsize=9)
    axes.tick_params(length=0, pad=3)
    axes.set_yticks([])
    axes.text(0, 1.1, "value above the worst choice", transform=axes.transAxes, color=GREY, fontsize=9)
    highest = axes.text(1, 1.1, "", transform=axes.transAxes, color=GREY, fontsize=9, ha="right")

    def show(step: int) -> None:
        running = step < trace.num_steps
        for k, bar in enumerate(bars):
            bar.set_height(float(above[step, k]) if running else 0.0)
            bar.set_facecolor(VERMILION if running and k == trace.action[step] else SKY)
        missing = np.flatnonzero(np.isnan(q[step])) if running else np.array([])
        closed.set_data(missing, np.full(len(missing), 0.15 * span))
        highest.set_text(f"highest {best[step]:.4g}" if running and math.isfinite(best[step]) else "")

    return Moving(artists=[*bars, closed, highest], show=show)


def _shortened(name: str, letters: int) -> str:
    return name if len(name) <= letters else name[: letters - 1] + "…"


def _fractions(box: tuple[float, float, float, float], height: int) -> tuple[float, float, float, float]:
    """Returns left, bottom, width and height in shares of a frame, from pixels."""
    return box[0] / _WIDTH, box[1] / height, box[2] / _WIDTH, box[3] / height


def _palette() -> list[int]:
    """Returns red, green, blue of the colours in use and of black, each faded to white.

    Fixed, so that frames share it and compress well; smoothed edges need the fading. Not finer, because Pillow takes
    the nearest to the middle of a cube of 8 x 8 x 8: white has to be alone in its own.
    """
    hues = [tuple(bytes.fromhex(colour[1:])) for colour in (ORANGE, SKY, GREEN, BLUE, VERMILION, PURPLE)]
    greys = [(value,) * 3 for value in range(0, 256, 17)] + [tuple(bytes.fromhex(c[1:])) for c in (GREY, PALE)]
    faded = [tuple(round(c + (255 - c) * i / 14) for c in hue) for hue in hues for i in range(14)]
    return [value for colour in (*greys, *faded) for value in colour]


@contextmanager
def _defaults() -> Iterator[None]:
    """Matplotlib as it is shipped, whatever the user's own settings; names with a dollar sign are no formulas."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams["text.parse_math"] = False
        yield
