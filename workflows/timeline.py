"""Make transitions of logged decisions: python -m workflows.timeline --config x.json."""

import sys

from reagent_lite.cli import Command, main_alone
from reagent_lite.config.timeline import TimelineConfig
from reagent_lite.data.timeline.stage import run_timeline

COMMAND = Command(
    module="workflows.timeline",
    model=TimelineConfig,
    example="configs/cartpole/timeline.json",
    settings="--set timeline.numOutputShards=8 --set memory_limit_mb=500",
    outcome="train, eval, train_rows, eval_rows, episodes, refused_rows, made, seconds",
)

if __name__ == "__main__":
    sys.exit(main_alone(COMMAND, run_timeline))
