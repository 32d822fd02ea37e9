"""Simulated logs made in this process and read back as arrays."""

import json
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from oracles.gridworld import Array

from reagent_lite.config import check
from reagent_lite.config.simulate_config import SimulateConfig
from reagent_lite.sim.cuda_build import cuda_problem, driver_problem
from reagent_lite.sim.kernel_sources import find_environment
from reagent_lite.tasks.simulate import SimulatedLog, simulate


def skip_without_gpu() -> None:
    """Skips a test where cartpole_v0 cannot run on a GPU."""
    problem = driver_problem() or cuda_problem(torch.device("cuda", 0), find_environment("cartpole_v0"))
    if problem is not None:
        pytest.skip(str(problem))


def made(folder: Path, **changes: Any) -> tuple[SimulatedLog, SimpleNamespace]:
    """Simulates in this process; the log as arrays of its rows.

    Its `rows` are the lines.
    """
    tree = {"env": "cartpole_v0", "output_path": str(folder / "log.jsonl"), "format": "transitions", "use_gpu": False}
    result = simulate(check(SimulateConfig, tree | changes))
    rows = [json.loads(line) for line in Path(result.log).read_text().splitlines()]
    episode, _ = pd.factorize(np.array([row["mdp_id"] for row in rows], object))
    return result, SimpleNamespace(
        rows=rows,
        state=dense(row["state_features"] for row in rows),
        action=np.array([str(row["action"]) for row in rows]),
        propensity=np.array([row["action_probability"] for row in rows], np.float32),
        terminal=np.array([row["terminal"] for row in rows]),
        truncated=np.array([row["truncated"] for row in rows]),
        position=np.array([row["sequence_number"] for row in rows]),
        episode=episode,
        lengths=np.bincount(episode),
    )


def dense(maps: Iterable[dict[str, float]]) -> Array:
    return np.array([[features[str(i)] for i in range(len(features))] for features in maps])
