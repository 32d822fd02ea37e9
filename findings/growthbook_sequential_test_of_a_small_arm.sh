#!/usr/bin/env bash
# GrowthBook's sequential test says "different" too often if one arm is small and its outcome rare
#
# Expected  SequentialTwoSidedTTest holds its level at every look: of experiments without any difference at most 5 % are
#           ever called different, however often one looks. The guess before the first run: 10 % in the small arm.
# True      With half of the units in each arm it does (2 %). With 2 % of 100,000 units in the new arm and an outcome of
#           5 %, looked at every 500 units, 10 % are called different: the interval is asymptotic, and looks begin when
#           the small arm has ten units and one outcome or two, where the estimated variance is far too small. If looks
#           begin after 10,000 units it is 5 %, after 50,000 1 %.
# Matters   a new policy begins with a share of 2 %, and clicks or purchases are rare: the first looks are the dangerous
#           ones. A bounded outcome has sequences by betting that hold from the first unit on.
# Versions  gbstats 0.8.0, numpy and scipy as it takes them, Python 3.11, x86-64
# Date      2026-11-28
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check gbstats==0.8.0 2>/dev/null
"$folder/venv/bin/python" - <<'P'
from importlib.metadata import version

import numpy as np
from gbstats.frequentist.tests import SequentialConfig, SequentialTwoSidedTTest
from gbstats.models.statistics import SampleMeanStatistic

RUNS, UNITS, EVERY, RATE = 1_000, 100_000, 500, 0.05
CONFIG = SequentialConfig(difference_type="absolute", alpha=0.05)
print("gbstats", version("gbstats"), "numpy", version("numpy"), "scipy", version("scipy"))


def ever_different(share, first, seed):
    """Returns the share of runs without a difference that a look after `first` units calls different."""
    random = np.random.default_rng(seed)
    told_apart = 0
    for _ in range(RUNS):
        new = random.binomial(EVERY, share, UNITS // EVERY)
        units = np.cumsum([EVERY - new, new], axis=1)
        total = np.cumsum([random.binomial(EVERY - new, RATE), random.binomial(new, RATE)], axis=1)
        for look in range(UNITS // EVERY):
            if (look + 1) * EVERY < first or not total[:, look].all():
                continue
            arms = [
                SampleMeanStatistic(n=int(n), sum=float(s), sum_squares=float(s))
                for n, s in zip(units[:, look], total[:, look], strict=True)
            ]
            result = SequentialTwoSidedTTest(*arms, CONFIG).compute_result()
            if result.error_message is None and (result.ci[0] > 0 or result.ci[1] < 0):
                told_apart += 1
                break
    return told_apart / RUNS


half = ever_different(0.5, 0, 1)
small = {first: ever_different(0.02, first, 2) for first in (0, 10_000, 50_000)}
print(f"ever called different, of {RUNS:,} without a difference: arms of equal size {half:.3f}")
print("2 % of the units in the new arm, by the first look:", {f"{first:,}": share for first, share in small.items()})
assert half <= 0.06
assert small[0] > 0.08, "the small arm holds its level now"
assert small[10_000] <= 0.07 and small[50_000] <= 0.03
print("as described: the level is broken where one arm is small and its outcome rare")
P
