"""torchrun starts the processes of two nodes: the same model as one process, and who is missing is named."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.interpreters import FORKED_WORKERS, Interpreter
from helpers.logs import write_json
from helpers.ranks import free_port, run_ranks
from helpers.runs import ROOT, end, trained, with_config
from oracles.cartpole import write_log
from safetensors.torch import load_file

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def tree(folder: Path, name: str) -> dict[str, Any]:
    return {
        "training_data_path": str(folder / "log.jsonl"), "model_output_path": str(folder / name), "use_gpu": False,
        "actions": ["0", "1"], "epochs": 2, "data": {"layout": "replicas", "global_minibatch_size": 64},
        "training": {"layers": [-1, 16, -1], "activations": ["relu", "linear"]},
        "evaluation": {"calc_cpe_in_training": False, "bootstrap_resamples": 100, "models": {"final_fit_passes": 1}},
    }  # fmt: skip


def learned(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(*folder.glob("checkpoints/step_*/learner.safetensors"))


def test_torchrun_on_two_nodes(tmp_path: Path) -> None:
    write_log(tmp_path / "log.jsonl", 300)
    port = free_port()
    nodes = [
        Interpreter(
            ["-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}", "--nproc-per-node=1",
             "--master-addr=127.0.0.1", f"--master-port={port}", "-m", "workflows.dqn",
             *with_config(tmp_path, tree(tmp_path, "run"))],
            env=ENVIRONMENT | {FORKED_WORKERS: "1"},
        )
        for node in (1, 0)
    ]  # fmt: skip
    ended = [end(node, 120) for node in nodes]
    (outcome,) = [json.loads(line) for node in ended for line in node.ok.out.splitlines() if line.startswith("{")]
    assert "64 rows = 2 processes x 32" in ended[1].err
    trained(tree(tmp_path, "alone"))
    torch.testing.assert_close(learned(tmp_path / "run"), learned(tmp_path / "alone"), rtol=1e-5, atol=1e-5)
    assert outcome["steps"] == 2 * -(-outcome["rows"] // 2 // 64)


def test_machines_of_another_launcher_that_do_not_fit_together(tmp_path: Path) -> None:
    write_log(tmp_path / "log.jsonl", 50)
    folders = [tmp_path / "node0", tmp_path / "node1"]
    for folder, rl in zip(folders, ({}, {"gamma": 0.5}), strict=True):
        write_json(folder / "run.json", tree(tmp_path, "run") | {"rl": rl})
    runs = run_ranks(["-m", "workflows.dqn", "--config", "run.json"], folders)
    assert [(run.code, "config key rl.gamma: expected 0.9" in run.err) for run in runs] == [(3, True)] * 2, runs
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("store", [True, False])
def test_processes_that_do_not_come_are_named_or_counted(tmp_path: Path, store: bool) -> None:
    """Without a store of the launcher they are counted."""
    write_log(tmp_path / "log.jsonl", 50)
    variables = {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1",
             "MASTER_PORT": str(free_port())}  # fmt: skip
    if store:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        variables |= {"MASTER_PORT": str(server.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    config = [*with_config(tmp_path, tree(tmp_path, "run")), "--set", "rendezvous.startup_timeout_seconds=3"]
    started = Interpreter(["-m", "workflows.dqn", *config], env=ENVIRONMENT | variables, cwd=tmp_path)
    assert started.wait(60) == 3
    absent = "no sign of rank 1, 2" if store else "not all.*1/3 clients joined"
    assert re.search(f"start of 3 processes: .*got {absent}", started.said), started.said


def test_a_workflow_as_a_script(tmp_path: Path) -> None:
    """Launchers run files, whose folder has a module inspect; torch.distributed.launch adds an argument."""
    write_log(tmp_path / "log.jsonl", 50)
    train = ["--local-rank=0", "--dry_run", *with_config(tmp_path, tree(tmp_path, "run"))]
    for name, arguments in (("dqn", train), ("inspect", ["--data", str(tmp_path / "log.jsonl"), "--dry_run"])):
        script = Interpreter([str(ROOT / "workflows" / f"{name}.py"), *arguments], env=ENVIRONMENT, cwd=tmp_path)
        assert script.wait(60) == 0, script.said
