"""Learner rows per second on the CPU: a whole run with its evaluation, against the network's matrix products alone.

    python -m tests.benchmarks.learner [--epochs 300] [--repeats 5]

Double DQN, network 4-128-64-2, batch 512, 3470 rows of CartPole: the shape of the 2019 example. Ours is the run's own
rows_per_second (gather, loss, optimizer, soft update, TD error and policy figures each epoch, metrics on disk; without
the counterfactual evaluation). The products are three forward passes (Q(s), Q(s'), target Q(s')) and one backward pass
as bare matrix multiplications on one batch. Both use one thread and take turns; medians are printed.
"""

import argparse
import contextlib
import io
import json
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import torch

from reagent_lite.config import DqnConfig, check
from reagent_lite.distributed.group import Group, Place
from tests.oracles.cartpole import write_log
from workflows.training import train

BATCH, WIDTHS = 512, (4, 128, 64, 2)
REAGENT_2019 = 5465  # rows/s of ReAgent's workflow end to end, read elsewhere on two EPYC cores


def ours(folder: Path, epochs: int) -> float:
    tree = {
        "training_data_path": str(folder / "log.jsonl"),
        "eval_data_path": str(folder / "log.jsonl"),
        "model_output_path": str(folder / "out"),
        "use_gpu": False,
        "actions": ["0", "1"],
        "epochs": epochs,
        "rl": {"gamma": 0.99, "target_update_rate": 0.1},
        "rainbow": {"dueling_architecture": False},
        "training": {"layers": [-1, 128, 64, -1], "minibatch_size": BATCH, "learning_rate": 0.001},
        "evaluation": {"calc_cpe_in_training": False, "bootstrap_resamples": 100, "final_fit_passes": 1},
    }
    with contextlib.redirect_stderr(io.StringIO()):
        outcome = train(check(DqnConfig, tree), Group(Place(), torch.device("cpu")))
    return outcome.rows_per_second


def products(seconds: float = 1.0) -> float:
    """Rows per second of the matrix products of one step."""
    weights = [torch.randn(b, a) for a, b in pairwise(WIDTHS)]
    inputs = [torch.randn(BATCH, width) for width in WIDTHS]

    def step() -> None:
        for _ in range(3):
            for x, w in zip(inputs, weights, strict=False):
                x @ w.t()
        for i in range(len(weights) - 1, -1, -1):
            inputs[i + 1].t() @ inputs[i]
            if i:
                inputs[i + 1] @ weights[i]

    step()
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        step()
        count += 1
    return count * BATCH / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        write_log(Path(name) / "log.jsonl", 3470)
        ours(Path(name), 1)
        pairs = [(ours(Path(name), options.epochs), products()) for _ in range(options.repeats)]
    rows, bare = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(a / b for a, b in pairs)
    result = {
        "learner_rows_per_second": round(rows),
        "matrix_products_rows_per_second": round(bare),
        "ratio_to_matrix_products": round(ratio, 3),
        "ratio_to_reagent_2019_read_elsewhere": round(rows / REAGENT_2019, 1),
        "pairs": [[round(a), round(b)] for a, b in pairs],
    }
    json.dump(result, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
