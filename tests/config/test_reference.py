"""The page of all keys is that of the keys."""

from pathlib import Path

from reagent_lite.config.reference import reference


def test_the_page_is_current() -> None:
    page = Path(__file__).resolve().parents[2] / "configs" / "REFERENCE.md"
    assert page.read_text() == reference(), "run python -m reagent_lite.config.reference > configs/REFERENCE.md"
