"""The loop: batch, loss, gradient, step, target. Nothing waits for the device between a batch and the optimizer."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from reagent_lite.distributed.group import Group
from reagent_lite.distributed.rehearsal import rehearse
from reagent_lite.training.metrics import Meter
from reagent_lite.training.optimization import Optimization
from reagent_lite.types import BatchSource


class StepPlan(Protocol):
    """What the loop needs to know of a read plan."""

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the run."""
        ...

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of one pass."""
        ...

    @property
    def minibatches_per_step(self) -> int:
        """Gradient accumulation."""
        ...

    def rows_of_step(self, step: int) -> int:
        """Returns the rows of a step over all ranks."""
        ...


@dataclass(slots=True, kw_only=True)
class Position:
    """How far a run is; the loop moves it, a checkpoint saves it.

    Attributes:
        step: optimizer steps done.
        rows: rows read by all ranks.
        meter: sums since the last report.
    """

    step: int = 0
    rows: int = 0
    meter: Meter = field(default_factory=Meter)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Figures since the last report.

    Attributes:
        step: optimizer steps done.
        epoch: passes completed.
        end_of_epoch: whether a pass has just been completed.
        rows: rows read by all ranks since the start.
        metrics: means over steps and ranks, and times.
    """

    step: int
    epoch: int
    end_of_epoch: bool
    rows: int
    metrics: dict[str, float]


Update = Callable[[], None]


def fit(
    learner: nn.Module,
    source: BatchSource,
    optimization: Optimization,
    group: Group,
    plan: StepPlan,
    *,
    report: Callable[[Report], None],
    every_steps: int | None = None,
    before_step: Callable[[int], None] = lambda step: None,
    on_step: Callable[[int], None] = lambda rows: None,
    stop: Callable[[], bool] = lambda: False,
    capture: Callable[[Update], Update] = lambda update: update,
    position: Position | None = None,
    between: Callable[[], None] = lambda: None,
) -> int:
    """Trains from the position to the plan's last step and returns the number of steps done since the run began.

    Args:
        learner: forward(batch) -> (loss, metrics), row_errors and after_step().
        source: batches of this rank, minibatches_per_step of them a step.
        optimization: optimizer, schedule, clipping.
        group: averages gradients and metrics over ranks.
        plan: number of steps.
        report: called on every rank at the end of each epoch, and every `every_steps` steps.
        every_steps: more reports, or None.
        before_step: called with the number of the step that follows; a simulation collects experience here.
        on_step: called after each step with the rows read by all ranks so far.
        stop: asked between two epochs; every rank must answer alike.
        capture: turns an update on fixed buffers into one that is replayed on the device.
        position: where to begin, and kept up to date; None begins at the beginning.
        between: called after each step and what is reported of it; checkpoints are saved here.
    """
    at = Position() if position is None else position
    wrapped = group.wrap(learner)
    clock = Clock()
    learner.train()
    rehearsed = False

    def update() -> None:
        nonlocal rehearsed
        for minibatch in range(plan.minibatches_per_step):
            with clock("time/gather"):
                batch = next(source)
            if not rehearsed:
                rehearse(wrapped, lambda: wrapped(batch)[0])  # noqa: B023 # called at once
                rehearsed = True
            last = minibatch == plan.minibatches_per_step - 1
            with group.gradients_stay_local(wrapped, last=last), clock("time/learn"):
                loss, metrics = wrapped(batch)
                if last:
                    group.entering(at.step)  # gradients are averaged on the way back
                loss.backward()
            source.learned(learner.row_errors)  # type: ignore[arg-type]
            at.meter.add(metrics)
        with clock("time/step"):
            optimization.step()
            learner.after_step()  # type: ignore[operator]

    one_step = capture(update)
    num_steps, steps_per_epoch = plan.num_steps, plan.steps_per_epoch
    while at.step < num_steps:
        if at.step and at.step % steps_per_epoch == 0 and stop():
            break
        with clock("time/simulate"):
            before_step(at.step)
        one_step()
        at.meter.step()
        at.rows += plan.rows_of_step(at.step)
        at.step += 1
        on_step(at.rows)
        end_of_epoch = at.step % steps_per_epoch == 0 or at.step == num_steps
        if end_of_epoch and optimization.schedule is not None:
            optimization.schedule.step()
        if end_of_epoch or (every_steps and at.step % every_steps == 0):
            figures = at.meter.means(group) | clock.seconds() | {"learning_rate": _learning_rate(optimization)}
            epoch = -(-at.step // steps_per_epoch) if end_of_epoch else at.step // steps_per_epoch
            report(Report(step=at.step, epoch=epoch, end_of_epoch=end_of_epoch, rows=at.rows, metrics=figures))
        between()
    return at.step


class Clock:
    """Host seconds by stage; on a GPU a stage's work is queued, not awaited."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._stage = ""
        self._start = 0.0

    def __call__(self, stage: str) -> "Clock":
        """Names the stage that the next block is."""
        self._stage = stage
        return self

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self._seconds[self._stage] = self._seconds.get(self._stage, 0.0) + time.perf_counter() - self._start

    def seconds(self) -> dict[str, float]:
        """Returns the seconds by stage since the last call, and starts anew."""
        seconds, self._seconds = self._seconds, {}
        return seconds


def _learning_rate(optimization: Optimization) -> float:
    rate = optimization.optimizer.param_groups[0]["lr"]
    return float(rate.item() if isinstance(rate, torch.Tensor) else rate)
