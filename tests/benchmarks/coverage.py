"""How often do intervals of trustworthy estimates hold the truth, and how often is a decision false?

    python -m tests.benchmarks.coverage [--logs 500] [--seed 0] [--only size] [--like TEXT]
                                        [--processes 2]

Logs of known value (tests/oracles/regimes.py), each evaluated as a run evaluates its held-out episodes. By regime:

trusted   share of logs with at least one trustworthy estimate
cover     the least coverage of any estimator's nominal 95 % interval of the value, and of the difference to the logged
          policy, among logs in which it was called trustworthy
low, high most misses of any estimator on a side: intervals above, and below the truth
ship, not decisions in all logs: where what is done makes no difference (gain 1) both are false

`--only segment`: logs that hardly try what the policy does in a small segment (tests/oracles/segments.py).
`--only users`: logs with several rows of each user (tests/oracles/users.py).
`--only shared`: logs whose rows share draws of the action; units are named or not (tests/oracles/shared_draws.py).
`--only independent`: logs whose rows do not, though neighbors are alike: nothing may be found.
`--only hidden`: logs whose known propensities are hidden, so that they are estimated (tests/oracles/hidden_loggers.py).
`--only curved`: the same, where logger and reward are curved in features of the log (tests/oracles/curved_loggers.py).
`--only effects`: effects by segment, with segments chosen on other rows (tests/oracles/segment_effects.py). "all hold"
is the share of logs in which every trustworthy interval holds the effect on users like those of its rows; false gain
and false loss are the shares of logs that say so of any segment without one.
`--only selections`: any false decision about the best of 20 columns, or in 20 looks at a growing log, with and without
the level divided among them (tests/oracles/selections.py).
`--only better`: in which share of logs a better policy is shipped, beside the shares in which normal, bootstrap and
betting intervals of the difference lie above 0, and the least share of logs, with and without the gain, in which each
interval holds the difference (tests/oracles/power.py).
`--only power` finds how often the interval of the difference excludes 0 where a policy is better, beside Fisher's
exact test of the events on matched and on other rows, the best test of two counts.
`--like TEXT`: only regimes whose printed fields contain the text.
`--only many` compares ways to allow for the best of several policies: the level divided among them, and the largest
deviation of all in common resamples.
"""

import math
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from scipy.stats import fisher_exact

from reagent_lite.rl.likelihood import Contributions, intervals
from tests.benchmarks.turns import options_of
from tests.oracles import power as better
from tests.oracles import segment_effects, selections
from tests.oracles.curved_loggers import CurvedLogger
from tests.oracles.hidden_loggers import HiddenLogger
from tests.oracles.power import Power
from tests.oracles.regimes import Regime, measure
from tests.oracles.segment_effects import SegmentRegime
from tests.oracles.segments import Segment
from tests.oracles.selections import Selection
from tests.oracles.shared_draws import SharedDraws
from tests.oracles.users import Users

