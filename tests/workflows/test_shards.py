"""The data of several machines: split or copied, even or not, the model is that of one process that reads it all."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracles.logs import candidate_rows, random_rows, write_lines
from oracles.nodes import run_nodes
from oracles.runs import ROOT, Run
from safetensors.torch import load_file
from torch.testing import assert_close

from reagent_lite.data.copy.place import CopyManifest
from reagent_lite.evaluation.page import held_out

WORKER = str(Path(__file__).parent / "shards_worker.py")
WEIGHTS = "out/model/weights.safetensors"
Rows = list[dict[str, Any]]


def named(rows: Rows, node: str) -> Rows:
    """Returns rows whose episodes are those of one node only."""
    return [{**row, "mdp_id": f"{node}-{row['mdp_id']}"} for row in rows]


def settings(**other: Any) -> dict[str, Any]:
    """A config whose paths are relative: each node's own data at one path, the same on all of them."""
    return {
        "training_data_path": "data",
        "model_output_path": "out",
        "use_gpu": False,
        "actions": ["a", "b"],
        "epochs": 3,
        "training": {"layers": [-1, 8, -1], "activations": ["relu", "linear"]},
        "data": {"global_minibatch_size": 16},
        "evaluation": {"calc_cpe_in_training": False, "bootstrap_resamples": 100},
        **other,
    }


def node(folder: Path, rows: Rows | None) -> Path:
    """Makes a node's working folder with its rows, of a folder without a file where there are None."""
    (folder / "data").mkdir(parents=True)
    if rows is not None:
        write_lines(folder / "data" / "log.jsonl", rows)
    return folder


def written(file: Path, tree: dict[str, Any]) -> str:
    file.write_text(json.dumps(tree))
    return str(file)


def trained(folders: list[Path], config: str, workflow: str = "dqn", processes: list[int] | None = None) -> list[Run]:
    """Trains on several nodes and returns how every process ended, which must be well."""
    runs = run_nodes(folders, ["-m", f"workflows.{workflow}", "--config", config], processes=processes)
    assert [run.code for run in runs] == [0] * len(runs), "\n".join(run.err for run in runs)
    return runs


