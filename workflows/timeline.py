"""Pair logged decisions to transitions: python -m workflows.timeline --config x.json."""

import os
import sys

if not __package__:  # python workflows/timeline.py: this folder would hide Python's own module inspect
    sys.path[0] = os.path.dirname(sys.path[0])

from typing import TYPE_CHECKING

from reagent_lite.cli import Command, main_alone
from reagent_lite.config.timeline import TimelineConfig
from reagent_lite.errors import needing

if TYPE_CHECKING:
    from reagent_lite.data.timeline.stage import TimelineOutcome


def timeline(config: TimelineConfig) -> "TimelineOutcome":
    """Makes the transitions unless they are up to date; see data.timeline.stage.run_timeline."""
    with needing("data", "timeline.inputTableName"):
        from reagent_lite.data.timeline.stage import run_timeline
    return run_timeline(config)


COMMAND = Command(
    module="workflows.timeline",
    model=TimelineConfig,
    example="configs/cartpole/timeline.json",
    settings="--set timeline.numOutputShards=8 --set memory_limit_mb=500",
    outcome="train, eval, train_rows, eval_rows, episodes, refused_rows, made, seconds",
)

if __name__ == "__main__":
    sys.exit(main_alone(COMMAND, timeline))
