"""The story of an evaluation: exported models judged on a log that they need not have learned from.

1 models    loaded, verified; two of them decide among the same choices
2 log       events become transitions ─► training copy ─► its features held against those of the models
3 episodes  a share by hash of mdp_id is scored, the others are fitted to
4 values    of each model: heads fitted to its policy ─► page ─► estimators; of two also the difference
5 report    JSON file, page beside it, text

One process does all of it, on the CPU: the exported model runs in onnxruntime.
"""

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import pad

from reagent_lite.algorithms.cpe_heads import CPEHeads, fit_heads
from reagent_lite.config.evaluate import EvaluateConfig
from reagent_lite.data.source import rows_in_order
from reagent_lite.distributed.group import Group, Place
from reagent_lite.errors import BundleError, ConfigError, Problem
from reagent_lite.evaluation.cpe import CPEResult, evaluate_page
from reagent_lite.evaluation.page import EvaluationPage, Policy, build_page
from reagent_lite.evaluation.paired import differences
from reagent_lite.evaluation.webpage import render
from reagent_lite.evaluation.withheld import MODELLED, WEIGHTED, withhold
from reagent_lite.files import require_writable, write_whole
from reagent_lite.manifest import canonical
from reagent_lite.training.progress import progress
from reagent_lite.types import Actions
from workflows.evaluating_log import Log, read_log
from workflows.evaluating_page import page_of
from workflows.evaluating_policy import Candidate, ExportedPolicy
from workflows.evaluating_report import Findings, document_of, lines_of, scores_of
from workflows.learning import threads_for

CPU = torch.device("cpu")
_TAKEN = 1e-6  # share of rows; a softmax gives less than that to what it would not do


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """What is left; printed as the last line of standard output.

    Attributes:
        report: path of the JSON file.
        page: path of the same as one HTML file, beside it.
        episodes, rows: scored.
        scores: {`CPE/{outcome}/{estimator}`: estimate}, null where there is none; the logged policy's own among them.
        difference: {`CPE/{outcome}/{estimator}`: [estimate, lower, upper]} of model minus against; null without.
        warnings: what was found wrong with the log or the models.
        seconds: in all.
    """

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
        BundleError: a model that is not whole, or two that decide among other choices.
        DataError: what is wrong with the log, or that it is none for this model.
    """
    start = time.monotonic()
    target = Path(config.output_path).expanduser()
    if target.is_dir():
        raise ConfigError(Problem("output_path", "a file", f"the folder {target}", "Choose another name"))
    require_writable(target.parent, "output_path")
    candidates = _candidates(config)
    gamma = candidates[0].gamma if config.gamma is None else config.gamma
    if gamma is None:
        raise ConfigError(Problem("gamma", "a number, as the config of the model does not say it", "nothing"))
    log = read_log(config, candidates, Group(Place(), CPU))
    pages = tuple(_page(config, candidate, log, gamma) for candidate in candidates)
    findings = _findings(config, candidates, log, gamma, pages)
    for line in lines_of(findings):
        _say(line)
    document, page = document_of(findings), target.with_suffix(".html")
    write_whole(target, canonical(document))
    write_whole(page, render(page_of(document)).encode())
    _say(f"written to {target} and {page}")
    scores, difference = scores_of(findings)
    return Evaluated(
        report=str(target),
        page=str(page),
        episodes=log.counts["scored_episodes"],
        rows=len(log.scored),
        scores=scores,
        difference=difference,
        warnings=findings.warnings,
        seconds=round(time.monotonic() - start, 3),
    )


def _candidates(config: EvaluateConfig) -> tuple[Candidate, ...]:
    """Loads the models.

    Raises:
        BundleError: two that decide among other choices.
    """
    model = Candidate.load("model", config.model)
    if config.against is None:
        return (model,)
    against = Candidate.load("against", config.against)
    names, others = model.bundle.action_names, against.bundle.action_names
    if set(names) != set(others):
        shown = [", ".join(one) or "candidates with features" for one in (names, others)]
        raise BundleError(Problem(f"against {against.path}", f"a model that decides as {model.path}: {shown[0]}",
                                  shown[1]))  # fmt: skip
    return model, against


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


def _findings(
    config: EvaluateConfig, candidates: tuple[Candidate, ...], log: Log, gamma: float, pages: tuple[EvaluationPage, ...]
) -> Findings:
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
    return Findings(config=config, candidates=candidates, log=log, gamma=gamma, pages=pages, results=tuple(results),
                    compared=compared, warnings=tuple(warnings))  # fmt: skip


def _reasons(log: Log) -> dict[str, str]:
    """Returns estimators that this log cannot feed, with the reason."""
    reasons = {}
    if not len(log.fitted):
        reasons = dict.fromkeys(MODELLED, "no other episode is there to fit its model to")
    if log.without_propensity:
        why = f"{log.without_propensity:,} of {len(log.copy):,} rows of the log have no propensity"
        reasons |= dict.fromkeys(WEIGHTED, why)
    return reasons


def _never_logged(candidate: Candidate, page: EvaluationPage, log: Log) -> list[str]:
    """Returns a sentence for each named action that the policy takes and no row of the log does."""
    share = page.model_propensities.mean(0).tolist()
    logged = np.bincount(np.maximum(log.copy.action, 0), minlength=len(share))
    return [
        f"{candidate.key} takes {name!r} in {share[number]:.1%} of the scored rows, and no row of the log has it: "
        "nothing there tells what it earns"
        for number, name in enumerate(log.copy.action_names)
        if share[number] > _TAKEN and not logged[number]
    ]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
