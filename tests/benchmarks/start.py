"""What the user of a small run waits for: from the command to the first step and to the report, against `import torch`.

    python -m tests.benchmarks.start [--repeats 5] [--config my.json]

Double DQN on 3470 rows of CartPole, the shape of the 2019 example, with an evaluation after each epoch, export and
report: once with 5 epochs and once with 30. The training copy stands already, as in every run but the first. Where the
seconds go is read from the lines of the run. All take turns; medians are printed.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.benchmarks.turns import options_of, show
from tests.oracles.cartpole import write_log

STAGES = {"global minibatch": "imports and data", "CPE on": "training and evaluation", "report:": "export and report"}
"""What lies before the first line that begins so."""


def importing() -> dict[str, float]:
    """Returns the seconds of a process that imports torch."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return {"all": time.perf_counter() - start}


def run(config: Path, epochs: int) -> dict[str, float]:
    """Returns the seconds of each stage of a run, and of all."""
    command = [sys.executable, "-m", "workflows.dqn", "--config", str(config), "--set", f"epochs={epochs}"]
    seconds: dict[str, float] = {}
    begin = start = time.perf_counter()
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            stage = next((stage for words, stage in STAGES.items() if line.startswith(words)), None)
            if stage is not None and stage not in seconds:
                now = time.perf_counter()
                seconds[stage], begin = now - begin, now
    if process.returncode or len(seconds) < len(STAGES):
        raise SystemExit(f"{' '.join(command)}: ended with {process.returncode}")
    return {**seconds, "all": time.perf_counter() - start}


def main() -> None:
    options = options_of(__doc__, repeats=5, config="")
    with tempfile.TemporaryDirectory() as name:
        config = Path(options.config) if options.config else example(Path(name))
        run(config, 1)
        rounds = [{"torch": importing(), "5": run(config, 5), "30": run(config, 30)} for _ in range(options.repeats)]
    result = {
        "import torch": round(statistics.median(each["torch"]["all"] for each in rounds), 2),
        **{
            f"{epochs} epochs": {
                stage: round(statistics.median(each[epochs][stage] for each in rounds), 2)
                for stage in (*STAGES.values(), "all")
            }
            for epochs in ("5", "30")
        },
        "ratio to import torch": {
            "first step": ratio(rounds, "5", "imports and data"),
            "5 epochs": ratio(rounds, "5", "all"),
            "30 epochs": ratio(rounds, "30", "all"),
        },
    }
    show(result)


def ratio(rounds: list[dict[str, dict[str, float]]], epochs: str, stage: str) -> float:
    return round(statistics.median(each[epochs][stage] / each["torch"]["all"] for each in rounds), 2)


def example(folder: Path) -> Path:
    """Writes log and config of the example, and returns the config's file."""
    write_log(folder / "log.jsonl", 3470)
    tree = {
        "training_data_path": str(folder / "log.jsonl"),
        "eval_data_path": str(folder / "log.jsonl"),
        "model_output_path": str(folder / "out"),
        "data": {"training_copy_dir": str(folder / "copies")},
        "use_gpu": False,
        "actions": ["0", "1"],
        "rl": {"gamma": 0.99, "target_update_rate": 0.1, "epsilon": 0.2},
        "rainbow": {"dueling_architecture": False},
        "training": {"layers": [-1, 128, 64, -1], "minibatch_size": 512, "learning_rate": 0.01},
    }
    config = folder / "config.json"
    config.write_text(json.dumps(tree))
    return config


if __name__ == "__main__":
    main()
