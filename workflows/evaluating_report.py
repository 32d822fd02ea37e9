"""What an evaluation found: as a JSON document, as text, and as the few numbers of the last line."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from reagent_lite.config import resolved
from reagent_lite.config.evaluate import EvaluateConfig
from reagent_lite.evaluation import report
from reagent_lite.evaluation.cpe import CPEResult
from reagent_lite.evaluation.overlap import Figure
from reagent_lite.evaluation.page import EvaluationPage
from reagent_lite.evaluation.paired import Difference
from workflows.evaluating_log import Log
from workflows.evaluating_policy import Candidate

_OF_ROWS = ("num_rows", "num_episodes", "horizon", "cut_share")
"""What of the overlap does not rest on weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Everything that is reported.

    Attributes:
        config: the workflow's.
        candidates: the model, and the one it is held against.
        log: what they were judged on.
        gamma: discount per step.
        pages, results: of each candidate.
        compared: {outcome: differences} of two, else None.
        warnings: sentences.
    """

    config: EvaluateConfig
    candidates: tuple[Candidate, ...]
    log: Log
    gamma: float
    pages: tuple[EvaluationPage, ...]
    results: tuple[CPEResult, ...]
    compared: dict[str, tuple[Difference, ...]] | None
    warnings: tuple[str, ...]


def document_of(findings: Findings) -> dict[str, Any]:
    """Returns the report file's content; what is undefined is null."""
    log = findings.log
    document: dict[str, Any] = {
        "config": resolved(findings.config),
        "gamma": findings.gamma,
        "log": {"path": findings.config.data_path, "rows": len(log.copy), "scored_rows": len(log.scored), **log.counts,
                "rows_without_propensity": log.without_propensity},
        "warnings": list(findings.warnings),
    }  # fmt: skip
    for candidate, page, result in zip(findings.candidates, findings.pages, findings.results, strict=True):
        document[candidate.key] = {
            "path": str(candidate.path),
            **{key: candidate.bundle.manifest[key] for key in ("workflow", "steps", "data_hash", "config_hash")},
            "actions": _actions(page, log.copy.action_names),
            "cpe": _cpe(result, weighted=not log.without_propensity),
        }
    if findings.compared is not None:
        document["difference"] = {
            name: {one.name: {**_figure(one.figure), "verdict": one.verdict, "reason": one.reason} for one in found}
            for name, found in findings.compared.items()
        }
    return document


def _cpe(result: CPEResult, *, weighted: bool) -> dict[str, Any]:
    tree = report.as_json(result)
    if not weighted and tree["overlap"] is not None:
        tree["overlap"] = {key: value if key in _OF_ROWS else None for key, value in tree["overlap"].items()}
    return tree


def _actions(page: EvaluationPage, names: Sequence[str]) -> dict[str, dict[str, float]]:
    """Returns shares of the scored rows by named action: what the log does, and what the policy would."""
    return {
        name: {"logged": float((page.action == number).double().mean()),
               "policy": float(page.model_propensities[:, number].mean())}
        for number, name in enumerate(names)
    }  # fmt: skip


def lines_of(findings: Findings) -> list[str]:
    """Returns the report as text, warnings last."""
    text = []
    for candidate, result in zip(findings.candidates, findings.results, strict=True):
        text.append(f"{candidate.key} {candidate.path}, discount {findings.gamma:g}:")
        own = report.lines(result)
        if findings.log.without_propensity:  # the first line is about weights
            own[0] = f"CPE on {findings.log.counts['scored_episodes']} episodes, {len(findings.log.scored)} rows"
        text += [f"  {line}" for line in own]
    for name, found in (findings.compared or {}).items():
        text.append(f"{name}: model minus against")
        text += [f"  {one.name}: {_interval(one.figure)}; {one.verdict}: {one.reason}" for one in found]
    return text + [f"warning: {warning}" for warning in findings.warnings]


def scores_of(findings: Findings) -> tuple[dict[str, float | None], dict[str, list[float | None]] | None]:
    """Returns the model's estimates by tag, and where two were compared the differences with their intervals."""
    scores: dict[str, float | None] = {}
    for outcome in findings.results[0].outcomes:
        tag = f"CPE/{outcome.name}"
        scores[f"{tag}/Logged_Reward"] = outcome.one_step.logged.value
        scores[f"{tag}/Logged_Return"] = outcome.sequential.logged.value
        scores |= {f"{tag}/{estimate.name}": _defined(estimate.figure.value) for estimate in outcome.estimates}
    if findings.compared is None:
        return scores, None
    return scores, {
        f"CPE/{name}/{one.name}": list(_figure(one.figure).values())
        for name, found in findings.compared.items()
        for one in found
    }


def _figure(figure: Figure) -> dict[str, float | None]:
    return {key: _defined(value) for key, value in asdict(figure).items()}


def _defined(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _interval(figure: Figure) -> str:
    return f"{figure.value:.4g} ({figure.low:.4g} to {figure.high:.4g})"
