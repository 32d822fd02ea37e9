"""Evaluation results as JSON and TensorBoard tags, and all findings of workflows.evaluate."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from typing import Any

from reagent_lite.config import expand_config
from reagent_lite.config.evaluate_config import EvaluateConfig
from reagent_lite.data.log_shares import shares_of_counts
from reagent_lite.evaluation.cpe import CPEResult, Estimate
from reagent_lite.evaluation.decision import (
    Evidence,
    ShipDecision,
    best_key,
    decide_findings,
    deciding_estimate,
    evidence_of,
)
from reagent_lite.evaluation.estimates import Estimates, EvaluatedPolicy
from reagent_lite.evaluation.evaluation_rows import EvaluationRows
from reagent_lite.evaluation.explanation import Explanation
from reagent_lite.evaluation.exported_model import ExportedModel
from reagent_lite.evaluation.interval import none_if_infinite
from reagent_lite.evaluation.played import AGAINST, EstimatedReturn, Played

_NOT_WRITTEN = ("basis", "weighted", "gamma", "hidden_cause")
_WITHOUT_WEIGHTS = ("num_rows", "num_episodes", "horizon", "cut_share", "certain_share", "effective_sample")
"""Figures of the overlap that do not rest on weights."""

ESTIMATE_COLUMNS = ("policy", "outcome", "estimator", "estimate", "low", "high", "normalized", "verdict", "reason")
"""Columns of `estimate_rows`."""


def estimate_rows(result: CPEResult, policy: str) -> tuple[dict[str, Any], ...]:
    """Returns a row for each estimate of every outcome, with its interval; undefined values are NaN."""
    return tuple(
        {
            "policy": policy,
            "outcome": outcome.name,
            "estimator": estimate.name,
            "estimate": estimate.figure.value,
            "low": estimate.figure.low,
            "high": estimate.figure.high,
            "normalized": estimate.normalized,
            "verdict": str(estimate.verdict),
            "reason": estimate.reason,
        }
        for outcome in result.outcomes
        for estimate in outcome.estimates
    )


def as_json(result: CPEResult) -> dict[str, Any]:
    """Returns the whole result as JSON types; undefined values are null, as are weights without propensities."""
    tree: dict[str, Any] = _plain(result)
    if result.overlap is not None and result.overlap.effective_sample is None:
        del tree["overlap"]["effective_sample"]
    if result.overlap is not None and not result.weighted:
        tree["overlap"] |= dict.fromkeys(tree["overlap"].keys() - set(_WITHOUT_WEIGHTS))
    return tree


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {item.name: _plain(getattr(value, item.name)) for item in fields(value) if item.name not in _NOT_WRITTEN}
    if isinstance(value, tuple):
        return [_plain(element) for element in value]
    return none_if_infinite(value) if isinstance(value, float) else value


def values(result: CPEResult) -> dict[str, float]:
    """Returns {`CPE/{outcome}/{estimator}`: estimate}, and Logged_Reward and Logged_Return of each outcome."""
    tags: dict[str, float] = {}
    for outcome in result.outcomes:
        tag = f"CPE/{outcome.name}"
        tags |= {f"{tag}/{estimate.name}": estimate.figure.value for estimate in outcome.estimates}
        tags[f"{tag}/Logged_Reward"] = outcome.one_step.logged.value
        tags[f"{tag}/Logged_Return"] = outcome.sequential.logged.value
    return tags


def scalars(result: CPEResult) -> dict[str, float]:
    """Returns the tags of `values` for TensorBoard, with intervals and diagnostics; undefined values are left out."""
    tags = values(result)
    for outcome in result.outcomes:
        for estimate in outcome.estimates:
            tag = f"CPE/{outcome.name}/{estimate.name}"
            tags[f"{tag}/low"] = estimate.figure.low
            tags[f"{tag}/high"] = estimate.figure.high
            tags[f"{tag}/normalized"] = estimate.normalized
    if result.overlap is not None and result.weighted:
        tags["CPE/overlap/mean_weight"] = result.overlap.mean_weight.value
        for name in ("effective_rows", "effective_episodes", "unsupported_share", "horizon_reached"):
            tags[f"CPE/overlap/{name}"] = float(getattr(result.overlap, name))
    return {tag: value for tag, value in tags.items() if math.isfinite(value)}


def reward_model_scalars(page: EvaluationRows, action_names: tuple[str, ...]) -> dict[str, float]:
    """Returns {`reward/model/{a}/mean`: value}: the reward model's mean over rows in which the action is allowed."""
    allowed = [page.mask[:, k] for k in range(len(action_names))]
    return {
        f"reward/model/{name}/mean": float(page.reward_model[rows, k, 0].mean())
        for k, (name, rows) in enumerate(zip(action_names, allowed, strict=True))
        if bool(rows.any())
    }


