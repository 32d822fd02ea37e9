"""A run as pictures beside the model: the learning curve as PNG, one episode as an animated GIF.

matplotlib and Pillow, which it brings, are the extra `pictures`, imported where they are used: the learner runs without
them. matplotlib draws without pyplot, so that there is no display, no global figure and no window.
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
ORANGE, GREY, PALE, WHITE = "#e69f00", "#999999", "#d9d9d9", "#ffffff"

WIDTH, HEADER, FOOTER, VALUES = 480, 32, 32, 92  # pixels of a frame
_FINE = 2  # a frame is drawn so many times larger, and shrunk: smooth edges
_FRAME_SECONDS, _LAST_FRAME_SECONDS = 0.04, 2.0  # how it ended is read before the loop starts again
_MOST_FRAMES = 300
_MOST_NAMES = 12  # names of choices that fit side by side
_MOST_CURVES = 12  # more do not fit on a telephone
_FEW_POINTS = 40  # so few are marked: a line through one point does not show
_DRAWN = ("Return in simulation", "TD loss")
_WALLS, _GOAL = (7, 12, 17), 24

Point = tuple[float, float]
View = tuple[float, float, float, float]
"""Left, right, bottom and top."""


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


# ---- the learning curve


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


# ---- an episode


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
    durations = [round(1000 * _FRAME_SECONDS)] * (len(frames) - 1) + [round(1000 * _LAST_FRAME_SECONDS)]
    data = io.BytesIO()
    frames[0].save(data, format="GIF", save_all=True, append_images=frames[1:], duration=durations, loop=0)
    write_whole(file, data.getvalue())


class Pen:
    """Draws into a box of a frame (left, top, width, height in pixels) in the units of a view, y upwards."""

    def __init__(self, draw: "ImageDraw", box: View, view: View, *, equal: bool = True) -> None:
        (left, top, width, height), (low_x, high_x, low_y, high_y) = box, view
        scale = np.array([width / (high_x - low_x), height / (high_y - low_y)])
        self._draw, self._scale = draw, _FINE * (scale.min() if equal else scale) * np.array([1, -1])
        middle = np.array([left + width / 2, top + height / 2]) * _FINE
        self._origin = middle - self._scale * np.array([(low_x + high_x) / 2, (low_y + high_y) / 2])

    def _at(self, points: Sequence[Point] | NDArray[np.floating]) -> list[Point]:
        return [(float(x), float(y)) for x, y in np.asarray(points, dtype=np.float64) * self._scale + self._origin]

    def line(self, points: Sequence[Point] | NDArray[np.floating], colour: str, width: float = 2) -> None:
        """Draws a line through points, so many pixels wide."""
        self._draw.line(self._at(points), fill=colour, width=round(width * _FINE), joint="curve")

    def box(self, low: Point, high: Point, colour: str, edge: str | None = None) -> None:
        """Fills the box between two corners."""
        (x, y), (u, v) = self._at([low, high])
        self._draw.rectangle((min(x, u), min(y, v), max(x, u), max(y, v)), fill=colour, outline=edge)

    def disc(self, centre: Point, radius: float, colour: str) -> None:
        """Fills a disc, its radius in pixels."""
        ((x, y),) = self._at([centre])
        self._draw.circle((x, y), radius * _FINE, fill=colour)

    def text(self, at: Point, words: str, size: int = 11, colour: str = BLACK, anchor: str = "lm") -> None:
        """Writes words; the anchor is Pillow's."""
        self._draw.text(self._at([at])[0], words, fill=colour, font=_font(size * _FINE), anchor=anchor)


@cache
def _font(size: int) -> "FreeTypeFont | ImageFont":
    from PIL import ImageFont

    return ImageFont.load_default(size)


def frame(trace: Trace, step: int) -> "Image":
    """Returns the picture of an episode at a step, 0 to T: its state, what is done, and how much choices are worth."""
    from PIL import Image, ImageDraw

    scene = scene_of(trace)
    values = VALUES if trace.q is not None and trace.num_steps else 0
    height = HEADER + scene.height + values + FOOTER
    image = Image.new("RGB", (WIDTH * _FINE, height * _FINE), WHITE)
    draw = ImageDraw.Draw(image)
    pen = Pen(draw, (0, HEADER, WIDTH, scene.height), scene.view, equal=scene.draw is not _curves)
    scene.draw(pen, trace, step)
    page = Pen(draw, (0, 0, WIDTH, height), (0, WIDTH, -height, 0))  # pixels, y negative
    total = float(trace.reward[:step].sum(dtype=np.float64))
    page.text((12, -HEADER / 2), _shortened(trace.env, 24), 13)
    page.text((WIDTH - 12, -HEADER / 2), f"step {step}/{trace.num_steps}   return {total:.4g}", anchor="rm")
    page.text((12, FOOTER / 2 - height), caption(trace, step, scene.ending))
    if values:
        _draw_values(
            Pen(draw, (20, HEADER + scene.height, WIDTH - 40, VALUES), (0, WIDTH - 40, -VALUES, 0)), trace, step
        )
    return image.reduce(_FINE)


