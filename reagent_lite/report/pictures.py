"""A run as pictures beside the model: the learning curve as PNG, one episode as an animated GIF.

matplotlib and Pillow, which it brings, are the extra `pictures`, imported where they are used: the learner runs without
them. matplotlib is used without pyplot, so that there is no display, no global figure and no window.
"""

import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from reagent_lite.errors import ConfigError, Problem
from reagent_lite.files import write_whole
from reagent_lite.report.charts import Curves
from reagent_lite.report.curves import Series, curves_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import FreeTypeFont, ImageFont

# Okabe & Ito (2008), Color Universal Design: told apart with any colour vision
BLACK, SKY, GREEN, BLUE, VERMILION = "#000000", "#56b4e9", "#009e73", "#0072b2", "#d55e00"
ORANGE, GREY, PALE = "#e69f00", "#999999", "#d9d9d9"

WIDTH, HEIGHT, TOP, BOTTOM = 480, 440, 40, 320  # pixels of a frame, and of the scene in it
_FINE = 2  # a frame is drawn so many times larger, and shrunk: smooth edges
_MILLISECONDS, _LAST_MILLISECONDS = 40, 2000  # how it ended is read before the loop starts again
_MOST_FRAMES = 300
_FEW_POINTS = 40  # so few are marked: a line through one point does not show
_DRAWN = ("Return in simulation", "TD loss")
_MOST_CURVES = 12  # more do not fit on a telephone


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


def write_learning_curve(file: Path, series: Series, *, title: str) -> None:
    """Writes the page's charts of returns and TD loss as PNG; the file appears whole or not at all."""
    data = io.BytesIO()
    with _defaults():
        # without the program's version the same run gives the same bytes
        learning_curve(curves_of(series), title=title).savefig(data, metadata={"Software": None})
    write_whole(file, data.getvalue())


def learning_curve(curves: Sequence[Curves], *, title: str) -> "Figure":
    """Returns a figure of returns above and TD loss below, as far as there are any."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    shown = [one for one in curves if one.title in _DRAWN] or [Curves(title="", x="optimizer steps", y="", lines=())]
    figure = Figure(figsize=(5.4, 2.2 + 1.6 * len(shown)), dpi=200, layout="constrained")
    figure.suptitle(title, fontsize=13, fontweight="bold", parse_math=False)
    panels = figure.subplots(len(shown), sharex=True, squeeze=False, height_ratios=[3, 1][: len(shown)])[:, 0]
    for axes, one in zip(panels, shown, strict=True):
        axes.grid(color=PALE, linewidth=0.7)
        axes.spines[["top", "right"]].set_visible(False)
        for line, colour in zip(one.lines, (BLUE, ORANGE), strict=False):
            x, y = zip(*line.points, strict=True)
            axes.plot(x, y, color=colour, label=line.name, marker="o" if len(x) <= _FEW_POINTS else "", markersize=3.5)
            if line.band:
                axes.fill_between(x, *zip(*line.band, strict=True), color=colour, alpha=0.25, linewidth=0)
        if one.mark is not None:
            axes.axhline(one.mark[0], color=BLACK, linewidth=1.5, linestyle="--", label=one.mark[1])
        values = [value for line in one.lines for _, value in line.points]
        if one.y == "loss" and min(values) > 0 and max(values) > 20 * min(values):
            axes.set_yscale("log")
        axes.set_ylabel(one.title)
        if one.lines:
            axes.legend(frameon=False, fontsize=9)
    panels[-1].set_xlabel(shown[-1].x)
    panels[-1].xaxis.set_major_formatter(EngFormatter(sep=""))
    return figure


@contextmanager
def _defaults() -> Iterator[None]:
    """Matplotlib as it is shipped, whatever the user's own settings."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One episode of T steps, as it is shown.

    Attributes:
        env: name of the environment, which chooses the scene.
        observation: [T + 1, S] what the policy saw, and where the last step led.
        action: [T] action ids.
        reward: [T].
        terminated: whether the episode came to its end.
        truncated: whether the time limit ended it.
        action_names: of K fixed actions; an id without a name is shown as a number.
        q: [T, K] values of the choices, not finite where a choice was not offered; None leaves them out.
        parameters: constants of the dynamics in force, by the kernel's names.
    """

    env: str
    observation: NDArray[np.floating]
    action: NDArray[np.integer]
    reward: NDArray[np.floating]
    terminated: bool
    truncated: bool
    action_names: tuple[str, ...]
    q: NDArray[np.floating] | None = None
    parameters: Mapping[str, float] = field(default_factory=dict)

    @property
    def num_steps(self) -> int:
        """T."""
        return len(self.action)

    def name_of(self, action: int) -> str:
        """Returns an action's name, or its number where it has none."""
        return self.action_names[action] if action < len(self.action_names) else str(action)


