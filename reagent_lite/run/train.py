"""The story of a training run, the same for named actions and for candidates."""

import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from reagent_lite.algorithms.learners import Learner
from reagent_lite.config import WorkflowConfig
from reagent_lite.console import Progress, logger, progress
from reagent_lite.distributed.faults import fault_here
from reagent_lite.distributed.group import Group
from reagent_lite.errors import ConfigError, DivergenceError, Preempted, Problem
from reagent_lite.files import room_in
from reagent_lite.report.pictures import require_pictures
from reagent_lite.run.environments import open_simulation, with_actions
from reagent_lite.run.evaluators import Evaluators
from reagent_lite.run.learner import (
    build_learners,
    build_optimization,
    captures,
    choose_threads,
    target_policy,
    update_capture,
)
from reagent_lite.run.publish import (
    FOLDER,
    Learned,
    Outcome,
    output_folder,
    publish,
    require_exportable,
    require_outcome,
    versions,
)
from reagent_lite.run.roles.policies import shared_folders
from reagent_lite.run.scaling.auto_scale import auto_scaled
from reagent_lite.run.simulated import tag_of
from reagent_lite.run.sources import Source, Stream, open_source
from reagent_lite.run.value_bounds import Payable, ValueWatch
from reagent_lite.sim.cuda import on_stream
from reagent_lite.training.checkpoint import CheckpointSchedule
from reagent_lite.training.loop import Hooks, Optimization, Position, Report, Running, fit
from reagent_lite.training.metrics import MetricsWriter
from reagent_lite.training.resume import History
from reagent_lite.training.stop import StopSignal
from reagent_lite.training.warm_start import warm_start


class Callback:
    """Follows a run from Python: derive from it and override what you need. An error in it ends the run."""

    def on_epoch(self, figures: Mapping[str, float]) -> None:
        """Receives what metrics.jsonl has at the end of an epoch: step, epoch, losses, returns."""

    def on_evaluation(self, document: Mapping[str, Any]) -> None:
        """Receives the evaluation of the learned policy, before the model is exported."""


_SILENT = Callback()


