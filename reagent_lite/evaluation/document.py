"""What an evaluation found: as a JSON document, as text, and as the few numbers of the last line."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from reagent_lite.config import resolved
from reagent_lite.config.evaluate import EvaluateConfig
from reagent_lite.errors import counted
from reagent_lite.evaluation import report
from reagent_lite.evaluation.candidates import candidate_choices
from reagent_lite.evaluation.cpe import CPEResult
from reagent_lite.evaluation.decision import (
    OTHER_MODEL,
    Comparison,
    Decision,
    decide,
    findings_of,
)
from reagent_lite.evaluation.estimates import ALONE, Estimates, Log
from reagent_lite.evaluation.exported_model import ExportedModel
from reagent_lite.evaluation.interval import Interval, finite
from reagent_lite.evaluation.page import REWARD_NAME, EvaluationPage
from reagent_lite.evaluation.played import AGAINST, AIM, Beside, Counted, Played, beside, simulated_of
from reagent_lite.rl.estimators import ONE_STEP_ESTIMATORS

_OF_ROWS = ("num_rows", "num_episodes", "horizon", "cut_share")
"""What of the overlap does not rest on weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Everything that is reported.

    Attributes:
        config: the workflow's.
        models: the model, and the one it is held against.
        gamma: discount per step.
        estimates: those on the log, if there is one.
        played: what was earned in simulation, if there was one.
    """

    config: EvaluateConfig
    models: tuple[ExportedModel, ...]
    gamma: float
    estimates: Estimates | None
    played: Played | None

    @property
    def beside(self) -> Beside | None:
        """How far log and simulation may be held against each other, None with one of them."""
        if self.estimates is None or self.played is None:
            return None
        overlap = self.estimates.results[0].overlap
        counted = Counted(
            gamma=self.gamma,
            by_time=self.models[0].by_time,
            horizon=self.config.evaluation.max_horizon,
            longest=int(np.bincount(np.asarray(self.estimates.log.copy.episode)).max()),
            cut_share=0.0 if overlap is None else overlap.cut_share,
        )
        return beside(counted, self.played)


def document_of(findings: Findings) -> dict[str, Any]:
    """Returns the report file's content; what is undefined is null, and what was not asked for is absent."""
    estimates = findings.estimates
    document: dict[str, Any] = {"config": resolved(findings.config), "gamma": findings.gamma, "warnings": []}
    for model in findings.models:
        trained = {key: model.bundle.manifest[key] for key in ("workflow", "steps", "data_hash", "config_hash")}
        policy = str(model.policy(findings.config))
        document[model.key] = {"path": str(model.path), "policy": policy, **trained}
    if estimates is not None:
        document |= {"log": _log(findings.config, estimates.log), "warnings": list(estimates.warnings)}
        for place, model in enumerate(findings.models):
            document[model.key] |= _estimated(estimates, place, model)
        if estimates.compared is not None:
            document["difference"] = {
                name: {one.name: {**one.figure.json(), "verdict": one.verdict, "reason": one.reason} for one in found}
                for name, found in estimates.compared.items()
            }
    if findings.played is not None:
        for model in findings.models:
            document[model.key]["simulated"] = findings.played.policies[model.key].json()
        document["simulation"] = findings.played.json(findings.beside)
    return document | {"decision": decision_of(document).json()}


def _log(config: EvaluateConfig, log: Log) -> dict[str, Any]:
    return {"path": config.data_path, "rows": len(log.copy), "scored_rows": len(log.split.scored.numbers), **log.counts,
            "rows_without_propensity": log.without_propensity}  # fmt: skip


def _estimated(estimates: Estimates, place: int, model: ExportedModel) -> dict[str, Any]:
    log, page = estimates.log, estimates.pages[place]
    document = {
        "actions": _actions(page, log.copy.action_names),
        "cpe": _cpe(estimates.results[place], weighted=not log.without_propensity),
    }
    if model.bundle.parametric:
        scored = log.split.scored.numbers
        order = scored[np.argsort(log.copy.episode[scored], kind="stable")]  # as the page orders its rows
        ids = model.bundle.action_feature_ids
        document["candidates"] = candidate_choices(page, log.copy, order, ids, ALONE)
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
    text = [] if findings.estimates is None else _estimate_lines(findings, findings.estimates)
    if findings.played is not None:
        names = {one.key: f"{one.key} {one.path}, {one.policy(findings.config)}" for one in findings.models}
        text += findings.played.lines(names, findings.gamma, findings.config.evaluation.confidence_level)
        if findings.beside is not None:
            text += [f"  {sentence}" for sentence in (*findings.beside.apart, *findings.beside.remarks)]
    warnings = () if findings.estimates is None else findings.estimates.warnings
    return text + [f"warning: {warning}" for warning in warnings]


