"""The output folder of a run: the exported model or the reason why there is none, the report and pictures.

Only one run at a time uses the folder. Files of an earlier run stay as they are until all input of the new one has been
checked.
"""

import json
import platform
import subprocess
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from reagent_lite import __version__
from reagent_lite.algorithms.learners import Learner, learners_of
from reagent_lite.algorithms.policy_learner import PolicyLearner
from reagent_lite.algorithms.registry import ALGORITHMS
from reagent_lite.cli import fields_of_outcome
from reagent_lite.config import WorkflowConfig, expand_config, fingerprint
from reagent_lite.config.rl import RLConfig
from reagent_lite.console import logger
from reagent_lite.disk_room import require_writable
from reagent_lite.distributed.group import Group, attempt_here
from reagent_lite.distributed.worker import report_model_saved
from reagent_lite.errors import ConfigError, Problem, suggest_nearest
from reagent_lite.evaluation.document import Evaluation, estimate_rows
from reagent_lite.evaluation.evaluation_rows import REWARD_NAME
from reagent_lite.evaluation.gate import Gate, apply_gate
from reagent_lite.export.bundle_content import BundleContent
from reagent_lite.export.predictor import DiscretePredictor, ImagePredictor, ParametricPredictor, Predictor
from reagent_lite.export.tolerance import Tolerance
from reagent_lite.export.writer import require_formats, require_replaceable, write_bundle
from reagent_lite.folder_identity import nearest_existing
from reagent_lite.folder_lock import LOCK, alone_in
from reagent_lite.manifest import canonical
from reagent_lite.memory import give_back_memory
from reagent_lite.models.preprocessor import Preprocessor
from reagent_lite.report.content import Report
from reagent_lite.report.markdown import decision_of, findings, lines_of_report
from reagent_lite.report.result import Brief, Result
from reagent_lite.report.run import PAGE, DataFacts, RunFigures, evaluation_of_run, write_page
from reagent_lite.run.episode_picture import PICTURE_FILE
from reagent_lite.run.evaluators import CHOOSING
from reagent_lite.run.learner import target_policy
from reagent_lite.run.normalization import Normalization
from reagent_lite.run.sources.experience_source import Source
from reagent_lite.sim.experience import ONLY
from reagent_lite.training.checkpoint_folder import Checkpoints
from reagent_lite.training.loop import RunPosition
from reagent_lite.training.metrics import RunSummary
from reagent_lite.whole_files import write_whole

if TYPE_CHECKING:
    from reagent_lite.data.result_frames import DataFrame

FOLDER = "model_output_path"
_NOT_PUBLISHED = "not_published.json"
_SAMPLE_ROWS = 256


class OutputFolder(ExitStack):
    """The run's model_output_path, which no other run uses inside the block. On ranks other than 0 it does nothing.

        block begins   checked; an earlier run's folder is locked at once, because its checkpoints are read
        take           called once all input has been checked: a new folder is made and locked, the config written
        block ends     unlocked

    Args:
        config: names the folder.
        group: the ranks.
    """

    def __init__(self, config: WorkflowConfig, group: Group) -> None:
        super().__init__()
        self._folder = config.folder
        self._is_first = group.is_first
        self._again = attempt_here() > 0
        self._is_locked = False

    def __enter__(self) -> Self:
        """Checks the folder.

        Raises:
            FolderInUseError: another run uses the folder.
            ConfigError: the folder cannot be written.
            UnavailableError: the folder could not be written for ten minutes, in a later attempt of the run.
        """
        if self._is_first:
            require_writable(nearest_existing(self._folder), FOLDER, again=self._again)
            require_replaceable(folder_of_model(self._folder, ONLY))
            if (self._folder / LOCK).exists():
                self._lock_folder()
        return super().__enter__()

    def take(self, config: WorkflowConfig) -> None:
        """Creates the folder, or removes an earlier run's pictures and report, and writes the config there; on rank 0.

        Raises:
            FolderInUseError, ConfigError, UnavailableError: as at the beginning of the block.
        """
        require_writable(self._folder, FOLDER, keep=True, again=self._again)
        if not self._is_locked:
            self._lock_folder()
        for name in (PICTURE_FILE, PAGE):  # of an earlier run
            (self._folder / name).unlink(missing_ok=True)
        write_whole(self._folder / "config.json", canonical(expand_config(config)))

    def _lock_folder(self) -> None:
        self.enter_context(alone_in(self._folder, FOLDER, again=self._again))
        self._is_locked = True


