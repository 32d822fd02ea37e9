"""Describe a log and write a config for it: python -m workflows.inspect --data LOG --output CONFIG."""

import os
import sys

if not __package__:  # python workflows/inspect.py: this folder would hide Python's own module inspect
    sys.path[0] = os.path.dirname(sys.path[0])

from reagent_lite.cli import Command, Flag, main_alone
from reagent_lite.config.inspect_config import InspectConfig
from reagent_lite.tasks.inspect import inspect

COMMAND = Command(
    module="workflows.inspect",
    model=InspectConfig,
    example="configs/cartpole/inspect.json",
    settings="--data log.csv --output config.json",
    outcome="config, workflow, rows, columns, decide, seconds",
    flags={
        "data_path": Flag("--data", "the log"),
        "output_path": Flag("--output", "the config to write"),
        "rows": Flag("--rows", "number of rows to read", int),
    },
    needs_config=False,
)

if __name__ == "__main__":
    sys.exit(main_alone(COMMAND, inspect))
