"""Evaluate a policy.

Exported models are evaluated on any log, in simulation, or both; other policies on a log only.

1 models    loaded, verified; two models must decide among the same choices; checked against the environment
2 log       events become transitions ─► training copy ─► its features are compared with those of the models
                                      └► columns of policies
3 play      each model plays in the environment, from the same starts
4 estimate  for each policy: heads fitted to it ─► page ─► estimators; for two policies also the difference
5 report    JSON file, HTML file next to it, text

One process on the CPU does all of this: the exported model runs in onnxruntime.
"""

import hashlib
import json
import os
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from reagent_lite.config import fingerprint
from reagent_lite.config.column_names import ONLY_IF_NAMED, UNIT, WEIGHT
from reagent_lite.config.embedding_config import id_features, require_features
from reagent_lite.config.evaluate_config import EvaluateConfig, is_model
from reagent_lite.config.items import ITEM_ID
from reagent_lite.config.paths import DataPath, logs_of
from reagent_lite.config.timeline_config import QuerySection, TimelineConfig, TimelineSection
from reagent_lite.console import logger, progress
from reagent_lite.data.copy.copy_summaries import content_of
from reagent_lite.data.copy.prepared_copy import prepare_training_copy
from reagent_lite.data.copy.training_copy import TrainingCopy
from reagent_lite.data.logs import Log
from reagent_lite.data.rows.matrices import PolicyColumn
from reagent_lite.disk_room import require_writable
from reagent_lite.errors import BundleError, ConfigError, Problem, needing
from reagent_lite.evaluation.document import Findings
from reagent_lite.evaluation.estimates import EvaluatedPolicy, EvaluationLog, estimates_of
from reagent_lite.evaluation.evaluator import EpisodeColumns, describe_weights
from reagent_lite.evaluation.exported_model import ExportedModel, FeatureReader
from reagent_lite.evaluation.given_policy import GivenPolicy
from reagent_lite.export.bundle import image_of_log
from reagent_lite.export.choices import CHOICES
from reagent_lite.id_values import IdFeature
from reagent_lite.item_table import ItemTable
from reagent_lite.manifest import canonical
from reagent_lite.memory import give_back_memory
from reagent_lite.report.evaluated import report_of_evaluation
from reagent_lite.report.html_page import render
from reagent_lite.report.markdown import lines_of_report
from reagent_lite.report.result import Brief, Result
from reagent_lite.run.learner import threads_for
from reagent_lite.whole_files import write_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated(Result):
    """The results; printed as the last line of standard output.

    Attributes:
        decision: advice on the model: choice, reason, next.
        report: path of the JSON file.
        page: path of the HTML file with the same content.
        episodes, rows: numbers of scored episodes and rows of the log; 0 without a log.
        scores: {`CPE/{outcome}/{estimator}`: estimate or null}, with the logged policy's own value, and from simulation
            {`simulation/...`: figure}, with the tags of training.
        difference: {`CPE/{outcome}/{estimator}`, `simulation/...`: [estimate, lower, upper]} of model minus against;
            null without `against`.
        warnings: faults of the log or the models.
        seconds: total wall-clock time of the run.
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
        BundleError: a model is incomplete or does not fit the environment, or two models decide among different
            choices.
        SimulationError: there is no such environment.
        DataError: the log has faults, or does not fit the model.
    """
    start = time.monotonic()
    given = None if config.output_path is None else Path(config.output_path).expanduser()
    policies = open_policies(config)
    folders = [policy.path.resolve().parent for policy in policies if isinstance(policy, ExportedModel)]
    folder = folders[0] if given is None else given.parent
    require_writable(folder, "output_path")
    findings = _findings(config, policies)
    target = given or folder / _name(findings)
    report = report_of_evaluation(findings, target.name, time.monotonic() - start)
    for warning in report.notes:
        logger.warning(warning)
    for line in (*lines_of_report(report), str(report.decision)):
        logger.info(line)
    page = target.with_suffix(".html")
    write_whole(target, canonical(findings.document()))
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
        estimate_rows=findings.estimate_rows(),
        explanations=findings.explanations_by_policy(),
        seconds=round(time.monotonic() - start, 3),
    )


def _name(findings: Findings) -> str:
    """Returns the name of the report's file, which depends on the models, the log and the config."""
    config = findings.config
    estimates = findings.estimates
    log = "" if estimates is None else content_of(estimates.log.copy)
    parts = [
        fingerprint(config),
        log,
        *(model.bundle.manifest for model in findings.models if isinstance(model, ExportedModel)),
    ]
    source = logs_of(config.data_path)[0] or (config.simulation.env if config.simulation else "")
    words = re.sub(r"[^A-Za-z0-9_-]+", "_", Path(source).name.split(".")[0])
    return f"evaluation_{words}_{hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:8]}.json"


