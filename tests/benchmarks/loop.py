"""Do the intervals that a run promises hold what its policy then earns in service, lap after lap?

    python -m tests.benchmarks.loop [--loops 100] [--seed 0] [--rows 600] [--processes 1]

A shop of known truth (tests/oracles/shop.py) as README has it: a CSV, `inspect`, a model, a server, and the next model
on the CSV and the served log, three times over. By lap:

promised     mean of the promised intervals' ends: the narrowest trustworthy estimate of each run
holds truth  share of these intervals that hold the expected reward of the exported policy
holds served the same for the mean reward of the decisions that it served, which varies by itself
none         runs without a trustworthy estimate
"""

import logging
import os
import tempfile
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from tests.benchmarks.turns import options_of
from tests.oracles.shop import Lap, loop

LAPS = 3


def one_loop(rows: int, seed: int) -> list[Lap]:
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        rng = np.random.default_rng(seed)
        return list(loop(Path(folder), rng, sold_rows=rows, served_rows=rows, laps=LAPS))


def main() -> None:
    options = options_of(__doc__, loops=100, seed=0, rows=600, processes=1)
    seeds = range(options.seed, options.seed + options.loops)
    with ProcessPoolExecutor(options.processes) as pool:
        loops = list(pool.map(partial(one_loop, options.rows), seeds))
    print("| lap | loops | promised | served mean | truth | holds truth | holds served | ship | none |")
    print("|---|---|---|---|---|---|---|---|---|")
    for number, laps in enumerate(zip(*loops, strict=True), 1):
        low, high, truth, served = (np.array([getattr(lap, name) for lap in laps]) for name in Lap.__slots__[:4])
        given = ~np.isnan(low)
        holds = [((low <= value) & (value <= high))[given].mean() for value in (truth, served)]
        ship = np.mean([lap.choice == "ship" for lap in laps])
        print(
            f"| {number} | {len(laps)} | {low[given].mean():.3f} to {high[given].mean():.3f} | {served.mean():.3f} "
            f"| {truth.mean():.3f} | {holds[0]:.2f} | {holds[1]:.2f} | {ship:.2f} | {int((~given).sum())} |"
        )


if __name__ == "__main__":
    main()
