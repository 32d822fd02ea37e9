"""Evaluate an exported model: python -m workflows.evaluate --model BUNDLE --data LOGS --env ENVIRONMENT.

Exported models evaluated on a log that they need not have learned from, in simulation, or both.

1 models    loaded, verified; two of them must decide among the same choices; checked against the environment
2 log       events become transitions ─► training copy ─► its features are compared with those of the models
3 play      each model in the environment, on the same starts
4 estimate  of each model: heads fitted to its policy ─► page ─► estimators; of two also the difference
5 report    JSON file, page beside it, text

One process does all of it, on the CPU: the exported model runs in onnxruntime.
"""

import hashlib
import json
import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from reagent_lite.cli import Command, Flag, main_alone
from reagent_lite.config import DqnConfig, ParametricDqnConfig, WorkflowConfig, check, fingerprint
from reagent_lite.config.evaluate import EvaluateConfig
from reagent_lite.console import logger, progress
from reagent_lite.data.copy.facts import content_of
from reagent_lite.data.copy.training_copy import TrainingCopy, prepare_training_copy
from reagent_lite.errors import BundleError, ConfigError, Problem, needing
from reagent_lite.evaluation.document import Findings
from reagent_lite.evaluation.estimates import ALONE, Log, estimates_of
from reagent_lite.evaluation.exported_model import CHOICES, ExportedModel
from reagent_lite.evaluation.simulation import Arena
from reagent_lite.files import require_writable, write_whole
from reagent_lite.manifest import canonical
from reagent_lite.report.evaluated import report_of_evaluation
from reagent_lite.report.page import render
from reagent_lite.report.result import Brief, Result
from reagent_lite.run.learner import threads_for


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated(Result):
    """The results; printed as the last line of standard output.

    Attributes:
        decision: what to do with the model: choice, reason, next.
        report: path of the JSON file.
        page: path of the same as one HTML file, beside it.
        episodes, rows: scored, of the log; 0 without one.
        scores: {`CPE/{outcome}/{estimator}`: estimate}, null where there is none; the logged policy's own among them;
            of what was played {`simulation/...`: figure}, by the tags of training.
        difference: {`CPE/{outcome}/{estimator}`, `simulation/...`: [estimate, lower, upper]} of model minus against;
            null without.
        warnings: what was found wrong with the log or the models.
        seconds: total wall-clock time.
    """

    decision: dict[str, str]
    report: str
    page: str
    episodes: int
    rows: int
    scores: dict[str, float | None]
    difference: dict[str, list[float | None]] | None
    warnings: tuple[str, ...]
    seconds: float


def evaluate(config: EvaluateConfig) -> Evaluated:
    """Evaluates, writes the report and returns the estimates.

    Raises:
        BundleError: a model that is not whole, or two that decide among other choices, or one that does not fit the
            environment.
        SimulationError: no such environment.
        DataError: what is wrong with the log, or that it is none for this model.
    """
    start = time.monotonic()
    given = None if config.output_path is None else Path(config.output_path).expanduser()
    models = _models(config)
    folder = models[0].path.resolve().parent if given is None else given.parent
    require_writable(folder, "output_path")
    findings = _findings(config, models)
    target = given or folder / _name(findings)
    for line in (*findings.lines(), str(findings.decision)):
        logger.info(line)
    page = target.with_suffix(".html")
    write_whole(target, canonical(findings.document()))
    report = report_of_evaluation(findings, target.name)
    write_whole(page, render(report).encode())
    logger.info(f"written to {target} and {page}")
    counts = {} if findings.estimates is None else findings.estimates.log.counts
    return Evaluated(
        decision=findings.decision.json(),
        report=str(target),
        page=str(page),
        episodes=counts.get("scored_episodes", 0),
        rows=counts.get("scored_rows", 0),
        scores=findings.scores(),
        difference=findings.differences(),
        warnings=findings.warnings,
        brief=Brief.of(report),
        seconds=round(time.monotonic() - start, 3),
    )


def _name(findings: Findings) -> str:
    """Returns the name of the report's file: another one for another model, log or config."""
    config, estimates = findings.config, findings.estimates
    log = "" if estimates is None else content_of(estimates.log.copy)
    parts = [fingerprint(config), log, *(one.bundle.manifest for one in findings.models)]
    source = config.data_path or (config.simulation.env if config.simulation else "")
    words = re.sub(r"[^A-Za-z0-9_-]+", "_", Path(source).name.split(".")[0])
    return f"evaluation_{words}_{hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:8]}.json"


