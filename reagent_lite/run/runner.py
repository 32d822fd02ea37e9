"""A training run from config to exported model, for named actions and for candidates."""

import math
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
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
from reagent_lite.run.environments import open_simulation, with_actions
from reagent_lite.run.evaluators import Evaluators, estimates_due
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
from reagent_lite.run.roles.published_policies import shared_folders
from reagent_lite.run.scaling.auto_scale import auto_scaled
from reagent_lite.run.simulated import RETURN, tag_of
from reagent_lite.run.sources import Source, Stream, open_source
from reagent_lite.run.value_bounds import ReturnBounds
from reagent_lite.sim.cuda import on_stream
from reagent_lite.sim.experience import ONLY
from reagent_lite.training.checkpoint_folder import CheckpointSchedule
from reagent_lite.training.loop import Running, StepReport, fit
from reagent_lite.training.metrics import MetricsWriter, file_sinks
from reagent_lite.training.resume import History
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
        if config.simulation is not None and config.simulation.auto_scale:
            config = auto_scaled(config, group, folder / "checkpoints")
        simulation = None if config.simulation is None else open_simulation(config, group)
        config = config if simulation is None else with_actions(config, simulation)
        _warn_of_unused_minibatch(config, group)
        history = History.find(config, group, folder / "checkpoints")
        source = open_source(history.config, group, simulation, signal)
        config = source.config
        history = replace(history, config=config)
        require_outcome(config, source, group)
        history.require_same(source.identity)
        setup = set_up(source, history)
        require_exportable(config, group, source, setup.learner)
        with (
            room_in(folder, FOLDER, again=attempt_here() > 0),
            MetricsWriter(lines=history.lines, figures=history.figures) as writer,
            ExitStack() as shared,
        ):
            if group.is_first:  # all input has been read and checked; from here on the run writes to its folder
                writer.add(trackers(config, history.run))
                if config.follows:
                    shared.enter_context(shared_folders(config, resumed=history.state is not None))
                output.take(config)
                source.write_fitted()
                step = setup.running.position.step
                writer.add(file_sinks(folder, history.run, parameters(config), lines=history.lines, step=step))
            policy = _AUTO if config.rl.temperature == "auto" else str(target_policy(config))
            logger.info(f"policy: {policy}; it is evaluated, simulated and exported")
            learned = learn(setup, writer, signal, callback)
            config = setup.evaluators.with_chosen_temperature(config)
            outcome = publish(config, group, source, learned, time.monotonic() - start)
            if group.is_first:
                writer.conclude(conclusion_of(outcome, folder))
        if group.is_first:
            with suppress(Preempted), signal.defer():  # a signal comes too late: nothing is left to continue
                if failure := learned.checkpoints.finish():
                    logger.warning(
                        f"the run could not be marked as ended: {failure}; the same command publishes it again"
                    )
        return outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The objects of a run before its next optimizer step; nothing has been written to the run's folder yet.

    Attributes:
        source, history: source and history of the run; the history has its config and group.
        return_bounds: range of the values that the rewards of the training data allow, or None if it is not known.
        learner: the learner, warm-started if the config asks for it.
        stream: batches for the learner.
        evaluators: evaluators of the learner.
        running: state that the loop updates, at the position from which the run continues.
    """

    source: Source
    history: History
    return_bounds: ReturnBounds | None
    learner: Learner
    stream: Stream
    evaluators: Evaluators
    running: Running

    def compile(self) -> None:
        """Compiles the update, and the writes to and draws from replay, with torch.compile."""
        self.learner.compile(dynamic=False)
        self.running.optimization.compile()
        if self.stream.rollouts is not None:
            for ring in self.stream.rollouts.rollout.rings.values():
                ring.compile()


def _warn_of_unused_minibatch(config: WorkflowConfig, group: Group) -> None:
    """Warns of a key that is not refused, as resolved configs of earlier runs have it."""
    if not config.takes_steps and config.has_minibatch and group.is_first:
        logger.warning(f"training.minibatch_size has no effect: algorithm {config.algorithm} takes no steps")


def set_up(source: Source, history: History) -> Setup:
    """Builds learner, optimizer, batches and evaluators of a run.

    Raises:
        ConfigError, BundleError: the warm start cannot be loaded, or the unfinished run has taken more steps than the
            config asks for.
    """
    config = history.config
    group = history.group
    choose_threads(config, source.spec, group)
    return_bounds = source.return_bounds()
    learner = build_learners(
        config, source.spec, source.types, group.device, return_bounds.bounds if return_bounds else None
    )
    optimization = build_optimization(config, learner, captured=captures(config, group))
    if config.training.warm_start_model_path is not None and history.state is None:
        optimizer = None if config.training.do_not_warm_start_optimizer else optimization.optimizer
        path = config.training.warm_start_model_path
        normalization = source.normalization.json()
        scale = config.rl.value_scale
        assert scale != "returns", "the source fills in numbers"
        logger.info(warm_start(path, learner, optimizer, group, config.actions, normalization, scale))
    source.fit(learner)
    stream = source.stream(learner)
    torch.manual_seed(config.seed + group.rank)  # dropout differs between ranks, initial weights do not
    evaluators = source.evaluators(learner)
    running = Running(
        learner=learner,
        optimization=optimization,
        source=stream.source,
        evaluators=evaluators,
        position=history.position(stream.order, stream.plan.num_steps),
    )
    return Setup(
        source=source,
        history=history,
        return_bounds=return_bounds,
        learner=learner,
        stream=stream,
        evaluators=evaluators,
        running=running,
    )


def learn(setup: Setup, writer: MetricsWriter, signal: StopSignal, callback: Callback = _SILENT) -> Learned:
    """Takes the remaining optimizer steps, saves checkpoints in between and at the end, and evaluates.

    Raises:
        Preempted: a signal ended the run, after a checkpoint if one could be written.
    """
    history = setup.history
    stream = setup.stream
    config = history.config
    group = history.group
    position = setup.running.position
    waits = config.rendezvous
    running = replace(setup.running, reported=writer.reported)
    checkpoints = history.continue_in(
        running, stream.order, stream.partition, setup.source.identity, installed_versions()
    )
    if compiles(config, group, stream.plan.num_steps - position.step):
        logger.info("updates are compiled, which takes some seconds")
        setup.compile()
    begin = position.rows
    start = time.monotonic()
    with (
        progress("training", "rows", enabled=group.is_first, begin=begin) as show,
        signal.defer(),
        group.waiting_at_most(waits.step_timeout_seconds, then=waits.startup_timeout_seconds),
    ):
        schedule = CheckpointSchedule(config.checkpoint, waits, checkpoints, signal)

        def collect(step: int) -> None:
            try:
                stream.before_step(step)
            except Preempted:  # on every rank, while it waited for collectors
                schedule.stop()

        reporter = _Reporter(setup, writer, callback)
        steps: Iterable[StepReport | None] = fit(
            running,
            stream.plan,
            group,
            collect=collect,
            satisfied=setup.evaluators.may_end,
            every_steps=config.rl.tensorboard_logging_freq or None,
            capture=update_capture(config, group),
        )
        if not config.takes_steps:
            position.rows = stream.rows  # a checkpoint comes after the only report
            steps = [_report_of_fit(setup.learner, position.rows)] if history.state is None else []
        for report in steps:
            if report is not None:
                reporter.write(report)
            show(position.rows, stream.rows, reporter.note)
            schedule.after_step()
        schedule.at_end()
        stream.at_end(position.step)
    rate = (position.rows - begin) / (time.monotonic() - start)
    figures = setup.evaluators.restore_best()
    writer.figures |= figures
    evaluation = setup.evaluators.at_end()
    writer.write(position.step, figures | evaluation.scalars)
    writer.keep()
    evaluation = replace(evaluation, document=evaluation.document | _learning_of(setup, writer.figures, evaluation))
    callback.on_evaluation(evaluation.document)
    return Learned(
        learner=setup.learner,
        position=position,
        checkpoints=checkpoints,
        evaluation=evaluation,
        figures=writer.figures,
        rows_per_second=rate,
    )


def _report_of_fit(learner: Learner, rows: int) -> StepReport:
    """Returns the only report of a run without optimizer steps; rank 0, which wrote the fit, has its error."""
    fit = _fit_of(learner)
    metrics = {"td_loss": 0.0 if fit is None else fit.model}
    return StepReport(step=0, epoch=1, end_of_epoch=True, rows=rows, metrics=metrics, seconds=math.inf)


def _fit_of(learner: Learner) -> RewardFit | None:
    """Returns the errors of a fitted model of the reward; None for other learners, and on ranks other than 0."""
    return learner.fit if isinstance(learner, Boosting) else None


def _learning_of(setup: Setup, figures: Mapping[str, float], evaluation: Evaluation) -> dict[str, Any]:
    """Returns the entries of evaluation.json on values and on learning, and logs their warnings.

    Empty if no row is logged.
    """
    if setup.return_bounds is None:
        entries: dict[str, Any] = {}
        constant_warning = None
    else:
        entries = setup.return_bounds.document(figures["value/model/mean"])
        constant_warning = setup.return_bounds.no_better_than_constant(figures, learners_of(setup.learner)[ONLY])
    if constant_warning is not None and setup.history.group.is_first:
        logger.warning(constant_warning)
    warnings = [f"{warning}." for warning in (constant_warning, setup.stream.warning) if warning is not None]
    if (fit := _fit_of(setup.learner)) is not None:
        entries["reward_model"] = fit.json()
    if entries or warnings:
        entries["warnings"] = [*entries.get("warnings", ()), *warnings, *evaluation.document.get("warnings", ())]
    return entries


class _Reporter:
    """Writes the figures of a run while it learns.

    Attributes:
        note: loss and returns of the last report, in words.
    """

    def __init__(self, setup: Setup, writer: MetricsWriter, callback: Callback) -> None:
        self._setup = setup
        self._writer = writer
        self._callback = callback
        self._excess = 0.0  # excess in the last warning about `ReturnBounds`
        self.note = ""
        position = setup.running.position
        self._counted = self._counts(position.step, position.rows)
        if position.step == 0:  # the first rate includes the steps of the warm-up
            self._counted["env_steps"] = 0

    def _counts(self, step: int, rows: int) -> dict[str, int]:
        """Returns optimizer steps, rows and environment steps of all ranks since the run began."""
        return {"updates": step, "rows": rows, "env_steps": self._setup.stream.env_steps}

    def write(self, report: StepReport) -> None:
        """Writes the training metrics, and at the end of an epoch the evaluators' figures."""
        scalars = {"epoch": float(report.epoch), "rows": float(report.rows)}
        scalars |= {
            name if "/" in name else f"train/{name.replace('.', '/')}": value for name, value in report.metrics.items()
        }
        loss = report.metrics["td_loss"]
        self.note = f"loss {loss:.5g}"
        simulated = self._setup.stream.figures()  # raises for rewards that are not numbers, the cause of such a loss
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
            self._writer.figures = self._evaluated(report)
            scalars |= self._writer.figures
            return_bounds = self._setup.return_bounds
            mean = scalars.get("value/model/mean")
            if return_bounds is not None and mean is not None and self._setup.history.group.is_first:
                self._excess = return_bounds.warn(mean, self._excess)
            for kind in self._setup.source.types:
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
        self._setup.evaluators.stopped |= any(self._setup.history.group.all_gather(stops))

    def _evaluated(self, report: StepReport) -> dict[str, float]:
        config = self._setup.history.config
        group = self._setup.history.group
        waits = config.rendezvous
        plan = self._setup.stream.plan
        final = report.step == plan.num_steps
        due = estimates_due(report.epoch, config.num_epochs, plan.steps_per_epoch)
        with group.waiting_at_most(waits.startup_timeout_seconds, then=waits.step_timeout_seconds):
            figures = self._setup.evaluators.after_epoch(final=final, estimates=due)
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
