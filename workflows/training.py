"""The story of a training run, told once for named actions and for candidates."""

import platform
import subprocess
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

from reagent_lite.algorithms.dqn import DQN
from reagent_lite.config import ParametricDqnConfig, WorkflowConfig, fingerprint, resolved
from reagent_lite.data.training_copy import give_back_memory
from reagent_lite.distributed.group import Group
from reagent_lite.errors import ConfigError, DivergenceError, Problem
from reagent_lite.evaluation.pictures import require_pictures
from reagent_lite.export.content import BundleContent
from reagent_lite.export.predictor import DiscretePredictor, ParametricPredictor, Predictor
from reagent_lite.export.tolerance import Tolerance
from reagent_lite.export.writer import write_bundle
from reagent_lite.files import require_writable, write_whole
from reagent_lite.manifest import canonical
from reagent_lite.models.preprocessor import Preprocessor
from reagent_lite.sim.cuda import on_stream
from reagent_lite.training.checkpoint import save_checkpoint, warm_start
from reagent_lite.training.loop import Report, fit
from reagent_lite.training.metrics import MetricsWriter
from reagent_lite.training.progress import Progress, progress
from workflows.command_line import Outcome
from workflows.drawing import PICTURES, draw_pictures
from workflows.experience import Experience, Judges, Stream, build_judges, gather_experience, open_stream
from workflows.judging import Judgement
from workflows.learning import build_learner, build_optimization, captures, choose_threads
from workflows.preparation import Normalization
from workflows.reporting import say
from workflows.simulation import Simulation, open_simulation, with_actions

_SAMPLE_ROWS = 256


def train(config: WorkflowConfig, group: Group) -> Outcome:
    """Trains, judges and exports; called on every rank, and rank 0's outcome is the run's."""
    start = time.monotonic()
    folder = Path(config.model_output_path).expanduser()
    _preflight(config, group, folder)
    with on_stream(group.device):
        simulation = None
        if config.simulation is not None:
            simulation = open_simulation(config, group, parametric=isinstance(config, ParametricDqnConfig))
            config = with_actions(config, simulation)
        if group.is_first:
            write_whole(folder / "config.json", canonical(resolved(config)))
        return _train(config, group, folder, simulation, start)


def _train(config: WorkflowConfig, group: Group, folder: Path, simulation: Simulation | None, start: float) -> Outcome:
    experience = gather_experience(config, group, simulation)
    choose_threads(config, experience.spec, group)
    learner = build_learner(config, experience.spec, group.device)
    optimization = build_optimization(config, learner, captured=captures(config, group))
    if config.training.warm_start_model_path is not None:
        optimizer = None if config.training.do_not_warm_start_optimizer else optimization.optimizer
        say(group, warm_start(config.training.warm_start_model_path, learner, optimizer))
    stream = open_stream(config, experience, learner, group)
    torch.manual_seed(config.seed + group.rank)  # dropout differs between ranks, initial weights do not
    judges = build_judges(config, experience, learner, group)
    plan = stream.plan
    with (
        MetricsWriter(folder, enabled=group.is_first) as writer,
        progress("training", "rows", enabled=group.is_first) as show,
    ):
        reporter = _Reporter(config, judges, stream, group, writer)
        fitting = time.monotonic()
        steps = fit(
            learner, stream.source, optimization, group, plan,
            report=reporter, every_steps=config.rl.tensorboard_logging_freq,
            before_step=stream.before_step,
            on_step=lambda rows: reporter.step(rows, show),
            stop=judges.satisfied,
            capture=stream.capture,
        )  # fmt: skip
        seconds = time.monotonic() - fitting
        judgement = judges.at_end()
        writer.write(steps, judgement.scalars)
    for line in judgement.lines:
        say(group, line)
    rows = reporter.rows
    scores = {name: value if np.isfinite(value) else None for name, value in reporter.scores(judgement).items()}
    give_back_memory()
    if group.is_first:
        _save(config, folder, steps, experience, learner, optimization.optimizer, judgement, scores)
        if config.simulation is not None and config.simulation.pictures:
            assert experience.reader is not None
            assert simulation is not None
            behaviour = judgement.scalars["simulation/random_return/mean"]
            for file in draw_pictures(folder, simulation, experience.reader, learner, behaviour=behaviour):
                say(group, f"picture: {file}")
    group.barrier()
    return Outcome(
        model=str(folder / "model"),
        steps=steps,
        rows=rows,
        rows_per_second=round(rows / seconds, 1),
        seconds=round(time.monotonic() - start, 3),
        scores=scores,
    )


