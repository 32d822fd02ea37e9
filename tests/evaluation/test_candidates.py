"""Choices among candidates, computed by hand."""

import dataclasses
import math
from math import nan as NAN
from typing import Any

import numpy as np
import pytest
import torch
from helpers.pages import bandit_page
from helpers.runs import ALONE

from reagent_lite.evaluation.candidates import NamedItems, tally
from reagent_lite.evaluation.evaluation_rows import EvaluationRows
from reagent_lite.item_table import ItemTable


def page_of(propensities: list[list[float]], action: list[int], propensity: list[float]) -> EvaluationRows:
    """A page whose lists end where a probability is NaN."""
    table = torch.tensor(propensities, dtype=torch.float64)
    return dataclasses.replace(
        bandit_page([1.0] * len(action)), action=torch.tensor(action), mask=~table.isnan(),
        model_propensities=table.nan_to_num(0.0), propensity=torch.tensor(propensity, dtype=torch.float64),
        reward_model=torch.zeros(*table.shape, 1), q_values=torch.zeros(*table.shape, 1),
    )  # fmt: skip


# lists of 3, 2 and 2; the log takes candidates 0, 1, 1
PAGE = page_of([[0.25, 0.5, 0.25], [0.5, 0.5, NAN], [0.25, 0.75, NAN]], [0, 1, 1], [0.05, 0.5, 0.5])
# feature 7 is there always, feature 8 is absent in the candidate that row 1 logged; what lies behind a list is not read
FEATURES = torch.tensor([
    [[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]],
    [[0.0, 40.0], [4.0, NAN], [99.0, 99.0]],
    [[2.0, 50.0], [6.0, 70.0], [99.0, 99.0]],
])  # fmt: skip
chunked = pytest.mark.parametrize("slices", [[slice(3)], [slice(1), slice(1, 3)]], ids=["whole", "chunks"])


def tallied(slices: list[slice], features: torch.Tensor = FEATURES, *, known: bool = True, **keys: Any) -> Any:
    chunks = [(PAGE.rows(torch.arange(3)[rows]), features[rows]) for rows in slices]
    return tally(lambda: chunks, (7, 8), ALONE, propensities_known=known, **keys)


@chunked
def test_shares_and_probabilities(slices: list[slice]) -> None:
    document = tallied(slices)
    # likeliest: candidate 1; of the tie the first; candidate 1. Logged: 0, 1, 1
    assert {name: document[name] for name in ("rows", "same", "probability", "propensity")} == pytest.approx(
        {"rows": 3, "same": 1 / 3, "probability": (0.25 + 0.5 + 0.75) / 3, "propensity": (0.05 + 0.5 + 0.5) / 3}
    )
    assert document["candidates"] == pytest.approx({"2": 2 / 3, "3": 1 / 3})
    assert document["by_propensity"] == [
        pytest.approx({"low": 0.0, "high": 0.1, "rows": 1 / 3, "propensity": 0.05, "policy": 0.25}),
        pytest.approx({"low": 0.4, "high": 0.5, "rows": 2 / 3, "propensity": 0.5, "policy": 0.625}),
    ]


@chunked
def test_features_of_what_is_chosen(slices: list[slice]) -> None:
    features = tallied(slices)["features"]
    # feature 7, logged: 1, 4, 6, so that the variance is 53 / 3 - (11 / 3)^2
    # policy: .25 of 1, .5 of 2, .25 of 3; .5 of 0, .5 of 4; .25 of 2, .75 of 6: 9 in 3 rows, variance 40.5 / 3 - 3^2
    assert features["7"] == {
        "logged": pytest.approx({"mean": 11 / 3, "stddev": math.sqrt(38 / 9)}),
        "policy": pytest.approx({"mean": 3, "stddev": math.sqrt(4.5)}),
        "difference": pytest.approx((3 - 11 / 3) / math.sqrt((38 / 9 + 4.5) / 2)),
    }
    # feature 8, logged: 10 and 70; policy: .25 of 10, .5 of 20, .25 of 30, .5 of 40, .25 of 50, .75 of 70: of 2.5
    assert (features["8"]["logged"], features["8"]["policy"]["mean"]) == (
        pytest.approx({"mean": 40, "stddev": 30}), pytest.approx((2.5 + 10 + 7.5 + 20 + 12.5 + 52.5) / 2.5),
    )  # fmt: skip


def test_large_numbers_keep_their_spread() -> None:
    # seconds since 1970 in float64: sums of squares would leave nothing of a spread of 1
    times = (1.7e9 + torch.tensor([0.0, 2.0, 4.0], dtype=torch.float64)).view(3, 1, 1).expand(3, 3, 2)
    assert tallied([slice(1), slice(1, 3)], times)["features"]["7"]["logged"] == {
        "mean": 1.7e9 + 2, "stddev": pytest.approx(math.sqrt(8 / 3)),
    }  # fmt: skip


def test_what_is_unknown_is_null() -> None:
    nothing = tallied([])
    undefined = {"mean": None, "stddev": None}
    assert (nothing["same"], nothing["features"]["7"]) == (
        None, {"logged": undefined, "policy": undefined, "difference": None}
    )  # fmt: skip
    unknown = tallied([slice(3)], known=False)
    assert [unknown[name] for name in ("propensity", "by_propensity", "probability")] == [None, [], pytest.approx(0.5)]


def test_long_lists_are_counted_together() -> None:
    chunks = [(page_of([[1 / k] * k], [0], [1 / k]), torch.zeros(1, k, 0)) for k in (16, 17, 32, 33)]
    document = tally(lambda: chunks, (), ALONE, propensities_known=True)["candidates"]
    assert document == {"16": 0.25, "17 to 32": 0.5, "33 to 64": 0.25}


@chunked
def test_shares_of_items_by_hand(slices: list[slice]) -> None:
    # row 0 offers a, b and no item, row 1 c and a, row 2 b and c; "a again" has the features of a
    table = np.array([[1, 10], [2, 20], [4, 40], [1, 10]], np.float32)
    items = ItemTable(ids=("a", "b", "c", "a again"), feature_ids=(7, 8), values=table)
    features = torch.tensor([
        [[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]],
        [[4.0, 40.0], [1.0, 10.0], [NAN, NAN]],
        [[2.0, 20.0], [4.0, 40.0], [NAN, NAN]],
    ])  # fmt: skip
    document = tallied(slices, features, named=NamedItems(items, (7, 8)))
    # the log takes a, a, c; the policy a 0.25 + 0.5, b 0.5 + 0.25, c 0.5 + 0.75, and no item 0.25, of 3 rows
    assert document["items"] == {
        "a": pytest.approx({"logged": 2 / 3, "policy": 0.25}),
        "c": pytest.approx({"logged": 1 / 3, "policy": 1.25 / 3}),
        "b": pytest.approx({"logged": 0.0, "policy": 0.25}),
    }
    assert document["other_items"] == pytest.approx({"logged": 0.0, "policy": 0.25 / 3})
