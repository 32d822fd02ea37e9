"""Mixtures: rows of all parts in one batch, their shares of the loss, and losses that find their way back."""

from typing import Any

import torch
from torch import Tensor

from reagent_lite.data.sampling.mixture import MixedSource
from reagent_lite.types import Actions, TransitionBatch


class Numbered:
    """Batches whose rows hold the number of the batch; keeps the errors it gets."""

    def __init__(self, rows: int, choices: int, *, metrics: int = 0, features: int = 0, expanded: bool = False) -> None:
        self.shape = rows, choices, metrics, features, expanded
        self.step = 0
        self.losses: list[list[float]] = []

    def __next__(self) -> TransitionBatch:
        rows, K, metrics, F, expanded = self.shape
        self.step += 1
        column = torch.full((rows,), float(self.step))
        mask = torch.ones(1, 1, dtype=torch.bool).expand(rows, K) if expanded else torch.ones(rows, K).bool()
        listed = None if not F else torch.full((K, F), 2.0).expand(rows, K, F)
        return TransitionBatch(
            state=column.unsqueeze(1), actions=Actions(mask=mask, features=listed), action=torch.full((rows,), K - 1),
            reward=column, steps=column, bootstrap=column, next_state=column.unsqueeze(1),
            next_actions=Actions(mask=mask, features=listed), next_action=torch.zeros(rows, dtype=torch.int64),
            propensity=column, metrics=torch.full((rows, metrics), 5.0), weight=torch.full((rows,), 1 / rows),
        )  # fmt: skip

    def learned(self, row_errors: Tensor) -> None:
        self.losses.append(row_errors.tolist())

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


def test_rows_of_all_parts_with_their_shares() -> None:
    first, second = Numbered(3, 2, expanded=True), Numbered(2, 2, metrics=2)
    next(second)  # so that its rows read 2
    batch = next(MixedSource(((first, 0.75), (second, 0.25))))
    for column in (batch.state[:, 0], batch.reward, batch.steps, batch.bootstrap, batch.next_state[:, 0]):
        assert column.tolist() == [1, 1, 1, 2, 2]
    torch.testing.assert_close(batch.weight, torch.tensor([0.25, 0.25, 0.25, 0.125, 0.125]))
    assert batch.actions.mask.tolist() == batch.next_actions.mask.tolist() == [[True, True]] * 5
    assert batch.actions.features is None
    assert batch.metrics.tolist() == [[0, 0]] * 3 + [[5, 5]] * 2  # a part without metrics


def test_lists_of_candidates_are_padded_to_the_longest() -> None:
    batch = next(MixedSource(((Numbered(1, 2, features=3), 0.5), (Numbered(2, 4, features=3, expanded=True), 0.5))))
    for choices in (batch.actions, batch.next_actions):
        assert choices.features is not None
        assert choices.mask.tolist() == [[True, True, False, False], [True] * 4, [True] * 4]
        assert choices.features[0].tolist() == [[2] * 3, [2] * 3, [0] * 3, [0] * 3]
        assert choices.features[1:].tolist() == [[[2] * 3] * 4] * 2
    assert batch.action.tolist() == [1, 3, 3]


def test_losses_go_back_to_the_parts_of_the_last_batch() -> None:
    first, second = Numbered(3, 2), Numbered(1, 2)
    mixture = MixedSource(((first, 0.5), (second, 0.5)))
    next(mixture)
    mixture.learned(torch.tensor([1.0, 2, 3, 4]))
    first.shape = (1, *first.shape[1:])
    next(mixture)
    mixture.learned(torch.tensor([5.0, 6]))
    assert first.losses == [[1, 2, 3], [5]]
    assert second.losses == [[4], [6]]


def test_states_are_kept_by_part() -> None:
    mixture, other = (MixedSource(((Numbered(1, 2), 0.5), (Numbered(1, 2), 0.5))) for _ in range(2))
    next(mixture)
    assert mixture.state_dict() == {"0": {"step": 1}, "1": {"step": 1}}
    other.load_state_dict({"0": {"step": 4}, "1": {"step": 6}})
    assert next(other).reward.tolist() == [5, 7]
