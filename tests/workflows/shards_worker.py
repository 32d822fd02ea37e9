"""What test_shards.py runs in every process of a cluster where the command line has no words for it: a task, a config.

gradient   writes the gradient that a step over the rows of all machines has, and the one of plain averaging
scored     writes the episodes that are scored and those that models are fitted to
"""

import json
import sys

import numpy as np
import torch

from reagent_lite.config import DqnConfig, load_config
from reagent_lite.data.sampling.source import LoggedSource
from reagent_lite.distributed.group import Group, Place, joined
from reagent_lite.run.evaluators import LogEvaluator
from reagent_lite.run.learner import build_learner
from reagent_lite.run.logged import Data, prepare
from reagent_lite.run.sources import logged_plan


class Constant(torch.nn.Module):
    """Predicts one number for every reward; the loss is the weighted sum of squared errors."""

    def __init__(self) -> None:
        super().__init__()
        self.value = torch.nn.Parameter(torch.zeros(1))

    def forward(self, reward: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (weight * (self.value - reward).square()).sum()


def gradient(config: DqnConfig, data: Data, group: Group) -> dict[str, float]:
    source = LoggedSource(data.train_rows, logged_plan(config, data, 4), group.rank, group.device)
    batch = next(source)
    found: dict[str, float] = {"rows": len(batch)}
    for name, weight in (("weighted", batch.weight), ("plain", torch.full((len(batch),), 1 / len(batch)))):
        module = Constant()
        wrapped = group.wrap(module)  # averages as long as it lives
        wrapped(batch.reward, weight).backward()
        assert module.value.grad is not None
        found[name] = float(module.value.grad)
    return found


def scored_episodes(config: DqnConfig, data: Data, group: Group) -> dict[str, object]:
    evaluator = LogEvaluator(config, data, build_learner(config, data.spec, group.device), group)
    evaluator._prepared()
    scored, fitted = evaluator._divided.scored, data.train.episode[evaluator._divided.fitted]
    return {
        "scored": np.unique(scored.episode.view(np.uint64)).tolist(),
        "scored_rows": len(scored.numbers),
        "of_all": scored.hashes.tolist(),
        "fitted": np.unique(data.train.episode_hash[fitted]).tolist(),
        "rows": len(fitted),
    }


if __name__ == "__main__":
    task, path = sys.argv[1:]
    place = Place.read()
    assert place is not None
    with joined(place, torch.device("cpu")) as everybody:
        read = load_config(DqnConfig, path)
        print(
            json.dumps(
                {"gradient": gradient, "scored": scored_episodes}[task](read, prepare(read, everybody), everybody)
            )
        )
