"""How often is a difference of two served policies falsely said, and after how many units is a true one known?

    python -m tests.benchmarks.rollout [--runs 200] [--units 100000] [--seed 0] [--only alarms]

`--only alarms`: policies of equal value, looked at after every unit. Share of runs with a false alarm, of level 0.05,
by the product's sequences, by arms (the difference of returns, weighted by shares) with the same bets, and by a
z-test of arms from unit 100 on. With 200 runs the standard error of a share of 0.05 is 0.015.

`--only power`: units until a true lift or harm is known; median and 90th percentile, "-" where fewer runs know it when
95 % of the runs of the product's sequences and of the z-test do. The fixed z-test of arms is that of level 0.05 and
power 0.9; O'Brien-Fleming has five looks, the largest and the mean number of units.

`--only peers`: the same by GrowthBook's sequential test of arms (gbstats, in an environment of its own under outputs/),
an asymptotic confidence sequence, looked at every 500 units; false alarms and units that a true difference takes.

`--only propensities`: 200 logs of 400 episodes of four steps whose units stay with one of two policies. The value of a
third policy by the product's IPS, PDIS and SDR, in standard errors from the truth, with the server's propensity, with
that of the unit's own policy, and with the mixture of each step; where both policies take every action, and where one
never takes some.
"""

import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from reagent_lite.evaluation.evaluation_rows import EvaluationRows, tables_of
from reagent_lite.rl.estimators import inverse_propensity, per_decision, sequential_doubly_robust
from reagent_lite.rl.sequences import FRACTIONS, LEAST_INFORMATIVE, AsymptoticSequence, grow
from reagent_lite.rl.two_policies import difference_bounds, relative_difference
from tests.benchmarks.peers import interpreter
from tests.benchmarks.turns import options_of
from tests.helpers.rollouts import CLICK, CURRENT, NEW, THIRD, play, value
from tests.helpers.tables import estimates

Floats = NDArray[np.float64]
LEVEL = 0.05
AT_ONCE = 500
EPSILON = 0.1
GREEDY, OTHER = 1 - EPSILON / 2, EPSILON / 2


@dataclass
class Units:
    """[n, R] units of R runs: policy, log ratio and return."""

    is_new: Floats
    log_ratio: Floats
    outcome: Floats


World = Callable[[np.random.Generator, NDArray[np.int64], Floats], Units]
"""Draws units, given the numbers of the units, [n, 1], and their shares [n, R]."""


def decisions(
    rng: np.random.Generator, share: Floats, differ: float, rate: Callable[[Floats, Floats], Any]
) -> tuple[Floats, Floats, Floats]:
    """Returns whether the new policy decides, the log ratio, and the result of `rate`."""
    is_new = rng.random(share.shape) < share
    differs = rng.random(share.shape) < differ
    greedy = rng.random(share.shape) < GREEDY
    second = np.where(differs & is_new, greedy, ~greedy)
    log_ratio = np.where(differs, np.where(second, 1, -1) * np.log(GREEDY / OTHER), 0.0)
    return is_new, log_ratio, rate(differs, second)


def binary(differ: float, base: float, lift: float = 0.0, *, cancel: bool = False, wave: float = 0.0) -> World:
    """Clicks; the new action adds `lift`; with `cancel` it adds 0.1 in half of the contexts, and costs it in others."""

    def draw(rng: np.random.Generator, number: NDArray[np.int64], share: Floats) -> Units:
        def rate(differs: Floats, second: Floats) -> Any:
            sign = np.where(rng.random(share.shape) < 0.5, 0.1, -0.1) if cancel else lift
            return base + wave * np.sin(number / 5000) + sign * (differs & second)

        is_new, log_ratio, rates = decisions(rng, share, differ, rate)
        return Units(is_new, log_ratio, (rng.random(share.shape) < rates).astype(float))

    return draw


def revenue(differ: float, largest: float) -> World:
    """One unit in twenty earns a lognormal amount, cut at `largest`."""

    def draw(rng: np.random.Generator, number: NDArray[np.int64], share: Floats) -> Units:
        is_new, log_ratio, _ = decisions(rng, share, differ, lambda differs, second: 0)
        amount = np.minimum(rng.lognormal(1.0, 1.0, share.shape), largest)
        return Units(is_new, log_ratio, np.where(rng.random(share.shape) < 0.05, amount, 0.0))

    return draw


