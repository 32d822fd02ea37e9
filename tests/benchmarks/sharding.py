"""Making the shards of a log of CartPole, against copying its bytes and against pyarrow's own reading and writing.

    python -m tests.benchmarks.sharding [--rows 5000000] [--nodes 2] [--repeats 5] [--memory_rows 10000000]

A timeline's folder (16 files of whole episodes, with a manifest) needs links alone: it takes turns with a copy of its
bytes (`cp` and an fsync of what it wrote), whose speed in bytes of input is given as its share; bar 0.5.
One file is dealt row by row, which no copy of bytes compares with: it takes turns with pyarrow's `read_table` and
`write_table` of the same file and compression on all cores, and its seconds are given as a ratio to theirs; bar 1.5.
Medians. Peak memory is that of `workflows.shard` in a process of its own.
"""

import argparse
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from reagent_lite.config import check
from reagent_lite.config.shard import ShardConfig
from reagent_lite.config.simulate import SimulateConfig
from reagent_lite.data.shards.dealing import make_shards
from reagent_lite.data.stage import StageManifest
from reagent_lite.files import sync
from workflows.simulate import simulate

FILES = 16


def write_inputs(folder: Path, rows: int) -> dict[str, Path]:
    """Writes the log in both forms and returns their places."""
    one, timeline = folder / "one", folder / "timeline"
    one.mkdir()
    timeline.mkdir()
    tree = {"env": "cartpole_v0", "output_path": str(one / "log.parquet"), "format": "transitions", "rows": rows}
    simulate(check(SimulateConfig, {**tree, "use_gpu": False, "num_envs": 1024}))
    log = pq.ParquetFile(one / "log.parquet")
    bounds = np.linspace(0, log.num_row_groups, FILES + 1).astype(int)
    entries = {}
    for number, (start, stop) in enumerate(itertools.pairwise(bounds)):
        name = f"part-{number:05d}.parquet"
        with pq.ParquetWriter(timeline / name, log.schema_arrow, compression="zstd") as writer:
            for group in range(start, stop):
                writer.write_table(log.read_row_group(group))
        entries[name] = {"rows": pq.read_metadata(timeline / name).num_rows}
    manifest = StageManifest(
        kind="timeline", rows=log.metadata.num_rows, columns={}, settings={}, inputs=(), report={}, files=entries
    )
    manifest.write(timeline)
    return {"timeline": timeline, "one_file": one}


def copying(source: Path, target: Path) -> None:
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    for file in target.iterdir():
        sync(file)


def rewriting(source: Path, target: Path) -> None:
    target.mkdir()
    pq.write_table(pq.read_table(source), target / "log.parquet", compression="zstd")


def making(source: Path, target: Path, **settings: Any) -> None:
    target.mkdir()
    make_shards(ShardConfig(training_data_path=str(source), **settings), target)


def timed(work: Callable[..., None], source: Path, folder: Path, **settings: Any) -> float:
    """Returns the seconds of making a folder, which is removed again."""
    start = time.perf_counter()
    work(source, folder / "target", **settings)
    seconds = time.perf_counter() - start
    shutil.rmtree(folder / "target")
    return seconds


def measured(source: Path, folder: Path, nodes: int, repeats: int) -> dict[str, float]:
    other = rewriting if source.name == "one" else copying
    times = [(timed(other, source, folder), timed(making, source, folder, num_nodes=nodes)) for _ in range(repeats)]
    theirs, ours = (statistics.median(column) for column in zip(*times, strict=True))
    ratio = statistics.median(ours / one for one, ours in times)
    named = {"ratio_to_pyarrow": ratio} if source.name == "one" else {"share_of_copy_speed": 1 / ratio}
    size = sum(file.stat().st_size for file in source.iterdir())
    figures = {"megabytes": size / 1e6, f"{other.__name__}_seconds": theirs, "seconds": ours, **named}
    return {name: round(figure, 3) for name, figure in figures.items()}


def peak_megabytes(source: Path, folder: Path, layout: str, nodes: int) -> float:
    """Returns the peak of the command's resident set; VmHWM begins with the program, ru_maxrss with who started it."""
    program = (
        "import sys; from reagent_lite.config.shard import ShardConfig; from workflows.shard import shard;"
        "shard(ShardConfig.model_validate_json(sys.argv[1]));"
        "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    )
    tree = {"training_data_path": str(source), "shards_path": str(folder / "shards"), "layout": layout}
    command = [sys.executable, "-c", program, json.dumps({**tree, "num_nodes": nodes})]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    shutil.rmtree(folder / "shards")
    return round(int(done.stdout) * 1024 / 1e6)


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
            result[form] = measured(source, folder, options.nodes, options.repeats)
        replicas = timed(making, folder / "timeline", folder, layout="replicas", num_nodes=options.nodes)
        result["replicas_seconds"] = round(replicas, 1)
    if options.memory_rows:
        with tempfile.TemporaryDirectory() as name:
            places = write_inputs(Path(name), options.memory_rows)
            result["peak_megabytes"] = {
                f"{form}, {layout}": peak_megabytes(places[form], Path(name), layout, options.nodes)
                for form, layout in (("timeline", "shards"), ("one_file", "shards"), ("one_file", "replicas"))
            }
    json.dump(result, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
