"""The strength of a hidden cause: against all extreme weights, and in the reason of a decision."""

import itertools
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import reagent_lite
from reagent_lite.evaluation.hidden_cause import HiddenCause

REWARD = torch.tensor([0.0, 1.0, 0.3, 2.0, -1.0, 0.7], dtype=torch.float64)
EVALUATED = torch.tensor([0.9, 0.2, 0.5, 0.0, 1.0, 0.4], dtype=torch.float64)
LOGGED = torch.tensor([0.5, 0.25, 0.1, 0.5, 0.8, 0.6], dtype=torch.float64)


@pytest.mark.parametrize("gamma", [1.0, 1.5, 4.0])
def test_the_worst_of_all_extreme_weights(gamma: float) -> None:
    odds = 1 / LOGGED - 1
    bounds = torch.stack((EVALUATED * (1 + odds / gamma), EVALUATED * (1 + odds * gamma)), 1)
    values = []
    for choice in itertools.product((0, 1), repeat=6):
        weight = bounds[torch.arange(6), torch.tensor(choice)]
        values.append(float((weight * REWARD).sum() / weight.sum()))
    plain = EVALUATED / LOGGED
    estimate = float((plain * REWARD).sum() / plain.sum())
    cause = HiddenCause.of(REWARD, EVALUATED, LOGGED)
    assert cause.shift(gamma, 1) == pytest.approx(estimate - min(values), abs=1e-12)
    assert cause.shift(gamma, -1) == pytest.approx(max(values) - estimate, abs=1e-12)
    assert cause.strength(cause.shift(gamma, 1), 1) == pytest.approx(gamma, rel=2e-3)


def test_a_cause_that_changes_nothing_may_be_as_strong_as_it_likes() -> None:
    assert HiddenCause.of(torch.ones(6, dtype=torch.float64), EVALUATED, LOGGED).strength(0.0, 1) == 100.0


def log_of(gain: float, complaints: float) -> pd.DataFrame:
    """Action b earns `gain` more, and has `complaints` more of them."""
    rng = np.random.default_rng(0)
    b = rng.random(6000) < 0.5
    return pd.DataFrame({
        "x": rng.random(6000), "action": np.where(b, "b", "a"), "reward": rng.normal(size=6000) + gain * b,
        "complaints": (rng.random(6000) < 0.05 + complaints * b).astype(float),
        "action_probability": 0.5, "wanted": b.astype(float),
    })  # fmt: skip


def decision_of(folder: Path, log: pd.DataFrame, **evaluation: object) -> dict[str, str]:
    columns = {"state_features": ["x"], "metrics": ["complaints"]}
    config = {"columns": columns, "actions": ["a", "b"], "output_path": folder / "e.json", "evaluation": evaluation}
    return reagent_lite.evaluate("column:wanted", log, config=config).decision


def test_the_reason_says_how_strong_a_hidden_cause_would_have_to_be(tmp_path: Path) -> None:
    weak, strong = (decision_of(tmp_path, log_of(gain, 0.0))["reason"] for gain in (0.2, 1.0))
    factors = []
    for reason in (weak, strong):
        words = "a hidden cause would have to change the odds of logged actions by a factor of "
        assert words in reason
        factors.append(float(reason.partition(words)[2].split()[0]))
    assert 1.0 < factors[0] < 1.3 < factors[1]


@pytest.mark.parametrize(
    ("complaints", "limit", "choice"),
    [(0.0, 0.02, "ship"), (0.1, 0.02, "do not ship"), (0.02, 0.01, "discuss")],
)
def test_guardrails(complaints: float, limit: float, choice: str, tmp_path: Path) -> None:
    decision = decision_of(tmp_path, log_of(0.5, complaints), guardrails={"complaints": {"at_most_worse_by": limit}})
    assert decision["choice"] == choice
    assert ("metric complaints" in decision["reason"]) == (choice != "ship")


def test_a_metric_that_the_log_lacks_is_discussed(tmp_path: Path) -> None:
    decision = decision_of(tmp_path, log_of(0.5, 0.0), guardrails={"returns": {"better": "higher"}})
    assert decision["choice"] == "discuss"
    assert "the log does not show whether metric returns is worse by more than 0" in decision["reason"]
