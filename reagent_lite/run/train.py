"""The story of a training run, told once for named actions and for candidates."""

import platform
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from reagent_lite.algorithms.dqn import DQN
from reagent_lite.config import ParametricDqnConfig, WorkflowConfig, fingerprint, resolved
from reagent_lite.console import Progress, logger, progress
from reagent_lite.data.copy.training_copy import give_back_memory
from reagent_lite.distributed.group import Group, attempt_here
from reagent_lite.distributed.inspection import nearest_existing
from reagent_lite.distributed.workers import tell_model_stands
from reagent_lite.errors import ConfigError, DivergenceError, Problem
from reagent_lite.evaluation.gate import Gate
from reagent_lite.export.content import BundleContent
from reagent_lite.export.predictor import DiscretePredictor, ParametricPredictor, Predictor
from reagent_lite.export.tolerance import Tolerance
from reagent_lite.export.writer import require_replaceable, write_bundle
from reagent_lite.files import LOCK, alone_in, require_writable, room_in, write_whole
from reagent_lite.manifest import canonical
from reagent_lite.models.preprocessor import Preprocessor
from reagent_lite.report.markdown import findings
from reagent_lite.report.pictures import require_pictures
from reagent_lite.report.run import PAGE, RunFigures, evaluation_of_run, write_page
from reagent_lite.run.environments import open_simulation, with_actions
from reagent_lite.run.evaluators import Judgement
from reagent_lite.run.experience import Experience, Judges, Stream, build_judges, gather_experience, open_stream
from reagent_lite.run.figures import SAMPLE, Presence, present_shares, sources_of
from reagent_lite.run.launch import Outcome
from reagent_lite.run.learner import build_learner, build_optimization, captures, choose_threads, target_policy
from reagent_lite.run.logged import Normalization
from reagent_lite.run.normalization import write_fitted
from reagent_lite.run.pictures import PICTURES, draw_pictures
from reagent_lite.run.publish import NOT_PUBLISHED, forget_reason, held_back, require_outcome, write_reason
from reagent_lite.run.resume import History, long_waits, look_back, short_waits, with_fault
from reagent_lite.run.value_bounds import Payable, ValueWatch, payable_values
from reagent_lite.sim.cuda import on_stream
from reagent_lite.training.checkpoint import Checkpoints, CheckpointSchedule
from reagent_lite.training.loop import Hooks, Optimization, Position, Report, Running, fit
from reagent_lite.training.metrics import MetricsWriter
from reagent_lite.training.stop import StopSignal
from reagent_lite.training.warm_start import warm_start

_SAMPLE_ROWS = 256


def train(config: WorkflowConfig, group: Group) -> Outcome:
    """Trains, judges and exports, or continues to; called on every rank, and rank 0's outcome is the run's.

    Raises:
        Preempted: a signal ended the run; the same call goes on from the last checkpoint.
    """
    start = time.monotonic()
    folder = Path(config.model_output_path).expanduser()
    _preflight(config, group)
    with StopSignal() as signal, on_stream(group.device), _output(config, group) as take_folder:
        simulation = None
        if config.simulation is not None:
            simulation = open_simulation(config, group, parametric=isinstance(config, ParametricDqnConfig))
            config = with_actions(config, simulation)
        history = look_back(config, group, folder / "checkpoints")
        experience = gather_experience(config, group, simulation)
        require_outcome(config, experience)
        history.require_same(experience)
        setup = set_up(config, group, experience, history)
        with room_in(folder, "model_output_path"):
            if group.is_first:  # all input has been read and checked: the folder is this run's from here on
                take_folder()
                write_whole(folder / "config.json", canonical(resolved(config)))
                if experience.data is not None:
                    specs = experience.normalization
                    write_fitted(config, {"state": specs.state, "action": specs.action}, group)
            outcome = _train(setup, folder, signal)
        return replace(outcome, seconds=round(time.monotonic() - start, 3))


