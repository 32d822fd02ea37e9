"""Estimates of exported models and given policies on a log, and the difference of two.

training copy ─► EvaluationLog: split, features checked ─┬─► PolicyEvaluator of each policy ─► page ─► estimates
                                                         └─► of two policies, the difference as well
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from reagent_lite.algorithms.reward_and_q_models import PolicyProbabilities
from reagent_lite.config.evaluate_config import UNIFORM, EvaluateConfig
from reagent_lite.config.paths import show_paths
from reagent_lite.data.copy.texts import require_texts
from reagent_lite.data.copy.training_copy import TrainingCopy
from reagent_lite.data.rows.matrices import PolicyColumn
from reagent_lite.data.sampling.normalized import open_raw_columns
from reagent_lite.data.sampling.shards import Shards
from reagent_lite.data.sampling.source import build_rows
from reagent_lite.data.sampling.spans import single_steps
from reagent_lite.distributed.group import Group, ProcessRanks
from reagent_lite.errors import DataError, Problem, pluralize
from reagent_lite.evaluation.behavior import estimated_behavior, replaced_propensities, without_propensity
from reagent_lite.evaluation.cpe import CPEResult, Estimate, differences
from reagent_lite.evaluation.evaluation_rows import EvaluationRows
from reagent_lite.evaluation.evaluator import NO_COLUMNS, EpisodeColumns, EvaluationInput, PolicyEvaluator, own_seed
from reagent_lite.evaluation.explanation import Explanation
from reagent_lite.evaluation.exported_model import ExportedModel, ExportedPolicy, FeatureReader
from reagent_lite.evaluation.given_policy import GivenPolicy
from reagent_lite.evaluation.policy_models import split_log
from reagent_lite.evaluation.scored_episodes import TrainEvalLogs, scored_episodes, spread
from reagent_lite.export.choices import Choices
from reagent_lite.item_table import ItemTable
from reagent_lite.memory import give_back_memory

ALONE = Group(ProcessRanks(), torch.device("cpu"))
EvaluatedPolicy = ExportedModel | GivenPolicy
_MIN_SHARE = 1e-6  # of rows; a softmax gives a smaller share to actions it avoids
_NAMED_ACTIONS = 8
_NAMED_FEATURES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationLog:
    """A log prepared for the evaluation of policies.

    Attributes:
        copy: rows of the log.
        evaluated: raw rows for scoring and fitting.
        columns: probabilities in columns of the log, by the key of the policy.
        reading: normalization and network shapes for the models of given policies.
        seen: whether each policy has learned from this log.
        warnings: problems of the log.
    """

    copy: TrainingCopy
    evaluated: EvaluationInput
    columns: Mapping[str, PolicyColumn]
    reading: FeatureReader
    seen: tuple[bool, ...]
    warnings: tuple[str, ...]

    @property
    def counts(self) -> dict[str, int]:
        """Numbers of rows and episodes: in total, fitted and scored."""
        rows = self.evaluated.split.scored.numbers
        episodes = len(self.copy.episode_hash)
        scored = len(self.evaluated.split.scored.hashes)
        return {
            "rows": len(self.copy),
            "scored_rows": len(rows),
            "episodes": episodes,
            "fitted_episodes": episodes - scored,
            "scored_episodes": scored,
            "rows_without_propensity": self.copy.counts.get("propensity_absent_rows", 0),
        }

    def scored_lines(self) -> dict[str, list[int]]:
        """Returns {file: [line, ...]} of the scored rows, ascending."""
        rows = self.evaluated.split.scored.numbers
        files = np.asarray(self.copy.origin_file)[rows]
        lines = np.asarray(self.copy.origin_line)[rows]
        return {self.copy.files[file]: np.sort(lines[files == file]).tolist() for file in np.unique(files)}

    @classmethod
    def of(
        cls,
        config: EvaluateConfig,
        policies: Sequence[EvaluatedPolicy],
        copy: TrainingCopy,
        columns: Mapping[str, PolicyColumn],
        gamma: float,
        items: ItemTable | None = None,
        by_episode: EpisodeColumns = NO_COLUMNS,
        seen: tuple[bool, ...] = (),
    ) -> "EvaluationLog":
        """Prepares a log for policies that decide among the same choices.

        Args:
            config: config of the workflow.
            policies: the policies.
            copy: rows of the log.
            columns: probabilities in columns of the log, by the key of the policy.
            gamma: discount per step.
            items: the item table; None without one.
            by_episode: units and weights of episodes.
            seen: whether each policy has learned from this log, or was made from it.

        Raises:
            DataError: rows with problems; no feature of a model in them; no episode to score.
        """
        warnings = [*copy.notes]
        models = [policy for policy in policies if isinstance(policy, ExportedModel)]
        for policy, has_seen in zip(policies, seen, strict=True):
            if has_seen:
                made = "was trained on" if isinstance(policy, ExportedModel) else "was made from"
                warnings.append(f"{policy.key} {made} this very log: it has seen episodes that are scored")
        for model in models:
            warnings += _feature_warnings(model, copy)
            warnings += model.discount_warnings(copy, config.data_path, gamma)
        sides = TrainEvalLogs(train=copy, held_out=None, same=True, shards=Shards.alone(ALONE))
        fitted = any(_is_modeled(policy, columns) for policy in policies)
        settings = config.evaluation if fitted else config.evaluation.model_copy(update={"held_out_share": 1.0})
        scored = scored_episodes(sides, settings, config.seed, few=fitted)
        if not len(scored.numbers):
            raise DataError(
                Problem(show_paths(config.data_path), "an episode of which every action is known, to score", "none")
            )
        split = split_log(sides, scored, config.evaluation)
        spans = models[0].spans(copy) if models else single_steps(copy)
        features = open_raw_columns(copy.candidates) if copy.parametric else None
        rows = build_rows(copy, spans, np.arange(len(copy)), open_raw_columns(copy.state), features)
        estimated = settings.propensities == "estimate"
        reading = models[0].reading if models else _reading(copy, config, fitted=fitted or estimated)
        rows = by_episode.weigh_rows(rows, copy.episode)
        behavior = None
        if estimated:
            checked = reading.normalization["action" if copy.parametric else "state"].column_names
            behavior = estimated_behavior(sides, rows, reading.spec(copy), reading.reader(copy), checked)
            rows = rows.with_propensity(behavior.propensity)
        evaluated = EvaluationInput(
            sides=sides,
            # the policy's probabilities are computed only for rows that are read
            split=replace(split, fitted=spread(split.fitted, config.evaluation.models.max_fit_rows)),
            rows=rows,
            train_rows=rows,
            metric_names=copy.metric_names,
            num_rows=len(copy),
            without_propensity=without_propensity(behavior, copy.counts, len(copy)),
            gamma=gamma,
            settings=config.evaluation.model_copy(update={"confidence_level": config.level}),
            seed=config.seed,
            behavior=behavior,
            items=items,
            by_episode=by_episode,
        )
        return cls(
            copy=copy,
            evaluated=evaluated,
            columns=columns,
            reading=reading,
            seen=seen,
            warnings=(*warnings, *scored.notes, *replaced_propensities(behavior, copy.counts, len(copy))),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimates:
    """Results of policies on a log.

    Attributes:
        log: the log.
        results: result of each policy.
        choices: choices of each policy, as JSON: "actions", shares of named actions, and "candidates", from
            candidates.tally.
        compared: {outcome: differences} of model and against; empty without `against`.
        explanations: explanation of each policy.
        warnings: problems of the log and of the policies on it, in sentences.
    """

    log: EvaluationLog
    results: tuple[CPEResult, ...]
    choices: tuple[dict[str, Any], ...]
    explanations: tuple[Explanation, ...]
    compared: dict[str, tuple[Estimate, ...]]
    warnings: tuple[str, ...]


def estimates_of(config: EvaluateConfig, policies: Sequence[EvaluatedPolicy], log: EvaluationLog) -> Estimates:
    """Fits reward and value models to each policy and returns every estimate of it.

    Raises:
        BundleError: a model gives a value that is no number.
    """
    results = []
    choices = []
    explanations = []
    warnings = [*log.warnings]
    # raw columns: each feature is one
    columns = [[[column] for column in range(len(ids))] for ids in (log.copy.state_ids, log.copy.action_ids)]
    for policy, seen in zip(policies, log.seen, strict=True):
        evaluator = _evaluator(config, policy, log)
        evaluator.fit(final=True)
        page, candidates = evaluator.page(final=True)
        assert page is not None, "one process has all rows"
        result = evaluator.result(page)
        results.append(result if config.against is not None else result.without_bases())
        del result  # its bases are as large as the log
        give_back_memory()  # what estimating took
        complete = _is_modeled(policy, log.columns)
        explanations.append(
            evaluator.explanation(
                page,
                results[-1],
                seen=seen,
                columns=(columns[0], columns[1]),
                complete=complete,
                reads_features=policy.key not in log.columns,
            )
        )
        if complete:
            choices.append({"actions": _shares(page, log), **candidates})
            warnings += _never_logged(policy, page, log)
        else:
            choices.append({"actions": {}})
    return Estimates(
        log=log,
        results=tuple(results),
        choices=tuple(choices),
        explanations=tuple(explanations),
        compared=differences(*results) if config.against is not None else {},
        warnings=tuple(warnings),
    )


def _reading(copy: TrainingCopy, config: EvaluateConfig, *, fitted: bool) -> FeatureReader:
    return FeatureReader.fit(copy, config) if fitted else FeatureReader.raw(copy)


def _is_modeled(policy: EvaluatedPolicy, columns: Mapping[str, PolicyColumn]) -> bool:
    """Returns whether the policy's probabilities of all choices are known, so that models can be fitted to it."""
    if isinstance(policy, ExportedModel):
        return True
    return columns[policy.key].complete if policy.key in columns else policy.path == UNIFORM


