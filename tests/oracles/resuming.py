"""A run that never stops, and the same run stopped after every step and started again: what differs between them."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from reagent_lite.config import ParametricDqnConfig, WorkflowConfig, check
from reagent_lite.distributed.group import Group
from reagent_lite.training.checkpoint_shelf import Shelf
from reagent_lite.training.metrics import MetricsWriter
from reagent_lite.training.stop import StopSignal
from workflows.continuing import look_back
from workflows.experience import Experience, gather_experience
from workflows.simulation import open_simulation, with_actions
from workflows.training import learn

Tree = dict[str, Any]


@dataclass(frozen=True)
class End:
    """What a run came to; on rank 0, empty elsewhere."""

    tensors: dict[str, torch.Tensor]
    lines: list[Tree]
    scores: dict[str, float]


class Laboratory:
    """Runs of one config, which read their data once and differ in their folder."""

    def __init__(self, model: type[WorkflowConfig], tree: Tree, group: Group, root: Path) -> None:
        self.group, self.root, self._model, self._tree = group, root, model, tree
        self._experience: Experience | None = None

    def run(self, name: str, **checkpoint: Any) -> End:
        """Learns to the end in the folder `name`, from what stands there."""
        folder, group = self.root / name, self.group
        config = check(self._model, {**self._tree, "model_output_path": str(folder), "checkpoint": checkpoint})
        if self._experience is None:
            simulation = None
            if config.simulation is not None:
                simulation = open_simulation(config, group, parametric=self._model is ParametricDqnConfig)
            (folder / "x").mkdir(parents=True, exist_ok=True)
            self._experience = gather_experience(
                with_actions(config, simulation) if simulation else config, group, simulation
            )
        experience = self._experience
        if experience.simulation is not None:
            config = with_actions(config, experience.simulation)
        history = look_back(config, group, folder / "checkpoints")
        with StopSignal() as signal, MetricsWriter(folder, enabled=group.is_first, lines=history.lines) as writer:
            learned = learn(config, group, experience, history, signal, writer)
            scores = learned.scores(learned.judges.at_end())
        return End(*read(folder), scores) if group.is_first else End({}, [], {})

    def copy(self, name: str, to: str, step: int) -> None:
        """Makes the folder that a run leaves which was killed right after saving a step."""
        if self.group.is_first:
            source, target = self.root / name, self.root / to
            shutil.rmtree(target, ignore_errors=True)
            checkpoint = Path("checkpoints") / f"step_{step:06d}"
            shutil.copytree(source / checkpoint, target / checkpoint)
            shutil.copy(source / "metrics.jsonl", target)
        self.group.barrier()

    def differences(self, steps: list[int]) -> list[str]:
        """Returns what differs at the end of runs that were stopped after each of these steps."""
        whole, found = self.run("whole", every_steps=1, keep=1000), []
        for step in steps:
            self.copy("whole", "again", step)
            found += [f"stopped after {step}: {text}" for text in different(whole, self.run("again"))]
        return found


def read(folder: Path) -> tuple[dict[str, torch.Tensor], list[Tree]]:
    """Returns all tensors of the newest checkpoint, and the lines of metrics without times."""
    checkpoint = folder / "checkpoints" / Shelf(folder / "checkpoints").names()[0]
    tensors = {
        f"{file.name}:{name}": tensor
        for file in sorted(checkpoint.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return tensors, [{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines]


def different(whole: End, again: End) -> list[str]:
    """Returns phrases for every bit that is not the same."""
    texts = [f"tensor {name} only in one" for name in whole.tensors.keys() ^ again.tensors.keys()]
    for name, tensor in whole.tensors.items():
        other = again.tensors.get(name)
        if other is not None and not (tensor.shape == other.shape and bits(tensor).equal(bits(other))):
            texts.append(f"tensor {name}")
    if whole.lines != again.lines:
        texts.append(f"metrics: {[line['step'] for line in whole.lines]} {[line['step'] for line in again.lines]}")
    if whole.scores != again.scores:
        texts.append("scores")
    return texts


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
