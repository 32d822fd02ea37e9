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
from oracles.segments import Segment
from oracles.users import Users

from reagent_lite.evaluation.cpe import PageSettings, evaluate_page
from reagent_lite.evaluation.decision import Conclusion, FindingSource, decide_findings, evidence_of
from reagent_lite.evaluation.played import MODEL, RANDOM, EstimatedReturn, Played

LOGS = 40
# what an interval that misses in 5 % exceeds once in a thousand times, and a decision false in 2.5 %: of 40 and of 20
MOST_FALSE = 5 / LOGS
SOUND = {"cover": (1 - 7 / LOGS, 1), "cover difference": (1 - 7 / LOGS, 1), "ship": (0, MOST_FALSE),
         "do not ship": (0, MOST_FALSE)}  # fmt: skip
SOUND_OF_20 = {"cover": (1 - 5 / 20, 1), "cover difference": (1 - 5 / 20, 1), "ship": (0, 3 / 20),
               "do not ship": (0, 3 / 20)}  # fmt: skip
UNDECIDED = {"ship": (0, 0), "do not ship": (0, 0)}


@pytest.mark.parametrize(
    ("regime", "logs", "bounds"),
    [
        # what makes no difference is seldom shipped, and intervals hold the truth
        *((regime, LOGS, SOUND | {"trusted": (0.71, 1)}) for regime in (
            Regime(episodes=2_000, rate=0.004),
            Regime(episodes=500, actions=2, outcome="cost", policy="near"),
            Regime(episodes=500, actions=2, outcome="heavy"),
            Regime(episodes=500, actions=4, policy="near", horizon=4),
        )),
        pytest.param(
            Regime(episodes=2_000, logging="softmax", policy="near"), LOGS, SOUND | {"trusted": (0.71, 1)},
            marks=pytest.mark.slow,
        ),
        # propensities are estimated, of a logger that the estimated policy can be, and of one that it cannot be
        (HiddenLogger(logger="softmax", episodes=300, actions=3, outcome="event"), LOGS // 2,
         SOUND_OF_20 | {"trusted": (0.51, 1)}),
        (HiddenLogger(logger="network"), 6, UNDECIDED | {"trusted": (0, 0.5)}),
        # rewards of a user resemble each other: taken as independent, intervals of values miss more often than not
        (Users(users=60, rows=50, together=True), LOGS, SOUND),
        pytest.param(
            Users(users=60, rows=50, together=False), LOGS, {"cover": (0, 0.69), "cover difference": (1 - 7 / LOGS, 1)},
            marks=pytest.mark.slow,
        ),
        # events in 0.4 % of the rows, and in 4 % of those whose action is the policy's: it is found
        (Regime(episodes=10_000, rate=0.004, gain=10), LOGS // 2, {"ship": (0.8, 1), "do not ship": (0, 0)}),
        # some ten losses that cancel a gain: 8 % would be shipped if all logs were trusted
        (Regime(episodes=2_000, actions=2, outcome="loss", rate=0.01), LOGS // 2,
         {"ship": (0, 3 / 20), "do not ship": (0, 3 / 20), "trusted": (0, 0.25)}),
        # what the log hardly tries may be better or worse
        *((Segment(episodes=1_000, explored=0.004, share=0.02, outcome=outcome, usual=0.1, other=0.8), LOGS // 2,
           SOUND_OF_20 | {right: (0, 1), wrong: (0, 0)})
          for outcome, right, wrong in (("event", "ship", "do not ship"), ("cost", "do not ship", "ship"))),
        (Segment(episodes=1_000, explored=0.004, share=0.02, outcome="normal", rate=1.0, usual=1.0, other=20.0), 6,
         UNDECIDED | {"trusted": (0, 0)}),
        # a log without events says nothing
        (Regime(episodes=300, rate=0.0), 3, UNDECIDED | {"trusted": (0, 0)}),
    ],
    ids=str,
)  # fmt: skip
def test_shares_of_trusted_estimates_intervals_and_decisions(
    regime: Regime | HiddenLogger | Segment | Users, logs: int, bounds: dict[str, tuple[float, float]]
) -> None:
    figures = measure(regime, logs, seed=1000)
    assert {name: figures[name] for name, (low, high) in bounds.items() if not low <= figures[name] <= high} == {}


@pytest.mark.parametrize("rate", [0.004, pytest.param(0.2, marks=pytest.mark.slow)])
def test_a_policy_that_plays_as_the_logging_policy_is_seldom_told_apart_from_it(rate: float) -> None:
    """1,000 logged episodes and 100 simulated ones, of which often none has an event."""
    told_apart = 0
    for seed in range(LOGS):
        rng = np.random.default_rng(seed)
        half = np.full((1000, 1), 0.5)
        page = page_of(half, half, (rng.random((1000, 1)) < rate).astype(float), 0 * half, 0 * half, 0 * half)
        result = evaluate_page(
            page, PageSettings(gamma=1.0, config=CONFIG), generator=torch.Generator().manual_seed(seed)
        )
        returns = torch.from_numpy(rng.random((2, 100)) < rate).double()
        tables = torch.stack((returns, returns, torch.ones(2, 100), torch.zeros(2, 100)), 1)
        played = Played.of(cast(Any, SimpleNamespace(name="events", parameters={})), 1,
                           dict(zip((MODEL, RANDOM), tables, strict=True)), level=0.95)  # fmt: skip
        estimated_return = EstimatedReturn.of(result.overlap, gamma=1.0, by_time=False, horizon=1000)
        told_apart += any(
            finding.source is FindingSource.BESIDE and finding.standing in (Conclusion.BETTER, Conclusion.WORSE)
            for finding in decide_findings(evidence_of(result, played, estimated_return)).findings
        )
    assert told_apart / LOGS <= MOST_FALSE
