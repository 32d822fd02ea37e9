"""Estimates of a log beside simulated returns: the same truth, side by side, and what keeps the two apart."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracles import gridworld
from oracles.logs import write_lines
from oracles.played import gridworld_log, played, world
from oracles.reports import UNDEFINED, game

from reagent_lite.evaluation.interval import Interval
from reagent_lite.evaluation.played import MODEL, RANDOM, EstimatedReturn
from reagent_lite.tasks.evaluate import Evaluated


def both(folder: Path, rows: list[dict[str, Any]]) -> tuple[Evaluated, dict[str, Any]]:
    """A policy of epsilon 0.5, worth 2.588442 at the start, on a log and in simulation."""
    log = write_lines(folder / "grid.jsonl", rows)
    evaluation = {"bootstrap_resamples": 200, "final_fit_passes": 2, "held_out_share": 0.6}
    return played(folder, world(folder, 0.5), "gridworld", 2000, data_path=str(log), evaluation=evaluation)


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    """600 episodes of epsilon 0.8 by NumPy."""
    return gridworld_log(gridworld.simulate(gridworld.epsilon_greedy(0.8), 600, np.random.default_rng(1)))


def test_log_and_simulation_side_by_side(
    tmp_path: Path, rows: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    """Both aim at the exact value, and JSON, text and page say so."""
    outcome, report = both(tmp_path, rows)
    estimates = {
        estimate["name"]: estimate["figure"]
        for estimate in report["model"]["cpe"]["outcomes"][0]["sequential"]["estimates"]
    }
    simulated = report["model"]["simulated"]["discounted_return"]
    weighted = ("Sequential_Doubly_Robust", "Weighted_Sequential_Doubly_Robust", "MAGIC",
                "Weighted_Per_Decision_Importance_Sampling")  # fmt: skip
    for figure in (simulated, *(estimates[name] for name in weighted)):
        assert figure["low"] <= 2.588442 <= figure["high"]
    assert report["simulation"]["comparable"] is True
    assert report["simulation"]["remarks"] == []
    assert outcome.rows > 0
    assert {"simulation/return/mean", "CPE/Reward/MAGIC"} <= set(outcome.scores)
    shown = Interval(**simulated)
    assert "The discounted return is the quantity" in caplog.text
    assert re.search(rf"in simulation +{re.escape(str(shown))} ", caplog.text)
    assert f"in simulation{shown}" in re.sub("<[^>]*>", "", Path(outcome.page).read_text())


def test_a_cut_log_is_not_held_against_whole_episodes(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    """Nobody is at the goal within 6 steps: a log cut there says 0, and the policy is worth 2.588442."""
    outcome, report = both(tmp_path, [row for row in rows if row["sequence_number"] < 6])
    assert outcome.scores["CPE/Reward/Weighted_Per_Decision_Importance_Sampling"] == 0
    assert report["simulation"]["comparable"] is False
    said = "100.0% of the scored episodes were cut, none after more than 6"
    assert report["simulation"]["remarks"][0].startswith(said)
    assert said in Path(outcome.page).read_text()


def compared(cut: float = 0.0, **estimated: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """A log of up to 100 steps an episode beside up to 150 played ones, which are cut at 200; gamma 0.99."""
    played = game(UNDEFINED, UNDEFINED, UNDEFINED)
    played = replace(played, policies={MODEL: replace(played.policies[MODEL], cut_share=cut),
                                       RANDOM: replace(played.policies[RANDOM], cut_share=1.0)})  # fmt: skip
    usual = {"gamma": 0.99, "by_time": False, "horizon": 1000, "longest": 100, "cut_share": 0.0}
    estimated_return = EstimatedReturn(**{**usual, **estimated})
    return tuple(estimated_return.obstacles(played)), tuple(estimated_return.remarks(played))


CUT = "12.5% of the scored episodes were cut before their end"


@pytest.mark.parametrize(
    ("keys", "apart", "remarks"),
    [
        ({}, (), ()),
        ({"by_time": True}, ("by time_diff",), ()),
        # a step beyond the horizon counts 0.99^100 = 0.37, or 0.9^100 = 3e-5
        ({"horizon": 100}, ("count 100 steps of an episode",), ()),
        ({"horizon": 100, "gamma": 0.9}, (), ()),
        ({"longest": 201}, ("up to 201 steps, simulated ones end at 200",), ()),
        ({"longest": 201, "gamma": 0.9}, (), ()),
        # 0.99^200 = 0.134
        ({"cut": 0.25, "cut_share": 0.125, "longest": 150}, (), ("ends 25.0% of the simulated episodes at step 200, "
                                                                 "where a reward still counts 0.13", CUT)),
        ({"cut": 0.25, "gamma": 0.9}, (), ()),
        # returns of 100 steps are no returns of 150
        ({"cut_share": 0.125}, ("none after more than 100 steps",), (CUT,)),
        ({"cut_share": 0.125, "gamma": 0.9}, (), (CUT,)),
        # the last episode of each file, as where logging just ends
        ({"cut_share": 0.005}, (), (CUT.replace("12.5", "0.5"),)),
    ],
)  # fmt: skip
def test_what_keeps_them_apart(keys: dict[str, Any], apart: tuple[str, ...], remarks: tuple[str, ...]) -> None:
    for sentences, parts in zip(compared(**keys), (apart, remarks), strict=True):
        assert all(part in sentence for sentence, part in zip(sentences, parts, strict=True)), sentences
