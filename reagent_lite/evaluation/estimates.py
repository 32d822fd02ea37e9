"""Estimates of exported models on a log: models fitted to each one's policy, its page, every estimate, differences.

training copy ─► Log: split, checked against what the models read ─┬─► of each: probabilities, fitted models ─► page
                                                                    └─► estimates; of two also the difference
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from reagent_lite.config.evaluate import EvaluateConfig
from reagent_lite.console import progress, with_progress
from reagent_lite.data.copy.facts import content_of
from reagent_lite.data.copy.training_copy import TrainingCopy
from reagent_lite.data.sampling.normalized import raw_columns
from reagent_lite.data.sampling.shards import Shards
from reagent_lite.data.sampling.source import LoggedRows, build_rows, rows_in_order
from reagent_lite.distributed.group import Group, Place
from reagent_lite.errors import DataError, Problem, counted
from reagent_lite.evaluation.candidates import candidate_choices
from reagent_lite.evaluation.cpe import CPEResult, Estimate, differences, evaluate_page, missing_estimates
from reagent_lite.evaluation.episodes import Sides, scored_episodes, spread
from reagent_lite.evaluation.exported_model import Choices, ExportedModel, ExportedPolicy
from reagent_lite.evaluation.fitting import PolicyModels, Split, split_log
from reagent_lite.evaluation.page import EvaluationPage, build_page
from reagent_lite.types import Actions, TransitionBatch

ALONE = Group(Place(), torch.device("cpu"))
_TAKEN = 1e-6  # share of rows; a softmax gives less than that to what it would not do
_NAMED = 8  # actions that have a sentence each
_MOST_NAMED = 10  # features


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """The log as it is evaluated.

    Attributes:
        copy: its rows.
        rows: what batches are gathered from, raw.
        split: which rows models are fitted to, and which are scored.
        seen: whether each model has learned from this log.
        warnings: what was found wrong.
    """

    copy: TrainingCopy
    rows: LoggedRows
    split: Split
    seen: tuple[bool, ...]
    warnings: tuple[str, ...]

    @property
    def counts(self) -> dict[str, int]:
        """Rows and episodes: all of them, and how they are used."""
        episodes, scored = len(self.copy.episode_hash), len(self.split.scored.hashes)
        return {
            "rows": len(self.copy),
            "scored_rows": len(self.split.scored.numbers),
            "episodes": episodes,
            "fitted_episodes": episodes - scored,
            "scored_episodes": scored,
            "rows_without_propensity": self.copy.counts.get("propensity_absent_rows", 0),
        }

    @classmethod
    def of(cls, config: EvaluateConfig, models: Sequence[ExportedModel], copy: TrainingCopy) -> "Log":
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
        split = split_log(sides, scored, lambda counts: _num_steps(config, sum(counts)))
        features = raw_columns(copy.candidates) if copy.parametric else None
        rows = build_rows(copy, models[0].spans(copy), np.arange(len(copy)), raw_columns(copy.state), features)
        return cls(copy=copy, rows=rows, split=split, seen=seen, warnings=(*warnings, *scored.notes))


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


def estimates_of(config: EvaluateConfig, models: tuple[ExportedModel, ...], log: Log, gamma: float) -> Estimates:
    """Fits reward and value models to each exported model's policy and returns every estimate of it.

    Raises:
        BundleError: a model gives a value that is no number.
    """
    counts = log.counts
    missing = missing_estimates(
        rows=counts["rows"], without_propensity=counts["rows_without_propensity"], fitted=len(log.split.fitted) > 0
    )
    results, choices, warnings = [], [], [*log.warnings]
    for model in models:
        page = _page(config, model, log, gamma)
        generator = torch.Generator().manual_seed(config.seed)
        with progress(f"estimating {model.key}", "outcomes", brief=True) as show:
            results.append(
                evaluate_page(
                    page, gamma=gamma, config=config.evaluation, generator=generator, missing=missing, show=show
                )
            )
        choices.append(_choices(model, page, log))
        warnings += _never_logged(model, page, log)
    return Estimates(
        log=log,
        results=tuple(results),
        choices=tuple(choices),
        compared=differences(*results) if len(results) == 2 else {},
        warnings=tuple(warnings),
    )


def _choices(model: ExportedModel, page: EvaluationPage, log: Log) -> dict[str, Any]:
    found: dict[str, Any] = {
        "actions": {
            name: {
                "logged": float((page.action == number).double().mean()),
                "policy": float(page.model_propensities[:, number].mean()),
            }
            for number, name in enumerate(log.copy.action_names)
        }
    }
    if model.bundle.parametric:
        scored = log.split.scored.numbers
        order = scored[np.argsort(log.copy.episode[scored], kind="stable")]  # as the page orders its rows
        found["candidates"] = candidate_choices(
            page,
            log.copy,
            order,
            model.bundle.action_feature_ids,
            ALONE,
            propensities_known=not log.counts["rows_without_propensity"],
        )
    return found


def _num_steps(config: EvaluateConfig, rows: int) -> int:
    settings = config.evaluation
    passes = settings.final_fit_passes * -(-rows // settings.minibatch_size)
    return min(passes, max(settings.max_fit_rows // settings.minibatch_size, 1))


def _page(config: EvaluateConfig, model: ExportedModel, log: Log, gamma: float) -> EvaluationPage:
    """Fits models to a policy and returns the page of the scored rows."""
    settings, split = config.evaluation, log.split
    torch.manual_seed(config.seed)
    heads = model.heads(log.copy, gamma=gamma, target_update_rate=settings.target_update_rate)
    copy = log.copy
    policy = ExportedPolicy(model, config, Choices(model.bundle, copy.state_ids, copy.action_names, copy.action_ids))
    if len(split.fitted):
        rows = _FittedRows(config, model.key, policy, log)
        models = PolicyModels(heads, settings, ALONE)
        models.measure(rows.all("measuring outcomes for"))
        checked = rows_in_order(log.rows, split.checked, ALONE.device)
        asked = [(batch, policy(batch.next_state, batch.next_actions)) for batch in checked]
        models.fit(rows.batches(), rows.policy, asked)
    log.rows.release()
    scored = split.scored.numbers
    batches = rows_in_order(log.rows, scored, ALONE.device)
    shown = with_progress(f"scoring rows by {model.key}", batches, len(scored))
    episodes = np.asarray(log.copy.episode[scored], np.int64)
    return build_page(shown, episodes, policy=policy, models=heads, metric_names=log.copy.metric_names)


class _FittedRows:
    """Batches of the fitted rows in random order, and the policy's probabilities at their next states.

    An exported model is evaluated once for each row instead of in every pass: onnxruntime and torch each have threads
    of their own, and slow each other down.
    """

    def __init__(self, config: EvaluateConfig, key: str, policy: ExportedPolicy, log: Log) -> None:
        self._key, self._rows, self._size = key, log.rows, config.evaluation.minibatch_size
        self._steps = _num_steps(config, len(log.split.fitted))
        self._numbers = spread(log.split.fitted, self._steps * self._size)
        after = [policy(batch.next_state, batch.next_actions) for batch in self.all("asking")]
        most = max(one.shape[1] for one in after)
        self._propensities = torch.cat([pad(part, (0, most - part.shape[1])) for part in after])
        self._drawn = torch.zeros(0, dtype=torch.int64)

    def all(self, title: str) -> Iterator[TransitionBatch]:
        """Yields every row once."""
        rows = rows_in_order(self._rows, self._numbers, ALONE.device)
        return with_progress(f"{title} {self._key}", rows, len(self._numbers))

    def batches(self) -> Iterator[TransitionBatch]:
        """Yields the batches of a fit."""
        places, count = torch.from_numpy(self._numbers), len(self._numbers)
        with progress(f"fitting models of {self._key}", "steps") as show:
            order, done = torch.randperm(count), 0
            for step in range(self._steps):
                if done == count:
                    order, done = torch.randperm(count), 0
                self._drawn = order[done : done + self._size]
                done += len(self._drawn)
                yield self._rows.take(places[self._drawn], torch.full((len(self._drawn),), 1 / len(self._drawn)))
                show(step + 1, self._steps)

    def policy(self, state: torch.Tensor, actions: Actions) -> torch.Tensor:
        """Returns the probabilities [B, K] at the next states of the batch that was yielded last."""
        return self._propensities[self._drawn, : actions.mask.shape[1]]


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
