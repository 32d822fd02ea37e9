"""--dry_run: the plan for the declared world on standard error, by hand arithmetic; nothing is touched."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from helpers.logs import random_rows, write_json, write_lines
from oracles.team import TEAM

from reagent_lite.config import DqnConfig, check
from reagent_lite.config.embedding_config import id_features
from reagent_lite.data.copy.prepared_copy import prepare_training_copy
from reagent_lite.data.logs import Log
from reagent_lite.tasks.train import main

Plan = Callable[..., list[str]]


def only(lines: list[str], start: str) -> str:
    """Returns the one line of a plan that starts so."""
    (line,) = (line for line in lines if line.startswith(start))
    return line


@pytest.fixture
def plan(tmp_path: Path, small: dict[str, Any], capsys: pytest.CaptureFixture[str],
         monkeypatch: pytest.MonkeyPatch) -> Plan:  # fmt: skip
    """plan({changed keys}, *arguments) -> lines; standard output is the resolved config and nothing else."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("REAGENT_LITE_CACHE", str(tmp_path / "kernels"))

    def start(changes: dict[str, Any], *arguments: str, code: int = 0) -> list[str]:
        tree = {key: value for key, value in (small | changes).items() if value is not None}
        file = write_json(tmp_path / "config.json", tree)
        before = sorted(tmp_path.rglob("*"))
        assert main("workflows.dqn", DqnConfig, "x.json", ["--config", str(file), "--dry_run", *arguments]) == code
        captured = capsys.readouterr()
        assert sorted(tmp_path.rglob("*")) == before
        assert code or json.loads(captured.out)["model_output_path"] == str(tmp_path / "out")
        return captured.err.splitlines()

    return start


def test_one_process_and_what_is_not_known_before_data_are_read(plan: Plan, tmp_path: Path) -> None:
    lines = plan({})
    assert lines[0] == "1 cpu process, 32 rows per minibatch, 32 on each"
    assert only(lines, "rows and steps: ").endswith("not known before the data is read")
    assert "not known" in only(lines, "memory per process: networks")
    assert not any(line.startswith("warning") for line in lines)
    lines = plan({"training": {}, "training_data_path": str(tmp_path / "later.jsonl")})
    assert lines[0].startswith("1 cpu process; training.minibatch_size follows the number of rows")
    assert "later.jsonl: expected a data file" in only(lines, "warning:")


def test_machines_processes_and_ranks(plan: Plan) -> None:
    """Node 1 of 3 with 2 processes each: 6 ranks, its own are 2 and 3; a minibatch of 6 x 32 rows."""
    changes = {
        "num_nodes": 3, "num_processes_per_node": 2, "init_method": "file:///share/run.rdzv",
        "rendezvous": {"interface": "eth1", "port": 29500}, "checkpoint": {"every_steps": 50, "every_minutes": 2.0},
    }  # fmt: skip
    lines = plan(changes, "--node_index", "1")
    assert lines[0] == "6 cpu processes, 192 rows per minibatch, 32 on each"
    for start, words in (
        ("parallel ddp: each process draws 32 rows; ", "192 rows"),
        ("machines: 3 x 2 processes", "this is node 1, ranks 2 to 3; "),
        ("rendezvous: file:///share/run.rdzv", "within 600 s; node 0 listens on eth1, 29500"),
        ("checkpoints: every 50 steps and every 2 minutes", "the newest 2 are kept; at most 3 restarts"),
        ("data:", "layout shards"),
    ):
        assert words in only(lines, start)
    assert "share /share: expected a folder that every machine reaches" in only(lines, "warning: share")


def test_one_process_alone_or_over_all_gpus(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan({"parallel": "none"})[1].startswith("parallel none: one process draws 32 rows")
    over_all = {"parallel": "dp", "use_gpu": True, "use_all_avail_gpus": True}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=str(index)))
    processes, parallel, *_ = plan(over_all)
    assert processes == "1 cuda process, 32 rows per minibatch, 32 on each"
    assert parallel.startswith("parallel dp: one process draws 32 rows and divides them among 4 GPUs, 8 each")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert only(plan(over_all, code=2), "parallel:").partition(",")[0].endswith("on a CPU")


TWO = {"num_nodes": 2, "node_index": 0, "init_method": "file:///share/run.rdzv"}