def _evaluator(config: EvaluateConfig, policy: EvaluatedPolicy, log: EvaluationLog) -> PolicyEvaluator:
    copy = log.copy
    exported = isinstance(policy, ExportedModel)
    if isinstance(policy, ExportedModel):
        choices = Choices(policy.bundle, copy.state_ids, copy.action_names, copy.action_ids)
        probabilities: PolicyProbabilities = ExportedPolicy(policy, config, choices)
        rows = log.evaluated
        reading = policy.reading
    else:
        rows, probabilities = policy.on(log.evaluated, log.columns.get(policy.key))
        reading = log.reading
    with own_seed(config.seed + 1, ALONE.device):
        heads = reading.heads(copy, gamma=rows.gamma, target_update_rate=config.evaluation.models.target_update_rate)
    described = copy.parametric and _is_modeled(policy, log.columns)
    features = reading.normalization["action"].features if described else ()
    return PolicyEvaluator(rows, probabilities, heads, title=policy.key, candidate_features=features, cached=exported)


def _shares(page: EvaluationRows, log: EvaluationLog) -> dict[str, Any]:
    """Returns how often log and policy take each named action."""
    counts = page.relative_sample_weight
    return {
        name: {
            "logged": float((counts * (page.action == number)).mean()),
            "policy": float((counts * page.model_propensities[:, number]).mean()),
        }
        for number, name in enumerate(log.copy.action_names)
    }


