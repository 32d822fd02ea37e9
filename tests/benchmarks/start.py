"""From the command to the first optimizer step of a small run, against importing torch alone.

    python -m tests.benchmarks.start [--repeats 5]

The run says how it divides its batches right before the first step; that line is waited for. 200 rows, whose training
copy stands already, as in every run but the first. They take turns; medians are printed.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.oracles.cartpole import write_log

BEFORE_THE_FIRST_STEP = "global minibatch"


def importing() -> float:
    """Returns the seconds of a process that imports torch."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.perf_counter() - start


def first_step(config: Path) -> float:
    """Returns the seconds until a run takes its first step."""
    start, seconds = time.perf_counter(), 0.0
    command = [sys.executable, "-m", "workflows.dqn", "--config", str(config)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as run:
        assert run.stderr is not None
        for line in run.stderr:
            if line.startswith(BEFORE_THE_FIRST_STEP):
                seconds = time.perf_counter() - start
    if run.returncode or not seconds:
        raise SystemExit(f"{' '.join(command)}: ended with {run.returncode}")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        write_log(Path(name) / "log.jsonl", 200)
        tree = {
            "training_data_path": str(Path(name) / "log.jsonl"),
            "model_output_path": str(Path(name) / "out"),
            "use_gpu": False,
            "actions": ["0", "1"],
            "epochs": 2,
            "training": {"layers": [-1, 8, -1], "activations": ["relu", "linear"], "minibatch_size": 32},
            "evaluation": {"calc_cpe_in_training": False, "bootstrap_resamples": 100},
        }
        config = Path(name) / "config.json"
        config.write_text(json.dumps(tree))
        first_step(config)
        pairs = [(first_step(config), importing()) for _ in range(options.repeats)]
    result = {
        "first_step_seconds": round(statistics.median(ours for ours, _ in pairs), 2),
        "import_torch_seconds": round(statistics.median(other for _, other in pairs), 2),
        "ratio": round(statistics.median(ours / other for ours, other in pairs), 2),
    }
    json.dump(result, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