def episodes(steps: int, differ: float, rate: float) -> World:
    """Episodes of clicks in every step, which actions do not change; only counts are drawn."""

    def draw(rng: np.random.Generator, number: NDArray[np.int64], share: Floats) -> Units:
        is_new = rng.random(share.shape) < share
        differing = rng.binomial(steps, differ, share.shape)
        second = rng.binomial(differing, np.where(is_new, GREEDY, OTHER))
        log_ratio = (2 * second - differing) * np.log(GREEDY / OTHER)
        return Units(is_new, log_ratio, rng.binomial(steps, rate, share.shape).astype(float))

    return draw


def ends_at_a_click(steps: int, rate: float) -> World:
    """Episodes that end with their first click, which is the return."""

    def draw(rng: np.random.Generator, number: NDArray[np.int64], share: Floats) -> Units:
        is_new = rng.random(share.shape) < share
        length = np.minimum(rng.geometric(rate, share.shape), steps)
        clicked = (length < steps) | (rng.random(share.shape) < rate)
        second = rng.binomial(length, np.where(is_new, GREEDY, OTHER))
        return Units(is_new, (2 * second - length) * np.log(GREEDY / OTHER), clicked.astype(float))

    return draw


def constant(share: float) -> Callable[[NDArray[np.int64], Floats], Any]:
    return lambda number, total: np.full((len(number), total.shape[-1]), share)


def growing(number: NDArray[np.int64], total: Floats) -> Any:
    return np.where(number < 2000, 0.02, np.where(number < 10_000, 0.1, 0.5)) * np.ones(total.shape[-1])


def adaptive(number: NDArray[np.int64], total: Floats) -> Any:
    """0.5 while the new policy looks better, else 0.05: by earlier units alone."""
    return np.where(total > 0, 0.5, 0.05) * np.ones((len(number), 1))


@dataclass
class Regime:
    name: str
    world: World
    share: Callable[[NDArray[np.int64], Floats], Any]
    bounds: tuple[float, float] | None = (0, 1)


REGIMES = (
    Regime("binary 0.3, p 0.5, all differ", binary(1, 0.3), constant(0.5)),
    Regime("binary 0.3, p 0.5, a tenth differs", binary(0.1, 0.3), constant(0.5)),
    Regime("binary 0.3, p 0.1, a tenth differs", binary(0.1, 0.3), constant(0.1)),
    Regime("binary 0.05, p 0.02, all differ", binary(1, 0.05), constant(0.02)),
    Regime("binary 0.02, p 0.05, 0.3 differ", binary(0.3, 0.02), constant(0.05)),
    Regime("binary 0.3, p 0.02, 0.1, 0.5, all differ", binary(1, 0.3), growing),
    Regime("binary 0.3, p by earlier units, all differ", binary(1, 0.3), adaptive),
    Regime("binary 0.3, p 0.1, effects that cancel", binary(1, 0.3, cancel=True), constant(0.1)),
    Regime("binary 0.1 to 0.5, drifting, p 0.2", binary(1, 0.3, wave=0.2), constant(0.2)),
    Regime("binary 0.3, p 0.2, none differ", binary(0, 0.3), constant(0.2)),
    Regime("binary 0.3, p 0.5, no range", binary(1, 0.3), constant(0.5), None),
    Regime("revenue to 100, p 0.1", revenue(1, 100.0), constant(0.1), (0, 100)),
    Regime("revenue, p 0.1, no range", revenue(1, np.inf), constant(0.1), None),
    Regime("5 steps, p 0.2", episodes(5, 1, 0.2), constant(0.2), (0, 5)),
    Regime("50 steps, p 0.1, 0.3 differ", episodes(50, 0.3, 0.1), constant(0.1), (0, 50)),
    Regime("up to 20 steps, ends at a click, p 0.2", ends_at_a_click(20, 0.05), constant(0.2)),
)


class Capitals:
    """Bets of R runs on the sign of the mean."""

    def __init__(self, runs: int) -> None:
        self.state = np.ones((2, len(FRACTIONS), runs))

    def told(self, values: Floats, lowest: Floats, highest: Floats) -> Floats:
        """Returns [2, n, R] whether the mean is known to be above, and below 0."""
        result = []
        for side, gain in enumerate((values / -lowest, -values / highest)):
            capitals = grow(self.state[side], gain)
            self.state[side] = capitals[-1]
            result.append(capitals.mean(1) >= 2 / LEVEL)
        return np.stack(result)