def alone(folder: Path, *arguments: str) -> None:
    """Runs a Python command in one process of no cluster."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True,
                          timeout=240, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr


def same_weights(one: Path, other: Path) -> None:
    mine, theirs = load_file(one), load_file(other)
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        if name == "network.advantage.2.bias" and value.numel() == 1:
            # of candidates it cancels in Q = V + A - mean of A: its gradient is rounding, of which Adam makes steps
            continue
        assert_close(value, theirs[name], atol=1e-5, rtol=0)


def union(folder: Path, tree: dict[str, Any], folders: list[Path], norms: dict[str, str]) -> Path:
    """Trains one process on the shards of several nodes, under what they normalized with."""
    folder.mkdir()
    first = folders[0] / "out"
    tree = {**tree, **{key: str(first / file) for key, file in norms.items()}}
    alone(folder, WORKER, "union", written(folder / "config.json", tree), *map(str, folders))
    return folder / "union.safetensors"


def test_three_rows_here_and_one_there_give_the_gradient_of_all_four(tmp_path: Path) -> None:
    """Rewards 5, 5, 5 and 1 and the prediction 0: the mean of -2 * reward is -2 * 16 / 4 = -8.

    Averaging the means of both nodes gives (-2 * 5 - 2 * 1) / 2 = -6.
    """
    rows = random_rows(4, missing=0)
    three = node(tmp_path / "three", named([{**row, "reward": 5} for row in rows[:3]], "three"))
    one = node(tmp_path / "one", named([{**rows[3], "reward": 1}], "one"))
    tree = settings(norm_params={"feature_overrides": {str(i): "DO_NOT_PREPROCESS" for i in range(3)}})
    runs = run_nodes([three, one], [WORKER, "gradient", written(tmp_path / "config.json", tree)])
    assert [run.code for run in runs] == [0, 0], runs
    assert [run.outcome for run in runs] == [
        {"rows": 3, "weighted": pytest.approx(-8), "plain": pytest.approx(-6)},
        {"rows": 1, "weighted": pytest.approx(-8), "plain": pytest.approx(-6)},
    ]


def test_shards_train_the_model_of_one_process_with_all_rows(tmp_path: Path) -> None:
    """Three processes on two nodes with 60 and 25 rows, minibatches of 16, two a step."""
    shards = [named(random_rows(60), "0"), named(random_rows(25, 1), "1")]
    folders = [node(tmp_path / str(i), rows) for i, rows in enumerate(shards)]
    tree = settings(training={**settings()["training"], "minibatches_per_step": 2})
    runs = trained(folders, written(tmp_path / "config.json", tree), processes=[2, 1])
    assert runs[0].outcome["rows"] == 3 * 85
    assert runs[0].outcome["steps"] == 3 * 3  # 85 rows, 32 a step
    assert "shards: 60 + 25 rows on 2 nodes" in runs[0].err
    assert "global minibatch 16 rows = 3 processes x 5.33333, 2 a step, 3 steps/epoch" in runs[0].err
    assert "training data: data: 85 rows" in runs[0].err
    assert not (folders[1] / WEIGHTS).exists()
    judged = json.loads((folders[0] / "out" / "model" / "evaluation.json").read_text())["cpe"]["overlap"]
    every = [int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
             for name in {row["mdp_id"] for rows in shards for row in rows}]  # fmt: skip
    scored = int(held_out(np.array(every, np.uint64), 0.2).sum())
    assert judged["num_episodes"] == scored
    said = "1 episode of 2 machines is" if scored == 1 else f"{scored} episodes of 2 machines are"
    assert f"evaluation: {said} scored" in runs[0].err
    norms = {"state_norm_data_path": "state_features_norm.json"}
    same_weights(folders[0] / WEIGHTS, union(tmp_path / "union", tree, folders, norms))
    figures = [json.loads(line) for line in (folders[0] / "out" / "metrics.jsonl").read_text().splitlines()]
    logged = [line["reward/logged/mean"] for line in figures if "reward/logged/mean" in line]
    assert logged[-1] == pytest.approx(np.mean([row["reward"] for rows in shards for row in rows]), abs=1e-6)
    copies = [next(folder.rglob(".reagent-lite/*/manifest.json")).parent for folder in folders]
    hashes = "\n".join(manifest.digest for copy in copies if (manifest := CopyManifest.read(str(copy))))
    exported = json.loads((folders[0] / "out" / "model" / "manifest.json").read_text())
    assert exported["data_hash"] == hashlib.sha256(hashes.encode()).hexdigest()
    both = node(tmp_path / "both", [*shards[0], *shards[1]])
    alone(both, "-m", "workflows.dqn", "--config", written(tmp_path / "one.json", {**tree, "epochs": 1}))
    same_normalization(*((f / "out" / "state_features_norm.json") for f in (folders[0], both)))


def same_normalization(one: Path, other: Path) -> None:
    """Checks that two files have equal parameters to 1e-12."""
    mine, theirs = (
        {key: json.loads(text) for key, text in json.loads(file.read_text()).items()} for file in (one, other)
    )
    assert mine.keys() == theirs.keys()
    for key, parameters in mine.items():
        assert parameters["feature_type"] == theirs[key]["feature_type"]
        for name in ("mean", "stddev", "min_value", "max_value"):
            assert parameters[name] == pytest.approx(theirs[key][name], rel=1e-12, abs=1e-12)


@pytest.mark.slow
def test_candidates_of_two_nodes_that_have_other_features_and_metrics(tmp_path: Path) -> None:
    """Node 1 has 31 rows, a state feature and a metric that node 0 lacks; node 0 has a candidate's feature more."""
    first = named(candidate_rows(70), "0")
    for row in first:
        row["action"] = {**row["action"], "9": 1.0}
        for listed in ("possible_actions", "possible_next_actions"):
            row[listed] = [{**choice, "9": 1.0} for choice in row[listed]]
        if row["next_action"]:
            row["next_action"] = {**row["next_action"], "9": 1.0}
    second = named(candidate_rows(31, 1, most=3), "1")
    for number, row in enumerate(second):
        row["state_features"] = {**row["state_features"], "7": 2.5 * number - 3}
        row["metrics"] = {"clicks": 1.0}
    folders = [node(tmp_path / "0", first), node(tmp_path / "1", second)]
    tree = {key: value for key, value in settings().items() if key != "actions"}
    trained(folders, written(tmp_path / "config.json", tree), "parametric_dqn")
    state = json.loads((folders[0] / "out" / "state_features_norm.json").read_text())
    action = json.loads((folders[0] / "out" / "action_norm.json").read_text())
    assert (sorted(state), sorted(action)) == (["0", "1", "2", "7"], ["0", "5", "9"])
    # feature 7 is in 31 rows of 101: 2.5 i - 3 for i < 31, whose mean is 2.5 * 15 - 3
    assert json.loads(state["7"])["mean"] == 34.5
    norms = {"state_norm_data_path": "state_features_norm.json", "action_norm_data_path": "action_norm.json"}
    same_weights(folders[0] / WEIGHTS, union(tmp_path / "union", tree, folders, norms))


