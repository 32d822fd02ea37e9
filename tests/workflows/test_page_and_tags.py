"""A run's report page beside its TensorBoard tags: dashboards and the page show the same figures."""

import json
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from oracles.logs import random_rows, write_lines
from oracles.runs import quick, trained
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ESTIMATORS = ("Direct_Method_Reward", "IPS_Reward", "Doubly_Robust_Reward", "Sequential_Doubly_Robust",
              "Weighted_Sequential_Doubly_Robust", "MAGIC")  # fmt: skip
FIGURES = ("td_loss/mean", "reward_loss/mean", "reward/logged/mean", "propensities/logged/mean")
BY_ACTION = ("actions/logged/{}", "actions/model/{}", "propensities/model/{}/mean", "value/model/{}/mean",
             "reward/model/{}/mean")  # fmt: skip

Rows = list[list[str]]


class Tables(HTMLParser):
    """The rows of every table of a page, by its caption; of figures all their digits, which are titles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: dict[str, Rows] = {}
        self._text: list[str] | None = None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag in ("caption", "th", "td"):
            self._text, self._full = [], dict(attributes).get("title")
        elif tag == "tr":
            self._rows.append([])

    def handle_data(self, data: str) -> None:
        if self._text is not None:
            self._text.append(data)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("caption", "th", "td") or self._text is None:
            return
        text, self._text = self._full or "".join(self._text), None
        if tag == "caption":
            self._rows = self.rows.setdefault(text.removesuffix(", the other rows"), [])
        else:
            self._rows[-1].append(text)

    def row(self, caption: str, name: str) -> list[str]:
        """The last row of that name: of a curve's table its end."""
        return [row for row in self.rows[caption] if row[0] == name][-1]


def shown(cell: str) -> float:
    """A figure's number, the first in its cell."""
    return float(cell.split(" ")[0])


def test_a_run_s_page_and_evaluation_say_what_its_tags_say(tmp_path: Path) -> None:
    """300 rows in 30 episodes to fit to, and 200 in 20 others to evaluate on; the metric is negative."""
    logs, out = {}, tmp_path / "out"
    for use, count, seed in (("training", 300, 0), ("eval", 200, 1)):
        logs[use] = [{**row, "mdp_id": f"{use} {row['mdp_id']}", "metrics": {"reward": -1 - abs(row["reward"])},
                      "action_probability": 0.6 if row["action"] == "a" else 0.4}
                     for row in random_rows(count, seed, missing=0.0)]  # fmt: skip
        write_lines(tmp_path / use / "log.jsonl", logs[use])
    evaluation = {"min_effective_episodes": 1, "fit_passes": 2, "final_fit_passes": 2}
    done = trained(quick(tmp_path / "training", out, eval_data_path=str(tmp_path / "eval"), epochs=2,
                         rl={"temperature": 1.0}, evaluation=evaluation))  # fmt: skip

    events = EventAccumulator(str(out / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    latest = {tag: events.Scalars(tag)[-1] for tag in events.Tags()["scalars"]}
    wanted = [*FIGURES, *(tag.format(action) for tag in BY_ACTION for action in "ab")]
    wanted += [f"CPE/{metric}/{name}" for metric in ("Reward", "reward") for name in ESTIMATORS]
    assert [tag for tag in wanted if tag not in latest] == []
    assert {latest[tag].step for tag in wanted} == {done.steps}
    tags = {tag: one.value for tag, one in latest.items()}
    document = json.loads((out / "model/evaluation.json").read_text())
    page = (out / "report.html").read_text()
    tables = Tables(page)

    assert "scored episodes too" not in page + str(document["warnings"])  # eval data have other episodes

    # evaluation.json: every estimate and the ends of its interval; event files hold float32
    for outcome in document["cpe"]["outcomes"]:
        for family in ("one_step", "sequential"):
            for one in outcome[family]["estimates"]:
                for key, end in {"value": "", "low": "/low", "high": "/high"}.items():
                    tag = f"CPE/{outcome['name']}/{one['name']}{end}"
                    assert tags[tag] == pytest.approx(one["figure"][key], rel=1e-6), tag
    overlap = document["cpe"]["overlap"]
    assert tags["CPE/overlap/mean_weight"] == pytest.approx(overlap["mean_weight"]["value"], rel=1e-6)

    # the page has all digits
    units = {"Reward": ("Reward: discounted return per episode", "Reward: reward per row"),
             "reward": ("Metric reward: discounted sum per episode", "Metric reward: mean per row")}  # fmt: skip
    for metric, captions in units.items():
        for name in ESTIMATORS:
            caption = f"{captions[name.endswith('_Reward')]}, beside the logged policy"
            cell = tables.row(caption, name.replace("_", " "))[1]
            assert shown(cell) == pytest.approx(tags[f"CPE/{metric}/{name}"], rel=1e-6), name
    for action in "ab":
        shares = tables.row("Shares of actions on evaluated rows", action)[1:]
        for cell, tag in zip(shares, BY_ACTION[:3], strict=True):
            assert shown(cell) == pytest.approx(tags[tag.format(action)], rel=1e-6)
        for title, tag in (("Value by action", BY_ACTION[3]), ("Reward model by action", BY_ACTION[4])):
            end = tables.row(f"{title}, some points", action)
            assert shown(end[1]) == done.steps
            assert shown(end[2]) == pytest.approx(tags[tag.format(action)], rel=1e-6)
    ends = {
        "TD loss": ("evaluated rows", "td_loss/mean"),
        "Loss of the reward model": ("while fitting it", "reward_loss/mean"),
    }
    for title, (name, tag) in ends.items():
        assert shown(tables.row(f"{title}, some points", name)[2]) == pytest.approx(tags[tag], rel=1e-6)

    # and the log's own figures
    first = np.array([row["action"] == "a" for row in logs["eval"]])
    assert tags["reward/logged/mean"] == pytest.approx(np.mean([row["reward"] for row in logs["eval"]]), rel=1e-6)
    assert tags["actions/logged/a"] == pytest.approx(first.mean(), rel=1e-6)
    assert tags["propensities/logged/mean"] == pytest.approx(np.where(first, 0.6, 0.4).mean(), rel=1e-6)
    assert tags["actions/model/a"] + tags["actions/model/b"] == pytest.approx(1)
