"""Pair logged decisions to transitions: python -m workflows.timeline --config x.json."""

import os
import sys

if not __package__:  # python workflows/timeline.py: this folder would hide Python's own module inspect
    sys.path[0] = os.path.dirname(sys.path[0])

from reagent_lite.cli import Command, main_alone
from reagent_lite.config.timeline_config import TimelineConfig
from reagent_lite.tasks.timeline import timeline

COMMAND = Command(
    module="workflows.timeline",
    model=TimelineConfig,
    example="configs/cartpole/timeline.json",
    settings="--set timeline.numOutputShards=8 --set memory_limit_mb=500",
    outcome="train, eval, train_rows, eval_rows, episodes, refused_rows, made, seconds",
)

if __name__ == "__main__":
    sys.exit(main_alone(COMMAND, timeline))
