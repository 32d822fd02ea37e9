"""The learning curve: what is read from a run's figures, and what stands in the picture."""

import json
import math
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from reagent_lite.errors import DataError
from reagent_lite.evaluation import pictures
from reagent_lite.evaluation.pictures import LearningCurve, curve_points, learning_curve

drawn = pytest.mark.skipif(find_spec("matplotlib") is None, reason="the extra `pictures` is not installed")


# ---- the run's figures


def write_metrics(folder: Path, lines: list[dict[str, object]], tail: str = "") -> Path:
    file = folder / "metrics.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)
    return file


def evaluated(step: int, mean: float | None, half: float | None = None, **others: object) -> dict[str, object]:
    line: dict[str, object] = {"step": step, "simulation/return/mean": mean, **others}
    if half is not None and mean is not None:
        line |= {"simulation/return/lower": mean - half, "simulation/return/upper": mean + half}
    return line


def test_curve_points_by_environment_steps(tmp_path: Path) -> None:
    file = write_metrics(
        tmp_path,
        [
            {"step": 100, "simulation/env_steps": 1000, "train/td_loss": 4.0},
            {"step": 150, "train/td_loss": 3.0, "other": 1.0},
            {"step": 200, "simulation/env_steps": 3000, "simulation/training_return/mean": 9.0},
            evaluated(200, 20.0, 2.0),
            evaluated(300, None),
            {"step": 300, "train/td_loss": None, "simulation/env_steps": 5000},
        ],
    )
    points = curve_points(file)
    assert points.unit == "environment steps"
    # step 150 lies half-way between 1000 and 3000
    np.testing.assert_array_equal(points.loss, [[1000, 4], [2000, 3]])
    np.testing.assert_array_equal(points.training, [[3000, 9]])
    np.testing.assert_array_equal(points.evaluation, [[3000, 20, 18, 22]])


def test_curve_points_by_optimizer_steps_and_the_last_of_a_step(tmp_path: Path) -> None:
    file = write_metrics(tmp_path, [evaluated(10, 1.0), evaluated(20, 5.0, 1.0), evaluated(20, 6.0, 2.0)])
    points = curve_points(file)
    assert points.unit == "optimizer steps"
    np.testing.assert_array_equal(points.evaluation, [[10, 1, math.nan, math.nan], [20, 6, 4, 8]])
    assert points.loss.shape == points.training.shape == (0, 2)


def test_an_unfinished_last_line_is_passed_over_and_another_is_an_error(tmp_path: Path) -> None:
    file = write_metrics(tmp_path, [evaluated(10, 1.0)], tail='{"step": 20, "simula')
    assert len(curve_points(file).evaluation) == 1
    file = write_metrics(tmp_path, [evaluated(10, 1.0), {"epoch": 3}])
    with pytest.raises(DataError, match=r'metrics\.jsonl:2: expected an object with "step"'):
        curve_points(file)


def test_no_lines(tmp_path: Path) -> None:
    points = curve_points(write_metrics(tmp_path, []))
    assert points.evaluation.shape == (0, 4)
    assert points.unit == "optimizer steps"


# ---- the learning curve


def curve(**series: list[list[float]]) -> LearningCurve:
    def rows(name: str, width: int) -> NDArray[np.float64]:
        return np.array(series.get(name, []), dtype=np.float64).reshape(-1, width)

    return LearningCurve(
        unit="environment steps", evaluation=rows("evaluation", 4), training=rows("training", 2), loss=rows("loss", 2)
    )


@drawn
def test_lines_of_the_learning_curve() -> None:
    points = curve(
        evaluation=[[1000, 10, 8, 12], [2000, 20, 17, 23]],
        training=[[500, 5], [1500, 15]],
        loss=[[500, 40.0], [1500, 1.0]],
    )
    figure = learning_curve(points, title="cartpole_v1", behaviour=22.0, behaviour_name="random actions")
    returns, loss = figure.axes
    lines = {line.get_label(): line for line in returns.lines}
    np.testing.assert_array_equal(lines["evaluation, interval"].get_xydata(), [[1000, 10], [2000, 20]])
    np.testing.assert_array_equal(lines["training"].get_xydata(), points.training)
    assert lines["random actions"].get_ydata() == [22.0, 22.0]
    assert lines["random actions"].get_linestyle() == "--"
    band = {tuple(corner) for corner in returns.collections[0].get_paths()[0].vertices.tolist()}
    assert band == {(1000, 8), (1000, 12), (2000, 17), (2000, 23)}
    np.testing.assert_array_equal(loss.lines[0].get_xydata(), points.loss)
    assert loss.get_yscale() == "log"  # 40 is more than 20 times 1
    assert figure.get_suptitle() == "cartpole_v1"
    assert [axes.get_ylabel() for axes in figure.axes] == ["return (sum of rewards)", "TD loss"]
    assert loss.get_xlabel() == "environment steps"


@drawn
def test_a_loss_that_hardly_changes_or_reaches_zero_is_drawn_linearly() -> None:
    for rows in ([[1, 2.0], [2, 1.0]], [[1, 100.0], [2, 0.0]]):
        assert learning_curve(curve(loss=rows), title="x", behaviour=None).axes[1].get_yscale() == "linear"


@drawn
@pytest.mark.parametrize(
    ("points", "height"),
    [
        (curve(), 760),
        (curve(evaluation=[[100, 1, math.nan, math.nan]]), 760),
        (curve(evaluation=[[100, 1, 0, 2]], loss=[[100, 0.5]]), 980),
        (curve(training=[[100, 1], [200, 2]], loss=[[100, 0.0], [200, 0.5]]), 980),
    ],
)
def test_learning_curve_as_png(points: LearningCurve, height: int, tmp_path: Path) -> None:
    from PIL import Image

    file = tmp_path / "made" / "learning_curve.png"
    pictures.write_learning_curve(file, points, title="costs $5 and $6", behaviour=None)
    with Image.open(file) as image:
        assert image.format == "PNG"
        assert image.size == (1080, height)
    assert [path.name for path in file.parent.iterdir()] == ["learning_curve.png"]
    before = file.read_bytes()
    pictures.write_learning_curve(file, points, title="costs $5 and $6", behaviour=None)
    assert file.read_bytes() == before


@drawn
def test_the_users_own_settings_neither_matter_nor_change(tmp_path: Path) -> None:
    import matplotlib

    plain, dark = tmp_path / "plain.png", tmp_path / "dark.png"
    points = curve(evaluation=[[100, 1, 0, 2], [200, 2, 1, 3]])
    pictures.write_learning_curve(plain, points, title="x", behaviour=1.0)
    with matplotlib.rc_context({"figure.facecolor": "black", "text.usetex": True, "font.size": 30}):
        settings = dict(matplotlib.rcParams)
        pictures.write_learning_curve(dark, points, title="x", behaviour=1.0)
        assert dict(matplotlib.rcParams) == settings
    assert plain.read_bytes() == dark.read_bytes()
