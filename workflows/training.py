"""The story of a training run, told once for named actions and for candidates."""

import platform
import subprocess
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

from reagent_lite.algorithms.dqn import DQN
from reagent_lite.config import WorkflowConfig, fingerprint, resolved
from reagent_lite.data.plan import ReadPlan
from reagent_lite.data.source import LoggedSource
from reagent_lite.data.training_copy import give_back_memory
from reagent_lite.distributed.group import Group
from reagent_lite.errors import ConfigError, DivergenceError, Problem
from reagent_lite.export.content import BundleContent, SampleRows
from reagent_lite.export.predictor import DiscretePredictor, ParametricPredictor, Predictor
from reagent_lite.export.tolerance import Tolerance
from reagent_lite.export.writer import write_bundle
from reagent_lite.files import require_writable, write_whole
from reagent_lite.manifest import canonical
from reagent_lite.models.preprocessor import Preprocessor
from reagent_lite.training.checkpoint import save_checkpoint, warm_start
from reagent_lite.training.loop import Report, fit
from reagent_lite.training.metrics import MetricsWriter
from reagent_lite.training.progress import progress
from workflows.command_line import Outcome
from workflows.judging import Judge, Judgement
from workflows.learning import build_learner, build_optimization, choose_threads
from workflows.preparation import Data, data_hash, prepare
from workflows.reporting import say

_SAMPLE_ROWS = 256


def train(config: WorkflowConfig, group: Group) -> Outcome:
    """Trains, judges and exports; called on every rank, and rank 0's outcome is the run's."""
    start = time.monotonic()
    folder = Path(config.model_output_path).expanduser()
    _preflight(config, group, folder)
    data = prepare(config, group)
    choose_threads(config, data.spec, group)
    learner = build_learner(config, data.spec, group.device)
    optimization = build_optimization(config, learner)
    if config.training.warm_start_model_path is not None:
        optimizer = None if config.training.do_not_warm_start_optimizer else optimization.optimizer
        say(group, warm_start(config.training.warm_start_model_path, learner, optimizer))
    torch.manual_seed(config.seed + group.rank)  # dropout differs between ranks, initial weights do not
    plan = _plan(config, data, group)
    source = LoggedSource(data.train_rows, plan, group.rank, group.device)
    judge = Judge(config, data, learner, group)
    with (
        MetricsWriter(folder, enabled=group.is_first) as writer,
        progress("training", "rows", enabled=group.is_first) as show,
    ):
        reporter = _Reporter(config, judge, group, writer)
        fitting = time.monotonic()
        steps = fit(
            learner, source, optimization, group, plan,
            report=reporter, every_steps=config.rl.tensorboard_logging_freq,
            on_step=lambda rows: show(rows, plan.rows * plan.epochs, reporter.note),
        )  # fmt: skip
        seconds = time.monotonic() - fitting
        judgement = judge.evaluate(final=True)
        writer.write(steps, judgement.scalars)
    for line in judgement.lines:
        say(group, line)
    rows = plan.rows * plan.epochs
    scores = {name: value if np.isfinite(value) else None for name, value in reporter.scores(judgement).items()}
    give_back_memory()
    if group.is_first:
        _save(config, folder, steps, data, learner, optimization.optimizer, judgement, scores)
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

    def __init__(self, config: WorkflowConfig, judge: Judge, group: Group, writer: MetricsWriter) -> None:
        self._config, self._judge, self._group, self._writer = config, judge, group, writer
        self._latest: dict[str, float] = {}
        self.note = ""

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
        if report.end_of_epoch:
            self._latest = self._judge.figures(final=report.epoch == self._config.epochs)
            scalars |= self._latest
            if self._config.evaluation.calc_cpe_in_training and report.epoch < self._config.epochs:
                scalars |= self._judge.evaluate(final=False).scalars
        self._writer.write(report.step, scalars)

    def scores(self, judgement: Judgement) -> dict[str, float]:
        """Returns the run's scores: TD loss on the judged rows, and the estimates of the policy's value."""
        names = ("td_loss/mean", "value/model/mean")
        estimates = (name for name in judgement.scalars if name.startswith("CPE/Reward/") and name.count("/") == 2)
        cpe = {name: judgement.scalars[name] for name in estimates}
        return {name: self._latest[name] for name in names if name in self._latest} | cpe


