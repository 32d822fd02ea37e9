"""Ridge regression against NumPy's least squares, on rows with a penalty as further rows."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from reagent_lite.rl import ridge
from reagent_lite.rl.ridge import PENALTIES, Regression


def rows(count: int, noise: float, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, dtype=torch.float64, generator=random)
    y = x @ torch.tensor([1.0, -2, 0, 0.5], dtype=torch.float64) + 3
    fold = torch.randint(0, 3, (count,), generator=random)
    return x, y + noise * torch.randn(count, dtype=torch.float64, generator=random), fold


def least_squares(x: Tensor, y: Tensor, penalty: float, free: int) -> Tensor:
    """A penalty p of a weight is a row with sqrt(p) in its column and the target 0."""
    more = torch.eye(x.shape[1], dtype=torch.float64)[free:] * penalty**0.5
    stacked = torch.cat((x, more)).numpy()
    target = torch.cat((y, torch.zeros(len(more), dtype=torch.float64))).numpy()
    return torch.from_numpy(np.linalg.lstsq(stacked, target, rcond=None)[0])


def regression(free: int, noise: float = 1.0) -> Regression:
    x, y, fold = rows(40, noise)
    return Regression(x=torch.cat((torch.ones(40, 1), x), 1), targets=y.expand(4, -1), fold=fold, free=free)


def test_weights_are_those_of_least_squares_without_each_fold_and_of_all_rows() -> None:
    for free in (0, 1):
        given = regression(free)
        for f, weights in enumerate(given.weights([2.5])[0]):
            fitted = given.fold != f
            expected = least_squares(given.x[fitted], given.targets[f, fitted], 2.5, free)
            torch.testing.assert_close(weights, expected, rtol=1e-6, atol=1e-6)


def test_weights_of_rows_repeat_them() -> None:
    """Rows with the weights 0, 1 and 2 count as none, one and two."""
    given = regression(1)
    count = torch.arange(40) % 3
    weighted = Regression(
        x=given.x, targets=given.targets, fold=given.fold, free=1, row_weights=count.double().expand(4, -1)
    )
    for f, weights in enumerate(weighted.weights([2.5])[0]):
        rows = torch.arange(40).repeat_interleave(count)
        rows = rows[given.fold[rows] != f]
        expected = least_squares(given.x[rows], given.targets[f, rows], 2.5, 1)
        torch.testing.assert_close(weights, expected, rtol=1e-6, atol=1e-6)


def test_a_column_without_a_value_has_weight_zero() -> None:
    given = regression(1)
    empty = Regression(x=given.x * torch.tensor([1.0, 1, 0, 1, 1]), targets=given.targets, fold=given.fold, free=1)
    assert empty.weights([0.1])[0, :, 2].tolist() == [0, 0, 0, 0]


def test_columns_of_levels_have_the_products_of_dense_ones() -> None:
    level = torch.randint(0, 300, (2000,), generator=torch.Generator().manual_seed(0))
    x = torch.nn.functional.one_hot(level, 300).double()
    y = torch.randn(2000, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    given = Regression(x=x, targets=y.expand(2, -1), fold=torch.zeros(2000, dtype=torch.int64))
    sums = torch.zeros(300, dtype=torch.float64).index_add(0, level, y)
    torch.testing.assert_close(given.weights([5.0])[0, 1], sums / (torch.bincount(level, minlength=300) + 5))


@pytest.mark.parametrize("density", [0.05, 1.0], ids=["sparse", "dense"])
def test_iterations_for_many_columns_give_the_same_weights(monkeypatch: pytest.MonkeyPatch, density: float) -> None:
    random = torch.Generator().manual_seed(0)
    drawn = partial(torch.rand, dtype=torch.float64, generator=random)
    x = drawn(300, 80) * (drawn(300, 80) < density)
    x[:, 0] = 1
    given = Regression(
        x=x, targets=drawn(4, 300), fold=torch.arange(300) % 3, free=1, row_weights=drawn(4, 300)
    )  # fmt: skip
    direct = given.weights(PENALTIES)
    monkeypatch.setattr(ridge, "MOST_COLUMNS", 50)
    torch.testing.assert_close(given.weights(PENALTIES), direct, rtol=1e-6, atol=1e-7)
