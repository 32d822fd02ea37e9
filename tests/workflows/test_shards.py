"""The data of several machines: split or copied, even or not, the model is that of one process that reads it all."""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch
from helpers.logs import Rows, candidate_rows, episode_code, random_rows, write_json, write_lines
from helpers.ranks import call_on_ranks, run_ranks
from helpers.runs import ALONE, Run, absent, checked, merged, metrics
from safetensors.torch import load_file
from torch.testing import assert_close

from reagent_lite.config import DqnConfig, load_config
from reagent_lite.data.copy.copy_summaries import content_of
from reagent_lite.data.copy.training_copy import open_training_copy
from reagent_lite.data.sampling.mixture import MixedSource
from reagent_lite.data.sampling.plan import ReadPlan
from reagent_lite.data.sampling.source import LoggedRows, LoggedSource
from reagent_lite.distributed.group import Group
from reagent_lite.evaluation.evaluation_rows import held_out
from reagent_lite.evaluation.policy_models import split_log
from reagent_lite.run.learner import build_learner, build_optimization
from reagent_lite.run.logged import prepare
from reagent_lite.run.sources.logged_experience import logged_plan

# a config whose paths are relative: each node's own data at one path, the same on all of them
SETTINGS: dict[str, Any] = {
    "training_data_path": "data", "model_output_path": "out", "use_gpu": False, "actions": ["a", "b"], "epochs": 3,
    "training": {"layers": [-1, 8, -1], "activations": ["relu", "linear"]},
    "data": {"global_minibatch_size": 16},
    "evaluation": {"calc_cpe_in_training": False, "bootstrap_resamples": 100, "learn_from_scored": True},
    "norm_params": {"num_samples": 40},
}  # fmt: skip
WITHOUT_NAMES = {key: value for key, value in SETTINGS.items() if key != "actions"}


def named(rows: Rows, node: int) -> Rows:
    """Returns rows whose episodes are those of one node only."""
    return [{**row, "mdp_id": f"{node}-{row['mdp_id']}"} for row in rows]


def nodes(folder: Path, shards: Sequence[Rows | None]) -> list[Path]:
    """Makes the working folder of each node, with no file in its data folder where it has None."""
    folders = [folder / str(number) for number in range(len(shards))]
    for node, rows in zip(folders, shards, strict=True):
        (node / "data").mkdir(parents=True)
        if rows is not None:
            write_lines(node / "data" / "log.jsonl", rows)
    return folders


def started(
    folders: list[Path], work: Callable[..., Any] | str, tree: dict[str, Any], processes: list[int] | None = None
) -> list[Run]:
    """Runs a function, or a workflow by name, on the config in every process of every node."""
    config = str(write_json(folders[0].parent / "config.json", tree))
    if isinstance(work, str):
        return run_ranks(["-m", f"workflows.{work}", "--config", config], folders, processes)
    return call_on_ranks(work, [config], folders, processes)


def together(
    folder: Path, monkeypatch: pytest.MonkeyPatch, shards: Sequence[Rows | None], processes: list[int] | None = None, *,
    tree: dict[str, Any] = SETTINGS, **changes: Any,
) -> tuple[list[Run], list[Path]]:  # fmt: skip
    """Trains on several nodes, compares with one process that has all rows; returns runs and folders of the nodes."""
    tree, folders = merged(tree, changes), nodes(folder, shards)
    runs = [run.ok for run in started(folders, "dqn" if "actions" in tree else "parametric_dqn", tree, processes)]
    assert not any((other / "out/model").exists() for other in folders[1:])
    out = folders[0] / "out"
    same_weights(load_file(out / "model/weights.safetensors"), alone(monkeypatch, tree, folders, shards))
    monkeypatch.chdir(nodes(folder / "all rows", [[row for rows in shards for row in rows or []]])[0])
    for column, fitted in prepare(checked(tree), ALONE).normalization.json().items():
        same_normalization(out / ("state_features_norm.json" if column == "state" else "action_norm.json"), fitted)
    return runs, folders


