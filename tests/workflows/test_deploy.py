"""deploy/: files parse, their arguments are those of the command line, and the world they declare is the one meant."""

import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import yaml
from oracles.logs import write_json
from oracles.runs import ROOT

from reagent_lite.cli import main_alone
from reagent_lite.config import DqnConfig
from reagent_lite.run.launch import main
from workflows import serve

DEPLOY = ROOT / "deploy"


def planned(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[str, dict[str, Any]]:
    """Returns the plan and the resolved config of a container's arguments."""
    module, *rest = arguments
    assert (module, main(module, DqnConfig, "x.json", [*rest, "--dry_run"])) == ("workflows.dqn", 0)
    captured = capsys.readouterr()
    return captured.err, json.loads(captured.out)


def serving(arguments: list[str], trainer: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Returns the resolved config of a server's arguments, which serves what the trainer's arguments train."""
    module, *rest = arguments
    assert (module, main_alone(serve.COMMAND, serve.serve, [*rest, "--dry_run"])) == (serve.COMMAND.module, 0)
    config: dict[str, Any] = json.loads(capsys.readouterr().out)
    (trained_to,) = (word.rpartition("=")[2] for word in trainer if "model_output_path" in word)
    assert (config["model"], config["host"]) == (f"{trained_to}/model", "0.0.0.0")
    return config


def documents(name: str) -> list[dict[str, Any]]:
    return [*yaml.safe_load_all((DEPLOY / name).read_text())]


@pytest.mark.parametrize("node", [0, 1])
def test_compose(node: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (tree,) = documents("compose.yaml")
    service = tree["services"][f"node{node}"]
    for name, value in service["environment"].items():
        monkeypatch.setenv(name, value)
    plan, config = planned([word.replace("/app/", f"{ROOT}/") for word in service["command"]], capsys)
    assert plan.startswith("2 cpu processes")
    assert f"this is node {node}, rank {node};" in plan
    # one folder of both, one of its own
    assert service["volumes"] == ["share:/share", f"data{node}:/data"]
    assert {"share", f"data{node}"} <= set(tree["volumes"])
    assert config["init_method"].startswith("file:///share/")
    assert config["model_output_path"].startswith("/share/")


def test_compose_serves_the_model_that_it_trains(capsys: pytest.CaptureFixture[str]) -> None:
    services = documents("compose.yaml")[0]["services"]
    config = serving(services["serve"]["command"], services["node0"]["command"], capsys)
    assert services["serve"]["ports"] == [f"{config['port']}:{config['port']}"]
    assert config["log"].startswith("/share/")
    assert services["serve"]["volumes"] == ["share:/share"]


def test_kubernetes(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    claim, job = documents("kubernetes/train.yaml")
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    tree = {"training_data_path": "/share/log.jsonl", "actions": ["a", "b"], "use_gpu": False}
    config = write_json(tmp_path / "config.json", tree)
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
    arguments = (word.replace("/share/config.json", str(config)) for word in container["args"])
    plan, resolved = planned([word.replace("$(JOB_UID)", "uid") for word in arguments], capsys)
    assert "this is node 1, rank 1;" in plan
    assert spec["completions"] == spec["parallelism"] == resolved["num_nodes"]
    # podFailurePolicy needs "Never"
    assert (spec["completionMode"], pod["restartPolicy"]) == ("Indexed", "Never")
    assert "ReadWriteMany" in claim["spec"]["accessModes"]
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert {env["name"] for env in container["env"]} >= set(re.findall(r"\$\((\w+)\)", " ".join(container["args"])))
    rules = spec["podFailurePolicy"]["rules"]
    actions = {str(rule["onExitCodes"]["values"]): rule["action"] for rule in rules if "onExitCodes" in rule}
    assert actions == {"[75]": "Ignore", "[2]": "FailJob"}


def test_kubernetes_serves_the_model_that_it_trains(capsys: pytest.CaptureFixture[str]) -> None:
    decisions, service, deployment = documents("kubernetes/serve.yaml")
    claim, job = documents("kubernetes/train.yaml")
    spec, pod = deployment["spec"], deployment["spec"]["template"]["spec"]
    (container,), (trainer,) = pod["containers"], job["spec"]["template"]["spec"]["containers"]
    config = serving(container["args"], trainer["args"], capsys)
    assert (config["log"], config["database"]) == ("/share/served", "/decisions")
    assert decisions["spec"]["accessModes"] == ["ReadWriteOnce"]  # a disk of the machine's own
    # one server has the log, also while a new pod takes the place of another
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})
    (port,) = container["ports"]
    assert (port["containerPort"], service["spec"]["ports"][0]["targetPort"]) == (config["port"], port["name"])
    assert container["readinessProbe"]["httpGet"] == {"path": "/healthz", "port": port["name"]}
    assert service["spec"]["selector"] == spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert {mounts[volume["name"]]: volume["persistentVolumeClaim"]["claimName"] for volume in pod["volumes"]} == {
        "/share": claim["metadata"]["name"],
        "/decisions": decisions["metadata"]["name"],
    }


@pytest.mark.parametrize("name", ["train", "serve"])
def test_kubernetes_files_are_what_its_api_takes(name: str) -> None:
    """By the API's own schemas, which refuse fields that are unknown or of another type."""
    schemas = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate of the extra `dev` is missing")
    # the oldest with podFailurePolicy
    assert {schemas.validate(tree, "1.31", strict=True) for tree in documents(f"kubernetes/{name}.yaml")} == {"1.31"}


def slurm_job(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    environment |= {"PATH": f"{folder}:{os.environ['PATH']}", "HOME": str(folder)}
    script = DEPLOY / "slurm" / "train.sbatch"
    return subprocess.run(["bash", script], capture_output=True, text=True, check=False, env=environment)


def test_slurm_script(tmp_path: Path) -> None:
    options = re.findall(r"^#SBATCH (\S+)", (DEPLOY / "slurm" / "train.sbatch").read_text(), re.MULTILINE)
    assert {"--ntasks-per-node=1", "--signal=USR2@120"} <= set(options)
    assert "CONFIG=/path/of/x.json is missing" in slurm_job(tmp_path).stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("doctor", "train", "code", "requeued"),
    [(0, 0, 0, False), (140, 0, 140, True), (1, 0, 1, False), (0, 75, 75, True), (0, 140, 140, True), (0, 5, 5, False)],
)
def test_a_slurm_job_that_a_signal_stops_is_requeued(
    tmp_path: Path, doctor: int, train: int, code: int, requeued: bool
) -> None:
    for name, text in (
        ("srun", f'case "$*" in *workflows.doctor*) exit {doctor};; *) echo trains; exit {train};; esac'),
        ("scontrol", 'echo "$@"'),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    done = slurm_job(tmp_path, CONFIG="x.json", SLURM_JOB_ID="7", SLURM_JOB_NUM_NODES="2")
    assert done.returncode == code, done.stderr
    assert ("requeue 7" in done.stdout, "trains" in done.stdout) == (requeued, doctor == 0)


def test_the_steps_of_the_image(tmp_path: Path) -> None:
    """COPY and RUN in a folder and a virtual environment of their own, with the packages that are installed here.

    The step that makes the user is not run; it changes the machine.
    """
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    packages = tmp_path / "env" / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    (packages / "here.pth").write_text(sysconfig.get_path("purelib"))  # whose own .pth files are not read
    environment = {"PATH": f"{tmp_path / 'env' / 'bin'}:{os.environ['PATH']}", "HOME": str(tmp_path),
                   "PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}  # fmt: skip

    def run(*command: str, cwd: Path = tmp_path / "app") -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=True)

    steps = re.findall(r"^([A-Z]+) (.+)$", re.sub(" /(app|source)", rf" {tmp_path}/\1", text), re.MULTILINE)
    shell = ["set -e; mkdir app source"]
    for step, argument in steps:
        *sources, target = argument.split()
        shell.append({"ARG": f"export {argument}", "WORKDIR": f"cd {target}",
                      "COPY": f"cp -r {' '.join(str(ROOT / source) for source in sources)} {target}",
                      "RUN": "" if "useradd" in argument else argument}.get(step, ""))  # fmt: skip
    run("bash", "-c", "\n".join(shell), cwd=tmp_path)
    (entry,) = (json.loads(argument) for step, argument in steps if step == "ENTRYPOINT")
    (compose,) = documents("compose.yaml")
    command = [word.replace("/app/", f"{tmp_path}/app/") for word in compose["services"]["node0"]["command"]]
    environment["JOB_COMPLETION_INDEX"] = "0"
    assert "memory per process: environments" in run(*entry, *command, "--dry_run").stderr
    run("reagent-lite", "configs", "--copy", "configs-of-the-wheel")
    assert (tmp_path / "app/configs-of-the-wheel/cartpole/online.json").is_file()
