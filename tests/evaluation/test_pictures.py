"""Pictures: what stands in them is read back from pixels and lines, against positions worked out by hand."""

import math
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from reagent_lite.errors import ConfigError
from reagent_lite.evaluation import pictures
from reagent_lite.evaluation.pictures import Trace, require_pictures
from reagent_lite.evaluation.pictures_scenes import SCENES, draw_curves, draw_recommend, scene_of

drawn = pytest.mark.skipif(find_spec("matplotlib") is None, reason="the extra `pictures` is not installed")

VERMILION, BLUE, SKY = (213, 94, 0), (0, 114, 178), (86, 180, 233)
WIDTH, HEADER, FOOTER, VALUES = 480, 32, 32, 92


def make_trace(env: str, observation: list[list[float]], **changes: object) -> Trace:
    """A trace through these observations; action 0 and reward 1 at every step unless told."""
    steps = len(observation) - 1
    values = {
        "env": env,
        "observation": np.array(observation, dtype=np.float32),
        "action": np.zeros(steps, dtype=np.int64),
        "reward": np.ones(steps, dtype=np.float32),
        "terminated": True,
        "truncated": False,
        "action_names": (),
    }
    return Trace(**(values | changes))  # type: ignore[arg-type]


def read(file: Path) -> tuple[list[NDArray[np.uint8]], list[int]]:
    """Frames [height, width, 3] of a GIF and how long each is shown, in milliseconds."""
    from PIL import Image, ImageSequence

    with Image.open(file) as image:
        pages = [(np.array(page.convert("RGB")), page.info["duration"]) for page in ImageSequence.Iterator(image)]
    return [page for page, _ in pages], [duration for _, duration in pages]


def frames(folder: Path, trace: Trace, **settings: int) -> list[NDArray[np.uint8]]:
    pictures.write_rollout(folder / "rollout.gif", trace, **settings)
    return read(folder / "rollout.gif")[0]


def near(frame: NDArray[np.uint8], colour: tuple[int, int, int]) -> NDArray[np.bool_]:
    return np.abs(frame.astype(int) - colour).max(axis=2) <= 8


def centre(frame: NDArray[np.uint8], colour: tuple[int, int, int] = VERMILION) -> tuple[float, float]:
    """Centroid (x, y) in pixels of a colour, y downwards."""
    rows, columns = np.nonzero(near(frame, colour))
    assert len(rows)
    return float(columns.mean()), float(rows.mean())


# ---- without matplotlib


@pytest.mark.parametrize("module", ["matplotlib", pytest.param("PIL.GifImagePlugin", marks=drawn)])
def test_missing_packages_are_named_with_the_way_to_get_them(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=r"pip install 'reagent-lite\[pictures\]'") as error:
        require_pictures()
    assert error.value.problems[0].where == "simulation.pictures"
    assert module.split(".")[0] in error.value.problems[0].got


def test_importing_has_no_effects() -> None:
    code = "import sys, reagent_lite.evaluation.pictures; print({'matplotlib', 'PIL'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


# ---- the animation


@drawn
def test_size_frames_and_duration(tmp_path: Path) -> None:
    file = tmp_path / "rollout.gif"
    pictures.write_rollout(file, make_trace("cartpole_v1", [[0, 0, 0, 0]] * 11), frames_per_second=20)
    shown, durations = read(file)
    assert len(shown) == 11  # 10 steps, and where the last one led
    assert {frame.shape for frame in shown} == {(HEADER + 150 + FOOTER, WIDTH, 3)}
    assert durations == [50] * 10 + [2000]
    assert [path.name for path in tmp_path.iterdir()] == ["rollout.gif"]


@drawn
def test_a_long_episode_is_thinned_and_keeps_its_last_state(tmp_path: Path) -> None:
    # x runs evenly from -2 to 2; 5 of 101 states are at -2, -1, 0, 1, 2
    trace = make_trace("cartpole_v1", [[x, 0, 0, 0] for x in np.linspace(-2, 2, 101)])
    shown = frames(tmp_path, trace, most_frames=5)
    places = [(centre(frame)[0] - WIDTH / 2) / (WIDTH / 5.8) for frame in shown]
    np.testing.assert_allclose(places, [-2, -1, 0, 1, 2], atol=0.02)