def alone(
    monkeypatch: pytest.MonkeyPatch, tree: dict[str, Any], folders: list[Path], shards: Sequence[Rows | None]
) -> dict[str, Any]:
    """Returns weights of one process that reads every folder as the cluster's plan has it, normalized alike."""
    columns = {"state": "state_features"} | ({} if "actions" in tree else {"action": "action"})
    norms = {f"{name}_norm_data_path": f"{folders[0]}/out/{column}_norm.json" for name, column in columns.items()}
    config = checked(tree | norms)
    logs: list[LoggedRows] = []
    for folder in (folder for folder, rows in zip(folders, shards, strict=True) if rows):
        monkeypatch.chdir(folder)
        data = prepare(config, ALONE)
        logs.append(data.train.rows)
    plan = ReadPlan(
        shards=tuple(rows.count for rows in logs), minibatch=16, epochs=config.epochs, seed=config.seed,
        reads=tuple(range(len(logs))), minibatches_per_step=config.training.minibatches_per_step,
    )  # fmt: skip
    source = MixedSource(
        tuple((LoggedSource(rows, plan, at, ALONE.device), 1 / len(logs)) for at, rows in enumerate(logs))
    )
    learner = build_learner(config, data.spec, ALONE.device)
    optimization = build_optimization(config, learner, captured=False)
    learner.train()
    for _ in range(plan.num_steps):
        for _ in range(plan.minibatches_per_step):
            learner(next(source))[0].backward()
        optimization.step()
        learner.after_step()
    return learner.scorer.state_dict()