def _estimate_lines(findings: Findings, estimates: Estimates) -> list[str]:
    text = []
    for model, result in zip(findings.models, estimates.results, strict=True):
        text.append(f"{model.key} {model.path}, {model.policy(findings.config)}, "
                    f"discount {findings.gamma:g}:")  # fmt: skip
        own = report.lines(result)
        if estimates.log.without_propensity:  # the first line is about weights
            own[0] = (f"CPE on {counted(estimates.log.counts['scored_episodes'], 'episode')}, "
                      f"{counted(len(estimates.log.split.scored.numbers), 'row')}")  # fmt: skip
        text += [f"  {line}" for line in own]
        if findings.beside is not None and findings.played is not None:
            aim = "not comparable, see below" if findings.beside.apart else AIM
            earned = findings.played.policies[model.key].discounted
            text.append(f"  discounted return in simulation: {earned}; {aim}")
    for name, found in (estimates.compared or {}).items():
        text.append(f"{name}: model minus against")
        text += [f"  {one.name}: {one.figure}; {one.verdict}: {one.reason}" for one in found]
    return text


def scores_of(findings: Findings) -> tuple[dict[str, float | None], dict[str, list[float | None]] | None]:
    """Returns the model's figures by tag, and where two were compared the differences with their intervals."""
    scores, differences = _estimate_scores(findings.estimates)
    if findings.played is not None:
        scores |= {tag: finite(value) for tag, value in findings.played.scores().items()}
        difference = findings.played.differences.get(AGAINST)
        if difference is not None:
            differences["simulation/return"] = list(difference.total.json().values())
            differences["simulation/discounted_return"] = list(difference.discounted.json().values())
    return scores, differences if len(findings.models) == 2 else None


def _estimate_scores(estimates: Estimates | None) -> tuple[dict[str, float | None], dict[str, list[float | None]]]:
    scores: dict[str, float | None] = {}
    if estimates is None:
        return scores, {}
    for outcome in estimates.results[0].outcomes:
        tag = f"CPE/{outcome.name}"
        scores[f"{tag}/Logged_Reward"] = outcome.one_step.logged.value
        scores[f"{tag}/Logged_Return"] = outcome.sequential.logged.value
        scores |= {f"{tag}/{estimate.name}": finite(estimate.figure.value) for estimate in outcome.estimates}
    return scores, {
        f"CPE/{name}/{one.name}": list(one.figure.json().values())
        for name, found in (estimates.compared or {}).items()
        for one in found
    }


def decision_of(document: Mapping[str, Any]) -> Decision:
    """Returns what to do with the model of a report file; where there is another model, instead of that one."""
    cpe = document["model"].get("cpe")
    return decide(findings_of(comparisons_of(document), simulated_of(document), overlap=cpe and cpe["overlap"]))


def comparisons_of(document: Mapping[str, Any]) -> tuple[Comparison, ...]:
    """Returns a report file's estimates beside the logged policy, then the differences to another model."""
    simulation, differences = document.get("simulation"), tuple(_differences(document))
    found = report.compared(document["model"].get("cpe"))
    if found and simulation is not None and simulation["comparable"]:
        value = Interval.read(document["model"]["simulated"]["discounted_return"])
        found = (replace(found[0], simulated=value), *found[1:])
    # of two models the better one is wanted, whatever the logged policy was
    return (*(replace(one, decides=one.decides and not differences) for one in found), *differences)


def _differences(document: Mapping[str, Any]) -> Iterator[Comparison]:
    for outcome, estimates in document.get("difference", {}).items():
        for one_step, unit in ((False, "discounted return of an episode"), (True, "reward of a row")):
            rows = tuple(
                report.estimate_of({**one, "name": name, "figure": one, "difference": one, "normalized": None})
                for name, one in estimates.items()
                if (name in ONE_STEP_ESTIMATORS) == one_step
            )
            yield Comparison(
                outcome=outcome,
                unit=f"{unit}, model minus against",
                decides=outcome == REWARD_NAME and not one_step,
                reference_name=OTHER_MODEL,
                reference=None,
                rows=rows,
            )
