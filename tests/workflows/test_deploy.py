"""deploy/: files parse, their arguments are those of the command line, and the world they declare is the one meant."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import yaml
from oracles.runs import ROOT

from reagent_lite.cli import main_alone
from reagent_lite.config import DqnConfig
from reagent_lite.run.launch import main
from workflows import serve

DEPLOY = ROOT / "deploy"


def planned(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[list[str], dict[str, Any]]:
    """Returns the plan's lines and the resolved config of a container's arguments."""
    module, *rest = arguments
    assert module == "workflows.dqn"
    assert main(module, DqnConfig, "x.json", [*rest, "--dry_run"]) == 0
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


def test_kubernetes_serves_the_model_that_it_trains(capsys: pytest.CaptureFixture[str]) -> None:
    decisions, service, deployment = yaml.safe_load_all((DEPLOY / "kubernetes" / "serve.yaml").read_text())
    claim, job = yaml.safe_load_all((DEPLOY / "kubernetes" / "train.yaml").read_text())
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    module, *arguments = container["args"]
    assert module == serve.COMMAND.module
    assert main_alone(serve.COMMAND, serve.serve, [*arguments, "--dry_run"]) == 0
    config = json.loads(capsys.readouterr().out)
    (trainer,) = job["spec"]["template"]["spec"]["containers"]
    trained_to = next(word for word in trainer["args"] if "model_output_path" in word)
    assert config["model"] == f"{trained_to.rpartition('=')[2]}/model"
    assert (config["host"], config["log"], config["database"]) == ("0.0.0.0", "/share/served", "/decisions")
    assert decisions["spec"]["accessModes"] == ["ReadWriteOnce"]  # a disk of the machine's own
    assert config["workers"] == int(container["resources"]["requests"]["cpu"])
    # one server has the log, also while a new pod takes the place of another
    assert (deployment["spec"]["replicas"], deployment["spec"]["strategy"]) == (1, {"type": "Recreate"})
    (port,), (exposed,) = container["ports"], service["spec"]["ports"]
    assert port["containerPort"] == config["port"]
    assert port["name"] == exposed["targetPort"] == container["readinessProbe"]["httpGet"]["port"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"] == labels
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert {mounts[volume["name"]]: volume["persistentVolumeClaim"]["claimName"] for volume in pod["volumes"]} == {
        "/share": claim["metadata"]["name"],
        "/decisions": decisions["metadata"]["name"],
    }
    assert container["readinessProbe"]["httpGet"]["path"] == "/healthz"


@pytest.mark.parametrize("name", ["train", "serve"])
def test_kubernetes_files_are_what_its_api_takes(name: str) -> None:
    """By the API's own schemas, which refuse fields that are unknown or of another type."""
    schemas = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate of the extra `dev` is missing")
    for document in yaml.safe_load_all((DEPLOY / "kubernetes" / f"{name}.yaml").read_text()):
        assert schemas.validate(document, "1.31", strict=True) == "1.31"  # the oldest with podFailurePolicy


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


def test_the_steps_of_the_image(tmp_path: Path) -> None:
    """COPY and RUN in a folder and a virtual environment of their own, with the packages that are installed here.

    The step that makes the user is not run; it changes the machine.
    """
    steps = re.findall(r"^([A-Z]+) (.+)$", (DEPLOY / "Dockerfile").read_text().replace("\\\n", " "), re.MULTILINE)
    image, folder_of_step = tmp_path / "image", Path("/")
    packages = tmp_path / "env" / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    (packages / "here.pth").write_text(sysconfig.get_path("purelib"))  # whose own .pth files are not read
    environment = {"PATH": f"{tmp_path / 'env' / 'bin'}:{os.environ['PATH']}", "HOME": str(tmp_path),
                   "PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}  # fmt: skip

    def run(command: list[str]) -> subprocess.CompletedProcess[str]:
        folder = image / folder_of_step.relative_to("/")
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done

    words: dict[str, list[str]] = {}
    for step, text in steps:
        if step == "ARG":
            name, _, default = text.partition("=")
            environment[name] = default.strip('"')
        elif step == "WORKDIR":
            folder_of_step = Path(text)
            (image / folder_of_step.relative_to("/")).mkdir(parents=True, exist_ok=True)
        elif step == "COPY":
            *sources, target = text.split()
            for source in sources:
                end = image / (folder_of_step / target).relative_to("/")
                if (ROOT / source).is_dir():
                    shutil.copytree(ROOT / source, end, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    shutil.copy(ROOT / source, end)
        elif step == "RUN" and "useradd" not in text:
            run(["bash", "-c", text])
        elif step in ("ENTRYPOINT", "CMD"):
            words[step] = json.loads(text)
    assert [text for step, text in steps if step == "USER"] == ["trainer"]
    assert "python -m workflows.dqn" in run(words["ENTRYPOINT"] + words["CMD"]).stdout
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    command = [word.replace("/app/", f"{image}/app/") for word in compose["services"]["node0"]["command"]]
    environment["JOB_COMPLETION_INDEX"] = "0"
    assert "memory per process: environments" in run([*words["ENTRYPOINT"], *command, "--dry_run"]).stderr
    run(["reagent-lite", "configs", "--copy", "configs-of-the-wheel"])
    copied = image / "app" / "configs-of-the-wheel"
    assert {path.relative_to(copied) for path in copied.rglob("*.json")} == {
        path.relative_to(ROOT / "configs") for path in (ROOT / "configs").rglob("*.json")
    }
