"""Coverage of nominal 95 % intervals of 500 logs whose exact value is known.

At a coverage of 0.95, the share among 500 has a standard deviation of 0.0097; 0.92 to 0.98 is three of them.
"""

import numpy as np
import pytest
from oracles import gridworld
from oracles.repeated import Study, repetitions, resample_counts
from torch import Generator

from reagent_lite.rl.bootstrap import percentile_interval
from reagent_lite.rl.estimators import ESTIMATORS, LOGGED
from reagent_lite.rl.likelihood import intervals
from reagent_lite.rl.sums import EpisodeSums

# Resamples show what another log would have said, never what the model has wrong in every log alike.
MODEL_ALONE = ("Direct_Method_Reward", "Fitted_Q_Evaluation")
# DRos takes 1 % off the largest weights, towards the reward model: a bias, and 1 % of all where the model says 0.
SHRUNK_TO_NOTHING = ("no model", "Shrunk_Doubly_Robust_Reward")
REPETITIONS = 500
# a constant model has an interval without width, which rounding must not empty
ROUNDING = 1e-9


def study(start: gridworld.Array, model_error: float | None) -> Study:
    """300 episodes, epsilon 0.5, for a policy of epsilon 0.3: weights of rows 0.6 to 1.2, 160 effective episodes."""
    return Study(behaviour=0.5, evaluated=0.3, num_episodes=300, start=start, model_error=model_error)


def coverage(of: Study) -> dict[str, float]:
    """Share of intervals that contain the exact value, for estimators and for the logging policy's means."""
    logging = Study(
        behaviour=of.behaviour, evaluated=of.behaviour, num_episodes=of.num_episodes, start=of.start, model_error=None
    )
    truths = {
        name: of.mean_return if estimator.sequential else of.mean_reward for name, estimator in ESTIMATORS.items()
    }
    truths |= {"mean_reward": logging.mean_reward, "mean_return": logging.mean_return}
    estimators = [estimator for estimator in (*ESTIMATORS.values(), *LOGGED) if estimator.name in truths]
    rng = np.random.default_rng(0)
    generator = Generator().manual_seed(0)
    hits = dict.fromkeys(truths, 0)
    for episodes in repetitions(of, REPETITIONS, rng):
        counts = resample_counts(of.num_episodes, 500, generator)
        log = EpisodeSums.of([[episodes]])
        samples = log.estimates([counts], estimators)[0]
        evidence = {
            estimator.name: estimator.evidence(log, 0) for estimator in estimators if estimator.evidence is not None
        }
        ends = dict(zip(evidence, intervals([(estimator, None) for estimator in evidence.values()], 0.95), strict=True))
        for name in truths:
            low, high = ends[name] if name in ends else percentile_interval(samples[name][1:], 0.95)
            hits[name] += low - ROUNDING <= truths[name] <= high + ROUNDING
    return {name: count / REPETITIONS for name, count in hits.items()}


def holds(share: float) -> bool:
    return 0.92 <= share <= 0.99


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_intervals_of_every_estimator() -> None:
    """Prints the table of RESULTS.md (pytest -s)."""
    fixed = gridworld.fixed_start()
    drawn = gridworld.any_start()
    tables = {
        "no model": coverage(study(fixed, None)),
        "off by 1": coverage(study(fixed, 1.0)),
        "off by 0.5": coverage(study(fixed, 0.5)),
        "off by 0.1": coverage(study(fixed, 0.1)),
        "exact, drawn starts": coverage(study(drawn, 0.0)),
    }
    print("\n| estimator | " + " | ".join(tables) + " |\n|" + "---|" * (1 + len(tables)))
    for name in tables["no model"]:
        print(f"| {name} | " + " | ".join(f"{table[name]:.3f}" for table in tables.values()) + " |")
    for title, table in tables.items():
        for name, share in table.items():
            if name not in MODEL_ALONE and (title, name) != SHRUNK_TO_NOTHING:
                assert holds(share), (title, name, share)
    # a model alone is as good as the model
    for name in MODEL_ALONE:
        assert holds(tables["exact, drawn starts"][name])
        for title in ("no model", "off by 1", "off by 0.5"):
            assert tables[title][name] < 0.5, (title, name)
