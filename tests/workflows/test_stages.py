"""Training on raw events: the stages before it, each made once."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.events import event, make
from helpers.logs import random_rows, write_lines
from helpers.runs import ALONE, Tree, absent, merged, trained
from safetensors.torch import load_file
from torch.testing import assert_close

from reagent_lite.config import DqnConfig, ParametricDqnConfig
from reagent_lite.config.loader import check
from reagent_lite.config.shard_config import ShardConfig
from reagent_lite.data.logs import Log
from reagent_lite.errors import ConfigError
from reagent_lite.report.run import DataSource, lineage_section
from reagent_lite.run.logged import Data, prepare
from reagent_lite.tasks.shard import shard


def events(episodes: int, seed: int = 0, **changes: Any) -> list[Tree]:
    """Episodes of five decisions between "l" and "r" over two features."""
    rng = np.random.default_rng(seed)
    return [
        event(f"{seed}-{n}", k, 0.0, float(rng.normal()), action="lr"[int(rng.integers(2))], terminal=k == 4,
              state_features={str(i): float(rng.normal()) for i in range(2)}, **changes)
        for n in range(episodes) for k in range(5)
    ]  # fmt: skip


def config(folder: Path, source: Path, **other: Any) -> Tree:
    return {
        "training_data_path": str(source), "model_output_path": str(folder / "out"), "use_gpu": False, "epochs": 2,
        "actions": ["l", "r"], "training": {"layers": [-1, 8, -1], "activations": ["relu", "linear"]},
        "data": {"global_minibatch_size": 1000, "training_copy_dir": str(folder / "copies")},
        "evaluation": {"calc_cpe_in_training": False, "bootstrap_resamples": 100, "learn_from_scored": True}, **other,
    }  # fmt: skip


def prepared(tree: Tree) -> Data:
    return prepare(check(DqnConfig if "actions" in tree else ParametricDqnConfig, tree), ALONE)


def paired(source: Path, folder: Path) -> str:
    return make(folder, source, {"query": {"actions": ["l", "r"]}}).train


def same_weights(run: Path, other: Path) -> None:
    assert_close(*(load_file(out / "model/weights.safetensors") for out in (run, other)), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"truncated": True, "next_state_features": {"0": 1.0}, "possible_next_actions": ["l"]}, True),
        ({"next_state_features": {"0": 1.0}}, False),
        ({"next_action": "l"}, False),
        ({"time_diff": 1}, True),  # a column of the user
        ({"sequence_number": None}, False),
    ],
)
def test_events_are_told_from_transitions(tmp_path: Path, changes: Tree, told: bool) -> None:
    assert Log(str(write_lines(tmp_path / "log.jsonl", [event("a", 0, 0.0, **changes)]))).holds_events == told


def test_a_run_on_events_is_a_run_on_their_timeline(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = write_lines(tmp_path / "data/events.jsonl", events(40))
    tree = config(tmp_path, source, eval_data_path=str(write_lines(tmp_path / "data/judged.jsonl", events(10, 1))))
    trained(tree)
    assert not absent(
        caplog.text,
        "200 rows in 40 episodes, 40 true ends",
        "50 rows in 10 episodes, 10 true ends",
        "normalization of state_features: written to",
    )
    (tmp_path / "out").rename(tmp_path / "first")

    trained(tree)
    assert not list(tmp_path.rglob("*.parquet"))
    assert "fitted to the same rows by an earlier run" in caplog.text
    same_weights(tmp_path / "out", tmp_path / "first")

    trained(tree | {"training_data_path": paired(source, tmp_path / "train")})
    same_weights(tmp_path / "out", tmp_path / "first")


def test_every_run_says_what_the_stages_before_it_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = events(20)
    del rows[4]["terminal"]
    write_lines(tmp_path / "log/events.jsonl", [*rows, *rows[5:12]])
    (tmp_path / "log/events.tsv").write_text("")
    left_out = (f"{tmp_path}/log: of 107 events left out by the timeline: 7 with the mdp_id and sequence_number of "
                "another, 1 last of an episode with neither terminal nor truncated")  # fmt: skip
    for _ in range(2):
        data = prepared(config(tmp_path, tmp_path / "log"))
        assert not absent(
            caplog.messages,
            f"training data: {left_out}",
            f"training data: {tmp_path}/log: not read: 1 entry: events.tsv",
        )
        caplog.clear()
    source = DataSource(use="training", path="", rows=0, counts="", on_node=False, copy=data.train.copy)
    stage = next(table for table in lineage_section([source]).tables if table.title.startswith("Stage training"))
    assert ("left out", left_out) in stage.rows
    assert data.train.copy.source_line(0) == f"{tmp_path}/log/events.jsonl:1"

    transitions = paired(tmp_path / "log", tmp_path / "transitions")
    part = {"num_nodes": 2, "node_index": 0, "output_path": str(tmp_path / "shard")}
    shard(check(ShardConfig, {"data_path": transitions, **part}))
    assert prepared(config(tmp_path, tmp_path / "shard")).train.copy.notes == (left_out,)


def test_gamma_that_a_timeline_writes_into_rewards_has_a_folder_of_its_own(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "events.jsonl", events(20))

    def rewards(gamma: float, **section: Any) -> tuple[Path, float]:
        copy = prepared(config(tmp_path, source, rl={"gamma": gamma}, timeline=section)).train.copy
        return copy.folder, float(copy.reward.sum())

    first, second = rewards(0.5, steps=2), rewards(0.9, steps=2)
    assert (first[0] != second[0], first[1] != second[1]) == (True, True)
    assert rewards(0.5) == rewards(0.9)


def test_one_file_for_the_timeline_and_the_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = write_lines(tmp_path / "events.jsonl", events(60))
    timeline = {"inputTableName": str(source), "outputTableName": str(tmp_path / "train"),
                "evalTableName": str(tmp_path / "eval"), "eval_percent": 30.0, "steps": 2}  # fmt: skip
    trained(merged(config(tmp_path, source), {"training_data_path": None, "timeline": timeline}))
    report = json.loads((tmp_path / "train/manifest.json").read_text())["report"]
    assert report["train_rows"] + report["eval_rows"] == 300
    assert not absent(
        caplog.text,
        f"eval data: {tmp_path}/eval: ",
        f" {report['eval_rows']} rows, ",
        "rows that span several steps",
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"timeline": {"inputTableName": "elsewhere"}}, "expected the events of training_data_path"),
        ({"timeline": {"steps": 2, "gamma": 0.5}}, r"timeline.gamma: expected rl.gamma \(0.9\)"),
        ({"timeline": {"steps": 2}, "rl": {"multi_steps": 3}}, "rl.multi_steps: expected its default"),
        ({"timeline": {"actionDiscrete": False}}, "timeline.actionDiscrete: expected true"),
        ({"query": {"actions": ["l"]}}, 'query.actions: is \\["l"\\], but actions, its name now, is'),
        ({"timeline": {"evalTableName": "a"}, "eval_data_path": "b"}, "timeline.evalTableName: expected"),
        ({"timeline": {"outputTableName": "a"}, "data": {"layout": "split"}},
         "timeline.outputTableName: expected absent"),
        ({"query": {"tableSample": 10}}, "query: .* holds transitions"),
        ({"timeline": {"steps": 2}}, "timeline: .* holds transitions"),
    ],
)  # fmt: skip
def test_keys_that_contradict_each_other_or_the_data(tmp_path: Path, changes: Tree, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prepared(config(tmp_path, write_lines(tmp_path / "transitions.jsonl", random_rows(20)), **changes))
