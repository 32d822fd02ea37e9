"""One optimizer step: loss by our kernel, or layers by our kernel, by torch's libraries, by torch's layers.

    python -m tests.benchmarks.steps [--repeats 9] [--threads 1]

Double DQN on random batches on the CPU: loss, gradient, fused Adam, soft update. All take turns of a quarter of a
second; medians are printed, of the ratios with their smallest and largest. The first two are
reagent_lite/algorithms/fused_loss.py, for fixed actions, and reagent_lite/models/dense.py; where the kernel leaves a
loss or layers to torch (candidates, several threads, few rows of many weights) neighbours are the same.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from unittest import mock

import torch

from reagent_lite.algorithms.dqn import DQN, DQNSettings
from reagent_lite.models import dense, q_loss_kernel, q_networks
from reagent_lite.models.q_networks import NetworkSettings, build_q_network
from reagent_lite.models.value_heads import ScalarHead
from reagent_lite.training.optimization import Optimization
from reagent_lite.types import Actions, SourceSpec, TransitionBatch

# rows, state features, hidden layers, choices, features of a candidate (0: named actions), dueling
SHAPES = [
    (32, 4, (128, 64), 2, 0, False),
    (512, 4, (128, 64), 2, 0, False),
    (512, 4, (128, 64), 2, 0, True),
    (4096, 4, (128, 64), 2, 0, False),
    (1024, 64, (256, 128), 10, 0, False),
    (1024, 64, (256, 128), 10, 0, True),
    (512, 30, (256, 128), 10, 12, False),
    (4096, 128, (512, 256), 20, 0, False),
]
TURN_SECONDS = 0.25


def step_of(
    rows: int, states: int, hidden: tuple[int, ...], choices: int, features: int, dueling: bool
) -> Callable[[], None]:
    """Returns a function that takes one optimizer step on rows that allow every choice."""
    every = torch.ones(rows, choices, dtype=torch.bool)
    return step_on(every, states=states, hidden=hidden, features=features, dueling=dueling)


def step_on(
    mask: torch.Tensor, *, states: int, hidden: tuple[int, ...], features: int, dueling: bool
) -> Callable[[], None]:
    """Returns a function that takes one optimizer step on rows that allow what a mask [rows, choices] does."""
    rows, choices = mask.shape
    names = () if features else tuple(map(str, range(choices)))
    spec = SourceSpec(num_state_features=states, num_action_features=features, action_names=names)
    shape = NetworkSettings(hidden=hidden, activations=("relu",) * len(hidden), dueling=dueling)
    network = build_q_network(spec, shape)
    learner = DQN(network, ScalarHead("mse"), DQNSettings(gamma=0.99, target_update_rate=0.1))
    candidates = torch.randn(rows, choices, features) if features else None
    actions = Actions(mask=mask, features=candidates)
    batch = TransitionBatch(
        state=torch.randn(rows, states), actions=actions, action=(torch.rand(rows) * mask.sum(1)).long(),
        reward=torch.ones(rows), steps=torch.ones(rows), bootstrap=torch.ones(rows),
        next_state=torch.randn(rows, states), next_actions=actions, next_action=torch.zeros(rows, dtype=torch.int64),
        propensity=torch.ones(rows), metrics=torch.zeros(rows, 0), weight=torch.full((rows,), 1 / rows),
    )  # fmt: skip
    parameters = list(learner.q_network.parameters())
    optimization = Optimization(optimizer=torch.optim.Adam(parameters, lr=1e-3, fused=True))

    def step() -> None:
        loss, _ = learner(batch)
        loss.backward()
        optimization.step(parameters)
        learner.after_step()

    return step


def seconds(step: Callable[[], None]) -> float:
    """Returns the seconds of a step, over a turn."""
    step()
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < TURN_SECONDS:
        step()
        count += 1
    return (time.perf_counter() - start) / count


def _spread(ratios: list[float]) -> list[float]:
    return [round(f(ratios), 2) for f in (min, statistics.median, max)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for shape in SHAPES:
        step = step_of(*shape)
        turns = []
        for _ in range(options.repeats):
            turn = [seconds(step)]
            with mock.patch.object(q_loss_kernel, "kernel_now", return_value=None):
                turn.append(seconds(step))
                with mock.patch.object(dense, "kernel_now", return_value=None):
                    turn.append(seconds(step))
                with mock.patch.object(q_networks, "runs_apply", return_value=False):
                    turn.append(seconds(step))
            turns.append(turn)
        names = ("rows", "state_features", "hidden", "choices", "candidate_features", "dueling")
        result = dict(zip(names, shape, strict=True)) | {
            "milliseconds": [round(statistics.median(column) * 1e3, 3) for column in zip(*turns, strict=True)],
            "ratio_to_layers_by_kernel": _spread([turn[1] / turn[0] for turn in turns]),
            "ratio_to_libraries": _spread([turn[2] / turn[0] for turn in turns]),
            "ratio_to_torchs_layers": _spread([turn[3] / turn[0] for turn in turns]),
        }
        json.dump(result, sys.stdout)
        print()


if __name__ == "__main__":
    main()