@drawn
def test_an_episode_without_steps_is_one_frame(tmp_path: Path) -> None:
    for env in ("cartpole_v1", "elsewhere"):
        trace = make_trace(env, [[0, 0, 0, 0]], q=np.zeros((0, 2)), terminated=False)
        assert len(frames(tmp_path, trace)) == 1


@drawn
def test_captions() -> None:
    from matplotlib.figure import Figure

    def texts(trace: Trace, step: int) -> list[str]:
        moving = pictures.draw_captions(Figure(), trace, "the flag is reached")
        moving.show(step)
        return [artist.get_text() for artist in moving.artists]  # type: ignore[attr-defined]

    base = {"action": np.array([0, 2]), "reward": np.array([1.5, -4.0]), "action_names": ("left", "right")}
    trace = make_trace("mountain_car", [[0, 0]] * 3, **base)
    assert texts(trace, 0) == ["step 0/2   return 0", "action: left"]
    assert texts(trace, 1) == ["step 1/2   return 1.5", "action: 2"]  # an action without a name
    assert texts(trace, 2) == ["step 2/2   return -2.5", "terminated: the flag is reached"]
    trace = make_trace("mountain_car", [[0, 0]] * 3, **base, terminated=False, truncated=True)
    assert texts(trace, 2)[1] == "truncated: the time limit is reached"
    trace = make_trace("mountain_car", [[0, 0]] * 3, **base, terminated=False)
    assert texts(trace, 2)[1] == "the recording stops here"