def _findings(config: EvaluateConfig, policies: tuple[EvaluatedPolicy, ...]) -> Findings:
    discounts = (config.gamma, *(policy.gamma for policy in policies))
    gamma = next((discount for discount in discounts if discount is not None), None)
    models = [policy for policy in policies if isinstance(policy, ExportedModel)]
    if gamma is None and models:
        raise ConfigError(Problem("gamma", "a number, as the config of the model has none", "nothing"))
    arena = None
    if config.simulation is not None:
        from reagent_lite.evaluation.arena import Arena

        arena = Arena(config, config.simulation, models)
    log = None
    if config.data_path:
        config = _with_columns(config, models)
        items = _items(config, models)
        copy, columns, by_episode = _read(config, policies, items)
        gamma = _gamma_of_single_rows(copy) if gamma is None else gamma
        seen = _find_seen(config, policies, copy)
        log = EvaluationLog.of(config, policies, copy, columns, gamma, items, by_episode, seen)
        give_back_memory()  # what reading took
    assert gamma is not None, "without a log there are only models, which have a gamma"
    played = None if arena is None else arena.play(gamma)
    _choose_threads(config.evaluation.models.minibatch_size, models[0].reading if log is None else log.reading)
    estimates = None if log is None else estimates_of(config, policies, log)
    return Findings(config=config, models=policies, gamma=gamma, estimates=estimates, played=played)


def _with_columns(config: EvaluateConfig, models: list[ExportedModel]) -> EvaluateConfig:
    """Returns the config with the columns of the first model's training log, unless it has columns."""
    if config.columns or not models:
        return config
    with needing("data", "data_path"):
        from reagent_lite.data.copy.first_look import remembered_columns
    return config.model_copy(update={"columns": remembered_columns(config.data_path, models[0].bundle.columns)})


def _gamma_of_single_rows(copy: TrainingCopy) -> float:
    """Returns a discount that has no effect, as every episode is one row.

    Raises:
        ConfigError: an episode has several rows.
    """
    longest = int(np.bincount(np.asarray(copy.episode)).max())
    if longest > 1:
        expected = "a number, as there is no model and episodes have several rows"
        raise ConfigError(Problem("gamma", expected, f"nothing, and an episode of {longest:,} rows"))
    return 1.0


def open_policies(config: EvaluateConfig) -> tuple[EvaluatedPolicy, ...]:
    """Returns the policies, with loaded models.

    Raises:
        BundleError: two models decide among different choices.
    """
    policies = tuple(
        ExportedModel.load(key, name) if is_model(name) else GivenPolicy(key=key, path=name)
        for key, name in config.policies.items()
    )
    models = [policy for policy in policies if isinstance(policy, ExportedModel)]
    actions = [model.bundle.action_names for model in models]
    if len({frozenset(names) for names in actions}) > 1:
        first, second = (", ".join(names) or "candidates" for names in actions)
        expected = f"a model with the choices of {models[0].path}: {first}"
        raise BundleError(Problem(f"{models[1].key} {models[1].path}", expected, second))
    return policies


def _read(
    config: EvaluateConfig, policies: tuple[EvaluatedPolicy, ...], items: ItemTable | None
) -> tuple[TrainingCopy, dict[str, PolicyColumn], EpisodeColumns]:
    """Returns the rows, after the stages that the log needs, the policies' columns by key, and those by episode.

    Raises:
        DataError: the rows or columns have faults.
    """
    with needing("data", "data_path"):
        from reagent_lite.data.copy.policy_column import read_policy_column, read_unit_column, read_weight_column
    log = _log_of(config, config.data_path, policies, items)
    actions = log.actions or ()
    logger.info(f"choices are {CHOICES[not actions]}{': ' if actions else ''}{', '.join(actions)}")
    given = (policy for policy in policies if isinstance(policy, GivenPolicy))
    names = {policy.key: policy.column for policy in given if policy.column}
    further = (*names.values(), *(name for name in ONLY_IF_NAMED if name in config.columns))
    log = _rows_of(config, log, further)
    with progress("reading the log", "bytes") as show:
        copy = prepare_training_copy(log, show)
    require_features(config.embeddings, {*copy.state_ids, *copy.action_ids}, "embeddings")
    policy_columns = {key: read_policy_column(log, name, copy) for key, name in names.items()}
    units = read_unit_column(log, copy) if UNIT in config.columns else None
    weights = None
    if WEIGHT in config.columns:
        weights = read_weight_column(log, copy)
        of_rows = weights[copy.episode]
        logger.info(describe_weights(len(copy), float(of_rows.sum()), float(np.square(of_rows).sum())))
    return copy, policy_columns, EpisodeColumns(units=units, weights=weights)


