"""A run that never stops, and the same run stopped after every step and started again: what differs between them."""

import json
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from helpers.interpreters import Interpreter, python_path
from helpers.logs import random_rows, write_lines, written
from helpers.runs import ROOT, Tree, checked, merged, metrics, over_candidates, with_config
from helpers.runs import end as end
from oracles import cartpole
from oracles.team import TEAM
from safetensors.torch import load_file

from reagent_lite.config import expand_config
from reagent_lite.distributed.group import Group
from reagent_lite.run.environments import with_actions, with_image
from reagent_lite.run.resolved import Resolved, resolve
from reagent_lite.run.runner import Run
from reagent_lite.training.checkpoint_folder import CheckpointFolder
from reagent_lite.training.metrics import JsonLines, MetricsWriter
from reagent_lite.training.resume import History
from reagent_lite.training.stop import StopSignal


@dataclass(frozen=True)
class End:
    """What a run came to; but for the steps, empty on ranks other than 0."""

    steps: int
    tensors: dict[str, torch.Tensor]
    lines: list[Tree]
    scores: dict[str, float | None]


class Laboratory:
    """Runs of one config, which read their data once and differ in their folder."""

    def __init__(self, tree: Tree, group: Group, root: Path) -> None:
        self.group, self.root, self._tree = group, root, tree
        self._resolved: Resolved | None = None

    def run(self, name: str, **checkpoint: Any) -> End:
        """Learns to the end in the folder `name`, from what stands there."""
        folder, group = self.root / name, self.group
        checkpoint = {**self._tree.get("checkpoint", {}), **checkpoint}
        config = checked({**self._tree, "model_output_path": str(folder), "checkpoint": checkpoint})
        folder.mkdir(parents=True, exist_ok=True)
        self._resolved = self._resolved or resolve(config, group)
        if self._resolved.simulation is not None:
            config = with_image(with_actions(config, self._resolved.simulation), self._resolved.simulation)
        history = History.find(config, group, folder / "checkpoints")
        history = replace(history, config=history.config.with_numbers_of(expand_config(self._resolved.config)))
        with StopSignal() as signal, MetricsWriter(lines=history.lines, figures=history.figures) as writer:
            writer.add([JsonLines(folder, lines=history.lines)] if group.is_first else [])
            learned = Run(replace(self._resolved, history=history), signal).learn(writer)
        steps = learned.position.step
        return End(steps, *read(folder), learned.scores) if group.is_first else End(steps, {}, [], {})

    def copy(self, name: str, to: str, step: int) -> None:
        """Makes the folder that a run leaves which was killed right after saving a step."""
        if self.group.is_first:
            source, target = self.root / name, self.root / to
            shutil.rmtree(target, ignore_errors=True)
            checkpoint = Path("checkpoints") / f"step_{step:06d}"
            shutil.copytree(source / checkpoint, target / checkpoint)
            shutil.copy(source / "metrics.jsonl", target)
        self.group.barrier()

    def resume_twice(self, step: int) -> list[End]:
        """Returns the ends of two runs that go on after the same step: Gymnasium's episodes begin again."""
        self.run("whole", every_steps=1, keep=1000)
        ends = []
        for _ in range(2):
            self.copy("whole", "again", step)
            ends.append(self.run("again"))
        return ends

    def differences(self, steps: list[int]) -> list[str]:
        """Returns what differs at the end of runs that were stopped after each of these steps."""
        whole, texts = self.run("whole", every_steps=1, keep=1000), []
        for step in (step for step in steps if step <= whole.steps):
            self.copy("whole", "again", step)
            texts += [f"stopped after {step}: {text}" for text in different(whole, self.run("again"))]
        return texts


def differences_of_cases(group: Group, cases: str) -> dict[str, list[str]]:
    """Returns the differences of each case in a file {name: {"tree": …, "steps": …}}, whose folder has theirs."""
    return {
        name: Laboratory(case["tree"], group, Path(cases).parent / name).differences(case["steps"])
        for name, case in json.loads(Path(cases).read_text()).items()
    }


