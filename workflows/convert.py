"""Write a log in another format: python -m workflows.convert --config x.json."""

import sys

from reagent_lite.config.convert import ConvertConfig
from workflows.command_line import Command, main_alone
from workflows.converting import convert

COMMAND = Command(
    module="workflows.convert",
    model=ConvertConfig,
    example="configs/gymnasium/convert.json",
    settings="--set input_path=log.csv --set output_path=log.parquet",
    outcome="log, rows, episodes, dropped_rows, columns, left_out, rows_per_second, seconds",
)

if __name__ == "__main__":
    sys.exit(main_alone(COMMAND, ConvertConfig, convert))