def caption(trace: Trace, step: int, ending: str) -> str:
    """Returns what is done at a step, or how the episode ended."""
    if step < trace.num_steps:
        return f"action: {_shortened(trace.name_of(int(trace.action[step])), 50)}"
    if trace.terminated:
        return f"terminated: {ending}" if ending else "terminated"
    return "truncated: the time limit is reached" if trace.truncated else "the recording stops here"


def above_worst(q: NDArray[np.floating]) -> NDArray[np.float64]:
    """Returns how much choices are worth above the worst on offer at their step, [T, K]; NaN where not on offer."""
    worst = np.where(np.isfinite(q), q, np.inf).min(axis=1, keepdims=True)
    above: NDArray[np.float64] = np.where(np.isfinite(q), q - worst, np.nan)
    return above


def _draw_values(pen: Pen, trace: Trace, step: int) -> None:
    """Draws a bar for each choice, the one taken in another colour, and a cross for one that is not on offer."""
    assert trace.q is not None
    above, width, ground = above_worst(trace.q), (WIDTH - 40) / trace.q.shape[1], 18 - VALUES
    span = float(np.nan_to_num(above).max()) or 1.0
    pen.text((0, -10), "value above the worst choice", 9, GREY)
    pen.line([(0, ground), (WIDTH - 40, ground)], GREY, 1)
    for k in range(trace.q.shape[1]):
        middle = (k + 0.5) * width
        if width * _MOST_NAMES >= WIDTH - 40:
            pen.text((middle, ground - 9), _shortened(trace.name_of(k), int(width / 7)), 9, anchor="mm")
        if step < trace.num_steps and math.isnan(above[step, k]):
            pen.text((middle, ground + 6), "x", 10, GREY, anchor="mm")
        elif step < trace.num_steps and above[step, k] > 0:
            top, colour = ground + 50 * above[step, k] / span, VERMILION if k == trace.action[step] else SKY
            pen.box((middle - 0.3 * width, ground), (middle + 0.3 * width, top), colour)


def _shortened(name: str, letters: int) -> str:
    return name if len(name) <= letters else name[: letters - 1] + "…"


# ---- scenes: geometry, signs and limits of the classic control problems are Gymnasium's


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """How an environment is drawn.

    Attributes:
        size: S that the scene reads; an environment of that name with another size is drawn as curves.
        height: in pixels.
        view: left, right, bottom and top of what is seen.
        draw: draws the state at a step.
        ending: what it means that the episode terminated, in words.
    """

    size: int
    height: int
    view: View
    draw: Callable[[Pen, Trace, int], None]
    ending: str = ""


def scene_of(trace: Trace) -> Scene:
    """Returns the scene of the trace's environment; curves of the observation where there is none."""
    size = trace.observation.shape[1]
    scene = SCENES.get(trace.env)
    if scene is not None and scene.size == size:
        return scene
    rows = min(size, _MOST_CURVES) + 1
    return Scene(size=size, height=20 + 30 * rows, view=(-0.2, 1.25, -rows, 0), draw=_curves)


def _cartpole(pen: Pen, trace: Trace, step: int) -> None:
    x, _, angle, _ = map(float, trace.observation[step])  # angle 0 is up, right > 0
    limit = trace.parameters.get("position_limit", 2.4)
    x *= 2.4 / limit  # the track fills the picture, however long it is
    pen.line([(-2.4, 0), (2.4, 0)], GREY)
    for end in (-2.4, 2.4):
        pen.text((end, -0.2), f"{math.copysign(limit, end):+g} m", 9, GREY, "mm")
    pen.box((x - 0.2, 0), (x + 0.2, 0.24), BLACK)
    pen.line([(x, 0.24), (x + math.sin(angle), 0.24 + math.cos(angle))], VERMILION, 7)


def _mountain_car(pen: Pen, trace: Trace, step: int) -> None:
    x = np.linspace(-1.2, 0.6, 100)
    pen.line(np.stack([x, 0.45 * np.sin(3 * x)], axis=1), GREY)
    goal = trace.parameters.get("goal_position", 0.45 if trace.env.endswith("continuous") else 0.5)
    pen.line([(goal, 0.45 * math.sin(3 * goal)), (goal, 0.45 * math.sin(3 * goal) + 0.22)], GREEN, 4)
    position = float(trace.observation[step, 0])
    pen.disc((position, 0.45 * math.sin(3 * position) + 0.03), 9, VERMILION)


