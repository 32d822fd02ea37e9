"""Make a shard of the rows for each machine, and fetch one: python -m workflows.shard --config x.json --num_nodes N."""

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
    outcome="shards, generation, rows, made, local, fetched, seconds",
    flags={
        "num_nodes": Flag("--num_nodes", "machines", int),
        "node_index": Flag("--node_index", "number of this machine, from 0: its shard is fetched to local_path", int),
    },
    notes="""\
Without --node_index the command makes the shards of all machines at shards_path, unless they exist.
With --node_index the command is the same on every machine, in any order: machine 0 makes the shards unless they exist,
the others wait for them up to wait_seconds; then each machine fetches its shard to local_path and checks it by sha256.
Valid shards are not made or fetched again. A machine that does not see training_data_path uses the shards whose layout,
number and seed fit.""",
)

if __name__ == "__main__":
    sys.exit(main_alone(COMMAND, shard))