def require_outcome(source: Source) -> None:
    """Checks before training that the model can be written and that publish_if names an outcome of the data.

    Raises:
        ConfigError: the data has no such outcome; the message names the nearest one.
        BundleError: the folder of a model holds something else.
    """
    config = source.config
    for kind in source.types if source.group.is_first else ():
        require_replaceable(folder_of_model(config.folder, kind))
    if config.publish_if is None:
        return
    outcomes = (REWARD_NAME, *source.spec.metric_names)
    outcome = config.publish_if.outcome
    if outcome not in outcomes:
        expected = f"one of {', '.join(outcomes)}"
        raise ConfigError(Problem("publish_if.outcome", expected, repr(outcome), suggest_nearest(outcome, outcomes)))


def require_exportable(source: Source, learner: Learner) -> None:
    """Checks before training that the network of training.network can be exported and that its files give its values.

    Raises:
        ConfigError: the export fails, or the values differ; with the error of the exporter.
    """
    config = source.config
    if config.training.network is None or not source.group.is_first:
        return
    kind, first_learner = next(iter(learners_of(learner).items()))
    sample = source.sample(_SAMPLE_ROWS, kind)
    try:
        require_formats(_predictor(config, source.normalization, first_learner), sample, _tolerance(config.rl))
    except Exception as error:
        expected = "a module that can be exported: no branches on values of tensors, and only operations of ONNX"
        todo = "Use operations that torch.onnx.export and torch.jit.trace support"
        got = f"{type(error).__name__}: {str(error).splitlines()[0]}"  # torch adds lines on its own graph
        raise ConfigError(Problem("training.network", expected, got, todo)) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult(Result):
    """The result of a run, printed as the last line of standard output.

    Attributes:
        model: folder of the exported model, or a folder for each type of agents; None if publish_if blocked the export.
        decision: recommendation for the policy: choice, reason, next; None on ranks other than 0.
        steps: optimizer steps of the whole run.
        rows: rows read in the whole run.
        rows_per_second: rows read per second since this start.
        seconds: total wall-clock time since this start.
        scores: scores of the policy by TensorBoard tag.
        not_published: reason why publish_if blocked the export; None and not printed if there was an export.
        folder: folder of the run; not printed.
    """

    model: str | dict[str, str] | None
    decision: dict[str, str] | None
    steps: int
    rows: int
    rows_per_second: float
    seconds: float
    scores: dict[str, float | None]
    not_published: str | None = None
    folder: str = field(default="", repr=False, compare=False)

    @property
    def metrics(self) -> "DataFrame":
        """Figures of metrics.jsonl as a frame of pandas, with a row for each reported step."""
        from reagent_lite.data.result_frames import frame_of_lines

        return frame_of_lines(Path(self.folder) / "metrics.jsonl")

    def line(self) -> str:
        """Returns the outcome as one line of JSON."""
        tree = fields_of_outcome(self)
        if self.not_published is None:
            del tree["not_published"]
        return json.dumps(tree)


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """A trained learner, saved and evaluated.

    Attributes:
        learner: the trained learner.
        position: steps and rows of the whole run.
        checkpoints: checkpoints of the run; the newest one has the trained learner.
        evaluation: evaluation of the learner, complete on rank 0.
        figures: figures of the last epoch.
        rows_per_second: rows read per second since this start.
    """

    learner: Learner
    position: RunPosition
    checkpoints: Checkpoints
    evaluation: Evaluation
    figures: Mapping[str, float]
    rows_per_second: float

    @property
    def scores(self) -> dict[str, float | None]:
        """TD loss, targets' variance, mean value, returns in simulation, estimates; None for a value not finite."""
        names = ("td_loss/mean", "td_target/variance", "value/model/mean")
        scores = {name: self.figures[name] for name in names if name in self.figures}
        scores |= {
            name: value
            for name, value in self.evaluation.scalars.items()
            if name.startswith(("simulation/", f"{CHOOSING}simulation/"))
            or (
                name.startswith(("CPE/Reward/", f"{CHOOSING}CPE/Reward/"))
                and name.removeprefix(CHOOSING).count("/") == 2
            )
        }
        return {name: value if np.isfinite(value) else None for name, value in scores.items()}


