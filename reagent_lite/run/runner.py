"""A training run from config to exported model, for named actions and for candidates."""

import math
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch

from reagent_lite.algorithms.boosting import Boosting
from reagent_lite.algorithms.learners import Learner, learners_of
from reagent_lite.algorithms.reward_fit import RewardFit
from reagent_lite.config import WorkflowConfig, parameters
from reagent_lite.console import logger, progress
from reagent_lite.disk_room import room_in
from reagent_lite.distributed.group import Group, attempt_here
from reagent_lite.distributed.launcher import require_batch_norm
from reagent_lite.errors import ConfigError, DivergenceError, Preempted, Problem, needing
from reagent_lite.evaluation.document import Evaluation
from reagent_lite.report.pictures import require_pictures
from reagent_lite.run.evaluators import estimates_due
from reagent_lite.run.learner import (
    build_learners,
    build_optimization,
    captures,
    choose_threads,
    compiles,
    target_policy,
    update_capture,
)
from reagent_lite.run.output_folder import (
    FOLDER,
    Learned,
    OutputFolder,
    TrainResult,
    conclusion_of,
    installed_versions,
    publish,
    require_exportable,
    require_outcome,
)
from reagent_lite.run.resolved import Resolved, resolve
from reagent_lite.run.roles.published_policies import shared_folders
from reagent_lite.run.simulated import RETURN, tag_of
from reagent_lite.sim.cuda import on_stream
from reagent_lite.sim.experience import ONLY
from reagent_lite.training.checkpoint_folder import CheckpointSchedule
from reagent_lite.training.loop import Optimization, Running, StepReport, fit
from reagent_lite.training.metrics import MetricsWriter, file_sinks
from reagent_lite.training.stop import StopSignal
from reagent_lite.training.trackers import require_trackers, trackers
from reagent_lite.training.warm_start import warm_start

STOP = "stop"


class Callback:
    """Follows a run from Python; subclasses override the methods they need. An error in a method ends the run."""

    def on_epoch(self, figures: Mapping[str, float]) -> Literal["stop"] | None:
        """Called at the end of each epoch with its line of metrics.jsonl: step, epoch, losses, returns.

        Returns:
            None to continue, or "stop": the run then evaluates and exports as at its end. With several processes,
            "stop" from any of them ends the run. Any other value raises a ConfigError.
        """
        return None

    def on_evaluation(self, document: Mapping[str, Any]) -> None:
        """Called before the export with the final evaluation, in the form of evaluation.json."""


_SILENT = Callback()
_AUTO = "softmax of q at the temperature with the logging policy's mean entropy"


def train(config: WorkflowConfig, group: Group, callback: Callback = _SILENT) -> TrainResult:
    """Trains a policy, evaluates it and exports it; continues an unfinished run in the same folder.

    Every rank calls it. The outcome on rank 0 is that of the run.

    Raises:
        Preempted: a signal ended the run; the same call continues from the last checkpoint.
    """
    start = time.monotonic()
    folder = config.folder
    _require_computable(config, group)
    with StopSignal() as signal, on_stream(group.device), OutputFolder(config, group) as output:
        run = Run(resolve(config, group), signal, callback)
        require_exportable(run.source, run.learner)
        with (
            room_in(folder, FOLDER, again=attempt_here() > 0),
            MetricsWriter(lines=run.history.lines, figures=run.history.figures) as writer,
            ExitStack() as shared,
        ):
            if group.is_first:  # all input has been read and checked; from here on the run writes to its folder
                run.begin(output, writer, shared)
            learned = run.learn(writer)
            outcome = run.publish(learned, time.monotonic() - start)
            if group.is_first:
                writer.conclude(conclusion_of(outcome, folder))
        if group.is_first:
            with suppress(Preempted), signal.defer():  # a signal comes too late: nothing is left to continue
                if failure := learned.checkpoints.finish():
                    logger.warning(
                        f"the run could not be marked as ended: {failure}; the same command publishes it again"
                    )
        return outcome


