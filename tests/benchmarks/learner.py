"""Learner rows per second on the CPU: a whole run with its evaluation, against its matrix products and d3rlpy.

    python -m tests.benchmarks.learner [--epochs 300] [--repeats 5] [--alone]

Double DQN, network 4-128-64-2, batch 512, 3470 rows of CartPole: the shape of the 2019 example. Ours is the run's own
rows_per_second (gather, loss, optimizer, soft update, TD error and policy figures each epoch, metrics on disk; without
the counterfactual evaluation). The products are three forward passes (Q(s), Q(s'), target Q(s')) and one backward pass
as bare matrix multiplications on one batch. d3rlpy's DoubleDQN has the same network, batch and rows, and samples them
from its own buffer; it lives in an environment of its own, made under outputs/ if absent, and is left out with --alone.
All use one thread and take turns; medians are printed.
"""

import contextlib
import io
import statistics
import tempfile
from itertools import pairwise
from pathlib import Path

import torch

from reagent_lite.config import DqnConfig, check
from reagent_lite.distributed.group import Group, ProcessRanks
from reagent_lite.run.runner import train
from tests.benchmarks.peers import interpreter, printed_number
from tests.benchmarks.turns import in_turns, medians, options_of, rate, ratio, show
from tests.oracles.cartpole import write_log

BATCH, WIDTHS, ROWS = 512, (4, 128, 64, 2), 3470
REAGENT_2019 = 5465  # rows/s of ReAgent's workflow end to end, read elsewhere on two EPYC cores

D3RLPY = f"""
import time, numpy, torch, d3rlpy
torch.set_num_threads(1)
random = numpy.random.default_rng(0)
ends = numpy.zeros({ROWS}, numpy.float32)
ends[119::120] = ends[-1] = 1
data = d3rlpy.dataset.MDPDataset(random.normal(size=({ROWS}, {WIDTHS[0]})).astype(numpy.float32),
                                 random.integers(0, {WIDTHS[-1]}, {ROWS}), numpy.ones({ROWS}, numpy.float32), ends)
encoder = d3rlpy.models.VectorEncoderFactory({list(WIDTHS[1:-1])})
learner = d3rlpy.algos.DoubleDQNConfig(batch_size={BATCH}, learning_rate=0.001, encoder_factory=encoder).create()
settings = dict(n_steps_per_epoch=100, show_progress=False, save_interval=10**9,
                logger_adapter=d3rlpy.logging.NoopAdapterFactory())
learner.fit(data, n_steps=100, **settings)
start = time.perf_counter()
learner.fit(data, n_steps=1000, **settings)
print({BATCH} * 1000 / (time.perf_counter() - start))
"""


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
        "evaluation": {"calc_cpe_in_training": False, "bootstrap_resamples": 100, "models": {"final_fit_passes": 1}},
    }
    with contextlib.redirect_stderr(io.StringIO()):
        return train(check(DqnConfig, tree), Group(ProcessRanks(), torch.device("cpu"))).rows_per_second


def products() -> float:
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

    return rate(step, BATCH)


if __name__ == "__main__":
    options = options_of(__doc__, epochs=300, repeats=5, alone=False)
    torch.set_num_threads(1)
    python = None if options.alone else interpreter("d3rlpy", f"torch=={torch.__version__.split('+')[0]}", "d3rlpy")
    with tempfile.TemporaryDirectory() as name:
        write_log(Path(name) / "log.jsonl", ROWS)
        ours(Path(name), 1)
        ways = {"learner": lambda: ours(Path(name), options.epochs), "matrix_products": products}
        if python:
            ways["d3rlpy"] = lambda: printed_number(python, D3RLPY)
        rates = in_turns(ways, options.repeats)
    learned = rates["learner"]
    show({
        "rows_per_second": medians(rates, 0),
        "ratio_to": {name: round(ratio(learned, figures), 2) for name, figures in rates.items() if name != "learner"},
        "ratio_to_reagent_2019_read_elsewhere": round(statistics.median(learned) / REAGENT_2019, 1),
        "rounds": {name: list(map(round, figures)) for name, figures in rates.items()},
    })  # fmt: skip