def publish(config: WorkflowConfig, source: Source, learned: Learned, seconds: float) -> TrainResult:
    """Writes the model or the reason why there is none, pictures and report; every rank calls it, rank 0 writes.

    Args:
        config: the config of the exported model: that of the run, with the temperature that the evaluation chose.
        source: data or environments of the run.
        learned: the trained learner and its evaluation.
        seconds: wall-clock time since this start.
    """
    give_back_memory()
    group = source.group
    facts = source.facts()
    reason = brief = decision = None
    if group.is_first:
        gate = gate_of(config, learned.evaluation)
        policy = str(target_policy(config))
        evaluations = {kind: learned.evaluation.of(kind) for kind in {ONLY, *source.types}}
        reports = {
            kind: evaluation_of_run(config, policy, evaluation, learned.scores, gate)
            for kind, evaluation in evaluations.items()
        }
        brief = Brief.of(reports[ONLY])
        decision = reports[ONLY].decision.json()
        for line in (*lines_of_report(reports[ONLY]), str(reports[ONLY].decision)):
            logger.info(line)
        if gate is None or gate.passed:
            _export(config, source, facts, learned, reports)
        else:
            reason = gate.reason
            write_whole(config.folder / _NOT_PUBLISHED, canonical(gate.document))
            logger.info(f"not published: {reason}; see {config.folder / _NOT_PUBLISHED}")
        source.draw(config.folder, learned.learner)
        _write_report(config, source, facts, learned, reports[ONLY], seconds)
        report_model_saved()
    group.barrier()
    result = learned.evaluation.result
    explanation = learned.evaluation.explanation
    models = {kind: str(folder_of_model(config.folder, kind)) for kind in source.types}
    return TrainResult(
        model=None if reason else models.get(ONLY, models),
        decision=decision,
        steps=learned.position.step,
        rows=learned.position.rows,
        rows_per_second=round(learned.rows_per_second, 1),
        seconds=round(seconds, 3),
        scores=learned.scores,
        not_published=reason,
        brief=brief,
        estimate_rows=() if result is None else estimate_rows(result, "model"),
        explanations={} if explanation is None else {"model": explanation.json()},
        folder=str(config.folder),
    )


def _export(
    config: WorkflowConfig, source: Source, facts: DataFacts, learned: Learned, reports: Mapping[str, Report]
) -> None:
    for kind, learner in learners_of(learned.learner).items():
        write_bundle(
            folder_of_model(config.folder, kind),
            _predictor(config, source.normalization, learner),
            content=_content(config, source, facts, learned, reports[kind], kind),
        )
    (config.folder / _NOT_PUBLISHED).unlink(missing_ok=True)  # of an earlier run


def _write_report(
    config: WorkflowConfig, source: Source, facts: DataFacts, learned: Learned, report: Report, seconds: float
) -> None:
    figures = RunFigures(
        config=config,
        policy=str(target_policy(config)),
        evaluation=report,
        candidates=learned.evaluation.document.get("cpe", {}).get("candidates"),
        steps=learned.position.step,
        rows=learned.position.rows,
        normalization=source.normalization.json(),
        facts=facts,
        identity=source.hash,
        seconds=seconds,
    )
    if failure := write_page(config.folder, figures):
        logger.warning(f"no {PAGE}: {failure}")  # the model is valid without the report
    else:
        logger.info(f"report: {config.folder / PAGE}")


