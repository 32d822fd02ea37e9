"""Segments of rows in words."""

import numpy as np
import pytest

from reagent_lite.categories import code_of
from reagent_lite.evaluation.segment import StateFeatures

RNG = np.random.default_rng(0)
AGE = RNG.integers(18, 90, 5000).astype(np.float32)
COUNTRY = RNG.choice(["DE", "FR", "IT", "ES"], 5000)
SPENT = np.where(RNG.random(5000) < 0.1, np.nan, RNG.exponential(10.0, 5000)).astype(np.float32)
CODES = {text: code_of(text) for text in np.unique(COUNTRY)}
FEATURES = StateFeatures(
    names=("age", "country", "spent"),
    values=np.stack([AGE, np.array([CODES[text] for text in COUNTRY], np.float32), SPENT], 1),
    texts={1: {code: text for text, code in CODES.items()}},
)


@pytest.mark.parametrize(
    ("inside", "words"),
    [
        (COUNTRY == "DE", "those with country DE"),
        ((COUNTRY == "DE") | (COUNTRY == "ES"), "those with country DE, ES"),
        (AGE > 71, "those with age above 71"),
        ((AGE > 71) & (COUNTRY == "FR"), "those with age above 71 and country FR"),
        ((AGE > 40) & (AGE <= 50), "those with age above 40 and age at most 50"),
        (SPENT <= 2, f"those with spent at most {np.nanmax(SPENT[SPENT <= 2]):.4g}"),
        (RNG.random(5000) < 0.02, ""),
        (np.zeros(5000, bool), ""),
    ],
)
def test_a_segment_is_named_by_the_values_that_only_its_rows_have(inside: np.ndarray, words: str) -> None:
    described = FEATURES.describe(np.arange(5000), inside)
    assert sorted(described.split(" and ")) == sorted(words.split(" and ")) or (
        set(described.removeprefix("those with ").split(" and "))
        == set(words.removeprefix("those with ").split(" and "))
    )


def test_of_a_long_log_the_segment_is_found_in_a_part_of_the_other_rows() -> None:
    rows = np.tile(np.arange(5000), 60)
    assert FEATURES.describe(rows, np.tile((COUNTRY == "IT") & (AGE <= 20), 60)).startswith("those with ")


def test_a_machine_without_rows_names_no_segment() -> None:
    assert FEATURES.describe(np.zeros(0, np.int64), np.zeros(0, bool)) == ""
