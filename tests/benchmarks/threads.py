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

from tests.benchmarks.turns import in_turns, medians, options_of, ratio, show

ROOT = Path(__file__).resolve().parents[2]
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


def rate(config: Path, spins: str, busy: int) -> float:
    """Returns rows per second of a run beside so many busy loops."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)} | ({"GOMP_SPINCOUNT": spins} if spins else {})
    command = [sys.executable, "-m", "workflows.dqn", "--config", str(config)]
    with ExitStack() as loops:
        for _ in range(busy):
            loops.callback(loops.enter_context(subprocess.Popen([sys.executable, "-c", BUSY])).kill)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout.splitlines()[-1])["rows_per_second"])


def main() -> None:
    options = options_of(__doc__, epochs=20, repeats=3)
    busy = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as name:
        log = Path(name) / "log.jsonl"
        log.write_text("".join(f"{json.dumps(row)}\n" for row in decisions(8192)))
        config = Path(name) / "config.json"
        config.write_text(json.dumps({
            "training_data_path": str(log), "model_output_path": str(Path(name) / "out"), "use_gpu": False,
            "actions": ACTIONS, "epochs": options.epochs,
            "training": {"layers": [-1, 256, 128, -1], "minibatch_size": 4096},
            "evaluation": {"calc_cpe_in_training": False, "bootstrap_resamples": 100, "final_fit_passes": 1,
                           "learn_from_scored": True},
        }))  # fmt: skip
        ways = {
            f"{kind}{' beside busy loops' if loops else ''}": partial(rate, config, spins, loops)
            for loops in (0, busy)
            for kind, spins in (("as_it_is", ""), ("spinning", "300000"))
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


if __name__ == "__main__":
    main()
