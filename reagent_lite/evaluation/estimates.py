"""Estimates of exported models and given policies on a log: of each one, and of two their difference.

training copy ─► Log: split, checked against what the models read ─┬─► PolicyEvaluator of each ─► page ─► estimates
                                                                    └─► of two also the difference
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from reagent_lite.algorithms.cpe_heads import Policy
from reagent_lite.config.evaluate import UNIFORM, EvaluateConfig
from reagent_lite.data.copy.facts import content_of
from reagent_lite.data.copy.training_copy import TrainingCopy
from reagent_lite.data.rows.matrices import PolicyColumn
from reagent_lite.data.sampling.normalized import raw_columns
from reagent_lite.data.sampling.shards import Shards
from reagent_lite.data.sampling.source import build_rows
from reagent_lite.data.sampling.spans import single_steps
from reagent_lite.distributed.group import Group, Place
from reagent_lite.errors import DataError, Problem, counted
from reagent_lite.evaluation.cpe import CPEResult, Estimate, differences
from reagent_lite.evaluation.episodes import Sides, scored_episodes, spread
from reagent_lite.evaluation.evaluator import EvaluatedLog, PolicyEvaluator, own_seed
from reagent_lite.evaluation.exported_model import ExportedModel, ExportedPolicy, Reading
from reagent_lite.evaluation.fitting import split_log
from reagent_lite.evaluation.given_policy import GivenPolicy
from reagent_lite.evaluation.page import EvaluationPage
from reagent_lite.export.choices import Choices

ALONE = Group(Place(), torch.device("cpu"))
EvaluatedPolicy = ExportedModel | GivenPolicy
_TAKEN = 1e-6  # share of rows; a softmax gives less than that to what it would not do
_NAMED = 8  # actions that have a sentence each
_MOST_NAMED = 10  # features


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """The log as it is evaluated.

    Attributes:
        copy: its rows.
        evaluated: the rows as they are gathered, raw, and how they are used.
        columns: probabilities in columns of the log, by the key of the policy.
        reading: how models of policies read the log that are no models themselves.
        seen: whether each policy has learned from this log.
        warnings: what was found wrong.
    """

    copy: TrainingCopy
    evaluated: EvaluatedLog
    columns: Mapping[str, PolicyColumn]
    reading: Reading
    seen: tuple[bool, ...]
    warnings: tuple[str, ...]

    @property
    def counts(self) -> dict[str, int]:
        """Rows and episodes: all of them, and how they are used."""
        used = self.evaluated.split.scored
        episodes = len(self.copy.episode_hash)
        scored = len(used.hashes)
        return {
            "rows": len(self.copy),
            "scored_rows": len(used.numbers),
            "episodes": episodes,
            "fitted_episodes": episodes - scored,
            "scored_episodes": scored,
            "rows_without_propensity": self.evaluated.without_propensity,
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
    ) -> "Log":
        """Returns the log for policies that decide among the same choices.

        Args:
            config: the config of the workflow.
            policies: the policies.
            copy: the rows.
            columns: see the attributes.
            gamma: discount per step.

        Raises:
            DataError: what is wrong with the rows; none of a model's features in them; no episode to score.
        """
        content = content_of(copy)
        warnings = [*copy.notes]
        models = [policy for policy in policies if isinstance(policy, ExportedModel)]
        seen = tuple(isinstance(one, ExportedModel) and one.learned_from(content) for one in policies)
        for model in models:
            warnings += _feature_warnings(model, copy)
            if model.learned_from(content):
                warnings.append(f"{model.key} was trained on this very log: it has seen episodes that are scored")
        sides = Sides(train=copy, held_out=None, same=True, shards=Shards.alone(ALONE))
        settings = config.evaluation
        fitted = any(_is_modelled(policy, columns) for policy in policies)
        if not fitted:
            settings = settings.model_copy(update={"held_out_share": 1.0})
        scored = scored_episodes(sides, settings, config.seed, few=fitted)
        if not len(scored.numbers):
            raise DataError(Problem(config.data_path, "an episode of which every action is known, to score", "none"))
        split = split_log(sides, scored, config.evaluation)
        spans = models[0].spans(copy) if models else single_steps(copy)
        features = raw_columns(copy.candidates) if copy.parametric else None
        rows = build_rows(copy, spans, np.arange(len(copy)), raw_columns(copy.state), features)
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
        return cls(
            copy=copy,
            evaluated=evaluated,
            columns=columns,
            reading=models[0].reading if models else Reading.fitted(copy, config),
            seen=seen,
            warnings=(*warnings, *scored.notes),
        )


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


def estimates_of(config: EvaluateConfig, policies: Sequence[EvaluatedPolicy], log: Log) -> Estimates:
    """Fits reward and value models to each policy and returns every estimate of it.

    Raises:
        BundleError: a model gives a value that is no number.
    """
    results = []
    choices = []
    warnings = [*log.warnings]
    for policy in policies:
        evaluator = _evaluator(config, policy, log)
        evaluator.fit(final=True)
        page, candidates = evaluator.page(final=True)
        assert page is not None, "one process has all rows"
        results.append(evaluator.result(page))
        if _is_modelled(policy, log.columns):
            choices.append({"actions": _shares(page, log), **candidates})
            warnings += _never_logged(policy, page, log)
        else:
            choices.append({"actions": {}})
    return Estimates(
        log=log,
        results=tuple(results),
        choices=tuple(choices),
        compared=differences(*results) if len(results) == 2 else {},
        warnings=tuple(warnings),
    )


def _is_modelled(policy: EvaluatedPolicy, columns: Mapping[str, PolicyColumn]) -> bool:
    """Returns whether the probabilities of all choices are known, so that models can be fitted to the policy."""
    if isinstance(policy, ExportedModel):
        return True
    return columns[policy.key].complete if policy.key in columns else policy.path == UNIFORM


def _evaluator(config: EvaluateConfig, policy: EvaluatedPolicy, log: Log) -> PolicyEvaluator:
    copy = log.copy
    exported = isinstance(policy, ExportedModel)
    if isinstance(policy, ExportedModel):
        choices = Choices(policy.bundle, copy.state_ids, copy.action_names, copy.action_ids)
        probabilities: Policy = ExportedPolicy(policy, config, choices)
        rows = log.evaluated
        reading = policy.reading
        ids = tuple(policy.bundle.action_feature_ids)
    else:
        rows, probabilities = policy.on(log.evaluated, log.columns.get(policy.key))
        reading = log.reading
        ids = copy.action_ids if _is_modelled(policy, log.columns) else ()
    with own_seed(config.seed + 1, ALONE.device):
        heads = reading.heads(copy, gamma=rows.gamma, target_update_rate=config.evaluation.target_update_rate)
    return PolicyEvaluator(rows, probabilities, heads, title=policy.key, candidate_ids=ids, asked_once=exported)


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
        unknown = sorted(set(have) - set(reads))
        missing = sorted(set(reads) - set(have))
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


def _never_logged(model: EvaluatedPolicy, page: EvaluationPage, log: Log) -> list[str]:
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
