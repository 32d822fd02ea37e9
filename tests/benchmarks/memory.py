"""Peak memory of a whole run, against the bytes of its training copy and against its rows.

    python -m tests.benchmarks.memory [--rows 2000000] [--features 16]

Two processes run the same job on Parquet: one on all rows, one on a quarter. The difference of their peaks (the
operating system's ru_maxrss) over the difference of their copies' bytes is what a byte of data costs. The difference of
their peaks of anonymous memory (RssAnon of /proc, every 2 ms), of which mapped files are no part, over the difference
of their rows is what a row costs.
"""

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.benchmarks.turns import options_of, run, show, write_config


def write(folder: Path, rows: int, features: int) -> None:
    """Files of episodes of 100 rows; the next state is the following row's."""
    rng = np.random.default_rng(0)
    fields = [str(i) for i in range(features)]
    folder.mkdir()
    for number in np.split(np.arange(rows), range(100_000, rows, 100_000)):
        states = rng.normal(size=(len(number) + 1, features)).astype(np.float32)
        table = pa.table({
            "mdp_id": pa.array((number // 100).astype(str)),
            "sequence_number": number % 100,
            "state_features": pa.StructArray.from_arrays(list(map(pa.array, states[:-1].T)), fields),
            "next_state_features": pa.StructArray.from_arrays(list(map(pa.array, states[1:].T)), fields),
            "action": rng.integers(0, 2, len(number)),
            "reward": rng.normal(size=len(number)).astype(np.float32),
            "action_probability": np.full(len(number), 0.5),
            "terminal": number % 100 == 99,
        })  # fmt: skip
        pq.write_table(table, folder / f"{number[0]:09}.parquet")


def peak_anonymous(config: str) -> int:
    """Returns the peak of the anonymous bytes of a run."""
    process = subprocess.Popen([sys.executable, "-m", "workflows.dqn", "--config", config], stderr=subprocess.DEVNULL)
    peak = 0
    while process.poll() is None:
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        peak = max([peak, *(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon"))])
        time.sleep(0.002)
    assert process.returncode == 0
    return peak


def measured(folder: Path, rows: int, features: int) -> tuple[int, int, int]:
    """Returns peak resident bytes and peak anonymous bytes of the run, and bytes of its training copy."""
    config = write_config(folder, {
        "training_data_path": str(folder / "log"),
        "model_output_path": str(folder / "out"),
        "use_gpu": False,
        "actions": ["0", "1"],
        "data": {"training_copy_dir": str(folder / "copy")},
        "training": {"layers": [-1, 64, -1], "activations": ["relu", "linear"]},
        "evaluation": {"calc_cpe_in_training": False, "models": {"final_fit_passes": 1}, "max_episodes": 1000},
    })  # fmt: skip
    write(folder / "log", rows, features)
    anonymous = peak_anonymous(config)
    shutil.rmtree(folder / "out")
    shutil.rmtree(folder / "copy")
    peak = run("-m", "workflows.dqn", "--config", config).peak
    return (
        peak,
        anonymous,
        sum(file.stat().st_size for file in (folder / "copy").rglob("*.npy") if "normalized" not in file.name),
    )


if __name__ == "__main__":
    options = options_of(__doc__, rows=2_000_000, features=16)
    few = options.rows // 4
    with tempfile.TemporaryDirectory() as name:
        small_peak, small_anonymous, small_copy = measured(Path(name) / "small", few, options.features)
        peak, anonymous, copy = measured(Path(name) / "large", options.rows, options.features)
    show({
        "copy_megabytes": round(copy / 1e6), "peak_megabytes": round(peak / 1e6),
        "peak_of_a_small_run_megabytes": round(small_peak / 1e6),
        "bytes_per_byte_of_copy": round((peak - small_peak) / (copy - small_copy), 2),
        "anonymous_bytes_per_row": round((anonymous - small_anonymous) / (options.rows - few), 1),
    })  # fmt: skip
