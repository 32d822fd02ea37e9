"""One optimizer step with layers by our kernel (reagent_lite/models/dense.py), by torch's libraries, by torch's layers.

    python -m tests.benchmarks.steps [--repeats 9] [--threads 1]

Double DQN on random batches on the CPU: loss, gradient, fused Adam, soft update. All take turns of a quarter of a
second; medians are printed, of the ratios with their smallest and largest. Where the kernel leaves the layers to
libraries (several threads, few rows of many weights) both are the same.
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
from reagent_lite.models import dense, q_networks
from reagent_lite.models.q_networks import NetworkSettings, build_q_network
from reagent_lite.models.value_heads import ScalarHead
from reagent_lite.training.optimization import Optimization
from reagent_lite.types import Actions, SourceSpec, TransitionBatch

# rows, state features, hidden layers, choices, features of a candidate (0: named actions)
SHAPES = [
    (32, 4, (128, 64), 2, 0),
    (512, 4, (128, 64), 2, 0),
    (4096, 4, (128, 64), 2, 0),
    (1024, 64, (256, 128), 10, 0),
    (512, 30, (256, 128), 10, 12),
    (4096, 128, (512, 256), 20, 0),
]
TURN_SECONDS = 0.25


def step_of(rows: int, states: int, hidden: tuple[int, ...], choices: int, features: int) -> Callable[[], None]:
    """Returns a function that takes one optimizer step."""
    names = () if features else tuple(map(str, range(choices)))
    spec = SourceSpec(num_state_features=states, num_action_features=features, action_names=names)
    network = build_q_network(spec, NetworkSettings(hidden=hidden, activations=("relu",) * len(hidden)))
    learner = DQN(network, ScalarHead("mse"), DQNSettings(gamma=0.99, target_update_rate=0.1))
    candidates = torch.randn(rows, choices, features) if features else None
    actions = Actions(mask=torch.ones(rows, choices, dtype=torch.bool), features=candidates)
    batch = TransitionBatch(
        state=torch.randn(rows, states), actions=actions, action=torch.randint(0, choices, (rows,)),
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
    for rows, states, hidden, choices, features in SHAPES:
        step = step_of(rows, states, hidden, choices, features)
        turns = []
        for _ in range(options.repeats):
            ours = seconds(step)
            with mock.patch.object(dense, "kernel", return_value=None):
                libraries = seconds(step)
            with mock.patch.object(q_networks, "runs_apply", return_value=False):
                turns.append((ours, libraries, seconds(step)))
        result = {
            "rows": rows, "state_features": states, "hidden": hidden, "choices": choices,
            "candidate_features": features,
            "milliseconds": [round(statistics.median(column) * 1e3, 3) for column in zip(*turns, strict=True)],
            "ratio_to_libraries": _spread([libraries / ours for ours, libraries, _ in turns]),
            "ratio_to_torchs_layers": _spread([plain / ours for ours, _, plain in turns]),
        }  # fmt: skip
        json.dump(result, sys.stdout)
        print()


if __name__ == "__main__":
    main()