def _feature_warnings(model: ExportedModel, copy: TrainingCopy) -> list[str]:
    """Returns sentences on differences between the features of the log and those of the model.

    Raises:
        DataError: no feature is in both; a feature is a text in one of them and a number in the other.
    """
    kinds = [("state", copy.state_ids, model.bundle.state_feature_ids)]
    if model.bundle.parametric:
        kinds.append(("candidate", copy.action_ids, model.bundle.action_feature_ids))
    for column, spec in model.reading.normalization.items():
        require_texts(copy, column, spec, f"{model.key} {model.path}")
    warnings = []
    for kind, logged, read in kinds:
        unknown = sorted(set(logged) - set(read))
        missing = sorted(set(read) - set(logged))
        if read and len(missing) == len(read):
            where = f"{model.key} {model.path}"
            raise DataError(
                Problem(where, f"a log with some of the {kind} features {_list_ids(read)}", _list_ids(logged))
            )
        if unknown:
            warnings.append(
                f"{model.key} does not know {pluralize(len(unknown), f'{kind} feature')} of the log, "
                f"left out: {_list_ids(unknown)}"
            )
        if missing:
            warnings.append(
                f"{len(missing)} of {len(read)} {kind} features that {model.key} reads are missing in "
                f"every row of the log: {_list_ids(missing)}"
            )
    return warnings


def _list_ids(ids: Sequence[int]) -> str:
    more = ", ..." if len(ids) > _NAMED_FEATURES else ""
    return ", ".join(map(str, ids[:_NAMED_FEATURES])) + more if len(ids) else "none"


def _never_logged(policy: EvaluatedPolicy, page: EvaluationRows, log: EvaluationLog) -> list[str]:
    """Returns sentences on named actions that the policy takes and the log never has, the likeliest first."""
    share = page.model_propensities.mean(0).numpy()[: len(log.copy.action_names)]  # empty for candidates
    action = np.asarray(log.copy.action)
    logged = np.bincount(action[action >= 0], minlength=len(share))
    unlogged = [
        number for number in np.argsort(-share, kind="stable") if share[number] > _MIN_SHARE and not logged[number]
    ]
    sentences = [
        f"{policy.key} takes {log.copy.action_names[number]!r} in {share[number]:.1%} of the scored rows, and no "
        "row of the log has it, so the log has no evidence of its reward"
        for number in unlogged[:_NAMED_ACTIONS]
    ]
    if more := unlogged[_NAMED_ACTIONS:]:
        sentences.append(
            f"{policy.key} takes {pluralize(len(more), 'more action')} that no row of the log has, "
            f"together in {share[more].sum():.1%} of the scored rows"
        )
    return sentences
