"""Pages from batches, episodes from pages, and the split of episodes."""

import dataclasses

import numpy as np
import pytest
import torch
from helpers.batches import make_batch, random_batch, uniform
from helpers.pages import bandit_page
from helpers.tables import estimates
from torch import Tensor

from reagent_lite.evaluation.evaluation_rows import build_evaluation_rows, episode_groups, held_out, tables_of
from reagent_lite.rl.estimators import ESTIMATORS
from reagent_lite.types import Actions


class StateModels:
    """Predicts the first state feature for the reward and twice that for values, of every choice."""

    def predict(self, state: Tensor, actions: Actions) -> tuple[Tensor, Tensor]:
        first = state[:, :1].unsqueeze(2).expand(-1, actions.mask.shape[1], 1)
        return first, 2 * first


def test_rows_are_grouped_by_episode_in_order_of_time_without_padding():
    batch = make_batch([[1.0], [2.0], [3.0], [4.0], [5.0]], [[0.0]] * 5, [0, 1, 0, 1, 0],
                       [10.0, 20.0, 30.0, 40.0, 50.0], weight=torch.tensor([0.25] * 4 + [0.0]))  # fmt: skip
    page = build_evaluation_rows(batch.split([3, 2]), np.array([7, 3, 7, 3]), policy=uniform, models=StateModels())
    expected = {
        "episode": [3, 3, 7, 7], "position": [0, 1, 0, 1], "rank": [0, 0, 1, 1], "action": [1, 1, 0, 0],
        "outcomes": [[20], [40], [10], [30]], "model_propensities": [[0.5, 0.5]] * 4,
        "reward_model": [[[state]] * 2 for state in (2, 4, 1, 3)],
        "q_values": [[[2 * state]] * 2 for state in (2, 4, 1, 3)],
    }  # fmt: skip
    assert {name: getattr(page, name).tolist() for name in expected} == expected


def test_candidate_lists_of_unequal_length_make_one_page():
    # parametric evaluation runs, on the same page; the action is an index, not the candidate of the nearest Q
    wide = random_batch(3, 2, 4, seed=0, num_features=3)
    narrow = random_batch(2, 2, 2, seed=1, num_features=3)
    narrow = dataclasses.replace(narrow, action=torch.tensor([1, 0]), actions=dataclasses.replace(
        narrow.actions, mask=torch.ones(2, 2, dtype=torch.bool)))  # fmt: skip
    page = build_evaluation_rows([wide, narrow], np.arange(5), policy=uniform, models=StateModels())
    expected = {"mask": [[True, True, False, False]] * 2, "model_propensities": [[0.5, 0.5, 0, 0]] * 2,
                "action": [1, 0], "weight": [0.5, 0.5]}  # fmt: skip
    assert {name: getattr(page, name)[3:].tolist() for name in expected} == expected
    assert page.q_values[~page.mask].abs().sum() == 0


def test_probabilities_are_normalized_in_double_precision():
    batch = make_batch([[1.0]], [[0.0]], [0], [1.0], num_choices=3)
    page = build_evaluation_rows(
        [batch], np.array([0]), policy=lambda s, a: a.mask * (1 + 1e-6) / 3, models=StateModels()
    )
    assert page.model_propensities.sum().item() == pytest.approx(1, abs=1e-15)


def test_discount_counts_the_steps_before_a_row():
    page = bandit_page([1.0, 1.0, 1.0, 5.0], episode=[0, 0, 0, 1])
    table = tables_of(dataclasses.replace(page, steps=torch.tensor([2.0, 3.0, 1.0, 4.0]).double()), 0.5)[0]
    # after 2 steps, and after 2 + 3
    expected = {"discount": [[1, 0.25, 0.03125], [1, 0, 0]], "reward": [[1, 1, 1], [5, 0, 0]],
                "running": [[1, 1, 1], [1, 0, 0]]}  # fmt: skip
    assert {name: getattr(table, name).tolist() for name in expected} == expected


@pytest.mark.parametrize(("bootstrap", "expected"), [((1.0, 1.0), 2.0), ((1.0, 0.0), 1.5)])
def test_estimates_of_an_episode_that_was_cut(bootstrap: tuple[float, float], expected: float):
    # reward 1 at each step, gamma 1/2, and a model that says 2 for every state: right if the record was cut, while
    # two steps to a true end are worth 1.5
    batch = make_batch([[1.0]] * 2, [[1.0]] * 2, [0, 0], [1.0, 1.0], propensity=torch.full((2,), 0.5),
                       bootstrap=torch.tensor(bootstrap))  # fmt: skip
    page = build_evaluation_rows([batch], np.array([0, 0]), policy=uniform, models=StateModels())
    assert page.next_value.squeeze(1).tolist() == [2 * b for b in bootstrap]
    (table,) = tables_of(page, 0.5)
    assert table.tail.tolist() == [[0, 0.25 * 2 * bootstrap[1]]]
    # all lengths agree on the cut episode; on the ended one a single episode says nothing of variance or bias
    for name in ("Sequential_Doubly_Robust", "Weighted_Sequential_Doubly_Robust", *["MAGIC"] * int(bootstrap[1])):
        assert float(estimates(ESTIMATORS[name], table, torch.ones(1, 1))[0]) == pytest.approx(expected), name


@pytest.mark.parametrize(
    ("limits", "groups"),
    [
        # lengths 3, 1, 2, 1: by length 1, 3, 2, 0; four cells hold two episodes of one row, or one of two or three
        ({"max_cells": 4}, [[3, 6], [4, 5], [0, 1, 2]]),
        # 6 cells: 3 episodes of up to 2 rows; the longest alone, though larger than 2 cells
        ({"max_cells": 6}, [[3, 6, 4, 5], [0, 1, 2]]),
        ({"max_cells": 2}, [[3, 6], [4, 5], [0, 1, 2]]),
    ],
)
def test_groups_hold_whole_episodes_of_like_length(limits: dict[str, int], groups: list[list[int]]):
    lengths = torch.tensor([3, 1, 2, 1])
    assert [group.tolist() for group in episode_groups(lengths, **limits)] == groups
    assert episode_groups(lengths[:0], **limits) == []


HASHES = np.random.default_rng(0).integers(0, 2**64, 20_000, dtype=np.uint64)


@pytest.mark.parametrize(
    ("hashes", "share", "tolerance"),
    [
        # 4 standard deviations of a binomial share
        *((HASHES, share, 4 * (share * (1 - share) / 20_000) ** 0.5) for share in (0.1, 0.2, 0.5)),
        # a split by the leading bits, and one by the last digits, are independent of it
        (HASHES[np.uint64(2**61) > HASHES], 0.2, 0.04),
        (HASHES[HASHES % np.uint64(10) == 0], 0.2, 0.04),
    ],
    ids=["a tenth", "a fifth", "half", "leading bits", "last digits"],
)
def test_held_out_takes_about_its_share(hashes: np.ndarray, share: float, tolerance: float):
    assert held_out(hashes, share).mean() == pytest.approx(share, abs=tolerance)


def test_predictions_of_no_model_are_a_single_zero_in_every_part_of_a_page():
    batch = make_batch([[1.0]] * 4, [[0.0]] * 4, [0, 1, 0, 1], [1.0, 2.0, 3.0, 4.0])
    part = build_evaluation_rows([batch], np.arange(4), policy=uniform, models=None).rows(torch.tensor([0, 2]))
    assert part.q_values.shape == (2, 2, 1)
    assert {getattr(part, name).untyped_storage().nbytes() for name in ("reward_model", "q_values", "next_value")} == {
        8
    }
