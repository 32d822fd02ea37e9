"""What an episode looks like: one scene for each known environment, curves of the observation for any other.

A scene draws what stands still into the axes once and returns the artists that move; redrawing only those is what
makes an animation cheap. Geometry, signs and limits of the classic control problems are Gymnasium's, the limits unless
the environment's parameters say otherwise.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # matplotlib is an extra, and slow to import
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.container import BarContainer
    from matplotlib.patches import Polygon

# Okabe & Ito (2008), Color Universal Design: told apart with any colour vision, https://jfly.uni-koeln.de/color
BLACK, ORANGE, SKY, GREEN = "#000000", "#e69f00", "#56b4e9", "#009e73"
BLUE, VERMILION, PURPLE, GREY = "#0072b2", "#d55e00", "#cc79a7", "#999999"
PALE = "#d9d9d9"

Array = NDArray[np.float64]


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
        features: [T, F] of the choices taken, None where choices are ids alone.
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
    features: NDArray[np.floating] | None = None
    q: NDArray[np.floating] | None = None
    parameters: Mapping[str, float] = field(default_factory=dict)

    @property
    def num_steps(self) -> int:
        """T."""
        return len(self.action)

    def name_of(self, action: int) -> str:
        """Returns an action's name, or its number where it has none."""
        return self.action_names[action] if action < len(self.action_names) else str(action)

    def level(self, step: int) -> float:
        """Returns the action at a step as a share of the strongest push, from -1 to 1: ids count evenly upwards.

        0 at the last state, where nothing is done any more.
        """
        if step >= self.num_steps or len(self.action_names) < 2:
            return 0.0
        return 2.0 * int(self.action[step]) / (len(self.action_names) - 1) - 1.0  # as the kernels count their levels


@dataclass(frozen=True, slots=True, kw_only=True)
class Moving:
    """What changes from frame to frame.

    Attributes:
        artists: in the order in which they are painted.
        show: sets them to the state at a step, 0 to T.
    """

    artists: list["Artist"]
    show: Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """How an environment is drawn.

    Attributes:
        size: S that the scene reads; an environment of that name with another size is drawn as curves.
        height: of the axes, in pixels.
        draw: paints what stands still and returns what moves.
        ending: what it means that the episode terminated, in words.
        margin: pixels left of the axes, below and right of them, for labels.
    """

    size: int
    height: int
    draw: Callable[["Axes", Trace], Moving]
    ending: str = ""
    margin: tuple[int, int, int] = (0, 0, 0)


def scene_of(trace: Trace) -> Scene:
    """Returns the scene of the trace's environment; curves of the observation where there is none."""
    size = trace.observation.shape[1]
    scene = SCENES.get(trace.env)
    if scene is not None and scene.size == size:
        return scene
    rows = min(size, _MOST_CURVES) + 1
    return Scene(size=size, height=40 + 30 * rows, draw=draw_curves, margin=(76, 40, 48))


def draw_cartpole(axes: "Axes", trace: Trace) -> Moving:
    """Cart of 0.4 x 0.24 m, pole of 1 m, track of +-2.4 m. Observation: x, velocity, angle (0 up, right > 0)."""
    from matplotlib.patches import Rectangle

    limit = trace.parameters.get("position_limit", 2.4)
    _stage(axes, (-limit - 0.5, limit + 0.5), (-0.32, 1.34))
    axes.plot([-limit, limit], [0, 0], color=GREY, linewidth=2, zorder=0)
    for end in (-limit, limit):
        axes.plot([end, end], [-0.1, 0.1], color=GREY, linewidth=2)
        axes.text(end, -0.28, f"{end:+g} m", color=GREY, ha="center", fontsize=9)
    cart = Rectangle((0, 0), 0.4, 0.24, color=BLACK)
    axes.add_patch(cart)
    (pole,) = axes.plot([], [], color=VERMILION, linewidth=7, solid_capstyle="round")
    (axle,) = axes.plot([], [], "o", color=PALE, markersize=5)
    push = _polygon(axes, np.zeros((7, 2)), BLUE)

    def show(step: int) -> None:
        x, _, angle, _ = map(float, trace.observation[step])
        cart.set_xy((x - 0.2, 0.0))
        pole.set_data([x, x + math.sin(angle)], [0.24, 0.24 + math.cos(angle)])
        axle.set_data([x], [0.24])
        level = trace.level(step)
        side = math.copysign(0.2, level)
        push.set_xy(_arrow((x + side, 0.12), (x + side + 0.45 * level, 0.12), width=0.05))

    return Moving(artists=[cart, pole, axle, push], show=show)


