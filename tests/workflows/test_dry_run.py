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
from oracles.logs import random_rows, write_lines
from oracles.team import TEAM

from reagent_lite.config import DqnConfig
from reagent_lite.data.copy.training_copy import prepare_training_copy
from reagent_lite.run.launch import main

Plan = Callable[..., list[str]]


@pytest.fixture
def plan(tmp_path: Path, small: dict[str, Any], capsys: pytest.CaptureFixture[str],
         monkeypatch: pytest.MonkeyPatch) -> Plan:  # fmt: skip
    """plan({changed keys}, *arguments) -> lines; standard output is the resolved config and nothing else."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("REAGENT_LITE_CACHE", str(tmp_path / "kernels"))

    def start(changes: dict[str, Any], *arguments: str, code: int = 0) -> list[str]:
        tree = {key: value for key, value in (small | changes).items() if value is not None}
        file = tmp_path / "config.json"
        file.write_text(json.dumps(tree))
        before = sorted(tmp_path.rglob("*"))
        given = ["--config", str(file), "--dry_run", *arguments]
        assert main("workflows.dqn", DqnConfig, "x.json", given) == code
        captured = capsys.readouterr()
        assert sorted(tmp_path.rglob("*")) == before
        if not code:
            assert json.loads(captured.out)["model_output_path"] == str(tmp_path / "out")
        return captured.err.splitlines()

    return start


def only(lines: list[str], start: str) -> str:
    matching = [line for line in lines if line.startswith(start)]
    assert len(matching) == 1, lines
    return matching[0]


def parquet(tmp_path: Path, count: int) -> str:
    file = tmp_path / "rows.parquet"
    pa.parquet.write_table(pa.Table.from_pylist(random_rows(count, missing=0.0)), file)
    return str(file)


def test_one_process_over_a_file_that_must_be_counted(plan: Plan) -> None:
    lines = plan({})
    assert lines[0] == "1 cpu process, 32 rows per minibatch, 32 on each"
    assert lines[1].startswith("parallel ddp: each process draws 32 rows")
    assert only(lines, "rows and steps: ").endswith("not known before the data is read")
    first, *_, last = (line for line in lines if line.startswith("memory per process: "))
    assert "networks: not known" in first
    assert "free: " in last
    assert [line for line in lines if line.startswith("warning")] == []


def test_the_minibatch_follows_the_rows(plan: Plan, tmp_path: Path) -> None:
    """12,000 rows in about 64 steps are minibatches of 256."""
    absent = {"training": {}}
    lines = plan(absent | {"training_data_path": parquet(tmp_path, 12_000)})
    assert lines[0] == "1 cpu process, 256 rows per minibatch, 256 on each"
    assert only(lines, "steps").startswith("steps: 47 per epoch, 94 in total")
    lines = plan(absent)
    assert lines[0].startswith("1 cpu process; training.minibatch_size follows the number of rows")


def test_machines_processes_and_ranks(plan: Plan) -> None:
    """Node 1 of 3 with 2 processes each: 6 ranks, its own are 2 and 3; a minibatch of 6 x 32 rows."""
    changes = {
        "num_nodes": 3, "num_processes_per_node": 2, "init_method": "file:///share/run.rdzv",
        "rendezvous": {"interface": "eth1", "port": 29500}, "checkpoint": {"every_steps": 50, "every_minutes": 2.0},
    }  # fmt: skip
    lines = plan(changes, "--node_index", "1")
    assert lines[0] == "6 cpu processes, 192 rows per minibatch, 32 on each"
    assert lines[1].startswith("parallel ddp: each process draws 32 rows; ")
    assert "192 rows" in lines[1]
    assert "this is node 1, ranks 2 to 3; " in only(lines, "machines: 3 x 2 processes")
    meeting = only(lines, "rendezvous: file:///share/run.rdzv")
    assert meeting.endswith("within 600 s; node 0 listens on eth1, 29500")
    kept = only(lines, "checkpoints: every 50 steps and every 2 minutes")
    assert "the newest 2 are kept; at most 3 restarts" in kept
    assert "layout shards" in only(lines, "data:")


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


def test_steps_by_the_metadata_of_parquet(plan: Plan, tmp_path: Path) -> None:
    """100 rows in minibatches of 32 are 4 steps; two machines with as many, 64 rows of 200 a step, are 4 as well."""
    data = {"training_data_path": parquet(tmp_path, 100)}
    lines = plan(data)
    assert only(lines, "rows: 100 on this machine").endswith("metadata")
    assert only(lines, "steps: 4 per epoch, 8 in total").endswith("if every row can be learned from")
    unscored = plan({**data, "evaluation": {"learn_from_scored": None}})
    assert only(unscored, "steps:").endswith("scored episodes are not learned from")
    both = data | {"num_nodes": 2, "node_index": 0, "init_method": "file:///share/run.rdzv"}
    assert only(plan(both), "steps: 4 per epoch, 8 in total").endswith("if the other machines have as many rows")
    # all 100 rows on both: 64 a step
    replicas = both | {"data": {"layout": "replicas"}}
    assert only(plan(replicas), "steps: 2 per epoch, 4 in total").endswith("if every row can be learned from")


def test_a_training_copy_tells_rows_and_widths(plan: Plan, small: dict[str, Any]) -> None:
    """3 features, 8 hidden units, 2 actions: 3 x 8 + 8 + 8 x 2 + 2 = 50 parameters of 4 bytes, the target as many.

    The gradient and at most two numbers of the optimizer, Adam's averages, are 3 x 50 x 4 bytes.
    """
    copy = prepare_training_copy(small["training_data_path"], actions=("a", "b"))
    lines = plan({"rainbow": {"dueling_architecture": False}})
    assert only(lines, "rows: 200 on this machine").endswith("the training copy")
    assert only(lines, "steps:").startswith("steps: 7 per epoch, 14 in total")  # 200 / 32 = 6.25
    assert only(lines, "memory per process: networks 1000 bytes = 4 bytes x (100 parameters, and for 50 trained ones")
    assert only(lines, "memory per process: 1000 bytes in total")
    size = sum(file.stat().st_size for file in copy.folder.rglob("*.npy"))
    assert only(lines, f"memory per process: training copy of {size / 1024:.1f} KiB: mapped")


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
    assert not any("auto-scaling" in line for line in lines)
    scaled = plan(ONLINE | {"simulation": simulation | {"auto_scale": True}})
    assert only(scaled, "auto-scaling:").endswith("starts from the values shown here")
    assert only(lines, "steps: 98 after 8 of 400 environment steps").endswith("every 14")
    replay = only(lines, "memory per process: replay 8.2 KiB")  # 8400 / 1024
    assert replay.endswith("400 rows x 42 bytes / 2 processes")
    # 78 + 16 + 80 + 16 x 408
    assert only(lines, "memory per process: environments 13.1 KiB = 2 environments x 6,702 bytes")


def test_policies_and_memory_of_several_types_of_agents(plan: Plan, tmp_path: Path) -> None:
    """3 features before and after a step, reward and propensity in float32, action and end in a byte each: 34 bytes.

    A process has half of the 480 rows of each type.
    """
    file = tmp_path / "team.cuh"
    file.write_text(TEAM)
    simulation = {"env": str(file), "env_parameters": {"size": 3}, "num_envs": 4, "total_steps": 400,
                  "warmup_steps": 1, "replay": {"capacity": 480}}  # fmt: skip
    lines = plan(ONLINE | {"simulation": simulation})
    assert only(lines, "policies:") == "policies: leader (1 agent) learns, follower (2 agents) learns"
    assert "480 rows x 34 bytes x 2 types" in only(lines, "memory per process: replay 15.9 KiB")
    assert "496 parameters, and for 248" in only(lines, "memory per process: networks 4.8 KiB")
    lines = plan(ONLINE | {"simulation": simulation | {"policies": {"follower": "random"}}})
    assert only(lines, "policies:").endswith("follower (2 agents) plays uniformly random actions")
    assert "480 rows x 34 bytes / 2 processes" in only(lines, "memory per process: replay 8.0 KiB")
    assert "248 parameters, and for 124" in only(lines, "memory per process: networks 2.4 KiB")


def test_a_replay_that_does_not_fit(plan: Plan) -> None:
    simulation = {"env": "cartpole_v1", "num_envs": 4, "replay": {"capacity": 10**13}}
    lines = plan(ONLINE | {"simulation": simulation})
    # half of 10^13 rows of 42 bytes: 210 TB = 190.99 TiB
    assert only(lines, "warning: there is not enough memory").endswith("the replay: 191.0 TiB")


def test_what_cannot_be_found_out_is_a_warning(plan: Plan, tmp_path: Path) -> None:
    lines = plan({"training_data_path": str(tmp_path / "later.jsonl")})
    assert "later.jsonl: expected a data file" in only(lines, "warning:")


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
    lines = plan(changes, code=2)
    assert any(message in line for line in lines), lines


def test_a_faulty_environment_is_an_error_and_a_missing_compiler_a_warning(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "team.cuh"
    file.write_text(TEAM.replace("size", "sise", 1))
    simulation = {"simulation": {"env": str(file), "env_parameters": {"size": 3}}}
    assert any(f"{file}: expected an environment" in line for line in plan(ONLINE | simulation, code=2))
    file.write_text(TEAM)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(sys.modules, "ziglang", None)
    assert "expected a C++ compiler" in only(plan(ONLINE | simulation), "warning:")


def test_an_unknown_environment_is_an_error(plan: Plan) -> None:
    lines = plan(ONLINE | {"simulation": {"env": "cartpole_v2"}}, code=2)
    assert any("Did you mean 'cartpole_v1'?" in line for line in lines)
