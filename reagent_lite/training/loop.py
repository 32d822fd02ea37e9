"""The training loop. Nothing waits for the device between a batch and the optimizer's step."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from reagent_lite.distributed.group import Group, rehearse
from reagent_lite.training.capture import eager
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
        schedule: stepped once per epoch, or None for a fixed learning rate.
        clip_norm: largest norm of a gradient, or None.
        clipped: groups of parameters whose gradients are clipped by their joint norm, one for each learner.
    """

    optimizer: Optimizer
    schedule: LRScheduler | None = None
    clip_norm: float | None = None
    clipped: Sequence[Sequence[nn.Parameter]] = ()
    _update: Callable[[], Any] = field(init=False)

    def __post_init__(self) -> None:
        self._update = self.optimizer.step

    def compile(self) -> None:
        """Compiles the optimizer's step; its own fused kernel is slow for few parameters."""
        for group in self.optimizer.param_groups:
            if group.get("fused"):
                group.update(fused=False, foreach=True)
        self._update = torch.compile(self.optimizer.step, dynamic=False)

    def step(self) -> None:
        """Clips the gradient, updates the parameters and clears the gradient."""
        if self.clip_norm is not None:
            for parameters in self.clipped:
                nn.utils.clip_grad_norm_(parameters, self.clip_norm)
        self._update()
        self.optimizer.zero_grad()

    @property
    def learning_rate(self) -> float:
        """The current learning rate."""
        return float(self.optimizer.param_groups[0]["lr"])

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
class RunPosition:
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
class StepReport:
    """Figures since the last report.

    Attributes:
        step: optimizer steps done.
        epoch: passes completed.
        end_of_epoch: whether a pass has just been completed.
        rows: rows read by all ranks since the start.
        metrics: means over steps and ranks, and times.
        seconds: seconds since the caller resumed the loop after the last report.
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
        """Restores a `state_dict`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """The state of a run that changes while it learns.

    Attributes:
        learner: forward(batch) -> (loss, metrics), row_errors and after_step(); its state consists of all its tensors,
            including target networks and running statistics.
        optimization: moments, counts, learning rates.
        source: batches of this rank.
        evaluators: models fitted so far, the same on all ranks.
        position: steps and rows done, and sums since the last report.
        reported: returns the state of the reports so far, as JSON; called when a checkpoint is written.
    """

    learner: nn.Module
    optimization: Optimization
    source: BatchSource
    evaluators: Stateful
    position: RunPosition = field(default_factory=RunPosition)
    reported: Callable[[], dict[str, Any]] = dict


def fit(
    running: Running,
    plan: StepPlan,
    group: Group,
    *,
    collect: Callable[[int], None] = lambda step: None,
    satisfied: Callable[[], bool] = lambda: False,
    every_steps: int | None = None,
    capture: Callable[[Update], Update] = eager,
) -> Iterator[StepReport | None]:
    """Trains from the run's position to the plan's last step, and yields after each step.

    The position is up to date whenever it yields; a caller may save the run then, or leave the loop.

    Args:
        running: learner, optimizer and batches, of which each step takes minibatches_per_step.
        plan: number and size of steps.
        group: averages gradients and metrics over ranks.
        collect: called with the number of the next step; a simulation collects experience here.
        satisfied: whether the run may end; called between two epochs, the same answer on every rank.
        every_steps: number of steps between reports within an epoch, or None.
        capture: turns an update on fixed buffers into one that is replayed on the device.

    Yields:
        The report at the end of an epoch and every `every_steps` steps, otherwise None.
    """
    optimization = running.optimization
    position = running.position
    clock = _Clock()
    update = capture(_Step(running, plan.minibatches_per_step, group, clock))
    while position.step < plan.num_steps:
        if position.step and position.step % plan.steps_per_epoch == 0 and satisfied():
            break
        with clock("time/simulate"):
            collect(position.step)
        update()
        position.meter.step()
        position.rows += plan.rows_of_step(position.step)
        position.step += 1
        end_of_epoch = position.step % plan.steps_per_epoch == 0 or position.step == plan.num_steps
        if end_of_epoch and optimization.schedule is not None:
            optimization.schedule.step()
        if end_of_epoch or (every_steps and position.step % every_steps == 0):
            whole, begun = divmod(position.step, plan.steps_per_epoch)
            yield StepReport(
                step=position.step,
                epoch=whole + (end_of_epoch and begun > 0),  # the last epoch may be shorter
                end_of_epoch=end_of_epoch,
                rows=position.rows,
                metrics=position.meter.means(group) | clock.stages | {"learning_rate": optimization.learning_rate},
                seconds=clock.seconds,
            )
            clock.restart()
        else:
            yield None


class _Step:
    """An optimizer step: the gradients of its minibatches, then new parameters and targets."""

    def __init__(self, running: Running, minibatches: int, group: Group, clock: "_Clock") -> None:
        self._running = running
        self._minibatches = minibatches
        self._group = group
        self._clock = clock
        self._wrapped = group.wrap(running.learner)
        self._rehearsed = False
        running.learner.train()

    def __call__(self) -> None:
        for minibatch in range(self._minibatches):
            self._add_gradient(last=minibatch == self._minibatches - 1)
        with self._clock("time/step"):
            self._running.optimization.step()
            self._running.learner.after_step()  # type: ignore[operator]

    def _add_gradient(self, *, last: bool) -> None:
        running = self._running
        wrapped = self._wrapped
        with self._clock("time/gather"):
            batch = next(running.source)
        if not self._rehearsed:
            rehearse(wrapped, lambda: wrapped(batch)[0])
            self._rehearsed = True
        with self._group.gradients_stay_local(wrapped, last=last), self._clock("time/learn"):
            loss, metrics = wrapped(batch)
            if last:
                self._group.enter_collective(running.position.step)  # gradients are averaged on the way back
            loss.backward()
        running.source.record_errors(running.learner.row_errors)  # type: ignore[arg-type]
        running.position.meter.add(metrics)


class _Clock:
    """Host seconds since the last restart, total and by stage; on a GPU a stage's time is that to queue its work."""

    def __init__(self) -> None:
        self.stages: dict[str, float] = {}
        self._stage = ""
        self._start = 0.0
        self._since = time.perf_counter()

    def restart(self) -> None:
        self.stages = {}
        self._since = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._since

    def __call__(self, stage: str) -> "_Clock":
        """Sets the stage of the next `with` block."""
        self._stage = stage
        return self

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self.stages[self._stage] = self.stages.get(self._stage, 0.0) + time.perf_counter() - self._start
