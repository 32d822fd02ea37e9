"""What a log tells of exported models: heads fitted to each one's policy, its page, every estimator, differences."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import pad

from reagent_lite.algorithms.cpe_heads import (
    CHECKED_ROWS,
    CHECKED_SHARE,
    FEWEST_STEPS,
    CPEHeads,
    EarlyStopping,
    fit_heads,
)
from reagent_lite.algorithms.optimizers import optimizer_class
from reagent_lite.config.evaluate import EvaluateConfig
from reagent_lite.console import progress, with_progress
from reagent_lite.data.rows.hashes import mix
from reagent_lite.data.sampling.source import rows_in_order
from reagent_lite.errors import counted
from reagent_lite.evaluation.cpe import CPEResult, evaluate_page
from reagent_lite.evaluation.episodes import spread
from reagent_lite.evaluation.exported_model import Candidate, ExportedPolicy
from reagent_lite.evaluation.log import Log
from reagent_lite.evaluation.page import EvaluationPage, Policy, build_page, held_out
from reagent_lite.evaluation.paired import Difference, differences
from reagent_lite.evaluation.withheld import MODELLED, WEIGHTED, withhold
from reagent_lite.types import Actions, TransitionBatch

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
        with progress(f"estimating {candidate.key}", "outcomes", enabled=True, brief=True) as show:
            found = evaluate_page(page, gamma=gamma, config=config.evaluation, generator=generator, show=show)
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
    scored = rows_in_order(log.rows, log.scored, CPU)
    scored = with_progress(f"scoring rows by {candidate.key}", scored, len(log.scored), enabled=True)
    return build_page(scored, episodes, policy=policy, models=heads,
                      metric_names=log.copy.metric_names)  # fmt: skip


def _fitted(config: EvaluateConfig, candidate: Candidate, policy: ExportedPolicy, log: Log, gamma: float) -> CPEHeads:
    settings = config.evaluation
    torch.manual_seed(config.seed)
    heads = candidate.heads(log.copy, gamma=gamma, target_update_rate=settings.target_update_rate)
    if not len(log.fitted):
        return heads
    size, key = settings.minibatch_size, candidate.key
    steps = min(settings.final_fit_passes * -(-len(log.fitted) // size), max(settings.max_fit_rows // size, 1))
    apart = np.zeros(len(log.fitted), bool)
    if steps > FEWEST_STEPS:
        apart = held_out(mix(np.asarray(log.copy.episode_hash)), CHECKED_SHARE)[
            np.asarray(log.copy.episode)[log.fitted]
        ]
    numbers, checked = spread(log.fitted[~apart], steps * size), spread(log.fitted[apart], CHECKED_ROWS)

    def rows(title: str) -> Iterator[TransitionBatch]:
        return with_progress(f"{title} {key}", rows_in_order(log.rows, numbers, CPU), len(numbers), enabled=True)

    # once, instead of in every pass: [m] onnxruntime and torch, each with threads of its own, stood in each other's way
    after = [policy(batch.next_state, batch.next_actions) for batch in rows("asking")]
    propensities = torch.cat([pad(part, (0, max(one.shape[1] for one in after) - part.shape[1])) for part in after])
    heads.set_scales(torch.stack([heads.scale_sums(one) for one in rows("measuring outcomes for")]).sum(0))
    trained = [parameter for parameter in heads.parameters() if parameter.requires_grad]
    optimizer = optimizer_class("Adam")(trained, lr=settings.learning_rate, fused=True)
    unfitted = list(rows_in_order(log.rows, checked, CPU))
    theirs = [policy(batch.next_state, batch.next_actions) for batch in unfitted]

    @torch.no_grad()
    def held_out_loss() -> float:
        return sum(float(heads(*pair)[0]) for pair in zip(unfitted, theirs, strict=True)) / len(checked)

    stop = EarlyStopping(heads, held_out_loss) if len(checked) else None
    places, count = torch.from_numpy(numbers), len(numbers)
    with progress(f"fitting models of {key}", "steps", enabled=True) as show:
        order, done = torch.randperm(count), 0
        for step in range(steps):
            if done == len(order):
                order, done = torch.randperm(count), 0
            drawn = order[done : done + size]
            done += len(drawn)
            batch = log.rows.take(places[drawn], torch.full((len(drawn),), 1 / len(drawn)))
            known = _known(propensities[drawn, : batch.next_actions.mask.shape[1]])
            fit_heads(heads, (batch,), known, optimizer)
            show(step + 1, steps)
            if stop is not None and stop():
                break
    return heads


def _known(propensities: torch.Tensor) -> Policy:
    """Returns a policy whose probabilities at the rows it will be asked for are known."""

    def policy(state: torch.Tensor, actions: Actions) -> torch.Tensor:
        return propensities

    return policy


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
