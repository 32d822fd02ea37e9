"""Write a log in another format: python -m workflows.convert --config x.json."""

import os
import sys

if not __package__:  # python workflows/convert.py: this folder would hide Python's own module inspect
    sys.path[0] = os.path.dirname(sys.path[0])

from reagent_lite.cli import Command, main_alone
from reagent_lite.config.convert_config import ConvertConfig
from reagent_lite.tasks.convert import convert

COMMAND = Command(
    module="workflows.convert",
    model=ConvertConfig,
    example="configs/gymnasium/convert.json",
    settings="--set data_path=log.csv --set output_path=log.parquet",
    outcome="log, rows, columns, rows_per_second, seconds",
)

if __name__ == "__main__":
    sys.exit(main_alone(COMMAND, convert))