@drawn
def test_values_stand_above_the_worst_choice_on_offer(tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    q = np.array([[1.0, 4.0, 2.0], [7.0, -math.inf, 5.0], [-math.inf, 3.0, math.nan]])
    trace = make_trace("cartpole_v1", [[0, 0, 0, 0]] * 4, q=q, action=np.array([1, 0, 1]))
    moving = pictures.draw_values(Figure().add_subplot(), trace)
    *bars, closed, highest = moving.artists
    for step, heights, missing, best in (
        (0, [0, 3, 1], [], "highest 4"),
        (1, [2, 0, 0], [1], "highest 7"),
        (2, [0, 0, 0], [0, 2], "highest 3"),
        (3, [0, 0, 0], [], ""),
    ):
        moving.show(step)
        assert [bar.get_height() for bar in bars] == heights  # type: ignore[attr-defined]
        assert list(closed.get_xdata()) == missing  # type: ignore[attr-defined]
        assert highest.get_text() == best  # type: ignore[attr-defined]
    shown = frames(tmp_path, trace)
    assert shown[0].shape[0] == HEADER + 150 + FOOTER + VALUES
    strip = shown[0][HEADER + 150 :]
    # three places of 440 / 3 pixels from 20 on: the taken one is the middle, the third is a third as high
    assert centre(strip)[0] == pytest.approx(240, abs=1)
    assert centre(strip, SKY)[0] == pytest.approx(20 + 440 * 5 / 6, abs=1)
    assert near(strip, VERMILION).sum() == pytest.approx(3 * near(strip, SKY).sum(), rel=0.1)


# ---- scenes


@drawn
@pytest.mark.parametrize(("x", "angle"), [(0.0, 0.0), (1.0, 0.2), (-2.0, -0.2), (0.5, math.pi / 2)])
def test_cartpole(x: float, angle: float, tmp_path: Path) -> None:
    shown = frames(tmp_path, make_trace("cartpole_v0", [[0, 0, 0, 0], [x, 0, angle, 0]]))
    scale = WIDTH / 5.8  # pixels of a metre
    # the middle of the pole; the axle hides 7 pixels at its foot, which moves the middle by 3 along the pole
    assert centre(shown[1])[0] - centre(shown[0])[0] == pytest.approx((x + 0.5 * math.sin(angle)) * scale, abs=3.5)
    assert centre(shown[1])[1] - centre(shown[0])[1] == pytest.approx(0.5 * (1 - math.cos(angle)) * scale, abs=3.5)
    assert centre(shown[0])[0] == pytest.approx(240, abs=1)


@drawn
def test_the_push_points_where_the_action_pushes(tmp_path: Path) -> None:
    trace = make_trace("cartpole_v1", [[0, 0, 0, 0]] * 3, action=np.array([0, 1]), action_names=("left", "right"))
    left, right, last = frames(tmp_path, trace)
    assert centre(left, BLUE)[0] < 240 - 15
    assert centre(right, BLUE)[0] > 240 + 15
    assert not near(last, BLUE).any()
    # of 5 levels the middle one is no push, the second half a push to the left
    trace = make_trace("mountain_car_continuous", [[-math.pi / 6, 0]] * 4, action=np.array([0, 1, 2]),
                       action_names=tuple("01234"))  # fmt: skip
    full, half, none, _ = frames(tmp_path, trace)
    assert near(full, BLUE).sum() > near(half, BLUE).sum() > 0
    assert not near(none, BLUE).any()


@drawn
def test_mountain_car_from_valley_to_hill(tmp_path: Path) -> None:
    # both are level ground, so the car is the same picture: 2 pi / 6 further right, 2 * 0.45 higher, 250 pixels a unit
    valley, hill = frames(tmp_path, make_trace("mountain_car", [[-math.pi / 6, 0], [math.pi / 6, 0]]))
    scale = WIDTH / 1.92
    assert centre(hill)[0] - centre(valley)[0] == pytest.approx(math.pi / 3 * scale, abs=1.5)
    assert centre(hill)[1] - centre(valley)[1] == pytest.approx(-0.9 * scale, abs=1.5)
    assert centre(valley)[0] == pytest.approx((1.26 - math.pi / 6) * scale, abs=6)


@drawn
def test_pendulum_turns_counterclockwise(tmp_path: Path) -> None:
    trace = make_trace("pendulum", [[1, 0, 0], [0, 1, 0], [-1, 0, 0], [0, -1, 0]])
    half = 0.5 * 320 / 2.3  # half the rod, in pixels
    middle = (240, HEADER + 160)
    for frame, (x, y) in zip(frames(tmp_path, trace), [(0, -1), (-1, 0), (0, 1), (1, 0)], strict=True):
        assert centre(frame) == pytest.approx((middle[0] + x * half, middle[1] + y * half), abs=4)


@drawn
def test_torque_turns_the_way_it_is_drawn(tmp_path: Path) -> None:
    trace = make_trace("pendulum", [[-1, 0, 0]] * 4, action=np.array([0, 1, 2]), action_names=("-2", "0", "2"))
    negative, none, positive, _ = frames(tmp_path, trace)
    # counterclockwise from the top is on the left
    assert centre(positive, BLUE)[0] < 240 - 10
    assert centre(negative, BLUE)[0] > 240 + 10
    assert not near(none, BLUE).any()


@drawn
def test_acrobot(tmp_path: Path) -> None:
    # angles (1st, 2nd relative to it) and the middle of the second link, in links, y upwards
    cases = [
        ((0.0, 0.0), (0.0, -1.5)),
        ((math.pi / 2, 0.0), (1.5, 0.0)),
        ((math.pi / 2, math.pi / 2), (1.0, 0.5)),
        ((math.pi / 2, -math.pi / 2), (1.0, -0.5)),
        ((math.pi, 0.0), (0.0, 1.5)),
    ]
    observation = [[math.cos(a), math.sin(a), math.cos(b), math.sin(b), 0, 0] for (a, b), _ in cases]
    scale = 340 / 4.3
    for frame, (_, (x, y)) in zip(frames(tmp_path, make_trace("acrobot", observation)), cases, strict=True):
        assert centre(frame) == pytest.approx((240 + x * scale, HEADER + 170 - y * scale), abs=4)


@drawn
def test_gridworld_cells_walls_and_the_way_behind(tmp_path: Path) -> None:
    cells = [0, 5, 6, 16, 24]
    trace = make_trace("gridworld", np.eye(25)[cells].tolist(), action=np.array([3, 1, 3, 1]))
    scale = 360 / 5.1
    corner = (240 - 2.5 * scale, HEADER + 180 - 2.5 * scale)  # of cell 0

    def pixel(cell: int) -> tuple[float, float]:
        return corner[0] + (cell % 5 + 0.5) * scale, corner[1] + (cell // 5 + 0.5) * scale

    shown = frames(tmp_path, trace)
    for frame, cell in zip(shown, cells, strict=True):
        rows, columns = np.nonzero(near(frame, VERMILION))
        # the arrow hides a part of the player, so its box is measured on the side away from it
        assert abs(columns.min() - (pixel(cell)[0] - 16.7)) <= 2  # a marker of 24 points is 33 pixels wide
        assert abs(rows.min() - (pixel(cell)[1] - 16.7)) <= 2
    dark = [cell for cell in range(25) if shown[0][round(pixel(cell)[1]), round(pixel(cell)[0])].max() < 16]
    assert dark == [7, 12, 17]
    assert centre(shown[0], BLUE)[1] > pixel(0)[1] + 8  # the first move is down
    assert centre(shown[1], BLUE)[0] > pixel(5)[0] + 8  # the second is right
    assert not near(shown[0], SKY).any()
    assert near(shown[-1], SKY)[round(pixel(6)[1]), round(pixel(6)[0])]


@drawn
def test_recommend_shows_interest_satiation_and_the_item(tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    interest, satiation, item = np.eye(8)[2], 0.5 * np.eye(8)[5], np.full(8, 0.125)
    observation = [[*interest, *(0 * satiation), 0.0], [*interest, *satiation, 0.02]]
    trace = make_trace("recommend", observation, features=np.array([[*item, 0.75]]), reward=np.array([1.0]))
    moving = draw_recommend(Figure().add_subplot(), trace)
    *bars, note = moving.artists

    def heights(step: int) -> list[float]:
        moving.show(step)
        return [bar.get_height() for bar in bars]  # type: ignore[attr-defined]

    assert heights(0) == [*interest, *np.zeros(8), *item]
    assert note.get_text() == "quality 0.75: clicked"  # type: ignore[attr-defined]
    assert heights(1) == [*interest, *satiation, *np.zeros(8)]
    assert note.get_text() == ""  # type: ignore[attr-defined]
    assert frames(tmp_path, trace)[0].shape == (HEADER + 260 + FOOTER, WIDTH, 3)


@drawn
def test_other_environments_are_curves_with_a_cursor(tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    observation = [[0.0, 5.0, math.nan], [1.0, 5.0, 2.0], [4.0, 5.0, 3.0]]
    trace = make_trace("my_env", observation, reward=np.array([1.0, 3.0]))
    moving = draw_curves(Figure().add_subplot(), trace)
    cursor, present = moving.artists
    moving.show(1)
    assert cursor.get_xdata() == [1, 1]  # type: ignore[attr-defined]
    # rows of height 1 from the top, used from 0.1 to 0.9: 1 of 0 to 4; constant; 2 of 2 to 3; reward 1 of 1 to 3
    expected = [3.1 + 0.8 / 4, 2.5, 1.1, 0.1]
    np.testing.assert_allclose(present.get_ydata(), expected)  # type: ignore[attr-defined]
    # four rows of 30 pixels and 40 for the labels
    assert frames(tmp_path, trace)[0].shape == (HEADER + 40 + 4 * 30 + FOOTER, WIDTH, 3)


def test_every_scene_reads_its_own_size_only() -> None:
    sizes = {"cartpole_v0": 4, "cartpole_v1": 4, "mountain_car": 2, "mountain_car_continuous": 2, "pendulum": 3,
             "acrobot": 6, "gridworld": 25, "recommend": 17}  # fmt: skip
    assert {name: scene.size for name, scene in SCENES.items()} == sizes
    for name, size in sizes.items():
        assert scene_of(make_trace(name, [[0.0] * size] * 2)) is SCENES[name]
        assert scene_of(make_trace(name, [[0.0] * (size + 1)] * 2)).draw is draw_curves
    # 12 curves and the reward fit, whatever the size
    assert scene_of(make_trace("wide", [[0.0] * 500] * 2)).height == 40 + 30 * 13


@drawn
def test_limits_follow_the_parameters(tmp_path: Path) -> None:
    # the track is 2 * (4 + 0.5) m wide
    trace = make_trace("cartpole_v1", [[0, 0, 0, 0], [4, 0, 0, 0]], parameters={"position_limit": 4.0})
    shown = frames(tmp_path, trace)
    assert centre(shown[1])[0] - 240 == pytest.approx(4 * WIDTH / 9, abs=1.5)
