"""Write one machine's episodes of a log to its disk: python -m workflows.shard --config x.json --num_nodes N."""

import os
import sys

if not __package__:  # python workflows/shard.py: this folder would hide Python's own module inspect
    sys.path[0] = os.path.dirname(sys.path[0])

from reagent_lite.cli import Command, Flag, main_alone
from reagent_lite.config.shard_config import ShardConfig
from reagent_lite.tasks.shard import shard

COMMAND = Command(
    module="workflows.shard",
    model=ShardConfig,
    example="configs/cluster/shard.json",
    settings="--num_nodes 2 --node_index 0",
    outcome="path, rows, made, seconds",
    flags={
        "num_nodes": Flag("--num_nodes", "machines", int),
        "node_index": Flag(
            "--node_index", "number of this machine, from 0: its episodes are written to output_path", int
        ),
    },
    notes="""\
The command is the same on every machine but for --node_index, in any order: each reads data_path, which all of
them have to see, and writes its own episodes to output_path. Rows that are up to date are not written again.""",
)

if __name__ == "__main__":
    sys.exit(main_alone(COMMAND, shard))
