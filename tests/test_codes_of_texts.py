"""Codes of texts, against arithmetic of its own."""

import numpy as np
from helpers.transitions import code_of_text
from hypothesis import given
from hypothesis import strategies as st

from reagent_lite.categories import code_of, codes_of, is_other


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_a_code_is_a_normal_positive_float32(text: str) -> None:
    assert code_of(text) == float(code_of_text(text))


def test_codes_never_change() -> None:
    assert [code_of("DE"), code_of("FR"), code_of("")] == [
        1769.4539794921875,
        2.995149050652457e-12,
        6.785036324738895e-17,
    ]


def test_many_texts_have_about_as_many_collisions_as_chance_gives() -> None:
    codes = codes_of(f"user {number}" for number in range(400_000))
    assert 36 < len(codes) - len(np.unique(codes)) < 113  # 4^2 10^10 / 2 / 2^30 = 74.5, with a deviation of 8.6


def test_other_is_present_and_unknown() -> None:
    values = np.array([2, 3, np.nan, -1337.1337, 5], np.float32)
    assert is_other(values, np.array([2, 5], np.float32)).tolist() == [False, True, False, False, False]
