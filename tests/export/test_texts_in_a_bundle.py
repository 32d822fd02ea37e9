"""Texts as features of an exported model: one-hot columns by hand, what counts as other, and what is refused."""

import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from helpers.bundles import category_bundle, category_candidates_bundle, graph_outputs
from helpers.transitions import code_of_text

from reagent_lite import load_bundle
from reagent_lite.errors import BundleError
from reagent_lite.export.bundle import Bundle

WEIGHT = np.array([[1.0, 10, 20, 100, 200], [0, 0, 0, 1, 2]])
ROWS = [
    {"age": 0.5, "3": 2, "country": "DE"},
    {"age": -1.0, "3": 5, "country": "FR"},
    {"age": 2.0, "3": 7, "country": "a country that the model does not know"},
    {"age": 3.0, "country": None},
]
Q = [[110.5, 1], [219, 2], [2, 0], [3, 0]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return category_bundle(tmp_path_factory.mktemp("categories") / "model", WEIGHT, ("mail", "call"))


@pytest.fixture
def bundle(folder: Path) -> Bundle:
    return load_bundle(folder)


def test_a_level_is_one_column_and_others_are_in_none_also_in_frames(bundle: Bundle) -> None:
    assert bundle.predict_rows(ROWS).q.tolist() == Q
    assert bundle.levels == {"state": {"country": ("DE", "FR")}, "action": {}}
    frame = pd.DataFrame({"country": ["DE", "FR", "?", None], "age": [0.5, -1, 2, 3], "3": [2, 5, 7, None]})
    decimals = frame.assign(age=frame["age"].map(Decimal))
    for given in (frame, frame.astype({"country": "category"}), frame.convert_dtypes(), decimals, pa.table(frame)):
        assert bundle.predict(given).q.tolist() == Q


def test_codes_of_the_card_give_the_same_in_the_bare_graph(folder: Path) -> None:
    card = (folder / "MODEL_CARD.md").read_text()
    codes = {level: float(re.search(rf"\| `{level}` \|([^|]+)\|", card)[1]) for level in ("DE", "FR")}
    assert codes == {level: float(code_of_text(level)) for level in ("DE", "FR")}
    values = np.array([[0.5, 2, codes["DE"]], [-1, 5, codes["FR"]], [2, 7, 1.0]], np.float32)
    assert graph_outputs(folder, values, ~np.isnan(values), np.ones((3, 2), bool))[0].tolist() == Q[:3]


@pytest.mark.parametrize(
    ("rows", "others"), [(ROWS, {"3": 1, "country": 1}), (ROWS[:2], {}), ([{"3": -1337.1337}], {})]
)
def test_other_values_are_counted_by_feature(bundle: Bundle, rows: Any, others: dict[str, int]) -> None:
    assert {str(feature_id): count for feature_id, count in bundle.others(bundle.states(rows)).items()} == others


def test_a_number_for_a_category_is_refused_and_a_text_for_a_number(bundle: Bundle) -> None:
    with pytest.raises(BundleError) as error:
        bundle.states([{"country": 3.0, "age": "old"}])
    assert [(problem.where, problem.got) for problem in error.value.problems] == [
        ("states[0], feature country", "3.0"),
        ("states[0], feature age", "'old'"),
    ]
    for rows, message in (
        (
            pd.DataFrame({"country": ["DE", 3], "age": [1.0, 2.0], "3": [2, 5]}),
            "column country: expected strings, .*got 3",
        ),
        ([[0.5, 2, "DE"]], "with country as codes"),
    ):
        with pytest.raises(BundleError, match=message):
            bundle.act(rows)


def test_candidates_have_categories(tmp_path: Path) -> None:
    bundle = load_bundle(category_candidates_bundle(tmp_path / "model"))
    lists = [[{"country": "FR"}, {"country": "US"}], [{"country": "DE"}]]
    np.testing.assert_array_equal(bundle.predict_rows([{"7": 0.0}] * 2, lists).q, [[2, 0], [1, np.nan]])
    assert [*bundle.others(np.concatenate(bundle.candidates(lists)), candidates=True).values()] == [1]