class Run:
    """A training run: its parts, at the position from which it continues. Every rank has one and calls its methods.

    Nothing is written to the run's folder before `begin`.

    Args:
        resolved: data, environment, and the config.
        signal: ends the run early.
        callback: follows the run.

    Attributes:
        config, group: the resolved config and the ranks.
        history: an earlier start of the run, if there is one.
        source: what the run learns from.
        return_bounds: range of the values that the rewards of the training data allow, or None if it is not known.
        learner: the learner, warm-started if the config asks for it.
        stream: batches for the learner.
        evaluators: evaluators of the learner.
        running: state that the loop updates.

    Raises:
        ConfigError, BundleError: the warm start cannot be loaded, the unfinished run has taken more steps than the
            config asks for or has other data, or publish_if names no outcome.
    """

    def __init__(self, resolved: Resolved, signal: StopSignal, callback: Callback = _SILENT) -> None:
        self.history = resolved.history
        self.config = config = resolved.config
        self.group = group = resolved.group
        self.source = source = resolved.open_source(signal)
        self._signal = signal
        self._callback = callback
        require_outcome(source)
        self.history.require_same(source.identity)
        choose_threads(config, source.spec, group)
        self.return_bounds = source.return_bounds()
        bounds = self.return_bounds.bounds if self.return_bounds else None
        self.learner = build_learners(config, source.spec, source.types, group.device, bounds)
        optimization = build_optimization(config, self.learner, captured=captures(config, group))
        if config.training.warm_start_model_path is not None and self.history.state is None:
            self._warm_start(config.training.warm_start_model_path, optimization)
        source.fit(self.learner)
        self.stream = source.stream(self.learner)
        torch.manual_seed(config.seed + group.rank)  # dropout differs between ranks, initial weights do not
        self.evaluators = source.evaluators(self.learner)
        self.running = Running(
            learner=self.learner,
            optimization=optimization,
            source=self.stream.source,
            evaluators=self.evaluators,
            position=self.history.position(self.stream.order, self.stream.plan.num_steps),
        )

    def _warm_start(self, path: str, optimization: Optimization) -> None:
        optimizer = None if self.config.training.do_not_warm_start_optimizer else optimization.optimizer
        normalization = self.source.normalization.json()
        scale = self.config.rl.value_scale
        assert scale != "returns", "resolve fills in numbers"
        actions = self.config.actions
        logger.info(warm_start(path, self.learner, optimizer, self.group, actions, normalization, scale))

    def begin(self, output: OutputFolder, writer: MetricsWriter, shared: ExitStack) -> None:
        """Takes the run's folder, and opens what the run writes to; rank 0 calls it.

        Args:
            output: the folder.
            writer: gets the trackers and files of metrics.
            shared: keeps the folders that are shared with collectors open.
        """
        config = self.config
        history = self.history
        writer.add(trackers(config, history.run))
        if config.follows:
            shared.enter_context(shared_folders(config, resumed=history.state is not None))
        output.take(config)
        self.source.write_fitted()
        step = self.running.position.step
        writer.add(file_sinks(config.folder, history.run, parameters(config), lines=history.lines, step=step))

    def compile(self) -> None:
        """Compiles the update, and the writes to and draws from replay, with torch.compile."""
        self.learner.compile(dynamic=False)
        self.running.optimization.compile()
        if self.stream.rollouts is not None:
            for ring in self.stream.rollouts.rollout.rings.values():
                ring.compile()

    def learn(self, writer: MetricsWriter) -> Learned:
        """Takes the remaining optimizer steps, saves checkpoints in between and at the end, and evaluates.

        Raises:
            Preempted: a signal ended the run, after a checkpoint if one could be written.
        """
        config = self.config
        stream = self.stream
        position = self.running.position
        waits = config.rendezvous
        policy = _AUTO if config.rl.temperature == "auto" else str(target_policy(config))
        logger.info(f"policy: {policy}; it is evaluated, simulated and exported")
        running = replace(self.running, reported=writer.keep_and_report)
        checkpoints = self.history.continue_in(
            running, stream.order, stream.partition, self.source.identity, installed_versions()
        )
        if compiles(config, self.group, stream.plan.num_steps - position.step):
            logger.info("updates are compiled, which takes some seconds")
            self.compile()
        begin = position.rows
        start = time.monotonic()
        with (
            progress("training", "rows", enabled=self.group.is_first, begin=begin) as show,
            self._signal.defer(),
            self.group.waiting_at_most(waits.step_timeout_seconds, then=waits.startup_timeout_seconds),
        ):
            schedule = CheckpointSchedule(config.checkpoint, waits, checkpoints, self._signal)
            reporter = _Reporter(self, writer, self._callback)
            for report in self._steps(running, schedule):
                if report is not None:
                    reporter.write(report)
                show(position.rows, stream.rows, reporter.note)
                schedule.after_step()
            schedule.at_end()
            stream.at_end(position.step)
        rate = (position.rows - begin) / (time.monotonic() - start)
        figures = self.evaluators.restore_best()
        writer.figures |= figures
        evaluation = self.evaluators.at_end()
        writer.write(position.step, figures | evaluation.scalars)
        writer.keep()
        evaluation = replace(evaluation, document=evaluation.document | _learning_of(self, writer.figures, evaluation))
        self._callback.on_evaluation(evaluation.document)
        return Learned(
            learner=self.learner,
            position=position,
            checkpoints=checkpoints,
            evaluation=evaluation,
            figures=writer.figures,
            rows_per_second=rate,
        )

    def _steps(self, running: Running, schedule: CheckpointSchedule) -> Iterable[StepReport | None]:
        """Returns the reports of the remaining steps, each of which is taken when its report is asked for."""
        config = self.config
        stream = self.stream
        if not config.takes_steps:
            running.position.rows = stream.rows  # a checkpoint comes after the only report
            return [_report_of_fit(self.learner, stream.rows)] if self.history.state is None else []

        def collect(step: int) -> None:
            try:
                stream.before_step(step)
            except Preempted:  # on every rank, while it waited for collectors
                schedule.stop()

        return fit(
            running,
            stream.plan,
            self.group,
            collect=collect,
            satisfied=self.evaluators.may_end,
            every_steps=config.rl.tensorboard_logging_freq or None,
            capture=update_capture(config, self.group),
        )

    def publish(self, learned: Learned, seconds: float) -> TrainResult:
        """Writes the model or the reason why there is none, pictures and report; rank 0 writes.

        Args:
            learned: the trained learner and its evaluation.
            seconds: wall-clock time since this start.
        """
        temperature = self.evaluators.temperature
        exported = self.config if temperature is None else self.config.with_temperature(temperature)
        return publish(exported, self.source, learned, seconds)