@pytest.mark.parametrize(
    ("rows", "changes", "start", "end"),
    [
        (100, {}, "rows: 100 on this machine", "metadata"),
        # 100 rows in minibatches of 32
        (100, {}, "steps: 4 per epoch, 8 in total", "if every row can be learned from"),
        (100, {"evaluation": {"learn_from_scored": None}}, "steps:", "scored episodes are not learned from"),
        # two machines with as many, 64 rows of 200 a step
        (100, TWO, "steps: 4 per epoch, 8 in total", "if the other machines have as many rows"),
        # all 100 rows on both: 64 a step
        (100, TWO | {"data": {"layout": "replicas"}}, "steps: 2 per epoch, 4 in total",
         "if every row can be learned from"),
        (100, TWO | {"data": {"layout": "split"}}, "rows: 100 on all machines together", "metadata"),
        (100, TWO | {"data": {"layout": "split"}}, "steps: 2 per epoch", "if every row can be learned from"),
        # 12,000 rows in about 64 steps are minibatches of 256
        (12_000, {"training": {}}, "1 cpu process, 256 rows per minibatch", "256 on each"),
        (12_000, {"training": {}}, "steps: 47 per epoch, 94 in total", "learned from"),
    ],
)  # fmt: skip
def test_steps_by_the_metadata_of_parquet(
    plan: Plan, tmp_path: Path, rows: int, changes: dict[str, Any], start: str, end: str
) -> None:
    file = tmp_path / "rows.parquet"
    pa.parquet.write_table(pa.Table.from_pylist(random_rows(rows, missing=0.0)), file)
    assert only(plan({"training_data_path": str(file)} | changes), start).endswith(end)


def test_a_training_copy_tells_rows_and_widths(plan: Plan, small: dict[str, Any]) -> None:
    """3 features, 8 hidden units, 2 actions: 3 x 8 + 8 + 8 x 2 + 2 = 50 parameters of 4 bytes, the target as many.

    The gradient and at most two numbers of the optimizer, Adam's averages, are 3 x 50 x 4 bytes.
    """
    copy = prepare_training_copy(Log(small["training_data_path"], actions=("a", "b")))
    size = sum(file.stat().st_size for file in copy.folder.rglob("*.npy"))
    lines, memory = plan({"rainbow": {"dueling_architecture": False}}), "memory per process: "
    assert only(lines, "rows: 200 on this machine").endswith("the training copy")
    for start in (
        "steps: 7 per epoch, 14 in total",  # 200 / 32 = 6.25
        f"{memory}networks 1000 bytes = 4 bytes x (100 parameters, and for 50 trained ones",
        f"{memory}1000 bytes in total",
        f"{memory}training copy of {size / 1024:.1f} KiB: mapped",
    ):
        assert only(lines, start)


def test_tables_of_ids_count_before_ids_are_counted(plan: Plan, tmp_path: Path) -> None:
    """x and a vector of 4 numbers, 8 hidden units, 2 actions: 5 x 8 + 8 + 8 x 2 + 2 = 66 parameters.

    200 rows have at most 200 ids, of which 50 are listed, and two rows more: 52 x 4 = 208. The target has as many. The
    config has numbers that follow the data: the scale of values, the weight of the conservative term.
    """
    log = write_lines(tmp_path / "ids.jsonl", [
        {**row, "state_features": state, "next_state_features": state}
        for number, row in enumerate(random_rows(200))
        for state in [{"x": 0.5, "user": f"u{number}"}]
    ])  # fmt: skip
    changes: dict[str, Any] = {
        "training_data_path": str(log), "defaults": "2026", "epochs": 1,
        "training": {"layers": [-1, 8, -1], "activations": ["relu", "linear"], "minibatch_size": 32},
        "rl": {"gamma": 0.9}, "data": {"embeddings": {"user": {"dim": 4, "max_ids": 50}}},
    }  # fmt: skip
    config = check(DqnConfig, {**changes, "actions": ["a", "b"], "model_output_path": "out"})
    prepare_training_copy(Log(log, actions=("a", "b"), id_features=id_features(config.data.embeddings)))
    networks = only(plan(changes), "memory per process: networks")
    assert "x (548 parameters, and for 274 trained ones" in networks
    assert networks.endswith("; 52 vectors of ids at most")


ONLINE = {"training_data_path": None, "actions": None, "epochs": None, "evaluation": None, "num_processes_per_node": 2}


