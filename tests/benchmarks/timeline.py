"""Events to transitions, whole processes: DuckDB, the same SQL on Spark local[2], and a plain Spark job by hand.

    python -m tests.benchmarks.timeline [--rows 5000000] [--repeats 3] [--memory_rows 10000000] [--memory_limit_mb 350]

The events are those of CartPole with random actions, made by workflows.simulate as Parquet: one true end or limit per
episode of some 22 rows. The plain job is what one writes first: lead over a window, write Parquet; it checks nothing,
counts nothing, sorts nothing and keeps no manifest. The three take turns; medians. Last, the peak resident memory of
DuckDB's whole process under a limit, on more rows.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PLAIN_JOB = """
import sys
from pyspark.sql import SparkSession, Window
from pyspark.sql import functions as F

spark = (SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
         .config("spark.driver.bindAddress", "127.0.0.1").config("spark.driver.host", "127.0.0.1").getOrCreate())
events = spark.read.parquet(sys.argv[1])
w = Window.partitionBy("mdp_id").orderBy("sequence_number")
after = {"next_state_features": "state_features", "next_action": "action", "possible_next_actions": "possible_actions"}
rows = (
    events.drop("next_state_features", "possible_next_actions")
    .withColumns({name: F.lead(column).over(w) for name, column in after.items()})
    .withColumn("time_diff", F.lead("sequence_number").over(w) - F.col("sequence_number"))
    .withColumn("sequence_number_ordinal", F.row_number().over(w))
    .withColumn("time_since_first", F.col("sequence_number") - F.first("sequence_number").over(w))
)
rows.write.option("compression", "zstd").mode("overwrite").parquet(sys.argv[2])
spark.stop()
"""


def run(command: list[str], where: Path) -> tuple[float, float]:
    """Runs a process to its end; returns its seconds, and the megabytes that its largest process had resident."""
    start = time.perf_counter()
    with (where / "said.txt").open("wb") as said:
        process = subprocess.Popen([sys.executable, *command], stdout=said, stderr=subprocess.STDOUT)
        _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit((where / "said.txt").read_text()[-2000:])
    return time.perf_counter() - start, used.ru_maxrss * 1024 / 1e6


def events(folder: Path, rows: int) -> Path:
    config = folder / "simulate.json"
    file = folder / f"{rows}" / "events.parquet"
    file.parent.mkdir()
    config.write_text(json.dumps({"env": "cartpole_v0", "output_path": str(file), "rows": rows, "format": "events",
                                  "policy": {"kind": "random"}}))  # fmt: skip
    run(["-m", "workflows.simulate", "--config", str(config)], folder)
    return file


def timeline(folder: Path, file: Path, **top: Any) -> list[str]:
    out = folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    config = folder / "timeline.json"
    tree = {"timeline": {"inputTableName": str(file), "outputTableName": str(out), "numOutputShards": 2}, **top}
    config.write_text(json.dumps(tree))
    return ["-m", "workflows.timeline", "--config", str(config)]


def megabytes(folder: Path) -> float:
    return sum(file.stat().st_size for file in folder.glob("*.parquet")) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--memory_rows", type=int, default=10_000_000)
    parser.add_argument("--memory_limit_mb", type=int, default=350)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file, out = events(folder, options.rows), folder / "out"
        job = folder / "plain_job.py"
        job.write_text(PLAIN_JOB)
        commands = {
            "duckdb": lambda: timeline(folder, file),
            "spark": lambda: timeline(folder, file, engine="spark", master="local[2]"),
            "plain_spark_job": lambda: [str(job), str(file), str(out)],
        }
        seconds: dict[str, list[float]] = {what: [] for what in commands}
        written: dict[str, float] = {}
        for _ in range(options.repeats):
            for what, command in commands.items():
                seconds[what].append(run(command(), folder)[0])
                written[what] = megabytes(out)
        medians = {what: statistics.median(times) for what, times in seconds.items()}
        result: dict[str, Any] = {
            "rows": options.rows,
            "seconds": {what: round(one, 2) for what, one in medians.items()},
            "times_as_long_as_duckdb": {what: round(one / medians["duckdb"], 2) for what, one in medians.items()},
            "megabytes_of_events": round(file.stat().st_size / 1e6, 1),
            "megabytes_of_output": {what: round(one, 1) for what, one in written.items()},
            "output_to_input": round(written["duckdb"] / (file.stat().st_size / 1e6), 3),
        }
        if options.memory_rows:
            larger = events(folder, options.memory_rows)
            taken, peak = run(timeline(folder, larger, memory_limit_mb=options.memory_limit_mb), folder)
            result |= {"memory_rows": options.memory_rows, "memory_limit_mb": options.memory_limit_mb,
                       "peak_megabytes": round(peak), "memory_run_seconds": round(taken, 2)}  # fmt: skip
    json.dump(result, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