def train(config: WorkflowConfig, group: Group, callback: Callback = _SILENT) -> Outcome:
    """Trains, evaluates and exports, or continues to; called on every rank, and rank 0's outcome is the run's.

    Raises:
        Preempted: a signal ended the run; the same call goes on from the last checkpoint.
    """
    start = time.monotonic()
    folder = Path(config.model_output_path).expanduser()
    _require_computable(config, group)
    with StopSignal() as signal, on_stream(group.device), output_folder(config, group) as take_folder:
        if config.simulation is not None and config.simulation.auto_scale:
            config = auto_scaled(config, group, folder / "checkpoints")
        simulation = None if config.simulation is None else open_simulation(config, group)
        config = config if simulation is None else with_actions(config, simulation)
        history = History.find(config, group, folder / "checkpoints")
        source = open_source(config, group, simulation, signal)
        require_outcome(config, source, group)
        history.require_same(source.identity)
        setup = set_up(config, group, source, history)
        require_exportable(config, group, source, setup.learner)
        with room_in(folder, FOLDER), shared_folders(config) if config.follows and group.is_first else nullcontext():
            if group.is_first:  # all input has been read and checked: the folder is this run's from here on
                take_folder(config)
                source.write_fitted()
            logger.info(f"policy: {target_policy(config.rl)}; it is evaluated, simulated and exported")
            learned = learn(setup, signal, folder, callback)
            return publish(config, group, source, learned, time.monotonic() - start)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A learner before its next step, with what it learns from; nothing has been written to the run's folder yet.

    Attributes:
        config, group, source, history: of the run.
        payable: what rewards of the training data can pay, or None.
        learner, optimization: the learner, warm-started where that is asked for, and what updates it.
        stream: batches.
        evaluators: of the learner.
        position: where the run goes on.
    """

    config: WorkflowConfig
    group: Group
    source: Source
    history: History
    payable: Payable | None
    learner: Learner
    optimization: Optimization
    stream: Stream
    evaluators: Evaluators
    position: Position


def set_up(config: WorkflowConfig, group: Group, source: Source, history: History) -> Setup:
    """Returns what a run learns with.

    Raises:
        ConfigError, BundleError: the warm start cannot be loaded, or the run is to be shorter than it is already.
    """
    choose_threads(config, source.spec, group)
    payable = source.payable()
    learner = build_learners(config, source.spec, source.types, group.device, payable.bounds if payable else None)
    optimization = build_optimization(config, learner, captured=captures(config, group))
    if config.training.warm_start_model_path is not None and history.state is None:
        optimizer = None if config.training.do_not_warm_start_optimizer else optimization.optimizer
        logger.info(warm_start(config.training.warm_start_model_path, learner, optimizer, group))
    stream = source.stream(learner)
    torch.manual_seed(config.seed + group.rank)  # dropout differs between ranks, initial weights do not
    return Setup(
        config=config, group=group, source=source, history=history, payable=payable, learner=learner,
        optimization=optimization, stream=stream, evaluators=source.evaluators(learner),
        position=history.position(stream.order, stream.plan.num_steps),
    )  # fmt: skip


def learn(setup: Setup, signal: StopSignal, folder: Path, callback: Callback = _SILENT) -> Learned:
    """Takes all optimizer steps that are left, with checkpoints on the way and one at the end, and evaluates.

    Raises:
        Preempted: a signal came; what can be saved is saved.
    """
    config, group, history, stream = setup.config, setup.group, setup.history, setup.stream
    position, waits = setup.position, setup.config.rendezvous
    with MetricsWriter(folder, enabled=group.is_first, lines=history.lines, figures=history.figures) as writer:
        writer.forget_after(position.step)
        running = Running(
            learner=setup.learner, optimization=setup.optimization, source=stream.source,
            evaluators=setup.evaluators, position=position, reported=writer.reported,
        )  # fmt: skip
        checkpoints = history.continue_in(running, stream.order, stream.deal, setup.source.identity, versions())
        begin, start = position.rows, time.monotonic()
        with (
            progress("training", "rows", enabled=group.is_first, begin=begin) as show,
            signal.deferred(),
            group.waiting_at_most(waits.step_timeout_seconds, then=waits.startup_timeout_seconds),
        ):
            schedule = CheckpointSchedule(config.checkpoint, waits, checkpoints, signal)
            hooks = _RunHooks(setup, schedule, writer, show, callback)
            fit(running, stream.plan, group, hooks, every_steps=config.rl.tensorboard_logging_freq,
                capture=update_capture(config, group))  # fmt: skip
            schedule.at_end()
            stream.at_end(position.step)
        rate = (position.rows - begin) / (time.monotonic() - start)
        evaluation = setup.evaluators.at_end()
        writer.write(position.step, evaluation.scalars)
    for line in evaluation.lines:
        logger.info(line)
    if setup.payable is not None:
        values = setup.payable.document(writer.figures["value/model/mean"])
        evaluation = replace(evaluation, document={**evaluation.document, **values})
    callback.on_evaluation(evaluation.document)
    return Learned(learner=setup.learner, position=position, checkpoints=checkpoints, evaluation=evaluation,
                   figures=writer.figures, rows_per_second=rate)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counts:
    """What all ranks have done so far: optimizer steps, rows learned, environment steps."""

    updates: int
    rows: int
    frames: int

    def rates_since(self, before: "_Counts", seconds: float) -> dict[str, float]:
        """Returns what was done per second since then; frames only where environments step."""
        done = {"updates": self.updates - before.updates, "rows": self.rows - before.rows}
        done |= {"frames": self.frames - before.frames} if self.frames else {}
        return {f"rate/{name}_per_second": count / seconds for name, count in done.items()}


class _RunHooks(Hooks):
    """What a run does around its steps: experience before; figures, progress and checkpoints after."""

    def __init__(
        self, setup: Setup, schedule: CheckpointSchedule, writer: MetricsWriter, show: Progress, callback: Callback
    ) -> None:
        self._setup, self._schedule, self._writer, self._show = setup, schedule, writer, show
        self._callback = callback
        self._fault = fault_here(setup.group.place)
        self._watch = ValueWatch(setup.payable if setup.group.is_first else None)
        self._note = ""
        position = setup.position
        self._counted = _Counts(updates=position.step, rows=position.rows,
                                frames=setup.stream.frames if position.step else 0)  # fmt: skip

    def before_step(self, step: int) -> None:
        if self._fault is not None:
            self._fault.before_step(step)
        try:
            self._setup.stream.before_step(step)
        except Preempted:  # all ranks alike, while they waited for collectors
            self._schedule.stop()

    def report(self, report: Report) -> None:
        """Writes means of training, and figures of the evaluators at the end of each epoch."""
        scalars = {"epoch": float(report.epoch), "rows": float(report.rows)}
        scalars |= {
            name if "/" in name else f"train/{name.replace('.', '/')}": value for name, value in report.metrics.items()
        }
        loss = report.metrics["td_loss"]
        self._note = f"loss {loss:.5g}"
        if not np.isfinite(loss):  # reduced over ranks: all of them leave here together
            todo = "Lower training.learning_rate, or set training.clip_grad_norm"
            raise DivergenceError(Problem(f"step {report.step}", "a finite loss", str(loss), todo))
        scalars |= self._setup.stream.figures()
        counts = _Counts(updates=report.step, rows=report.rows, frames=self._setup.stream.frames)
        scalars |= counts.rates_since(self._counted, report.seconds)
        self._counted = counts
        if report.end_of_epoch:
            self._writer.figures = self._evaluated(final=report.step == self._setup.stream.plan.num_steps)
            scalars |= self._writer.figures
            if "value/model/mean" in scalars:
                self._watch(scalars["value/model/mean"])
            for kind in self._setup.source.types:
                if (tag := tag_of(kind, "simulation/return/mean")) in scalars:
                    self._note += f", {f'{kind} ' if kind else ''}return {scalars[tag]:.4g}"
        self._writer.write(report.step, scalars)
        if report.end_of_epoch:
            self._callback.on_epoch({"step": float(report.step), **scalars})

    def _evaluated(self, *, final: bool) -> dict[str, float]:
        group, waits = self._setup.group, self._setup.config.rendezvous
        with group.waiting_at_most(waits.startup_timeout_seconds, then=waits.step_timeout_seconds):
            figures = self._setup.evaluators.after_epoch(final=final)
            group.barrier()  # rank 0 estimates while the others have nothing left to do
        return figures

    def after_step(self) -> None:
        self._show(self._setup.position.rows, self._setup.stream.rows, self._note)
        self._schedule.after_step()

    def satisfied(self) -> bool:
        return self._setup.evaluators.satisfied()


def _require_computable(config: WorkflowConfig, group: Group) -> None:
    """Refuses at once what would end the run late: a combination that cannot be computed, pictures without a library.

    Raises:
        ConfigError: naming the key.
    """
    if config.parallel != "ddp" and group.world_size > 1:  # another launcher may have started them
        todo = "Start one process, or average their gradients by ddp"
        raise ConfigError(Problem("parallel", f'"ddp" with {group.world_size} processes', f'"{config.parallel}"', todo))
    if config.training.use_batch_norm and group.world_size > 1 and group.device.type == "cpu":
        todo = "Statistics over all processes need GPUs; train with one process, or without batch normalization"
        raise ConfigError(Problem("training.use_batch_norm", "false with several CPU processes", "true", todo))
    if config.simulation is not None and config.simulation.pictures:
        require_pictures()
