"""Coverage of nominal 95 % intervals of 500 logs whose exact value is known.

At a coverage of 0.95, the share among 500 has a standard deviation of 0.0097; 0.92 to 0.98 is three of them.
"""

from dataclasses import replace

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
# 300 episodes, epsilon 0.5, for a policy of epsilon 0.3: weights of rows 0.6 to 1.2, 160 effective episodes
NO_MODEL = Study(behavior=0.5, evaluated=0.3, num_episodes=300, start=gridworld.fixed_start(), model_error=None)
STUDIES = {
    "no model": NO_MODEL,
    "off by 1": replace(NO_MODEL, model_error=1.0),
    "off by 0.5": replace(NO_MODEL, model_error=0.5),
    "off by 0.1": replace(NO_MODEL, model_error=0.1),
    "exact, drawn starts": replace(NO_MODEL, model_error=0.0, start=gridworld.any_start()),
}


def coverage(study: Study) -> dict[str, float]:
    """Share of intervals that contain the exact value, for estimators and for the logging policy's means."""
    logging = replace(study, evaluated=study.behavior)
    truths = {
        **{name: study.mean_return if e.sequential else study.mean_reward for name, e in ESTIMATORS.items()},
        "mean_reward": logging.mean_reward, "mean_return": logging.mean_return,
    }  # fmt: skip
    estimators = [estimator for estimator in (*ESTIMATORS.values(), *LOGGED) if estimator.name in truths]
    generator = Generator().manual_seed(0)
    hits = dict.fromkeys(truths, 0)
    for episodes in repetitions(study, REPETITIONS, np.random.default_rng(0)):
        log = EpisodeSums.of([[episodes]])
        samples = log.estimates([resample_counts(study.num_episodes, 500, generator)], estimators)[0]
        evidence = {e.name: (e.evidence(log, 0), None) for e in estimators if e.evidence is not None}
        ends = dict(zip(evidence, intervals(list(evidence.values()), 0.95), strict=True))
        for name, truth in truths.items():
            low, high = ends[name] if name in ends else percentile_interval(samples[name][1:], 0.95)
            hits[name] += low - ROUNDING <= truth <= high + ROUNDING
    return {name: count / REPETITIONS for name, count in hits.items()}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_intervals_of_every_estimator() -> None:
    """Prints the table of RESULTS.md (pytest -s)."""
    tables = {title: coverage(study) for title, study in STUDIES.items()}
    print("\n| estimator | " + " | ".join(tables) + " |\n|" + "---|" * (1 + len(tables)))
    for name in tables["no model"]:
        print(f"| {name} | " + " | ".join(f"{table[name]:.3f}" for table in tables.values()) + " |")
    shares = {(title, name): share for title, table in tables.items() for name, share in table.items()}
    # a model alone is as good as the model
    wrong = {(title, name) for title in ("no model", "off by 1", "off by 0.5") for name in MODEL_ALONE}
    doubtful = {("off by 0.1", name) for name in MODEL_ALONE} | {SHRUNK_TO_NOTHING}
    assert [case for case in wrong if shares[case] >= 0.5] == []
    assert [case for case in shares.keys() - wrong - doubtful if not 0.92 <= shares[case] <= 0.99] == []
