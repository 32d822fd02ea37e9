"""The doctor: one fault at a time on this machine."""

import json
import re
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.doctors import LOOPBACK, RECORD, Rows, by_name, failures, store
from helpers.logs import candidate_rows, random_rows, write_json, write_lines
from helpers.runs import with_config

from reagent_lite.config import DqnConfig, check
from reagent_lite.distributed.gpus import parse_gpus
from reagent_lite.distributed.key_value_store import SignedStore
from reagent_lite.distributed.launcher import Processes
from reagent_lite.doctor import machine
from reagent_lite.mounts import Mount, find_mount
from reagent_lite.sim.kernel_sources import find_environment
from reagent_lite.tasks.train import choose_workflow
from workflows.doctor import main

Examine = Callable[..., tuple[int, Rows]]


pytestmark = pytest.mark.usefixtures("caches")
TWO = {"num_nodes": 2} | LOOPBACK


@pytest.fixture
def examine(tmp_path: Path, small: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> Examine:
    """examine({changed keys}, *arguments) -> exit code, rows by name; without training on other machines."""

    def start(changes: dict[str, Any], *arguments: str) -> tuple[int, Rows]:
        tree = {key: value for key, value in (small | changes).items() if value is not None}
        code = main([*with_config(tmp_path, tree), "--alone", *arguments])
        captured = capsys.readouterr()
        report = json.loads(captured.out)
        assert all(row["name"] in captured.err for row in report["rows"])
        states = [row["state"] for row in report["rows"]]
        assert (report["counts"]["FAILED"], report["ok"]) == (states.count("FAILED"), code == 0)
        assert [row["todo"] == "" for row in report["rows"]] == [state in ("ok", "skipped") for state in states]
        return code, by_name(report)

    return start


@pytest.mark.parametrize(
    ("tree", "overrides", "workflow"),
    [
        ({"training_data_path": "x"}, [], "parametric_dqn"),
        ({"timeline": {"inputTableName": "x"}}, [], "parametric_dqn"),
        ({"timeline": {"steps": 2}}, ["timeline.inputTableName=x"], "parametric_dqn"),
        ({"timeline": {"inputTableName": "x"}, "actions": ["a", "b"]}, [], "dqn"),
        ({"timeline": {"inputTableName": "x"}}, ['actions=["a","b"]'], "dqn"),
        ({"simulation": {"env": "cartpole_v1"}, "timeline": None}, [], "dqn"),
        ({"timeline": 3}, [], "dqn"),
    ],
)
def test_which_workflow_a_config_is_of(
    tree: dict[str, Any], overrides: list[str], workflow: str, tmp_path: Path
) -> None:
    assert choose_workflow(str(write_json(tmp_path / "config.json", tree)), overrides) == workflow


def test_a_machine_alone_that_can_train(examine: Examine, tmp_path: Path) -> None:
    data = tmp_path / "data" / "log.jsonl"
    eval_data = write_lines(tmp_path / "data" / "eval.jsonl", random_rows(50, seed=1))
    code, rows = examine({"eval_data_path": str(eval_data), "tracking": {"wandb": {}}})
    assert (code, failures(rows)) == (0, [])
    # 200 rows of some 300 bytes lie within the first block of 2^18
    assert rows["training data"][0]["found"].startswith(f"{data}: 1 file, ")
    endings = {"training data": "the first 200 rows have no fault", "eval data": "the first 50 rows have no fault",
               "config": "is valid for workflows.dqn", "machines": "one machine",
               "model_output_path": " free"}  # fmt: skip  # how much is needed depends on the features
    assert {name: end for name, end in endings.items() if not rows[name][0]["found"].endswith(end)} == {}
    assert f"not there yet; {tmp_path}, where it will be made, is writable" in rows["model_output_path"][0]["found"]
    # nothing is left behind
    assert {path.name for path in tmp_path.rglob("*")} == {"config.json", "data", "eval.jsonl", "log.jsonl"}


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize(
    ("changes", "arguments", "name", "words"),
    [
        ({}, ["--workflow", "parametric_dqn"], "config of workflows.parametric_dqn", "actions: expected absent"),
        ({"epochs": "two", "trainin": {}}, ["--set", "rl.gama=0.5"], "config of workflows.dqn",
         "(?s)^(?=.*epochs)(?=.*trainin)(?=.*rl.gama)"),
        ({"tracking": {"wandb": {}}}, [], "tracking", r"reagent-lite\[tracking\]"),
        ({"training_data_path": "empty"}, [], "training data", "empty"),
        ({"training_data_path": "nothing.jsonl"}, [], "training data", "nothing at this path"),
        ({"training_data_path": "row.jsonl"}, [], "training data", "row.jsonl:7"),
        ({"training_data_path": "column.jsonl"}, [], "training data", "a column 'reward'"),
        ({"state_norm_data_path": "norm.json"}, [], "training data", "none for 3 of 3: 0, 1, 2"),
        ({"model_output_path": "norm.json/out"}, [], "model_output_path", "norm.json"),
        ({"simulation": {"env": "cartpole_v2", "share": 0}}, [], "environment", "Did you mean 'cartpole_v1'"),
        ({"simulation": {"env": "./broken.cuh", "share": 0}}, [], "environment", "broken.cuh"),
        ({"simulation": {"env": "gymnasium:CartPol-v1", "share": 0}}, [], "environment", "Did you mean 'CartPole-v1'"),
        ({key: None for key in ("training_data_path", "actions", "epochs", "evaluation")}
         | {"simulation": {"mode": "collect", "env": "gridworld", "dataset": {"path": "norm.json"}}}, [],
         "simulation.dataset", "norm.json"),
        ({"num_nodes": 2}, [], "machines", "node_index"),
        *((TWO | {"init_method": method}, ["--node_index", "0"], name, words) for method, name, words in (
            (None, "share", "2 machines and no init_method"),
            ("file:///proc/self/stat/run.rdzv", "share", "/stat is a file"),
            ("file:///no/such/folder/run.rdzv", "share", "/no/such/folder is not there"),
            ("file://share/run.rdzv", "share", "file:///absolute/path"),
            ("tcp://localhost", "network", "tcp://host:port, got 'tcp://localhost'"),
            ("tcp://198.51.100.7:29500", "network", "a free port on an address of this machine"),
            ("tcp://no-such-host.invalid:29500", "network", "a name that this machine resolves"),
        )),
    ],
)  # fmt: skip
def test_what_cannot_be_learned_from_written_or_met(
    examine: Examine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], arguments: list[str],
    name: str, words: str,
) -> None:  # fmt: skip
    monkeypatch.setitem(sys.modules, "wandb", None)
    Path("empty").mkdir()
    rows = random_rows(20)
    write_lines(Path("row.jsonl"), [*rows[:6], rows[6] | {"reward": "much"}, *rows[7:]])
    write_lines(Path("column.jsonl"), [{key: row[key] for key in row if key != "reward"} for row in rows])
    Path("norm.json").write_text('{"9": {"feature_type": "CONTINUOUS", "mean": 0, "stddev": 1}}')
    Path("broken.cuh").write_text("this is no environment\n")
    code, by_name = examine(changes, *arguments)
    assert (code, name in failures(by_name)) == (2, True)
    assert any(re.search(words, row["found"] + row["todo"]) for row in by_name[name])


