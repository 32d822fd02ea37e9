"""A picture of a simulated run: an episode as an animated GIF.

Pillow, in the extra `pictures`, is imported in functions: training does not need it.
"""

import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from reagent_lite.errors import needing
from reagent_lite.whole_files import write_whole

if TYPE_CHECKING:
    from PIL.Image import Image

# Okabe & Ito (2008), Color Universal Design: distinct with any color vision
BLACK = "#000000"
GREEN = "#009e73"
BLUE = "#0072b2"
VERMILION = "#d55e00"
ORANGE = "#e69f00"
GRAY = "#999999"
PALE = "#d9d9d9"

WIDTH, HEIGHT = 480, 360  # pixels of a frame
TOP, BOTTOM = 40, 320  # edges of the scene in a frame
_FINE = 2  # a frame is drawn larger by this factor and then shrunk, for smooth edges
_MILLISECONDS = 40
_LAST_MILLISECONDS = 2000  # time to read the ending before the loop starts again
_MOST_FRAMES = 300
_MOST_CURVES = 12  # more do not fit on a phone


def require_pictures() -> None:
    """Checks that pictures can be drawn; to call before a run.

    Raises:
        ConfigError: Pillow cannot be imported; the error names the command that installs it.
    """
    with needing("pictures", "simulation.pictures", ", or set it to false"):
        import PIL.GifImagePlugin  # noqa: F401


@dataclass(frozen=True, slots=True, kw_only=True)
class Agents:
    """Positions of A agents on a square at the T + 1 states of an episode.

    Attributes:
        x, y: [T + 1, A] coordinates from 0 to 1.
        in_game: [T + 1, A] bool, whether the agent is still in the game.
        kind: [A] number of each agent's type.
        kinds: names of the types.
    """

    x: NDArray[np.floating]
    y: NDArray[np.floating]
    in_game: NDArray[np.bool_]
    kind: NDArray[np.integer]
    kinds: tuple[str, ...]

    def caption(self, step: int) -> str:
        """Returns the number of agents of each type in the game, as text."""
        playing = self.kind[self.in_game[step]]
        return "   ".join(f"{name} {(playing == number).sum()}" for number, name in enumerate(self.kinds))


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """A recorded episode of T steps.

    Attributes:
        env: name of the environment, which determines the scene.
        observation: [T + 1, S] observations of the first agent, including the last one.
        action: [T] action ids of the first agent.
        reward: [T] rewards of the first agent.
        ending: kind of end, such as "terminated"; "" if the episode did not end.
        action_names: names of K fixed actions; an id without a name is shown as a number.
        parameters: constants of the dynamics in use, by the kernel's names.
        agents: positions of the agents, if they have positions on a square.
    """

    env: str
    observation: NDArray[np.floating]
    action: NDArray[np.integer]
    reward: NDArray[np.floating]
    ending: str
    action_names: tuple[str, ...] = ()
    parameters: Mapping[str, float] = field(default_factory=dict)
    agents: Agents | None = None

    def caption(self, step: int) -> str:
        """Returns the action at a step, or the kind of end after the last, as text."""
        if step == len(self.action):
            return self.ending or "the recording ends here"
        if self.agents is not None:
            return self.agents.caption(step)
        action = int(self.action[step])
        return f"action: {self.action_names[action] if action < len(self.action_names) else action}"[:60]


def write_animation(file: Path, episode: Episode, *, most_frames: int = _MOST_FRAMES) -> None:
    """Writes an episode as an animated GIF that loops; a failure leaves no partial file.

    Args:
        file: path of the GIF.
        episode: the episode.
        most_frames: largest number of frames, at least 2; a longer episode is shown by evenly spaced states,
            including the first and the last.
    """
    from PIL import Image

    count = len(episode.action) + 1
    steps = np.linspace(0, count - 1, min(count, most_frames)).round().astype(int).tolist()
    palette = frame(episode, steps[-1]).quantize(64)  # shared by all frames, which then compress well
    frames = [frame(episode, step).quantize(palette=palette, dither=Image.Dither.NONE) for step in steps]
    durations = [_MILLISECONDS] * (len(frames) - 1) + [_LAST_MILLISECONDS]
    data = io.BytesIO()
    frames[0].save(data, format="GIF", save_all=True, append_images=frames[1:], duration=durations, loop=0)
    write_whole(file, data.getvalue())


