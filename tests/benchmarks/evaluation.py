"""Time and memory of workflows.evaluate with a policy in a column, when all rows of a log are scored.

    python -m tests.benchmarks.evaluation [--rows 1000000] [--episodes 100000] [--steps 10] [--repeats 1]
                                          [--base PATH]

A Parquet log of so many one-step rows, and one of so many episodes of `steps` rows; two actions, three features, the
policy's probability of the logged action in a column. The whole process is timed: imports, reading, estimates and
report. `--base`: another tree of this project, which takes turns with this one; the largest relative difference of its
estimates, and of the ends of its intervals relative to their width, is shown.
"""

import json
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.benchmarks.turns import ROOT, Finished, options_of, run, show, write_config


def write_log(file: Path, episodes: int, steps: int) -> None:
    """Writes a log of clicks whose policy divides its choices otherwise than the logger does."""
    rng = np.random.default_rng(0)
    rows = episodes * steps
    state = rng.normal(size=(rows, 3)).astype(np.float32)
    chance = 0.2 + 0.6 / (1 + np.exp(-state[:, 0]))
    wanted = 0.7 * chance + 0.3 * (state[:, 1] > 0)
    second = rng.random(rows) < chance
    columns: dict[str, object] = {
        **{f"f{number}": state[:, number] for number in range(3)},
        "action": pa.array(np.where(second, "b", "a")),
        "reward": (rng.random(rows) < 0.02 + 0.02 * (second == (state[:, 1] > 0))).astype(np.float32),
        "action_probability": np.where(second, chance, 1 - chance).astype(np.float32),
        "wanted": np.where(second, wanted, 1 - wanted).astype(np.float32),
    }
    if steps > 1:
        columns["mdp_id"] = pa.array(np.repeat(np.arange(episodes), steps).astype(str))
        columns["sequence_number"] = np.tile(np.arange(steps), episodes)
    pq.write_table(pa.table(columns), file)


def evaluate(root: Path, folder: Path, log: Path, gamma: float) -> tuple[Finished, dict[str, float]]:
    """Returns the process of a tree, and its figures by name."""
    target = folder / "evaluation.json"
    tree = {
        "model": "column:wanted", "data_path": str(log), "actions": ["a", "b"], "gamma": gamma,
        "output_path": str(target), "columns": {"state_features": ["f0", "f1", "f2"]},
        "training_copy_dir": str(folder / "copy"), "evaluation": {"max_episodes": 2**31},
    }  # fmt: skip
    folder.mkdir()
    finished = run("-m", "workflows.evaluate", "--config", write_config(folder, tree), PYTHONPATH=str(root), root=root)
    return finished, dict(_numbers("", json.loads(target.read_text())["model"]["cpe"]))


def _numbers(name: str, value: object) -> Iterator[tuple[str, float]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in items:
        yield from _numbers(f"{name}/{key}", part)
    if isinstance(value, float) and math.isfinite(value):
        yield name, value


def differences(figures: dict[str, float], base: dict[str, float]) -> dict[str, float]:
    """Returns the largest relative differences of estimates, and of ends of intervals to their widths."""
    ends = {"/low", "/high"}
    largest = {"estimates": 0.0, "ends": 0.0}
    for name, value in figures.items():
        if name not in base:
            continue
        parent, _, leaf = name.rpartition("/")
        is_end = f"/{leaf}" in ends
        scale = figures[f"{parent}/high"] - figures[f"{parent}/low"] if is_end else abs(base[name])
        error = abs(value - base[name]) / scale if scale else 0.0
        largest["ends" if is_end else "estimates"] = max(largest["ends" if is_end else "estimates"], error)
    return largest


if __name__ == "__main__":
    options = options_of(__doc__, rows=1_000_000, episodes=100_000, steps=10, repeats=1, base="")
    roots = {"this": ROOT} | ({"base": Path(options.base)} if options.base else {})
    logs = {"one_step_rows": (options.rows, 1, 0.0), "episodes": (options.episodes, options.steps, 0.99)}
    result: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as name:
        for kind, (episodes, steps, gamma) in logs.items():
            if not episodes:
                continue
            log = Path(name) / f"{kind}.parquet"
            write_log(log, episodes, steps)
            measured: dict[str, list[tuple[Finished, dict[str, float]]]] = {tree: [] for tree in roots}
            for repeat in range(options.repeats):
                for tree, root in roots.items():
                    measured[tree].append(evaluate(root, Path(name) / f"{kind}_{tree}_{repeat}", log, gamma))
            figures = {
                tree: {
                    "seconds": [round(finished.seconds, 1) for finished, _ in runs],
                    "processor_seconds": [round(finished.busy, 1) for finished, _ in runs],
                    "peak_megabytes": [round(finished.peak / 1e6) for finished, _ in runs],
                }
                for tree, runs in measured.items()
            }
            if options.base:
                figures["difference"] = differences(measured["this"][0][1], measured["base"][0][1])  # type: ignore[assignment]
            result[kind] = figures
    show(result)