def read(folder: Path) -> tuple[dict[str, torch.Tensor], list[Tree]]:
    """Returns all tensors of the newest checkpoint, and the lines of metrics without times."""
    checkpoint = folder / "checkpoints" / CheckpointFolder(folder / "checkpoints").names()[0]
    tensors = {
        f"{file.name}:{name}": tensor
        for file in sorted(checkpoint.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }
    return tensors, [
        {key: value for key, value in line.items() if not key.startswith(("time/", "rate/"))}
        for line in metrics(folder)
    ]


def different(whole: End, again: End) -> list[str]:
    """Returns phrases for every bit that is not the same."""
    texts = [
        f"tensor {name}"
        for name in sorted(whole.tensors.keys() | again.tensors.keys())
        if bits(whole.tensors.get(name)) != bits(again.tensors.get(name))
    ]
    if whole.lines != again.lines:
        texts.append(f"metrics: {[line['step'] for line in whole.lines]} {[line['step'] for line in again.lines]}")
    if whole.scores != again.scores:
        texts.append("scores")
    return texts


def bits(tensor: torch.Tensor | None) -> object:
    return None if tensor is None else (tensor.shape, tensor.numpy().tobytes())


def logged(folder: Path, **sections: Tree) -> Tree:
    """200 random rows, 7 steps an epoch; the policy is judged, and models of it are fitted, after each."""
    return merged({
        "training_data_path": str(write_lines(folder / "data" / "log.jsonl", random_rows(200))),
        "use_gpu": False,
        "actions": ["a", "b"],
        "epochs": 3,
        "training": {"layers": [-1, 8, -1], "activations": ["relu", "linear"], "minibatch_size": 32},
        "evaluation": {"calc_cpe_in_training": True, "bootstrap_resamples": 100, "learn_from_scored": True,
                       "models": {"fit_passes": 1, "final_fit_passes": 1}},
    }, sections)  # fmt: skip


def with_ids(folder: Path, **sections: Tree) -> Tree:
    """`logged` with one of 20 users, listed, and up to three of 30 items, hashed, in each state."""
    rows = random_rows(200)
    for number, row in enumerate(rows):
        for name, shift in (("state_features", 0), ("next_state_features", 1)):
            seen = [f"i{(number + shift) * step % 30}" for step in range(1, number % 4 + 1)]
            row[name] = {**row[name], "user": f"u{(number + shift) % 20}", "seen": seen}
    tables = {"user": {"dim": 4, "max_ids": 15}, "seen": {"dim": 3, "length": 2, "buckets": 10}}
    return merged(
        merged(logged(folder), {"training_data_path": str(write_lines(folder / "data" / "ids.jsonl", rows))}),
        {"data": {"embeddings": tables}, **sections},
    )


def decisions(folder: Path, **sections: Tree) -> Tree:
    """800 random rows, 12 steps an epoch, with gamma 0; the best epoch's state is kept."""
    return merged(logged(folder), {
        "training_data_path": str(write_lines(folder / "data" / "decisions.jsonl", random_rows(800))),
        "rl": {"gamma": 0.0},
        "training": {"minibatch_size": 64, "learning_rate": 0.05},
        "checkpoint": {"keep_best": True},
        **sections,
    })  # fmt: skip


def simulated(folder: Path, **sections: Tree) -> Tree:
    return merged({
        "use_gpu": False,
        "rl": {"gamma": 0.9, "target_update_rate": 0.1, "epsilon": 0.1},
        "training": {"layers": [-1, 16, -1], "activations": ["relu", "linear"], "minibatch_size": 32},
        "simulation": {"env": "cartpole_v0", "num_envs": 8, "total_steps": 300, "warmup_steps": 100,
                       "num_evaluations": 2, "evaluation_episodes": 4},
    }, sections)  # fmt: skip


def agents(folder: Path, **sections: Tree) -> Tree:
    """Two types of agents that learn, some of which leave before the others."""
    env = {"env": str(written(folder / "team.cuh", TEAM)), "env_parameters": {"size": 3},
           "replay": {"prioritized": True, "capacity": 400}}  # fmt: skip
    return merged(simulated(folder, rl={"multi_steps": 2}, training={"clip_grad_norm": 1.0}, simulation=env), sections)


def mixed(folder: Path, **sections: Tree) -> Tree:
    """300 logged rows of cartpole beside its simulation."""
    cartpole.write_log(folder / "cartpole.jsonl", 300)
    simulation = {"env": "cartpole_v0", "num_envs": 8, "warmup_steps": 100, "evaluation_episodes": 4, "share": 0.25,
                  "updates_per_rollout": 2, "replay": {"prioritized": True, "capacity": 200}}  # fmt: skip
    return merged(
        logged(folder)
        | {"training_data_path": str(folder / "cartpole.jsonl"), "actions": ["left", "right"]}
        | {"simulation": simulation},
        sections,
    )


def candidates(folder: Path, **sections: Tree) -> Tree:
    return merged(logged(folder, **sections), over_candidates(folder))


def start(folder: Path, tree: Tree, *settings: str, **environment: str) -> Interpreter:
    """Starts `python -m workflows.dqn` with a checkpoint every three steps."""
    saving = {"every_steps": 3, **tree.get("checkpoint", {})}
    config = {"model_output_path": str(folder / "out"), **tree, "checkpoint": saving}
    sets = [part for setting in settings for part in ("--set", setting)]
    variables = {"PYTHONPATH": python_path(ROOT), "XDG_CACHE_HOME": str(folder / "cache"), **environment}
    return Interpreter(["-m", "workflows.dqn", *with_config(folder, config), *sets], env={**os.environ, **variables})


def checkpoints(folder: Path, out: str = "out") -> list[str]:
    return sorted(path.name for path in (folder / out / "checkpoints").glob("step_*"))