def frame(episode: Episode, step: int) -> "Image":
    """Returns the picture of an episode at a step, 0 to T: state, action and return so far."""
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", (WIDTH * _FINE, HEIGHT * _FINE), "#ffffff")
    draw = ImageDraw.Draw(image)
    view, shapes = SCENES.get((episode.env, episode.observation.shape[1]), _CURVES)
    if episode.agents is not None:
        view, shapes = _SQUARE
    scale = np.array([WIDTH - 40, TOP - BOTTOM]) / (view[1] - view[0], view[3] - view[2])
    if shapes is not _curves:  # its two axes have different units
        scale = np.abs(scale).min() * np.array([1, -1])
    middle = np.array([WIDTH, TOP + BOTTOM]) / 2 - scale * ((view[0] + view[1]) / 2, (view[2] + view[3]) / 2)
    for points, color, width in shapes(episode, step):
        at = [(float(x), float(y)) for x, y in _FINE * (np.asarray(points, dtype=np.float64) * scale + middle)]
        if len(at) == 1:
            draw.circle(at[0], width * _FINE / 2, fill=color)
        else:
            draw.line(at, fill=color, width=round(width * _FINE), joint="curve")
    total = float(episode.reward[:step].sum(dtype=np.float64))
    head = f"{episode.env[:24]}   step {step}/{len(episode.action)}   return {total:.4g}"
    for y, words in ((16, head), (HEIGHT - 16, episode.caption(step))):
        draw.text((12 * _FINE, y * _FINE), words, fill=BLACK, font=ImageFont.load_default(12 * _FINE), anchor="lm")
    return image.reduce(_FINE)


# ---- scenes; geometry, signs and limits of CartPole follow Gymnasium

Shapes = Iterator[tuple[Sequence[tuple[float, float]] | NDArray[np.floating], str, float]]
"""Lines of (points, color, width in pixels); a single point is a disc."""


def _cartpole(episode: Episode, step: int) -> Shapes:
    x, _, angle, _ = map(float, episode.observation[step])  # angle 0 is up, right > 0
    x *= 2.4 / episode.parameters.get("position_limit", 2.4)  # the track fills the picture for any length
    yield [(-2.4, 0), (2.4, 0)], GRAY, 2
    yield [(x - 0.15, 0.12), (x + 0.15, 0.12)], BLACK, 14
    yield [(x, 0.24), (x + math.sin(angle), 0.24 + math.cos(angle))], VERMILION, 6


def _square(episode: Episode, step: int) -> Shapes:
    """Draws a disc for each agent in the color of its type, pale for agents that have left the game."""
    agents = episode.agents
    assert agents is not None
    yield [(0, 0), (1, 0), (1, 1), (0, 1), (0, 0)], GRAY, 2
    radius = 14 if len(agents.kind) <= 20 else 8
    for x, y, plays, kind in zip(agents.x[step], agents.y[step], agents.in_game[step], agents.kind, strict=True):
        yield [(x, y)], (VERMILION, BLUE, GREEN, ORANGE)[kind % 4] if plays else PALE, radius


def _curves(episode: Episode, step: int) -> Shapes:
    """Draws each feature of the observation over the steps on its own scale, the reward below, and the current step."""
    features = [*episode.observation[:, :_MOST_CURVES].T.astype(np.float64)]
    # the reward of a step is drawn at the end of the step
    curves = [*features, np.concatenate([episode.reward[:1], episode.reward])] if len(episode.reward) else features
    steps = np.linspace(0, 1, len(episode.observation))
    for row, values in enumerate(curves):
        finite = np.isfinite(values)
        if finite.any():
            low, high = values[finite].min(), values[finite].max()
            height = 1 - (row + 0.9 - 0.8 * (values - low) / (high - low or 1.0)) / len(curves)
            yield np.stack([steps, height], axis=1)[finite], GRAY if row < len(features) else GREEN, 1.5
    yield [(steps[step], 0), (steps[step], 1)], VERMILION, 3


_Scene = tuple[tuple[float, float, float, float], Callable[[Episode, int], Shapes]]
_CURVES: _Scene = ((0.0, 1.0, 0.0, 1.0), _curves)
_SQUARE: _Scene = ((-0.05, 1.05, -0.05, 1.05), _square)
_CARTPOLE: _Scene = ((-2.6, 2.6, -0.2, 1.4), _cartpole)
SCENES: Mapping[tuple[str, int], _Scene] = {("cartpole_v0", 4): _CARTPOLE, ("cartpole_v1", 4): _CARTPOLE}
"""View (left, right, bottom, top) and shapes by environment and S; other environments are shown as curves."""
