"""What collectors and a learner cost each other: one learner and two collectors, with one dataset and with two.

    python -m tests.benchmarks.roles [--seconds 20] [--repeats 3]

apart      the learner reads a dataset that is there, the collectors write to another: they only share the cores
together   all three have one dataset

Both have the same three processes on the same cores, so that their ratio is the cost of working together. There is data
enough for the learner not to wait, and collectors may be as far ahead as they like. Rates are by the wall clock and per
second of processor time, which other programs of a busy machine do not take. Bar: together at least 0.9 of the
environment steps and of the updates that they reach apart.
"""

import json
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import numpy as np
import psutil
from numpy.typing import NDArray

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
from helpers.interpreters import Interpreter  # noqa: E402
from helpers.roles import Roles  # noqa: E402
from helpers.runs import merged  # noqa: E402
from helpers.waiting import wait_until  # noqa: E402

from tests.benchmarks.turns import options_of  # noqa: E402

STEPS = 1_000_000
CARTPOLE = {
    "rl": {"gamma": 0.99, "tensorboard_logging_freq": 50},
    "training": {"layers": [-1, 128, 128, -1], "activations": ["relu", "relu", "linear"], "minibatch_size": 256},
    "simulation": {"env": "cartpole_v1", "num_envs": 16, "total_steps": 16 * STEPS + 5000, "warmup_steps": 5000,
                   "num_evaluations": 1},
}  # fmt: skip


def main() -> None:
    """Measures and prints one line of JSON for each stage, and the ratio of medians."""
    options = options_of(__doc__, seconds=20.0, repeats=3)
    figures: dict[str, list[dict[str, float]]] = {"apart": [], "together": []}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as ends:
        roles = Roles(Path(folder))
        ends.callback(roles.stop)
        filler = start(roles, "collect", "data")
        enough = 16 * 600 * (options.seconds + 20) * options.repeats
        wait_until(lambda: env_steps(roles, "data") >= enough, seconds=3600)
        filler.kill()
        for _ in range(options.repeats):
            for name in figures:
                figures[name].append(measured(roles, name, options.seconds))
                print(json.dumps({"roles": name, **figures[name][-1]}), flush=True)
    for unit in figures["apart"][0]:
        apart, together = (median([rates[unit] for rates in rounds]) for rounds in figures.values())
        print(json.dumps({unit: round(together / apart, 3)}))


def start(roles: Roles, mode: str, dataset: str, out: str = "") -> Interpreter:
    """Starts a role with so long a publishing interval that no collector waits."""
    shared = {"path": str(roles.folder / dataset), "publish_every_steps": STEPS}
    return roles.start(
        mode, merged(CARTPOLE, {"simulation": {"dataset": shared}, "model_output_path": str(roles.folder / out)})
    )


def measured(roles: Roles, name: str, seconds: float) -> dict[str, float]:
    """Returns env_steps and updates per second of roles that run at once."""
    written, out = "data" if name == "together" else "other", f"out{time.monotonic()}"
    started = [start(roles, "learn", "data", out), *(start(roles, "collect", written) for _ in range(2))]
    begun = env_steps(roles, written)
    wait_until(lambda: updates(roles, out) >= 100 and env_steps(roles, written) > begun, seconds=600)
    before = now(roles, started, written, out)
    time.sleep(seconds)
    steps, rows, elapsed, of_learner, of_collectors = now(roles, started, written, out) - before
    for process in started:
        process.kill()
    return {
        "env_steps/s": round(steps / elapsed, 1),
        "updates/s": round(rows / elapsed, 1),
        "env_steps/s of processor": round(steps / of_collectors, 1),
        "updates/s of processor": round(rows / of_learner, 1),
    }


def now(roles: Roles, started: list[Interpreter], written: str, out: str) -> NDArray[np.float64]:
    """Environment steps and updates so far, seconds, and the processor's for the learner and for collectors."""
    learner, *collectors = (sum(psutil.Process(process.pid).cpu_times()[:2]) for process in started)
    return np.array([env_steps(roles, written), updates(roles, out), time.monotonic(), learner, sum(collectors)])


def env_steps(roles: Roles, dataset: str) -> int:
    """Rows of a dataset's files."""
    return sum(int(path.name.split("-")[1]) for path in (roles.folder / dataset / "fifo").glob("0*.parquet"))


def updates(roles: Roles, out: str) -> int:
    """Optimizer steps of a learner."""
    metrics = roles.folder / out / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


if __name__ == "__main__":
    main()
