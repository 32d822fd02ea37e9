"""deploy/: files parse, their arguments are those of the command line, and the world they declare is the one meant."""

import json
import os
import re
import runpy
import socket
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.logs import write_json
from helpers.runs import ROOT

from reagent_lite.cli import main_alone
from reagent_lite.config import DqnConfig
from reagent_lite.serving.server_figures import ServerFigures
from reagent_lite.tasks.train import main
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
    assert (module, main_alone(serve.COMMAND, serve.serve, [*rest, "--dry_run=all"])) == (serve.COMMAND.module, 0)
    config: dict[str, Any] = json.loads(capsys.readouterr().out)
    (trained_to,) = (word.rpartition("=")[2] for word in trainer if "model_output_path" in word)
    assert (config["model"], config["host"]) == (f"{trained_to}/model", "0.0.0.0")  # with tokens, or --no_token
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
    # no token, as only this machine reaches the port
    assert (config["no_token"], services["serve"]["ports"]) == (True, [f"127.0.0.1:{config['port']}:{config['port']}"])
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
    service, pods, budget, policy, servers = documents("kubernetes/serve.yaml")
    claim, job = documents("kubernetes/train.yaml")
    spec, pod = servers["spec"], servers["spec"]["template"]["spec"]
    (container,), (trainer,) = pod["containers"], job["spec"]["template"]["spec"]["containers"]
    config = serving(container["args"], trainer["args"], capsys)
    assert (config["log"], config["database"], config["log_format"]) == (
        "/share/served/$(POD_NAME)",
        "/decisions",
        "json",
    )
    assert {env["name"] for env in container["env"]} == {"POD_NAME"}
    # two logs, each with a disk of its own, and a pod at a time is replaced
    assert (spec["replicas"], spec["updateStrategy"]["type"], budget["spec"]["maxUnavailable"]) == (
        2,
        "RollingUpdate",
        1,
    )
    (decisions,) = spec["volumeClaimTemplates"]
    assert decisions["spec"]["accessModes"] == ["ReadWriteOnce"]
    (port,) = container["ports"]
    assert (port["containerPort"], service["spec"]["ports"][0]["targetPort"]) == (config["port"], port["name"])
    assert (pods["spec"]["ports"][0]["port"], pods["spec"]["clusterIP"]) == (config["port"], "None")
    assert spec["serviceName"] == pods["metadata"]["name"]
    assert policy["spec"]["ingress"][0]["ports"] == [{"protocol": "TCP", "port": port["name"]}]
    for probe in ("startupProbe", "readinessProbe"):
        assert container[probe]["httpGet"] == {"path": "/healthz", "port": port["name"]}
    assert container["livenessProbe"]["tcpSocket"] == {"port": port["name"]}
    labels = spec["template"]["metadata"]["labels"]
    selectors = (service["spec"]["selector"], pods["spec"]["selector"], spec["selector"]["matchLabels"],
                 budget["spec"]["selector"]["matchLabels"], policy["spec"]["podSelector"]["matchLabels"])  # fmt: skip
    assert all(selector == labels for selector in selectors)
    assert container["image"] == trainer["image"]
    assert container["imagePullPolicy"] == trainer["imagePullPolicy"] == "IfNotPresent"
    assert {*container["resources"]["requests"]} == {"cpu", "memory"}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert {*mounts} == {*volumes, decisions["metadata"]["name"]}
    assert (mounts["decisions"], mounts["share"], mounts["temporary"]) == ("/decisions", "/share", "/tmp")
    assert volumes["share"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    command = (DEPLOY / "kubernetes" / "serve.yaml").read_text()
    assert f"kubectl create secret generic {volumes['tokens']['secret']['secretName']}" in command
    for kind in ("decide", "reward"):
        assert config[f"{kind}_token_file"] == f"{mounts['tokens']}/{kind}"
        assert f"--from-literal={kind}=$(openssl rand -hex 32)" in command


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


def test_alerts_and_their_metrics(tmp_path: Path) -> None:
    """Each metric of the server has an alert and a line in the README, and alerts use no other metrics."""
    registry = ServerFigures()._registry
    metrics = {metric.name for metric in registry.collect()}
    (group,) = documents("prometheus/alerts.yaml")[0]["groups"]
    alerts = {rule["alert"]: rule["expr"] for rule in group["rules"]}
    assert all(rule["annotations"]["summary"] for rule in group["rules"])
    used = {
        re.sub("_(total|bucket)$", "", name) for rule in alerts.values() for name in re.findall(r"reagent_\w+", rule)
    }
    assert used == metrics
    readme = (ROOT / "docs/serving.md").read_text()
    assert {re.sub("_total$", "", name) for name in re.findall(r"^\| `(reagent_\w+)", readme, re.MULTILINE)} == metrics
    assert all(f" {alert}" in readme for alert in alerts)


def test_the_health_check_of_the_image(tmp_path: Path) -> None:
    (check,) = re.findall(r"^HEALTHCHECK .* CMD (.*)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    assert json.loads(check) == ["python", "/app/health.py"]
    health = runpy.run_path(str(DEPLOY / "health.py"))["main"]
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as pool:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/healthz"

        def answer(status: str) -> None:
            connection, _ = listening.accept()
            with connection:
                assert connection.recv(1000).startswith(b"GET /healthz ")
                connection.sendall(f"HTTP/1.1 {status}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n".encode())

        for status, code in (("200 OK", 0), ("503 Service Unavailable", 1)):
            answered = pool.submit(answer, status)
            assert health(b"python\0-m\0workflows.serve\0--model", url) == code
            answered.result()
    assert health(b"python\0-m\0workflows.serve", url) == 1  # nothing listens
    assert health(b"python\0-m\0workflows.dqn", url) == 0


def test_the_image_gets_what_it_copies_and_no_more() -> None:
    """Of .dockerignore: all is left out, but what is named."""
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    kept = {line[1:] for line in lines if line.startswith("!")}
    copied = re.findall(r"^COPY (.+) \S+$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    sources = {source for step in copied for source in step.replace("${WHEELS}", "wheels").split()}
    assert (lines[0], kept) == ("*", sources)


def test_the_steps_of_the_image(tmp_path: Path) -> None:
    """COPY and RUN in a folder and a virtual environment of their own, with the packages that are installed here.

    The steps that install torch and make the user are not run: one needs a network, the other changes the machine.
    """
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ").replace("${WHEELS} ./", "./")
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
        is_skipped = "useradd" in argument or "uv" in argument.split()
        folder = f"mkdir -p {target}; " if target.endswith("/") else ""
        shell.append({"ARG": f"export {argument}", "WORKDIR": f"cd {target}",
                      "COPY": f"{folder}cp -r {' '.join(str(ROOT / source) for source in sources)} {target}",
                      "RUN": "" if is_skipped else argument}.get(step, ""))  # fmt: skip
    run("bash", "-c", "\n".join(shell), cwd=tmp_path)
    (entry,) = (json.loads(argument) for step, argument in steps if step == "ENTRYPOINT")
    (compose,) = documents("compose.yaml")
    command = [word.replace("/app/", f"{tmp_path}/app/") for word in compose["services"]["node0"]["command"]]
    environment["JOB_COMPLETION_INDEX"] = "0"
    assert "memory per process: environments" in run(*entry, *command, "--dry_run").stderr
    run("reagent-lite", "configs", "--copy", "configs-of-the-wheel")
    assert (tmp_path / "app/configs-of-the-wheel/cartpole/online.json").is_file()
