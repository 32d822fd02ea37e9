"""Which state of a learner is kept, by hand."""

import pytest
import torch
from torch import nn

from reagent_lite.training.best import BestState
from reagent_lite.training.checkpoint_folder import flat, nest

LOSS = {"tags": ("loss",), "lowest": True, "unit": "epoch", "described": "lowest loss"}


def after(best: BestState, learner: nn.Linear, figures: list[float]) -> None:
    """The weight in an epoch is its figure."""
    for figure in figures:
        nn.init.constant_(learner.weight, figure)
        best.compare({"loss": figure, "other": 10 * figure})


@pytest.mark.parametrize(
    ("lowest", "tags", "figures", "number", "value"),
    [
        (True, ("loss",), [3, 2, 5], 2, 2),
        (False, ("loss",), [3, 2, 5], 3, 5),
        (False, ("loss", "other"), [3, 2, 1], 1, 33),
        (True, ("loss",), [float("nan"), 4, float("nan"), float("inf")], 2, 4),
        (True, ("loss",), [2, 2, 3], 1, 2),  # of equal ones the first
    ],
)
def test_the_state_of_the_best_epoch_returns(
    lowest: bool, tags: tuple[str, ...], figures: list[float], number: int, value: float
) -> None:
    learner = nn.Linear(2, 1)
    best = BestState(learner, **{**LOSS, "tags": tags, "lowest": lowest}, patience=None)
    after(best, learner, figures)
    address = learner.weight.data_ptr()
    best.restore()
    assert learner.weight.tolist() == [[figures[number - 1]] * 2]
    assert learner.weight.data_ptr() == address  # which CUDA graphs read
    assert (best.exhausted, best.is_last) == (False, number == len(figures))
    kept = {"unit": "epoch", "number": number, "of": len(figures), "by": "lowest loss", "value": value}
    assert best.document() == {"kept": kept}


def test_patience_counts_epochs_since_the_best_and_a_checkpoint_has_all_of_it() -> None:
    learner = nn.Linear(2, 1)
    best = BestState(learner, **LOSS, patience=2)
    after(best, learner, [3, 2, 5])
    other = BestState(learner, **LOSS, patience=2)
    other.load_state_dict(nest(flat(best.state_dict())))
    other.load_state_dict({})  # of a checkpoint without it
    assert not other.exhausted
    after(other, learner, [4])
    assert other.exhausted
    other.restore()
    assert learner.weight.tolist() == [[2, 2]]


def test_without_a_figure_the_last_state_stays() -> None:
    learner = nn.Linear(2, 1)
    best = BestState(learner, **LOSS, patience=1)
    after(best, learner, [float("nan")])
    best.load_state_dict(nest(flat(best.state_dict())))
    best.restore()
    assert (best.exhausted, best.document()) == (True, {})
    assert torch.isnan(learner.weight).all()
