"""What the user of a small run waits for: from the command to the first step and to the report, against `import torch`.

    python -m tests.benchmarks.start [--repeats 5] [--config my.json]

Double DQN on 3470 rows of CartPole, the shape of the 2019 example, with an evaluation after each epoch, export and
report: once with 5 epochs and once with 30. The training copy stands already, as in every run but the first. Where the
seconds go is read from the lines of the run. All take turns; medians are printed.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.benchmarks.turns import medians, options_of, ratio, run, show, write_config
from tests.oracles.cartpole import write_log

STAGES = {"global minibatch": "imports and data", "TD loss": "training and evaluation", "report:": "export and report"}
"""What lies before the first line that begins so."""


def staged(config: Path, epochs: int) -> dict[str, float]:
    """Returns the seconds of each stage of a run, and of all."""
    command = [sys.executable, "-m", "workflows.dqn", "--config", str(config), "--set", f"epochs={epochs}"]
    seconds: dict[str, float] = {}
    start = time.perf_counter()
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        for line in process.stderr:
            stage = next((stage for words, stage in STAGES.items() if line.startswith(words)), None)
            if stage is not None and stage not in seconds:
                seconds[stage] = time.perf_counter() - start - sum(seconds.values())
    if process.returncode or len(seconds) < len(STAGES):
        raise SystemExit(f"{' '.join(command)}: ended with {process.returncode}")
    return {**seconds, "all": time.perf_counter() - start}


def example(folder: Path) -> Path:
    """Writes log and config of the example, and returns the config's file."""
    write_log(folder / "log.jsonl", 3470)
    return write_config(folder, {
        "training_data_path": str(folder / "log.jsonl"),
        "eval_data_path": str(folder / "log.jsonl"),
        "model_output_path": str(folder / "out"),
        "data": {"training_copy_dir": str(folder / "copies")},
        "use_gpu": False,
        "actions": ["0", "1"],
        "rl": {"gamma": 0.99, "target_update_rate": 0.1, "epsilon": 0.2},
        "rainbow": {"dueling_architecture": False},
        "training": {"layers": [-1, 128, 64, -1], "minibatch_size": 512, "learning_rate": 0.01},
    })  # fmt: skip


if __name__ == "__main__":
    options = options_of(__doc__, repeats=5, config="")
    with tempfile.TemporaryDirectory() as name:
        config = Path(options.config) if options.config else example(Path(name))
        staged(config, 1)
        rounds = [
            ({"all": run("-c", "import torch").seconds}, staged(config, 5), staged(config, 30))
            for _ in range(options.repeats)
        ]
    torch, *runs = (
        {stage: [seconds[stage] for seconds in repeats] for stage in repeats[0]}
        for repeats in zip(*rounds, strict=True)
    )
    show({
        "import torch": medians(torch, 2)["all"],
        **{f"{epochs} epochs": medians(seconds, 2) for epochs, seconds in zip((5, 30), runs, strict=True)},
        "ratio to import torch": {
            "first step": round(ratio(runs[0]["imports and data"], torch["all"]), 2),
            "5 epochs": round(ratio(runs[0]["all"], torch["all"]), 2),
            "30 epochs": round(ratio(runs[1]["all"], torch["all"]), 2),
        },
    })  # fmt: skip
