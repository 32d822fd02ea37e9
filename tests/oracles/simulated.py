"""Simulated logs made in this process and read back as arrays."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from reagent_lite.config import check
from reagent_lite.config.simulate import SimulateConfig
from reagent_lite.sim.cuda_build import cuda_problem, driver_problem
from reagent_lite.sim.sources import find_environment
from reagent_lite.tasks.simulate import SimulatedLog, simulate

Array = NDArray[np.float64]


def skip_without_gpu() -> None:
    """Skips a test where cartpole_v0 cannot run on a GPU."""
    problem = driver_problem() or cuda_problem(torch.device("cuda", 0), find_environment("cartpole_v0"))
    if problem is not None:
        pytest.skip(str(problem))


def made(folder: Path, **changes: Any) -> tuple[SimulatedLog, "Log"]:
    """Simulates in this process and reads the log back."""
    tree = {"env": "cartpole_v0", "output_path": str(folder / "log.jsonl"), "format": "transitions", "use_gpu": False}
    result = simulate(check(SimulateConfig, tree | changes))
    return result, Log.read(Path(result.log))


@dataclass(frozen=True)
class Log:
    """A log of JSON lines as arrays; `rows` are the lines."""

    rows: list[dict[str, Any]]
    state: Array
    action: NDArray[np.str_]
    propensity: NDArray[np.float32]
    terminal: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    episode: NDArray[np.int64]
    position: NDArray[np.int64]

    @classmethod
    def read(cls, file: Path) -> "Log":
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        names: dict[str, int] = {}
        return cls(
            rows=rows,
            state=dense(row["state_features"] for row in rows),
            action=np.array([str(row["action"]) for row in rows]),
            propensity=np.array([row["action_probability"] for row in rows], np.float32),
            terminal=np.array([row["terminal"] for row in rows]),
            truncated=np.array([row["truncated"] for row in rows]),
            episode=np.array([names.setdefault(row["mdp_id"], len(names)) for row in rows]),
            position=np.array([row["sequence_number"] for row in rows]),
        )

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.bincount(self.episode)

    @property
    def ids(self) -> list[tuple[str, int, int]]:
        """(what was played, environment, number) of each episode, in the file's order."""
        parts = [name.split("-") for name in dict.fromkeys(row["mdp_id"] for row in self.rows)]
        return [(played, int(env), int(number)) for played, env, number in parts]


def dense(maps: Iterable[dict[str, float]]) -> Array:
    return np.array([[features[str(i)] for i in range(len(features))] for features in maps])
