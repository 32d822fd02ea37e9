"""Lists of logs where a workflow takes a path: training, evaluation, normalization, shards, and the Python API."""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from helpers.bundles import linear_bundle
from helpers.commands import evaluated, normalized
from helpers.logs import episode_code, random_rows, write_lines
from helpers.runs import Runner, absent, quick

import reagent_lite

FAST: dict[str, Any] = {"calc_cpe_in_training": False, "models": {"final_fit_passes": 1}}


@pytest.fixture
def two(tmp_path: Path) -> list[str]:
    """Logs of 120 and 80 rows that number their episodes alike."""
    return [
        str(write_lines(tmp_path / name / "log.jsonl", random_rows(count, seed, missing=0)))
        for seed, (name, count) in enumerate((("old", 120), ("served", 80)))
    ]


def test_training_on_two_logs(two: list[str], run: Runner, tmp_path: Path) -> None:
    assert not absent(
        run("dqn", quick(Path(), tmp_path / "out", evaluation=FAST, training_data_path=two)).ok.err,
        f"{two[0]}, {two[1]}: 200 rows, 20 episodes",
        f"{two[0]}, {two[1]}: 80 pairs of mdp_id and sequence_number are in more than one log",
        f"{two[0]}: 120 rows, 60.0%; {two[1]}: 80 rows, 40.0%",
    )
    rows = (tmp_path / "out" / "report.html").read_text().replace("<wbr>", "").split("Rows of each log</caption>")[1]
    assert re.findall(r"<td[^>]*>([^<]*)</td>", rows.split("</table>")[0]) == [
        two[0],
        "120",
        "60%",
        two[1],
        "80",
        "40%",
    ]


def test_evaluation_on_two_logs_is_that_of_their_rows(tmp_path: Path) -> None:
    """learning.md: propensities .2, .5, .4; rewards 4, 5, 7; policy .4, .3, .7 of the logged action: IPS 7.75."""
    names = sorted((f"episode {number}" for number in range(4)), key=episode_code)
    numbers = [(0.4, 0, 4.0, 0.2), (0.7, 1, 5.0, 0.5), (0.7, 0, 7.0, 0.4), (0.5, 0, 100.0, 0.5)]
    rows = [
        {
            "mdp_id": name, "sequence_number": 0, "action": "ab"[action], "reward": reward, "terminal": True,
            "state_features": {"0": math.log(share), "1": math.log(1 - share)}, "action_probability": propensity,
        }
        for name, (share, action, reward, propensity) in zip(names, numbers, strict=True)
    ]  # fmt: skip
    paths = [str(write_lines(tmp_path / f"{name}.jsonl", part)) for name, part in (("0", rows[:2]), ("1", rows[2:]))]
    tree = {
        "gamma": 0.9, "write_scored_rows": True,
        "evaluation": {"bootstrap_resamples": 200, "models": {"final_fit_passes": 1}, "held_out_share": 0.999999},
    }  # fmt: skip
    model = linear_bundle(tmp_path / "bundle", np.eye(2), ("a", "b"), (0, 1))
    outcome, report = evaluated(model, paths, tmp_path / "e.json", **tree)
    assert outcome.scores["CPE/Reward/IPS_Reward"] == pytest.approx(7.75, abs=1e-5)
    log = report["log"]
    assert (log["path"], log["rows_of_logs"]) == (paths, {paths[0]: 2, paths[1]: 2})
    assert log["scored_lines"] == {paths[0]: [1, 2], paths[1]: [1]}
    # columns of policies are found in all files
    for path, some in zip(paths, (rows[:2], rows[2:]), strict=True):
        write_lines(Path(path), [{**row, "p": share} for row, share in zip(some, (0.4, 0.3), strict=True)])
    again, _ = evaluated("column:p", paths, tmp_path / "e.json", **tree, actions=["a", "b"])
    # every row is scored: weights .4/.2, .3/.5, .4/.4, .3/.5 of rewards 4, 5, 7, 100
    assert again.scores["CPE/Reward/IPS_Reward"] == pytest.approx((8 + 3 + 7 + 60) / 4, abs=1e-5)


def test_normalization_of_two_logs(two: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    both = tmp_path / "both"
    assert not normalized(two, both).skipped
    assert f"{two[0]}: 120 rows, 60.0%; {two[1]}: 80 rows, 40.0%" in caplog.text
    statistics = json.loads((both / "statistics.json").read_text())
    assert [statistics[name] for name in ("data", "rows", "logs")] == [two, 200, {two[0]: 120, two[1]: 80}]
    assert [normalized(two, both).skipped, normalized(two[::-1], both).skipped] == [True, False]
    assert normalized(two[0], tmp_path / "path", reference_data_path=two).drift == {"state_features": {"stable": 3}}


@pytest.mark.usefixtures("caches")
def test_frames_and_paths_as_one(two: list[str], tmp_path: Path) -> None:
    frames = [pd.DataFrame(random_rows(100, seed, missing=0)) for seed in (5, 6)]
    tree = quick(Path(), tmp_path / "out", evaluation=FAST, training_data_path=None)
    outcome = reagent_lite.train(tree, [*frames, two[0]])
    settings = {"evaluation": {"bootstrap_resamples": 100, "models": {"final_fit_passes": 1}}}
    evaluated = reagent_lite.evaluate(outcome.model, [frames[0], Path(two[1])], config=settings)
    assert list(json.loads(Path(evaluated.report).read_text())["log"]["rows_of_logs"].values()) == [100, 80]
    assert any("80 pairs of mdp_id and sequence_number" in warning for warning in evaluated.warnings)
