"""What test_shards.py runs where the command line has no words for it; argument: the task, then its own.

union CONFIG FOLDER…   one process trains on several folders' rows by the plan of a cluster; writes union.safetensors
gradient CONFIG        each node's process writes the gradient that a step over all rows has, and plain averaging's
judged CONFIG          each process writes the episodes that are scored and those that models are fitted to
"""

import json
import os
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from reagent_lite.config import DqnConfig, ParametricDqnConfig, WorkflowConfig, load_config
from reagent_lite.data.sampling.plan import ReadPlan
from reagent_lite.data.sampling.source import LoggedRows, LoggedSource
from reagent_lite.distributed.group import Group, Place, joined
from reagent_lite.run.evaluators import LogEvaluator
from reagent_lite.run.learner import build_learner, build_optimization
from reagent_lite.run.logged import prepare
from reagent_lite.run.normalization import write_fitted
from reagent_lite.run.sources import logged_plan

CPU = torch.device("cpu")


def loaded(path: str) -> WorkflowConfig:
    model = DqnConfig if "actions" in json.loads(Path(path).read_text()) else ParametricDqnConfig
    return load_config(model, path)


def union(path: str, *folders: str) -> None:
    """Rows of every folder under the normalization that the cluster fitted, read as the cluster's plan has them."""
    config, group, here = loaded(path), Group(Place(), CPU), Path.cwd()
    shards: dict[int, LoggedRows] = {}
    for number, folder in enumerate(folders):
        os.chdir(folder)
        data = prepare(config, group)
        shards[number] = data.train_rows
        os.chdir(here)
    counts = tuple(rows.count for rows in shards.values())
    minibatch = config.data.global_minibatch_size
    assert minibatch is not None
    plan = ReadPlan(shards=counts, minibatch=minibatch, epochs=config.epochs, seed=config.seed,
                    minibatches_per_step=config.training.minibatches_per_step)  # fmt: skip
    source = LoggedSource(shards, plan, 0, CPU)
    learner = build_learner(config, data.spec, CPU)
    optimization = build_optimization(config, learner, captured=False)
    learner.train()
    for _ in range(plan.num_steps):
        for _ in range(plan.minibatches_per_step):
            loss, _ = learner(next(source))
            loss.backward()
        optimization.step()
        learner.after_step()
    save_file({name: value.clone() for name, value in learner.scorer.state_dict().items()}, "union.safetensors")


class Constant(torch.nn.Module):
    """Predicts one number for every reward; the loss is the weighted sum of squared errors."""

    def __init__(self) -> None:
        super().__init__()
        self.value = torch.nn.Parameter(torch.zeros(1))

    def forward(self, reward: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (weight * (self.value - reward).square()).sum()


def gradient(path: str) -> None:
    config, place = loaded(path), Place.read()
    assert place is not None
    with joined(place, CPU) as group:
        data = prepare(config, group)
        if group.is_first:
            write_fitted(config, data.normalization)
        source = LoggedSource({data.shards.own: data.train_rows}, logged_plan(config, data, 4), group.rank, CPU)
        batch, found = next(source), {}
        plain = torch.full((len(batch),), 1 / len(batch))
        for name, weight in (("weighted", batch.weight), ("plain", plain)):
            module = Constant()
            wrapped = group.wrap(module)
            wrapped(batch.reward, weight).backward()
            assert module.value.grad is not None
            found[name] = float(module.value.grad)
        print(json.dumps({"rows": len(batch), **found}))


def judged(path: str) -> None:
    config, place = loaded(path), Place.read()
    assert place is not None
    with joined(place, CPU) as group:
        data = prepare(config, group)
        evaluator = LogEvaluator(config, data, build_learner(config, data.spec, CPU), group)
        evaluator._prepared()
        scored, fitted = evaluator._split.scored, data.train.episode[evaluator._split.fitted]
        hashes = {
            "scored": np.unique(scored.episode.view(np.uint64)).tolist(),
            "scored_rows": len(scored.numbers),
            "of_all": scored.hashes.tolist(),
            "fitted": np.unique(data.train.episode_hash[fitted]).tolist(),
            "rows": len(fitted),
        }
        print(json.dumps(hashes))


if __name__ == "__main__":
    {"union": union, "gradient": gradient, "judged": judged}[sys.argv[1]](*sys.argv[2:])
