"""Pair logged decisions to transitions."""

from typing import TYPE_CHECKING

from reagent_lite.config.timeline_config import TimelineConfig
from reagent_lite.errors import needing

if TYPE_CHECKING:
    from reagent_lite.data.timeline.stage import TimelineOutcome


def timeline(config: TimelineConfig) -> "TimelineOutcome":
    """Makes the transitions unless they are up to date; see data.timeline.stage.run_timeline."""
    with needing("data", "timeline.inputTableName"):
        from reagent_lite.data.timeline.stage import run_timeline
    return run_timeline(config)
