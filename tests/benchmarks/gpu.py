"""Everything that needs a GPU, in less than ten minutes: its tests, then the figures of this machine, in one file.

    make gpu        or: python3 -m tests.benchmarks.gpu outputs/gpu.json

The file is written anew after the tests and after each figure, so that a limit of time loses the rest only. A network
and an installed reagent-lite are not needed. Without a GPU tests are skipped and there are no figures; without PyCUDA
environments are on the CPU, and what torch does is measured all the same.
"""

import argparse
import importlib.util
import json
import logging
import re
import statistics
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils.benchmark import Timer

from reagent_lite import __version__
from reagent_lite.config import DqnConfig, WorkflowConfig, check
from reagent_lite.config.environment import EnvironmentConfig
from reagent_lite.config.simulate_config import SimulateConfig
from reagent_lite.console import logger
from reagent_lite.distributed.gpus import list_gpus
from reagent_lite.distributed.group import Group, ProcessRanks
from reagent_lite.run import learner
from reagent_lite.run.learner import update_capture
from reagent_lite.run.resolved import resolve
from reagent_lite.run.runner import Run, train
from reagent_lite.sim.backend import open_backend
from reagent_lite.sim.cuda import on_stream
from reagent_lite.sim.cuda_build import cuda_problem, find_nvcc
from reagent_lite.sim.env import VectorEnv
from reagent_lite.tasks.simulate import simulate
from reagent_lite.training.capture import Captured
from reagent_lite.training.loop import fit
from reagent_lite.training.stop import StopSignal
from reagent_lite.whole_files import scratch_folder
from tests.benchmarks.turns import ROOT

Figures = dict[str, Any]

SECONDS = 500.0
TEST_SECONDS = 300.0
TEST_PROCESSES = 6
"""Processes that share the GPU in tests, if pytest-xdist is there."""
TRAINED = (1024, 4096, 16_384, 65_536, 262_144)
STEPPED = (1024, 16_384, 262_144, 1_048_576)
ENVIRONMENTS = ("cartpole_v1", "acrobot", "recommend")
NETWORK = {"layers": [-1, 256, 256, -1], "activations": ["relu", "relu", "linear"]}
UPDATES = 3000
COPIED_BYTES = 1 << 30  # read and written; larger than any cache
FAMILIES = (
    ("environments", r"^env_"),
    ("matrix products", r"gemm|gemv|cutlass|cublas|splitK|addmm|aten::mm"),
    ("optimizer", r"adam|multi_tensor|foreach"),
    ("gathers and scatters", r"index|gather|scatter"),
    ("copies", r"memcpy|memset|copy|aten::cat|CatArray|fill"),
    ("random numbers", r"random|rand|philox|distribution"),
    ("sums and maxima", r"reduce|softmax|norm|scan|cumsum|arg|sort"),
    ("element by element", r"elementwise|unrolled|vectorized|threshold|relu|where|clamp"),
)
"""Kernels by what they do: the first expression that is found in the name of one."""


def tests() -> Figures:
    """Returns how the tests marked gpu ended; those that a slow machine leaves undone count as not run."""
    files = [file for file in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in file.read_text()]
    parallel = ["-n", str(TEST_PROCESSES), "--dist", "worksteal"] if importlib.util.find_spec("xdist") else []
    # a warning of another release of a library is no error of the GPU
    options = [*parallel, "-m", "gpu and not slow", "-v", "-rfEs", "-o", "filterwarnings=default",
               "-p", "no:cacheprovider", "--continue-on-collection-errors"]  # fmt: skip
    command = [sys.executable, "-m", "pytest", *options, *map(str, files)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TEST_SECONDS, cwd=ROOT)
    except subprocess.TimeoutExpired as error:
        return {
            "exit_code": None,
            "result": f"not done in {TEST_SECONDS:.0f} s",
            "output": (error.stdout or b"").decode()[-20_000:],
        }
    lines = done.stdout.strip().splitlines()
    return {
        "exit_code": done.returncode,
        "result": lines[-1].strip("= ") if lines else done.stderr[-2000:],
        "noted": [line for line in lines if line.startswith(("FAILED", "ERROR", "SKIPPED"))],
        "output": "" if done.returncode == 0 else done.stdout[-20_000:],
    }


