"""Runs of workflows: as a user does by a JSON file and a command line, or trained in this process."""

import json
import os
from collections.abc import Callable, Container
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.interpreters import FORKED_WORKERS, Interpreter, python_path
from helpers.logs import candidate_rows, random_rows, write_json, write_lines

from reagent_lite.config import DqnConfig, ParametricDqnConfig, WorkflowConfig, check
from reagent_lite.distributed.group import Group, ProcessRanks
from reagent_lite.run.output_folder import TrainResult
from reagent_lite.run.runner import train

Tree = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]
ALONE = Group(ProcessRanks(), torch.device("cpu"))


def checked(tree: Tree, workflow: str | None = None) -> WorkflowConfig:
    """Returns the config of a workflow; by default, that for candidates if the tree has a log and no actions."""
    named = "actions" in tree or "training_data_path" not in tree if workflow is None else workflow == "dqn"
    return check(DqnConfig if named else ParametricDqnConfig, tree)


def trained(tree: Tree, workflow: str | None = None) -> TrainResult:
    """Trains in this process, without a command line."""
    return train(checked(tree, workflow), ALONE)


def merged(tree: Tree, other: Tree) -> Tree:
    """Returns a config whose sections have the other's keys; a key that is None in the other is left out."""
    return {
        key: {**tree.get(key, {}), **value} if isinstance(value, dict) else value
        for key, value in {**tree, **other}.items()
        if value is not None
    }


def with_config(folder: Path, tree: Tree) -> list[str]:
    """Writes a config into a folder; returns the arguments of a command with it."""
    return ["--config", str(write_json(folder / "config.json", tree))]


@dataclass(frozen=True)
class Run:
    """A finished run."""

    code: int
    out: str
    err: str

    @property
    def outcome(self) -> dict[str, Any]:
        """The last line of standard output."""
        return json.loads(self.out.splitlines()[-1])

    @property
    def ok(self) -> "Run":
        """This run, which has ended without an error."""
        assert self.code == 0, self.err
        return self


def end(process: Interpreter, timeout: float = 240) -> Run:
    """Waits for the end of a process, and kills it where that takes longer."""
    try:
        out, err = process.communicate(timeout)
    finally:
        process.kill()
    return Run(process.wait(), out, err)


Runner = Callable[..., Run]


@pytest.fixture
def run(tmp_path: Path) -> Runner:
    """run(workflow, config tree, *arguments): a process of its own, as on the command line."""

    def start(workflow: str, tree: Tree, *arguments: str, timeout: float = 240) -> Run:
        command = ["-m", f"workflows.{workflow}", *with_config(tmp_path, tree), *arguments]
        environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": python_path(ROOT),
                       FORKED_WORKERS: "1"}  # fmt: skip
        return end(Interpreter(command, cwd=tmp_path, env=environment), timeout)

    return start


def quick(data: Path, out: Path, /, **sections: Any) -> Tree:
    """A config over a log of actions a and b that trains in a moment, with other sections."""
    return merged({
        "training_data_path": str(data), "model_output_path": str(out), "use_gpu": False, "actions": ["a", "b"],
        "training": {"layers": [-1, 8, -1], "activations": ["relu", "linear"], "minibatch_size": 32},
        # all rows count
        "evaluation": {"bootstrap_resamples": 100, "models": {"final_fit_passes": 1}, "learn_from_scored": True},
    }, sections)  # fmt: skip


def metrics(folder: Path) -> list[Tree]:
    """Returns the lines of an output folder's metrics."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def absent(words: Container[str], *expected: str) -> list[str]:
    """Returns what a text, or a list of them, does not have of what is expected."""
    return [text for text in expected if text not in words]


def over_candidates(folder: Path) -> Tree:
    """Changes of a config over named actions: it is over 200 rows of candidates."""
    return {"actions": None, "training_data_path": str(write_lines(folder / "candidates.jsonl", candidate_rows(200)))}


@pytest.fixture
def small(tmp_path: Path) -> Tree:
    """A config over 200 random rows."""
    return quick(
        write_lines(tmp_path / "data" / "log.jsonl", random_rows(200)),
        tmp_path / "out",
        epochs=2,
        evaluation={"calc_cpe_in_training": False},
    )
