"""What collectors and a learner cost each other: one learner and two collectors, together and each by itself.

    python -m tests.benchmarks.roles [--seconds 30]

The learner has core 0, the two collectors share core 1, together and alone, so that each has the same share of the
cores. The dataset is full enough for the learner not to wait, and collectors may be as far ahead as they like. Rates
are per second of processor time, which other programs of the machine do not take, and by the wall clock. Bar: together
at least 0.9 of the frames and of the updates that they reach alone.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
from oracles.interpreters import Interpreter  # noqa: E402
from oracles.roles import Roles, role  # noqa: E402
from oracles.runs import merged  # noqa: E402

STEPS = 1_000_000
CARTPOLE = {
    "rl": {"gamma": 0.99, "tensorboard_logging_freq": 50},
    "training": {"layers": [-1, 128, 128, -1], "activations": ["relu", "relu", "linear"], "minibatch_size": 256},
    "simulation": {"env": "cartpole_v1", "num_envs": 16, "total_steps": 16 * STEPS + 5000, "warmup_steps": 5000,
                   "num_evaluations": 1},
}  # fmt: skip


def main() -> None:
    """Measures and prints one line of JSON for each stage, and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30)
    seconds = parser.parse_args().seconds
    with tempfile.TemporaryDirectory() as folder:
        roles = Roles(Path(folder))
        try:
            collectors = measured(roles, ("collect", "collect"), seconds, fill=round(16 * 600 * (seconds + 20)))
            learner = measured(roles, ("learn",), seconds)
            together = measured(roles, ("learn", "collect", "collect"), seconds)
        finally:
            roles.stop()
    alone = {**collectors, **learner}
    print(json.dumps({name: round(together[name] / alone[name], 3) for name in together}))


def measured(roles: Roles, modes: tuple[str, ...], seconds: float, fill: int = 0) -> dict[str, float]:
    """Returns frames and updates per second, by the wall clock and of processor time, of roles that run at once."""
    changes = merged(CARTPOLE, {"simulation": {"dataset": dataset(roles)}})
    out = {"model_output_path": str(roles.folder / f"out{time.monotonic()}")}
    started = [(mode, pinned(roles.start(mode, {**changes, **out}), 0 if mode == "learn" else 1)) for mode in modes]
    while (state := work(roles, out))["updates"] < 100 * ("learn" in modes) or state["frames"] < 20_000:
        time.sleep(0.5)
    time.sleep(3)
    before, spent, start = work(roles, out), processor(started), time.monotonic()
    time.sleep(seconds)
    after, now, wall = work(roles, out), processor(started), time.monotonic() - start
    while fill and work(roles, out)["frames"] < fill:
        time.sleep(0.5)
    for _, process in started:
        process.kill()
        process.wait()
    found = {}
    for mode, name in (("collect", "frames"), ("learn", "updates")):
        if mode in modes:
            done = after[name] - before[name]
            found |= {f"{name}/s": done / wall, f"{name}/s of processor": done / (now[mode] - spent[mode])}
    print(json.dumps({"roles": modes, **{name: round(rate, 1) for name, rate in found.items()}}), flush=True)
    return found


def dataset(roles: Roles) -> dict[str, Any]:
    """The dataset with so long a publishing interval that no collector waits."""
    settings: dict[str, Any] = role(roles.folder, "learn")["simulation"]["dataset"]
    return {**settings, "publish_every_steps": STEPS}


def pinned(process: Interpreter, core: int) -> Interpreter:
    """Gives a process one core."""
    os.sched_setaffinity(process.pid, {core})
    return process


def processor(started: list[tuple[str, Interpreter]]) -> dict[str, float]:
    """Processor seconds of each role so far."""
    spent: dict[str, float] = {}
    for mode, process in started:
        times = psutil.Process(process.pid).cpu_times()
        spent[mode] = spent.get(mode, 0.0) + times.user + times.system
    return spent


def work(roles: Roles, out: dict[str, str]) -> dict[str, int]:
    """Frames in the dataset, and optimizer steps of a learner."""
    names = [path.name for path in (roles.folder / "data" / "fifo").glob("0*.parquet")]
    metrics = Path(out["model_output_path"]) / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return {"frames": sum(int(name.split("-")[1]) for name in names),
            "updates": json.loads(lines[-1])["step"] if lines else 0}  # fmt: skip


if __name__ == "__main__":
    main()
