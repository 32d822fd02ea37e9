"""What a run leaves in its folder: the model, or why it was held back, pictures and the report.

The folder is one run's alone; until all its input has been checked nothing of an earlier run there changes.
"""

import json
import platform
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from reagent_lite.algorithms.dqn import DQN
from reagent_lite.algorithms.learners import Learner, learners_of
from reagent_lite.cli import printed
from reagent_lite.config import WorkflowConfig, fingerprint, resolved
from reagent_lite.console import logger
from reagent_lite.data.copy.training_copy import give_back_memory
from reagent_lite.distributed.group import Group, attempt_here
from reagent_lite.distributed.worker import report_model_saved
from reagent_lite.errors import ConfigError, Problem, nearest
from reagent_lite.evaluation.document import Evaluation
from reagent_lite.evaluation.gate import Gate, decide
from reagent_lite.evaluation.page import REWARD_NAME
from reagent_lite.export.content import BundleContent
from reagent_lite.export.predictor import DiscretePredictor, ParametricPredictor, Predictor
from reagent_lite.export.tolerance import Tolerance
from reagent_lite.export.writer import require_formats, require_replaceable, write_bundle
from reagent_lite.files import LOCK, alone_in, nearest_existing, require_writable, write_whole
from reagent_lite.manifest import canonical
from reagent_lite.models.preprocessor import Preprocessor
from reagent_lite.report.content import Report
from reagent_lite.report.markdown import decision_of, findings
from reagent_lite.report.result import Brief, Result
from reagent_lite.report.run import PAGE, RunFigures, evaluation_of_run, write_page
from reagent_lite.run.figures import SAMPLE
from reagent_lite.run.learner import target_policy
from reagent_lite.run.normalization import Normalization
from reagent_lite.run.pictures import PICTURES
from reagent_lite.run.sources import Facts, Source
from reagent_lite.sim.rollout import ONLY
from reagent_lite.training.checkpoint import Checkpoints
from reagent_lite.training.loop import Position
from reagent_lite.training.metrics import Conclusion

FOLDER = "model_output_path"
_NOT_PUBLISHED = "not_published.json"
_SAMPLE_ROWS = 256


@contextmanager
def output_folder(config: WorkflowConfig, group: Group) -> Iterator[Callable[[WorkflowConfig], None]]:
    """Reserves model_output_path for this run inside the block; only rank 0 writes there, other machines may lack it.

    Yields a function that takes the folder and writes the config there. It is called once all input has been checked:
    until then nothing of an earlier run changes and no new folder is made. The folder of an earlier run is locked at
    once, because its checkpoints are read.

    Raises:
        FolderInUseError: another run has the folder.
        ConfigError: it cannot be written.
    """
    if not group.is_first:
        yield lambda config: None
        return
    folder = config.folder
    require_writable(nearest_existing(folder), FOLDER)
    require_replaceable(model_folder(folder, ONLY))
    with ExitStack() as stack:

        def lock() -> None:
            stack.enter_context(alone_in(folder, FOLDER, again=attempt_here() > 0))

        def take(config: WorkflowConfig) -> None:
            require_writable(folder, FOLDER)
            if not known:
                lock()
            for name in (*PICTURES, PAGE):  # of an earlier run into this folder
                (folder / name).unlink(missing_ok=True)
            write_whole(folder / "config.json", canonical(resolved(config)))

        if known := (folder / LOCK).exists():
            lock()
        yield take


def require_outcome(config: WorkflowConfig, source: Source, group: Group) -> None:
    """Refuses what cannot be written at the end, before anything is learned.

    Raises:
        ConfigError: a condition on an outcome that the data does not have; with the nearest outcome.
        BundleError: where the model of a type of agents belongs, there is something else.
    """
    for kind in source.types if group.is_first else ():
        require_replaceable(model_folder(config.folder, kind))
    if config.publish_if is None:
        return
    known, asked = (REWARD_NAME, *source.spec.metric_names), config.publish_if.outcome
    if asked not in known:
        expected = f"one of {', '.join(known)}"
        raise ConfigError(Problem("publish_if.outcome", expected, repr(asked), nearest(asked, known)))


