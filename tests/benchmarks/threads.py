"""Training with two threads on a machine of its own and beside other programs, by how long threads spin.

    python -m tests.benchmarks.threads [--epochs 20] [--repeats 3]

76 state features, 34 actions, hidden layers 256 and 128, minibatch 4096: large enough for two threads. Each run is a
process of its own; "spinning" has libgomp's own default, 300 000 spins. Busy loops are as many as cores.
Rows per second, in turns.
"""

import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.turns import in_turns, medians, options_of, ratio, run, show, write_config

BUSY = "while True: sum(range(1000))"
ACTIONS = [str(number) for number in range(34)]


def decisions(count: int) -> list[dict[str, Any]]:
    """Returns rows of one step with random features, actions and rewards."""
    rng = np.random.default_rng(0)
    return [
        {
            "mdp_id": str(row),
            "sequence_number": 0,
            "state_features": {str(number): float(value) for number, value in enumerate(rng.normal(size=76))},
            "action": str(rng.integers(len(ACTIONS))),
            "reward": float(rng.normal()),
            "action_probability": 1 / len(ACTIONS),
            "next_state_features": {},
            "next_action": "",
        }
        for row in range(count)
    ]


def rate(config: Path, spins: dict[str, str], busy: int) -> float:
    """Returns rows per second of a run beside so many busy loops."""
    with ExitStack() as loops:
        for _ in range(busy):
            loops.callback(loops.enter_context(subprocess.Popen([sys.executable, "-c", BUSY])).kill)
        return run("-m", "workflows.dqn", "--config", config, **spins).rows_per_second


if __name__ == "__main__":
    options = options_of(__doc__, epochs=20, repeats=3)
    busy = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as name:
        config = write_config(Path(name), {
            "training_data_path": f"{name}/log.jsonl", "model_output_path": f"{name}/out", "use_gpu": False,
            "actions": ACTIONS, "epochs": options.epochs,
            "training": {"layers": [-1, 256, 128, -1], "minibatch_size": 4096},
            "evaluation": {"calc_cpe_in_training": False, "bootstrap_resamples": 100, "models": {"final_fit_passes": 1},
                           "learn_from_scored": True},
        })  # fmt: skip
        Path(name, "log.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in decisions(8192)))
        ways = {
            f"{kind}{' beside busy loops' if loops else ''}": partial(rate, config, spins, loops)
            for loops in (0, busy)
            for kind, spins in (("as_it_is", {}), ("spinning", {"GOMP_SPINCOUNT": "300000"}))
        }
        rates = in_turns(ways, options.repeats)
    show({
        "rows_per_second": medians(rates, 0),
        "ratio": {
            loops: round(ratio(rates[f"as_it_is{loops}"], rates[f"spinning{loops}"]), 2)
            for loops in ("", " beside busy loops")
        },
        "rounds": {name: list(map(round, figures)) for name, figures in rates.items()},
    })  # fmt: skip
