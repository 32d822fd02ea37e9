"""How many of Spark's tasks are done: asked of a classic session once a second, told by a Connect server."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from reagent_lite.data.timeline.engine import looking

if TYPE_CHECKING:
    from pyspark import SparkContext, StatusTracker

Tasks = Callable[[int, int], None]
"""Takes (tasks done, tasks known so far): Spark plans a query as it goes, so that both grow."""

_SECONDS = 1.0
_GROUP = "spark.jobGroup.id"


def share_of(total: int, show: Callable[[int, int], None]) -> Tasks:
    """Returns what shows the share of tasks that are done, of a total of something else; it does not go back."""
    furthest = 0

    def tell(done: int, known: int) -> None:
        nonlocal furthest
        furthest = max(furthest, total * done // (known + 1))  # there may be one more
        show(furthest, total)

    return tell


@contextmanager
def classic_tasks(context: SparkContext, tell: Tasks) -> Iterator[None]:
    """Tells of the jobs that this thread starts inside the block; the thread's own group of jobs stands again after it.

    Args:
        context: of the session.
        tell: called from a thread of its own.
    """
    group, before = f"reagent-lite-{uuid.uuid4().hex}", context.getLocalProperty(_GROUP)
    tracker = context.statusTracker()

    def look() -> None:
        done = known = 0
        with suppress(Exception):  # a Spark that is gone: the block's own call says so
            done, known = _tasks(tracker, group)
        if known:
            tell(done, known)

    context.setLocalProperty(_GROUP, group)
    try:
        with looking(_SECONDS, look):
            yield
    finally:
        context.setLocalProperty(_GROUP, before)  # type: ignore[arg-type] # None takes it away


def _tasks(tracker: StatusTracker, group: str) -> tuple[int, int]:
    """Returns tasks done and known; stages that an ended job has skipped have none."""
    done = known = 0
    for number in tracker.getJobIdsForGroup(group):
        job = tracker.getJobInfo(number)
        stages = [] if job is None else [tracker.getStageInfo(stage) for stage in job.stageIds]
        for stage in stages:
            if stage is not None:
                done += stage.numCompletedTasks
                known += stage.numTasks if job is not None and job.status == "RUNNING" else stage.numCompletedTasks
    return done, known


@contextmanager
def connect_tasks(session: Any, tell: Tasks) -> Iterator[None]:
    """Tells of the operations of a Connect session inside the block, as often as its server reports.

    Args:
        session: of Spark Connect.
        tell: called from the thread that waits for an operation.
    """
    ended = 0
    running = 0

    def hear(*, stages: Any, inflight_tasks: int, operation_id: str | None, done: bool) -> None:
        nonlocal ended, running
        if done:
            ended, running = ended + running, 0
            return
        stages = list(stages or ())
        running = sum(stage.num_completed_tasks for stage in stages)
        tell(ended + running, ended + sum(stage.num_tasks for stage in stages))

    session.registerProgressHandler(hear)
    try:
        yield
    finally:
        session.removeProgressHandler(hear)