SIZES = (
    (300, 34, 0.004), (300, 34, 0.02), (300, 2, 0.2), (2_000, 34, 0.004), (2_000, 34, 0.02), (2_000, 200, 0.2),
    (2_000, 2, 0.001), (10_000, 34, 0.001), (10_000, 34, 0.004), (10_000, 200, 0.02),
)  # fmt: skip
REGIMES: dict[str, list[Any]] = {
    "size": [Regime(episodes=episodes, actions=actions, rate=rate) for episodes, actions, rate in SIZES],
    "large": [Regime(episodes=100_000, rate=0.001), Regime(episodes=100_000, actions=200, rate=0.004)],
    "policy": [
        Regime(logging=logging, policy=policy, **size)
        for logging, policy in product(("uniform", "softmax", "greedy"), ("equal", "near", "far"))
        for size in ({"episodes": 2_000}, {"episodes": 10_000, "actions": 2, "rate": 0.004})
    ],
    "outcome": [
        Regime(outcome=outcome, **size)
        for outcome in ("cost", "normal", "heavy", "heavy cost", "purchase")
        for size in (
            {"episodes": 300, "actions": 2, "policy": "near"},
            {"episodes": 2_000},
            {"episodes": 2_000, "logging": "greedy", "policy": "far"},
        )
    ],
    "steps": [
        *(
            Regime(episodes=2_000, actions=4, policy="near", near=near, outcome=outcome, horizon=horizon)
            for horizon, near in ((5, 0.8), (5, 0.5), (50, 0.98), (50, 0.9))
            for outcome in ("event", "cost", "normal", "heavy")
        ),
        Regime(episodes=300, actions=2, policy="near", outcome="normal", horizon=5),
        Regime(episodes=10_000, actions=4, logging="softmax", policy="near", near=0.5, horizon=5),
    ],
    "gain": [
        *(
            Regime(episodes=episodes, actions=actions, rate=0.004, gain=gain)
            for episodes, gain, actions in ((2_000, 30, 34), (10_000, 10, 34), (10_000, 3, 2), (10_000, 3, 34))
        ),
        Regime(episodes=2_000, actions=4, policy="near", near=0.5, horizon=5, gain=10),
    ],
    "loss": [
        *(
            Regime(episodes=episodes, actions=2, outcome="loss", rate=rate, sigma=sigma)
            for episodes, rate in ((2_000, 0.004), (2_000, 0.01), (10_000, 0.002))
            for sigma in (1.2, 2)
        ),
        Regime(episodes=2_000, actions=2, logging="softmax", policy="near", near=0.5, outcome="loss", rate=0.01),
        # what the policy likes is better, and no losses
        *(
            Regime(episodes=episodes, actions=2, outcome=outcome, sigma=sigma, gain=gain)
            for outcome in ("heavy", "heavy cost")
            for episodes, sigma, gain in ((2_000, 1.2, 1.8), (2_000, 1.5, 2.6), (500, 1.2, 2.6))
        ),
    ],
    "segment": [
        *(
            Segment(**size, outcome=outcome, usual=0.1, other=0.8)  # type: ignore[arg-type]
            for size in (
                {"episodes": 3_000, "explored": 0.004, "share": 0.02},
                {"episodes": 1_200, "explored": 0.01, "share": 0.01, "actions": 4},
                {"episodes": 4_000, "explored": 0.004, "share": 0.01, "elsewhere": 0.5},
                {"episodes": 800, "explored": 0.003, "share": 0.01, "horizon": 4},
            )
            for outcome in ("event", "cost")
        ),
        *(
            Segment(episodes=3_000, explored=0.004, share=0.02, outcome="normal", rate=1.0, usual=usual, other=other)
            for usual, other in ((1.0, 20.0), (2.0, 3.0), (2.0, 1.0))
        ),
    ],
    "users": [
        Users(users=users, rows=rows, together=together)
        for together in (False, True)
        for users, rows in ((1_000, 3), (200, 20), (50, 100))
    ],
    "shared": [
        *(
            SharedDraws(kind=kind, units=units, rows=rows, named=named, spread=spread)
            for named in (True, False)
            for kind, units, rows, spread in (
                ("user", 400, 6, 1.0),
                ("user", 120, 40, 0.6),
                ("interleaved", 500, 5, 1.0),
                ("interleaved", 90, 30, 1.5),
                ("hour", 150, 24, 0.8),
                ("hour", 60, 100, 0.4),
                ("retry", 2_500, 1.15, 1.0),
            )
        ),
        *(
            SharedDraws(kind="user", units=units, rows=rows, named=True, spread=0.8, actions=actions, outcome=outcome)
            for units, rows, actions, outcome in ((300, 8, 4, "event"), (600, 5, 10, "normal"), (250, 12, 3, "heavy"))
        ),
    ],
    "independent": [
        *(
            SharedDraws(kind="independent", units=units, rows=rows, named=named, spread=1.0)
            for units, rows, named in ((400, 6, True), (400, 6, False), (60, 100, True), (60, 100, False))
        ),
        *(
            SharedDraws(kind=kind, units=300, rows=10, spread=1.0, actions=actions)
            for kind in ("adaptive", "drift", "context")
            for actions in (2, 10)
        ),
    ],
    "effects": [
        *(
            SegmentRegime(effect=effect, **form)  # type: ignore[arg-type]
            for effect in ("null", "loser")
            for form in (
                {},
                {"logger": "uneven", "policy": "near"},
                {"choices": "candidates", "actions": 6, "policy": "sure"},
                {"horizon": 3, "policy": "near"},
                {"outcome": "event", "rate": 0.02, "size": 0.9},
            )
        ),
        SegmentRegime(effect="loser", outcome="event", rate=0.005, size=0.9, policy="sure", rows=10_000),
        SegmentRegime(effect="gain", outcome="event", rate=0.02, size=2.0, choices="candidates", actions=10),
        SegmentRegime(effect="loser", outcome="heavy"),
        SegmentRegime(effect="loser", rows=900, size=1.0),
    ],
    "hidden": [
        HiddenLogger(logger="softmax", known=True),
        HiddenLogger(logger="softmax"),
        HiddenLogger(logger="softmax", outcome="event"),
        HiddenLogger(logger="softmax", episodes=500, actions=2),
        HiddenLogger(logger="uniform"),
        HiddenLogger(logger="uniform", actions=34, outcome="event"),
        HiddenLogger(logger="steep", near=0.8),
        HiddenLogger(logger="greedy"),
        HiddenLogger(logger="greedy", episodes=3_000, outcome="event"),
        HiddenLogger(logger="certain", near=0.8),
        HiddenLogger(logger="softmax", episodes=500, horizon=5, near=0.8, known=True),
        HiddenLogger(logger="softmax", episodes=500, horizon=5, near=0.8),
        HiddenLogger(logger="greedy", episodes=500, horizon=5, near=0.8),
        HiddenLogger(logger="softmax", gain=1.0, known=True),
        HiddenLogger(logger="softmax", gain=1.0),
        # loggers that the estimated policy cannot be
        *(HiddenLogger(logger=logger) for logger in ("network", "hidden", "confounded", "secret")),
    ],
    "curved": [
        *(
            CurvedLogger(curve=curve, model="linear", rows=rows, actions=actions)
            for curve in ("linear", "square", "product", "threshold", "corner", "category", "wave")
            for rows, actions in ((1_000, 2), (10_000, 5))
        ),
        *(CurvedLogger(curve=curve, model="none") for curve in ("linear", "square", "threshold")),
        *(
            CurvedLogger(curve=curve, outcome="event", gain=gain, known=known)
            for curve in ("linear", "square", "product", "threshold")
            for gain, known in ((0.0, False), (0.6, False), (0.6, True))
        ),
        CurvedLogger(curve="square", rows=50_000, actions=20, features=8, model="linear"),
    ],
    "better": [
        *(
            Power(better=Regime(episodes=episodes, actions=actions, rate=rate, gain=gain))
            for episodes, actions, rate, gain in (
                (600, 2, 0.2, 1.5),
                (3_000, 2, 0.02, 1.6),
                (2_000, 34, 0.004, 30.0),
                (4_500, 34, 0.02, 4.0),
            )
        ),
        Power(better=Regime(episodes=3_000, actions=4, policy="far", logging="softmax", rate=0.05, gain=1.6)),
        # closer to the logging policy it is worse: what it likes is what the logging policy does
        Power(better=Regime(episodes=6_000, actions=4, policy="near", logging="greedy", rate=0.1, gain=3.0, near=0.1)),
        Power(better=Regime(episodes=800, actions=2, outcome="normal", gain=1.2)),
        Power(better=Regime(episodes=2_000, actions=10, outcome="normal", logging="softmax", policy="far", gain=1.5)),
        Power(better=Regime(episodes=800, actions=2, outcome="heavy", gain=1.5)),
    ],
    "selections": [
        Selection(kind=kind, outcome=outcome) for kind, outcome in product(("columns", "looks"), ("normal", "event"))
    ],
}
"""Kinds of logs by name: every rate, reward, size, logging, policy and horizon is in some of them."""
RESAMPLES = 500
POWER = (
    (34, 0.004, 10.0, (3_000, 4_500, 6_000)),
    (34, 0.004, 3.0, (20_000, 40_000)),
    (2, 0.004, 3.0, (1_000, 2_000, 3_000)),
    (2, 0.2, 1.3, (600, 1_000, 1_500)),
)
"""Actions, rate of events, gain, and numbers of episodes."""


