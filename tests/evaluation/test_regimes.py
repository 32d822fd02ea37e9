"""Trustworthy intervals contain the exact value and decisions are seldom wrong, for rare and for common events.

tests/benchmarks/coverage.py prints the whole table, with 500 logs per regime.
"""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from oracles.hidden_loggers import HiddenLogger
from oracles.regimes import CONFIG, Regime, measure, page_of
from oracles.users import Users

from reagent_lite.evaluation.cpe import evaluate_page
from reagent_lite.evaluation.decision import FindingSource, Standing, decide, evidence_of
from reagent_lite.evaluation.played import MODEL, RANDOM, EstimatedReturn, Played

LOGS = 40
# of 40 logs: what an interval that misses in 5 % exceeds once in a thousand times, and a decision false in 2.5 %
MOST_MISSES = 7 / LOGS
MOST_FALSE = 5 / LOGS


def assert_sound(figures: dict[str, float], misses: float = MOST_MISSES, false: float = MOST_FALSE) -> None:
    assert min(figures["cover"], figures["cover difference"]) >= 1 - misses
    assert max(figures["ship"], figures["do not ship"]) <= false


@pytest.mark.parametrize(
    "regime",
    [
        Regime(episodes=2_000, rate=0.004),
        Regime(episodes=2_000, logging="softmax", policy="near"),
        Regime(episodes=500, actions=2, outcome="cost", policy="near"),
        Regime(episodes=500, actions=2, outcome="heavy"),
        Regime(episodes=500, actions=4, policy="near", horizon=4),
    ],
    ids=str,
)
def test_what_makes_no_difference_is_seldom_shipped_and_intervals_hold_the_truth(regime: Regime) -> None:
    figures = measure(regime, LOGS, seed=1000)
    assert figures["trusted"] > 0.7
    assert_sound(figures)


def test_estimated_propensities_serve_as_well_as_logged_ones() -> None:
    """Of a logger that the estimated policy can be; of 20 logs as many errors as come once in a thousand times."""
    figures = measure(HiddenLogger(logger="softmax", episodes=300, actions=3, outcome="event"), LOGS // 2, seed=1000)
    assert figures["trusted"] > 0.5
    assert_sound(figures, misses=5 / 20, false=3 / 20)


def test_rows_of_a_user_count_together_if_users_are_episodes() -> None:
    """Rewards of a user resemble each other; taken as independent, the intervals of values miss more often than not."""
    assert_sound(measure(Users(users=60, rows=50, together=True), LOGS, seed=1000))
    alone = measure(Users(users=60, rows=50, together=False), LOGS, seed=1000)
    assert alone["cover"] < 0.7
    assert alone["cover difference"] >= 1 - MOST_MISSES


@pytest.mark.parametrize("rate", [0.004, 0.2])
def test_a_policy_that_plays_as_the_logging_policy_is_seldom_told_apart_from_it(rate: float) -> None:
    """1,000 logged episodes and 100 simulated ones, of which often none has an event."""
    told_apart = 0
    for seed in range(LOGS):
        rng = np.random.default_rng(seed)
        half = np.full((1000, 1), 0.5)
        rewards = (rng.random((1000, 1)) < rate).astype(float)
        page = page_of(half, half, rewards, 0 * half, 0 * half, 0 * half)
        result = evaluate_page(page, gamma=1.0, config=CONFIG, generator=torch.Generator().manual_seed(seed))
        returns = torch.from_numpy(rng.random((2, 100)) < rate).double()
        tables = torch.stack((returns, returns, torch.ones(2, 100), torch.zeros(2, 100)), 1)
        spec = cast(Any, SimpleNamespace(name="events", parameters={}))
        played = Played.of(spec, 1, dict(zip((MODEL, RANDOM), tables, strict=True)), level=0.95)
        estimated_return = EstimatedReturn.of(result.overlap, gamma=1.0, by_time=False, horizon=1000)
        told_apart += any(
            finding.source is FindingSource.BESIDE and finding.standing in (Standing.BETTER, Standing.WORSE)
            for finding in decide(evidence_of(result, played, estimated_return)).findings
        )
    assert told_apart / LOGS <= MOST_FALSE


def test_a_logger_that_the_estimated_policy_cannot_be_decides_nothing() -> None:
    figures = measure(HiddenLogger(logger="network"), LOGS // 5, seed=1000)
    assert figures["trusted"] <= 0.5
    assert figures["ship"] == figures["do not ship"] == 0


def test_a_policy_that_is_ten_times_better_is_found() -> None:
    """Events in 0.4 % of the rows, and in 4 % of those whose action is the policy's."""
    figures = measure(Regime(episodes=10_000, rate=0.004, gain=10), LOGS // 2, seed=1000)
    assert figures["ship"] >= 0.8
    assert figures["do not ship"] == 0


def test_a_log_without_events_says_nothing() -> None:
    figures = measure(Regime(episodes=300, rate=0.0), 3, seed=0)
    assert (figures["trusted"], figures["ship"], figures["do not ship"]) == (0, 0, 0)
