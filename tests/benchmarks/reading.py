"""JSON lines to the finished training copy, against pandas.read_json in chunks.

    python -m tests.benchmarks.reading [--rows 200000] [--repeats 5]

Ours checks every row, sorts by episode, hashes and fsyncs. pandas is given twice: reading alone, and reading plus the
plain arrays (states, next states, action, reward) that a training loop needs, without checks. They take turns; medians.
"""

import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from reagent_lite.data.copy.prepared_copy import prepare_training_copy
from reagent_lite.data.logs import Log
from tests.benchmarks.turns import in_turns, medians, options_of, ratio, seconds_of, show
from tests.oracles.cartpole import write_log


def ours(file: Path) -> None:
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        prepare_training_copy(Log(str(file), actions=("0", "1"), directory=folder))


def pandas_reading(file: Path, *, arrays: bool) -> None:
    parts = []
    for chunk in pd.read_json(file, lines=True, chunksize=10_000):
        if arrays:
            states = [np.array([[row[str(i)] for i in range(4)] for row in chunk[column]], np.float32)
                      for column in ("state_features", "next_state_features")]  # fmt: skip
            parts.append((*states, chunk["action"].to_numpy(np.int32), chunk["reward"].to_numpy(np.float32)))
    [np.concatenate(column) for column in zip(*parts, strict=True)]


if __name__ == "__main__":
    options = options_of(__doc__, rows=200_000, repeats=5)
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "log.jsonl"
        write_log(file, options.rows)
        ours(file)
        ways = {
            "ours": partial(ours, file),
            "pandas_reading": partial(pandas_reading, file, arrays=False),
            "pandas_arrays": partial(pandas_reading, file, arrays=True),
        }
        times = in_turns({what: partial(seconds_of, way) for what, way in ways.items()}, options.repeats)
        megabytes = round(file.stat().st_size / 1e6, 1)
    show(
        {
            "megabytes": megabytes,
            "seconds": medians(times, 3),
            "to_ours": {what: round(ratio(seconds, times["ours"]), 2) for what, seconds in times.items()},
        }
    )
