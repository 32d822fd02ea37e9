"""What meeting, watching and losing cost: launchers on this machine's loopback, real workers, real training.

    python -m tests.benchmarks.cluster [--repeats 5] [--only rendezvous,overhead,scaling,recovery,many]
                                       [--minibatch 4096] [--layers 128,64] [--machines 24]

rendezvous   four launchers on one file: from the last's readiness, and from the first's, until all have met. Bar 1 s
overhead     what agreement and checksums take of steps of 1 ms, and what the launcher takes of a core. Bar 1 % together
scaling      two processes against one, beside two runs that know nothing of each other: what the machine can give
recovery     from SIGKILL of a worker to the next optimizer step, without the start of Python and torch. Bar 10 s
many         only if named: machines of one process each that meet on this one, train and export
"""

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / name) for name in ("", "distributed")]
from helpers.waiting import wait_until  # noqa: E402
from machines import machines  # noqa: E402
from oracles.cartpole import write_log  # noqa: E402

from tests.benchmarks.turns import ROOT, options_of, write_config  # noqa: E402

ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1",
               "TORCH_CPP_LOG_LEVEL": "ERROR"}  # fmt: skip
LAUNCH = """
import sys
from reagent_lite.config.rendezvous import RendezvousConfig
from reagent_lite.distributed.launcher import launch
from reagent_lite.distributed.nodes import Node
from reagent_lite.distributed.meeting import Rendezvous
from reagent_lite.distributed.declarations import Declaration
one = Declaration(node=0, host="h", pid=1, processes=2, device="cpu")
launch(sys.argv[1:], 2, Rendezvous(Node(), None, RendezvousConfig(), one), restarts=0)
"""
STEPS = """
import sys, time
from pathlib import Path
import torch
from reagent_lite.config.rendezvous import RendezvousConfig
from reagent_lite.distributed.agreement import StepAgreement
from reagent_lite.distributed.group import ProcessRanks, joined
from reagent_lite.training.checkpoint_folder import require_equal
every = RendezvousConfig().checksum_every_steps
with joined(ProcessRanks.read(), torch.device("cpu")) as group:
    learner, gradient = torch.nn.Sequential(torch.nn.Linear(4, 128), torch.nn.Linear(128, 64)), torch.zeros(9000)
    torch.nn.utils.vector_to_parameters(torch.zeros(8896), learner.parameters())
    agreement, spent, begun = StepAgreement(group), 0.0, time.perf_counter()
    for step in range(1, 8001):
        until = time.perf_counter() + 0.001
        while time.perf_counter() < until:
            pass
        if step % 50 == 0:
            group.all_reduce(gradient)  # keeps ranks together, as gradients do; not counted
        start = time.perf_counter()
        agreement.after_step(step, stop=False, save=False)
        if step % every == 0:
            require_equal(learner, group, step)
        spent += time.perf_counter() - start
        if step == 100:
            Path(sys.argv[1], "begun").touch()
    if group.is_first:
        print(spent / (time.perf_counter() - begun))
"""


def rendezvous(folder: Path) -> tuple[float, float]:
    """Seconds from the last and from the first launcher's readiness until all four have met, as they log them."""
    with machines(folder) as start:
        four = [start(index, 4) for index in range(4)]
        assert [launcher.ended() for launcher in four] == [0] * 4
        seconds = [met_after(launcher.said) for launcher in four]
    return min(seconds), max(seconds)


def met_after(log: str) -> float:
    return float(re.findall(r"met after ([0-9.]+) s", log)[0])


def config(folder: Path, **changes: Any) -> Path:
    write_log(folder / "log.jsonl", 20_000)
    return write_config(folder, {
        "training_data_path": str(folder / "log.jsonl"), "model_output_path": str(folder / "out"), "use_gpu": False,
        "actions": ["0", "1"], "epochs": 40,
        "training": {"layers": [-1, 64, -1], "activations": ["relu", "linear"], "minibatch_size": 64},
        "rainbow": {"dueling_architecture": False},
        "evaluation": {"calc_cpe_in_training": False, "bootstrap_resamples": 100, "models": {"final_fit_passes": 1}},
        **changes,
    })  # fmt: skip


def trained(
    file: Path, *settings: str, cores: str = "0-1", log: int | Any = subprocess.DEVNULL
) -> subprocess.Popen[str]:
    more = [part for setting in settings for part in ("--set", setting)]
    command = ["taskset", "--cpu-list", cores, sys.executable, "-m", "workflows.dqn", "--config", str(file), *more]
    return subprocess.Popen(command, env=ENVIRONMENT, text=True, stdout=subprocess.PIPE, stderr=log)


