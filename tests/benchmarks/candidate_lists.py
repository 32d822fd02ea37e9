"""One optimizer step on lists of candidates that differ in length: padding left out against padding computed.

    python -m tests.benchmarks.candidate_lists [--repeats 5]

512 rows, 30 state features, 12 of a candidate, hidden layers 256 and 128; loss, gradient, Adam and soft update on one
thread. Both take turns of a quarter of a second; medians of the ratios with their smallest and largest.
"""

import argparse
import json
import statistics
import sys
from unittest import mock

import torch
from torch import Tensor

from reagent_lite.models import q_networks
from tests.benchmarks.steps import seconds, step_on

ROWS = 512


def lengths(kind: str, generator: torch.Generator) -> Tensor:
    """Returns [ROWS] numbers of candidates."""
    share = torch.rand(ROWS, generator=generator)
    return {
        "all 10": torch.full((ROWS,), 10),
        "1 to 7": 1 + (7 * share).long(),
        "1 to 30": 1 + (30 * share).long(),
        "1 to 60, mostly short": 1 + (60 * share**4).long(),
    }[kind]


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