@pytest.mark.parametrize(
    ("mount", "is_network", "warnings"),
    [
        (("nfs4", ("rw", "relatime", "vers=4.2", "hard", "timeo=600")), True, []),
        (("nfs", ("rw", "soft", "acregmax=300", "acdirmax=60")), True, ["a soft mount", "acregmax=300"]),
        (("fuse.glusterfs", ("rw",)), True, []),
        (("ext4", ("rw",)), False, []),
    ],
    ids=str,
)
def test_mounts(mount: tuple[str, tuple[str, ...]], is_network: bool, warnings: list[str]) -> None:
    """Options as in /proc/mounts on Linux; see nfs(5)."""
    found = Mount("server:/export", "/share", *mount)
    assert (found.is_network, [text.split(":")[0] for text, _ in found.warnings()]) == (is_network, warnings)


def test_the_mount_of_a_path_that_is_not_there() -> None:
    assert find_mount(Path("/proc/self/no/such/file")).folder == "/proc"


def test_candidates_and_environments(examine: Examine, tmp_path: Path) -> None:
    """Data without named actions: a config of workflows.parametric_dqn."""
    log = write_lines(tmp_path / "data" / "candidates.jsonl", candidate_rows(30))
    code, rows = examine({"actions": None, "training_data_path": str(log)})
    assert code == 0, failures(rows)
    assert rows["config"][0]["found"].endswith("is valid for workflows.parametric_dqn")
    assert rows["training data"][0]["found"].endswith("the first 30 rows have no fault")
    for env, does in (("gymnasium:CartPole-v1", "CartPole-v1 steps in Python"),
                      ("cartpole_v1", "cartpole_v1 compiles for cpu")):  # fmt: skip
        code, rows = examine({"simulation": {"env": env, "share": 0}})
        assert (code, rows["environment"][0]["found"]) == (0, f"{does}: 4 features, 2 choices")