def _find_seen(config: EvaluateConfig, policies: tuple[EvaluatedPolicy, ...], copy: TrainingCopy) -> tuple[bool, ...]:
    """Returns whether each policy has learned from the log, or was made from it as `fitted_on` says."""
    content = content_of(copy)
    fitted: set[str] = set()
    for column, path in config.fitted_on.items():
        other = copy
        if path != config.data_path:
            other = prepare_training_copy(_log_of(config, path, policies))
        if content_of(other) == content:
            fitted.add(column)
    return tuple(
        policy.learned_from(content) if isinstance(policy, ExportedModel) else policy.column in fitted
        for policy in policies
    )


def ids_of_log(config: EvaluateConfig, policies: Iterable[EvaluatedPolicy]) -> tuple[IdFeature, ...]:
    """Returns the features whose values are ids, in the models' training logs or by the config without a model.

    Of several lengths, the largest counts.
    """
    features: dict[int, IdFeature] = {}
    for policy in policies:
        for feature in policy.bundle.ids_of_log if isinstance(policy, ExportedModel) else ():
            other = features.setdefault(feature.feature, feature)
            if feature.scores != other.scores:
                got = f"{feature.expected}, and {other.expected} for another model"
                raise BundleError(Problem(f"feature {feature.feature}", "values of one form for all models", got))
            features[feature.feature] = max(feature, other, key=lambda of: of.length)
    return tuple(features.values()) or id_features(config.embeddings)


def _items(config: EvaluateConfig, models: list[ExportedModel]) -> ItemTable | None:
    """Returns the item table of the config, else that of the first model with items."""
    bundles = [model.bundle for model in models if model.bundle.items is not None]
    possible = config.possible_items or (bundles[0].possible_items if bundles else None)
    if config.items is None:
        items = bundles[0].items if bundles else None
        return None if items is None else replace(items, all_possible=possible == "all")
    from reagent_lite.data.rows.item_files import given_items

    item_id = config.item_id or (models[0].bundle.item_id if models else ITEM_ID)
    return given_items(config.items, item_id, possible, ids_of_log(config, models))


def _log_of(
    config: EvaluateConfig, path: DataPath, policies: tuple[EvaluatedPolicy, ...], items: ItemTable | None = None
) -> Log:
    """Returns the log at a path, which has the choices, ids and images of the models; without actions, candidates."""
    bundles = [policy.bundle for policy in policies if isinstance(policy, ExportedModel)]
    actions = bundles[0].action_names if bundles else config.actions
    return Log(
        path,
        actions=actions or None,
        columns=config.columns,
        items=items,
        id_features=ids_of_log(config, policies),
        image=image_of_log(bundles),
        directory=config.training_copy_dir,
        same_episodes=config.same_episodes,
    )


def _rows_of(config: EvaluateConfig, log: Log, further: tuple[str, ...]) -> Log:
    """Returns the log with the settings of the pairing of its events, or the transitions that a timeline has written.

    Args:
        config: the config of the workflow.
        log: the log at data_path.
        further: additional columns of the transitions in a timeline's folder.
    """
    from reagent_lite.run.stages import require_no_timeline

    if not log.holds_events:
        require_no_timeline(config, log)
        return log
    if config.timeline is None and not config.query.changed:
        return log
    section = config.timeline or TimelineSection()
    query = QuerySection(tableSample=config.query.tableSample)
    if not section.outputTableName:
        pairing = TimelineConfig(timeline=section.model_copy(update={"inputTableName": ""}), query=query)
        return replace(log, timeline=pairing)
    from reagent_lite.data.timeline.stage import run_timeline

    changes = {
        "inputTableName": log.path,
        "actionDiscrete": log.actions is not None,
        "extraFeatureColumns": tuple(dict.fromkeys((*section.extraFeatureColumns, *further))),
    }
    query = query.model_copy(update={"actions": log.actions or ()})
    timeline = TimelineConfig(
        timeline=section.model_copy(update=changes),
        query=query,
        columns=config.columns,
        same_episodes=config.same_episodes,
    )
    return replace(log, path=run_timeline(timeline, log).train)


def _choose_threads(rows: int, reading: FeatureReader) -> None:
    """Sets torch's threads by the size of a forward pass, unless the user has set OMP_NUM_THREADS."""
    if "OMP_NUM_THREADS" not in os.environ:
        widths = (sum(spec.width for spec in reading.normalization.values()), *reading.training.layers[1:-1], 1)
        torch.set_num_threads(threads_for(widths, rows, len(os.sched_getaffinity(0))))
