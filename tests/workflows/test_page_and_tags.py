"""A run's report page beside its TensorBoard tags: dashboards and the page show the same figures.

Of the config and log of 2019, and of a log made here.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracles.logs import random_rows, write_lines
from oracles.runs import quick, trained
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

REAL = Path(__file__).resolve().parents[2].parent / "shared/data/reagent2019"
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


@dataclass(frozen=True, kw_only=True)
class Case:
    """A config without its output, names in it, and figures of the evaluated rows of its log."""

    tree: dict[str, Any]
    actions: tuple[str, str]
    metric: str
    reward: float
    first_action: float
    propensity: float


def recorded(folder: Path) -> Case:
    """2019: every reward is 1, 1750 of 3470 actions are 0, propensity .95 x 3299 and .05 x 171."""
    tree: dict[str, Any] = json.loads((REAL / "dqn.json").read_text())
    for key in ("training_data_path", "eval_data_path", "state_norm_data_path"):
        tree[key] = str(REAL / Path(tree[key]).name)
    return Case(
        tree=tree, actions=("0", "1"), metric="reward", reward=1.0, first_action=1750 / 3470,
        propensity=(0.95 * 3299 + 0.05 * 171) / 3470,
    )  # fmt: skip


def made(folder: Path) -> Case:
    """300 rows in 30 episodes to fit to, and 200 in 20 others to evaluate on; the metric is negative."""
    logs = {}
    for use, count, seed in (("training", 300, 0), ("eval", 200, 1)):
        logs[use] = [{**row, "mdp_id": f"{use} {row['mdp_id']}", "metrics": {"cost": -1 - abs(row["reward"])},
                      "action_probability": 0.6 if row["action"] == "a" else 0.4}
                     for row in random_rows(count, seed, missing=0.0)]  # fmt: skip
        write_lines(folder / use / "log.jsonl", logs[use])
    evaluation = {"min_effective_episodes": 1, "fit_passes": 2, "final_fit_passes": 2}
    tree = quick(folder / "training", folder / "out", eval_data_path=str(folder / "eval"), epochs=2,
                 rl={"temperature": 1.0}, evaluation=evaluation)  # fmt: skip
    reward = float(np.mean([row["reward"] for row in logs["eval"]]))
    first = np.array([row["action"] == "a" for row in logs["eval"]])
    return Case(tree=tree, actions=("a", "b"), metric="cost", reward=reward, first_action=float(first.mean()),
                propensity=float(np.where(first, 0.6, 0.4).mean()))  # fmt: skip


without_2019 = pytest.mark.skipif(not REAL.is_dir(), reason=f"there is no {REAL.parent.name}/{REAL.name} beside it")


@pytest.mark.parametrize("build", [made, pytest.param(recorded, marks=without_2019)])
def test_a_run_s_page_and_evaluation_say_what_its_tags_say(tmp_path: Path, build: Callable[[Path], Case]) -> None:
    case, out = build(tmp_path), tmp_path / "out"
    done = trained(case.tree | {"model_output_path": str(out), "use_gpu": False, "use_all_avail_gpus": False})

    events = EventAccumulator(str(out / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    latest = {tag: events.Scalars(tag)[-1] for tag in events.Tags()["scalars"]}
    wanted = [*FIGURES, *(tag.format(action) for tag in BY_ACTION for action in case.actions)]
    wanted += [f"CPE/{metric}/{name}" for metric in ("Reward", case.metric) for name in ESTIMATORS]
    assert [tag for tag in wanted if tag not in latest] == []
    assert {latest[tag].step for tag in wanted} == {done.steps}
    tags = {tag: one.value for tag, one in latest.items()}
    document = json.loads((out / "model/evaluation.json").read_text())
    page = (out / "report.html").read_text()
    tables = Tables(page)

    learned_from = build is recorded  # its eval data are its training data
    assert [("scored episodes too" in text) for text in (page, str(document["warnings"]))] == [learned_from] * 2

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
             case.metric: (f"Metric {case.metric}: discounted sum per episode",
                           f"Metric {case.metric}: mean per row")}  # fmt: skip
    for metric, captions in units.items():
        for name in ESTIMATORS:
            caption = f"{captions[name.endswith('_Reward')]}, beside the logged policy"
            cell = tables.row(caption, name.replace("_", " "))[1]
            assert shown(cell) == pytest.approx(tags[f"CPE/{metric}/{name}"], rel=1e-6), name
    for action in case.actions:
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
    first, second = case.actions
    assert tags["reward/logged/mean"] == pytest.approx(case.reward, rel=1e-6)
    assert tags[f"actions/logged/{first}"] == pytest.approx(case.first_action, rel=1e-6)
    assert tags["propensities/logged/mean"] == pytest.approx(case.propensity, rel=1e-6)
    assert tags[f"actions/model/{first}"] + tags[f"actions/model/{second}"] == pytest.approx(1)
