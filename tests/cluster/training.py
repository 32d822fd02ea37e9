"""The user's procedure on hosts: one config, the rows in parts at the same local path, the same command everywhere."""

import itertools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cluster.hosts import Host, Hosts
from helpers.interpreters import FAULTS, Interpreter
from helpers.runs import ROOT, merged, trained
from oracles.cartpole import write_log
from safetensors.torch import load_file
from torch import Tensor

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
        "models": {"fit_passes": 1, "final_fit_passes": 1},
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
    return [[line for line in lines if part[json.loads(line)["mdp_id"]] == index] for index in range(count)]


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
        tree = merged(BASE, {
            "training_data_path": str(data / "job/train.jsonl"),
            "model_output_path": str(data / "job/out"),
            "num_nodes": len(shards),
            "init_method": f"file://{hosts.share}/run.rdzv",
            **changes,
        })  # fmt: skip
        for host, lines in zip(hosts, shards, strict=True):
            host.run("rm", "-rf", data / "job")
            host.write("job/train.jsonl", "".join(lines).encode())
            host.write("job/x.json", json.dumps(tree).encode())
        self.config = ("--config", str(data / "job/x.json"))

    def start(self, host: Host, *command: str, env: dict[str, str] | None = None) -> Interpreter:
        """Gives the command on one host, or starts another one there."""
        argv = command or ("-m", "workflows.dqn", *self.config, f"--node_index={host.index}")
        started = host.start([sys.executable, *argv], env={**ENVIRONMENT, **(env or {})}, cwd=host.data)
        self.started[host.index].append(started)
        return started

    def torchrun(self, host: Host) -> Interpreter:
        """Starts one host's process by torchrun."""
        return self.start(host, "-m", "torch.distributed.run", f"--nnodes={len(self.hosts)}", "--nproc-per-node=1",
                          f"--node-rank={host.index}", f"--master-addr={self.hosts[0].address}", "--master-port=29500",
                          "-m", "workflows.dqn", *self.config)  # fmt: skip

    def start_all(self, **options: Any) -> list[Interpreter]:
        """Gives the command on every host."""
        return [self.start(host, **options) for host in self.hosts]

    def out(self, host: int = 0) -> Path:
        """The model_output_path of a host, seen from here."""
        return self.hosts[host].seen_from_here(self.hosts[host].data / "job/out")

    def done(self, code: int = 0) -> None:
        """Asserts that the commands given last end with this code."""
        assert [all_[-1].wait(SECONDS) for all_ in self.started] == [code] * len(self.started), self.logs()

    def logs(self) -> str:
        """What all launchers have logged."""
        return "\n".join(f"== node {i}\n{launcher.said}" for i, all_ in enumerate(self.started) for launcher in all_)

    def close(self) -> None:
        """Ends what still runs."""
        for launcher in itertools.chain(*self.started):
            launcher.close()


Make = Callable[..., Job]


def newest(out: Path) -> int:
    """The step of the newest whole checkpoint, or -1."""
    return max((int(file.parent.name[5:]) for file in out.glob("checkpoints/step_*/manifest.json")), default=-1)


def learned(out: Path) -> dict[str, Tensor]:
    """Everything learned, by name: networks and the optimizer's state of the last checkpoint."""
    folder = out / "checkpoints" / f"step_{newest(out):06d}"
    return {
        f"{name}.{key}": value
        for name in ("learner", "optimizer")
        for key, value in load_file(folder / f"{name}.safetensors").items()
    }


def undisturbed(job: Job) -> dict[str, Tensor]:
    """What a job learns if nothing happens."""
    job.start_all()
    job.done()
    return learned(job.out())


def alone(folder: Path, lines: Sequence[str], **changes: Any) -> dict[str, Tensor]:
    """What one process learns from all lines."""
    folder.mkdir(parents=True)
    (folder / "train.jsonl").write_text("".join(lines))
    trained(
        merged(
            BASE,
            {"training_data_path": str(folder / "train.jsonl"), "model_output_path": str(folder / "out"), **changes},
        )
    )
    return learned(folder / "out")