@pytest.mark.slow
def test_replicas_train_the_model_of_one_process(tmp_path: Path) -> None:
    """Node 1 has the rows in another order; the copies are sorted by episode, so that row numbers agree."""
    rows = random_rows(83)
    shuffled = [rows[i] for i in np.random.default_rng(0).permutation(83)]
    folders = [node(tmp_path / "0", rows), node(tmp_path / "1", shuffled)]
    tree = settings(data={"global_minibatch_size": 16, "layout": "replicas"})
    runs = trained(folders, written(tmp_path / "config.json", tree))
    assert runs[0].outcome["rows"] == 3 * 83
    assert "shards:" not in runs[0].err
    one = node(tmp_path / "one", rows)
    alone(one, "-m", "workflows.dqn", "--config", str(tmp_path / "config.json"))
    same_weights(folders[0] / WEIGHTS, one / WEIGHTS)
    norms = [folder / "out" / "state_features_norm.json" for folder in (folders[0], one)]
    assert norms[0].read_bytes() == norms[1].read_bytes()


@pytest.mark.parametrize(
    ("empty", "workflow"),
    [(0, "dqn"), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((0, "parametric_dqn"), (1, "dqn")))],
)
def test_a_node_without_rows_leaves_the_model_of_the_others(tmp_path: Path, empty: int, workflow: str) -> None:
    """Node 0's folder is empty, node 1's file has blank lines only; the rows of the other are all there is."""
    rows = random_rows(45) if workflow == "dqn" else candidate_rows(45)
    folders = [node(tmp_path / str(i), rows if i != empty else None) for i in range(2)]
    if empty == 1:
        (folders[1] / "data" / "log.jsonl").write_text("\n  \n")
    tree = {key: value for key, value in settings().items() if key != "actions" or workflow == "dqn"}
    runs = trained(folders, written(tmp_path / "config.json", tree), workflow)
    assert f"shards: {'0 + 45' if empty == 0 else '45 + 0'} rows on 2 nodes" in runs[0].err
    one = node(tmp_path / "one", rows)
    alone(one, "-m", f"workflows.{workflow}", "--config", str(tmp_path / "config.json"))
    same_weights(folders[0] / WEIGHTS, one / WEIGHTS)


def test_a_node_with_one_row_adds_that_row(tmp_path: Path) -> None:
    folders = [node(tmp_path / "0", named(random_rows(1, 5), "0")), node(tmp_path / "1", named(random_rows(44), "1"))]
    tree = settings(rl={"multi_steps": 2})
    runs = trained(folders, written(tmp_path / "config.json", tree), processes=[2, 1])
    assert runs[0].outcome["rows"] == 3 * 45
    norms = {"state_norm_data_path": "state_features_norm.json"}
    same_weights(folders[0] / WEIGHTS, union(tmp_path / "union", tree, folders, norms))


@pytest.mark.parametrize(
    ("second", "changes", "said"),
    [
        (random_rows(30, 1), {"data": {"layout": "replicas"}},
         "data on node 1: expected the 30 rows of node 0, as data.layout is replicas, got 30 rows, others"),
        (None, {}, ""),
        (random_rows(30), {}, "data on node 1: expected rows of its own, as data.layout is shards, got the 30 rows of "
                              "node 0"),
        (random_rows(30, 1), {"norm_params": {"feature_overrides": {"8": "BINARY"}}},
         "norm_params.feature_overrides.8: expected a feature of the training data, got 8"),
    ],
)  # fmt: skip
def test_differences_end_every_process_alike(
    tmp_path: Path, second: Rows | None, changes: dict[str, Any], said: str
) -> None:
    folders = [node(tmp_path / "0", random_rows(30) if said else None), node(tmp_path / "1", second)]
    arguments = ["-m", "workflows.dqn", "--config", written(tmp_path / "config.json", settings(**changes))]
    for run in run_nodes(folders, arguments):
        assert run.code == 2
        assert (said or "data: expected rows of data on at least one node, got none on any of 2") in run.err