def require_exportable(config: WorkflowConfig, group: Group, source: Source, learner: Learner) -> None:
    """Refuses a network of the user's own that cannot be exported, before anything is learned.

    Raises:
        ConfigError: with what the format does not take.
    """
    if config.training.network is None or not group.is_first:
        return
    one = next(iter(learners_of(learner).values()))
    try:
        require_formats(_predictor(config, source.normalization, one))
    except Exception as error:
        expected = "a module that can be exported: it branches on no value of a tensor, and calls what ONNX has"
        todo = "A call that is missing is added to reagent_lite/export/onnx_graph.py"
        raise ConfigError(Problem("training.network", expected, f"{type(error).__name__}: {error}", todo)) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome(Result):
    """What a run leaves; printed as the last line of standard output.

    Attributes:
        model: the exported folder, of several types of agents by type; None where publish_if held it back.
        steps, rows: of the whole run.
        rows_per_second: of this start.
        seconds: total wall-clock time of this start.
        scores: of the policy.
        not_published: why publish_if held the model back; printed only then.
    """

    model: str | dict[str, str] | None
    steps: int
    rows: int
    rows_per_second: float
    seconds: float
    scores: dict[str, float | None]
    not_published: str | None = None

    def line(self) -> str:
        """Returns it as one line of JSON."""
        tree = printed(self)
        if self.not_published is None:
            del tree["not_published"]
        return json.dumps(tree)


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """A learner at the end of its steps, saved and evaluated.

    Attributes:
        learner: what was trained.
        position: steps and rows of the whole run.
        checkpoints: the newest of which is of this moment.
        evaluation: of the learner, complete on rank 0.
        figures: of the last epoch.
        rows_per_second: of this start.
    """

    learner: Learner
    position: Position
    checkpoints: Checkpoints
    evaluation: Evaluation
    figures: Mapping[str, float]
    rows_per_second: float

    @property
    def scores(self) -> dict[str, float | None]:
        """TD loss, mean value, returns in simulation, and estimates on logs; None where one is not finite."""
        ended = self.evaluation.scalars.items()
        scores = {name: self.figures[name] for name in ("td_loss/mean", "value/model/mean") if name in self.figures}
        scores |= {name: value for name, value in ended if name.startswith("CPE/Reward/") and name.count("/") == 2}
        scores |= {name: value for name, value in ended if name.startswith("simulation/")}
        return {name: value if np.isfinite(value) else None for name, value in scores.items()}


def publish(config: WorkflowConfig, group: Group, source: Source, learned: Learned, seconds: float) -> Outcome:
    """Exports the model, or writes why not, then pictures and report; every rank calls it, rank 0 writes.

    Args:
        config: the run's config.
        group: the ranks.
        source: what was learned from.
        learned: what was learned.
        seconds: that this start has taken.
    """
    folder, scores = config.folder, learned.scores
    give_back_memory()
    facts = source.facts()
    reason = brief = None
    if group.is_first:
        policy, evaluation = str(target_policy(config.rl)), learned.evaluation
        gate = gate_of(config, evaluation)
        found = evaluation_of_run(config, policy, evaluation, scores, gate)
        brief = Brief.of(found)
        logger.info(str(found.decision))
        if gate is None or gate.passed:
            for kind, learner in learners_of(learned.learner).items():
                own = evaluation_of_run(config, policy, evaluation.of(kind), scores, gate) if kind else found
                write_bundle(
                    model_folder(folder, kind),
                    _predictor(config, source.normalization, learner),
                    content=_content(config, source, learned, own, kind),
                )
            (folder / _NOT_PUBLISHED).unlink(missing_ok=True)  # of an earlier run
        else:
            reason = gate.reason
            write_whole(folder / _NOT_PUBLISHED, canonical(gate.document))
            logger.info(f"not published: {reason}; see {folder / _NOT_PUBLISHED}")
        for file in source.draw(folder, learned.learner):
            logger.info(f"picture: {file}")
        if failure := write_page(folder, _figures(config, source, learned, facts, found)):
            logger.warning(f"no {PAGE}: {failure}")  # the model is valid without it
        else:
            logger.info(f"report: {folder / PAGE}")
        report_model_saved()
        if failure := learned.checkpoints.finish():
            logger.warning(f"the model was exported, but the run could not be marked as ended: {failure}")
    group.barrier()
    models = {kind: str(model_folder(folder, kind)) for kind in source.types}
    return Outcome(
        model=None if reason else models.get(ONLY, models),
        steps=learned.position.step,
        rows=learned.position.rows,
        rows_per_second=round(learned.rows_per_second, 1),
        seconds=round(seconds, 3),
        scores=scores,
        not_published=reason,
        brief=brief,
    )


