"""Train configs with several seeds, and choose one: python -m workflows.compare --config x.json.

config ─► runs, divided among the machines that see the folder ─► curves, table, choice ─► decision on other episodes
"""

import os
import sys

if not __package__:  # python workflows/compare.py: this folder would hide Python's own module inspect
    sys.path[0] = os.path.dirname(sys.path[0])

from reagent_lite.cli import Command, Flag, main_alone
from reagent_lite.config.compare_config import CompareConfig
from reagent_lite.tasks.compare import compare_runs

COMMAND = Command(
    module="workflows.compare",
    model=CompareConfig,
    example="configs/cartpole/compare.json",
    settings="--set 'seeds=[0,1,2,3,4]' --set output_path=outputs/seeds",
    outcome="chosen, decision, model, compared, failed, page, report, seconds",
    codes=(
        "0  done",
        "1  unexpected error",
        "2  config or data error",
        "4  a run failed; the others are compared, and the same command tries it again",
        "75 stopped by a signal, run again to continue",
    ),
    flags={"processes": Flag("--processes", "number of runs at the same time on this machine", int)},
    notes="""\
Each run is a process with the command of its workflow. Finished runs are not repeated, unfinished ones continue from
their checkpoint. The same command on several machines with the folder on a share divides the runs among them.""",
)

if __name__ == "__main__":
    sys.exit(main_alone(COMMAND, compare_runs, code_of=lambda compared: compared.exit_code))