def power(episodes: int, actions: int, rate: float, gain: float, logs: int, seed: int) -> tuple[float, float]:
    """Returns in which share of uniform logs a policy of one action is found to be better: by us, by Fisher's test."""
    rng, significant = np.random.default_rng([seed, episodes]), np.zeros(2)
    for _ in range(logs):
        match = rng.random(episodes) < 1 / actions
        event = rng.random(episodes) < np.where(match, rate * gain, rate)
        weight, reward = (torch.from_numpy(values.astype(float)) for values in (match * actions, event))
        ones = torch.ones_like(reward)
        evaluated = Contributions(total=weight * reward, size=ones, weight=weight, outcome=reward)
        logged = Contributions(total=reward, size=ones, weight=ones, outcome=reward)
        ((low, _),) = intervals([(evaluated, logged)], 0.95)
        table = [[(event & rows).sum(), (~event & rows).sum()] for rows in (match, ~match)]
        significant += low > 0, fisher_exact(table, alternative="greater").pvalue < 0.025
    return tuple(significant / logs)


def many(policies: int, correlation: float, effect: float, logs: int, seed: int) -> tuple[float, float]:
    """Returns in which share of logs the best of several policies is found to be better: level divided, and max.

    Estimates are normal with equal correlations, in units of their error; the first policy has the effect. The critical
    value of the largest deviation comes from RESAMPLES of the estimates.
    """
    rng = np.random.default_rng([seed, policies])

    def drawn(count: int) -> np.ndarray:
        shared = rng.normal(size=(count, 1))
        return np.asarray(correlation**0.5 * shared + (1 - correlation) ** 0.5 * rng.normal(size=(count, policies)))

    rank = math.ceil(0.95 * (RESAMPLES + 1)) - 1  # with which an estimate and its resamples are exchangeable
    critical = [np.sort(np.abs(drawn(RESAMPLES)).max(1))[rank] for _ in range(1_000)]
    largest = (drawn(logs) + effect * (np.arange(policies) == 0)).max(1)
    divided = NormalDist().inv_cdf(1 - 0.025 / policies)
    return float((largest > divided).mean()), float((largest > rng.choice(critical, logs)).mean())


