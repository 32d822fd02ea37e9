"""Estimates of exported models on a log: of each one, and of two their difference.

training copy ─► Log: split, checked against what the models read ─┬─► PolicyEvaluator of each ─► page ─► estimates
                                                                    └─► of two also the difference
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from reagent_lite.config.evaluate import EvaluateConfig
from reagent_lite.data.copy.facts import content_of
from reagent_lite.data.copy.training_copy import TrainingCopy
from reagent_lite.data.sampling.normalized import raw_columns
from reagent_lite.data.sampling.shards import Shards
from reagent_lite.data.sampling.source import build_rows
from reagent_lite.distributed.group import Group, Place
from reagent_lite.errors import DataError, Problem, counted
from reagent_lite.evaluation.cpe import CPEResult, Estimate, differences
from reagent_lite.evaluation.episodes import Sides, scored_episodes, spread
from reagent_lite.evaluation.evaluator import EvaluatedLog, PolicyEvaluator, own_seed
from reagent_lite.evaluation.exported_model import Choices, ExportedModel, ExportedPolicy
from reagent_lite.evaluation.fitting import split_log
from reagent_lite.evaluation.page import EvaluationPage

ALONE = Group(Place(), torch.device("cpu"))
_TAKEN = 1e-6  # share of rows; a softmax gives less than that to what it would not do
_NAMED = 8  # actions that have a sentence each
_MOST_NAMED = 10  # features


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """The log as it is evaluated.

    Attributes:
        copy: its rows.
        evaluated: the rows as they are gathered, raw, and how they are used.
        seen: whether each model has learned from this log.
        warnings: what was found wrong.
    """

    copy: TrainingCopy
    evaluated: EvaluatedLog
    seen: tuple[bool, ...]
    warnings: tuple[str, ...]

    @property
    def counts(self) -> dict[str, int]:
        """Rows and episodes: all of them, and how they are used."""
        used = self.evaluated.split.scored
        episodes, scored = len(self.copy.episode_hash), len(used.hashes)
        return {
            "rows": len(self.copy),
            "scored_rows": len(used.numbers),
            "episodes": episodes,
            "fitted_episodes": episodes - scored,
            "scored_episodes": scored,
            "rows_without_propensity": self.evaluated.without_propensity,
        }

    @classmethod
    def of(cls, config: EvaluateConfig, models: Sequence[ExportedModel], copy: TrainingCopy, gamma: float) -> "Log":
        """Returns the log for models that decide among the same choices.

        Raises:
            DataError: what is wrong with the rows; none of a model's features in them; no episode to score.
        """
        content, warnings = content_of(copy), [*copy.notes]
        seen = tuple(one.learned_from(content) for one in models)
        for model, learned in zip(models, seen, strict=True):
            warnings += _feature_warnings(model, copy)
            if learned:
                warnings.append(f"{model.key} was trained on this very log: it has seen episodes that are scored")
        sides = Sides(train=copy, held_out=None, same=True, shards=Shards.alone(ALONE))
        scored = scored_episodes(sides, config.evaluation, config.seed, few=True)
        if not len(scored.numbers):
            raise DataError(Problem(config.data_path, "an episode of which every action is known, to score", "none"))
        split = split_log(sides, scored, config.evaluation)
        features = raw_columns(copy.candidates) if copy.parametric else None
        rows = build_rows(copy, models[0].spans(copy), np.arange(len(copy)), raw_columns(copy.state), features)
        evaluated = EvaluatedLog(
            sides=sides,
            # no more rows than are read are asked for the policy's probabilities
            split=replace(split, fitted=spread(split.fitted, config.evaluation.max_fit_rows)),
            rows=rows,
            train_rows=rows,
            metric_names=copy.metric_names,
            num_rows=len(copy),
            without_propensity=copy.counts.get("propensity_absent_rows", 0),
            gamma=gamma,
            settings=config.evaluation,
            seed=config.seed,
        )
        return cls(copy=copy, evaluated=evaluated, seen=seen, warnings=(*warnings, *scored.notes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimates:
    """The results of a log.

    Attributes:
        log: what the models were evaluated on.
        results: the results of each model.
        choices: what each model chooses, as JSON: "actions", shares of named actions, and "candidates", from
            candidates.tally.
        compared: {outcome: differences} of two models.
        warnings: sentences.
    """

    log: Log
    results: tuple[CPEResult, ...]
    choices: tuple[dict[str, Any], ...]
    compared: dict[str, tuple[Estimate, ...]]
    warnings: tuple[str, ...]


def estimates_of(config: EvaluateConfig, models: tuple[ExportedModel, ...], log: Log) -> Estimates:
    """Fits reward and value models to each exported model's policy and returns every estimate of it.

    Raises:
        BundleError: a model gives a value that is no number.
    """
    results, choices, warnings = [], [], [*log.warnings]
    for model in models:
        evaluator = _evaluator(config, model, log)
        evaluator.fit(final=True)
        page, candidates = evaluator.page(final=True)
        assert page is not None, "one process has all rows"
        results.append(evaluator.result(page))
        choices.append({"actions": _shares(page, log), **candidates})
        warnings += _never_logged(model, page, log)
    return Estimates(
        log=log,
        results=tuple(results),
        choices=tuple(choices),
        compared=differences(*results) if len(results) == 2 else {},
        warnings=tuple(warnings),
    )


def _evaluator(config: EvaluateConfig, model: ExportedModel, log: Log) -> PolicyEvaluator:
    copy, rate = log.copy, config.evaluation.target_update_rate
    policy = ExportedPolicy(model, config, Choices(model.bundle, copy.state_ids, copy.action_names, copy.action_ids))
    with own_seed(config.seed + 1, ALONE.device):
        heads = model.heads(copy, gamma=log.evaluated.gamma, target_update_rate=rate)
    ids = tuple(model.bundle.action_feature_ids)
    return PolicyEvaluator(log.evaluated, policy, heads, title=model.key, candidate_ids=ids, asked_once=True)


def _shares(page: EvaluationPage, log: Log) -> dict[str, Any]:
    """Returns how often log and policy take each named action."""
    return {
        name: {
            "logged": float((page.action == number).double().mean()),
            "policy": float(page.model_propensities[:, number].mean()),
        }
        for number, name in enumerate(log.copy.action_names)
    }


def _feature_warnings(model: ExportedModel, copy: TrainingCopy) -> list[str]:
    """Returns what differs between the features of the log and those that a model reads.

    Raises:
        DataError: they share none.
    """
    sides = [("state", copy.state_ids, model.bundle.state_feature_ids)]
    if model.bundle.parametric:
        sides.append(("candidate", copy.action_ids, model.bundle.action_feature_ids))
    warnings = []
    for side, have, reads in sides:
        unknown, missing = sorted(set(have) - set(reads)), sorted(set(reads) - set(have))
        if reads and len(missing) == len(reads):
            where = f"{model.key} {model.path}"
            raise DataError(Problem(where, f"a log with some of the {side} features {_listed(reads)}", _listed(have)))
        if unknown:
            warnings.append(
                f"{model.key} does not know {counted(len(unknown), f'{side} feature')} of the log, "
                f"left out: {_listed(unknown)}"
            )
        if missing:
            warnings.append(
                f"{len(missing)} of {len(reads)} {side} features that {model.key} reads are missing in "
                f"every row of the log: {_listed(missing)}"
            )
    return warnings


def _listed(ids: Sequence[int]) -> str:
    more = ", ..." if len(ids) > _MOST_NAMED else ""
    return ", ".join(map(str, ids[:_MOST_NAMED])) + more if len(ids) else "none"


def _never_logged(model: ExportedModel, page: EvaluationPage, log: Log) -> list[str]:
    """Returns sentences on named actions that the policy takes and no row of the log does, the likeliest first."""
    share = page.model_propensities.mean(0).numpy()[: len(log.copy.action_names)]  # none of candidates
    action = np.asarray(log.copy.action)
    logged = np.bincount(action[action >= 0], minlength=len(share))
    taken = [number for number in np.argsort(-share, kind="stable") if share[number] > _TAKEN and not logged[number]]
    sentences = [
        f"{model.key} takes {log.copy.action_names[number]!r} in {share[number]:.1%} of the scored rows, and no "
        "row of the log has it, so the log has no evidence of what it earns"
        for number in taken[:_NAMED]
    ]
    if more := taken[_NAMED:]:
        sentences.append(
            f"{model.key} takes {counted(len(more), 'more action')} that no row of the log has, "
            f"together in {share[more].sum():.1%} of the scored rows"
        )
    return sentences
