"""JSON lines to the finished training copy, against pandas.read_json in chunks.

    python -m tests.benchmarks.reading [--rows 200000] [--repeats 5]

Ours checks every row, sorts by episode, hashes and fsyncs. pandas is given twice: reading alone, and reading plus the
plain arrays (states, next states, action, reward) that a training loop needs, without checks. They take turns; medians.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd

from reagent_lite.data.copy.training_copy import prepare_training_copy
from tests.oracles.cartpole import write_log

CHUNK = 10_000


def ours(file: Path, folder: Path) -> float:
    start = time.perf_counter()
    prepare_training_copy(str(file), actions=("0", "1"), directory=str(folder))
    return time.perf_counter() - start


def pandas_reading(file: Path, *, arrays: bool) -> float:
    start = time.perf_counter()
    parts = []
    for chunk in pd.read_json(file, lines=True, chunksize=CHUNK):
        if arrays:
            states = [np.array([[row[str(i)] for i in range(4)] for row in chunk[column]], np.float32)
                      for column in ("state_features", "next_state_features")]  # fmt: skip
            parts.append((*states, chunk["action"].to_numpy(np.int32), chunk["reward"].to_numpy(np.float32)))
    if arrays:
        [np.concatenate(column) for column in zip(*parts, strict=True)]
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "log.jsonl"
        write_log(file, options.rows)
        ours(file, Path(name) / "warm")
        runs = {
            "ours": lambda number: ours(file, Path(name) / str(number)),
            "pandas_reading": lambda _: pandas_reading(file, arrays=False),
            "pandas_arrays": lambda _: pandas_reading(file, arrays=True),
        }
        times = [{what: run(number) for what, run in runs.items()} for number in range(options.repeats)]
        result = {"megabytes": round(file.stat().st_size / 1e6, 1)}
        for what in runs:
            result[f"{what}_seconds"] = round(statistics.median(one[what] for one in times), 3)
            result[f"{what}_to_ours"] = round(statistics.median(one[what] / one["ours"] for one in times), 2)
    json.dump(result, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