def _report_of_fit(learner: Learner, rows: int) -> StepReport:
    """Returns the only report of a run without optimizer steps; rank 0, which wrote the fit, has its error."""
    fit = _fit_of(learner)
    metrics = {"td_loss": 0.0 if fit is None else fit.model}
    return StepReport(step=0, epoch=1, end_of_epoch=True, rows=rows, metrics=metrics, seconds=math.inf)


def _fit_of(learner: Learner) -> RewardFit | None:
    """Returns the errors of a fitted model of the reward; None for other learners, and on ranks other than 0."""
    return learner.fit if isinstance(learner, Boosting) else None


def _learning_of(run: Run, figures: Mapping[str, float], evaluation: Evaluation) -> dict[str, Any]:
    """Returns the entries of evaluation.json on values and on learning, and logs their warnings.

    Empty if no row is logged.
    """
    if run.return_bounds is None:
        entries: dict[str, Any] = {}
        constant_warning = None
    else:
        entries = run.return_bounds.document(figures["value/model/mean"])
        constant_warning = run.return_bounds.no_better_than_constant(figures, learners_of(run.learner)[ONLY])
    if constant_warning is not None and run.group.is_first:
        logger.warning(constant_warning)
    warnings = [f"{warning}." for warning in (constant_warning, run.stream.warning) if warning is not None]
    if (fit := _fit_of(run.learner)) is not None:
        entries["reward_model"] = fit.json()
    if entries or warnings:
        entries["warnings"] = [*entries.get("warnings", ()), *warnings, *evaluation.document.get("warnings", ())]
    return entries


