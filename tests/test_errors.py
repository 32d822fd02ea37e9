"""Counts in messages, and installed packages."""

from pathlib import Path

import pytest

from reagent_lite.data.log_shares import counts_in_words
from reagent_lite.errors import is_installed, named_counts, pluralize


@pytest.mark.parametrize(
    ("number", "forms", "text"),
    [
        (0, ("row",), "0 rows"),
        (1, ("row",), "1 row"),
        (3470, ("row",), "3,470 rows"),
        (1, ("process",), "1 process"),
        (2, ("process",), "2 processes"),
        (1, ("row has", "rows have"), "1 row has"),
        (1000, ("row has", "rows have"), "1,000 rows have"),
    ],
)
def test_counts_have_singular_and_plural(number: int, forms: tuple[str, ...], text: str) -> None:
    assert pluralize(number, *forms) == text


def test_counts_are_named_by_their_keys() -> None:
    counts = {"rows": 3470, "episodes": 1, "terminal_rows": 1, "rows_without_mdp_id": 1, "duplicate_rows": 0}
    assert named_counts(counts) == "3,470 rows, 1 episode, 1 terminal row, 1 row without mdp id"


def test_counts_of_independent_decisions_are_their_rows() -> None:
    counts = {"rows": 40, "episodes": 40, "terminal_rows": 40, "rows_without_mdp_id": 40, "duplicate_rows": 2}
    assert counts_in_words(counts) == "40 rows, 2 duplicate rows"
    assert counts_in_words(counts | {"rows_without_mdp_id": 39}).startswith(
        "40 rows, 40 episodes, 40 terminal rows, 39"
    )


def test_a_folder_of_a_package_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_folder_of_runs").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert [is_installed(name) for name in ("a_folder_of_runs", "no_such_package", "numpy")] == [False, False, True]
