"""Every log on the gridworld for every policy: whatever is called trustworthy holds the exact value.

Logs are epsilon-greedy with four epsilons, policies with six. Random logs hardly ever go where a greedy policy goes
twice in a row, and greedy logs lack the long episodes of random policies: both must be said, not estimated.
"""

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
from oracles import gridworld
from oracles.pages import gridworld_page, noisy_q
from oracles.repeated import Study
from scipy.stats import binom
from torch import Generator

from reagent_lite.config.evaluation import EvaluationConfig
from reagent_lite.evaluation.cpe import CPEResult, Estimate, evaluate_page
from reagent_lite.evaluation.verdict import Verdict

LOGGED = (1.0, 0.8, 0.5, 0.2)
EVALUATED = (1.0, 0.8, 0.5, 0.2, 0.05, 0.0)
# Their intervals leave out the model's error, and with one start state have no width: never called trustworthy.
MODEL_ALONE = ("Direct_Method_Reward", "Fitted_Q_Evaluation")
ROBUST = ("Weighted_Sequential_Doubly_Robust", "MAGIC")
HOPELESS = [(1.0, 0.2), (1.0, 0.05), (1.0, 0.0), (0.8, 0.0)]
# effective episodes, of 1000: 80 and more
COVERED = [
    *((1.0, policy) for policy in (1.0, 0.8)), *((0.8, policy) for policy in (1.0, 0.8, 0.5)),
    *((0.5, policy) for policy in (0.8, 0.5, 0.2, 0.05)), *((0.2, policy) for policy in (0.2, 0.05, 0.0)),
]  # fmt: skip


def judged(logged: float, evaluated: float, seed: int, config: EvaluationConfig) -> CPEResult:
    """1000 episodes, and a value model off by 0.1."""
    rng = np.random.default_rng([seed, round(100 * logged), round(100 * evaluated)])
    policy = gridworld.epsilon_greedy(evaluated)
    log = gridworld.simulate(gridworld.epsilon_greedy(logged), 1000, rng)
    page = gridworld_page(log, policy, noisy_q(policy, 0.1, rng))
    return evaluate_page(page, gamma=gridworld.GAMMA, config=config, generator=Generator().manual_seed(seed))


def estimates(result: CPEResult, logged: float, evaluated: float) -> Iterator[tuple[Estimate, float]]:
    """Each estimate with its exact value."""
    exact = Study(
        behaviour=logged, evaluated=evaluated, num_episodes=1000, start=gridworld.fixed_start(), model_error=0.1
    )
    outcome = result.outcomes[0]
    for family, truth in ((outcome.one_step, exact.mean_reward), (outcome.sequential, exact.mean_return)):
        yield from ((estimate, truth) for estimate in family.estimates)


def missed(estimate: Estimate, truth: float) -> bool:
    return not estimate.figure.low <= truth <= estimate.figure.high


def count_misses(seeds: range, resamples: int) -> dict[tuple[str, bool], list[bool]]:
    """By estimator and whether it is called trustworthy: whether the 95 % interval misses, for each pair and seed."""
    config = EvaluationConfig(bootstrap_resamples=resamples)
    found: dict[tuple[str, bool], list[bool]] = {}
    for logged, evaluated, seed in product(LOGGED, EVALUATED, seeds):
        for estimate, truth in estimates(judged(logged, evaluated, seed, config), logged, evaluated):
            key = (estimate.name, estimate.verdict is Verdict.TRUSTWORTHY)
            found.setdefault(key, []).append(missed(estimate, truth))
    return found


def bar(count: int) -> int:
    """Misses that independent intervals exceed once in a thousand times: 5 of 24, 35 of 400."""
    return int(binom.ppf(0.999, count, 0.05))


@pytest.mark.parametrize("evaluated", EVALUATED)
@pytest.mark.parametrize("logged", LOGGED)
def test_verdicts_follow_the_overlap(logged: float, evaluated: float) -> None:
    result = judged(logged, evaluated, 0, EvaluationConfig(bootstrap_resamples=300))
    for estimate, _ in estimates(result, logged, evaluated):
        if estimate.name in MODEL_ALONE:
            assert estimate.verdict is not Verdict.TRUSTWORTHY, estimate
        elif "Reward" in estimate.name:  # weights of rows are 5 at most, and rows many
            assert estimate.verdict is Verdict.TRUSTWORTHY, estimate
        elif (logged, evaluated) in HOPELESS:
            assert estimate.verdict is Verdict.DO_NOT_USE, estimate
        elif (logged, evaluated) in COVERED and estimate.name in ROBUST:
            # wide, where the mean of the weights is off 1 by chance
            assert estimate.verdict is not Verdict.DO_NOT_USE, estimate


def test_trustworthy_intervals_of_all_pairs_hold_the_exact_values() -> None:
    found = count_misses(range(1), resamples=1000)
    for (name, trustworthy), misses in found.items():
        assert not trustworthy or sum(misses) <= bar(len(misses)), name
    assert all(len(found[name, True]) >= 10 for name in ROBUST)


@pytest.mark.slow
def test_trustworthy_intervals_miss_no_oftener_than_their_level_says() -> None:
    """480 pages. Prints the table of RESULTS.md (pytest -s)."""
    found = count_misses(range(20), resamples=500)
    print("\n| estimator | trustworthy | of these missed | bar | wide, or not to be used | of these missed |")
    print("|" + "---|" * 6)
    trusted = {name: misses for (name, trustworthy), misses in found.items() if trustworthy}
    for name, misses in trusted.items():
        rest = found.get((name, False), [])
        print(f"| {name} | {len(misses)} | {sum(misses)} | {bar(len(misses))} | {len(rest)} | {sum(rest)} |")
    for name, misses in trusted.items():
        assert len(misses) >= 200, name
        assert sum(misses) <= bar(len(misses)), name
