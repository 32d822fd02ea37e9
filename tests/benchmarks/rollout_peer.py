"""GrowthBook's sequential test on the counts of two arms, run by tests.benchmarks.rollout where gbstats is.

    python rollout_peer.py FILE.npz

FILE has `arms` [L, 2, 3, R]: units, sum and sum of squares of the current and the new policy's outcomes in R runs at L
looks. It gets `told` [2, L, R]: whether the new policy is said to be better, and worse.
"""

import sys

import numpy as np
from gbstats.frequentist.tests import SequentialConfig, SequentialTwoSidedTTest
from gbstats.models.statistics import SampleMeanStatistic


def main(file: str) -> None:
    arms = np.load(file)["arms"]
    told = np.zeros((2, len(arms), arms.shape[-1]), bool)
    config = SequentialConfig(difference_type="absolute", alpha=0.05)
    for look, of_look in enumerate(arms):
        for run in range(arms.shape[-1]):
            current, new = (
                SampleMeanStatistic(n=int(units), sum=float(total), sum_squares=float(squares))
                for units, total, squares in of_look[..., run]
            )
            result = SequentialTwoSidedTTest(current, new, config).compute_result()
            if result.error_message is None:
                told[0, look, run] = result.ci[0] > 0
                told[1, look, run] = result.ci[1] < 0
    np.savez(file, told=told)


if __name__ == "__main__":
    main(sys.argv[1])
