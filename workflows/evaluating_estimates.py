"""What a log tells of exported models: heads fitted to each one's policy, its page, every estimator, differences."""

import os
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import pad

from reagent_lite.algorithms.cpe_heads import CPEHeads, fit_heads
from reagent_lite.config.evaluate import EvaluateConfig
from reagent_lite.data.source import rows_in_order
from reagent_lite.errors import counted
from reagent_lite.evaluation.cpe import CPEResult, evaluate_page
from reagent_lite.evaluation.page import EvaluationPage, Policy, build_page
from reagent_lite.evaluation.paired import Difference, differences
from reagent_lite.evaluation.withheld import MODELLED, WEIGHTED, withhold
from reagent_lite.training.progress import progress
from reagent_lite.types import Actions
from workflows.evaluating_log import Log
from workflows.evaluating_policy import Candidate, ExportedPolicy
from workflows.learning import threads_for

CPU = torch.device("cpu")
_TAKEN = 1e-6  # share of rows; a softmax gives less than that to what it would not do
_NAMED = 8  # actions that have a sentence each


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimates:
    """What a log tells.

    Attributes:
        log: what the models were judged on.
        pages, results: of each candidate.
        compared: {outcome: differences} of two, else None.
        warnings: sentences.
    """

    log: Log
    pages: tuple[EvaluationPage, ...]
    results: tuple[CPEResult, ...]
    compared: dict[str, tuple[Difference, ...]] | None
    warnings: tuple[str, ...]


def estimates_of(config: EvaluateConfig, candidates: tuple[Candidate, ...], log: Log, gamma: float) -> Estimates:
    """Fits models to each candidate's policy and returns every estimate of it.

    Raises:
        BundleError: a model gives a value that is no number.
    """
    pages = tuple(_page(config, candidate, log, gamma) for candidate in candidates)
    reasons = _reasons(log)
    results: list[CPEResult] = []
    warnings = list(log.warnings)
    for candidate, page in zip(candidates, pages, strict=True):
        generator = torch.Generator().manual_seed(config.seed)
        found = evaluate_page(page, gamma=gamma, config=config.evaluation, generator=generator)
        results.append(withhold(found, reasons))
        warnings += _never_logged(candidate, page, log)
    compared = None
    if len(candidates) == 2:
        compared = differences((pages[0], pages[1]), (results[0], results[1]), gamma=gamma, config=config.evaluation,
                               seed=config.seed)  # fmt: skip
    return Estimates(log=log, pages=pages, results=tuple(results), compared=compared, warnings=tuple(warnings))


def _page(config: EvaluateConfig, candidate: Candidate, log: Log, gamma: float) -> EvaluationPage:
    """Fits models to a candidate's policy and returns what policy and models say of the scored rows."""
    policy = ExportedPolicy(candidate, config, log.copy)
    heads = _fitted(config, candidate, policy, log, gamma)
    log.rows.release()
    episodes = np.asarray(log.copy.episode[log.scored], np.int64)
    return build_page(rows_in_order(log.rows, log.scored, CPU), episodes, policy=policy, models=heads,
                      metric_names=log.copy.metric_names)  # fmt: skip


def _fitted(config: EvaluateConfig, candidate: Candidate, policy: ExportedPolicy, log: Log, gamma: float) -> CPEHeads:
    settings, count = config.evaluation, len(log.fitted)
    torch.manual_seed(config.seed)
    _choose_threads(settings.minibatch_size, candidate)
    heads = candidate.heads(log.copy, gamma=gamma, target_update_rate=settings.target_update_rate)
    if not count:
        return heads
    # once, instead of in every pass: [m] onnxruntime and torch, each with threads of its own, stood in each other's way
    after = [policy(batch.next_state, batch.next_actions) for batch in rows_in_order(log.rows, log.fitted, CPU)]
    propensities = torch.cat([pad(part, (0, max(one.shape[1] for one in after) - part.shape[1])) for part in after])
    heads.set_scales(torch.stack([heads.scale_sums(one) for one in rows_in_order(log.rows, log.fitted, CPU)]).sum(0))
    trained = [parameter for parameter in heads.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=settings.learning_rate, fused=True)
    numbers, total = torch.from_numpy(log.fitted), count * settings.final_fit_passes
    size = settings.minibatch_size
    with progress(f"fitting models of {candidate.key}", "rows", enabled=True) as show:
        for number in range(settings.final_fit_passes):
            order = torch.randperm(count)
            for start in range(0, count, size):
                places = order[start : start + size]
                batch = log.rows.take(numbers[places], torch.full((len(places),), 1 / len(places)))
                known = _known(propensities[places, : batch.next_actions.mask.shape[1]])
                fit_heads(heads, (batch,), known, optimizer)
                show(number * count + start + len(places), total)
    return heads


def _known(propensities: torch.Tensor) -> Policy:
    """Returns a policy whose probabilities at the rows it will be asked for are known."""

    def policy(state: torch.Tensor, actions: Actions) -> torch.Tensor:
        return propensities

    return policy


def _choose_threads(rows: int, candidate: Candidate) -> None:
    """Sets torch's threads by the size of one forward pass; a user's OMP_NUM_THREADS stands."""
    if "OMP_NUM_THREADS" not in os.environ:
        widths = (sum(spec.width for spec in candidate.normalization.values()), *candidate.training.layers[1:-1], 1)
        torch.set_num_threads(threads_for(widths, rows, len(os.sched_getaffinity(0))))


def _reasons(log: Log) -> dict[str, str]:
    """Returns estimators that this log cannot feed, with the reason."""
    reasons = {}
    if not len(log.fitted):
        reasons = dict.fromkeys(MODELLED, "no other episode is there to fit its model to")
    if log.without_propensity:
        rows = counted(len(log.copy), "row of the log has", "rows of the log have")
        why = f"{log.without_propensity:,} of {rows} no propensity"
        reasons |= dict.fromkeys(WEIGHTED, why)
    return reasons


def _never_logged(candidate: Candidate, page: EvaluationPage, log: Log) -> list[str]:
    """Returns sentences on named actions that the policy takes and no row of the log does, the likeliest first."""
    share = page.model_propensities.mean(0).numpy()[: len(log.copy.action_names)]  # none of candidates
    action = np.asarray(log.copy.action)
    logged = np.bincount(action[action >= 0], minlength=len(share))
    taken = [number for number in np.argsort(-share, kind="stable") if share[number] > _TAKEN and not logged[number]]
    sentences = [
        f"{candidate.key} takes {log.copy.action_names[number]!r} in {share[number]:.1%} of the scored rows, and no "
        "row of the log has it: nothing there tells what it earns"
        for number in taken[:_NAMED]
    ]
    if more := taken[_NAMED:]:
        sentences.append(f"{candidate.key} takes {counted(len(more), 'more action')} that no row of the log has, "
                         f"together in {share[more].sum():.1%} of the scored rows")  # fmt: skip
    return sentences