def write_rollout(file: Path, trace: Trace, *, most_frames: int = _MOST_FRAMES) -> None:
    """Writes an episode as an animated GIF that loops; the file appears whole or not at all.

    Args:
        file: where to.
        trace: the episode.
        most_frames: at least 2; a longer episode is shown by as many of its states, evenly spaced, the first and the
            last among them.
    """
    from PIL import Image

    palette = Image.new("P", (1, 1))
    palette.putpalette(_palette())
    steps = np.linspace(0, trace.num_steps, min(trace.num_steps + 1, most_frames)).round().astype(int).tolist()
    frames = [frame(trace, step).quantize(palette=palette, dither=Image.Dither.NONE) for step in steps]
    durations = [_MILLISECONDS] * (len(frames) - 1) + [_LAST_MILLISECONDS]
    data = io.BytesIO()
    frames[0].save(data, format="GIF", save_all=True, append_images=frames[1:], duration=durations, loop=0)
    write_whole(file, data.getvalue())


def frame(trace: Trace, step: int) -> "Image":
    """Returns the picture of an episode at a step, 0 to T: its state, what is done, and how much choices are worth."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (WIDTH * _FINE, HEIGHT * _FINE), "#ffffff")
    draw = ImageDraw.Draw(image)
    size, shapes, view, ending = SCENES.get(trace.env, (0, _curves, _UNIT, ""))
    if size != trace.observation.shape[1]:
        shapes, view = _curves, _UNIT
    scale = np.array([WIDTH - 40, TOP - BOTTOM]) / (view[1] - view[0], view[3] - view[2])
    if view is not _UNIT:
        scale = np.abs(scale).min() * np.array([1, -1])
    middle = np.array([WIDTH, TOP + BOTTOM]) / 2 - scale * ((view[0] + view[1]) / 2, (view[2] + view[3]) / 2)
    for points, colour, width in shapes(trace, step):
        at = [(float(x), float(y)) for x, y in _FINE * (np.asarray(points, dtype=np.float64) * scale + middle)]
        if len(at) == 1:
            draw.circle(at[0], width * _FINE / 2, fill=colour)
        else:
            draw.line(at, fill=colour, width=round(width * _FINE), joint="curve")
    total = float(trace.reward[:step].sum(dtype=np.float64))
    _text(draw, 12, 16, _shortened(trace.env, 24), 13)
    _text(draw, WIDTH - 12, 16, f"step {step}/{trace.num_steps}   return {total:.4g}", anchor="rm")
    _text(draw, 12, HEIGHT - 16, caption(trace, step, ending))
    if trace.q is not None and step < trace.num_steps:
        _draw_values(draw, trace, trace.q, step)
    return image.reduce(_FINE)


def caption(trace: Trace, step: int, ending: str) -> str:
    """Returns what is done at a step, or how the episode ended."""
    if step < trace.num_steps:
        return f"action: {_shortened(trace.name_of(int(trace.action[step])), 50)}"
    if trace.terminated:
        return f"terminated: {ending}" if ending else "terminated"
    return "truncated: the time limit is reached" if trace.truncated else "the recording stops here"


def _draw_values(draw: "ImageDraw", trace: Trace, q: NDArray[np.floating], step: int) -> None:
    """Draws a bar for each choice, the one taken in another colour; none for a choice that is not on offer."""
    above, width, ground = above_worst(q), (WIDTH - 40) / q.shape[1], HEIGHT - 50
    _text(draw, 20, ground - 60, "value above the worst choice", 9, GREY)
    for k, value in enumerate(50 * above[step] / (above.max() or 1.0)):
        left, colour = 20 + (k + 0.2) * width, VERMILION if k == trace.action[step] else SKY
        _text(draw, left + 0.3 * width, ground + 9, _shortened(trace.name_of(k), int(width / 7)), 9, anchor="mm")
        if value > 0:
            draw.rectangle([_FINE * end for end in (left, ground - value, left + 0.6 * width, ground)], fill=colour)


def above_worst(q: NDArray[np.floating]) -> NDArray[np.float64]:
    """Returns how much choices are worth above the worst on offer at their step, [T, K]; 0 where not on offer."""
    worst = np.where(np.isfinite(q), q, np.inf).min(axis=1, keepdims=True)
    above: NDArray[np.float64] = np.where(np.isfinite(q), q - worst, 0.0)
    return above


def _text(
    draw: "ImageDraw", x: float, y: float, words: str, size: int = 11, colour: str = BLACK, anchor: str = "lm"
) -> None:
    draw.text((x * _FINE, y * _FINE), words, fill=colour, font=_font(size * _FINE), anchor=anchor)


@cache
def _font(size: int) -> "FreeTypeFont | ImageFont":
    from PIL import ImageFont

    return ImageFont.load_default(size)


def _palette() -> list[int]:
    """Returns red, green, blue of the colours in use, each faded to white: frames share it and compress well.

    Not finer, because Pillow takes the nearest to the middle of a cube of 8 x 8 x 8: white has to be alone in its own.
    """
    hues = [bytes.fromhex(colour[1:]) for colour in (BLACK, GREY, SKY, GREEN, BLUE, VERMILION)]
    return [round(c + (255 - c) * i / 14) for hue in hues for i in range(15) for c in hue]


def _shortened(name: str, letters: int) -> str:
    return name if len(name) <= letters else name[: max(letters - 1, 0)] + "…"


# ---- scenes: geometry, signs and limits of the classic control problems are Gymnasium's

Points = Sequence[tuple[float, float]] | NDArray[np.floating]
Shapes = Iterator[tuple[Points, str, float]]
"""Lines of (points, colour, width in pixels); one point alone is a disc."""


def _cartpole(trace: Trace, step: int) -> Shapes:
    x, _, angle, _ = map(float, trace.observation[step])  # angle 0 is up, right > 0
    x *= 2.4 / trace.parameters.get("position_limit", 2.4)  # the track fills the picture, however long it is
    yield [(-2.4, 0), (2.4, 0)], GREY, 2
    yield [(x - 0.15, 0.12), (x + 0.15, 0.12)], BLACK, 14
    yield [(x, 0.24), (x + math.sin(angle), 0.24 + math.cos(angle))], VERMILION, 6


def _mountain_car(trace: Trace, step: int) -> Shapes:
    def at(x: NDArray[np.floating] | float) -> NDArray[np.float64]:
        return np.stack([np.atleast_1d(x), 0.45 * np.sin(3 * np.atleast_1d(x))], axis=1)

    goal = trace.parameters.get("goal_position", 0.45 if trace.env.endswith("continuous") else 0.5)
    yield at(np.linspace(-1.2, 0.6, 100)), GREY, 2
    yield np.concatenate([at(goal), at(goal) + np.array([0, 0.22])]), GREEN, 4
    yield at(trace.observation[step, 0]), VERMILION, 14


def _pendulum(trace: Trace, step: int) -> Shapes:
    cosine, sine = map(float, trace.observation[step, :2])  # angle 0 is up, counterclockwise > 0
    yield [(0, 0), (-sine, cosine)], VERMILION, 10
    yield [(0, 0)], BLACK, 6


def _acrobot(trace: Trace, step: int) -> Shapes:
    cosine1, sine1, cosine2, sine2 = map(float, trace.observation[step, :4])  # angle 0 hangs down, the second relative
    goal, elbow = trace.parameters.get("goal_height", 1.0), (sine1, -cosine1)
    tip = (elbow[0] + sine1 * cosine2 + cosine1 * sine2, elbow[1] + sine1 * sine2 - cosine1 * cosine2)
    yield [(-2.2, goal), (2.2, goal)], GREEN, 2
    yield [(0, 0), elbow], BLACK, 8
    yield [elbow, tip], VERMILION, 8


def _gridworld(trace: Trace, step: int) -> Shapes:
    cells = trace.observation[: step + 1].argmax(axis=1)  # one-hot of 5 y + x
    way = np.stack([cells % 5, -(cells // 5)], axis=1)
    for edge in np.arange(-0.5, 5):
        yield [(edge, 0.5), (edge, -4.5)], GREY, 1
        yield [(-0.5, -edge), (4.5, -edge)], GREY, 1
    for cell, colour in ((7, BLACK), (12, BLACK), (17, BLACK), (24, GREEN)):
        yield [(cell % 5 - 0.48, -(cell // 5)), (cell % 5 + 0.48, -(cell // 5))], colour, 52
    yield way, SKY, 4
    yield way[-1:], VERMILION, 16


def _curves(trace: Trace, step: int) -> Shapes:
    """Each feature of the observation over the steps, at its own scale, the reward below; a line at the present."""
    reward = np.concatenate([trace.reward[:1], trace.reward])  # the reward of a step stands where the step led
    features = trace.observation[:, :_MOST_CURVES].T.astype(np.float64)
    curves, steps = [*features, *([reward] if len(reward) else [])], np.linspace(0, 1, trace.num_steps + 1)
    for row, values in enumerate(curves):
        known = np.isfinite(values)
        if known.any():
            low, high = values[known].min(), values[known].max()
            height = 1 - (row + 0.9 - 0.8 * (values - low) / (high - low or 1.0)) / len(curves)
            yield np.stack([steps, height], axis=1)[known], GREY if row < len(features) else GREEN, 1.5
    yield [(steps[step], 0), (steps[step], 1)], VERMILION, 3


Scene = tuple[int, Callable[[Trace, int], Shapes], tuple[float, float, float, float], str]
"""S that it reads, its shapes, the view (left, right, bottom, top), and what it means that the episode terminated."""

_UNIT = (0.0, 1.0, 0.0, 1.0)  # the view of curves
_CARTPOLE: Scene = (4, _cartpole, (-2.6, 2.6, -0.2, 1.4), "the pole fell or the cart left the track")
_CAR: Scene = (2, _mountain_car, (-1.26, 0.66, -0.54, 0.73), "the flag is reached")
SCENES: Mapping[str, Scene] = {
    "cartpole_v0": _CARTPOLE,
    "cartpole_v1": _CARTPOLE,
    "mountain_car": _CAR,
    "mountain_car_continuous": _CAR,
    "pendulum": (3, _pendulum, (-1.3, 1.3, -1.15, 1.15), ""),
    "acrobot": (6, _acrobot, (-2.3, 2.3, -2.15, 2.15), "the tip is above the line"),
    "gridworld": (25, _gridworld, (-0.6, 4.6, -4.6, 0.6), "the goal is reached"),
}