class _Reporter:
    """Figures at the end of each epoch, and training means whenever the loop reports."""

    def __init__(
        self, config: WorkflowConfig, judges: Judges, stream: Stream, group: Group, writer: MetricsWriter
    ) -> None:
        self._config, self._judges, self._stream, self._group, self._writer = config, judges, stream, group, writer
        self._latest: dict[str, float] = {}
        self.note = ""
        self.rows = 0

    def step(self, rows: int, show: Progress) -> None:
        """Shows that so many rows are done."""
        self.rows = rows
        show(rows, self._stream.rows, self.note)

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
            self._latest = self._judges.figures(final=report.step == self._stream.plan.num_steps)
            scalars |= self._latest
            if "simulation/return/mean" in scalars:
                self.note += f", return {scalars['simulation/return/mean']:.4g}"
        self._writer.write(report.step, scalars)

    def scores(self, judgement: Judgement) -> dict[str, float]:
        """Returns the run's scores: TD loss, returns in simulation, and estimates of the policy's value on logs."""
        names = ("td_loss/mean", "value/model/mean")
        estimates = (name for name in judgement.scalars if name.startswith("CPE/Reward/") and name.count("/") == 2)
        simulated = (name for name in judgement.scalars if name.startswith("simulation/"))
        ended = {name: judgement.scalars[name] for name in (*estimates, *simulated)}
        return {name: self._latest[name] for name in names if name in self._latest} | ended


def _preflight(config: WorkflowConfig, group: Group, folder: Path) -> None:
    """Finds what would end the run late: an output that cannot be written, a combination that cannot be computed."""
    require_writable(folder, "model_output_path")
    if config.training.use_batch_norm and group.world_size > 1 and group.device.type == "cpu":
        raise ConfigError(
            Problem("training.use_batch_norm", "false with several CPU processes", "true",
                    "Statistics over all processes need GPUs; train with one process, or without batch normalization")
        )  # fmt: skip
    if config.simulation is not None and config.simulation.pictures:
        require_pictures()
    if group.is_first:
        for name in PICTURES:  # of an earlier run into this folder
            (folder / name).unlink(missing_ok=True)


def _save(
    config: WorkflowConfig,
    folder: Path,
    steps: int,
    experience: Experience,
    learner: DQN,
    optimizer: torch.optim.Optimizer,
    judgement: Judgement,
    scores: dict[str, float | None],
) -> None:
    save_checkpoint(folder / "checkpoints", steps, learner, optimizer, {"config_hash": fingerprint(config)})
    write_bundle(
        folder / "model",
        _predictor(config, experience.normalization, learner),
        content=BundleContent(
            workflow="dqn" if config.actions else "parametric_dqn",
            normalization=experience.normalization.json(),
            config=resolved(config),
            evaluation={"scores": scores, **judgement.document},
            steps=steps,
            data_hash=experience.identity(),
            config_hash=fingerprint(config),
            versions=_versions(),
            git_revision=_git_revision(),
            epsilon=config.rl.epsilon,
            softmax_policy=bool(config.rl.softmax_policy),
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
            action_names=config.actions, temperature=config.rl.temperature,
        )  # fmt: skip
    return ParametricPredictor(
        state, Preprocessor(normalization.action, missing_as_zero=as_zero), learner.scorer,
        state_feature_ids=normalization.state.feature_ids, action_feature_ids=normalization.action.feature_ids,
        temperature=config.rl.temperature,
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