def _preflight(config: WorkflowConfig, group: Group, folder: Path) -> None:
    """Finds what would end the run late: an output that cannot be written, a combination that cannot be computed."""
    require_writable(folder, "model_output_path")
    if config.training.use_batch_norm and group.world_size > 1 and group.device.type == "cpu":
        raise ConfigError(
            Problem("training.use_batch_norm", "false with several CPU processes", "true",
                    "Statistics over all processes need GPUs; train with one process, or without batch normalization")
        )  # fmt: skip
    if group.is_first:
        write_whole(folder / "config.json", canonical(resolved(config)))


def _plan(config: WorkflowConfig, data: Data, group: Group) -> ReadPlan:
    world = group.world_size
    minibatch = config.data.global_minibatch_size or config.training.minibatch_size * world
    plan = ReadPlan(
        rows=data.train_rows.count,
        minibatch=minibatch,
        epochs=config.epochs,
        seed=config.seed,
        shares=(1,) * world,
        minibatches_per_step=config.training.minibatches_per_step,
    )
    accumulated = f", {plan.minibatches_per_step} a step" if plan.minibatches_per_step > 1 else ""
    say(group, f"global minibatch {minibatch} rows = {world} process(es) x {minibatch / world:g}{accumulated}, "
               f"{plan.steps_per_epoch} steps/epoch, {config.epochs} epochs, "
               f"learning rate {config.training.learning_rate:g} (not scaled), on {group.device}")  # fmt: skip
    return plan


def _save(
    config: WorkflowConfig,
    folder: Path,
    steps: int,
    data: Data,
    learner: DQN,
    optimizer: torch.optim.Optimizer,
    judgement: Judgement,
    scores: dict[str, float | None],
) -> None:
    save_checkpoint(folder / "checkpoints", steps, learner, optimizer, {"config_hash": fingerprint(config)})
    write_bundle(
        folder / "model",
        _predictor(config, data, learner),
        content=BundleContent(
            workflow="dqn" if config.actions else "parametric_dqn",
            normalization=data.normalization.json(),
            config=resolved(config),
            evaluation={"scores": scores, "cpe": judgement.document},
            steps=steps,
            data_hash=data_hash(data.train),
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
            sample=_sample(data),
        ),
    )


def _predictor(config: WorkflowConfig, data: Data, learner: DQN) -> Predictor:
    as_zero, normalization = config.rl.set_missing_value_to_zero, data.normalization
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


def _sample(data: Data) -> SampleRows:
    """Takes rows spread over the judged data, raw, in the model's column order."""
    copy = data.held_out or data.train
    numbers = np.unique(np.linspace(0, len(copy) - 1, min(_SAMPLE_ROWS, len(copy))).astype(int))
    values = _in_order(np.array(copy.state[numbers]), copy.state_ids, data.normalization.state.feature_ids)
    if data.normalization.action is None:
        return SampleRows(values=values, mask=np.asarray(copy.mask[numbers], bool))
    ids = data.normalization.action.feature_ids
    lists = np.asarray(copy.actions_list[numbers])
    starts, stops = copy.list_offsets[lists], copy.list_offsets[lists + 1]
    longest = max(int((stops - starts).max()), 1)
    candidates = np.full((len(numbers), longest, len(ids)), np.nan, np.float32)
    mask = np.arange(longest) < (stops - starts)[:, None]
    for row, (begin, end) in enumerate(zip(starts, stops, strict=True)):
        candidates[row, : end - begin] = _in_order(np.array(copy.candidates[begin:end]), copy.action_ids, ids)
    return SampleRows(values=values, candidates=candidates, mask=mask)


def _in_order(values: np.ndarray, ids: tuple[int, ...], order: tuple[int, ...]) -> np.ndarray:
    result = np.full((len(values), len(order)), np.nan, np.float32)
    for column, feature in enumerate(order):
        if feature in ids:
            result[:, column] = values[:, ids.index(feature)]
    return result


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