def copying(device: torch.device) -> float:
    """Returns the bytes per second that a copy within the device's memory reads and writes."""
    source = torch.ones(COPIED_BYTES // 2, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return COPIED_BYTES * _calls_per_second(lambda: target.copy_(source), 0.5)


def stepping(env: str, size: int, device: torch.device, *, steps: int = 100, seconds: float = 1.0) -> Figures:
    """Returns environment steps per second without learning, replayed as graphs on a GPU.

    Args:
        env: name of the environment.
        size: number of environments.
        device: where they are.
        steps: steps of every environment in a graph.
        seconds: duration of all rounds, whose median counts.
    """
    backend = open_backend(EnvironmentConfig(env=env, backend="cuda" if device.type == "cuda" else "cpu"), device)  # type: ignore[arg-type]
    with on_stream(device):
        envs = VectorEnv(backend, num_envs=size)
        envs.reset()
        uniform = torch.ones(1, device=device)

        def act_and_step() -> None:
            envs.act(None, epsilon=uniform)
            envs.step()

        works: dict[str, Callable[[], object]] = {
            "dynamics": partial(envs.advance, observe=False),
            "observed": envs.advance,
            "acting": act_and_step,
        }
        figures = {
            name: round(size * steps * _calls_per_second(_repeated(work, steps, device), seconds))
            for name, work in works.items()
        }
    limit = copying(device) / backend.spec.step_bytes
    return figures | {
        "bytes_per_step": backend.spec.step_bytes,
        "copy_limit": round(limit),
        "share_of_limit": round(figures["dynamics"] / limit, 3),
    }


def _repeated(work: Callable[[], object], steps: int, device: torch.device) -> Callable[[], object]:
    def many() -> None:
        for _ in range(steps):
            work()

    replayed = Captured(many) if device.type == "cuda" else many
    for _ in range(4):
        replayed()
    return replayed


def online(
    size: int, folder: Path, device: torch.device, *, cuda_graph: bool, math: str = "exact", updates: int = UPDATES
) -> WorkflowConfig:
    """Returns the config of double DQN in CartPole, whose second and last epoch is measured.

    As many rows are learned as environments step.
    """
    return check(
        DqnConfig,
        {
            "model_output_path": str(folder),
            "use_gpu": device.type == "cuda",
            "rainbow": {"dueling_architecture": False},
            "training": {**NETWORK, "minibatch_size": size},
            "simulation": {
                "env": "cartpole_v1",
                "num_envs": size,
                "warmup_steps": 4 * size,
                "total_steps": (4 + updates) * size,
                "num_evaluations": 2,
                "evaluation_episodes": 2,
                "cuda_graph": cuda_graph,
                "math": math,
                "replay": {"capacity": 64 * size},
            },
        },
    )


def training(
    size: int,
    device: torch.device,
    *,
    cuda_graph: bool = True,
    compiled: bool = False,
    math: str = "exact",
    updates: int = UPDATES,
) -> Figures:
    """Returns rates of the last epoch: without start, recording of graphs, evaluations and checkpoint.

    Args:
        size: number of environments, and of rows in a minibatch.
        device: where they are.
        cuda_graph, math: of the config.
        compiled: whether updates are compiled, as in longer runs.
        updates: optimizer steps.
    """
    with scratch_folder() as folder, patch.object(learner, "FEWEST_COMPILED_STEPS", 0 if compiled else sys.maxsize):
        *_, last = _rates(
            online(size, folder, device, cuda_graph=cuda_graph, math=math, updates=updates), device, folder
        )
    return {
        f"{name}_per_second": round(last[f"rate/{key}_per_second"])
        for name, key in {"env_steps": "env_steps", "learned_rows": "rows", "updates": "updates"}.items()
    }


def _rates(config: WorkflowConfig, device: torch.device, folder: Path) -> list[Figures]:
    """Trains, and returns the lines of metrics that have rates, one for each epoch."""
    train(config, Group(ProcessRanks(), device))
    return [
        line
        for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        if "rate/rows_per_second" in line
    ]


def logged(size: int, device: torch.device, *, cuda_graph: bool, rows: int = 1_000_000, epochs: int = 4) -> Figures:
    """Returns the rate of learning from a log of CartPole in minibatches of a size, the median of the last epochs."""
    with scratch_folder() as folder:
        log = str(folder / "log.parquet")
        simulate(
            check(
                SimulateConfig,
                {"env": "cartpole_v1", "output_path": log, "format": "transitions", "rows": rows, "use_gpu": False},
            )
        )
        tree = {
            "training_data_path": log,
            "model_output_path": str(folder / "out"),
            "use_gpu": device.type == "cuda",
            "actions": ["left", "right"],
            "epochs": epochs,
            "rainbow": {"dueling_architecture": False},
            "training": {**NETWORK, "minibatch_size": size, "cuda_graph": cuda_graph},
            "evaluation": {"calc_cpe_in_training": False, "bootstrap_resamples": 100, "learn_from_scored": True},
        }
        lines = _rates(check(DqnConfig, tree), device, folder / "out")
    return {
        "learned_rows_per_second": round(
            statistics.median([line["rate/rows_per_second"] for line in lines[epochs // 2 :]])
        )
    }


def profiled(size: int, device: torch.device, *, math: str = "exact", steps: int = 50) -> Figures:
    """Returns launches and time of one step of all environments and one update, by family of kernels.

    They are launched one by one: a graph has the same kernels.
    """
    with scratch_folder() as folder, on_stream(device):
        group = Group(ProcessRanks(), device)
        config = online(size, folder, device, cuda_graph=False, math=math)
        run = Run(resolve(config, group), StopSignal())
        reports = fit(
            run.running,
            run.stream.plan,
            group,
            collect=run.stream.before_step,
            capture=update_capture(config, group),
        )
        deque(islice(reports, 10), maxlen=0)  # steps in which memory and libraries are set up
        _wait(device)
        with profile(activities=[ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU]) as profiler:
            deque(islice(reports, steps), maxlen=0)
            _wait(device)
    kind = DeviceType.CUDA if device.type == "cuda" else DeviceType.CPU
    time_of = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    return by_family(
        (event.key, event.count / steps, getattr(event, time_of) / steps)
        for event in profiler.key_averages()
        if event.device_type == kind
    )


def by_family(kernels: Iterable[tuple[str, float, float]]) -> Figures:
    """Returns launches and time of kernels (name, launches, microseconds): in all, by family, and the slowest."""
    ordered = sorted(kernels, key=lambda kernel: -kernel[2])
    launches: Counter[str] = Counter()
    microseconds: Counter[str] = Counter()
    for name, count, duration in ordered:
        family = next((family for family, words in FAMILIES if re.search(words, name, re.IGNORECASE)), "other")
        launches[family] += count  # type: ignore[assignment]
        microseconds[family] += duration  # type: ignore[assignment]
    total = max(sum(microseconds.values()), 1e-9)
    return {
        "launches_per_step": round(sum(launches.values()), 2),
        "microseconds_per_step": round(total, 2),
        "families": {
            family: {
                "launches": round(launches[family], 2),
                "microseconds": round(duration, 2),
                "share": round(duration / total, 3),
            }
            for family, duration in microseconds.most_common()
        },
        "slowest": [f"{duration:.2f} us, {count:g} launches, {name[:150]}" for name, count, duration in ordered[:15]],
    }


def _calls_per_second(work: Callable[[], object], seconds: float) -> float:
    timer = Timer("work()", globals={"work": work}, num_threads=torch.get_num_threads())
    return 1 / timer.blocked_autorange(min_run_time=seconds).median


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def machine(device: torch.device | None) -> Figures:
    """Returns what is measured: hardware, libraries, and what a simulation on the GPU lacks."""
    return {
        "gpus": [f"{gpu.name}, driver {gpu.driver}, {gpu.total >> 30} GiB" for gpu in list_gpus()],
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nvcc": str(find_nvcc()),
        "reagent-lite": __version__,
        "simulation on the GPU": ("no GPU" if device is None else cuda_problem(device)) or "possible",
    }


def figures_of(device: torch.device) -> dict[str, Callable[[], Any]]:
    """Returns the works by name, the most wanted first."""
    return {
        "bytes per second of a copy": partial(copying, device),
        **{
            f"training with {size} environments, {math} math{', compiled' if compiled else ''}": partial(
                training, size, device, math=math, compiled=compiled, updates=min(UPDATES, 2**28 // size)
            )
            for size in TRAINED
            for math, compiled in (("exact", False), ("exact", True), ("fast", True))
        },
        "profile with 4096 environments": partial(profiled, 4096, device),
        "profile with 65536 environments, fast math": partial(profiled, 65_536, device, math="fast"),
        "training with 4096 environments, without graphs": partial(
            training, 4096, device, cuda_graph=False, updates=1000
        ),
        **{
            f"a log in minibatches of {size}, {kind} graphs": partial(logged, size, device, cuda_graph=kind == "with")
            for size in (1024, 4096)
            for kind in ("with", "without")
        },
        **{
            f"{size} environments of {env} alone": partial(stepping, env, size, device)
            for env in ENVIRONMENTS
            for size in STEPPED
        },
    }


def main(arguments: list[str] | None = None) -> int:
    """Measures, writes the file and returns the exit code of the tests."""
    parser = argparse.ArgumentParser(prog="python3 -m tests.benchmarks.gpu")
    parser.add_argument("file", type=Path)
    file: Path = parser.parse_args(arguments).file
    file.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else None
    report = machine(device)
    for name, work in ({"tests": tests} | ({} if device is None else figures_of(device))).items():
        before = time.monotonic()
        if before - start > SECONDS:
            report[name] = "no time left"
        else:
            print(name, file=sys.stderr, flush=True)
            try:
                report[name] = work()
            except Exception as error:  # the other figures count all the same
                report[name] = f"{type(error).__name__}: {error}"
            print(json.dumps(report[name], indent=1)[:3000], file=sys.stderr, flush=True)
            report[f"seconds of {name}"] = round(time.monotonic() - before, 1)
        file.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps({"file": str(file), "tests": report["tests"]["result"]}))
    return int(report["tests"]["exit_code"] != 0)


if __name__ == "__main__":
    logger.setLevel(logging.WARNING)
    sys.exit(main())