LEARNED_FROM = (
    "The policy has learned from scored episodes too; only the models behind its estimates have not. Estimates may "
    "flatter it: set evaluation.learn_from_scored to false, or eval_data_path to episodes it does not learn from."
)

WARM_START = (
    "The policy began with the weights of an earlier run (training.warm_start_model_path). Estimates may flatter it if "
    "that run learned from scored episodes."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Results of evaluating a run's learner.

    Attributes:
        scalars: figures by TensorBoard tag.
        document: sections of evaluation.json.
        result: estimates from logs, on rank 0.
        explanation: who gets what, who gains and who loses, on rank 0.
        seen: whether scored episodes were in the policy's training data.
        played: returns in simulation.
        agents: evaluations by agent type, if there are several types.
    """

    scalars: dict[str, float] = field(default_factory=dict)
    document: dict[str, Any] = field(default_factory=dict)
    result: CPEResult | None = None
    explanation: Explanation | None = None
    seen: bool = False
    played: Played | None = None
    agents: Mapping[str, "Evaluation"] = field(default_factory=dict)

    def of(self, kind: str) -> "Evaluation":
        """Returns the evaluation of an agent type, or this evaluation if the name is not an agent type."""
        return self.agents.get(kind, self)


@dataclass(frozen=True, kw_only=True)
class Findings:
    """All results of workflows.evaluate.

    Attributes:
        config: config of the workflow.
        models: the model or policy and, if there is one, the model it is compared with.
        gamma: discount per step.
        estimates: estimates from the log, if there is one.
        played: returns in simulation, if there is one.
    """

    config: EvaluateConfig
    models: tuple[EvaluatedPolicy, ...]
    gamma: float
    estimates: Estimates | None
    played: Played | None

    @property
    def warnings(self) -> tuple[str, ...]:
        """Faults of the log and of the models."""
        return () if self.estimates is None else self.estimates.warnings

    @cached_property
    def policies(self) -> dict[str, str]:
        """The evaluated policy of each model in words, by its key."""
        return {model.key: str(model.policy(self.config)) for model in self.models}

    @cached_property
    def obstacles_and_remarks(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Reasons why log and simulation are not comparable, and remarks; both empty unless both were evaluated."""
        if self.estimates is None or self.played is None:
            return (), ()
        estimated = self._describe_estimate(self.estimates)
        return tuple(estimated.obstacles(self.played)), tuple(estimated.remarks(self.played))

    def _describe_estimate(self, estimates: Estimates) -> EstimatedReturn:
        return EstimatedReturn.of(
            estimates.results[0].overlap,
            gamma=self.gamma,
            by_time=any(isinstance(model, ExportedModel) and model.by_time for model in self.models),
            horizon=self.config.evaluation.max_horizon,
        )

    @property
    def comparable(self) -> bool:
        """Whether simulated discounted returns and the log's estimates are the same quantity."""
        return self.estimates is not None and self.played is not None and not self.obstacles_and_remarks[0]

    @property
    def is_choice(self) -> bool:
        """Whether the best of several models is decided about."""
        return len(self.models) > 1 and self.config.against is None

    @cached_property
    def _evidence(self) -> tuple[Evidence, ...]:
        """Evidence about each model; if there is another one to compare with, only about the first."""
        if self.estimates is None:
            return (Evidence(played=self.played),)
        log = self.estimates.log
        count = len(self.models) if self.is_choice else 1
        return tuple(
            evidence_of(
                result,
                self.played,
                self._describe_estimate(self.estimates),
                differences=self.estimates.compared,
                seen=seen,
                guardrails=self.config.evaluation.guardrails,
                other_seen=not self.is_choice and any(log.seen[1:]),
            )
            for result, seen in zip(self.estimates.results[:count], log.seen[:count], strict=True)
        )

    @cached_property
    def decisions(self) -> tuple[ShipDecision, ...]:
        """Recommendation about each model."""
        return tuple(map(decide_findings, self._evidence))

    @property
    def explanations(self) -> tuple[Explanation, ...]:
        """Explanation of each model."""
        if self.estimates is None:
            return (Explanation.without_log(),) * len(self.models)
        return self.estimates.explanations

    @cached_property
    def best(self) -> int:
        """Index of the model that is decided about, by recommendation and then by difference.

        Intervals of all models hold together, so the recommendation holds although the model was chosen by it.
        """
        return max(range(len(self.decisions)), key=lambda index: best_key(self.decisions[index], self._evidence[index]))

    @property
    def evidence(self) -> Evidence:
        """Evidence about the best model."""
        return self._evidence[self.best]

    @cached_property
    def decision(self) -> ShipDecision:
        """Recommendation about the best model."""
        decision = self.decisions[self.best]
        if not self.is_choice:
            return decision
        together = f"their intervals hold together with {self.config.evaluation.confidence_level:.0%}"
        best = f"{self.models[self.best].path} is the best of {len(self.models)} policies ({together})"
        return replace(decision, reason=f"{best}: {decision.reason}")

    @cached_property
    def ranking(self) -> tuple[tuple[str, ShipDecision, Estimate | None], ...]:
        """Path, recommendation and deciding estimate of each model, the best first; empty for a single model."""
        if not self.is_choice:
            return ()
        keys = [best_key(decision, evidence) for decision, evidence in zip(self.decisions, self._evidence, strict=True)]
        order = sorted(range(len(keys)), key=lambda index: keys[index], reverse=True)
        return tuple(
            (str(self.models[index].path), self.decisions[index], deciding_estimate(self._evidence[index]))
            for index in order
        )

    def document(self) -> dict[str, Any]:
        """Returns the content of the report file; undefined values are null, sections that do not apply are absent."""
        document: dict[str, Any] = {
            "config": expand_config(self.config),
            "gamma": self.gamma,
            "warnings": list(self.warnings),
            "decision": self.decision.json(),
        }
        for index, model in enumerate(self.models):
            document[model.key] = {"path": str(model.path), "policy": self.policies[model.key], **model.origin}
            if self.estimates is not None:
                document[model.key] |= self.estimates.choices[index]
                document[model.key]["cpe"] = as_json(self.estimates.results[index])
            document[model.key]["explanation"] = self.explanations[index].json()
            if self.played is not None:
                document[model.key]["simulated"] = self.played.policies[model.key].json()
        if self.estimates is not None:
            log = self.estimates.log
            document["log"] = {"path": self.config.data_path, **log.counts}
            if isinstance(self.config.data_path, tuple):
                shares = shares_of_counts(self.config.data_path, log.copy.counts)
                document["log"]["rows_of_logs"] = {path: rows for path, rows, _ in shares}
            if self.config.write_scored_rows:
                document["log"]["scored_lines"] = log.scored_lines()
        if self.ranking:
            document["ranking"] = [
                {
                    "policy": path,
                    "choice": decision.choice.value,
                    "estimator": None if estimate is None else estimate.name,
                    "difference": None if estimate is None else estimate.difference.json(),
                }
                for path, decision, estimate in self.ranking
            ]
        if self.estimates is not None and self.config.against is not None:
            document["difference"] = {
                name: {
                    difference.name: {
                        **difference.figure.json(),
                        "verdict": difference.verdict,
                        "reason": difference.reason,
                    }
                    for difference in differences
                }
                for name, differences in self.estimates.compared.items()
            }
        if self.played is not None:
            document["simulation"] = self.played.json()
            if self.estimates is not None:
                obstacles, remarks = self.obstacles_and_remarks
                document["simulation"] |= {"comparable": self.comparable, "remarks": [*obstacles, *remarks]}
        return document

    def scores(self) -> dict[str, float | None]:
        """Returns the model's figures by tag, null if undefined."""
        scores = {} if self.estimates is None else values(self.estimates.results[self.best])
        if self.played is not None:
            scores |= self.played.scores()
        return {tag: none_if_infinite(value) for tag, value in scores.items()}

    def estimate_rows(self) -> tuple[dict[str, Any], ...]:
        """Returns `estimate_rows` for all models."""
        results = () if self.estimates is None else self.estimates.results
        return tuple(
            row
            for model, result in zip(self.models, results, strict=self.estimates is not None)
            for row in estimate_rows(result, str(model.path) if self.is_choice else model.key)
        )

    def explanations_by_policy(self) -> dict[str, dict[str, Any]]:
        """Returns the explanation of each model as JSON types, by the name of its rows in `estimate_rows`."""
        return {
            str(model.path) if self.is_choice else model.key: explanation.json()
            for model, explanation in zip(self.models, self.explanations, strict=True)
        }

    def differences(self) -> dict[str, list[float | None]] | None:
        """Returns {tag: [model minus against, lower, upper]}; None without another model."""
        if self.config.against is None:
            return None
        figures = {
            f"CPE/{name}/{difference.name}": difference.figure
            for name, differences in (self.estimates.compared if self.estimates is not None else {}).items()
            for difference in differences
        }
        if self.played is not None:
            earned = self.played.differences[AGAINST]
            figures |= {"simulation/return": earned.total, "simulation/discounted_return": earned.discounted}
        return {tag: list(figure.json().values()) for tag, figure in figures.items()}