def conclusion_of(outcome: Outcome, folder: Path) -> Conclusion:
    """Returns what a run came to, for TensorBoard and trackers; on rank 0."""
    assert outcome.brief is not None
    decision = outcome.brief.decision
    assert decision is not None
    models = outcome.model if isinstance(outcome.model, dict) else {ONLY: outcome.model}
    files = [folder / name for name in ("config.json", PAGE, _NOT_PUBLISHED, *PICTURES)]
    files += [Path(model) for model in models.values() if model is not None]
    return Conclusion(step=outcome.steps, decision=decision.choice.value, text=str(decision),
                      files=tuple(file for file in files if file.exists()))  # fmt: skip


def model_folder(folder: Path, kind: str) -> Path:
    """Returns where a run's folder has the exported model of a type of agents."""
    return folder / (kind or "model")


def gate_of(config: WorkflowConfig, evaluation: Evaluation) -> Gate | None:
    """Returns the decision of publish_if, or None where the config has none; on rank 0."""
    if config.publish_if is None:
        return None
    assert evaluation.result is not None, "publish_if needs a log"
    return decide(evaluation.result, config.publish_if)


def versions() -> dict[str, str]:
    """Returns versions of the software that a checkpoint and a model depend on."""
    names = ("reagent-lite", "torch", "onnx", "onnxruntime", "numpy")
    return {"python": platform.python_version()} | {name: version(name) for name in names}


def _content(config: WorkflowConfig, source: Source, learned: Learned, found: Report, kind: str) -> BundleContent:
    rl, decision = config.rl, {"decision": found.decision.json()}
    return BundleContent(
        workflow="dqn" if config.actions else "parametric_dqn",
        normalization=source.normalization.json(),
        config=resolved(config),
        evaluation={"scores": learned.scores, **learned.evaluation.of(kind).document, **decision},
        decision=decision_of(found),
        findings=findings(found),
        steps=learned.position.step,
        data_hash=source.hash,
        config_hash=fingerprint(config),
        versions=versions(),
        git_revision=_git_revision(),
        tolerance=Tolerance(
            atol=rl.predictor_atol_check,
            rtol=rl.predictor_rtol_check,
            ratio_different=rl.ratio_different_predictions_tolerance,
        ),
        sample=source.sample(_SAMPLE_ROWS, kind),
    )


def _predictor(config: WorkflowConfig, normalization: Normalization, learner: DQN) -> Predictor:
    as_zero = config.rl.set_missing_value_to_zero
    state = Preprocessor(normalization.state, missing_as_zero=as_zero)
    common: dict[str, Any] = {
        "state_feature_ids": normalization.state.feature_ids,
        "policy": target_policy(config.rl),
        "restriction": learner.restriction,
    }
    if normalization.action is None:
        return DiscretePredictor(state, learner.scorer, action_names=config.actions, **common)
    action = Preprocessor(normalization.action, missing_as_zero=as_zero)
    ids = normalization.action.feature_ids
    return ParametricPredictor(state, action, learner.scorer, action_feature_ids=ids, **common)


def _figures(
    config: WorkflowConfig,
    source: Source,
    learned: Learned,
    facts: Facts,
    found: Report,
) -> RunFigures:
    return RunFigures(
        config=config,
        policy=str(target_policy(config.rl)),
        found=found,
        candidates=learned.evaluation.document.get("cpe", {}).get("candidates"),
        steps=learned.position.step,
        rows=learned.position.rows,
        normalization=source.normalization.json(),
        present=facts.present,
        present_note=f"Present: in at most {SAMPLE:,} rows spread over the training data." if facts.present else "",
        sources=facts.used,
        identity=source.hash,
    )


def _git_revision() -> str | None:
    """Returns the revision of the working directory, if it is a git repository and git is there."""
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None
