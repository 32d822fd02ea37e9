"""Measure this machine: python -m workflows.benchmark --only simulation.

simulation   environment steps per second by number of environments, against a memory copy of the same bytes
training     environment steps and learned rows per second of an online run, everything included
"""

import argparse
import json
import logging
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch

from reagent_lite.cli import exit_code
from reagent_lite.config import DqnConfig, ParametricDqnConfig, check
from reagent_lite.config.environment import GYMNASIUM
from reagent_lite.console import logger
from reagent_lite.distributed.group import Group, Place
from reagent_lite.errors import ConfigError, Problem, counted
from reagent_lite.files import scratch_folder
from reagent_lite.run.train import train
from reagent_lite.sim.backend import Backend, open_backend
from reagent_lite.sim.cuda import on_stream
from reagent_lite.sim.env import VectorEnv
from reagent_lite.sim.gymnasium_env import open_envs
from reagent_lite.sim.sources import known_environments

_ROUNDS = 5
_COPIED_BYTES = 1 << 29  # read and written; larger than any cache
_ALL = tuple(2**power for power in range(0, 23, 2))

_EPILOG = """\
every figure is the median of five rounds, which take turns with copies of memory, the limit they are compared with;
standard output ends with one JSON line, the table is on standard error

figures of the simulation, in millions of environment steps per second:
  dynamics        actions given, rewards and ends written, no observations
  observed        the same with what the policy sees next
  acting          with both observations and an action drawn uniformly for each step
  copy_limit      what copying from memory to memory allows, by the bytes that a step reads and writes
  share_of_limit  dynamics / copy_limit; above 1 where all environments lie in a cache

examples:
  python -m workflows.benchmark --only simulation
  python -m workflows.benchmark --only simulation --env pendulum --num_envs 1024 262144 --device cpu
  python -m workflows.benchmark --only training --num_envs 65536
"""


