"""Pictures: what they show is read back from pixels and lines, against positions worked out by hand."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageSequence

from reagent_lite.report.pictures import (
    BOTTOM,
    HEIGHT,
    TOP,
    WIDTH,
    Agents,
    Episode,
    frame,
    write_animation,
)

VERMILION = (213, 94, 0)
GRAY = (153, 153, 153)
MIDDLE = (TOP + BOTTOM) / 2


def episode_of(env: str, observation: list[list[float]], **changes: object) -> Episode:
    """An episode through these observations; action 0 and reward 1 at every step by default."""
    values = {
        "env": env,
        "observation": np.array(observation, dtype=np.float32),
        "action": np.zeros(len(observation) - 1, dtype=np.int64),
        "reward": np.ones(len(observation) - 1, dtype=np.float32),
        "ending": "terminated",
    }
    return Episode(**(values | changes))  # type: ignore[arg-type]


def pixels(trace: Episode, step: int) -> NDArray[np.uint8]:
    return np.array(frame(trace, step))


def near(picture: NDArray[np.uint8], color: tuple[int, int, int]) -> NDArray[np.bool_]:
    return np.abs(picture.astype(int) - color).max(axis=2) <= 8


def center(picture: NDArray[np.uint8], color: tuple[int, int, int] = VERMILION) -> tuple[float, float]:
    """Centroid (x, y) in pixels of a color, y downwards; the mean of none is an error."""
    y, x = np.argwhere(near(picture, color)).mean(0).tolist()
    return x, y


# ---- the animation


@pytest.mark.parametrize(("steps", "most", "shown"), [(10, 300, 11), (100, 5, 5), (0, 300, 1)])
def test_an_animation_has_the_first_and_the_last_state_and_no_more_frames_than_allowed(
    steps: int, most: int, shown: int, tmp_path: Path
) -> None:
    # x runs evenly from -2 to 2
    trace = episode_of("cartpole_v1", [[x, 0, 0, 0] for x in np.linspace(-2, 2, steps + 1)])
    write_animation(tmp_path / "rollout.gif", trace, most_frames=most)
    with Image.open(tmp_path / "rollout.gif") as image:
        pages = [(page.size, page.info.get("duration"), np.array(page.convert("RGB")))
                 for page in ImageSequence.Iterator(image)]  # fmt: skip
    if shown > 1:
        assert [page[:2] for page in pages] == [((WIDTH, HEIGHT), 40)] * (shown - 1) + [((WIDTH, HEIGHT), 2000)]
    places = [(center(picture)[0] - WIDTH / 2) / (440 / 5.2) for *_, picture in pages]
    np.testing.assert_allclose(places, np.linspace(-2, 2, shown), atol=0.03)
    assert [path.name for path in tmp_path.iterdir()] == ["rollout.gif"]


def test_captions() -> None:
    episode = episode_of("mountain_car", [[0, 0]] * 3, action=np.array([0, 2]), action_names=("left", "right"))
    # an action without a name is its number
    assert [episode.caption(step) for step in range(3)] == ["action: left", "action: 2", "terminated"]
    assert episode_of("x", [[0]], ending="").caption(0) == "the recording ends here"


# ---- scenes


@pytest.mark.parametrize(("x", "angle"), [(0.0, 0.0), (1.0, 0.2), (-2.0, -0.2), (0.5, math.pi / 2)])
@pytest.mark.parametrize("limit", [2.4, 4.8])
def test_cartpole(x: float, angle: float, limit: float) -> None:
    trace = episode_of("cartpole_v0", [[0, 0, 0, 0], [x, 0, angle, 0]], parameters={"position_limit": limit})
    scale = 440 / 5.2  # pixels of the pole's length; the track fills the picture
    (before_x, before_y), after = (center(pixels(trace, step)) for step in (0, 1))
    moved = (x * 2.4 / limit + 0.5 * math.sin(angle), 0.5 * (1 - math.cos(angle)))
    assert after == pytest.approx((240 + moved[0] * scale, before_y + moved[1] * scale), abs=3.5)
    assert before_x == pytest.approx(240, abs=1)


def test_other_environments_are_curves_with_a_line_at_the_present() -> None:
    trace = episode_of("my_env", [[0, 5, math.nan], [1, 5, 2], [4, 5, 3]], reward=np.array([1.0, 3.0]))
    picture = pixels(trace, 1)
    assert center(picture) == pytest.approx((WIDTH / 2, MIDDLE), abs=1)
    # of four rows, 70 pixels each, the first feature has the uppermost: its lowest value is 0.9 of that below the top
    assert near(picture, GRAY)[TOP + 63 - 3 : TOP + 63 + 4, 20:60].any()
    # a CartPole with three features is not the one that the scene is of
    np.testing.assert_array_equal(pixels(replace(trace, env="cartpole_v1"), 1)[TOP:], picture[TOP:])


def test_agents_are_discs_on_a_square() -> None:
    """A tagger in the middle, runners in the lower left and upper right corners; the second one leaves."""
    places = np.array([[0.5, 0.0, 1.0]] * 3)
    agents = Agents(
        x=places, y=places, in_game=np.array([[True, True, True], [True, True, False], [True, True, False]]),
        kind=np.array([0, 1, 1]), kinds=("tagger", "runner"),
    )  # fmt: skip
    trace = episode_of("tag_continuous", [[0.0] * 15] * 3, agents=agents)
    side = (BOTTOM - TOP) / 1.1
    discs = [(round(WIDTH / 2 + sign * side / 2), round(MIDDLE - sign * side / 2)) for sign in (0, -1, 1)]
    shown = [[tuple(pixels(trace, step)[y, x]) for x, y in discs] for step in range(3)]
    assert shown == [[VERMILION, (0, 114, 178), upper] for upper in ((0, 114, 178), (217, 217, 217), (217, 217, 217))]
    assert [trace.caption(step) for step in range(3)] == ["tagger 1   runner 2", "tagger 1   runner 1", "terminated"]
