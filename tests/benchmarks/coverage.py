"""How often do intervals of trustworthy estimates hold the truth, and how often is a decision false?

    python -m tests.benchmarks.coverage [--logs 500] [--seed 0] [--only size] [--processes 2]

Logs of known value (tests/oracles/regimes.py), each evaluated as a run evaluates its held-out episodes. By regime:

trusted   share of logs with at least one trustworthy estimate
cover     the least coverage of any estimator's nominal 95 % interval of the value, and of the difference to the logged
          policy, among logs in which it was called trustworthy
low, high most misses of any estimator on a side: intervals above, and below the truth
ship, not decisions in all logs: where what is done makes no difference (gain 1) both are false

`--only users`: logs with several rows of each user (tests/oracles/users.py).
`--only hidden`: logs whose known propensities are hidden, so that they are estimated (tests/oracles/hidden_loggers.py).
`--only power` finds how often the interval of the difference excludes 0 where a policy is better, beside Fisher's
exact test of the events on matched and on other rows, the best test of two counts.
"""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product

import numpy as np
import torch
from scipy.stats import fisher_exact

from reagent_lite.rl.likelihood import Contributions, intervals
from tests.benchmarks.turns import options_of
from tests.oracles.hidden_loggers import HiddenLogger
from tests.oracles.regimes import AnyRegime, Regime, measure
from tests.oracles.users import Users


def regimes() -> Iterator[tuple[str, AnyRegime]]:
    """Yields kinds of logs by name: every rate, reward, size, logging, policy and horizon is in some of them."""
    sizes = (
        (300, 34, 0.004), (300, 34, 0.02), (300, 2, 0.2), (2_000, 34, 0.004), (2_000, 34, 0.02), (2_000, 200, 0.2),
        (2_000, 2, 0.001), (10_000, 34, 0.001), (10_000, 34, 0.004), (10_000, 200, 0.02), (100_000, 34, 0.001),
        (100_000, 200, 0.004),
    )  # fmt: skip
    for episodes, actions, rate in sizes:
        kind = "large" if episodes > 10_000 else "size"
        yield kind, Regime(episodes=episodes, actions=actions, rate=rate)
    for logging, policy in product(("uniform", "softmax", "greedy"), ("equal", "near", "far")):
        yield "policy", Regime(episodes=2_000, logging=logging, policy=policy)
        yield "policy", Regime(episodes=10_000, actions=2, logging=logging, policy=policy, rate=0.004)
    for outcome in ("cost", "normal", "heavy", "heavy cost", "purchase"):
        yield "outcome", Regime(episodes=300, actions=2, policy="near", outcome=outcome)
        yield "outcome", Regime(episodes=2_000, outcome=outcome)
        yield "outcome", Regime(episodes=2_000, logging="greedy", policy="far", outcome=outcome)
    for (horizon, near), outcome in product(
        ((5, 0.8), (5, 0.5), (50, 0.98), (50, 0.9)), ("event", "cost", "normal", "heavy")
    ):
        yield "steps", Regime(episodes=2_000, actions=4, policy="near", near=near, outcome=outcome, horizon=horizon)
    yield "steps", Regime(episodes=300, actions=2, policy="near", outcome="normal", horizon=5)
    yield "steps", Regime(episodes=10_000, actions=4, logging="softmax", policy="near", near=0.5, horizon=5)
    for episodes, gain, actions in ((2_000, 30, 34), (10_000, 10, 34), (10_000, 3, 2), (10_000, 3, 34)):
        yield "gain", Regime(episodes=episodes, actions=actions, rate=0.004, gain=gain)
    yield "gain", Regime(episodes=2_000, actions=4, policy="near", near=0.5, horizon=5, gain=10)
    for together, (users, rows) in product((False, True), ((1_000, 3), (200, 20), (50, 100))):
        yield "users", Users(users=users, rows=rows, together=together)
    yield from (("hidden", regime) for regime in hidden_regimes())


