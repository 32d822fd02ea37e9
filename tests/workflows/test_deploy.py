"""deploy/: files parse, their arguments are those of the command line, and the world they declare is the one meant."""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from oracles.runs import ROOT, never

from reagent_lite.cli import main_alone
from reagent_lite.config import DqnConfig
from reagent_lite.run.launch import main
from workflows import serve

DEPLOY = ROOT / "deploy"


def planned(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[list[str], dict[str, Any]]:
    """Returns the plan's lines and the resolved config of a container's arguments."""
    module, *rest = arguments
    assert module == "workflows.dqn"
    assert main(module, DqnConfig, never, "x.json", [*rest, "--dry_run"]) == 0
    captured = capsys.readouterr()
    return captured.err.splitlines(), json.loads(captured.out)


@pytest.mark.parametrize("node", [0, 1])
def test_compose(node: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    tree = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    service = tree["services"][f"node{node}"]
    for name, value in service["environment"].items():
        monkeypatch.setenv(name, value)
    lines, config = planned([word.replace("/app/", f"{ROOT}/") for word in service["command"]], capsys)
    assert lines[0].startswith("2 cpu processes")
    assert any(f"this is node {node}, rank {node};" in line for line in lines)
    assert (ROOT / service["build"]["dockerfile"]).is_file()
    mounted = {volume.split(":")[1]: volume.split(":")[0] for volume in service["volumes"]}
    assert mounted == {"/share": "share", "/data": f"data{node}"}  # one folder of both, one of its own
    assert set(mounted.values()) <= set(tree["volumes"])
    assert config["init_method"].startswith("file:///share/")
    assert config["model_output_path"].startswith("/share/")


def test_compose_serves_the_model_that_it_trains(capsys: pytest.CaptureFixture[str]) -> None:
    tree = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    service = tree["services"]["serve"]
    module, *arguments = service["command"]
    assert module == serve.COMMAND.module
    assert main_alone(serve.COMMAND, serve.serve, [*arguments, "--dry_run"]) == 0
    config = json.loads(capsys.readouterr().out)
    assert config["host"] == "0.0.0.0"
    trained_to = next(word for word in tree["services"]["node0"]["command"] if "model_output_path" in word)
    assert config["model"] == f"{trained_to.rpartition('=')[2]}/model"
    assert service["ports"] == [f"{config['port']}:{config['port']}"]
    assert {config["model"].split("/")[1], config["log"].split("/")[1]} == {"share"}
    assert service["volumes"] == ["share:/share"]
    assert "serve" in service["build"]["args"]["EXTRAS"].split(",")


def test_kubernetes(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    claim, job = yaml.safe_load_all((DEPLOY / "kubernetes" / "train.yaml").read_text())
    spec = job["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"training_data_path": "/share/log.jsonl", "actions": ["a", "b"], "use_gpu": False}))
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
    arguments = [word.replace("/share/config.json", str(config)) for word in container["args"]]
    lines, config_here = planned([word.replace("$(JOB_UID)", "uid") for word in arguments], capsys)
    assert any("this is node 1, rank 1;" in line for line in lines)
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == config_here["num_nodes"]
    assert "ReadWriteMany" in claim["spec"]["accessModes"]
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert pod["restartPolicy"] == "Never"  # podFailurePolicy needs it
    actions = {
        tuple(rule["onExitCodes"]["values"]): rule["action"]
        for rule in spec["podFailurePolicy"]["rules"] if "onExitCodes" in rule
    }  # fmt: skip
    assert actions == {(75,): "Ignore", (2,): "FailJob"}
    assert {env["name"] for env in container["env"]} >= set(re.findall(r"\$\((\w+)\)", " ".join(container["args"])))


def test_slurm_script(tmp_path: Path) -> None:
    script = DEPLOY / "slurm" / "train.sbatch"
    subprocess.run(["bash", "-n", script], check=True)
    options = re.findall(r"^#SBATCH (\S+)", script.read_text(), re.MULTILINE)
    assert "--ntasks-per-node=1" in options
    assert "--signal=USR2@120" in options
    done = subprocess.run(["bash", script], capture_output=True, text=True, check=False,
                          env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)})  # fmt: skip
    assert done.returncode != 0
    assert "CONFIG=/path/of/x.json is missing" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("doctor", "train", "code", "requeued"),
    [(0, 0, 0, False), (140, 0, 140, True), (1, 0, 1, False), (0, 75, 75, True), (0, 140, 140, True), (0, 5, 5, False)],
)
def test_a_slurm_job_that_a_signal_stops_is_requeued(
    tmp_path: Path, doctor: int, train: int, code: int, requeued: bool
) -> None:
    programs = {
        "srun": f'case "$*" in *workflows.doctor*) exit {doctor};; *) echo trains; exit {train};; esac',
        "scontrol": 'echo "$@"',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path), "CONFIG": "x.json",
                   "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}  # fmt: skip
    done = subprocess.run(["bash", DEPLOY / "slurm" / "train.sbatch"], capture_output=True, text=True, check=False,
                          env=environment)  # fmt: skip
    assert done.returncode == code, done.stderr
    assert ("requeue 7" in done.stdout) == requeued
    assert ("trains" in done.stdout) == (doctor == 0)


def test_dockerfile_takes_what_the_package_needs() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    copied = {word for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE) for word in line.split()[:-1]}
    assert {"pyproject.toml", "README.md", "LICENSE", "reagent_lite", "workflows", "kernels", "configs"} <= copied
    assert [word for word in copied if not (ROOT / word).exists()] == []
    assert re.search(r"^USER (?!root)", text, re.MULTILINE)
