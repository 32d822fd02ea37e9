"""Choices among candidates, computed by hand."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from oracles.pages import bandit_page
from oracles.runs import ALONE

from reagent_lite.evaluation.candidates import NamedItems, tally
from reagent_lite.evaluation.page import EvaluationPage
from reagent_lite.item_table import ItemTable

NAN = math.nan


def page_of(propensities: list[list[float]], action: list[int], propensity: list[float]) -> EvaluationPage:
    """A page whose lists end where a probability is NaN."""
    table = torch.tensor(propensities, dtype=torch.float64)
    plain = bandit_page([1.0] * len(action))
    columns = {
        name: getattr(plain, name) for name in ("names", "episode", "steps", "bootstrap", "outcomes", "next_value")
    }
    return EvaluationPage(
        **columns, action=torch.tensor(action), mask=~table.isnan(), model_propensities=table.nan_to_num(0.0),
        propensity=torch.tensor(propensity, dtype=torch.float64), reward_model=torch.zeros(*table.shape, 1),
        q_values=torch.zeros(*table.shape, 1),
    )  # fmt: skip


# lists of 3, 2 and 2; the log takes candidates 0, 1, 1
PAGE = page_of([[0.25, 0.5, 0.25], [0.5, 0.5, NAN], [0.25, 0.75, NAN]], [0, 1, 1], [0.05, 0.5, 0.5])
# feature 7 is there always, feature 8 is absent in the candidate that row 1 logged; what lies behind a list is not read
FEATURES = torch.tensor([
    [[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]],
    [[0.0, 40.0], [4.0, NAN], [99.0, 99.0]],
    [[2.0, 50.0], [6.0, 70.0], [99.0, 99.0]],
])  # fmt: skip


def tallied(*slices: slice, known: bool = True) -> dict[str, Any]:
    chunks = [(PAGE.rows(torch.arange(3)[rows]), FEATURES[rows]) for rows in slices]
    return tally(lambda: chunks, (7, 8), ALONE, propensities_known=known)


def test_shares_and_probabilities() -> None:
    document = tallied(slice(0, 3))
    assert document["rows"] == 3
    # likeliest: candidate 1; of the tie the first; candidate 1. Logged: 0, 1, 1
    assert document["same"] == pytest.approx(1 / 3)
    assert document["probability"] == pytest.approx((0.25 + 0.5 + 0.75) / 3)
    assert document["propensity"] == pytest.approx((0.05 + 0.5 + 0.5) / 3)
    assert document["candidates"] == pytest.approx({"2": 2 / 3, "3": 1 / 3})
    first, second = document["by_propensity"]
    assert first == pytest.approx({"low": 0.0, "high": 0.1, "rows": 1 / 3, "propensity": 0.05, "policy": 0.25})
    assert second == pytest.approx({"low": 0.4, "high": 0.5, "rows": 2 / 3, "propensity": 0.5, "policy": 0.625})


def test_features_of_what_is_chosen() -> None:
    features = tallied(slice(0, 3))["features"]
    # feature 7, logged: 1, 4, 6
    logged = 11 / 3
    variance = (1 + 16 + 36) / 3 - (11 / 3) ** 2
    assert features["7"]["logged"] == pytest.approx({"mean": logged, "stddev": math.sqrt(variance)})
    # policy: .25 of 1, .5 of 2, .25 of 3; .5 of 0, .5 of 4; .25 of 2, .75 of 6; of 3 rows
    policy = (0.25 + 1 + 0.75 + 2 + 0.5 + 4.5) / 3
    other = (0.25 + 2 + 2.25 + 8 + 1 + 27) / 3 - policy**2
    assert features["7"]["policy"] == pytest.approx({"mean": policy, "stddev": math.sqrt(other)})
    assert features["7"]["difference"] == pytest.approx((policy - logged) / math.sqrt((variance + other) / 2))
    # feature 8, logged: 10 and 70; policy: .25 of 10, .5 of 20, .25 of 30, .5 of 40, .25 of 50, .75 of 70: of 2.5
    assert features["8"]["logged"] == pytest.approx({"mean": 40, "stddev": 30})
    assert features["8"]["policy"]["mean"] == pytest.approx((2.5 + 10 + 7.5 + 20 + 12.5 + 52.5) / 2.5)


def test_chunks_change_nothing() -> None:
    whole = tallied(slice(0, 3))
    parts = tallied(slice(0, 1), slice(1, 1), slice(1, 3))
    for name, logged_and_policy in whole["features"].items():
        for side in ("logged", "policy"):
            assert parts["features"][name][side] == pytest.approx(logged_and_policy[side], rel=1e-12)
    assert {k: v for k, v in parts.items() if k != "features"} == {k: v for k, v in whole.items() if k != "features"}


def test_large_numbers_keep_their_spread() -> None:
    # seconds since 1970 in float64: sums of squares would leave nothing of a spread of 1
    page = page_of([[0.5, 0.5]] * 2, [0, 0], [0.5, 0.5])
    times = torch.tensor([[[1.7e9], [1.7e9]], [[1.7e9 + 2], [1.7e9 + 2]]], dtype=torch.float64)
    chunks = [(page.rows(torch.tensor([row])), times[row : row + 1]) for row in range(2)]
    logged = tally(lambda: chunks, (1,), ALONE, propensities_known=True)["features"]["1"]["logged"]
    assert logged == {"mean": 1.7e9 + 1, "stddev": 1.0}


def test_what_is_unknown_is_null() -> None:
    nothing = tallied()
    assert nothing["same"] is None
    assert nothing["features"]["7"] == {"logged": {"mean": None, "stddev": None},
                                        "policy": {"mean": None, "stddev": None}, "difference": None}  # fmt: skip
    unknown = tallied(slice(0, 3), known=False)
    assert (unknown["propensity"], unknown["by_propensity"]) == (None, [])
    assert unknown["probability"] == pytest.approx(0.5)


def test_long_lists_are_counted_together() -> None:
    chunks = [(page_of([[1 / k] * k], [0], [1 / k]), torch.zeros(1, k, 0)) for k in (16, 17, 32, 33)]
    document = tally(lambda: chunks, (), ALONE, propensities_known=True)["candidates"]
    assert document == {"16": 0.25, "17 to 32": 0.5, "33 to 64": 0.25}


def test_shares_of_items_by_hand() -> None:
    # row 0 offers a, b and no item, row 1 c and a, row 2 b and c; "a again" has the features of a
    table = np.array([[1, 10], [2, 20], [4, 40], [1, 10]], np.float32)
    items = ItemTable(ids=("a", "b", "c", "a again"), feature_ids=(7, 8), values=table)
    features = torch.tensor([
        [[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]],
        [[4.0, 40.0], [1.0, 10.0], [NAN, NAN]],
        [[2.0, 20.0], [4.0, 40.0], [NAN, NAN]],
    ])  # fmt: skip
    for slices in ((slice(0, 3),), (slice(0, 2), slice(2, 3))):
        chunks = [(PAGE.rows(torch.arange(3)[rows]), features[rows]) for rows in slices]
        document = tally(
            lambda chunks=chunks: chunks, (7, 8), ALONE, propensities_known=True, named=NamedItems(items, (7, 8))
        )
        # the log takes a, a, c; the policy a 0.25 + 0.5, b 0.5 + 0.25, c 0.5 + 0.75, and no item 0.25, of 3 rows
        assert document["items"] == {
            "a": pytest.approx({"logged": 2 / 3, "policy": 0.25}),
            "c": pytest.approx({"logged": 1 / 3, "policy": 1.25 / 3}),
            "b": pytest.approx({"logged": 0.0, "policy": 0.25}),
        }
        assert document["other_items"] == pytest.approx({"logged": 0.0, "policy": 0.25 / 3})