def test_a_gpu_without_a_compiler_may_use_a_compiled_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(machine, "cuda_problem", lambda *facts: asked.append(facts))
    simulation = {"env": "cartpole_v1", "env_parameters": {"gravity": 1.62}, "math": "fast"}
    config = check(DqnConfig, {"model_output_path": "outputs", "simulation": simulation})
    rows = machine.simulation(config, Processes(1, "cuda"))
    assert [(row.name, row.state) for row in rows] == [("GPU toolkit", "ok"), ("environment", "ok")]
    assert asked == [(torch.device("cuda", 0), find_environment("cartpole_v1"), {"gravity": 1.62}, "fast")]


@pytest.mark.parametrize(("node", "state"), [(0, "FAILED"), (1, "warning")])
def test_what_one_machine_lacks_is_a_warning_where_another_may_have_it(
    examine: Examine, tmp_path: Path, node: int, state: str
) -> None:
    """A share that cannot be written, not even by root, and a shard without rows; a port that is taken."""
    (tmp_path / "empty").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as holder:
        changes = {
            "num_nodes": 2, "init_method": "file:///proc/self/run.rdzv", "training_data_path": str(tmp_path / "empty"),
            "rendezvous": {"interface": "lo", "port": holder.getsockname()[1]},
        }  # fmt: skip
        _, rows = examine(changes, "--node_index", str(node))
    assert [rows[name][0]["state"] for name in ("share: write and read", "training data")] == [state, "warning"]
    assert node or "Choose another rendezvous.port" in rows["network"][-1]["todo"]


def test_whose_record_is_in_the_file(examine: Examine, tmp_path: Path) -> None:
    file = write_json(tmp_path / "run.rdzv", {"schema_version": 1, **RECORD})
    changes = TWO | {"init_method": f"file://{file}"}
    code, rows = examine(changes, "--node_index", "0")
    assert code == 0, failures(rows)
    assert "is stale: run old of host elsewhere, pid 77" in rows["share: file"][0]["found"]
    with store() as server:
        write_json(file, {"schema_version": 1, **RECORD, "port": server.port})
        SignedStore(server, token="", attempt=0).set("nonce", str(RECORD["nonce"]))
        _, rows = examine(changes, "--node_index", "0")
    assert "is used by a live run old" in rows["share: file"][0]["found"]
    assert file.exists()


def test_lines_of_nvidia_smi() -> None:
    gpus = parse_gpus(
        "NVIDIA H100 80GB HBM3, GPU-1111, 550.54, 80000, 81559\nNVIDIA GB10, GPU-2222, 580.1, [N/A], [N/A]\n"
    )
    assert [(gpu.name, gpu.uuid, gpu.driver, gpu.free, gpu.total) for gpu in gpus] == [
        ("NVIDIA H100 80GB HBM3", "GPU-1111", "550.54", 80000 * 2**20, 81559 * 2**20),
        ("NVIDIA GB10", "GPU-2222", "580.1", 0, 0),
    ]
