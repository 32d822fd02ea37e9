"""Estimates of a log beside simulated returns: the same truth, side by side, and what keeps the two apart."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracles import gridworld
from oracles.logs import write_lines
from oracles.played import gridworld_log, played, world

from reagent_lite.evaluation.comparison import Beside, Counted, beside
from reagent_lite.evaluation.interval import UNDEFINED, Interval
from reagent_lite.evaluation.returns import RANDOM, Played, PlayedPolicy
from workflows.evaluate import Evaluated


@pytest.fixture(scope="module")
def grid_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """600 episodes of epsilon 0.8 by NumPy."""
    logged = gridworld.simulate(gridworld.epsilon_greedy(0.8), 600, np.random.default_rng(1))
    return write_lines(tmp_path_factory.mktemp("grid") / "grid.jsonl", gridworld_log(logged))


def both(folder: Path, model: Path, grid_log: Path, **keys: Any) -> tuple[Evaluated, dict[str, Any]]:
    fast = {"bootstrap_resamples": 200, "final_fit_passes": 2, "held_out_share": 0.6, **keys.pop("evaluation", {})}
    return played(folder, model, "gridworld", 2000, data_path=str(grid_log), evaluation=fast,
                  **keys)  # fmt: skip


def test_log_and_simulation_side_by_side(tmp_path: Path, grid_log: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Both aim at 2.588442, and JSON, text and page say so."""
    outcome, report = both(tmp_path, world(grid_log.parent, 0.5), grid_log)
    estimates = {one["name"]: one for one in report["model"]["cpe"]["outcomes"][0]["sequential"]["estimates"]}
    simulated = report["model"]["simulated"]["discounted_return"]
    for figure in (simulated, estimates["Weighted_Sequential_Doubly_Robust"]["figure"]):
        assert figure["low"] <= 2.588442 <= figure["high"]
    assert report["simulation"]["comparable"] is True
    assert report["simulation"]["remarks"] == []
    assert outcome.rows > 0
    assert {"simulation/return/mean", "CPE/Reward/MAGIC"} <= set(outcome.scores)
    said = caplog.text
    shown = Interval.read(simulated)
    assert f"discounted return in simulation: {shown}; what estimates of the reward's discounted return" in said
    assert f"in simulation{shown}" in re.sub("<[^>]*>", "", Path(outcome.page).read_text())


def test_what_cannot_be_held_against_each_other(tmp_path: Path, grid_log: Path) -> None:
    """Episodes of the log are scored for 3 steps, and played for up to 1000."""
    outcome, report = both(tmp_path, world(grid_log.parent, 0.5), grid_log, evaluation={"max_horizon": 3})
    assert report["simulation"]["comparable"] is False
    assert report["simulation"]["remarks"][0].startswith("Estimates count 3 steps of an episode")
    page = Path(outcome.page).read_text()
    assert "Estimates from the log are not of the same quantity. Estimates count 3 steps" in page


def judged(cut: float = 0.0, **counted: Any) -> Beside:
    """A log of up to 100 steps an episode beside up to 150 played ones, which are cut at 200; gamma 0.99."""
    model, random = (
        PlayedPolicy(key=key, total=UNDEFINED, discounted=UNDEFINED, length=50.0, cut_share=share)
        for key, share in (("model", cut), (RANDOM, 1.0))
    )
    game = Played(env="x", parameters={}, time_limit=200, episodes=10, longest=150, policies=(model, random),
                  differences={})  # fmt: skip
    usual = {"gamma": 0.99, "by_time": False, "horizon": 1000, "longest": 100, "cut_share": 0.0}
    return beside(Counted(**{**usual, **counted}), game)


def test_nothing_keeps_them_apart() -> None:
    assert judged() == Beside(apart=(), remarks=())


def test_a_discount_by_time() -> None:
    (sentence,) = judged(by_time=True).apart
    assert sentence == "Estimates discount by time_diff, as the model was trained, simulated returns by steps."


def test_a_horizon_matters_as_far_as_steps_beyond_it_count() -> None:
    (sentence,) = judged(horizon=100).apart  # 0.99^100 = 0.37
    assert sentence.startswith("Estimates count 100 steps of an episode (evaluation.max_horizon), simulated episodes")
    assert judged(horizon=100, gamma=0.9).apart == ()  # 0.9^100 = 3e-5


def test_a_limit_below_the_log_s_lengths() -> None:
    assert judged(longest=201).apart == ("Logged episodes have up to 201 steps, simulated ones end at 200.",)
    assert judged(longest=201, gamma=0.9).apart == ()


def test_cut_episodes() -> None:
    found = judged(cut=0.25, cut_share=0.125, longest=150)  # 0.99^200 = 0.134
    assert found.apart == ()
    played_ones, logged_ones = found.remarks
    assert played_ones.startswith("The time limit ends 25.0% of the simulated episodes at step 200, where a reward "
                                  "still counts 0.13: ")  # fmt: skip
    assert logged_ones.startswith("12.5% of the scored episodes were cut before their end")
    assert judged(cut=0.25, gamma=0.9).remarks == ()


def test_a_log_that_was_cut_before_simulated_episodes_end() -> None:
    """Returns of 100 steps are no returns of 150: 0.99^100 = 0.37."""
    (sentence,) = judged(cut_share=0.125).apart
    assert sentence == ("12.5% of the scored episodes were cut, none after more than 100 steps; simulated episodes "
                        "have up to 150.")  # fmt: skip
    assert judged(cut_share=0.125, gamma=0.9).apart == ()
    assert judged(cut_share=0.005).apart == ()  # the last episode of each file, as where logging just ends


def test_a_cut_log_is_not_held_against_whole_episodes(tmp_path: Path, grid_log: Path) -> None:
    """Nobody is at the goal within 6 steps: a log cut there says 0, and the policy is worth 2.588442."""
    rows = [row for row in map(json.loads, grid_log.read_text().splitlines()) if row["sequence_number"] < 6]
    _, report = both(tmp_path, world(grid_log.parent, 0.5), write_lines(tmp_path / "cut.jsonl", rows))
    estimates = {one["name"]: one for one in report["model"]["cpe"]["outcomes"][0]["sequential"]["estimates"]}
    assert estimates["Weighted_Per_Decision_Importance_Sampling"]["figure"]["value"] == 0
    assert report["simulation"]["comparable"] is False
    assert report["simulation"]["remarks"][0].startswith(
        "100.0% of the scored episodes were cut, none after more than 6"
    )