def draw_mountain_car(axes: "Axes", trace: Trace) -> Moving:
    """Hill sin(3x) at Gymnasium's scale 0.45, flag at x 0.5 or, continuous, 0.45. Observation: position, velocity."""
    from matplotlib.patches import Circle

    _stage(axes, (-1.26, 0.66), (-0.54, 0.73))
    x = np.linspace(-1.2, 0.6, 200)
    axes.fill_between(x, 0.45 * np.sin(3 * x), -0.6, color=PALE, linewidth=0)
    axes.plot(x, 0.45 * np.sin(3 * x), color=GREY, linewidth=2)
    goal = trace.parameters.get("goal_position", 0.45 if trace.env.endswith("continuous") else 0.5)
    foot = 0.45 * math.sin(3 * goal)
    axes.plot([goal, goal], [foot, foot + 0.22], color=BLACK, linewidth=2)
    _polygon(axes, np.array([(goal, foot + 0.22), (goal - 0.11, foot + 0.18), (goal, foot + 0.14)]), GREEN)
    body = _polygon(axes, _CAR, VERMILION)
    wheels = [Circle((0, 0), 0.028, color=BLACK) for _ in _WHEELS]
    for wheel in wheels:
        axes.add_patch(wheel)
    push = _polygon(axes, np.zeros((7, 2)), BLUE)

    def show(step: int) -> None:
        position = float(trace.observation[step, 0])
        ground = np.array([position, 0.45 * math.sin(3 * position)])
        slope = math.atan(1.35 * math.cos(3 * position))  # d/dx 0.45 sin(3x)
        turn = np.array([[math.cos(slope), math.sin(slope)], [-math.sin(slope), math.cos(slope)]])
        body.set_xy(_CAR @ turn + ground)
        for wheel, place in zip(wheels, _WHEELS @ turn + ground, strict=True):
            wheel.set_center((float(place[0]), float(place[1])))
        level = trace.level(step)
        start = np.array([math.copysign(0.1, level), 0.085])
        push.set_xy(_arrow(start, start + np.array([0.2 * level, 0.0]), width=0.022) @ turn + ground)

    return Moving(artists=[body, *wheels, push], show=show)


def draw_pendulum(axes: "Axes", trace: Trace) -> Moving:
    """Rod of length 1, angle 0 up and counterclockwise. Observation: cosine, sine, angular velocity."""
    from matplotlib.patches import Circle

    _stage(axes, (-1.3, 1.3), (-1.15, 1.15))
    axes.add_patch(Circle((0, 0), 1.0, fill=False, color=PALE, linestyle=":", linewidth=1.5))
    (rod,) = axes.plot([], [], color=VERMILION, linewidth=14, solid_capstyle="round")
    (pivot,) = axes.plot([0], [0], "o", color=BLACK, markersize=8)
    (arc,) = axes.plot([], [], color=BLUE, linewidth=3)
    tip = _polygon(axes, np.zeros((3, 2)), BLUE)

    def show(step: int) -> None:
        cosine, sine = map(float, trace.observation[step, :2])
        rod.set_data([0, -sine], [0, cosine])
        line, head = _turn((0.0, 0.0), 0.42, trace.level(step))
        arc.set_data(line[:, 0], line[:, 1])
        tip.set_xy(head)

    return Moving(artists=[rod, pivot, arc, tip], show=show)


def draw_acrobot(axes: "Axes", trace: Trace) -> Moving:
    """Two links of length 1, angles 0 hanging down, the tip to rise above height 1.

    Observation: cosine and sine of the first angle, of the second relative to the first, two angular velocities.
    """
    _stage(axes, (-2.6, 2.6), (-2.15, 2.15))
    goal = trace.parameters.get("goal_height", 1.0)
    axes.plot([-2.6, 2.6], [goal, goal], color=GREEN, linewidth=1.5, linestyle="--")
    axes.text(-2.6, goal + 0.06, "goal: the tip above this line", color=GREEN, fontsize=9)
    (upper,) = axes.plot([], [], color=BLACK, linewidth=10, solid_capstyle="round")
    (lower,) = axes.plot([], [], color=VERMILION, linewidth=10, solid_capstyle="round")
    (joints,) = axes.plot([], [], "o", color=PALE, markersize=5)
    (arc,) = axes.plot([], [], color=BLUE, linewidth=2.5)
    tip = _polygon(axes, np.zeros((3, 2)), BLUE)

    def show(step: int) -> None:
        cosine1, sine1, cosine2, sine2 = map(float, trace.observation[step, :4])
        elbow = (sine1, -cosine1)
        both = (sine1 * cosine2 + cosine1 * sine2, cosine1 * cosine2 - sine1 * sine2)  # sine, cosine of the sum
        upper.set_data([0, elbow[0]], [0, elbow[1]])
        lower.set_data([elbow[0], elbow[0] + both[0]], [elbow[1], elbow[1] - both[1]])
        joints.set_data([0, elbow[0]], [0, elbow[1]])
        line, head = _turn(elbow, 0.4, trace.level(step))
        arc.set_data(line[:, 0], line[:, 1])
        tip.set_xy(head)

    return Moving(artists=[upper, lower, joints, arc, tip], show=show)


