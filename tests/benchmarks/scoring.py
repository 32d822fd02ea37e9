"""Rows per second of workflows.score beside plain onnxruntime over the same Arrow batches, in turns.

    python -m tests.benchmarks.scoring [--rows 1000000] [--repeats 5]

CartPole's four features, 64-64 hidden units. Plain: columns of floats to a matrix, `session.run` of 65,536
rows at once, greedy action and score to Parquet. The same rows are scored as columns of floats and as maps of features.
"""

import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import pyarrow as pa
import pyarrow.parquet as pq

from reagent_lite.config import check
from reagent_lite.config.score_config import ScoreConfig
from reagent_lite.tasks.score import score
from tests.benchmarks.serving import a_model
from tests.benchmarks.turns import in_turns, options_of, seconds_of, spread

COLUMNS = [str(feature) for feature in range(4)]


def plain(model: Path, rows: Path, target: Path) -> None:
    """What somebody writes who has a matrix and needs no checks."""
    session = onnxruntime.InferenceSession(model / "model.onnx", providers=["CPUExecutionProvider"])
    names = [tensor.name for tensor in session.get_inputs()]
    schema = pa.schema({"action": pa.int64(), "score": pa.float32()})
    with pq.ParquetWriter(target, schema, compression="zstd") as writer:
        for batch in pq.ParquetFile(rows).iter_batches(65_536, columns=COLUMNS):
            state = np.stack([batch[name].to_numpy() for name in COLUMNS], 1)
            feed = [state, ~np.isnan(state), np.ones((len(state), 2), bool)]
            q, greedy = session.run(["q", "greedy"], dict(zip(names, feed, strict=True)))
            writer.write_table(pa.table([greedy, np.take_along_axis(q, greedy[:, None], 1)[:, 0]], schema=schema))


if __name__ == "__main__":
    options = options_of(__doc__, rows=1_000_000, repeats=5)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = a_model(folder / "trained")
        state = np.random.default_rng(0).normal(size=(options.rows, 4)).astype(np.float32)
        pq.write_table(pa.table(list(state.T), COLUMNS), folder / "columns.parquet")
        offsets, keys = np.arange(0, state.size + 1, 4, dtype=np.int32), COLUMNS * options.rows
        pq.write_table(
            pa.table({"state_features": pa.MapArray.from_arrays(offsets, pa.array(keys), state.ravel())}),
            folder / "maps.parquet",
        )
        tree = {"model": str(model), "output_path": f"{name}/scores.parquet", "policy": "greedy"}
        of_columns = {**tree, "data_path": f"{name}/columns.parquet", "columns": {"state_features": COLUMNS}}
        ways: dict[str, Callable[[], object]] = {
            "onnxruntime": lambda: plain(model, folder / "columns.parquet", folder / "plain.parquet"),
            "score, columns": lambda: score(check(ScoreConfig, of_columns)),
            "score, maps": lambda: score(check(ScoreConfig, {**tree, "data_path": f"{name}/maps.parquet"})),
        }
        rates = {what: lambda way=way: options.rows / seconds_of(way) for what, way in ways.items()}
        measured = in_turns(rates, options.repeats)
    print(f"load {os.getloadavg()[0]:.0f}")
    for what, rates in measured.items():
        ratios = spread(rates, measured["onnxruntime"])
        print(f"{what}: {statistics.median(rates):,.0f} rows/s, {ratios} of onnxruntime")