def hidden_regimes() -> Iterator[HiddenLogger]:
    """Yields kinds of logs without propensities, first those of loggers that the estimated policy can be."""
    yield HiddenLogger(logger="softmax", known=True)
    yield HiddenLogger(logger="softmax")
    yield HiddenLogger(logger="softmax", outcome="event")
    yield HiddenLogger(logger="softmax", episodes=500, actions=2)
    yield HiddenLogger(logger="uniform")
    yield HiddenLogger(logger="uniform", actions=34, outcome="event")
    yield HiddenLogger(logger="steep", near=0.8)
    yield HiddenLogger(logger="greedy")
    yield HiddenLogger(logger="greedy", episodes=3_000, outcome="event")
    yield HiddenLogger(logger="certain", near=0.8)
    yield HiddenLogger(logger="softmax", episodes=500, horizon=5, near=0.8, known=True)
    yield HiddenLogger(logger="softmax", episodes=500, horizon=5, near=0.8)
    yield HiddenLogger(logger="greedy", episodes=500, horizon=5, near=0.8)
    yield HiddenLogger(logger="softmax", gain=1.0, known=True)
    yield HiddenLogger(logger="softmax", gain=1.0)
    for logger in ("network", "hidden", "confounded", "secret"):
        yield HiddenLogger(logger=logger)


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
    share, fisher = significant / logs
    return float(share), float(fisher)


def show_power(logs: int, seed: int) -> None:
    """Prints the table of power."""
    print("| event | actions | gain | episodes | found | Fisher's exact test |\n|---|---|---|---|---|---|")
    for actions, rate, gain, sizes in (
        (34, 0.004, 10.0, (3_000, 4_500, 6_000)),
        (34, 0.004, 3.0, (20_000, 40_000)),
        (2, 0.004, 3.0, (1_000, 2_000, 3_000)),
        (2, 0.2, 1.3, (600, 1_000, 1_500)),
    ):
        for episodes in sizes:
            share, fisher = power(episodes, actions, rate, gain, logs, seed)
            print(f"| {rate:.1%} | {actions} | {gain:g} | {episodes:,} | {share:.3f} | {fisher:.3f} |", flush=True)


def described(regime: AnyRegime) -> str:
    """Returns a regime in words."""
    if isinstance(regime, HiddenLogger):
        steps = f", {regime.horizon} steps" if regime.horizon > 1 else ""
        gain = f", gain {regime.gain:g}" if regime.gain else ""
        return (
            f"{'known ' if regime.known else ''}{regime.logger}, {regime.actions} actions, {regime.episodes:,} episodes"
            f"{steps}, {regime.outcome}, near {regime.near:g}{gain}"
        )
    if isinstance(regime, Users):
        counted = "each user an episode, gamma 0" if regime.together else "each row an episode"
        return f"{regime.users:,} users, {regime.rows} rows each, {counted}"
    assert isinstance(regime, Regime)
    rate = f" {regime.rate:.1%}" if regime.sparse else ""
    steps = f", {regime.horizon} steps" if regime.horizon > 1 else ""
    near = f" {regime.near:g}" if regime.policy == "near" else ""
    gain = f", gain {regime.gain:g}" if regime.gain != 1 else ""
    return (
        f"{regime.outcome}{rate}, {regime.actions} actions, {regime.episodes:,} episodes{steps}, {regime.logging}, "
        f"{regime.policy}{near}{gain}"
    )


def main() -> None:
    """Prints the table."""
    torch.set_num_threads(1)
    options = options_of(__doc__, logs=500, seed=0, only="", processes=2)
    if options.only == "power":
        show_power(options.logs, options.seed)
        return
    chosen = [regime for kind, regime in regimes() if not options.only or kind in options.only.split(",")]
    header: list[str] = []
    with ProcessPoolExecutor(options.processes, initializer=partial(torch.set_num_threads, 1)) as pool:
        for regime, figures in zip(
            chosen, pool.map(partial(measure, logs=options.logs, seed=options.seed), chosen), strict=True
        ):
            if not header:
                header = ["regime", *figures]
                print(f"| {' | '.join(header)} |\n|{'---|' * len(header)}", flush=True)
            print(f"| {described(regime)} | {' | '.join(f'{value:.3f}' for value in figures.values())} |", flush=True)


if __name__ == "__main__":
    main()
