"""Training on raw events: the stages before it, each made once."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracles.events import event
from oracles.logs import write_lines
from oracles.nodes import run_nodes
from oracles.runs import Runner
from safetensors.torch import load_file
from torch.testing import assert_close

from reagent_lite.config import DqnConfig, ParametricDqnConfig
from reagent_lite.config.loader import check
from reagent_lite.config.shard import ShardConfig
from reagent_lite.data.copy.first_look import holds_events
from reagent_lite.data.shards.machines import shard
from reagent_lite.distributed.group import Group, Place
from reagent_lite.errors import ConfigError
from reagent_lite.report.run import Source, lineage_section
from reagent_lite.run.logged import prepare

ALONE = Group(Place(), torch.device("cpu"))
WEIGHTS = "model/weights.safetensors"


def events(episodes: int, seed: int = 0, **changes: Any) -> list[dict[str, Any]]:
    """Episodes of five decisions between "l" and "r" over two features."""
    rng = np.random.default_rng(seed)
    return [
        event(f"{seed}-{n}", k, 0.0, float(rng.normal()), action="lr"[int(rng.integers(2))], terminal=k == 4,
              state_features={str(i): float(rng.normal()) for i in range(2)}, **changes)
        for n in range(episodes) for k in range(5)
    ]  # fmt: skip


def config(folder: Path, source: Path, **other: Any) -> dict[str, Any]:
    return {
        "training_data_path": str(source), "model_output_path": str(folder / "out"), "use_gpu": False, "epochs": 2,
        "actions": ["l", "r"], "training": {"layers": [-1, 8, -1], "activations": ["relu", "linear"]},
        "data": {"global_minibatch_size": 1000, "training_copy_dir": str(folder / "copies")},
        "evaluation": {"calc_cpe_in_training": False, "bootstrap_resamples": 100}, **other,
    }  # fmt: skip


def same_weights(one: Path, other: Path) -> None:
    mine, theirs = load_file(one / WEIGHTS), load_file(other / WEIGHTS)
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        assert_close(value, theirs[name], atol=1e-5, rtol=0)


def test_events_are_told_from_transitions(tmp_path: Path) -> None:
    def told(**changes: Any) -> bool:
        return holds_events(str(write_lines(tmp_path / "log.jsonl", [event("a", 0, 0.0, **changes)])))

    assert told()
    assert told(truncated=True, next_state_features={"0": 1.0}, possible_next_actions=["l"])
    assert not told(next_state_features={"0": 1.0})
    assert not told(next_action="l")
    assert told(time_diff=1)  # a column of the user
    assert not told(sequence_number=None)


def test_a_run_on_events_is_a_run_on_their_timeline(run: Runner, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "data/events.jsonl", events(40))
    judged = write_lines(tmp_path / "data/judged.jsonl", events(10, 1))
    done = run("dqn", config(tmp_path, source, eval_data_path=str(judged)))
    assert done.code == 0, done.err
    assert "200 rows in 40 episodes, 40 true ends" in done.err
    assert "50 rows in 10 episodes, 10 true ends" in done.err
    assert "normalization of state_features: written to" in done.err
    (tmp_path / "out").rename(tmp_path / "first")
    stamps = {file: file.stat().st_mtime_ns for file in (tmp_path / "copies").rglob("*") if file.is_file()}

    again = run("dqn", config(tmp_path, source, eval_data_path=str(judged)))
    assert again.code == 0, again.err
    assert again.err.count("made of these events before, nothing to do") == 2
    assert "normalization of state_features: fitted to the same rows before" in again.err
    assert stamps == {file: file.stat().st_mtime_ns for file in (tmp_path / "copies").rglob("*") if file.is_file()}
    same_weights(tmp_path / "out", tmp_path / "first")
    assert (tmp_path / "out/state_features_norm.json").read_bytes() == (
        tmp_path / "first/state_features_norm.json"
    ).read_bytes()

    by_hand = {"timeline": {"inputTableName": str(source), "outputTableName": str(tmp_path / "train")},
               "query": {"actions": ["l", "r"]}}  # fmt: skip
    assert run("timeline", by_hand).code == 0
    assert run("dqn", config(tmp_path, tmp_path / "train", eval_data_path=str(judged))).code == 0
    same_weights(tmp_path / "out", tmp_path / "first")


def test_every_run_says_what_the_stages_before_it_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = events(20)
    del rows[4]["terminal"]
    write_lines(tmp_path / "log/events.jsonl", [*rows, *rows[5:12]])
    (tmp_path / "log/events.tsv").write_text("")
    tree = check(DqnConfig, config(tmp_path, tmp_path / "log"))
    left_out = (f"{tmp_path}/log: of 107 events left out by the timeline: 7 with the mdp_id and sequence_number of "
                "another, 1 last of an episode without a word on how it ends")  # fmt: skip
    for _ in range(2):
        data = prepare(tree, ALONE)
        assert f"training data: {left_out}" in caplog.messages
        assert f"{tmp_path}/log: not read: 1 entry: events.tsv" in caplog.messages
        caplog.clear()
    source = Source(use="training", path="", rows=0, counts="", on_node=False, copy=data.train)
    stage = next(table for table in lineage_section([source]).tables if table.title.startswith("Stage timeline"))
    assert ("left out", left_out) in stage.rows

    transitions = Path(data.train.files[0]).parent
    run_shard = {"training_data_path": str(transitions), "shards_path": str(tmp_path / "share"), "num_nodes": 2,
                 "node_index": 0, "local_path": str(tmp_path / "shard")}  # fmt: skip
    shard(check(ShardConfig, run_shard))
    assert prepare(check(DqnConfig, config(tmp_path, tmp_path / "shard")), ALONE).train.notes == (left_out,)


def test_gamma_that_a_timeline_writes_into_rewards_has_a_folder_of_its_own(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "events.jsonl", events(20))

    def rewards(gamma: float, **section: Any) -> tuple[Path, float]:
        tree = check(DqnConfig, config(tmp_path, source, rl={"gamma": gamma}, timeline=section))
        copy = prepare(tree, ALONE).train
        return copy.folder, float(copy.reward.sum())

    (one, some), (other, more) = rewards(0.5, steps=2), rewards(0.9, steps=2)
    assert one != other
    assert some != more
    assert rewards(0.5) == rewards(0.9)


def test_one_file_for_the_timeline_and_the_training(run: Runner, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "events.jsonl", events(60))
    tree = config(tmp_path, source, timeline={
        "inputTableName": str(source), "outputTableName": str(tmp_path / "train"),
        "evalTableName": str(tmp_path / "eval"), "eval_percent": 30.0, "steps": 2,
    })  # fmt: skip
    del tree["training_data_path"]
    done = run("dqn", tree)
    assert done.code == 0, done.err
    report = json.loads((tmp_path / "train/manifest.json").read_text())["report"]
    assert report["train_rows"] + report["eval_rows"] == 300
    assert f"eval data: {tmp_path}/eval: " in done.err
    assert f" {report['eval_rows']} rows, " in done.err
    assert "episodes have rows that span several steps and cannot be scored" in done.err
    resolved = tmp_path / "out/config.json"
    assert run("dqn", json.loads(resolved.read_text())).code == 0  # a resolved config reads back


def test_candidates(run: Runner, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = []
    for row in events(30):
        candidates = [{"0": float(rng.normal()), "3": float(k)} for k in range(int(rng.integers(1, 4)))]
        rows.append({**row, "possible_actions": candidates, "action": candidates[-1]})
    tree = config(tmp_path, write_lines(tmp_path / "events.jsonl", rows))
    del tree["actions"]
    done = run("parametric_dqn", tree)
    assert done.code == 0, done.err
    assert "150 rows in 30 episodes" in done.err
    assert (tmp_path / "out/action_norm.json").exists()


def test_a_broken_event_ends_the_run(run: Runner, tmp_path: Path) -> None:
    rows = events(10)
    rows[7]["action"] = "x"
    done = run("dqn", config(tmp_path, write_lines(tmp_path / "events.jsonl", rows)))
    assert done.code == 2
    assert 'events.jsonl:8: expected one of the actions l, r, or an index below 2, got "x"' in done.err
    assert not (tmp_path / "out/model").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"timeline": {"inputTableName": "elsewhere"}}, "expected the events of training_data_path"),
        ({"timeline": {"steps": 2, "gamma": 0.5}}, r"timeline.gamma: expected rl.gamma \(0.9\), or absent, got 0.5"),
        ({"timeline": {"steps": 2}, "rl": {"multi_steps": 3}}, "rl.multi_steps: expected its default"),
        ({"timeline": {"actionDiscrete": False}}, "timeline.actionDiscrete: expected true, got false"),
        ({"query": {"actions": ["l"]}}, "query.actions: expected absent beside actions"),
        ({"timeline": {"evalTableName": "a"}, "eval_data_path": "b"}, "timeline.evalTableName: expected absent beside"),
    ],
)  # fmt: skip
def test_keys_that_contradict_each_other(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(DqnConfig, config(tmp_path, tmp_path / "events", **changes))


def test_candidates_have_a_timeline_of_their_own_kind(tmp_path: Path) -> None:
    tree = config(tmp_path, tmp_path / "events", timeline={"steps": 2})
    del tree["actions"]
    assert check(ParametricDqnConfig, tree).timeline is not None


def test_a_sample_of_transitions_is_refused(run: Runner, small: dict[str, Any]) -> None:
    done = run("dqn", {**small, "query": {"tableSample": 10}})
    assert done.code == 2
    assert "query: expected absent, as" in done.err
    assert "holds transitions" in done.err
    again = run("dqn", {**small, "timeline": {"steps": 2}})
    assert again.code == 2
    assert "timeline: expected absent, as" in again.err


@pytest.mark.parametrize("there", [pytest.param("nothing", marks=pytest.mark.slow), "other_events"])
def test_two_machines_share_the_events_of_the_first(run: Runner, tmp_path: Path, there: str) -> None:
    """All rows are one minibatch: the model is that of one process with all of them."""
    folders = [tmp_path / "0", tmp_path / "1"]
    for folder in folders:
        folder.mkdir()
    write_lines(folders[0] / "events.jsonl", events(40))
    if there == "other_events":
        write_lines(folders[1] / "events.jsonl", events(3, seed=5))
    tree = config(tmp_path, Path("events.jsonl"))
    tree["data"] = {"global_minibatch_size": 1000, "shards_path": str(tmp_path / "share/shards"),
                    "training_copy_dir": "copies"}  # fmt: skip
    tree["model_output_path"] = str(tmp_path / "out")
    file = tmp_path / "cluster.json"
    file.write_text(json.dumps(tree))
    for attempt in range(2):
        runs = run_nodes(folders, ["-m", "workflows.dqn", "--config", str(file)])
        assert [one.code for one in runs] == [0, 0], "\n".join(one.err for one in runs)
        assert "train rows" in runs[0].err or "training rows of each machine: 100, 100" in runs[0].err
        assert "shards: 100 + 100 rows on 2 nodes" in runs[0].err
        assert ("nothing to do" in runs[0].err) == (attempt == 1)
    source = write_lines(tmp_path / "all/events.jsonl", events(40))
    alone = config(tmp_path / "all", source)
    assert run("dqn", alone).code == 0
    same_weights(tmp_path / "out", tmp_path / "all/out")
