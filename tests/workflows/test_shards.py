"""The data of several machines: split or copied, even or not, the model is that of one process that reads it all."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracles.logs import candidate_rows, episode_code, random_rows, write_lines
from oracles.ranks import call_on_ranks, run_ranks
from oracles.runs import ALONE, Run, checked, merged
from safetensors.torch import load_file
from torch.testing import assert_close

from reagent_lite.config import DqnConfig, load_config
from reagent_lite.data.copy.agreement import content_of
from reagent_lite.data.copy.training_copy import open_training_copy
from reagent_lite.data.sampling.mixture import MixedSource
from reagent_lite.data.sampling.plan import ReadPlan
from reagent_lite.data.sampling.source import LoggedRows, LoggedSource
from reagent_lite.distributed.group import Group
from reagent_lite.evaluation.fitting import split_log
from reagent_lite.evaluation.page import held_out
from reagent_lite.run.learner import build_learner, build_optimization
from reagent_lite.run.logged import prepare
from reagent_lite.run.sources import logged_plan

Rows = list[dict[str, Any]]
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
    file = folders[0].parent / "config.json"
    file.write_text(json.dumps(tree))
    if isinstance(work, str):
        return run_ranks(["-m", f"workflows.{work}", "--config", str(file)], folders, processes)
    return call_on_ranks(work, [str(file)], folders, processes)


@dataclass(frozen=True)
class Cluster:
    """What a training run on several nodes left, which has been compared with one process that has all rows."""

    runs: list[Run]
    folders: list[Path]

    @property
    def out(self) -> Path:
        return self.folders[0] / "out"

    def json(self, file: str) -> Any:
        return json.loads((self.out / file).read_text())


class Together:
    """cluster(rows of each node, changed keys, processes of each node) -> Cluster."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder, self._monkeypatch = folder, monkeypatch

    def __call__(
        self, shards: Sequence[Rows | None], processes: list[int] | None = None, *, tree: dict[str, Any] = SETTINGS,
        **changes: Any,
    ) -> Cluster:  # fmt: skip
        tree, folders = merged(tree, changes), nodes(self._folder, shards)
        workflow = "dqn" if "actions" in tree else "parametric_dqn"
        runs = started(folders, workflow, tree, processes)
        assert [run.code for run in runs] == [0] * len(runs), "\n".join(run.err for run in runs)
        cluster = Cluster(runs, folders)
        distinct = shards[:1] if tree["data"].get("layout") == "replicas" else shards
        filled = [folder for folder, rows in zip(folders, distinct, strict=False) if rows]
        self._same_weights(load_file(cluster.out / "model/weights.safetensors"), self._alone(tree, cluster.out, filled))
        self._same_normalization(tree, cluster.out, [row for rows in distinct for row in rows or []])
        assert not any((folder / "out/model").exists() for folder in folders[1:])
        return cluster

    def _alone(self, tree: dict[str, Any], out: Path, folders: list[Path]) -> dict[str, Any]:
        """Returns weights of one process that reads every folder as the cluster's plan has it, normalized alike."""
        columns = {"state": "state_features"} | ({} if "actions" in tree else {"action": "action"})
        norms = {f"{name}_norm_data_path": str(out / f"{column}_norm.json") for name, column in columns.items()}
        config = checked(tree | norms)
        shards: list[LoggedRows] = []
        for folder in folders:
            self._monkeypatch.chdir(folder)
            data = prepare(config, ALONE)
            shards.append(data.train.rows)
        step, num = config.training.minibatches_per_step, len(shards)
        plan = ReadPlan(
            shards=tuple(rows.count for rows in shards), minibatch=16, epochs=config.epochs, seed=config.seed,
            reads=tuple(range(num)), minibatches_per_step=step,
        )  # fmt: skip
        source = MixedSource(
            tuple((LoggedSource(rows, plan, number, ALONE.device), 1 / num) for number, rows in enumerate(shards))
        )
        learner = build_learner(config, data.spec, ALONE.device)
        optimization = build_optimization(config, learner, captured=False)
        learner.train()
        for _ in range(plan.num_steps):
            for _ in range(step):
                learner(next(source))[0].backward()
            optimization.step()
            learner.after_step()
        return learner.scorer.state_dict()

    def _same_weights(self, mine: dict[str, Any], theirs: dict[str, Any]) -> None:
        assert mine.keys() == theirs.keys()
        candidates = mine["network.advantage.2.bias"].numel() == 1
        for name, value in mine.items():
            # what all candidates of a row have in common cancels in Q = V + A - mean of A: the gradient of a bias whose
            # unit is active for all of them is rounding, of which Adam makes steps
            if not (candidates and name in ("network.advantage.0.bias", "network.advantage.2.bias")):
                assert_close(value, theirs[name], atol=1e-5, rtol=0)

    def _same_normalization(self, tree: dict[str, Any], out: Path, rows: Rows) -> None:
        """Compares to 1e-12 what was fitted to the rows of all machines and to a file with all rows."""
        self._monkeypatch.chdir(nodes(self._folder / "all rows", [rows])[0])
        for column, fitted in prepare(checked(tree), ALONE).normalization.json().items():
            file = out / ("state_features_norm.json" if column == "state" else "action_norm.json")
            written = {key: json.loads(text) for key, text in json.loads(file.read_text()).items()}
            expected = {key: json.loads(text) if isinstance(text, str) else text for key, text in fitted.items()}
            assert written.keys() == expected.keys()
            for key, parameters in written.items():
                assert parameters["feature_type"] == expected[key]["feature_type"]
                assert parameters.get("levels") == expected[key].get("levels")
                for name in ("mean", "stddev", "min_value", "max_value"):
                    assert parameters[name] == pytest.approx(expected[key][name], rel=1e-12, abs=1e-12)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Together:
    return Together(tmp_path, monkeypatch)


