"""Events to transitions, whole processes: ours on this machine, and the same job written by hand for Spark local[2].

    python -m tests.benchmarks.timeline [--rows 5000000] [--repeats 3] [--suffix .jsonl] [--memory_rows 10000000]
                                        [--memory_limit_mb 200]

The events are those of CartPole with random actions, made by workflows.simulate: one true end or limit per episode of
some 22 rows. Spark's job makes the same rows by window functions; it checks no row, counts nothing and keeps no
manifest. The two take turns; medians. All rows are counted and those of some episodes compared. Last, the peak resident
memory of our whole process under a limit, on more rows, as Parquet.
"""

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tests.benchmarks.turns import Finished, in_turns, medians, options_of, run, show, write_config

EPISODES = 200
"""That are compared row by row."""
SPARK_JOB = """
import sys
from pyspark.sql import SparkSession

spark = (SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").config("spark.driver.memory", "4g")
         .config("spark.driver.bindAddress", "127.0.0.1").config("spark.driver.host", "127.0.0.1").getOrCreate())
file, target = sys.argv[1:]
if file.endswith(".parquet"):
    spark.read.parquet(file).createOrReplaceTempView("events")
else:
    map_, list_ = "MAP<STRING, FLOAT>", "ARRAY<STRING>"  # keys of JSON are strings
    columns = {"mdp_id": "STRING", "sequence_number": "BIGINT", "state_features": map_, "next_state_features": map_,
               "action": "STRING", "possible_actions": list_, "possible_next_actions": list_, "reward": "DOUBLE",
               "action_probability": "DOUBLE", "terminal": "BOOLEAN", "truncated": "BOOLEAN"}
    events = spark.read.schema(", ".join(f"{name} {kind}" for name, kind in columns.items())).json(file)
    maps = {name: events[name].cast("MAP<BIGINT, FLOAT>") for name, kind in columns.items() if kind == map_}
    events.withColumns(maps).createOrReplaceTempView("events")
spark.sql('''
WITH numbered AS (
    SELECT *, LAG(sequence_number) OVER (PARTITION BY mdp_id ORDER BY sequence_number) AS number_before
    FROM events
), followed AS (
    SELECT *, ROW_NUMBER() OVER w AS sequence_number_ordinal, FIRST_VALUE(sequence_number) OVER w AS first_number,
        LEAD(sequence_number) OVER w AS number_after, LEAD(state_features) OVER w AS state_after,
        LEAD(action) OVER w AS action_after, LEAD(possible_actions) OVER w AS choices_after
    FROM numbered WHERE number_before IS NULL OR number_before <> sequence_number
    WINDOW w AS (PARTITION BY mdp_id ORDER BY sequence_number)
)
SELECT mdp_id, sequence_number, sequence_number_ordinal, sequence_number - first_number AS time_since_first,
    CASE WHEN terminal THEN 0 WHEN truncated THEN 1 ELSE number_after - sequence_number END AS time_diff,
    state_features, action, reward, action_probability, possible_actions, terminal, truncated,
    CASE WHEN terminal THEN NULL WHEN truncated THEN next_state_features ELSE state_after END AS next_state_features,
    CASE WHEN terminal OR truncated THEN NULL ELSE action_after END AS next_action,
    CASE WHEN terminal THEN ARRAY() WHEN truncated THEN possible_next_actions ELSE choices_after
        END AS possible_next_actions
FROM followed
WHERE terminal OR (truncated AND next_state_features IS NOT NULL) OR (NOT truncated AND number_after IS NOT NULL)
''').write.mode("overwrite").parquet(target)
"""


def events(folder: Path, rows: int, suffix: str) -> Path:
    file = folder / f"{rows}" / f"events{suffix}"
    tree = {"env": "cartpole_v0", "output_path": str(file), "rows": rows, "format": "events",
            "policy": {"kind": "random"}}  # fmt: skip
    run("-m", "workflows.simulate", "--config", write_config(file.parent, tree))
    return file


def timeline(folder: Path, file: Path, **top: Any) -> Finished:
    out = folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    tables = {"inputTableName": str(file), "outputTableName": str(out), "numOutputShards": 2}
    return run("-m", "workflows.timeline", "--config", write_config(folder, {"timeline": tables, **top}))


def rows_of(folder: Path, columns: list[str], ids: pa.Array) -> tuple[int, list[dict[str, Any]]]:
    """How many rows a folder has, and some columns of some episodes in order."""
    files = sorted(folder.glob("*.parquet"))
    some = pq.read_table(files, columns=columns, filters=pc.field("mdp_id").isin(ids), partitioning=None)
    order = [("mdp_id", "ascending"), ("sequence_number", "ascending")]
    return sum(pq.read_metadata(file).num_rows for file in files), some.sort_by(order).to_pylist()


def require_same(ours: Path, spark: Path) -> None:
    ids = pq.read_table(ours / "part-00000.parquet", columns=["mdp_id"])["mdp_id"].unique()[:EPISODES]
    columns = pq.read_schema(next(spark.glob("*.parquet"))).names
    if rows_of(ours, columns, ids) != rows_of(spark, columns, ids):
        sys.exit("the rows of the two differ")


if __name__ == "__main__":
    options = options_of(
        __doc__, rows=5_000_000, repeats=3, suffix=".jsonl", memory_rows=10_000_000, memory_limit_mb=200
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        result: dict[str, Any] = {}
        if options.memory_rows:  # first: a process counts as its own peak what its parent had resident when it began
            limited = timeline(
                folder, events(folder, options.memory_rows, ".parquet"), memory_limit_mb=options.memory_limit_mb
            )
            result |= {"memory_rows": options.memory_rows, "memory_limit_mb": options.memory_limit_mb,
                       "peak_megabytes": round(limited.peak / 1e6),
                       "memory_run_seconds": round(limited.seconds, 2)}  # fmt: skip
        file = events(folder, options.rows, options.suffix)
        times = in_turns(
            {
                "seconds": lambda: timeline(folder, file).seconds,
                "seconds_of_spark": lambda: run("-c", SPARK_JOB, file, folder / "spark").seconds,
            },
            options.repeats,
        )
        require_same(folder / "out", folder / "spark")
        result |= {
            "rows": options.rows,
            "events": options.suffix,
            **medians(times, 2),
            "times_as_long_as_ours": [round(theirs / mine, 2) for mine, theirs in zip(*times.values(), strict=True)],
        }
    show(result)