def rate(process: "subprocess.Popen[str]") -> float:
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 0, process.args
    return float(json.loads(out.splitlines()[-1])["rows_per_second"])


def scaling(folder: Path, minibatch: int, layers: list[int]) -> tuple[float, float]:
    """Two processes of one run, and two runs that know nothing of each other, each against one run on one core."""
    activations = ["relu"] * len(layers) + ["linear"]
    file = config(
        folder, training={"layers": [-1, *layers, -1], "activations": activations, "minibatch_size": minibatch}
    )
    write_log(folder / "log.jsonl", 100_000)
    rate(trained(file, "epochs=1"))  # makes the training copy
    alone = rate(trained(file, cores="0"))
    two = rate(trained(file, "num_processes_per_node=2"))
    apart = [trained(file, f"model_output_path={folder}/apart{core}", cores=str(core)) for core in (0, 1)]
    return two / alone, sum(rate(process) for process in apart) / alone


def overhead(folder: Path) -> tuple[float, float]:
    """Shares of the time that two processes' checks take between steps of 1 ms, and of one core that launchers take."""
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCH, sys.executable, "-c", STEPS, str(folder)],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        text=True,
    )
    wait_until((folder / "begun").exists, seconds=120)
    share = psutil.Process(launcher.pid).cpu_percent(5.0) / 100
    out, _ = launcher.communicate(timeout=300)
    assert launcher.returncode == 0
    return float(out.splitlines()[-1]), share


def recovery(folder: Path) -> tuple[float, float]:
    """Seconds from the kill to the next step after it, and those of a start up to the first step."""
    file = config(folder, epochs=2000, checkpoint={"every_steps": 20})
    begun = time.monotonic()
    process = trained(file, "num_processes_per_node=2")
    checkpoints = folder / "out" / "checkpoints"
    first = later_than(checkpoints, -1)
    start = time.monotonic() - begun
    psutil.Process(process.pid).children()[1].kill()
    killed = time.monotonic()
    time.sleep(0.5)  # what was being written is written
    later_than(checkpoints, max(first, newest(checkpoints)))
    seconds = time.monotonic() - killed
    process.terminate()
    process.wait(60)
    return seconds, start


def many(folder: Path, machines: int) -> tuple[float, float]:
    """Seconds from the last launcher's readiness until all have met, and from their start to the exported model."""
    file = config(
        folder,
        epochs=2,
        num_nodes=machines,
        num_processes_per_node=1,
        init_method=f"file://{folder}/run.rdzv",
        rendezvous={"interface": "lo", "join_timeout_seconds": 600},
        data={"layout": "replicas"},
    )
    begun = time.monotonic()
    logs = [folder / f"log_{node}" for node in range(machines)]
    launchers = [trained(file, f"node_index={node}", log=log.open("w")) for node, log in enumerate(logs)]
    assert [launcher.wait(900) for launcher in launchers] == [0] * machines, logs[0].read_text()
    seconds = time.monotonic() - begun
    assert (folder / "out" / "model" / "manifest.json").is_file()
    return min(met_after(log.read_text()) for log in logs), seconds


def newest(folder: Path) -> int:
    return max((int(file.parent.name[5:]) for file in folder.glob("step_*/manifest.json")), default=-1)


def later_than(folder: Path, step: int) -> int:
    wait_until(lambda: newest(folder) > step, seconds=120)
    return newest(folder)


if __name__ == "__main__":
    options = options_of(
        __doc__,
        repeats=5,
        only="rendezvous,overhead,scaling,recovery",
        minibatch=4096,
        layers="128,64",
        machines=24,
    )
    layers = [int(width) for width in options.layers.split(",")]
    measures = {
        "rendezvous": (rendezvous, "{:.2f} s until 4 launchers have met; {:.2f} s after the first was ready"),
        "overhead": (overhead, "checks {:.2%} of steps of 1 ms; the launcher {:.2%} of one core"),
        "scaling": (partial(scaling, minibatch=options.minibatch, layers=layers),
                    "two processes {:.2f} x one; two runs apart {:.2f} x one"),
        "recovery": (recovery, "killed worker to next checkpointed step {:.2f} s, a start from nothing {:.2f} s"),
        "many": (partial(many, machines=options.machines),
                 f"{options.machines} machines: meeting {{:.2f}} s, whole run {{:.0f}} s"),
    }  # fmt: skip
    for name in options.only.split(","):
        measure, words = measures[name]
        pairs = []
        for _ in range(options.repeats):
            with tempfile.TemporaryDirectory() as folder:
                pairs.append(measure(Path(folder)))
        shown = "; ".join(f"{a:.3f} and {b:.3f}" for a, b in pairs)
        print(f"{words.format(*map(statistics.median, zip(*pairs, strict=True)))}  ({shown})", flush=True)