@dataclass
class Block:
    """The next n units of R runs.

    Attributes:
        number: [n, 1] of the units.
        z, arm: [n, R] difference that uses both policies' probabilities, and that of arms alone.
        bounds: lowest and highest values of both; None without a range.
        sums: [2, 3, n, R] units, sum and squares of each policy's outcomes so far.
    """

    number: NDArray[np.int64]
    z: Floats
    arm: Floats
    bounds: tuple[Floats, Floats] | None
    sums: Floats


def blocks(regime: Regime, runs: int, units: int, rng: np.random.Generator) -> Iterator[Block]:
    """Yields the units of a regime, AT_ONCE at a time."""
    total = np.zeros(runs)
    arms = np.zeros((2, 3, runs))
    lean = np.zeros(runs)
    for start in range(0, units, AT_ONCE):
        number = np.arange(start, start + AT_ONCE)[:, None]
        share = regime.share(number, lean)
        drawn = regime.world(rng, number, share)
        earlier = np.cumsum(np.concatenate([total[None], drawn.outcome]), 0)
        center = earlier[:-1] / np.maximum(number, 1)
        z = relative_difference(share, drawn.log_ratio) * (drawn.outcome - center)
        arm = np.where(drawn.is_new, 1 / share, -1 / (1 - share)) * (drawn.outcome - center)
        bounds = None
        if regime.bounds is not None:
            lowest, highest = difference_bounds(share, center - regime.bounds[0], regime.bounds[1] - center)
            bounds = np.minimum(lowest, -1e-12), np.maximum(highest, 1e-12)
        is_new = np.stack([~drawn.is_new, drawn.is_new])
        sums = np.stack([is_new, is_new * drawn.outcome, is_new * drawn.outcome**2], 1).astype(float)
        sums = np.cumsum(np.concatenate([arms[:, :, None], sums], 2), 2)[:, :, 1:]
        yield Block(number, z, arm, bounds, sums)
        total = earlier[-1]
        arms = sums[:, :, -1]
        lean = lean + z.sum(0)


def looks(regime: Regime, runs: int, units: int, rng: np.random.Generator) -> Iterator[dict[str, Floats]]:
    """Yields [2, n, R] for units after units: whether each method says that the new policy is better, and worse."""
    ours, by_arms, asymptotic = Capitals(runs), Capitals(runs), AsymptoticSequence(LEVEL, batch=(runs,))
    for block in blocks(regime, runs, units, rng):
        said = {}
        if block.bounds is None:
            before = np.stack([asymptotic.lower > 0, asymptotic.upper < 0])
            asymptotic.add(block.z)
            after = np.stack([asymptotic.lower > 0, asymptotic.upper < 0])
            said["ours"] = np.repeat((before | after)[:, None], AT_ONCE, 1)
        else:
            said["ours"] = ours.told(block.z, *block.bounds)
            said["arms by betting"] = by_arms.told(block.arm, *block.bounds)
        count = np.maximum(block.sums[:, 0], 1)
        mean = block.sums[:, 1] / count
        variance = np.maximum(block.sums[:, 2] / count - mean**2, 1e-12)
        score = (mean[1] - mean[0]) / np.sqrt((variance / count).sum(0))
        enough = (block.number >= 100) & (block.sums[:, 0] >= 2).all(0)
        said["z-test looked at"] = np.stack([(score > 1.96) & enough, (score < -1.96) & enough])
        yield said


def told_by_peer(python: str, regime: Regime, runs: int, units: int, seed: int) -> NDArray[np.bool_]:
    """Returns [2, L, R]: whether GrowthBook's test says better, and worse, at a look every AT_ONCE units."""
    rng = np.random.default_rng(seed)
    arms = np.stack([block.sums[:, :, -1] for block in blocks(regime, runs, units, rng)])
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/arms.npz"
        np.savez(file, arms=arms)
        subprocess.run([python, Path(__file__).with_name("rollout_peer.py"), file], check=True)
        return np.asarray(np.load(file)["told"])