def test_scored_episodes_are_fitted_nowhere(tmp_path: Path) -> None:
    """Both nodes have rows of the same 20 episodes, as where each machine logged its own part of them: 5 rows each."""
    rows = random_rows(200)
    folders = [node(tmp_path / "0", rows[::2]), node(tmp_path / "1", rows[1::2])]
    tree = settings(evaluation={**settings()["evaluation"], "held_out_share": 0.3})
    config = written(tmp_path / "config.json", tree)
    first, second = run_nodes(folders, [WORKER, "judged", config])
    assert (first.code, second.code) == (0, 0), first.err + second.err
    every = [int.from_bytes(hashlib.blake2b(str(i).encode(), digest_size=8).digest(), "little") for i in range(20)]
    chosen = held_out(np.array(every, np.uint64), 0.3)
    scored = sorted(one for one, is_scored in zip(every, chosen, strict=True) if is_scored)
    assert 0 < len(scored) < 20
    for run in (first, second):
        assert run.outcome["scored"] == run.outcome["of_all"] == scored
        assert run.outcome["scored_rows"] == 5 * len(scored)
        assert run.outcome["fitted"] == sorted(set(every) - set(scored))
        assert run.outcome["rows"] == 5 * (20 - len(scored))
    assert f"evaluation: {len(scored)} episodes of 2 machines are scored" in first.err


@pytest.mark.slow
def test_eval_episodes_that_another_node_trains_on_are_scored_by_share_only(tmp_path: Path) -> None:
    """Both judge on episodes 0 to 19: 0 to 9 are node 0's training data, 10 to 14 are node 1's, the rest are new.

    Node 0 scores them all, for node 1 has the same rows of each.
    """
    rows = random_rows(200)
    folders = [node(tmp_path / "0", rows[:100]), node(tmp_path / "1", rows[100:150])]
    for folder in folders:
        write_lines(folder / "eval" / "log.jsonl", rows)
    tree = settings(eval_data_path="eval", evaluation={**settings()["evaluation"], "held_out_share": 0.3})
    first, second = run_nodes(folders, [WORKER, "judged", written(tmp_path / "config.json", tree)])
    assert (first.code, second.code) == (0, 0), first.err + second.err
    every = [int.from_bytes(hashlib.blake2b(str(i).encode(), digest_size=8).digest(), "little") for i in range(20)]
    chosen = held_out(np.array(every, np.uint64), 0.3)
    scored = {one for i, one in enumerate(every) if chosen[i] or i >= 15}
    assert (first.outcome["scored"], second.outcome["scored"]) == (sorted(scored), [])
    assert first.outcome["of_all"] == second.outcome["of_all"] == sorted(scored)
    assert first.outcome["fitted"] == sorted(set(every[:10]) - scored)
    assert second.outcome["fitted"] == sorted(set(every[10:15]) - scored)


def test_normalization_is_fitted_to_the_rows_of_all_nodes(tmp_path: Path) -> None:
    """300 rows of 10.0 and 100 of 50.0 have the mean (300 * 10 + 100 * 50) / 400 = 20.

    Rows of node 0 list one candidate and those of node 1 three, so that 300 are seen on each: their mean is 30.
    """
    folders = []
    for number, (count, value, choices) in enumerate(((300, 10.0, 1), (100, 50.0, 3))):
        rows = named(candidate_rows(count), str(number))
        for row in rows:
            row["state_features"], row["next_state_features"] = {"0": value}, {"0": value}
            row["action"] = {"0": value}
            row["possible_actions"] = [{"0": value}] * choices
            row["possible_next_actions"] = row["possible_next_actions"] and [{"0": value}]
            row["next_action"] = row["next_action"] and {"0": value}
        folders.append(node(tmp_path / str(number), rows))
    tree = {key: value for key, value in settings().items() if key != "actions"}
    tree["norm_params"] = {"num_samples": 40, "feature_overrides": {"0": "CONTINUOUS"}}
    runs = run_nodes(folders, [WORKER, "gradient", written(tmp_path / "config.json", tree)], processes=[1, 2])
    assert [run.code for run in runs] == [0, 0, 0], runs
    for file, mean in (("state_features_norm.json", 20), ("action_norm.json", 30)):
        parameters = json.loads((folders[0] / "out" / file).read_text())
        assert json.loads(parameters["0"])["mean"] == mean
        assert not (folders[1] / "out" / file).exists()
