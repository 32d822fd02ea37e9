"""CartPole without velocities, solved with data.history and not without it, in simulation and from its log.

    python -m tests.benchmarks.history [--seeds 3] [--only simulation,log] [--histories 1,4]

configs/history/hidden_velocity.py is the environment: policies see position, angle and their last action; a return is
at most 200. In simulation a run takes at most 60 000 environment steps and ends early at a mean return of 195. The log
has 30 000 steps of uniformly random actions. Each model then plays 200 further episodes.
"""

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import reagent_lite
from tests.benchmarks.turns import ROOT, options_of

ENV = "gymnasium:hidden_velocity:HiddenVelocity-v0"


def in_simulation(folder: Path, history: int, seed: int) -> dict[str, Any]:
    """Returns the config of a run in the environment, the sample with another history."""
    sample = json.loads((ROOT / "configs/history/online.json").read_text())
    return sample | {"use_gpu": False, "seed": seed, "model_output_path": str(folder), "data": {"history": history}}


def from_log(folder: Path, history: int, seed: int) -> dict[str, Any]:
    """Returns the config of a run on a log of random actions, which is written first."""
    log = folder.parent / f"log_{seed}.parquet"
    if not log.exists():
        reagent_lite.simulate({"env": ENV, "output_path": str(log), "rows": 30_000, "seed": seed, "use_gpu": False})
    return {
        "defaults": "2026", "use_gpu": False, "seed": seed, "model_output_path": str(folder), "actions": ["0", "1"],
        "training_data_path": str(log), "epochs": 20, "data": {"history": history},
        "rl": {"target_update_rate": 0.05, "cql_alpha": 0.25, "value_scale": None, "epsilon": 0, "softmax_policy": 0},
        "training": {"minibatch_size": 256, "optimizer": "ADAM", "l2_decay": 0.0, "lr_decay": 0.95},
        "evaluation": {"calc_cpe_in_training": False, "final_fit_passes": 1},
        "simulation": {"env": ENV, "share": 0, "evaluation_episodes": 200},
    }  # fmt: skip


def main() -> None:
    """Trains and plays, and prints the table."""
    sys.path.insert(0, str(ROOT / "configs/history"))
    options = options_of(__doc__, seeds=3, only="simulation,log", histories="1,4")
    makers = {"simulation": in_simulation, "log": from_log}
    print("| learned | history | mean return of each seed | mean |\n|---|---|---|---|")
    for name in options.only.split(","):
        for history in map(int, options.histories.split(",")):
            returns = []
            for seed in range(options.seeds):
                with tempfile.TemporaryDirectory() as folder:
                    start = time.monotonic()
                    run = reagent_lite.train(makers[name](Path(folder) / "out", history, seed))
                    returns.append(run.scores["simulation/return/mean"])
                    line = {"learned": name, "history": history, "seed": seed, "return": returns[-1]}
                    seconds = round(time.monotonic() - start)
                    print(json.dumps({**line, "seconds": seconds}), file=sys.stderr, flush=True)
            each = ", ".join(f"{value:.0f}" for value in returns)
            print(f"| {name} | {history} | {each} | {statistics.mean(returns):.1f} |", flush=True)


if __name__ == "__main__":
    main()
