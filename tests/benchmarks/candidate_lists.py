"""One optimizer step on lists of candidates that differ in length: padding left out against padding computed.

    python -m tests.benchmarks.candidate_lists [--repeats 5]

512 rows, 30 state features, 12 of a candidate, hidden layers 256 and 128; loss, gradient, Adam and soft update on one
thread. Both take turns of a quarter of a second; medians of the ratios with their smallest and largest.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from unittest import mock

import torch
from torch import Tensor

from reagent_lite.algorithms.dqn import DQN, DQNSettings
from reagent_lite.models import q_networks
from reagent_lite.models.q_networks import NetworkSettings, build_q_network
from reagent_lite.models.value_heads import ScalarHead
from reagent_lite.training.loop import Optimization
from reagent_lite.types import Actions, SourceSpec, TransitionBatch

ROWS = 512
TURN_SECONDS = 0.25


def lengths(kind: str, generator: torch.Generator) -> Tensor:
    """Returns [ROWS] numbers of candidates."""
    share = torch.rand(ROWS, generator=generator)
    return {
        "all 10": torch.full((ROWS,), 10),
        "1 to 7": 1 + (7 * share).long(),
        "1 to 30": 1 + (30 * share).long(),
        "1 to 60, mostly short": 1 + (60 * share**4).long(),
    }[kind]


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
    optimization = Optimization(optimizer=torch.optim.Adam(learner.q_network.parameters(), lr=1e-3, fused=True))

    def step() -> None:
        loss, _ = learner(batch)
        loss.backward()
        optimization.step()
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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for kind in ("all 10", "1 to 7", "1 to 30", "1 to 60, mostly short"):
        for dueling in (False, True):
            number = lengths(kind, torch.Generator().manual_seed(1))
            mask = torch.arange(int(number.max())) < number.unsqueeze(1)
            step = step_on(mask, states=30, hidden=(256, 128), features=12, dueling=dueling)
            turns = []
            for _ in range(options.repeats):
                ours = seconds(step)
                with mock.patch.object(q_networks, "_MOSTLY_ALLOWED", 0):
                    turns.append((ours, seconds(step)))
            ratios = [computed / ours for ours, computed in turns]
            result = {
                "lists": kind,
                "dueling": dueling,
                "share_that_is_there": round(float(mask.float().mean()), 2),
                "milliseconds": [round(statistics.median(column) * 1e3, 2) for column in zip(*turns, strict=True)],
                "ratio": [round(f(ratios), 2) for f in (min, statistics.median, max)],
            }
            json.dump(result, sys.stdout)
            print()


if __name__ == "__main__":
    main()
