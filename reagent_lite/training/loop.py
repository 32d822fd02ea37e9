"""The loop: batch, loss, gradient, step, target. Nothing waits for the device between a batch and the optimizer."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from reagent_lite.distributed.group import Group, rehearse
from reagent_lite.training.metrics import Meter
from reagent_lite.types import BatchSource


class StepPlan(Protocol):
    """The part of a read plan that the loop uses."""

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
class Optimization:
    """An optimizer with gradient clipping and a schedule of learning rates.

    Attributes:
        optimizer: over the learner's trainable parameters.
        schedule: stepped once an epoch, or None for a fixed learning rate.
        clip_norm: largest norm of a gradient, or None.
        clipped: parameters whose gradients have one norm: those of each learner.
    """

    optimizer: Optimizer
    schedule: LRScheduler | None = None
    clip_norm: float | None = None
    clipped: Sequence[Sequence[nn.Parameter]] = ()

    def step(self) -> None:
        """Clips the gradient, updates the parameters and clears the gradient."""
        if self.clip_norm is not None:
            for parameters in self.clipped:
                nn.utils.clip_grad_norm_(parameters, self.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def progress(self) -> dict[str, Any] | None:
        """Returns the schedule's progress as JSON; the rates are in the optimizer's settings."""
        if self.schedule is None:
            return None
        return {"last_epoch": self.schedule.last_epoch, "_step_count": self.schedule._step_count}

    def load_progress(self, saved: dict[str, Any] | None) -> None:
        """Restores the schedule's progress; the rates must have been restored before."""
        if self.schedule is not None and saved is not None:
            rates = [group["lr"] for group in self.optimizer.param_groups]
            self.schedule.load_state_dict({**saved, "_last_lr": rates})


@dataclass(slots=True, kw_only=True)
class Position:
    """Progress of a run; the loop advances it, a checkpoint saves it.

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
        seconds: since the last report, without what hooks did to report it.
    """

    step: int
    epoch: int
    end_of_epoch: bool
    rows: int
    metrics: dict[str, float]
    seconds: float


Update = Callable[[], None]


class Stateful(Protocol):
    """An object whose state is saved between two steps."""

    def state_dict(self) -> dict[str, Any]:
        """Returns nested dictionaries of tensors and numbers."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores such a state."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """Everything of a run that changes while it learns.

    Attributes:
        learner: forward(batch) -> (loss, metrics), row_errors and after_step(); all its tensors, target networks and
            running statistics included, are its state.
        optimization: moments, counts, learning rates.
        source: batches of this rank.
        evaluators: models fitted so far, the same on all ranks.
        position: steps and rows done, and sums since the last report.
        reported: returns, as JSON, what was reported so far; called when a checkpoint is written.
    """

    learner: nn.Module
    optimization: Optimization
    source: BatchSource
    evaluators: Stateful
    position: Position = field(default_factory=Position)
    reported: Callable[[], dict[str, Any]] = dict


class Hooks:
    """Called around the steps of a run on every rank; these methods do nothing."""

    def before_step(self, step: int) -> None:
        """Called with the number of the step that follows; a simulation collects experience here."""

    def report(self, report: Report) -> None:
        """Called at the end of each epoch, and every `every_steps` steps."""

    def after_step(self) -> None:
        """Called after each step and its report; checkpoints are saved here."""

    def satisfied(self) -> bool:
        """Returns whether the run may end; called between two epochs, the same answer on every rank."""
        return False


def fit(
    running: Running,
    plan: StepPlan,
    group: Group,
    hooks: Hooks,
    *,
    every_steps: int | None = None,
    capture: Callable[[Update], Update] = lambda update: update,
) -> None:
    """Trains from the run's position to the plan's last step and keeps the position up to date.

    Args:
        running: learner, optimizer and batches, minibatches_per_step of them a step.
        plan: number of steps.
        group: averages gradients and metrics over ranks.
        hooks: called around the steps.
        every_steps: reports between the ends of epochs, or None.
        capture: turns an update on fixed buffers into one that is replayed on the device.
    """
    learner, optimization, at = running.learner, running.optimization, running.position
    wrapped = group.wrap(learner)
    clock = Clock()
    learner.train()
    rehearsed = False

    def update() -> None:
        nonlocal rehearsed
        for minibatch in range(plan.minibatches_per_step):
            with clock("time/gather"):
                batch = next(running.source)
            if not rehearsed:
                rehearse(wrapped, lambda: wrapped(batch)[0])  # noqa: B023 # called at once
                rehearsed = True
            last = minibatch == plan.minibatches_per_step - 1
            with group.gradients_stay_local(wrapped, last=last), clock("time/learn"):
                loss, metrics = wrapped(batch)
                if last:
                    group.enter_collective(at.step)  # gradients are averaged on the way back
                loss.backward()
            running.source.learned(learner.row_errors)  # type: ignore[arg-type]
            at.meter.add(metrics)
        with clock("time/step"):
            optimization.step()
            learner.after_step()  # type: ignore[operator]

    one_step = capture(update)
    num_steps, steps_per_epoch = plan.num_steps, plan.steps_per_epoch
    since = time.perf_counter()
    while at.step < num_steps:
        if at.step and at.step % steps_per_epoch == 0 and hooks.satisfied():
            break
        with clock("time/simulate"):
            hooks.before_step(at.step)
        one_step()
        at.meter.step()
        at.rows += plan.rows_of_step(at.step)
        at.step += 1
        end_of_epoch = at.step % steps_per_epoch == 0 or at.step == num_steps
        if end_of_epoch and optimization.schedule is not None:
            optimization.schedule.step()
        if end_of_epoch or (every_steps and at.step % every_steps == 0):
            figures = at.meter.means(group) | clock.seconds() | {"learning_rate": _learning_rate(optimization)}
            epoch = -(-at.step // steps_per_epoch) if end_of_epoch else at.step // steps_per_epoch
            seconds = time.perf_counter() - since
            hooks.report(
                Report(
                    step=at.step, epoch=epoch, end_of_epoch=end_of_epoch, rows=at.rows, metrics=figures, seconds=seconds
                )
            )
            since = time.perf_counter()
        hooks.after_step()


class Clock:
    """Host seconds by stage; on a GPU they are the time to queue the work."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._stage = ""
        self._start = 0.0

    def __call__(self, stage: str) -> "Clock":
        """Sets the stage of the next `with` block."""
        self._stage = stage
        return self

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self._seconds[self._stage] = self._seconds.get(self._stage, 0.0) + time.perf_counter() - self._start

    def seconds(self) -> dict[str, float]:
        """Returns the seconds by stage since the last call and resets them."""
        seconds, self._seconds = self._seconds, {}
        return seconds


def _learning_rate(optimization: Optimization) -> float:
    rate = optimization.optimizer.param_groups[0]["lr"]
    return float(rate.item() if isinstance(rate, torch.Tensor) else rate)
