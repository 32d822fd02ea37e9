"""Making the shards of a log of CartPole, against copying its bytes and against pyarrow's own reading and writing.

    python -m tests.benchmarks.sharding [--rows 5000000] [--nodes 2] [--repeats 5] [--memory_rows 10000000]

A timeline's folder (16 files of whole episodes, with a manifest) needs links alone: it takes turns with a copy of its
bytes (`cp` and an fsync of what it wrote), whose speed in bytes of input is given as its share; bar 0.5.
One file is dealt row by row, which no copy of bytes compares with: it takes turns with pyarrow's `read_table` and
`write_table` of the same file and compression on all cores, and its seconds are given as a ratio to theirs; bar 1.5.
Medians. Peak memory is that of `workflows.shard` in a process of its own.
"""

import json
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from reagent_lite.config import check
from reagent_lite.config.shard_config import ShardConfig
from reagent_lite.config.simulate_config import SimulateConfig
from reagent_lite.data.shards.partition import make_shards
from reagent_lite.data.stage_folder import StageManifest
from reagent_lite.tasks.simulate import simulate
from reagent_lite.whole_files import sync
from tests.benchmarks.turns import in_turns, medians, options_of, ratio, run, seconds_of, show

FILES = 16


def write_inputs(folder: Path, rows: int) -> dict[str, Path]:
    """Writes the log in both forms and returns their places."""
    places = {"timeline": folder / "timeline", "one_file": folder / "one"}
    for place in places.values():
        place.mkdir()
    file = places["one_file"] / "log.parquet"
    tree = {"env": "cartpole_v0", "output_path": str(file), "format": "transitions", "rows": rows}
    simulate(check(SimulateConfig, {**tree, "use_gpu": False, "num_envs": 1024}))
    log = pq.ParquetFile(file)
    entries = {}
    for number, groups in enumerate(np.array_split(np.arange(log.num_row_groups), FILES)):
        name = f"part-{number:05d}.parquet"
        part = log.read_row_groups(groups.tolist())
        pq.write_table(part, places["timeline"] / name, compression="zstd", row_group_size=1 << 20)
        entries[name] = {"rows": part.num_rows}
    StageManifest(
        kind="timeline", rows=log.metadata.num_rows, columns={}, settings={}, inputs=(), report={}, files=entries
    ).write(places["timeline"])
    return places


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
    seconds = seconds_of(lambda: work(source, folder / "target", **settings))
    shutil.rmtree(folder / "target")
    return seconds


def measured(source: Path, folder: Path, nodes: int, repeats: int) -> dict[str, float]:
    other = rewriting if source.name == "one" else copying
    times = in_turns({
        "seconds": lambda: timed(making, source, folder, num_nodes=nodes),
        f"{other.__name__}_seconds": lambda: timed(other, source, folder),
    }, repeats)  # fmt: skip
    to_other = ratio(*times.values())
    share = {"ratio_to_pyarrow": to_other} if other is rewriting else {"share_of_copy_speed": 1 / to_other}
    return {
        "megabytes": round(sum(file.stat().st_size for file in source.iterdir()) / 1e6, 3),
        **medians(times, 3),
        **{name: round(figure, 3) for name, figure in share.items()},
    }


def peak_megabytes(source: Path, folder: Path, layout: str, nodes: int) -> float:
    """Returns the peak of the command's resident set; VmHWM begins with the program, ru_maxrss with who started it."""
    program = (
        "import sys; from reagent_lite.config.shard_config import ShardConfig;"
        "from reagent_lite.tasks.shard import shard;"
        "shard(ShardConfig.model_validate_json(sys.argv[1]));"
        "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    )
    tree = {"training_data_path": str(source), "shards_path": str(folder / "shards"), "layout": layout}
    done = run("-c", program, json.dumps({**tree, "num_nodes": nodes}))
    shutil.rmtree(folder / "shards")
    return round(int(done.out.split()[-1]) * 1024 / 1e6)


if __name__ == "__main__":
    options = options_of(__doc__, rows=5_000_000, nodes=2, repeats=5, memory_rows=10_000_000)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        result: dict[str, object] = {
            form: measured(source, folder, options.nodes, options.repeats)
            for form, source in write_inputs(folder, options.rows).items()
        }
        result["replicas_seconds"] = round(
            timed(making, folder / "timeline", folder, layout="replicas", num_nodes=options.nodes), 1
        )
    if options.memory_rows:
        with tempfile.TemporaryDirectory() as name:
            places = write_inputs(Path(name), options.memory_rows)
            result["peak_megabytes"] = {
                f"{form}, {layout}": peak_megabytes(places[form], Path(name), layout, options.nodes)
                for form, layout in (("timeline", "shards"), ("one_file", "shards"), ("one_file", "replicas"))
            }
    show(result)
