"""Every log of the gridworld with every policy: trustworthy intervals contain the exact value.

Logs are epsilon-greedy with four epsilons, policies with six. Random logs hardly ever take a greedy policy's path
for two steps, and greedy logs lack the long episodes of random policies: verdicts must say so.
"""

from collections import defaultdict
from itertools import product

import numpy as np
import pytest
from helpers.pages import gridworld_page, noisy_q
from oracles import gridworld
from oracles.repeated import Study
from scipy.stats import binom
from torch import Generator

from reagent_lite.config.evaluation import EvaluationConfig
from reagent_lite.evaluation.cpe import Estimate, evaluate_page
from reagent_lite.evaluation.verdict import Verdict
from reagent_lite.rl.estimators import ESTIMATORS

# Their intervals leave out the model's error, and with one start state have no width: never called trustworthy.
ROBUST = ("Sequential_Doubly_Robust", "Weighted_Sequential_Doubly_Robust")
HOPELESS = [(1.0, 0.2), (1.0, 0.05), (1.0, 0.0), (0.8, 0.0)]
# effective episodes, of 1000: 80 and more
COVERED = [
    *((1.0, policy) for policy in (1.0, 0.8)), *((0.8, policy) for policy in (1.0, 0.8, 0.5)),
    *((0.5, policy) for policy in (0.8, 0.5, 0.2, 0.05)), *((0.2, policy) for policy in (0.2, 0.05, 0.0)),
]  # fmt: skip


Case = tuple[tuple[float, float], Estimate, float]
"""Epsilons of log and policy, an estimate of the policy's value from the log, and the exact value."""


def cases(seeds: range, resamples: int = 500) -> list[Case]:
    """Every estimate of every pair: 1000 episodes, and a value model off by 0.1."""
    case_list = []
    for logged, evaluated, seed in product((1.0, 0.8, 0.5, 0.2), (1.0, 0.8, 0.5, 0.2, 0.05, 0.0), seeds):
        rng = np.random.default_rng([seed, round(100 * logged), round(100 * evaluated)])
        policy = gridworld.epsilon_greedy(evaluated)
        # random episodes are long: cut at 200 steps, rows are 0.7 standard errors worth less than the exact value
        log = gridworld.simulate(gridworld.epsilon_greedy(logged), 1000, rng, max_steps=1000)
        page = gridworld_page(log, policy, noisy_q(policy, 0.1, rng))
        (outcome,) = evaluate_page(page, gamma=gridworld.GAMMA, config=EvaluationConfig(bootstrap_resamples=resamples),
                                   generator=Generator().manual_seed(seed)).outcomes  # fmt: skip
        exact = Study(
            behavior=logged, evaluated=evaluated, num_episodes=1000, start=gridworld.fixed_start(), model_error=0.1
        )
        case_list += [
            ((logged, evaluated), estimate, truth)
            for family, truth in ((outcome.one_step, exact.mean_reward), (outcome.sequential, exact.mean_return))
            for estimate in family.estimates
        ]
    return case_list


def misses(case_list: list[Case]) -> dict[tuple[str, bool], list[bool]]:
    """By estimator and whether it is trustworthy: whether each 95 % interval misses the exact value."""
    result = defaultdict(list)
    for _, estimate, truth in case_list:
        missed = not estimate.figure.low <= truth <= estimate.figure.high
        result[estimate.name, estimate.verdict is Verdict.TRUSTWORTHY].append(missed)
    return result


def bar(count: int) -> int:
    """Number of misses that independent intervals exceed with probability 0.001: 5 of 24, 35 of 400."""
    return int(binom.ppf(0.999, count, 0.05))


def test_verdicts_follow_the_overlap_and_trustworthy_intervals_hold_the_exact_values() -> None:
    case_list = cases(range(1), 100)  # which trustworthy intervals do not come from
    for epsilons, estimate, _ in case_list:
        case = (epsilons, estimate.name, estimate.verdict)
        if ESTIMATORS[estimate.name].evidence is None:
            assert estimate.verdict is not Verdict.TRUSTWORTHY, case
        elif "Reward" in estimate.name:  # weights of rows are 5 at most, and rows many
            assert estimate.verdict is Verdict.TRUSTWORTHY, case
        elif epsilons in HOPELESS:
            assert estimate.verdict is Verdict.DO_NOT_USE, case
            assert "effective episode" in estimate.reason
        elif epsilons in COVERED and estimate.name in ROBUST:  # support only, as the mean weight may be off 1 by chance
            assert estimate.verdict is not Verdict.DO_NOT_USE, case
    counted = misses(case_list)
    assert all(sum(missed) <= bar(len(missed)) for (_, trustworthy), missed in counted.items() if trustworthy), counted
    assert all(len(counted[name, True]) >= 10 for name in ROBUST)


@pytest.mark.slow
def test_trustworthy_intervals_miss_no_oftener_than_their_level_says() -> None:
    """480 pages. Prints the table of RESULTS.md (pytest -s)."""
    by_name = misses(cases(range(20)))
    print("\n| estimator | trustworthy | of these missed | bar | support only, or not to be used | of these missed |")
    print("|" + "---|" * 6)
    for name, trusted in [(name, missed) for (name, trustworthy), missed in by_name.items() if trustworthy]:
        rest = by_name.get((name, False), [])
        print(f"| {name} | {len(trusted)} | {sum(trusted)} | {bar(len(trusted))} | {len(rest)} | {sum(rest)} |")
        assert len(trusted) >= 200, name
        assert sum(trusted) <= bar(len(trusted)), name
