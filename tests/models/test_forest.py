"""Trees as tensors: a tree by hand, and LightGBM's own predictions of trees that it has grown."""

import lightgbm
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from reagent_lite.algorithms.reward_fit import TreeSettings, grow_trees
from reagent_lite.models.forest import Forest
from reagent_lite.rl.reward_losses import SquaredLoss
from tests.helpers.onnx_sessions import onnx_session

INFINITE = float("inf")
SETTINGS = TreeSettings(most=40, depth=4, leaves=8, shrinkage=0.1, threads=1, seed=0)


class Returned(nn.Module):
    """A forest whose result is a tuple, as a predictor's."""

    def __init__(self, forest: Forest) -> None:
        super().__init__()
        self.forest = forest

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (self.forest(x),)


def by_hand() -> Forest:
    """Output 0: x1 <= 0.5 gives 1, else x0 <= -1 gives 2, else 4. Output 1: always 8."""
    feature = torch.tensor([[1, 0, 0], [0, 0, 0]])
    threshold = torch.tensor([[0.5, INFINITE, -1.0], [INFINITE] * 3])
    value = torch.tensor([[1.0, 1, 2, 4], [8.0, 0, 0, 0]])
    return Forest(feature, threshold, value, outputs=2)


def grown() -> tuple[Forest, lightgbm.Booster, np.ndarray]:
    random = np.random.default_rng(0)
    x = random.normal(size=(3000, 6)).astype(np.float32)
    x[:, 4] = x[:, 4].round()  # thresholds beside values that many rows share
    y = np.sign(x[:, 0] * x[:, 1]) + x[:, 4] + random.normal(size=3000)
    data = lightgbm.Dataset(x, y, params={"max_bin": 63, "verbosity": -1})
    booster = lightgbm.train(SETTINGS.parameters(SquaredLoss()), data, num_boost_round=40)
    return Forest(*grow_trees(x, y, 40, SETTINGS), outputs=1), booster, x


def test_a_tree_by_hand() -> None:
    x = torch.tensor([[0.0, 0.5], [-1.0, 0.6], [-0.9, 0.6]])
    assert by_hand()(x).tolist() == [[1, 8], [2, 8], [4, 8]]


def test_grown_trees_predict_what_lightgbm_predicts() -> None:
    forest, booster, x = grown()
    np.testing.assert_allclose(forest(torch.from_numpy(x))[:, 0], booster.predict(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("count", [0, 1, 3000])
def test_onnx_and_torchscript_have_the_same_values_for_any_number_of_rows(count: int) -> None:
    forest, _, x = grown()
    rows = torch.from_numpy(x[:count])
    expected = forest(rows)
    session = onnx_session(Returned(forest), (torch.ones(3, 6),), inputs={"x": ("rows", 6)}, outputs={"y": ("rows", 1)})
    [values] = session.run(None, {"x": rows.numpy()})
    np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-6)
    with pytest.warns(DeprecationWarning, match="torch.jit"):
        traced = torch.jit.trace(forest, (torch.ones(3, 6),), check_trace=False)
    torch.testing.assert_close(traced(rows), expected, rtol=0, atol=0)


def test_onnx_of_a_tree_by_hand() -> None:
    session = onnx_session(
        Returned(by_hand()), (torch.ones(3, 2),), inputs={"x": ("rows", 2)}, outputs={"y": ("rows", 2)}
    )
    given = np.array([[0.0, 0.5], [-1.0, 0.6], [-0.9, 0.6]], np.float32)
    [values] = session.run(None, {"x": given})
    assert values.tolist() == [[1, 8], [2, 8], [4, 8]]