def _findings(config: EvaluateConfig, models: tuple[ExportedModel, ...]) -> Findings:
    gamma = models[0].gamma if config.gamma is None else config.gamma
    if gamma is None:
        raise ConfigError(Problem("gamma", "a number, as the config of the model does not say it", "nothing"))
    arena = None if config.simulation is None else Arena(config, config.simulation, models)
    log = None
    if config.data_path:
        log = Log.of(config, models, _copy(config, models[0]), gamma)
    played = None if arena is None else arena.play(gamma)
    _choose_threads(config.evaluation.minibatch_size, models[0])
    estimates = None if log is None else estimates_of(config, models, log)
    return Findings(config=config, models=models, gamma=gamma, estimates=estimates, played=played)


def _models(config: EvaluateConfig) -> tuple[ExportedModel, ...]:
    """Loads the models.

    Raises:
        BundleError: two that decide among other choices.
    """
    model = ExportedModel.load("model", config.model)
    if config.against is None:
        return (model,)
    against = ExportedModel.load("against", config.against)
    names, others = model.bundle.action_names, against.bundle.action_names
    if set(names) != set(others):
        shown = [", ".join(one) or "candidates" for one in (names, others)]
        raise BundleError(
            Problem(f"against {against.path}", f"a model that decides as {model.path}: {shown[0]}", shown[1])
        )
    return model, against


def _copy(config: EvaluateConfig, model: ExportedModel) -> TrainingCopy:
    """Returns the rows, after those stages that the log needs.

    Raises:
        DataError: what is wrong with them.
    """
    with needing("data", "data_path"):
        from reagent_lite.run.stages import staged
    names = ", ".join(model.bundle.action_names)
    logger.info(f"{model.key} {model.path} chooses among {CHOICES[model.bundle.parametric]}{names and f': {names}'}")
    reading = staged(_as_training(config, model), ALONE)
    with progress("reading the log", "bytes") as show:
        return prepare_training_copy(
            reading.training_data_path,
            actions=model.bundle.action_names or None,
            directory=config.training_copy_dir,
            columns=config.columns,
            progress=lambda done, total: show(done, total),
        )


def _as_training(config: EvaluateConfig, model: ExportedModel) -> WorkflowConfig:
    """Returns the training config that reads the same log for the same choices; stages are made for such a one."""
    tree: dict[str, Any] = {
        "training_data_path": config.data_path,
        "model_output_path": str(model.path),
        "data": {"training_copy_dir": config.training_copy_dir, "columns": config.columns},
        "query": config.query.model_dump(mode="json"),
    }
    if config.timeline is not None:
        section = config.timeline.model_dump(mode="json")
        tree["timeline"] = {**section, "actionDiscrete": not model.bundle.parametric, "inputTableName": ""}
    if model.bundle.parametric:
        return check(ParametricDqnConfig, tree)
    return check(DqnConfig, {**tree, "actions": list(model.bundle.action_names)})


def _choose_threads(rows: int, model: ExportedModel) -> None:
    """Sets torch's threads by the size of one forward pass; a user's OMP_NUM_THREADS stands."""
    if "OMP_NUM_THREADS" not in os.environ:
        widths = (sum(spec.width for spec in model.normalization.values()), *model.training.layers[1:-1], 1)
        torch.set_num_threads(threads_for(widths, rows, len(os.sched_getaffinity(0))))


COMMAND = Command(
    module="workflows.evaluate",
    model=EvaluateConfig,
    example="configs/cartpole/evaluate.json",
    settings="--model outputs/new/model --set against=outputs/old/model",
    outcome="decision, report, page, episodes, rows, scores, difference, warnings, seconds",
    flags={
        "model": Flag("--model", "folder of an exported model"),
        "data_path": Flag("--data", "the log"),
        "simulation.env": Flag("--env", "environment to play in, a name, a .cuh file or gymnasium:name"),
    },
    needs_config=False,
    story="One process does the work, on the CPU. It needs --model and one of --data and --env, or both; without\n"
    "--config all other keys have their defaults.",
)

if __name__ == "__main__":
    sys.exit(main_alone(COMMAND, evaluate))
