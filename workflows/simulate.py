"""Play a policy in an environment and write its log: python -m workflows.simulate --config x.json."""

import os
import sys

if not __package__:  # python workflows/simulate.py: this folder would hide Python's own module inspect
    sys.path[0] = os.path.dirname(sys.path[0])

from reagent_lite.cli import Command, main_alone
from reagent_lite.config.simulate_config import SimulateConfig
from reagent_lite.tasks.simulate import simulate

COMMAND = Command(
    module="workflows.simulate",
    model=SimulateConfig,
    example="configs/cartpole/simulate.json",
    settings="--set rows=1000000 --set output_path=log.parquet",
    outcome="log, rows, episodes, mean_return, lower, upper, mean_return_of, rows_per_second, seconds, value_of",
)

if __name__ == "__main__":
    sys.exit(main_alone(COMMAND, simulate))