class Constant(torch.nn.Module):
    """Predicts one number for every reward; the loss is the weighted sum of squared errors."""

    def __init__(self) -> None:
        super().__init__()
        self.value = torch.nn.Parameter(torch.zeros(1))

    def forward(self, reward: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (weight * (self.value - reward).square()).sum()


def gradient(group: Group, path: str) -> dict[str, float]:
    """Returns the gradient of a step over the rows of all machines, and that of plain averaging."""
    config = load_config(DqnConfig, path)
    data = prepare(config, group)
    source = LoggedSource(data.train.rows, logged_plan(config, data, 4), group.rank, group.device)
    batch = next(source)
    figures: dict[str, float] = {"rows": len(batch)}
    for name, weight in (("weighted", batch.weight), ("plain", torch.full((len(batch),), 1 / len(batch)))):
        module = Constant()
        wrapped = group.wrap(module)  # averages as long as it lives
        wrapped(batch.reward, weight).backward()
        assert module.value.grad is not None
        figures[name] = float(module.value.grad)
    return figures


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


def with_texts(rows: Rows, texts: str, seed: int) -> Rows:
    """Returns rows whose states, and candidates, have a category "kind" of these levels, some missing."""
    rng = np.random.default_rng(seed)

    def more(features: Any) -> Any:
        return {**features, "kind": str(rng.choice([*texts]))} if features and rng.random() < 0.9 else features

    def both(value: Any) -> Any:
        return [both(candidate) for candidate in value] if isinstance(value, list) else more(value)

    for row in rows:
        row["state_features"] = more(row["state_features"])
        row["next_state_features"] = more(row["next_state_features"])
        if isinstance(row["action"], dict):
            listed = [*row["possible_actions"], *row["possible_next_actions"]]
            lists = {json.dumps(candidate): more(candidate) for candidate in listed}
            for name in ("possible_actions", "possible_next_actions"):
                row[name] = [lists[json.dumps(candidate)] for candidate in row[name]]
            row["action"] = lists[json.dumps(row["action"])]
            row["next_action"] = lists.get(json.dumps(row["next_action"]), row["next_action"])
    return rows


@pytest.mark.parametrize(("make", "tree"), [(random_rows, SETTINGS), (candidate_rows, WITHOUT_NAMES)])
def test_shards_with_different_levels_train_what_one_machine_trains(
    make: Callable[..., Rows], tree: dict[str, Any], cluster: Together
) -> None:
    shards = [with_texts(named(make(80), 0), "abc", 1), with_texts(named(make(60, seed=1), 1), "bcdd", 2)]
    done = cluster(shards, tree=tree, norm_params={"max_unique_enum_values": 3})
    norms = {"state_features": done.json("state_features_norm.json")}
    norms |= {} if "actions" in tree else {"action": done.json("action_norm.json")}
    for norm in norms.values():
        kind = json.loads(norm["kind"])
        assert (kind["feature_type"], kind["levels"]) == ("ENUM", ["b", "c", "d"])
    assert "state feature kind: " in done.runs[0].err
    assert "values are other" in done.runs[0].err


def test_a_feature_that_is_a_text_on_one_machine_alone_is_refused(tmp_path: Path) -> None:
    numbers = [{**row, "state_features": {**row["state_features"], "kind": 1.5}} for row in named(random_rows(40), 0)]
    folders = nodes(tmp_path, [numbers, with_texts(named(random_rows(40), 1), "ab", 1)])
    runs = started(folders, "dqn", SETTINGS)
    assert 2 in [run.code for run in runs]
    assert any("data on node 0: feature kind: expected texts" in run.err for run in runs)


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
    assert [run.code for run in runs] == [0, 0], runs
    gradients = {"weighted": pytest.approx(-8), "plain": pytest.approx(-6)}
    assert [run.outcome for run in runs] == [{"rows": 3, **gradients}, {"rows": 1, **gradients}]


def test_shards_train_the_model_of_one_process_with_all_rows(cluster: Together) -> None:
    """Three processes on two nodes with 60 and 25 rows, minibatches of 16, two a step."""
    shards = [named(random_rows(60), 0), named(random_rows(25, 1), 1)]
    rows = [row for part in shards for row in part]
    done = cluster(shards, [2, 1], training={"minibatches_per_step": 2})
    outcome, log = done.runs[0].outcome, done.runs[0].err
    assert (outcome["rows"], outcome["steps"]) == (3 * 85, 3 * 3)  # 85 rows, 32 a step
    assert "shards: 60 + 25 rows on 2 nodes" in log
    assert "16 rows = 3 processes x 5.33333, 2 per step" in log
    assert "training data: data: 85 rows" in log
    scored = int(
        held_out(np.array([episode_code(name) for name in {row["mdp_id"] for row in rows}], np.uint64), 0.2).sum()
    )
    assert done.json("model/evaluation.json")["cpe"]["overlap"]["num_episodes"] == scored
    assert "of 2 machines" in log
    figures = [json.loads(line) for line in (done.out / "metrics.jsonl").read_text().splitlines()]
    logged = [line["reward/logged/mean"] for line in figures if "reward/logged/mean" in line]
    assert logged[-1] == pytest.approx(np.mean([row["reward"] for row in rows]), abs=1e-6)
    copies = [next(folder.rglob(".reagent-lite/*/manifest.json")).parent for folder in done.folders]
    contents = "\n".join(content_of(open_training_copy(copy)) for copy in copies)
    assert done.json("model/manifest.json")["data_hash"] == hashlib.sha256(contents.encode()).hexdigest()


def test_a_node_without_rows_and_one_with_a_single_row(cluster: Together) -> None:
    """The single row is for two processes; rewards are summed over two rows."""
    done = cluster([None, named(random_rows(1, 5), 1), named(random_rows(44), 2)], [1, 2, 1], rl={"multi_steps": 2})
    assert "shards: 0 + 1 + 44 rows on 3 nodes" in done.runs[0].err
    assert done.runs[0].outcome["rows"] == 3 * 45


@pytest.mark.slow
def test_a_file_without_rows_and_candidates(cluster: Together) -> None:
    assert "shards: 45 + 0 rows on 2 nodes" in cluster([candidate_rows(45), []], tree=WITHOUT_NAMES).runs[0].err


@pytest.mark.slow
def test_candidates_of_two_nodes_that_have_other_features_and_metrics(cluster: Together) -> None:
    """Node 1 has 31 rows, a state feature and a metric that node 0 lacks; node 0 has a candidate's feature more."""
    first = named(candidate_rows(70), 0)
    for row in first:
        row["action"] = {**row["action"], "9": 1.0}
        for listed in ("possible_actions", "possible_next_actions"):
            row[listed] = [{**choice, "9": 1.0} for choice in row[listed]]
        if row["next_action"]:
            row["next_action"] = {**row["next_action"], "9": 1.0}
    second = named(candidate_rows(31, 1, most=3), 1)
    for number, row in enumerate(second):
        row["state_features"] = {**row["state_features"], "7": 2.5 * number - 3}
        row["metrics"] = {"clicks": 1.0}
    done = cluster([first, second], tree=WITHOUT_NAMES, norm_params={"num_samples": 1000})
    state, action = done.json("state_features_norm.json"), done.json("action_norm.json")
    assert (sorted(state), sorted(action)) == (["0", "1", "2", "7"], ["0", "5", "9"])
    # feature 7 is in 31 rows of 101: 2.5 i - 3 for i < 31, whose mean is 2.5 * 15 - 3
    assert json.loads(state["7"])["mean"] == 34.5


LONG = random_rows(3000, missing=0)
THIRD = (named(LONG[:1500], 0), [*named(LONG[:2000], 1), *named(LONG[:1000], 0)])


@pytest.mark.parametrize(
    ("shards", "changes", "message"),
    [
        ((random_rows(30), random_rows(30, 1)), {"data": {"layout": "replicas"}},
         "data on node 1: expected the 30 rows of node 0"),
        ((None, None), {}, "data: expected rows of data on at least one node"),
        ((random_rows(30), [*random_rows(30), *named(random_rows(59), 1)]), {}, "got rows of node 0: 30 of 89 rows"),
        (THIRD, {},
         f"got rows of node 0: {sum(int(i * 2999 / 1023) < 1000 for i in range(1024))} of 1,024 rows"),
        ((random_rows(30), random_rows(30, 1)), {"norm_params": {"feature_overrides": {"8": "BINARY"}}},
         "norm_params.feature_overrides.8: expected a feature"),
    ],
    ids=["other rows", "no rows", "59 rows more", "a third, sampled", "no feature"],
)  # fmt: skip
def test_differences_end_every_process_alike(
    tmp_path: Path, shards: Sequence[Rows | None], changes: dict[str, Any], message: str
) -> None:
    for run in started(nodes(tmp_path, shards), "dqn", merged(SETTINGS, changes)):
        assert run.code == 2
        assert message in run.err


HELD_OUT: dict[str, Any] = merged(SETTINGS, {"evaluation": {"held_out_share": 0.3}})
EVERY = [episode_code(str(number)) for number in range(20)]
CHOSEN = [episode for episode, chosen in zip(EVERY, held_out(np.array(EVERY, np.uint64), 0.3), strict=True) if chosen]


def test_scored_episodes_are_fitted_nowhere(tmp_path: Path) -> None:
    """Both nodes have rows of the same 20 episodes, as where each machine logged its own part of them: 5 rows each."""
    rows = random_rows(200)
    runs = started(nodes(tmp_path, [rows[::2], rows[1::2]]), scored_episodes, HELD_OUT)
    assert [run.code for run in runs] == [0, 0], runs
    assert 0 < len(CHOSEN) < 20
    for run in runs:
        assert run.outcome["scored"] == run.outcome["of_all"] == sorted(CHOSEN)
        assert run.outcome["scored_rows"] == 5 * len(CHOSEN)
        assert run.outcome["fitted"] == sorted(set(EVERY) - set(CHOSEN))
        assert run.outcome["rows"] == 5 * (20 - len(CHOSEN))
