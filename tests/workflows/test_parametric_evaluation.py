"""Training on candidate lists ends with estimates; in the system of 2019 they were never reached."""

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.logs import candidate_rows, write_lines
from helpers.runs import merged, metrics, trained

from reagent_lite.rl.estimators import ESTIMATORS


def test_a_run_on_candidates_scores_its_logging_policy(small: dict[str, Any], tmp_path: Path) -> None:
    """So hot a softmax is uniform over each list, as the log is: every weight is 1 and importance sampling the mean.

    Of some rows the candidates are unknown, some list a candidate twice. MAGIC comes with the end of the run, the
    others after every epoch.
    """
    rows = candidate_rows(400)
    for number, row in enumerate(rows):
        row["action_probability"] = 1 / len(row["possible_actions"])
        if number % 17 == 3:
            row["possible_actions"] = []
        elif number % 3 == 0:
            row["possible_actions"] = [*row["possible_actions"], dict(row["possible_actions"][0])]
    log = {"actions": None, "training_data_path": str(write_lines(tmp_path / "candidates.jsonl", rows))}
    trained(merged(small, log | {"rl": {"temperature": 1e9}, "evaluation": {"calc_cpe_in_training": True}}))
    document = json.loads((tmp_path / "out/model/evaluation.json").read_text())
    assert "scored episodes too" in str(document["warnings"])  # there is no other data to evaluate on
    assert "nearly uniform" in document["policy"]["notes"][0]
    cpe = document["cpe"]
    (outcome,) = cpe["outcomes"]
    values = {estimate["name"]: estimate["figure"]["value"]
              for family in ("one_step", "sequential") for estimate in outcome[family]["estimates"]}  # fmt: skip
    assert values.keys() == ESTIMATORS.keys()
    assert cpe["overlap"]["num_rows"] == 10 * cpe["overlap"]["num_episodes"] > 0
    assert cpe["overlap"]["mean_weight"]["value"] == pytest.approx(1, abs=1e-6)
    means = {"IPS_Reward": "one_step", "Self_Normalized_IPS_Reward": "one_step",
             "Per_Decision_Importance_Sampling": "sequential",
             "Weighted_Per_Decision_Importance_Sampling": "sequential"}  # fmt: skip
    expected = {name: outcome[family]["logged"]["value"] for name, family in means.items()}
    assert {name: values[name] for name in means} == pytest.approx(expected, abs=1e-6)
    assert {f"CPE/Reward/{name}" for name in ESTIMATORS} - metrics(tmp_path / "out")[0].keys() == {"CPE/Reward/MAGIC"}