class _Reporter:
    """Writes the figures of a run while it learns.

    Attributes:
        note: loss and returns of the last report, in words.
    """

    def __init__(self, run: Run, writer: MetricsWriter, callback: Callback) -> None:
        self._run = run
        self._writer = writer
        self._callback = callback
        self._excess = 0.0  # excess in the last warning about `ReturnBounds`
        self.note = ""
        position = run.running.position
        self._counted = self._counts(position.step, position.rows)
        if position.step == 0:  # the first rate includes the steps of the warm-up
            self._counted["env_steps"] = 0

    def _counts(self, step: int, rows: int) -> dict[str, int]:
        """Returns optimizer steps, rows and environment steps of all ranks since the run began."""
        return {"updates": step, "rows": rows, "env_steps": self._run.stream.env_steps}

    def write(self, report: StepReport) -> None:
        """Writes the training metrics, and at the end of an epoch the evaluators' figures."""
        scalars = {"epoch": float(report.epoch), "rows": float(report.rows)}
        scalars |= {
            name if "/" in name else f"train/{name.replace('.', '/')}": value for name, value in report.metrics.items()
        }
        loss = report.metrics["td_loss"]
        self.note = f"loss {loss:.5g}"
        simulated = self._run.stream.figures()  # raises for rewards that are not numbers, the cause of such a loss
        if not np.isfinite(loss):  # reduced over ranks, so that all of them raise the error
            todo = "Lower training.learning_rate, or set training.clip_grad_norm"
            raise DivergenceError(Problem(f"step {report.step}", "a finite loss", str(loss), todo))
        scalars |= simulated
        counts = self._counts(report.step, report.rows)
        scalars |= {
            f"rate/{name}_per_second": (count - self._counted[name]) / report.seconds
            for name, count in counts.items()
            if name != "env_steps" or count
        }
        self._counted = counts
        if report.end_of_epoch:
            self._writer.figures = self._evaluate(report)
            scalars |= self._writer.figures
            return_bounds = self._run.return_bounds
            mean = scalars.get("value/model/mean")
            if return_bounds is not None and mean is not None and self._run.group.is_first:
                self._excess = return_bounds.warn(mean, self._excess)
            for kind in self._run.source.types:
                if (tag := tag_of(kind, RETURN)) in scalars:
                    self.note += f", {f'{kind} ' if kind else ''}return {scalars[tag]:.4g}"
        self._writer.write(report.step, scalars)
        if report.end_of_epoch:
            self._call({"step": float(report.step), **scalars})

    def _call(self, figures: Mapping[str, float]) -> None:
        """Calls the callback, and ends the run if that of any rank returns "stop"."""
        answer = self._callback.on_epoch(figures)
        if answer is not None and answer != STOP:
            raise ConfigError(Problem("Callback.on_epoch", f'None or "{STOP}" as its result', repr(answer)))
        stops = int(answer == STOP)
        self._run.evaluators.stopped |= any(self._run.group.all_gather(stops))

    def _evaluate(self, report: StepReport) -> dict[str, float]:
        config = self._run.config
        group = self._run.group
        waits = config.rendezvous
        plan = self._run.stream.plan
        final = report.step == plan.num_steps
        due = estimates_due(report.epoch, config.num_epochs, plan.steps_per_epoch)
        with group.waiting_at_most(waits.startup_timeout_seconds, then=waits.step_timeout_seconds):
            figures = self._run.evaluators.after_epoch(final=final, estimates=due)
            group.barrier()  # the others wait while rank 0 computes the estimates
        return figures


def _require_computable(config: WorkflowConfig, group: Group) -> None:
    """Checks before any data is read that the processes can compute what the config asks for.

    Raises:
        ConfigError: several processes without ddp, batch normalization over CPU processes, or data, pictures or
            trackers without the packages that they need.
    """
    if config.parallel != "ddp" and group.world_size > 1:  # processes of another launcher
        todo = 'Start one process, or set parallel to "ddp"'
        raise ConfigError(Problem("parallel", f'"ddp" with {group.world_size} processes', f'"{config.parallel}"', todo))
    require_batch_norm(config, group.world_size, group.device.type)
    if config.training_data_path or config.follows:
        with needing("data", "training_data_path" if config.training_data_path else "simulation.mode"):
            import reagent_lite.data.formats.format_table  # noqa: F401
    if config.simulation is not None and config.simulation.pictures:
        require_pictures()
    if group.is_first:
        require_trackers(config)
