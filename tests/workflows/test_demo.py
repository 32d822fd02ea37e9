"""The demo: a log of offers on which trustworthy estimates decide, and the shop that confirms them."""

import runpy
from pathlib import Path

import pytest
from helpers.browser import BROKEN_WORDS, COLLIDING, OVERFLOWING, browsing, needs_browser
from helpers.runs import ROOT

import reagent_lite
from reagent_lite.config.loader import read_tree

SHOP = runpy.run_path(str(ROOT / "configs/offers/shop.py"))
CONFIG = read_tree(ROOT / "configs/offers/dqn.json")[0] | {"training_data_path": "", "use_gpu": False}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> reagent_lite.TrainResult:
    return trained(tmp_path_factory.mktemp("demo"), 0)


def trained(folder: Path, seed: int) -> reagent_lite.TrainResult:
    """Trains on the log of a seed as the demo does."""
    log = folder / "log.csv"
    SHOP["write_log"](log, rows=4000, seed=seed)
    return reagent_lite.train(CONFIG | {"model_output_path": str(folder / "offers"), "seed": seed}, log)


def confirmed(run: reagent_lite.TrainResult) -> None:
    """Asserts that trustworthy estimates decide, and that what the shop really pays agrees with them."""
    assert run.decision is not None
    assert run.decision["choice"] == "ship"
    estimates = run.estimates[(run.estimates["outcome"] == "Reward") & (run.estimates["verdict"] == "trustworthy")]
    assert len(estimates) >= 4
    model, logged = SHOP["play"](Path(str(run.model)), visits=20_000, seed=1)
    assert logged == pytest.approx(0.179, abs=0.002)
    assert model > 1.4 * logged
    assert ((estimates["low"] < model) & (model < estimates["high"])).all()


def test_the_shop_confirms_the_decision(run: reagent_lite.TrainResult) -> None:
    confirmed(run)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_other_logs_show_the_same(tmp_path: Path, seed: int) -> None:
    confirmed(trained(tmp_path, seed))


def test_the_log_is_what_the_shop_writes(tmp_path: Path) -> None:
    SHOP["write_log"](tmp_path / "log.csv", rows=4000, seed=0)
    assert (tmp_path / "log.csv").read_text() == (ROOT / "configs/offers/log.csv").read_text()


def test_the_picture_of_the_readme_is_current(run: reagent_lite.TrainResult) -> None:
    picture = runpy.run_path(str(ROOT / "docs/picture.py"))
    hash_of_picture = picture["shown"](Path(run.folder, "report.html").read_text())
    assert hash_of_picture == (ROOT / "docs/report.sha256").read_text().strip(), "run python docs/picture.py"
    assert (ROOT / "docs/report.png").stat().st_size < 100_000


@needs_browser
def test_the_report_fits_a_phone_and_a_desk(run: reagent_lite.TrainResult, tmp_path: Path) -> None:
    with browsing(tmp_path / "profile") as browser:
        for width in (390, 1280):
            browser.open(Path(run.folder, "report.html"), width=width)
            assert browser.value(OVERFLOWING) == browser.value(BROKEN_WORDS) == browser.value(COLLIDING) == []
            assert browser.value("document.documentElement.scrollWidth") <= width
