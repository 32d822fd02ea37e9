"""Collectors and learners of one dataset: configs, and processes that tests start, kill and wait for."""

import os
from pathlib import Path
from typing import Any

from helpers.interpreters import Interpreter, python_path
from helpers.logs import write_json
from helpers.runs import ROOT, Run, Tree, end, merged

from reagent_lite.data.episode_folder import EpisodeFolder


def role(folder: Path, mode: str, **simulation: Any) -> Tree:
    """Returns a config of a small run on the gridworld; the dataset is data and the model out of the folder."""
    return {
        "model_output_path": str(folder / "out"),
        "use_gpu": False,
        "rl": {"gamma": 0.9, "target_update_rate": 0.1, "epsilon": 0.1, "multi_steps": 2},
        "rainbow": {"dueling_architecture": False},
        "training": {"layers": [-1, 16, -1], "activations": ["relu", "linear"], "minibatch_size": 64},
        "simulation": {"mode": mode, "env": "gridworld", "num_envs": 8, "total_steps": 6000, "warmup_steps": 1000,
                       "num_evaluations": 2, "evaluation_episodes": 10,
                       "dataset": {"path": str(folder / "data"), "publish_every_steps": 50}, **simulation},
    }  # fmt: skip


def whole_files(folder: Path) -> int:
    """Environment steps of all published files, each of which is whole, with as many as its name says."""
    shared = EpisodeFolder(folder / "data")
    for file in shared.files():
        origin, steps = shared.origin(file.name)
        *_, last = shared.rows(file.name, tuple(origin["actions"]))
        assert steps == file.steps
        assert last.bootstrap[-1] == 0 or last.truncated[-1]
    return sum(file.steps for file in shared.files())


class Roles:
    """Starts `workflows.dqn` as different roles; all of them end with the test.

    Attributes:
        namespaces_of: a process whose mounts they see, or None.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.started = folder, list[Interpreter]()
        self.namespaces_of: int | None = None

    def start(self, mode: str, changes: Tree | None = None, *arguments: str) -> Interpreter:
        """Starts one, with changes of its config by section."""
        tree = merged(role(self.folder, mode), changes or {})
        config = write_json(self.folder / f"{mode}{len(self.started)}.json", tree)
        environment = {**os.environ, "PYTHONPATH": python_path(ROOT), "OMP_NUM_THREADS": "1"}
        process = Interpreter(["-m", "workflows.dqn", "--config", str(config), *arguments], cwd=self.folder,
                              env=environment, namespaces_of=self.namespaces_of)  # fmt: skip
        self.started.append(process)
        return process

    def end(self, process: Interpreter, code: int = 0) -> Run:
        """Waits for the end of one, by an exit code."""
        done = end(process)
        assert done.code == code, done.err
        return done

    def stop(self) -> None:
        """Kills all that still run."""
        for process in self.started:
            process.kill()