def _pendulum(pen: Pen, trace: Trace, step: int) -> None:
    cosine, sine = map(float, trace.observation[step, :2])  # angle 0 is up, counterclockwise > 0
    pen.line([(0, 0), (-sine, cosine)], VERMILION, 14)
    pen.disc((0, 0), 5, BLACK)


def _acrobot(pen: Pen, trace: Trace, step: int) -> None:
    cosine1, sine1, cosine2, sine2 = map(float, trace.observation[step, :4])  # angle 0 hangs down, the second relative
    goal = trace.parameters.get("goal_height", 1.0)
    pen.line([(-2.6, goal), (2.6, goal)], GREEN)
    elbow = np.array([sine1, -cosine1])
    tip = elbow + np.array([sine1 * cosine2 + cosine1 * sine2, sine1 * sine2 - cosine1 * cosine2])
    pen.line(np.stack([np.zeros(2), elbow]), BLACK, 10)
    pen.line(np.stack([elbow, tip]), VERMILION, 10)


def _gridworld(pen: Pen, trace: Trace, step: int) -> None:
    for cell in range(25):
        x, y, colour = cell % 5, -(cell // 5), BLACK if cell in _WALLS else GREEN if cell == _GOAL else WHITE
        pen.box((x, y), (x + 1, y - 1), colour, GREY)
    cells = trace.observation[: step + 1].argmax(axis=1)  # one-hot of 5 y + x
    way = np.stack([cells % 5 + 0.5, -(cells // 5) - 0.5], axis=1)
    if step:
        pen.line(way, SKY, 4)
    pen.disc((float(way[-1, 0]), float(way[-1, 1])), 16, VERMILION)


def _curves(pen: Pen, trace: Trace, step: int) -> None:
    """Draws each feature of the observation over the steps, at its own scale, with the reward below."""
    shown = min(trace.observation.shape[1], _MOST_CURVES)
    reward = np.concatenate([trace.reward[:1], trace.reward])  # the reward of a step stands where the step led
    curves = [*trace.observation[:, :shown].T.astype(np.float64), *([reward] if len(reward) else [])]
    x = np.linspace(0, 1, trace.num_steps + 1)
    for row, values in enumerate(curves):
        pen.text((-0.02, -row - 0.5), f"feature {row}" if row < shown else "reward", 9, anchor="rm")
        known = np.isfinite(values)
        if not known.any():
            continue
        low, high = float(values[known].min()), float(values[known].max())
        height = (values - low) / (high - low) if high > low else np.where(known, 0.5, np.nan)
        pen.line(np.stack([x, height * 0.8 - row - 0.9], axis=1)[known], GREY if row < shown else GREEN, 1.5)
        pen.text((1.02, -row - 0.5), f"{low:.3g} to {high:.3g}", 8, GREY)
        if known[step]:
            pen.disc((float(x[step]), float(height[step]) * 0.8 - row - 0.9), 2.5, VERMILION)
    pen.line([(float(x[step]), 0), (float(x[step]), -len(curves))], VERMILION, 1)


def _palette() -> list[int]:
    """Returns red, green, blue of the colours in use, each faded to white: frames share it and compress well.

    Not finer, because Pillow takes the nearest to the middle of a cube of 8 x 8 x 8: white has to be alone in its own.
    """
    hues = [bytes.fromhex(colour[1:]) for colour in (BLACK, GREY, SKY, GREEN, BLUE, VERMILION)]
    return [round(c + (255 - c) * i / 14) for hue in hues for i in range(15) for c in hue]


_CARTPOLE = Scene(size=4, height=150, view=(-2.9, 2.9, -0.32, 1.34), draw=_cartpole,
                  ending="the pole fell or the cart left the track")  # fmt: skip
_CAR = Scene(size=2, height=318, view=(-1.26, 0.66, -0.54, 0.73), draw=_mountain_car, ending="the flag is reached")
SCENES = {
    "cartpole_v0": _CARTPOLE,
    "cartpole_v1": _CARTPOLE,
    "mountain_car": _CAR,
    "mountain_car_continuous": _CAR,
    "pendulum": Scene(size=3, height=320, view=(-1.3, 1.3, -1.15, 1.15), draw=_pendulum),
    "acrobot": Scene(size=6, height=340, view=(-2.6, 2.6, -2.15, 2.15), draw=_acrobot,
                     ending="the tip is above the line"),
    "gridworld": Scene(size=25, height=360, view=(-0.05, 5.05, -5.05, 0.05), draw=_gridworld,
                       ending="the goal is reached"),
}  # fmt: skip
