"""The page of all keys is that of the keys."""

from oracles.runs import ROOT

from reagent_lite.config.reference import reference


def test_the_page_is_current() -> None:
    assert (ROOT / "docs/reference.md").read_text() == reference(), (
        "run python -m reagent_lite.config.reference > docs/reference.md"
    )