def same_weights(weights: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compares all but what candidates of a row have in common, which cancels in Q = V + A - mean of A.

    The gradient of a bias whose unit is active for all of them is rounding, of which Adam makes steps.
    """
    assert weights.keys() == expected.keys()
    candidates = weights["network.advantage.2.bias"].numel() == 1
    for name in weights.keys() - ({"network.advantage.0.bias", "network.advantage.2.bias"} if candidates else set()):
        assert_close(weights[name], expected[name], atol=1e-5, rtol=0)


def same_normalization(file: Path, fitted: dict[str, Any]) -> None:
    """Compares to 1e-12 what was fitted to the rows of all machines and to a file with all rows."""
    written = {key: json.loads(text) for key, text in json.loads(file.read_text()).items()}
    assert written.keys() == fitted.keys()
    for key, text in fitted.items():
        parameters = json.loads(text) if isinstance(text, str) else text
        exact = {name: parameters.get(name) for name in ("feature_type", "levels")}
        close = {name: parameters[name] for name in ("mean", "stddev", "min_value", "max_value")}
        assert {name: written[key].get(name) for name in exact} == exact
        assert {name: written[key][name] for name in close} == pytest.approx(close, rel=1e-12, abs=1e-12)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[list[Run], list[Path]]]:
    return partial(together, tmp_path, monkeypatch)


def gradient(group: Group, path: str) -> dict[str, float]:
    """Returns the gradient of a step over the rows of all machines.

    One number, 0, is predicted for every reward; the loss is the weighted sum of squared errors.
    """
    config = load_config(DqnConfig, path)
    data = prepare(config, group)
    batch = next(LoggedSource(data.train.rows, logged_plan(config, data, 4), group.rank, group.device))
    module = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(module.weight)
    wrapped = group.wrap(module)  # averages as long as it lives
    (batch.weight * (wrapped(torch.ones(len(batch), 1))[:, 0] - batch.reward).square()).sum().backward()
    return {"rows": len(batch), "gradient": float(module.weight.grad)}


def scored_episodes(group: Group, path: str) -> dict[str, object]:
    """Returns the episodes that are scored, and those that models are fitted to."""
    config = load_config(DqnConfig, path)
    data = prepare(config, group)
    split = split_log(data.sides, data.scored, config.evaluation)
    scored, fitted = split.scored, data.train.copy.episode[split.fitted]
    return {
        "scored": np.unique(scored.episode.view(np.uint64)).tolist(),
        "scored_rows": len(scored.numbers),
        "of_all": scored.hashes.tolist(),
        "fitted": np.unique(data.train.copy.episode_hash[fitted]).tolist(),
        "rows": len(fitted),
    }


def with_kind(value: Any, texts: str, number: str) -> Any:
    """Returns features, or each of a list, with a category "kind" and a number, which one in ten lacks."""
    if isinstance(value, list):
        return [with_kind(candidate, texts, number) for candidate in value]
    code = crc32(json.dumps(value).encode())
    more = {"kind": texts[code // 10 % len(texts)], number: float(code % 7)}
    return {**value, **more} if isinstance(value, dict) and code % 10 else value


def with_texts(rows: Rows, texts: str, number: str) -> Rows:
    """Returns rows whose states, and candidates, have such features."""
    return [{name: with_kind(value, texts, number) for name, value in row.items()} for row in rows]


@pytest.mark.parametrize(("make", "tree"), [(random_rows, SETTINGS), (candidate_rows, WITHOUT_NAMES)])
def test_shards_with_different_levels_train_what_one_machine_trains(
    make: Callable[..., Rows], tree: dict[str, Any], cluster: Callable[..., Any]
) -> None:
    """Node 1 has a metric and features 7, which node 0 lacks; node 0 has features 9."""
    second = with_texts(named(make(60, seed=1), 1), "bcdd", "7")
    shards = [with_texts(named(make(80), 0), "abc", "9"), [{**row, "metrics": {"clicks": 1.0}} for row in second]]
    runs, folders = cluster(shards, tree=tree, norm_params={"max_unique_enum_values": 3, "num_samples": 1000})
    for column, ids in {"state_features": "0127", **({} if "actions" in tree else {"action": "057"})}.items():
        norm = json.loads((folders[0] / f"out/{column}_norm.json").read_text())
        assert sorted(norm) == [*ids, "9", "kind"]
        kind = json.loads(norm["kind"])
        assert (kind["feature_type"], kind["levels"]) == ("ENUM", ["b", "c", "d"])
    assert re.search("state feature kind: .* values are other", runs[0].err)


def test_a_feature_that_is_a_text_on_one_machine_alone_is_refused(tmp_path: Path) -> None:
    numbers = [{**row, "state_features": {**row["state_features"], "kind": 1.5}} for row in named(random_rows(40), 0)]
    runs = started(nodes(tmp_path, [numbers, with_texts(named(random_rows(40), 1), "ab", "7")]), "dqn", SETTINGS)
    assert 2 in [run.code for run in runs]
    assert any("data on node 0: feature kind: expected strings" in run.err for run in runs)


def test_three_rows_here_and_one_there_give_the_gradient_of_all_four(tmp_path: Path) -> None:
    """Rewards 5, 5, 5 and 1 and the prediction 0: the mean of -2 * reward is -2 * 16 / 4 = -8.

    Averaging the means of both nodes gives (-2 * 5 - 2 * 1) / 2 = -6.
    """
    rows = random_rows(4, missing=0)
    folders = nodes(
        tmp_path, [named([{**row, "reward": 5} for row in rows[:3]], 0), named([{**rows[3], "reward": 1}], 1)]
    )
    tree = merged(SETTINGS, {"norm_params": {"feature_overrides": {str(i): "DO_NOT_PREPROCESS" for i in range(3)}}})
    runs = started(folders, gradient, tree)
    assert [run.ok.outcome for run in runs] == [{"rows": rows, "gradient": pytest.approx(-8)} for rows in (3, 1)]


def test_shards_train_the_model_of_one_process_with_all_rows(cluster: Callable[..., Any]) -> None:
    """Three processes on two nodes with 60 and 25 rows, minibatches of 16, two a step."""
    shards = [named(random_rows(60), 0), named(random_rows(25, 1), 1)]
    rows = [row for part in shards for row in part]
    runs, folders = cluster(shards, [2, 1], training={"minibatches_per_step": 2})
    assert (runs[0].outcome["rows"], runs[0].outcome["steps"]) == (3 * 85, 3 * 3)  # 85 rows, 32 a step
    assert not absent(
        runs[0].err,
        "shards: 60 + 25 rows on 2 nodes",
        "16 rows = 3 processes x 5.33333, 2 per step",
        "of 2 machines",
        "training data: data: 85 rows",
    )
    scored = held_out(np.array([episode_code(name) for name in {row["mdp_id"] for row in rows}], np.uint64), 0.2).sum()
    out = folders[0] / "out"
    assert json.loads((out / "model/evaluation.json").read_text())["cpe"]["overlap"]["num_episodes"] == scored
    logged = [line["reward/logged/mean"] for line in metrics(out) if "reward/logged/mean" in line]
    assert logged[-1] == pytest.approx(np.mean([row["reward"] for row in rows]), abs=1e-6)
    copies = [next(folder.rglob(".reagent-lite/*/manifest.json")).parent for folder in folders]
    contents = "\n".join(content_of(open_training_copy(copy)) for copy in copies)
    manifest = json.loads((out / "model/manifest.json").read_text())
    assert manifest["data_hash"] == hashlib.sha256(contents.encode()).hexdigest()


def test_a_node_without_rows_and_one_with_a_single_row(cluster: Callable[..., Any]) -> None:
    """The single row is for two processes; rewards are summed over two rows."""
    runs, _ = cluster([None, named(random_rows(1, 5), 1), named(random_rows(44), 2)], [1, 2, 1], rl={"multi_steps": 2})
    assert "shards: 0 + 1 + 44 rows on 3 nodes" in runs[0].err
    assert runs[0].outcome["rows"] == 3 * 45


EVENTS = [{**row, "terminal": row["sequence_number"] == 9} for row in random_rows(200)]
for event in EVENTS:
    for column in ("next_state_features", "next_action", "possible_next_actions", "time_diff"):
        del event[column]


def test_machines_keep_their_own_episodes_of_a_common_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log and the eval data are events that both nodes see; the model is that of one process with their parts."""
    write_lines(tmp_path / "log" / "log.jsonl", EVENTS)
    write_lines(tmp_path / "eval.jsonl", [{**row, "mdp_id": f"e{row['mdp_id']}"} for row in EVENTS[:40]])
    data = {"layout": "split", "training_copy_dir": "copies", "global_minibatch_size": 1000}
    paths = {"training_data_path": str(tmp_path / "log"), "eval_data_path": str(tmp_path / "eval.jsonl")}
    tree = merged(SETTINGS, {**paths, "data": data})
    folders = nodes(tmp_path, [None] * 2)
    first = [run.ok for run in started(folders, "dqn", tree, [1, 2])]
    numbers = re.search(r"shards: (\d+) \+ (\d+) rows on 2 nodes", first[0].err).groups()
    assert (min(map(int, numbers)) > 0, sum(map(int, numbers))) == (True, 200)
    parts = [open_training_copy(next(folder.glob("copies/log-*"))) for folder in folders]
    assert [len(part) for part in parts] == [int(number) for number in numbers]
    (tmp_path / "one").mkdir()
    monkeypatch.chdir(tmp_path / "one")
    alone = run_ranks(
        ["-m", "workflows.dqn", "--config", str(write_json(tmp_path / "c.json", tree))], [tmp_path / "one"]
    )
    assert alone[0].ok.outcome["rows"] == first[0].outcome["rows"]
    same_weights(*(load_file(out / "out/model/weights.safetensors") for out in (folders[0], tmp_path / "one")))


@pytest.mark.slow
def test_a_file_without_rows_and_candidates(cluster: Callable[..., Any]) -> None:
    assert "shards: 45 + 0 rows on 2 nodes" in cluster([candidate_rows(45), []], tree=WITHOUT_NAMES)[0][0].err


@pytest.mark.parametrize(
    ("shards", "changes", "message"),
    [
        ((random_rows(30), random_rows(30, 1)), {"data": {"layout": "replicas"}},
         "data on node 1: expected the 30 rows of node 0"),
        ((None, None), {}, "data: expected rows of data on at least one node"),
        ((random_rows(30), random_rows(30)[::-1]), {},
         "data on node 1: expected rows of its own, as data.layout is shards, got the 30 rows of node 0"),
        ((random_rows(30), random_rows(30, 1)), {"data": {"layout": "split"}},
         "data on node 1: expected the files of node 0, as data.layout is split"),
        ((random_rows(30), None), {"data": {"layout": "split"}},
         "data on node 1: expected the files of node 0, as data.layout is split"),
        ((random_rows(30), None), {"data": {"layout": "split"}, "training_data_path": "data/log.jsonl"},
         "nothing at this path. Mount or copy the data on every machine, as each reads all rows with data"),
        ((random_rows(30), random_rows(30, 1)), {"norm_params": {"feature_overrides": {"8": "BINARY"}}},
         "norm_params.feature_overrides.8: expected a feature"),
    ],
    ids=["other rows", "no rows", "equal rows", "rows of each node to split", "rows of one node to split",
         "a file of one node to split",
         "no feature"],
)  # fmt: skip
def test_differences_end_every_process_alike(
    tmp_path: Path, shards: Sequence[Rows | None], changes: dict[str, Any], message: str
) -> None:
    runs = started(nodes(tmp_path, shards), "dqn", merged(SETTINGS, changes))
    assert [(run.code, message in run.err) for run in runs] == [(2, True)] * 2, runs


HELD_OUT: dict[str, Any] = merged(SETTINGS, {"evaluation": {"held_out_share": 0.3}})
EVERY = [episode_code(str(number)) for number in range(20)]
CHOSEN = [episode for episode, chosen in zip(EVERY, held_out(np.array(EVERY, np.uint64), 0.3), strict=True) if chosen]


def test_scored_episodes_are_fitted_nowhere(tmp_path: Path) -> None:
    """Both nodes have rows of the same 20 episodes, as where each machine logged its own part of them: 5 rows each."""
    rows = random_rows(200)
    runs = started(nodes(tmp_path, [rows[::2], rows[1::2]]), scored_episodes, HELD_OUT)
    assert 0 < len(CHOSEN) < 20
    expected = {
        "scored": sorted(CHOSEN), "of_all": sorted(CHOSEN), "scored_rows": 5 * len(CHOSEN),
        "fitted": sorted(set(EVERY) - set(CHOSEN)), "rows": 5 * (20 - len(CHOSEN)),
    }  # fmt: skip
    assert [run.ok.outcome for run in runs] == [expected] * 2
