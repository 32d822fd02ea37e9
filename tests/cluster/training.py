"""The user's procedure on hosts: one config, the rows in parts at the same local path, the same command everywhere."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cluster.hosts import Host, Hosts
from cluster.machine import Started
from oracles.cartpole import write_log
from oracles.interpreters import FAULTS
from oracles.runs import ROOT, merged, trained
from oracles.waiting import wait_until
from safetensors.torch import load_file
from torch import Tensor
from torch.testing import assert_close

ENVIRONMENT = {"PYTHONPATH": f"{ROOT}:{FAULTS}", "OMP_NUM_THREADS": "1"}
BASE: dict[str, Any] = {
    "use_all_avail_gpus": True,
    "actions": ["0", "1"],
    "epochs": 6,
    "rl": {"gamma": 0.9, "target_update_rate": 0.05},
    "training": {"layers": [-1, 24, -1], "activations": ["relu", "linear"], "l2_decay": 0.0},
    "data": {"global_minibatch_size": 64},
    "evaluation": {
        "calc_cpe_in_training": False,
        "bootstrap_resamples": 100,
        "final_fit_passes": 1,
        "fit_passes": 1,
        "learn_from_scored": True,
    },  # all rows count
}
SECONDS = 240.0  # on a machine with other work as well


def rows_of_a_log(folder: Path, rows: int) -> list[str]:
    """Returns lines of a log of CartPole, whole episodes."""
    write_log(folder / "union.jsonl", rows)
    return (folder / "union.jsonl").read_text().splitlines(keepends=True)


def parts(lines: Sequence[str], count: int) -> list[list[str]]:
    """Divides a log into as many parts, episodes whole, sizes as they come."""
    episodes = sorted({json.loads(line)["mdp_id"] for line in lines})
    part = {episode: index * count // len(episodes) for index, episode in enumerate(episodes)}
    divided: list[list[str]] = [[] for _ in range(count)]
    for line in lines:
        divided[part[json.loads(line)["mdp_id"]]].append(line)
    return divided


class Job:
    """One config and one command on every host.

    Args:
        hosts: where.
        shards: lines of each host's part.
        changes: to BASE, section by section.
    """

    def __init__(self, hosts: Hosts, shards: Sequence[Sequence[str]], **changes: Any) -> None:
        self.hosts, self.started = hosts, [[] for _ in shards]  # type: ignore[var-annotated]
        data = hosts[0].data
        for host, lines in zip(hosts, shards, strict=True):
            host.run("rm", "-rf", data / "job")
            host.run("mkdir", "-p", data / "job")
            host.write("job/train.jsonl", "".join(lines).encode())
        self.tree = merged(BASE, {
            "training_data_path": str(data / "job/train.jsonl"),
            "model_output_path": str(data / "job/out"),
            "num_nodes": len(shards),
            "init_method": f"file://{hosts.share}/run.rdzv",
            **changes,
        })  # fmt: skip
        for host in hosts:
            host.write("job/x.json", json.dumps(self.tree).encode())

    def start(self, host: Host, *more: str, env: dict[str, str] | None = None) -> Started:
        """Gives the command on one host."""
        command = [sys.executable, "-m", "workflows.dqn", "--config", host.data / "job/x.json",
                   f"--node_index={host.index}", *more]  # fmt: skip
        started = host.start(command, env={**ENVIRONMENT, **(env or {})}, cwd=host.data)
        self.started[host.index].append(started)
        return started

    def torchrun(self, host: Host) -> Started:
        """Starts one host's process by torchrun."""
        command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(self.hosts)}", "--nproc-per-node=1",
                   f"--node-rank={host.index}", f"--master-addr={self.hosts[0].address}", "--master-port=29500",
                   "-m", "workflows.dqn", "--config", host.data / "job/x.json"]  # fmt: skip
        self.started[host.index].append(host.start(command, env=ENVIRONMENT, cwd=host.data))
        return self.started[host.index][-1]

    def start_all(self, **options: Any) -> list[Started]:
        """Gives the command on every host."""
        return [self.start(host, **options) for host in self.hosts]

    def out(self, host: int = 0) -> Path:
        """The model_output_path of a host, seen from here."""
        return self.hosts[host].seen_from_here(self.hosts[host].data / "job/out")

    def reached(self, step: int) -> None:
        """Waits until a checkpoint of at least this step is there."""
        wait_until(lambda: newest(self.out()) >= step, self.logs, SECONDS)

    def done(self, code: int = 0) -> None:
        """Asserts that the commands given last end with this code."""
        last = [all_[-1] for all_ in self.started]
        wait_until(
            lambda: not any(launcher.running for launcher in last), lambda: f"still running:\n{self.logs()}", SECONDS
        )
        assert [launcher.wait(1) for launcher in last] == [code] * len(last), self.logs()

    def logs(self) -> str:
        """What all launchers have logged."""
        return "\n".join(f"== node {i}\n{launcher.stderr}" for i, all_ in enumerate(self.started) for launcher in all_)

    def end(self) -> None:
        """Ends what still runs."""
        for launcher in (launcher for all_ in self.started for launcher in all_):
            launcher.end()


def newest(out: Path) -> int:
    """The step of the newest whole checkpoint, or -1."""
    return max((int(file.parent.name[5:]) for file in out.glob("checkpoints/step_*/manifest.json")), default=-1)


def learned(out: Path) -> dict[str, Tensor]:
    """Everything learned, by name: networks and the optimizer's state of the last checkpoint."""
    folder = out / "checkpoints" / f"step_{newest(out):06d}"
    parts_ = {name: load_file(folder / f"{name}.safetensors") for name in ("learner", "optimizer")}
    return {f"{name}.{key}": value for name, tensors in parts_.items() for key, value in tensors.items()}


def alone(folder: Path, lines: Sequence[str], **changes: Any) -> dict[str, Tensor]:
    """What one process learns from all lines."""
    folder.mkdir(parents=True)
    (folder / "train.jsonl").write_text("".join(lines))
    places = {"training_data_path": str(folder / "train.jsonl"), "model_output_path": str(folder / "out")}
    trained(merged(BASE, {**places, **changes}))
    return learned(folder / "out")


def same(first: dict[str, Tensor], other: dict[str, Tensor], tolerance: float) -> None:
    """Asserts that two runs learned the same, bit for bit where the tolerance is 0."""
    assert_close(first, other, rtol=tolerance, atol=tolerance)
