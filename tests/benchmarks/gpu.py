"""Everything that needs a GPU, in less than eight minutes: its tests, then the figures of this machine, in one file.

Tests have five minutes and figures the rest; what there is no time for is named in the file.

    make gpu        or: python -m tests.benchmarks.gpu outputs/gpu.json
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from reagent_lite.distributed.gpus import list_gpus
from reagent_lite.sim.backend import open_backend
from reagent_lite.sim.cuda import on_stream
from reagent_lite.sim.cuda_build import cuda_problem, find_nvcc
from workflows.benchmark import measure_simulation, measure_training

SECONDS, TEST_SECONDS = 400.0, 300.0
SIZES = (1024, 16_384, 262_144, 1_048_576)
TRAINED = (16_384, 262_144)
DEVICE = torch.device("cuda", 0)


def tests() -> dict[str, Any]:
    """Returns how the tests marked gpu ended; those that a slow machine leaves undone count as not run."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu and not slow", "-q", "-rfEs", "-p", "no:cacheprovider"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TEST_SECONDS)
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
        return {"exit_code": None, "result": f"not done in {TEST_SECONDS:.0f} s", "output": output[-4000:]}
    lines = done.stdout.strip().splitlines()
    noted = [line for line in lines if line.startswith(("FAILED", "ERROR", "SKIPPED"))]
    output = "" if done.returncode == 0 else done.stdout[-20_000:]
    return {"exit_code": done.returncode, "result": lines[-1] if lines else "", "noted": noted, "output": output}


def simulation(env: str) -> list[dict[str, float]]:
    """Returns millions of steps per second by number of environments, beside the memory copy's limit."""
    backend = open_backend(env, backend="cuda", device=DEVICE, parameters={}, math="exact")
    with on_stream(DEVICE):
        return [asdict(point) for point in measure_simulation(backend, SIZES, 0.1)]


def main() -> int:
    """Measures, writes the file and returns the exit code of the tests."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.gpu")
    parser.add_argument("file", type=Path)
    file: Path = parser.parse_args().file
    if problem := cuda_problem(DEVICE):
        print(problem, file=sys.stderr)
        return 2
    start = time.monotonic()
    gpus = [f"{gpu.name}, driver {gpu.driver}, {gpu.total >> 30} GiB" for gpu in list_gpus()]
    report: dict[str, Any] = {"gpus": gpus, "torch": torch.__version__, "cuda": torch.version.cuda,
                              "nvcc": str(find_nvcc()), "reagent-lite": version("reagent-lite")}  # fmt: skip

    works: dict[str, Callable[[], Any]] = {"tests": tests}
    works |= {
        f"simulation of {env}": lambda env=env: simulation(env) for env in ("cartpole_v1", "acrobot", "recommend")
    }
    for size in TRAINED:
        for graph in (True, False):
            works[f"training with {size} environments, {'graphs' if graph else 'eager'}"] = (
                lambda size=size, graph=graph: measure_training(
                    "cartpole_v1", size, use_gpu=True, candidates=False, cuda_graph=graph
                )
            )
    for name, work in works.items():
        before = time.monotonic()
        if before - start > SECONDS:
            report[name] = "no time left"
            continue
        print(name, file=sys.stderr, flush=True)
        try:
            report[name] = work()
        except Exception as error:  # the other figures count all the same
            report[name] = f"{type(error).__name__}: {error}"
        report[f"seconds of {name}"] = round(time.monotonic() - before, 1)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps({"file": str(file), "tests": report["tests"]["result"]}))
    return int(report["tests"]["exit_code"] != 0)


if __name__ == "__main__":
    sys.exit(main())