def figures_of(regime: Any, logs: int, seed: int) -> dict[str, float]:
    """Returns the figures of a regime of any kind."""
    measures = {
        SegmentRegime: segment_effects.measure,
        Selection: selections.measure,
        Power: better.measure,
    }
    return measures.get(type(regime), measure)(regime, logs, seed)


if __name__ == "__main__":
    torch.set_num_threads(1)
    options = options_of(__doc__, logs=500, seed=0, only=",".join(REGIMES), like="", processes=2)
    if options.only == "power":
        print("| event | actions | gain | episodes | found | Fisher's exact test |\n|---|---|---|---|---|---|")
        for actions, rate, gain, episodes in ((*kind, episodes) for *kind, sizes in POWER for episodes in sizes):
            share, fisher = power(episodes, actions, rate, gain, options.logs, options.seed)
            print(f"| {rate:.1%} | {actions} | {gain:g} | {episodes:,} | {share:.3f} | {fisher:.3f} |", flush=True)
    elif options.only == "many":
        print("| policies | correlation | effect | level divided | max |\n|---|---|---|---|---|")
        for policies, correlation, effect in product((2, 5, 20), (0.0, 0.5, 0.9), (0.0, 3.0)):
            shares = many(policies, correlation, effect, options.logs, options.seed)
            print(f"| {policies} | {correlation} | {effect:g} | {shares[0]:.3f} | {shares[1]:.3f} |", flush=True)
    else:
        regimes = [regime for kind in options.only.split(",") for regime in REGIMES[kind]]
        regimes = [regime for regime in regimes if options.like in str(regime)]
        heads: list[str] = []
        with ProcessPoolExecutor(options.processes, initializer=partial(torch.set_num_threads, 1)) as pool:
            of_logs = partial(figures_of, logs=options.logs, seed=options.seed)
            for number, figures in enumerate(pool.map(of_logs, regimes)):
                if heads != [*figures]:
                    heads = [*figures]
                    print(f"| regime | {' | '.join(heads)} |\n|{'---|' * (1 + len(heads))}")
                print(f"| {regimes[number]} | {' | '.join(f'{value:.3f}' for value in figures.values())} |", flush=True)