def measure_simulation(backend: Backend, sizes: tuple[int, ...], seconds: float) -> list[dict[str, float]]:
    """Returns the figures of each number of environments, by the names in the help text.

    Args:
        backend: the environment.
        sizes: numbers of environments.
        seconds: duration of each round.
    """
    device = backend.device
    source = torch.ones(_COPIED_BYTES // 2, dtype=torch.uint8, device=device)
    target, uniform = torch.zeros_like(source), torch.ones(1, device=device)
    points = []
    for size in sizes:
        envs = open_envs(backend, num_envs=size)
        envs.reset()
        envs.act(None, epsilon=uniform)

        def act_and_step(envs: VectorEnv = envs) -> None:
            envs.act(None, epsilon=uniform)
            envs.step()

        works: dict[str, tuple[Callable[[], object], int]] = {
            "dynamics": (partial(envs.advance, observe=False), size),
            "observed": (envs.advance, size),
            "acting": (act_and_step, size),
            "copy_limit": (lambda: target.copy_(source), _COPIED_BYTES // envs.spec.step_bytes),
        }
        rates = dict(zip(works, _alternate(list(works.values()), seconds, device), strict=True))
        point = {name: round(rate / 1e6, 3) for name, rate in rates.items()}
        share = round(rates["dynamics"] / rates["copy_limit"], 3)
        points.append({"num_envs": size, **point, "share_of_limit": share})
        logger.info(f"{size:>9,}" + "".join(f" {figure:>12,.2f}" for figure in point.values()) + f" {share:>8.2f}")
    return points


def measure_training(
    env: str, num_envs: int, use_gpu: bool, *, candidates: bool, cuda_graph: bool = True
) -> dict[str, float]:
    """Returns rates of double DQN trained online, from the first environment step to the last update.

    Args:
        env: name or path.
        num_envs: side by side; each rollout is followed by one update on as many rows.
        use_gpu: as in the config.
        candidates: whether the environment needs the parametric workflow.
        cuda_graph: as in the config.
    """
    with scratch_folder() as folder:
        config = check(
            ParametricDqnConfig if candidates else DqnConfig,
            {
                "model_output_path": str(folder),
                "use_gpu": use_gpu,
                "rainbow": {"dueling_architecture": False},
                "training": {"layers": [-1, 128, 64, -1], "minibatch_size": min(num_envs, 65536)},
                "simulation": {
                    "env": env,
                    "num_envs": num_envs,
                    "warmup_steps": 4 * num_envs,
                    "total_steps": 404 * num_envs,
                    "num_evaluations": 2,
                    "evaluation_episodes": 2,
                    "cuda_graph": cuda_graph,
                    "replay": {"capacity": 64 * num_envs},
                },
            },
        )
        device = torch.device("cuda", 0) if use_gpu and torch.cuda.is_available() else torch.device("cpu")
        outcome = train(config, Group(Place(), device))
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    seconds = outcome.rows / outcome.rows_per_second
    steps = max(line.get("simulation/env_steps", 0) for line in lines)
    return {
        "num_envs": num_envs,
        "env_steps_per_second": round(steps / seconds),
        "learned_rows_per_second": round(outcome.rows_per_second),
    }


def _alternate(
    works: list[tuple[Callable[[], object], int]], seconds: float, device: torch.device
) -> tuple[float, ...]:
    """Returns units per second of each work, given with its units a call, as medians of rounds in turn."""
    sized = [(work, units, _count(work, seconds, device)) for work, units in works]
    rounds = [[count * units / _seconds(work, count, device) for work, units, count in sized] for _ in range(_ROUNDS)]
    return tuple(map(statistics.median, zip(*rounds, strict=True)))


def _count(work: Callable[[], object], seconds: float, device: torch.device) -> int:
    """Returns how many calls take about so long."""
    work()
    count = 1
    while (taken := _seconds(work, count, device)) < seconds / 4:
        count *= 2
    return max(round(count * seconds / taken), 1)


def _seconds(work: Callable[[], object], count: int, device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    for _ in range(count):
        work()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main(arguments: list[str] | None = None) -> int:
    """Measures what is asked for and returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m workflows.benchmark",
        description="Measure what this machine does with this package.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=("simulation", "training"),
        default=("simulation", "training"),
        help="what to measure; absent: everything",
    )
    parser.add_argument(
        "--env", default="cartpole_v1", help=f"a .cuh file, gymnasium:name, or one of {', '.join(known_environments())}"
    )
    parser.add_argument(
        "--num_envs",
        type=int,
        nargs="+",
        default=None,
        metavar="N",
        help="numbers of environments; absent: 1 to 4 194 304; training 16 384; Python 64",
    )
    parser.add_argument(
        "--device", choices=("auto", "cuda", "cpu"), default="auto", help="auto: the GPU if there is one"
    )
    parser.add_argument("--seconds", type=float, default=0.2, help="duration of each round (default: 0.2)")
    options = parser.parse_args(arguments)
    return exit_code(lambda: _measure(options))


def _measure(options: argparse.Namespace) -> int:
    gpu = torch.cuda.is_available() and options.device != "cpu"
    if options.device == "cuda" and not gpu:
        raise ConfigError(Problem("--device", "cpu on this machine", "cuda", "There is no GPU that torch can use"))
    if any(size < 1 for size in options.num_envs or ()):
        raise ConfigError(Problem("--num_envs", "at least 1", str(min(options.num_envs))))
    device = torch.device("cuda", 0) if gpu else torch.device("cpu")
    name = torch.cuda.get_device_name(0) if gpu else f"cpu, {counted(torch.get_num_threads(), 'thread')}"
    logger.info(f"{options.env} on {name}, torch {torch.__version__}")
    if options.env.startswith(GYMNASIUM):  # more of them are no faster
        options.num_envs = options.num_envs or [64]
    backend = open_backend(options.env, backend="auto", device=device, parameters={}, math="exact")
    result: dict[str, object] = {"env": options.env, "device": name, "torch": torch.__version__}
    if "simulation" in options.only:
        logger.info("millions of environment steps per second")
        logger.info(f"{'envs':>9} {'dynamics':>12} {'observed':>12} {'acting':>12} {'copy limit':>12} {'share':>8}")
        with on_stream(device):
            points = measure_simulation(backend, tuple(options.num_envs or _ALL), options.seconds)
        result["simulation"] = points
    if "training" in options.only:
        logger.setLevel(logging.ERROR)  # a run would give advice, and name a report that is removed
        result["training"] = [
            measure_training(options.env, size, gpu, candidates=backend.spec.candidates)
            for size in options.num_envs or (16384,)
        ]
    print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