def test_steps_and_memory_of_a_simulation(plan: Plan) -> None:
    """CartPole: 4 features, reward and propensity in float32, action and end in a byte each.

    A process has half of 400 rows. A row has the features before and after its step, 2 x 4 x 4 + 2 x 4 + 2 = 42 bytes.
    For each of its 2 environments it learns from 16 of 32 rows: 4 x 42 bytes each, and 6 x 4 x (8 + 2) of 8 hidden
    units and 2 values; an environment has 78 bytes, its observation of 16, and 2 x 4 x (8 + 2) of the policy.
    After 2 rounds of warm-up (one window and what follows it) 400 - 8 environment steps are 98 rounds of learning.
    """
    simulation = {
        "env": "cartpole_v1", "num_envs": 4, "total_steps": 400, "warmup_steps": 1, "num_evaluations": 7,
        "replay": {"capacity": 400},
    }  # fmt: skip
    lines = plan(ONLINE | {"simulation": simulation})
    assert only(lines, "steps: 98 after 8 of 400 environment steps").endswith("every 14")
    # 8400 / 1024
    assert only(lines, "memory per process: replay 8.2 KiB").endswith("400 rows x 42 bytes / 2 processes")
    # 78 + 16 + 80 + 16 x 408
    assert only(lines, "memory per process: environments 13.1 KiB = 2 environments x 6,702 bytes")
    scaled = plan(ONLINE | {"simulation": simulation | {"auto_scale": True}})
    assert only(scaled, "auto-scaling:").endswith("starts from the values shown here")
    # half of 10^13 rows of 42 bytes: 210 TB = 190.99 TiB
    large = plan(ONLINE | {"simulation": simulation | {"replay": {"capacity": 10**13}}})
    assert only(large, "warning: there is not enough memory").endswith("the replay: 191.0 TiB")


@pytest.mark.parametrize(
    ("follower", "plays", "replay", "rows", "networks", "parameters"),
    [
        ("learn", "learns", "15.9", "480 rows x 34 bytes x 2 types", "4.8", "496 parameters, and for 248"),
        ("random", "plays uniformly random actions", "8.0", "480 rows x 34 bytes / 2 processes", "2.4",
         "248 parameters, and for 124"),
    ],
)  # fmt: skip
def test_policies_and_memory_of_several_types_of_agents(
    plan: Plan, tmp_path: Path, follower: str, plays: str, replay: str, rows: str, networks: str, parameters: str
) -> None:
    """3 features before and after a step, reward and propensity in float32, action and end in a byte each: 34 bytes.

    A process has half of the 480 rows of each type.
    """
    (tmp_path / "team.cuh").write_text(TEAM)
    lines = plan(ONLINE | {"simulation": {
        "env": str(tmp_path / "team.cuh"), "env_parameters": {"size": 3}, "num_envs": 4, "total_steps": 400,
        "warmup_steps": 1, "replay": {"capacity": 480}, "policies": {"follower": follower},
    }})  # fmt: skip
    assert only(lines, "policies:") == f"policies: leader (1 agent) learns, follower (2 agents) {plays}"
    assert rows in only(lines, f"memory per process: replay {replay} KiB")
    assert parameters in only(lines, f"memory per process: networks {networks} KiB")


@pytest.mark.parametrize(
    ("changes", "row", "message"),
    [
        ({}, {"reward": "much"}, "log.jsonl:3: expected a number in reward"),
        ({"actions": ["left", "right"]}, {}, "log.jsonl:1: expected one of the actions"),
        ({"data": {"columns": {"reward": "clicked"}}}, {}, "data.columns names: clicked"),
    ],
)
def test_first_rows_that_cannot_be_read_are_an_error(
    plan: Plan, small: dict[str, Any], changes: dict[str, Any], row: dict[str, Any], message: str
) -> None:
    rows = random_rows(200)
    write_lines(Path(small["training_data_path"]), [*rows[:2], rows[2] | row, *rows[3:]])
    assert message in "\n".join(plan(changes, code=2))


def test_a_faulty_environment_is_an_error_and_a_missing_compiler_a_warning(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "team.cuh"
    file.write_text(TEAM.replace("size", "sise", 1))
    for env, words in ((str(file), f"{file}: expected an environment"), ("cartpole_v2", "Did you mean 'cartpole_v1'?")):
        assert words in "\n".join(plan(ONLINE | {"simulation": {"env": env}}, code=2))
    file.write_text(TEAM)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(sys.modules, "ziglang", None)
    simulation = {"simulation": {"env": str(file), "env_parameters": {"size": 3}}}
    assert "expected a C++ compiler" in only(plan(ONLINE | simulation), "warning:")


def test_the_median_discount_by_time(plan: Plan, small: dict[str, Any], tmp_path: Path) -> None:
    rl = {"gamma": 0.9, "use_seq_num_diff_as_time_diff": True}
    for time_diff, expected in ((2, "median discount of a step 0.81: 0.9 ** (2), in the first 60 rows"), (2000, "")):
        write_lines(Path(small["training_data_path"]), [{**row, "time_diff": time_diff} for row in random_rows(60)])
        lines = plan({"rl": rl})
        assert any(expected in line for line in lines)
        assert any("a discount below 0.001 in 100%" in line for line in lines) == (time_diff == 2000)