def peers(runs: int, units: int, seed: int) -> None:
    """Prints false alarms of a peer, and the units that it needs."""
    python = interpreter("growthbook", "gbstats==0.8.0")
    if python is None:
        return
    print("| policies of equal value | GrowthBook's sequential test |\n|---|---|")
    for regime in REGIMES:
        told = told_by_peer(python, regime, runs, units, seed)
        print(f"| {regime.name} | {told.any((0, 1)).mean():.3f} |", flush=True)
    print("| p | differ | base | lift | GrowthBook's sequential test |\n|---|---|---|---|---|")
    for share, differ, base, lift in EFFECTS:
        regime = Regime("", binary(differ, base, lift), constant(share))
        right = told_by_peer(python, regime, runs, 4 * units, seed)[0 if lift > 0 else 1]
        when = np.where(right.any(0), AT_ONCE * (right.argmax(0) + 1), np.inf)
        print(f"| {share} | {differ} | {base} | {lift} | {shown(when)} |", flush=True)


def alarms(runs: int, units: int, seed: int) -> None:
    print("| policies of equal value | method | ours | arms by betting | z-test looked at |\n|---|---|---|---|---|")
    for regime in REGIMES:
        rng = np.random.default_rng(seed)
        told: dict[str, Floats] = {}
        for said in looks(regime, runs, units, rng):
            for name, each in said.items():
                told[name] = told.get(name, np.zeros(runs, bool)) | each.any((0, 1))
        shares = (f"{told[name].mean():.3f}" if name in told else "" for name in ("ours", "arms by betting"))
        method = "asymptotic" if regime.bounds is None else "betting"
        print(
            f"| {regime.name} | {method} | {' | '.join(shares)} | {told['z-test looked at'].mean():.2f} |", flush=True
        )


EFFECTS = (
    # share, share of decisions that differ, base, lift of the new action there
    (0.5, 1.0, 0.5, 0.03), (0.5, 0.1, 0.5, 0.1), (0.1, 0.1, 0.5, 0.1), (0.1, 0.1, 0.5, -0.1), (0.1, 1.0, 0.3, 0.05),
    (0.1, 1.0, 0.3, -0.05), (0.05, 0.3, 0.02, 0.015), (0.05, 0.3, 0.02, 0.03),
)  # fmt: skip


def power(runs: int, units: int, seed: int) -> None:
    print("| p | differ | base | lift | ours: median, 90th percentile | arms by betting | z-test looked at (invalid) |"
          " fixed z-test | O'Brien-Fleming: largest, mean | ours / fixed |\n|" + "---|" * 10)  # fmt: skip
    inflation, share_used = brien_fleming()
    for share, differ, base, lift in EFFECTS:
        first: dict[str, Floats] = {}
        regime = Regime("", binary(differ, base, lift), constant(share))
        for number, said in enumerate(looks(regime, runs, units, np.random.default_rng(seed))):
            for name, each in said.items():
                right = each[0 if lift > 0 else 1]
                when = np.where(right.any(0), number * AT_ONCE + right.argmax(0) + 1, np.inf)
                first[name] = np.minimum(first.get(name, np.inf), when)
            if all(np.isfinite(first[name]).mean() > 0.95 for name in ("ours", "z-test looked at")) and number > 40:
                break
        gap = differ * lift * (1 - EPSILON)
        rate = base + differ * lift * (share * GREEDY + (1 - share) * OTHER)
        fixed = (1.96 + 1.2816) ** 2 * rate * (1 - rate) * (1 / share + 1 / (1 - share)) / gap**2
        cells = [shown(first[name]) for name in ("ours", "arms by betting", "z-test looked at")]
        largest = fixed * inflation
        mean = largest * share_used
        ours = np.median(first["ours"])
        head = f"| {share} | {differ} | {base} | {lift} | {' | '.join(cells)}"
        print(f"{head} | {fixed:,.0f} | {largest:,.0f}, {mean:,.0f} | {ours / fixed:.2f} |", flush=True)


def shown(first: Floats) -> str:
    middle, late = np.quantile(first, [0.5, 0.9], method="higher")
    return ", ".join(f"{each:,.0f}" if np.isfinite(each) else "-" for each in (middle, late))


def brien_fleming(looks: int = 5, runs: int = 200_000) -> tuple[float, float]:
    """Returns the largest and the mean number of units, of those of a fixed test and of the largest; by simulation."""
    rng = np.random.default_rng(0)
    steps = rng.standard_normal((runs, looks)).cumsum(1) / np.sqrt(looks)
    time = np.arange(1, looks + 1) / looks
    limit = np.quantile(np.abs(steps).max(1), 0.95)  # a constant limit of the sum is O'Brien & Fleming (1979)
    low, high = 1.0, 1.2
    for _ in range(30):
        inflation = (low + high) / 2
        reached = np.abs(steps + (1.96 + 1.2816) * np.sqrt(inflation) * time) >= limit
        low, high = (inflation, high) if reached.any(1).mean() < 0.9 else (low, inflation)
    used = np.where(reached.any(1), time[reached.argmax(1)], 1.0)
    return inflation, float(used.mean())


