"""Losses, by hand arithmetic and against numpy."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from reagent_lite.rl.losses import (
    categorical_projection,
    conservative_loss,
    constant_loss,
    imitation_loss,
    quantile_huber_loss,
    td_error,
    td_loss,
)


@pytest.mark.parametrize(
    ("kind", "prediction", "target", "losses", "errors"),
    [
        ("mse", [3.0, 0.5], [1.0, 1.0], [4.0, 0.25], [2.0, 0.5]),
        ("huber", [3.0, 0.5], [1.0, 1.0], [1.5, 0.125], [2.0, 0.5]),  # 2 - 1/2; 0.5^2 / 2
        ("bce_with_logits", [0.0], [1.0], [math.log(2)], [0.5]),
    ],
)
def test_td_losses_and_errors(
    kind: str, prediction: list[float], target: list[float], losses: list[float], errors: list[float]
) -> None:
    assert td_loss(torch.tensor(prediction), torch.tensor(target), kind).tolist() == pytest.approx(losses)
    assert td_error(torch.tensor(prediction), torch.tensor(target), kind).tolist() == errors


@pytest.mark.parametrize("kind", ["mse", "huber", "bce_with_logits"])
@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
def test_no_constant_is_needed_to_have_less_than_the_loss_of_a_constant(kind: str, scale: float) -> None:
    """The best of many constants has at most that loss; for squared error and cross-entropy, exactly that."""
    rng = np.random.default_rng(0)
    target = rng.random(500) ** 3 if kind == "bce_with_logits" else scale * rng.normal(size=500) ** 3
    constants = torch.linspace(float(target.min()) - 3, float(target.max()) + 3, 4001, dtype=torch.float64)
    least = min(float(td_loss(c.expand(500), torch.tensor(target), kind).mean()) for c in constants)
    bound = constant_loss(float(target.mean()), float(target.var()), kind)
    assert bound >= least if kind == "huber" else bound == pytest.approx(least, rel=1e-3)


def test_huber_loss_of_a_constant() -> None:
    # 0.5^2 / 2; 3 - 1/2
    assert [constant_loss(0.0, 0.25, "huber"), constant_loss(7.0, 9.0, "huber")] == [0.125, 2.5]


def test_projection_splits_mass_between_neighbors() -> None:
    support = torch.tensor([0.0, 1.0, 2.0])
    projected = categorical_projection(
        torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]]), torch.tensor([[0.25, 2.0, 9.0], [-5.0, 1.5, 7.0]]), support
    )
    # row 1: half a unit at 0.25 -> 0.375 at 0, 0.125 at 1; half at 2. Row 2: -5 -> 0, 1.5 -> 1 and 2, 7 -> 2
    torch.testing.assert_close(projected, torch.tensor([[0.375, 0.125, 0.5], [0.2, 0.15, 0.65]]))


def test_quantile_huber_by_hand() -> None:
    # quantiles 0 and 2 at midpoints 1/4 and 3/4; targets 1 and 4
    # errors of quantile 0: 1, 4 -> huber 0.5, 3.5, weight 1/4 -> mean (0.125 + 0.875) / 2 = 0.5
    # errors of quantile 2: -1, 2 -> huber 0.5, 1.5, weights 1/4, 3/4 -> mean (0.125 + 1.125) / 2 = 0.625
    assert quantile_huber_loss(torch.tensor([[0.0, 2.0]]), torch.tensor([[1.0, 4.0]])).item() == pytest.approx(1.125)


@pytest.mark.parametrize(("loss", "action"), [(conservative_loss, 0), (imitation_loss, 1)])
def test_conservative_and_imitation_ignore_forbidden_choices(loss: Any, action: int) -> None:
    result = loss(torch.tensor([[1.0, 1.0, 50.0]]), torch.tensor([[True, True, False]]), torch.tensor([action]))
    assert result.item() == pytest.approx(math.log(2))
