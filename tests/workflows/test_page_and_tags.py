"""A run's report page next to its TensorBoard tags: dashboards and the page show the same figures."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from helpers.logs import random_rows, write_lines
from helpers.runs import quick, trained
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ESTIMATORS = ("Direct_Method_Reward", "IPS_Reward", "Doubly_Robust_Reward", "Sequential_Doubly_Robust",
              "Weighted_Sequential_Doubly_Robust", "MAGIC")  # fmt: skip
FIGURES = ("td_loss/mean", "reward_loss/mean", "reward/logged/mean", "propensities/logged/mean")
BY_ACTION = ("actions/logged/{}", "actions/model/{}", "propensities/model/{}/mean", "value/model/{}/mean",
             "reward/model/{}/mean")  # fmt: skip


def test_a_run_s_page_and_evaluation_say_what_its_tags_say(tmp_path: Path) -> None:
    """300 rows in 30 episodes to fit to, and 200 in 20 others to evaluate on; the metric is negative."""
    logs, out = {}, tmp_path / "out"
    for use, count, seed in (("training", 300, 0), ("eval", 200, 1)):
        logs[use] = [{**row, "mdp_id": f"{use} {row['mdp_id']}", "metrics": {"reward": -1 - abs(row["reward"])},
                      "action_probability": 0.6 if row["action"] == "a" else 0.4}
                     for row in random_rows(count, seed, missing=0.0)]  # fmt: skip
        write_lines(tmp_path / use / "log.jsonl", logs[use])
    evaluation = {"min_effective_episodes": 1, "models": {"fit_passes": 2, "final_fit_passes": 2}}
    done = trained(quick(tmp_path / "training", out, eval_data_path=str(tmp_path / "eval"), epochs=2,
                         rl={"temperature": 1.0}, evaluation=evaluation))  # fmt: skip

    events = EventAccumulator(str(out / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    latest = {tag: events.Scalars(tag)[-1] for tag in events.Tags()["scalars"]}
    wanted = [*FIGURES, *(tag.format(action) for tag in BY_ACTION for action in "ab"),
              *(f"CPE/{metric}/{name}" for metric in ("Reward", "reward") for name in ESTIMATORS)]  # fmt: skip
    assert [tag for tag in wanted if tag not in latest] == []
    assert {latest[tag].step for tag in wanted} == {done.steps}
    tags = {tag: event.value for tag, event in latest.items()}
    document = json.loads((out / "model/evaluation.json").read_text())
    page = (out / "report.html").read_text()

    assert "scored episodes too" not in page + str(document["warnings"])  # eval data have other episodes

    # evaluation.json: every estimate and the ends of its interval; event files hold float32
    figures = {
        f"CPE/{outcome['name']}/{estimate['name']}{end}": estimate["figure"][key]
        for outcome in document["cpe"]["outcomes"] for family in ("one_step", "sequential")
        for estimate in outcome[family]["estimates"] for key, end in (("value", ""), ("low", "/low"), ("high", "/high"))
    }  # fmt: skip
    figures["CPE/overlap/mean_weight"] = document["cpe"]["overlap"]["mean_weight"]["value"]
    assert {tag: tags[tag] for tag in figures} == pytest.approx(figures, rel=1e-6)

    # the page has all digits, in a title where a cell shows fewer
    number = r"(-?\d+(?:\.\d+)?(?:e-?\d+)?)\b"
    numbers = np.array([*map(float, re.findall(f'title="{number}', page) + re.findall(f"<td[^>]*>{number}", page))])
    shown = {tag for tag in wanted if np.isclose(numbers, tags[tag], rtol=1e-6).any()}
    assert [tag for tag in wanted if tag not in shown and "/logged/mean" not in tag] == []

    # and the log's own figures
    first = np.array([row["action"] == "a" for row in logs["eval"]])
    logged = {"reward/logged/mean": np.mean([row["reward"] for row in logs["eval"]]),
              "actions/logged/a": first.mean(),
              "propensities/logged/mean": np.where(first, 0.6, 0.4).mean()}  # fmt: skip
    assert {tag: tags[tag] for tag in logged} == pytest.approx(logged, rel=1e-6)