def propensities(runs: int, seed: int, count: int = 400, steps: int = 4) -> None:
    print("| policies | estimator | server's propensity | own policy's | mixture of each step |\n|---|---|---|---|---|")
    greedy = np.array([[1.0, 0.0], CURRENT[1], CURRENT[2]])
    truth = value(THIRD, steps)
    share = np.repeat([0.1, 0.5], count // 2)
    for name, current in (("both take every action", CURRENT), ("one never takes some", greedy)):
        errors: dict[str, list[list[float]]] = {guess: [] for guess in ("propensity", "own", "stepwise")}
        for run in range(runs):
            played = play(share, steps, np.random.default_rng([seed, run]), current)
            rows = per_row_truth(share, steps, current)
            for guess in errors:
                by_row, returns, robust = third_policy(played, getattr(played, guess))
                errors[guess].append([by_row - rows, returns - truth, robust - truth])
        for index, estimator in enumerate(("IPS", "PDIS", "SDR")):
            cells = []
            for guess in errors:
                error = np.array(errors[guess])[:, index]
                cells.append(
                    f"{error.mean() / (error.std() / np.sqrt(runs)):+.1f} (RMSE {np.sqrt((error**2).mean()):.3f})"
                )
            print(f"| {name} | {estimator} | {' | '.join(cells)} |", flush=True)


def per_row_truth(share: Floats, steps: int, current: Floats) -> float:
    """Returns the exact mean reward of THIRD per row, in the states of the log's rows."""
    from tests.helpers.rollouts import MOVE

    reward = (THIRD * CLICK).sum(1)
    total = 0.0
    for policy, weight in ((NEW, share.mean()), (current, 1 - share.mean())):
        at = np.array([1.0, 0, 0])
        moved = (policy * MOVE).sum(1)
        for _ in range(steps):
            total += weight * float(at @ reward)
            at = at * (1 - moved) + np.roll(at * moved, 1)
    return total / steps


def third_policy(played: Any, propensity: Floats) -> tuple[float, float, float]:
    """Returns IPS, PDIS and SDR of THIRD; its values are modeled as 0.3 for every step to come."""
    count, steps = played.state.shape
    state = played.state.ravel()
    last = np.tile(np.arange(steps) == steps - 1, count)
    left = np.tile(np.arange(steps, 0, -1), count)[:, None, None]
    as_tensor = torch.from_numpy
    page = EvaluationRows(
        names=("Reward",),
        episode=torch.arange(count).repeat_interleave(steps),
        action=as_tensor(played.action.ravel()),
        mask=torch.ones(count * steps, 2, dtype=torch.bool),
        steps=torch.ones(count * steps, dtype=torch.float64),
        bootstrap=as_tensor(1.0 - last),
        propensity=as_tensor(propensity.ravel()),
        model_propensities=as_tensor(THIRD[state]),
        outcomes=as_tensor(played.reward.reshape(-1, 1)),
        reward_model=torch.full((count * steps, 2, 1), 0.3, dtype=torch.float64),
        q_values=as_tensor(0.3 * left * np.ones((1, 2, 1))),
        next_value=as_tensor(0.3 * (left[:, 0] - 1)),
    )
    table = tables_of(page, 1.0)[0]
    counts = torch.ones(1, count, dtype=torch.float64)
    each = (inverse_propensity, per_decision, sequential_doubly_robust)
    return tuple(float(estimates(estimator, table, counts)[0]) for estimator in each)  # type: ignore[return-value]


def main() -> None:
    options = options_of(__doc__, runs=200, units=100_000, seed=0, only="")
    print(f"{options.runs} runs of {options.units:,} units; asymptotic from {LEAST_INFORMATIVE:g} effective units\n")
    if options.only in ("", "propensities"):
        propensities(options.runs, options.seed)
    if options.only in ("", "alarms"):
        alarms(options.runs, options.units, options.seed)
    if options.only in ("", "peers"):
        peers(options.runs, options.units, options.seed)
    if options.only in ("", "power"):
        power(options.runs, 4 * options.units, options.seed)


if __name__ == "__main__":
    main()
