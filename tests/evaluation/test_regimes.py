"""Intervals that may be believed hold the truth and decisions are seldom false, for rare events as for common ones.

The whole table, 500 logs a regime, is that of tests/benchmarks/coverage.py.
"""

import pytest
from oracles.regimes import Regime, measure

LOGS = 40
# of 40 logs: what an interval that misses in 5 % exceeds once in a thousand times, and a decision false in 2.5 %
MOST_MISSES = 7 / LOGS
MOST_FALSE = 5 / LOGS


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
    assert figures["cover"] >= 1 - MOST_MISSES
    assert figures["cover difference"] >= 1 - MOST_MISSES
    assert figures["ship"] <= MOST_FALSE
    assert figures["do not ship"] <= MOST_FALSE


def test_a_policy_that_is_ten_times_better_is_found() -> None:
    """0.4 % against 4 % where it agrees with the log."""
    figures = measure(Regime(episodes=10_000, rate=0.004, gain=10), LOGS // 2, seed=1000)
    assert figures["ship"] >= 0.8
    assert figures["do not ship"] == 0


def test_a_log_without_events_says_nothing() -> None:
    figures = measure(Regime(episodes=300, rate=0.0), 3, seed=0)
    assert (figures["trusted"], figures["ship"], figures["do not ship"]) == (0, 0, 0)