def _train(setup: "Setup", folder: Path, signal: StopSignal) -> Outcome:
    config, group, experience = setup.config, setup.group, setup.experience
    logger.info(f"policy: {target_policy(config.rl)}; it is evaluated, simulated and exported")
    with MetricsWriter(folder, enabled=group.is_first, lines=setup.history.lines) as writer:
        learned = learn(setup, signal, writer)
        judgement = learned.judges.at_end()
        judgement = replace(judgement, document={**judgement.document, **learned.document()})
        writer.write(learned.position.step, judgement.scalars)
    for line in judgement.lines:
        logger.info(line)
    scores = {name: value if np.isfinite(value) else None for name, value in learned.scores(judgement).items()}
    give_back_memory()
    present = {} if experience.data is None else present_shares(experience.data)
    gate = None
    if group.is_first:
        gate = held_back(config, experience, judgement)
        if gate is None:
            _export(config, folder, learned, experience, judgement, scores)
            forget_reason(folder)
        else:
            write_reason(folder, gate)
            logger.info(f"not published: {gate.reason}; see {folder / NOT_PUBLISHED}")
        _draw(config, folder, experience, learned.learner, group)
        logger.info(_page(folder, _figures(config, learned, experience, judgement, scores, present, gate)))
        tell_model_stands()
        failure = learned.checkpoints.finish()
        if failure and group.is_first:
            logger.warning(f"the model stands, but the run could not be marked as ended: {failure}")
    group.barrier()
    return Outcome(
        model=None if gate else str(folder / "model"),
        steps=learned.position.step,
        rows=learned.position.rows,
        rows_per_second=round(learned.rows_per_second, 1),
        seconds=0.0,
        scores=scores,
        not_published=gate.reason if gate else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A learner before its next step, with what it learns from; nothing has been written to the run's folder yet.

    Attributes:
        config, group, experience, history: of the run.
        learner, optimization: the learner, warm-started where that is asked for, and what updates it.
        stream: batches.
        judges: of the learner.
        position: where the run goes on.
    """

    config: WorkflowConfig
    group: Group
    experience: Experience
    payable: Payable | None
    history: History
    learner: DQN
    optimization: Optimization
    stream: Stream
    judges: Judges
    position: Position


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """A learner at the end of its steps, saved, and not judged for good yet.

    Attributes:
        learner: what was trained.
        judges: of it; they go on with what they have fitted.
        position: steps and rows of the whole run.
        checkpoints: the newest of which is of this moment.
        rows_per_second: of this process and its peers, whatever earlier starts did.
        latest: figures of the last epoch.
        payable: what rewards of the training data can pay, or None.
    """

    learner: DQN
    judges: Judges
    position: Position
    checkpoints: Checkpoints
    rows_per_second: float
    latest: dict[str, float]
    payable: Payable | None

    def document(self) -> dict[str, Any]:
        """Returns the values of the policy's choices beside their bounds, and what to say if they lie outside."""
        return {} if self.payable is None else self.payable.document(self.latest["value/model/mean"])

    def scores(self, judgement: Judgement) -> dict[str, float]:
        """Returns the run's scores: TD loss, returns in simulation, and estimates of the policy's value on logs."""
        names = ("td_loss/mean", "value/model/mean")
        estimates = (name for name in judgement.scalars if name.startswith("CPE/Reward/") and name.count("/") == 2)
        simulated = (name for name in judgement.scalars if name.startswith("simulation/"))
        ended = {name: judgement.scalars[name] for name in (*estimates, *simulated)}
        return {name: self.latest[name] for name in names if name in self.latest} | ended


def set_up(config: WorkflowConfig, group: Group, experience: Experience, history: History) -> Setup:
    """Returns what a run learns with.

    Raises:
        ConfigError, BundleError: the warm start cannot be loaded, or the run is to be shorter than it is already.
    """
    choose_threads(config, experience.spec, group)
    payable = payable_values(config, experience.data, group)
    learner = build_learner(config, experience.spec, group.device, payable.bounds if payable else None)
    optimization = build_optimization(config, learner, captured=captures(config, group))
    if config.training.warm_start_model_path is not None and history.state is None:
        optimizer = None if config.training.do_not_warm_start_optimizer else optimization.optimizer
        logger.info(warm_start(config.training.warm_start_model_path, learner, optimizer, group))
    stream = open_stream(config, experience, learner, group)
    torch.manual_seed(config.seed + group.rank)  # dropout differs between ranks, initial weights do not
    return Setup(
        config=config, group=group, experience=experience, payable=payable, history=history, learner=learner,
        optimization=optimization, stream=stream, judges=build_judges(config, experience, learner, group),
        position=history.position(stream),
    )  # fmt: skip


def learn(setup: Setup, signal: StopSignal, writer: MetricsWriter) -> Learned:
    """Takes all optimizer steps that are left, with checkpoints on the way and one at the end.

    Raises:
        Preempted: a signal came; what can be saved is saved.
    """
    config, group, history, stream = setup.config, setup.group, setup.history, setup.stream
    learner, optimization, judges, position = setup.learner, setup.optimization, setup.judges, setup.position
    writer.forget_after(position.step)
    watch = ValueWatch(setup.payable if group.is_first else None)
    reporter = _Reporter(config, judges, stream, group, writer, history.figures, watch)
    running = Running(
        learner=learner,
        optimization=optimization,
        source=stream.source,
        evaluators=judges,
        position=position,
        reported=reporter.reported,
    )
    checkpoints = history.continue_in(running, stream, setup.experience, _versions())
    begin, start = position.rows, time.monotonic()
    with (
        progress("training", "rows", enabled=group.is_first, begin=begin) as show,
        signal.deferred(),
        short_waits(config, group),
    ):
        schedule = CheckpointSchedule(config.checkpoint, config.rendezvous, checkpoints, signal)
        hooks = _RunHooks(setup, reporter, schedule, show)
        every_steps = config.rl.tensorboard_logging_freq
        fit(running, stream.plan, group, hooks, every_steps=every_steps, capture=stream.capture)
        schedule.at_end()
    rate = (position.rows - begin) / (time.monotonic() - start)
    return Learned(learner=learner, judges=judges, position=position, checkpoints=checkpoints, rows_per_second=rate,
                   latest=reporter.latest, payable=setup.payable)  # fmt: skip


class _RunHooks(Hooks):
    """What a run does around its steps: experience before, figures, progress and checkpoints after."""

    def __init__(self, setup: Setup, reporter: "_Reporter", schedule: CheckpointSchedule, show: Progress) -> None:
        self._setup, self._reporter, self._schedule, self._show = setup, reporter, schedule, show
        self._before_step = with_fault(setup.stream.before_step, setup.group)

    def before_step(self, step: int) -> None:
        self._before_step(step)

    def report(self, report: Report) -> None:
        self._reporter(report)

    def after_step(self) -> None:
        self._show(self._setup.position.rows, self._setup.stream.rows, self._reporter.note)
        self._schedule.after_step()

    def satisfied(self) -> bool:
        return self._setup.judges.satisfied()


class _Reporter:
    """Figures at the end of each epoch, and training means whenever the loop reports."""

    def __init__(
        self,
        config: WorkflowConfig,
        judges: Judges,
        stream: Stream,
        group: Group,
        writer: MetricsWriter,
        latest: dict[str, float],
        watch: ValueWatch,
    ) -> None:
        self._config, self._judges, self._stream, self._group, self._writer = config, judges, stream, group, writer
        self.latest, self._watch = latest, watch
        self.note = ""

    def reported(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps of the reports: lines of metrics.jsonl, figures of the last epoch."""
        return {"lines": self._writer.kept(), "figures": self.latest}

    def __call__(self, report: Report) -> None:
        scalars = {"epoch": float(report.epoch), "rows": float(report.rows)}
        scalars |= {name if "/" in name else f"train/{name}": value for name, value in report.metrics.items()}
        loss = report.metrics["td_loss"]
        self.note = f"loss {loss:.5g}"
        if not np.isfinite(loss):  # reduced over ranks: all of them leave here together
            raise DivergenceError(
                Problem(f"step {report.step}", "a finite loss", str(loss),
                        "Lower training.learning_rate, or set training.clip_grad_norm")
            )  # fmt: skip
        scalars |= self._stream.figures()
        if report.end_of_epoch:
            with long_waits(self._config, self._group):
                self.latest = self._judges.figures(final=report.step == self._stream.plan.num_steps)
                self._group.barrier()  # rank 0 estimates while the others have nothing left to do
            scalars |= self.latest
            if "value/model/mean" in scalars:
                self._watch(scalars["value/model/mean"])
            if "simulation/return/mean" in scalars:
                self.note += f", return {scalars['simulation/return/mean']:.4g}"
        self._writer.write(report.step, scalars)


@contextmanager
def _output(config: WorkflowConfig, group: Group) -> Iterator[Callable[[], None]]:
    """Keeps model_output_path for this run inside the block; rank 0 alone writes there, elsewhere there may be none.

    Gives what takes the folder, to be called once all input has been checked: until then nothing of an earlier run
    changes and no new folder is made. A folder that a run has had is locked at once, for its checkpoints are read.
    """
    if not group.is_first:
        yield lambda: None
        return
    key, folder = "model_output_path", Path(config.model_output_path).expanduser()
    require_writable(nearest_existing(folder), key)
    require_replaceable(folder / "model")
    with ExitStack() as stack:

        def lock() -> None:
            again = attempt_here() > 0
            stack.enter_context(alone_in(folder, key, again=again))

        def take() -> None:
            require_writable(folder, key)
            if not known:
                lock()
            for name in (*PICTURES, PAGE):  # of an earlier run into this folder
                (folder / name).unlink(missing_ok=True)

        if known := (folder / LOCK).exists():
            lock()
        yield take


def _preflight(config: WorkflowConfig, group: Group) -> None:
    """Finds what would end the run late: a combination that cannot be computed."""
    if config.training.use_batch_norm and group.world_size > 1 and group.device.type == "cpu":
        raise ConfigError(
            Problem("training.use_batch_norm", "false with several CPU processes", "true",
                    "Statistics over all processes need GPUs; train with one process, or without batch normalization")
        )  # fmt: skip
    if config.simulation is not None and config.simulation.pictures:
        require_pictures()


def _draw(config: WorkflowConfig, folder: Path, experience: Experience, learner: DQN, group: Group) -> None:
    if config.simulation is None or not config.simulation.pictures:
        return
    assert experience.reader is not None
    assert experience.simulation is not None
    for file in draw_pictures(folder, experience.simulation, experience.reader, learner, target_policy(config.rl)):
        logger.info(f"picture: {file}")


def _figures(
    config: WorkflowConfig,
    learned: Learned,
    experience: Experience,
    judgement: Judgement,
    scores: dict[str, float | None],
    present: Presence,
    gate: Gate | None,
) -> RunFigures:
    return RunFigures(
        config=config, policy=str(target_policy(config.rl)), evaluation=judgement.document, scores=scores,
        steps=learned.position.step, rows=learned.position.rows, normalization=experience.normalization.json(),
        present=present, sources=sources_of(config, experience.data), identity=experience.identity(),
        present_note=f"Present: in at most {SAMPLE:,} rows spread over the training data." if present else "",
        notes=(f"No model was published: {gate.reason}.",) if gate else (),
    )  # fmt: skip


def _page(folder: Path, figures: RunFigures) -> str:
    """Writes the report page and returns what to say of it; the model stands without it."""
    failure = write_page(folder, figures)
    return f"warning: no {PAGE}: {failure}" if failure else f"report: {folder / PAGE}"


def _export(
    config: WorkflowConfig,
    folder: Path,
    learned: Learned,
    experience: Experience,
    judgement: Judgement,
    scores: dict[str, float | None],
) -> None:
    write_bundle(
        folder / "model",
        _predictor(config, experience.normalization, learned.learner),
        content=BundleContent(
            workflow="dqn" if config.actions else "parametric_dqn",
            normalization=experience.normalization.json(),
            config=resolved(config),
            evaluation={"scores": scores, **judgement.document},
            findings=findings(evaluation_of_run(config, str(target_policy(config.rl)), judgement.document, scores)),
            steps=learned.position.step,
            data_hash=experience.identity(),
            config_hash=fingerprint(config),
            versions=_versions(),
            git_revision=_git_revision(),
            tolerance=Tolerance(
                atol=config.rl.predictor_atol_check,
                rtol=config.rl.predictor_rtol_check,
                ratio_different=config.rl.ratio_different_predictions_tolerance,
            ),
            sample=experience.sample(_SAMPLE_ROWS),
        ),
    )


def _predictor(config: WorkflowConfig, normalization: Normalization, learner: DQN) -> Predictor:
    as_zero = config.rl.set_missing_value_to_zero
    state = Preprocessor(normalization.state, missing_as_zero=as_zero)
    if normalization.action is None:
        return DiscretePredictor(
            state, learner.scorer, state_feature_ids=normalization.state.feature_ids,
            action_names=config.actions, policy=target_policy(config.rl), restriction=learner.restriction,
        )  # fmt: skip
    return ParametricPredictor(
        state, Preprocessor(normalization.action, missing_as_zero=as_zero), learner.scorer,
        state_feature_ids=normalization.state.feature_ids, action_feature_ids=normalization.action.feature_ids,
        policy=target_policy(config.rl), restriction=learner.restriction,
    )  # fmt: skip


def _versions() -> dict[str, str]:
    names = ("reagent-lite", "torch", "onnx", "onnxruntime", "numpy")
    return {"python": platform.python_version()} | {name: version(name) for name in names}


def _git_revision() -> str | None:
    """Returns the revision of the working directory, if it is a git repository and git is there."""
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None
