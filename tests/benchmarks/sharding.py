"""The part of one of several machines: its training copy, and its rows by `workflows.shard`, from one Parquet file.

    python -m tests.benchmarks.sharding [--rows 2000000] [--nodes 2] [--repeats 5]

Every machine reads the whole file. The copy of its episodes takes turns with the copy of all rows; bar 1. Its rows
take turns with pyarrow's `read_table` and `write_table` of the whole file and the same compression on all cores; bar
1.5. Medians.
"""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq

from reagent_lite.config import check
from reagent_lite.config.shard_config import ShardConfig
from reagent_lite.config.simulate_config import SimulateConfig
from reagent_lite.data.copy.prepared_copy import prepare_training_copy
from reagent_lite.data.logs import Log
from reagent_lite.data.partition import Partition
from reagent_lite.data.shard_files import log_of_shard, write_shard
from reagent_lite.data.writing.part_files import PARQUET
from reagent_lite.tasks.simulate import simulate
from tests.benchmarks.turns import in_turns, medians, options_of, ratio, seconds_of, show


def timed(work: Callable[[Path], object], folder: Path) -> float:
    """Returns the seconds in which `work` fills a folder, which is removed again."""
    target = folder / "target"
    target.mkdir()
    seconds = seconds_of(lambda: work(target))
    shutil.rmtree(target)
    return seconds


def measured(file: Path, folder: Path, nodes: int, repeats: int) -> dict[str, float]:
    part = Partition(num_nodes=nodes, node=0, seed=0)
    config = ShardConfig(data_path=str(file), num_nodes=nodes, node_index=0)

    def copy(target: Path, partition: Partition | None) -> object:
        return prepare_training_copy(
            Log(str(file), actions=("left", "right"), directory=str(target), partition=partition)
        )

    def rewrite(target: Path) -> None:
        pq.write_table(pq.read_table(file), target / "log.parquet", **PARQUET)

    works = {
        "copy_of_a_part": lambda target: copy(target, part),
        "copy_of_all": lambda target: copy(target, None),
        "shard": lambda target: write_shard(config, log_of_shard(config), target),
        "pyarrow": rewrite,
    }
    times = in_turns({name: (lambda work=work: timed(work, folder)) for name, work in works.items()}, repeats)
    copies = ratio(times["copy_of_a_part"], times["copy_of_all"])
    return medians(times, 3) | {
        "copy_of_a_part_to_all": round(copies, 3),
        "shard_to_pyarrow": round(ratio(times["shard"], times["pyarrow"]), 3),
    }


if __name__ == "__main__":
    options = options_of(__doc__, rows=2_000_000, nodes=2, repeats=5)
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "log.parquet"
        tree = {"env": "cartpole_v0", "output_path": str(file), "format": "transitions", "rows": options.rows}
        simulate(check(SimulateConfig, {**tree, "use_gpu": False, "num_envs": 1024}))
        show(
            {
                "megabytes": round(file.stat().st_size / 1e6),
                **measured(file, Path(name), options.nodes, options.repeats),
            }
        )
