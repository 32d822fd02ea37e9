"""The loop: batch, loss, gradient, step, target. Nothing waits for the device between a batch and the optimizer."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from reagent_lite.distributed.group import Group
from reagent_lite.training.metrics import Meter
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimization:
    """An optimizer and what surrounds its step.

    Attributes:
        optimizer: over the learner's trainable parameters.
        schedule: stepped once an epoch, or None for a fixed learning rate.
        clip_norm: largest norm of the whole gradient, or None.
    """

    optimizer: Optimizer
    schedule: LRScheduler | None = None
    clip_norm: float | None = None

    def step(self, parameters: Iterable[nn.Parameter]) -> None:
        """Clips, moves the parameters and clears the gradients."""
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters, self.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


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
) -> int:
    """Trains from the source's first batch to the plan's last step and returns the number of steps.

    Args:
        learner: forward(batch) -> (loss, metrics), row_losses and after_step().
        source: batches of this rank, minibatches_per_step of them a step.
        optimization: optimizer, schedule, clipping.
        group: averages gradients and metrics over ranks.
        plan: number of steps.
        report: called on every rank at the end of each epoch, and every `every_steps` steps.
        every_steps: more reports, or None.
        before_step: called with the number of the step that follows; a simulation collects experience here.
        on_step: called after each step with the rows read by all ranks so far.
        stop: asked after each epoch's report; every rank must answer alike.
        capture: turns an update on fixed buffers into one that is replayed on the device.
    """
    wrapped = group.wrap(learner)
    parameters = [p for p in learner.parameters() if p.requires_grad]
    meter, clock = Meter(), Clock()
    learner.train()

    def update() -> None:
        for minibatch in range(plan.minibatches_per_step):
            with group.gradients_stay_local(wrapped, last=minibatch == plan.minibatches_per_step - 1):
                with clock("time/gather"):
                    batch = next(source)
                with clock("time/learn"):
                    loss, metrics = wrapped(batch)
                    loss.backward()
            source.learned(learner.row_losses)  # type: ignore[arg-type]
            meter.add(metrics)
        with clock("time/step"):
            optimization.step(parameters)
            learner.after_step()  # type: ignore[operator]

    one_step = capture(update)
    rows = 0
    for step in range(plan.num_steps):
        with clock("time/simulate"):
            before_step(step)
        one_step()
        meter.step()
        rows += plan.rows_of_step(step)
        on_step(rows)
        done = step + 1
        end_of_epoch = done % plan.steps_per_epoch == 0 or done == plan.num_steps
        if end_of_epoch and optimization.schedule is not None:
            optimization.schedule.step()
        if end_of_epoch or (every_steps and done % every_steps == 0):
            figures = meter.means(group) | clock.seconds() | {"learning_rate": _learning_rate(optimization)}
            epoch = -(-done // plan.steps_per_epoch) if end_of_epoch else done // plan.steps_per_epoch
            report(Report(step=done, epoch=epoch, end_of_epoch=end_of_epoch, rows=rows, metrics=figures))
            if end_of_epoch and stop():
                return done
    return plan.num_steps


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