def draw_gridworld(axes: "Axes", trace: Trace) -> Moving:
    """5 x 5 cells from the upper left, walls and goal dark and green, the way so far behind the player.

    Observation: one-hot of 5 y + x. Actions: left, right, up, down.
    """
    from matplotlib.patches import Rectangle

    _stage(axes, (-0.05, 5.05), (5.05, -0.05))
    for cell in range(25):
        colour = BLACK if cell in _WALLS else GREEN if cell == _GOAL else "white"
        axes.add_patch(Rectangle((cell % 5, cell // 5), 1, 1, facecolor=colour, edgecolor=GREY, linewidth=1))
    axes.text(4.5, 4.5, "goal", color="white", ha="center", va="center", fontsize=11)
    place = np.stack(np.divmod(trace.observation.argmax(axis=1), 5)[::-1], axis=1) + 0.5
    (way,) = axes.plot([], [], color=SKY, linewidth=4, solid_capstyle="round", solid_joinstyle="round")
    (player,) = axes.plot([], [], "o", color=VERMILION, markersize=24)
    push = _polygon(axes, np.zeros((7, 2)), BLUE)

    def show(step: int) -> None:
        way.set_data(place[: step + 1, 0], place[: step + 1, 1])
        player.set_data(place[step : step + 1, 0], place[step : step + 1, 1])
        move = _MOVES.get(int(trace.action[step])) if step < trace.num_steps else None
        push.set_xy(_arrow(place[step], place[step] + 0.62 * np.array(move or (0.0, 0.0)), width=0.1))

    return Moving(artists=[way, player, push], show=show)


def draw_recommend(axes: "Axes", trace: Trace) -> Moving:
    """Interest and satiation of the user in each topic, and the item that is shown beside them.

    Observation: interest [8], satiation [8], t / 50. Features of an item: share of each topic [8], quality.
    """
    bars = [("interest", BLUE, trace.observation[:, :8]), ("satiation", ORANGE, trace.observation[:, 8:16])]
    item = trace.features if trace.features is not None and trace.features.shape[1] == 9 else None
    if item is not None:
        bars.append(("item shown", VERMILION, item[:, :8]))
    width = 0.8 / len(bars)
    groups: list[BarContainer] = []
    for i, (label, colour, _) in enumerate(bars):
        left = np.arange(8) + (i - (len(bars) - 1) / 2) * width
        groups.append(axes.bar(left, np.zeros(8), width, color=colour, label=label))
    low = min(0.0, *(float(values.min(initial=0.0)) for _, _, values in bars))
    high = max(float(values.max(initial=0.1)) for _, _, values in bars)
    axes.set(xlim=(-0.6, 7.6), ylim=(1.05 * low, low + 1.3 * (high - low)), xlabel="topic", xticks=range(8))
    axes.legend(
        loc="upper left", ncols=3, frameon=False, fontsize=10, borderaxespad=0, handlelength=1, columnspacing=1.2
    )
    axes.spines[["top", "right"]].set_visible(False)
    note = axes.text(7.55, low + 1.1 * (high - low), "", ha="right", fontsize=10)

    def show(step: int) -> None:
        for group, (_, _, values) in zip(groups, bars, strict=True):
            heights = values[step] if step < len(values) else np.zeros(8)
            for bar, height in zip(group.patches, heights, strict=True):
                bar.set_height(float(height))
        if step == trace.num_steps:
            note.set_text("")
            return
        clicked = trace.reward[step] > 0
        quality = "" if item is None else f"quality {item[step, 8]:.2f}: "
        note.set(text=quality + ("clicked" if clicked else "not clicked"), color=GREEN if clicked else BLACK)

    return Moving(artists=[*(bar for group in groups for bar in group.patches), note], show=show)


def draw_curves(axes: "Axes", trace: Trace) -> Moving:
    """Each feature of the observation against steps, at its own scale, the reward below; a cursor at the present."""
    shown = min(trace.observation.shape[1], _MOST_CURVES)
    steps = np.arange(trace.num_steps + 1)
    # the reward of a step stands where the step led
    reward = np.concatenate([trace.reward[:1], trace.reward])
    curves = [*trace.observation[:, :shown].T, *([reward] if len(reward) else [])]
    heights = np.empty((len(curves), len(steps)))
    labels = []
    for i, values in enumerate(curves):
        finite = values[np.isfinite(values)]
        low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
        heights[i] = 0.5 if high <= low else (values - low) / (high - low)
        heights[i] = len(curves) - 1 - i + 0.1 + 0.8 * heights[i]
        labels.append(f"feature {i}" if i < shown else "reward")
        axes.plot(steps, heights[i], color=GREY if i < shown else GREEN, linewidth=1.5)
        axes.text(1.0, len(curves) - i - 0.5, f"  {high:.3g}\n  {low:.3g}", transform=axes.get_yaxis_transform(),
                  va="center", fontsize=7, color=GREY)  # fmt: skip
    size = trace.observation.shape[1]
    note = f" (the first {shown} of {size} features)" if shown < size else ""
    axes.set(xlim=(0, max(1, trace.num_steps)), ylim=(0, len(curves)), xlabel="step" + note)
    axes.set_yticks([len(curves) - i - 0.5 for i in range(len(curves))], labels, fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right"]].set_visible(False)
    (cursor,) = axes.plot([], [], color=VERMILION, linewidth=1.5)
    (present,) = axes.plot([], [], "o", color=VERMILION, markersize=5, clip_on=False)

    def show(step: int) -> None:
        cursor.set_data([step, step], [0, len(curves)])
        present.set_data(np.full(len(curves), step), heights[:, step])

    return Moving(artists=[cursor, present], show=show)


def _stage(axes: "Axes", x: tuple[float, float], y: tuple[float, float]) -> None:
    """Makes axes a stage: no frame, no ticks, one unit as long in both directions."""
    axes.set(xlim=x, ylim=y, aspect="equal")
    axes.set_axis_off()


def _polygon(axes: "Axes", outline: Array, colour: str) -> "Polygon":
    from matplotlib.patches import Polygon

    polygon = Polygon(outline, color=colour)
    axes.add_patch(polygon)
    return polygon


def _arrow(start: tuple[float, float] | Array, end: tuple[float, float] | Array, *, width: float) -> Array:
    """Returns the outline [7, 2] of an arrow, all of it at `start` where the two are the same point."""
    along = np.subtract(end, start)
    length = float(np.hypot(*along))
    if length == 0.0:
        return np.tile(np.asarray(start, dtype=np.float64), (7, 1))
    along = along / length
    aside = np.array([-along[1], along[0]])
    neck = max(0.0, length - 3 * width)
    outline = [(0, -0.5), (neck, -0.5), (neck, -1.5), (length, 0), (neck, 1.5), (neck, 0.5), (0, 0.5)]
    return np.array([start + a * along + width * b * aside for a, b in outline])


def _turn(centre: tuple[float, float], radius: float, level: float) -> tuple[Array, Array]:
    """Returns an arc [n, 2] about a joint and its head [3, 2]: from the top, counterclockwise where `level` is > 0."""
    angle = np.pi / 2 + np.linspace(0.0, 0.8 * np.pi * level, 24)
    line = np.array(centre) + radius * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    if level == 0.0:
        return line, np.tile(line[-1], (3, 1))
    outward = np.array([math.cos(angle[-1]), math.sin(angle[-1])])
    onward = math.copysign(1.0, level) * np.array([-outward[1], outward[0]])
    size = 0.3 * radius
    head = line[-1] + size * np.array([-0.6 * outward, 1.2 * onward, 0.6 * outward])
    return line, head


_MOST_CURVES = 12  # more do not fit on a telephone
_CAR = np.array([(-0.1, 0.03), (0.1, 0.03), (0.1, 0.085), (0.055, 0.085), (0.035, 0.13), (-0.055, 0.13),
                 (-0.075, 0.085), (-0.1, 0.085)])  # fmt: skip
_WHEELS = np.array([(-0.06, 0.028), (0.06, 0.028)])
_WALLS, _GOAL = (7, 12, 17), 24
_MOVES = {0: (-1.0, 0.0), 1: (1.0, 0.0), 2: (0.0, -1.0), 3: (0.0, 1.0)}

_CARTPOLE = Scene(size=4, height=150, draw=draw_cartpole, ending="the pole fell or the cart left the track")
_MOUNTAIN_CAR = Scene(size=2, height=318, draw=draw_mountain_car, ending="the flag is reached")

SCENES: dict[str, Scene] = {
    "cartpole_v0": _CARTPOLE,
    "cartpole_v1": _CARTPOLE,
    "mountain_car": _MOUNTAIN_CAR,
    "mountain_car_continuous": _MOUNTAIN_CAR,
    "pendulum": Scene(size=3, height=320, draw=draw_pendulum),
    "acrobot": Scene(size=6, height=340, draw=draw_acrobot, ending="the tip is above the line"),
    "gridworld": Scene(size=25, height=360, draw=draw_gridworld, ending="the goal is reached"),
    "recommend": Scene(size=17, height=260, draw=draw_recommend, ending="the session is over", margin=(36, 44, 12)),
}
