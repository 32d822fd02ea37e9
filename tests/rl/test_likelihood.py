"""Effective numbers of episodes by hand; intervals are tested where they are used, in evaluation."""

import pytest
import torch

from reagent_lite.rl.likelihood import Contributions


def contributions(total: list[float], size: list[float], **changes: torch.Tensor) -> Contributions:
    values, sizes = torch.tensor([total, size], dtype=torch.float64)
    return Contributions(total=values, size=sizes, weight=torch.ones_like(sizes), outcome=values / sizes, **changes)  # type: ignore[arg-type]


def test_informative_episodes_of_unequal_sizes() -> None:
    """Mean 1.5 / 6, deviations 0.75, -0.5 and -0.25: 0.875^2 / 0.3828125."""
    assert contributions([1.0, 0.0, 0.5], [1, 2, 3]).informative == pytest.approx(2.0, abs=1e-12)


def test_a_prediction_is_no_information() -> None:
    """Rewards 1, 0, 0, 0, half of which a model predicts: as if the one event were all, 0.75^2 / (0.75^4 + 3 / 256)."""
    episodes = contributions([1.0, -2.0, 1.0, -1.0], [1, 1, 1, 1], earned=torch.tensor([1.0, 0, 0, 0]).double())
    assert episodes.informative == pytest.approx(0.75**2 / (0.75**4 + 3 * 0.25**4), abs=1e-12)
