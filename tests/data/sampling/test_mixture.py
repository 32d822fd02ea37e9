"""Mixtures: rows of all parts in one batch, their shares of the loss, and losses that find their way back."""

from unittest.mock import MagicMock, Mock, call

import torch

from reagent_lite.data.sampling.mixture import MixedSource
from reagent_lite.types import Actions, TransitionBatch


def batch(
    rows: int, choices: int, value: float = 1.0, *, metrics: int = 0, features: int = 0, expanded: bool = False
) -> TransitionBatch:
    """A batch whose columns have this value; metrics are 5 and features of candidates 2."""
    column = torch.full((rows,), value)
    mask = torch.ones(1, 1).bool().expand(rows, choices) if expanded else torch.ones(rows, choices).bool()
    actions = Actions(mask=mask, features=torch.full((rows, choices, features), 2.0) if features else None)
    return TransitionBatch(
        state=column.unsqueeze(1), actions=actions, action=torch.full((rows,), choices - 1), reward=column,
        steps=column, bootstrap=column, next_state=column.unsqueeze(1), next_actions=actions,
        next_action=torch.zeros(rows, dtype=torch.int64), propensity=column,
        metrics=torch.full((rows, metrics), 5.0), weight=torch.full((rows,), 1 / rows),
    )  # fmt: skip


def source(*batches: TransitionBatch) -> MagicMock:
    return MagicMock(__next__=Mock(side_effect=batches))


def test_rows_of_all_parts_with_their_shares() -> None:
    mixed = next(
        MixedSource(((source(batch(3, 2, 1, expanded=True)), 0.75), (source(batch(2, 2, 2, metrics=2)), 0.25)))
    )
    for column in (mixed.state[:, 0], mixed.reward, mixed.steps, mixed.bootstrap, mixed.next_state[:, 0]):
        assert column.tolist() == [1, 1, 1, 2, 2]
    torch.testing.assert_close(mixed.weight, torch.tensor([0.25, 0.25, 0.25, 0.125, 0.125]))
    assert mixed.actions.mask.tolist() == mixed.next_actions.mask.tolist() == [[True, True]] * 5
    assert mixed.actions.features is None
    assert mixed.metrics.tolist() == [[0, 0]] * 3 + [[5, 5]] * 2  # a part without metrics


def test_lists_of_candidates_are_padded_to_the_longest() -> None:
    mixed = next(
        MixedSource(((source(batch(1, 2, features=3)), 0.5), (source(batch(2, 4, features=3, expanded=True)), 0.5)))
    )
    for choices in (mixed.actions, mixed.next_actions):
        assert choices.mask.tolist() == [[True, True, False, False], [True] * 4, [True] * 4]
        assert choices.features.tolist() == [[[2] * 3, [2] * 3, [0] * 3, [0] * 3], *[[[2] * 3] * 4] * 2]
    assert mixed.action.tolist() == [1, 3, 3]


def test_losses_and_states_go_back_to_their_parts() -> None:
    first, second = source(batch(3, 2), batch(1, 2)), source(batch(1, 2), batch(1, 2))
    mixture = MixedSource(((first, 0.5), (second, 0.5)))
    for errors in ([1.0, 2, 3, 4], [5.0, 6]):  # of the last batch
        next(mixture)
        mixture.record_errors(torch.tensor(errors))
    assert [[call.args[0].tolist() for call in part.record_errors.mock_calls] for part in (first, second)] == [
        [[1, 2, 3], [5]], [[4], [6]],
    ]  # fmt: skip
    assert mixture.state_dict() == {"0": first.state_dict(), "1": second.state_dict()}
    mixture.load_state_dict({"0": {"step": 4}, "1": {"step": 6}})
    assert [part.load_state_dict.mock_calls for part in (first, second)] == [[call({"step": n})] for n in (4, 6)]
