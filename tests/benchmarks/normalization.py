"""workflows.normalize of a Parquet log against DuckDB's own aggregates of the same file.

    python -m tests.benchmarks.normalization [--rows 2000000] [--repeats 5]

Ours is the whole workflow but for Python's start: all rows read, checked and hashed, a sample drawn, types identified
with K² and Box-Cox, files written. DuckDB is given twice: SUMMARIZE of the 16 features (count, least, largest, mean,
stddev, quartiles and distinct values, both approximate), and count, mean, stddev, least and largest alone. Both have
two threads. They take turns; medians; processor seconds beside, since other programs may run.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from reagent_lite.config import check
from reagent_lite.config.normalize import NormalizeConfig
from workflows.normalize import normalize

FEATURES = 16
EPISODE = 100


def columns(rows: int, rng: np.random.Generator) -> list[pa.Array]:
    """Features of every type; every fourth is missing in a tenth of the rows."""
    made = [rng.integers(0, 2, rows), rng.random(rows), rng.integers(0, 7, rows)]
    made += [rng.normal(i, 1 + i, rows) for i in range(5)]
    made += [rng.lognormal(0, 1, rows) for _ in range(3)]
    made += [rng.standard_t(1.5, rows), rng.gamma(2, 3, rows), rng.uniform(-1, 1, rows), rng.exponential(2, rows),
             rng.integers(0, 5000, rows)]  # fmt: skip
    return [pa.array(one.astype(np.float32), mask=rng.random(rows) < 0.1 if i % 4 == 3 else None)
            for i, one in enumerate(made)]  # fmt: skip


def write_logs(folder: Path, rows: int) -> dict[str, Path]:
    """Writes the same events with states as structs and as maps."""
    rng = np.random.default_rng(5)
    features = columns(rows, rng)
    struct = pa.StructArray.from_arrays(features, [str(i) for i in range(FEATURES)])
    valid = np.stack([np.asarray(one.is_valid()) for one in features], axis=1)
    offsets = np.concatenate(([0], np.cumsum(valid.sum(axis=1)))).astype(np.int32)
    keys = np.broadcast_to(np.arange(FEATURES, dtype=np.int32), valid.shape)[valid]
    values = np.stack([one.fill_null(0).to_numpy() for one in features], axis=1)[valid]
    maps = pa.MapArray.from_arrays(pa.array(offsets), pa.array(keys), pa.array(values))
    number = np.arange(rows)
    files = {}
    for kind, states in (("struct", struct), ("map", maps)):
        files[kind] = folder / f"{kind}.parquet"
        table = pa.table({
            "mdp_id": np.char.add("e", (number // EPISODE).astype("U8")), "sequence_number": number % EPISODE,
            "state_features": states, "action": np.where(rng.random(rows) < 0.5, "left", "right"),
            "reward": rng.normal(size=rows).astype(np.float32),
        })  # fmt: skip
        pq.write_table(table, files[kind], compression="zstd", row_group_size=1 << 17)
    return files


def ours(file: Path, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    tree = {"training_data_path": str(file), "norm_params": {"output_dir": str(folder)}}
    normalize(check(NormalizeConfig, tree))


def summarize(file: Path, kind: str) -> None:
    _duckdb(f"SUMMARIZE SELECT {_named(kind)} FROM '{file}'")


def aggregate(file: Path, kind: str) -> None:
    figures = ", ".join(f"count(f{i}), avg(f{i}), stddev_samp(f{i}), min(f{i}), max(f{i})" for i in range(FEATURES))
    _duckdb(f"SELECT {figures} FROM (SELECT {_named(kind)} FROM '{file}')")


def _named(kind: str) -> str:
    return ", ".join(f"state_features[{i}] AS f{i}" if kind == "map" else f'state_features."{i}" AS f{i}'
                     for i in range(FEATURES))  # fmt: skip


def _duckdb(query: str) -> None:
    with duckdb.connect(config={"threads": 2}) as connection:
        connection.execute(query).fetchall()


def timed(work: Callable[[], None]) -> tuple[float, float]:
    start, used = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - start, time.process_time() - used


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    result = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kind, file in write_logs(folder, options.rows).items():
            works: dict[str, Callable[[], None]] = {
                "ours": lambda file=file: ours(file, folder / "norm"),
                "summarize": lambda file=file, kind=kind: summarize(file, kind),
                "aggregate": lambda file=file, kind=kind: aggregate(file, kind),
            }  # type: ignore[dict-item]
            rounds = [{what: timed(work) for what, work in works.items()} for _ in range(options.repeats)]
            figures = {"megabytes": round(file.stat().st_size / 1e6, 1)}
            for what in works:
                figures[f"{what}_seconds"] = round(statistics.median(one[what][0] for one in rounds), 3)
                figures[f"{what}_processor_seconds"] = round(statistics.median(one[what][1] for one in rounds), 3)
            for other in ("summarize", "aggregate"):
                ratios = [one["ours"][0] / one[other][0] for one in rounds]
                figures[f"ratio_to_{other}"] = round(statistics.median(ratios), 3)
            result[kind] = figures
    json.dump(result, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