def conclusion_of(outcome: TrainResult, folder: Path) -> RunSummary:
    """Returns the outcome of a run for TensorBoard and trackers; rank 0 calls it."""
    assert outcome.brief is not None
    decision = outcome.brief.decision
    assert decision is not None
    models = outcome.model if isinstance(outcome.model, dict) else {ONLY: outcome.model}
    files = [folder / name for name in ("config.json", PAGE, _NOT_PUBLISHED, PICTURE_FILE)]
    files += [Path(model) for model in models.values() if model is not None]
    return RunSummary(
        step=outcome.steps,
        decision=decision.choice.value,
        text=str(decision),
        files=tuple(file for file in files if file.exists()),
    )


def folder_of_model(folder: Path, kind: str) -> Path:
    """Returns the folder of the exported model of a type of agents inside a run's folder."""
    return folder / (kind or "model")


def gate_of(config: WorkflowConfig, evaluation: Evaluation) -> Gate | None:
    """Returns the decision of publish_if, or None if the config has no such section; rank 0 calls it."""
    if config.publish_if is None:
        return None
    assert evaluation.result is not None, "publish_if needs a log"
    return apply_gate(evaluation.result, config.publish_if)


def installed_versions() -> dict[str, str]:
    """Returns the versions of the packages that checkpoints and models depend on."""
    numbers = {"python": platform.python_version(), "reagent-lite": __version__}
    return numbers | {name: version(name) for name in ("torch", "onnx", "onnxruntime", "numpy")}


def _content(
    config: WorkflowConfig, source: Source, facts: DataFacts, learned: Learned, report: Report, kind: str
) -> BundleContent:
    further: dict[str, Any] = {"decision": report.decision.json()}
    if facts.discounts is not None:
        further["time_discount"] = facts.discounts.json()
    return BundleContent(
        workflow="dqn" if config.actions else "parametric_dqn",
        normalization=source.normalization.json(),
        config=expand_config(config),
        evaluation={"scores": learned.scores, **learned.evaluation.of(kind).document, **further},
        decision=decision_of(report),
        findings=findings(report),
        steps=learned.position.step,
        data_hash=source.hash,
        config_hash=fingerprint(config),
        versions=installed_versions(),
        git_revision=_git_revision(),
        tolerance=_tolerance(config.rl),
        sample=source.sample(_SAMPLE_ROWS, kind),
        score=ALGORITHMS[config.algorithm].score,
        items=source.items,
    )


def _tolerance(rl: RLConfig) -> Tolerance:
    return Tolerance(
        atol=rl.predictor_atol_check,
        rtol=rl.predictor_rtol_check,
        ratio_different=rl.ratio_different_predictions_tolerance,
    )


def _predictor(config: WorkflowConfig, normalization: Normalization, learner: PolicyLearner) -> Predictor:
    common: dict[str, Any] = {"policy": target_policy(config), "restriction": learner.restriction}
    if image := normalization.state.image:
        return ImagePredictor(learner.scorer, image=image, action_names=config.actions, **common)
    as_zero = config.rl.set_missing_value_to_zero
    state = Preprocessor(normalization.state, missing_as_zero=as_zero)
    common["state_feature_ids"] = normalization.state.feature_ids
    if normalization.action is None:
        return DiscretePredictor(state, learner.scorer, action_names=config.actions, **common)
    action = Preprocessor(normalization.action, missing_as_zero=as_zero)
    ids = normalization.action.feature_ids
    return ParametricPredictor(state, action, learner.scorer, action_feature_ids=ids, **common)


def _git_revision() -> str | None:
    """Returns the git revision of the working directory, or None outside a repository or without git."""
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None
