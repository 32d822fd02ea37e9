"""workflows.normalize of a Parquet log against DuckDB's SUMMARIZE of the same file.

    python -m tests.benchmarks.normalization [--rows 2000000] [--repeats 5]

Ours is the whole workflow but for Python's start: all rows read, checked and hashed, a sample drawn, types identified
with K² and Box-Cox, files written. SUMMARIZE of the 16 features gives count, least, largest, mean, stddev, and
approximate quartiles and distinct values. Both have two threads and take turns; medians.
"""

import shutil
import tempfile
from functools import partial
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from reagent_lite.config import check
from reagent_lite.config.normalize_config import NormalizeConfig
from reagent_lite.tasks.normalize import normalize
from tests.benchmarks.turns import in_turns, medians, options_of, ratio, seconds_of, show

FEATURES = 16


def columns(rows: int, rng: np.random.Generator) -> list[pa.Array]:
    """Features of every type; every fourth is missing in a tenth of the rows."""
    made = [
        rng.integers(0, 2, rows),
        rng.random(rows),
        rng.integers(0, 7, rows),
        *(rng.normal(i, 1 + i, rows) for i in range(5)),
        *(rng.lognormal(0, 1, rows) for _ in range(3)),
        rng.standard_t(1.5, rows),
        rng.gamma(2, 3, rows),
        rng.uniform(-1, 1, rows),
        rng.exponential(2, rows),
        rng.integers(0, 5000, rows),
    ]
    absent = [rng.random(rows) < 0.1 if i % 4 == 3 else None for i in range(FEATURES)]
    return [pa.array(feature.astype(np.float32), mask=mask) for feature, mask in zip(made, absent, strict=True)]


def write_logs(folder: Path, rows: int) -> dict[str, Path]:
    """Writes the same events with states as structs and as maps."""
    rng, number = np.random.default_rng(5), np.arange(rows)
    features = columns(rows, rng)
    valid = np.stack([np.asarray(feature.is_valid()) for feature in features], axis=1)
    offsets = np.concatenate(([0], np.cumsum(valid.sum(axis=1)))).astype(np.int32)
    keys = np.broadcast_to(np.arange(FEATURES, dtype=np.int32), valid.shape)[valid]
    values = np.stack([feature.fill_null(0).to_numpy() for feature in features], axis=1)[valid]
    states = {
        "struct": pa.StructArray.from_arrays(features, [str(i) for i in range(FEATURES)]),
        "map": pa.MapArray.from_arrays(pa.array(offsets), pa.array(keys), pa.array(values)),
    }
    others = {
        "mdp_id": np.char.add("e", (number // 100).astype("U8")),
        "sequence_number": number % 100,
        "action": np.where(rng.random(rows) < 0.5, "left", "right"),
        "reward": rng.normal(size=rows).astype(np.float32),
    }
    for kind, state in states.items():
        pq.write_table(
            pa.table({**others, "state_features": state}),
            folder / f"{kind}.parquet",
            compression="zstd",
            row_group_size=1 << 17,
        )
    return {kind: folder / f"{kind}.parquet" for kind in states}


def ours(file: Path) -> None:
    folder = file.with_name("norm")
    shutil.rmtree(folder, ignore_errors=True)
    normalize(check(NormalizeConfig, {"training_data_path": str(file), "norm_params": {"output_dir": str(folder)}}))


def summarize(file: Path) -> None:
    state = "state_features[{0}] AS f{0}" if file.stem == "map" else 'state_features."{0}" AS f{0}'
    named = ", ".join(state.format(i) for i in range(FEATURES))
    with duckdb.connect(config={"threads": 2}) as connection:
        connection.execute(f"SUMMARIZE SELECT {named} FROM '{file}'").fetchall()


if __name__ == "__main__":
    options = options_of(__doc__, rows=2_000_000, repeats=5)
    with tempfile.TemporaryDirectory() as name:
        for kind, file in write_logs(Path(name), options.rows).items():
            ways = {"ours": partial(ours, file), "summarize": partial(summarize, file)}
            times = in_turns({what: partial(seconds_of, way) for what, way in ways.items()}, options.repeats)
            show({kind: {"seconds": medians(times, 3), "ratio": round(ratio(times["ours"], times["summarize"]), 3)}})
