"""Making the shards of a log of CartPole, against copying its bytes.

    python -m tests.benchmarks.sharding [--rows 5000000] [--nodes 2] [--repeats 5] [--memory_rows 10000000]

Four forms of one input take turns with a copy of the same bytes (`cp` and an fsync of what it wrote); medians, in bytes
of input per second, as a share of the copy's. Row groups move without decoding: a timeline's folder (16 files of whole
episodes, with a manifest), the same files without one, and one file. The rows in a random order of time go row by row.
Peak memory is that of `workflows.shard` in a process of its own.
"""

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from reagent_lite.config import check
from reagent_lite.config.shard import ShardConfig
from reagent_lite.config.simulate import SimulateConfig
from reagent_lite.data.shards.dealing import make_shards
from reagent_lite.data.stage import StageManifest, write_manifest
from reagent_lite.files import sync
from workflows.simulating import simulate

FILES = 16


def write_inputs(folder: Path, rows: int) -> dict[str, Path]:
    """Writes the log in its forms and returns their places."""
    one, files, timeline, mixed = (folder / name for name in ("one", "files", "timeline", "mixed"))
    for place in (one, files, timeline, mixed):
        place.mkdir()
    tree = {"env": "cartpole_v0", "output_path": str(one / "log.parquet"), "format": "transitions", "rows": rows}
    simulate(check(SimulateConfig, {**tree, "use_gpu": False, "num_envs": 1024}))
    log = pq.ParquetFile(one / "log.parquet")
    bounds = np.linspace(0, log.num_row_groups, FILES + 1).astype(int)
    entries = {}
    with pq.ParquetWriter(mixed / "log.parquet", log.schema_arrow, compression="zstd") as mixing:
        for number, (start, stop) in enumerate(itertools.pairwise(bounds)):
            name = f"part-{number:05d}.parquet"
            with pq.ParquetWriter(files / name, log.schema_arrow, compression="zstd") as writer:
                for group in range(start, stop):
                    table = log.read_row_group(group)
                    writer.write_table(table)
                    order = np.argsort(table["sequence_number"].to_numpy(), kind="stable")
                    mixing.write_table(table.take(pa.array(order)))
            os.link(files / name, timeline / name)
            entries[name] = {"rows": pq.read_metadata(files / name).num_rows}
    write_manifest(timeline, StageManifest(kind="timeline", rows=log.metadata.num_rows, columns={}, settings={},
                                           inputs=(), report={}, files=entries))  # fmt: skip
    return {"timeline": timeline, "files": files, "one_file": one, "row_by_row": mixed}


def copying(source: Path, target: Path) -> float:
    start = time.perf_counter()
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    for file in target.iterdir():
        sync(file)
    seconds = time.perf_counter() - start
    shutil.rmtree(target)
    return seconds


def making(source: Path, target: Path, nodes: int, layout: str = "shards") -> float:
    target.mkdir()
    start = time.perf_counter()
    kind = "replicas" if layout == "replicas" else "shards"
    make_shards(ShardConfig(training_data_path=str(source), layout=kind, num_nodes=nodes), target)
    seconds = time.perf_counter() - start
    shutil.rmtree(target)
    return seconds


def measured(source: Path, folder: Path, nodes: int, repeats: int) -> dict[str, float]:
    times = [(copying(source, folder / "copy"), making(source, folder / "made", nodes)) for _ in range(repeats)]
    copy, make = (statistics.median(column) for column in zip(*times, strict=True))
    return {
        "megabytes": round(sum(file.stat().st_size for file in source.iterdir()) / 1e6, 1),
        "copy_seconds": round(copy, 3),
        "seconds": round(make, 3),
        "share_of_copy_speed": round(statistics.median(one / other for one, other in times), 2),
    }


def peak_megabytes(source: Path, folder: Path, layout: str, nodes: int) -> float:
    tree = {"training_data_path": str(source), "shards_path": str(folder / "shards"), "layout": layout,
            "num_nodes": nodes}  # fmt: skip
    (folder / "shard.json").write_text(json.dumps(tree))
    command = [sys.executable, "-m", "workflows.shard", "--config", str(folder / "shard.json")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0
    shutil.rmtree(folder / "shards")
    return round(usage.ru_maxrss * 1024 / 1e6)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--memory_rows", type=int, default=10_000_000)
    options = parser.parse_args()
    result: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for form, source in write_inputs(folder, options.rows).items():
            repeats = min(2, options.repeats) if form == "row_by_row" else options.repeats
            result[form] = measured(source, folder, options.nodes, repeats)
        result["replicas_seconds"] = round(making(folder / "timeline", folder / "made", options.nodes, "replicas"), 1)
    if options.memory_rows:
        with tempfile.TemporaryDirectory() as name:
            places = write_inputs(Path(name), options.memory_rows)
            result["peak_megabytes"] = {
                form: peak_megabytes(places[form], Path(name), "shards", options.nodes)
                for form in ("timeline", "one_file", "row_by_row")
            }
    json.dump(result, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
