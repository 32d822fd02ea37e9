"""The export gate: what an evaluation must show before a model appears."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.reports import RESULT, around, estimate
from helpers.runs import merged, trained

from reagent_lite.config.publish import PublishConfig
from reagent_lite.estimator_names import ESTIMATORS_IN_WORDS
from reagent_lite.evaluation.cpe import CPEResult, OutcomeResult, ReturnOrReward
from reagent_lite.evaluation.gate import apply_gate
from reagent_lite.evaluation.interval import Interval
from reagent_lite.evaluation.verdict import Verdict
from reagent_lite.rl.estimators import ESTIMATORS


def evaluation(low: float = 1.0, difference: float = 0.5, verdict: Verdict = Verdict.SUPPORT) -> CPEResult:
    """A result with one estimate: 2 against 1.5, with lower bounds as given."""
    figure, paired = Interval(value=2.0, low=low, high=3.0), Interval(value=0.5, low=difference, high=0.9)
    family = ReturnOrReward(logged=around(1.5, 0.5), continued=around(1.75, 0.5), events=None,
                    estimates=(estimate("MAGIC", figure, paired, 1.3, verdict, "because"),))  # fmt: skip
    one_step = ReturnOrReward(logged=around(0.1, 0.1), continued=None, events=None, estimates=())
    return replace(RESULT, outcomes=(OutcomeResult(name="clicks", one_step=one_step, sequential=family),))


@pytest.mark.parametrize(
    ("result", "above", "passed", "said"),
    [
        (evaluation(low=1.25), 1.0, True, "MAGIC of clicks is 2 and at least 1.25, above 1"),
        (evaluation(low=1.0), 1.0, False, "MAGIC of clicks is 2 and at least 1, not above 1"),
        (evaluation(difference=0.25), "logged", True, "to the logged policy is 0.5 and at least 0.25, above 0"),
        (evaluation(difference=-0.25), "logged", False, "is 0.5 and at least -0.25, not above 0"),
        (evaluation(low=math.nan), 1.0, False, "MAGIC of clicks has no interval: because"),
        (evaluation(verdict=Verdict.DO_NOT_USE), 1.0, False, "MAGIC of clicks is not to be used: because"),
        (RESULT, 1.0, False, "no episodes could be scored"),
    ],
)  # fmt: skip
def test_what_passes(result: CPEResult, above: Any, passed: bool, said: str) -> None:
    gate = apply_gate(result, PublishConfig(estimator="MAGIC", outcome="clicks", lower_bound_above=above))
    assert gate.passed == passed
    assert said in gate.reason
    assert gate.document["bound"] == (None if not result.outcomes else 0.0 if above == "logged" else 1.0)
    if result.outcomes:
        assert (gate.document["logged"]["value"], gate.document["continued"]["value"]) == (1.5, 1.75)


def test_names_are_those_of_the_registry() -> None:
    assert list(ESTIMATORS) == list(ESTIMATORS_IN_WORDS)


def conditional(small: dict[str, Any], above: float) -> dict[str, Any]:
    """At so high a temperature the policy is that of the log, and four episodes are enough to say so."""
    return merged(small, {
        "rl": {"temperature": 100.0}, "evaluation": {"min_effective_episodes": 1, "models": {"final_fit_passes": 1}},
        "publish_if": {"estimator": "Weighted_Per_Decision_Importance_Sampling", "lower_bound_above": above},
    })  # fmt: skip


def test_a_run_that_is_held_back(small: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    out = tmp_path / "out"
    done = trained(conditional(small, 1e6))
    assert (done.model, (out / "model").exists()) == (None, False)
    reason = json.loads(done.line())["not_published"]
    assert f"not published: {reason}" in caplog.text
    before = (out / "not_published.json").read_bytes()
    document = json.loads(before)
    estimate = document["estimate"]
    assert (document["reason"], document["bound"], document["outcome"]) == (reason, 1e6, "Reward")
    assert document["lower"] == estimate["low"] < estimate["value"] < estimate["high"] < 1e6

    passing = trained(conditional(small, -1e6))
    assert (passing.model, passing.not_published) == (str(out / "model"), None)
    assert not (out / "not_published.json").exists()

    model = {file: file.read_bytes() for file in (out / "model").iterdir()}
    assert trained(conditional(small, 1e6)).model is None
    assert {file: file.read_bytes() for file in (out / "model").iterdir()} == model  # an older one stays as it was
    assert (out / "not_published.json").read_bytes() == before
