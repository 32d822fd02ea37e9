"""How often a better policy is found: by us, and by other intervals of the difference to the logged policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
import torch

from reagent_lite.evaluation.cpe import MODELED, evaluate_page
from reagent_lite.evaluation.decision import Choice, Evidence, compare_with_log, decide_findings
from reagent_lite.evaluation.evaluation_rows import EvaluationRows
from reagent_lite.evaluation.verdict import Verdict

from .gridworld import Array
from .regimes import CONFIG, ROUNDING, Regime

_LEVEL = 0.95
_Z = NormalDist().inv_cdf((1 + _LEVEL) / 2)
_RESAMPLES = 300
_GRID = 400  # means that a betting interval tries
_Interval = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Power:
    """A kind of log of single rows in which what the policy likes is better, and the same kind without a gain."""

    better: Regime

    def __str__(self) -> str:
        regime = self.better
        rate = f" {regime.rate:.1%}" if regime.sparse else ""
        kind = f"{regime.outcome}{rate}, {regime.actions} actions, {regime.episodes:,} rows"
        return f"{kind}, {regime.logging}, {regime.policy}, gain {regime.gain:g}"


def normal_ips(weight: Array, reward: Array, seed: int) -> _Interval:
    """Returns the normal interval of mean(w r) - mean(r)."""
    return _normal(weight * reward - reward)


def normal_snips(weight: Array, reward: Array, seed: int) -> _Interval:
    """Returns the normal interval of sum(w r) / sum(w) - mean(r), by the delta method."""
    value = (weight * reward).sum() / weight.sum()
    return _normal(weight * (reward - value) / weight.mean() + value - reward)


def bootstrap(weight: Array, reward: Array, seed: int) -> _Interval:
    """Returns the percentile interval of sum(w r) / sum(w) - mean(r); Efron & Tibshirani (1993)."""
    rng = np.random.default_rng([seed, 1])
    columns = np.stack((weight * reward, weight, reward), 1)
    sums = [rng.multinomial(len(reward), np.full(len(reward), 1 / len(reward))) @ columns for _ in range(_RESAMPLES)]
    weighted, weights, rewards = np.stack(sums).T
    differences = weighted / np.where(weights > 0, weights, np.nan) - rewards / len(reward)
    low, high = np.nanquantile(differences, [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2])
    return float(low), float(high)


def betting(weight: Array, reward: Array, seed: int) -> _Interval:
    """Returns the hedged betting interval of the mean of (w - 1) r, between its extremes by the largest weight.

    Waudby-Smith & Ramdas (2024), Estimating means of bounded random variables by betting, theorem 3 and its bets for a
    fixed number of rows. Rewards are events.
    """
    least, most = -1.0, max(float(weight.max()), 1.0) - 1
    values = np.random.default_rng([seed, 2]).permutation(((weight - 1) * reward - least) / (most - least))
    count = len(values)
    number = np.arange(1, count + 1)
    mean = (0.5 + values.cumsum()) / (number + 1)
    variance = (0.25 + np.square(values - mean).cumsum()) / (number + 1)
    before = np.concatenate(([0.25], variance[:-1]))
    bet = np.sqrt(2 * np.log(2 / (1 - _LEVEL)) / (count * before))
    means = np.linspace(1 / _GRID / 2, 1 - 1 / _GRID / 2, _GRID)
    near = values.mean() + np.linspace(-1, 1, _GRID) * 20 * values.std() / count**0.5
    means = np.sort(np.concatenate((means, near[(near > 0) & (near < 1)])))
    kept = []
    for candidate in means:
        up = np.log1p(np.minimum(bet, 0.5 / candidate) * (values - candidate)).sum()
        down = np.log1p(-np.minimum(bet, 0.5 / (1 - candidate)) * (values - candidate)).sum()
        if max(up, down) + np.log(0.5) < np.log(1 / (1 - _LEVEL)):
            kept.append(candidate)
    if not kept:
        return np.nan, np.nan
    return least + (most - least) * float(min(kept)), least + (most - least) * float(max(kept))


_METHODS: dict[str, Callable[[Array, Array, int], _Interval]] = {
    "normal IPS": normal_ips,
    "normal SNIPS": normal_snips,
    "bootstrap": bootstrap,
    "betting": betting,
}


def _normal(values: Array) -> _Interval:
    half = _Z * float(values.std()) / len(values) ** 0.5
    return float(values.mean()) - half, float(values.mean()) + half


def _ours(page: EvaluationRows, seed: int) -> tuple[_Interval, Choice]:
    """Returns our interval of the difference, NaN unless it is trustworthy, and the decision."""
    result = evaluate_page(
        page,
        gamma=0.0,
        config=CONFIG,
        generator=torch.Generator().manual_seed(seed),
        missing=dict.fromkeys(MODELED, "a column of numbers"),
    )
    (row,) = (row for row in result.outcomes[0].one_step.estimates if row.name == "Self_Normalized_IPS_Reward")
    choice = decide_findings(Evidence(result=result, comparisons=tuple(compare_with_log(result)))).choice
    trusted = row.verdict is Verdict.TRUSTWORTHY
    return (row.difference.low, row.difference.high) if trusted else (np.nan, np.nan), choice


def measure(regime: Power, logs: int, seed: int) -> dict[str, float]:
    """Returns for each method in which share of logs the better policy is found, and the least share that covers.

    An interval covers if the true difference lies in it; the least share is that of logs with the gain and without it,
    ours among trustworthy ones. A betting interval needs events.
    """
    names = ["ours", *_METHODS] if regime.better.outcome == "event" else ["ours", *list(_METHODS)[:-1]]
    right = dict.fromkeys(names, 0)
    covered: dict[str, list[list[bool]]] = {name: [[], []] for name in names}
    for number in range(logs):
        for index, kind in enumerate((regime.better, replace(regime.better, gain=1.0))):
            log = kind.draw(np.random.default_rng(seed + number))
            weight = log.page.weight.numpy()
            reward = log.page.outcomes[:, 0].numpy()
            ours, choice = _ours(log.page, seed + number)
            intervals = {"ours": ours} | {name: _METHODS[name](weight, reward, seed + number) for name in names[1:]}
            for name, (low, high) in intervals.items():
                if not np.isnan(low):
                    truth = log.value - log.logged
                    covered[name][index].append(low - ROUNDING <= truth <= high + ROUNDING)
                if index == 0:
                    right[name] += choice is Choice.SHIP if name == "ours" else low > 0
    figures = {}
    for name in names:
        figures[f"{name} found"] = right[name] / logs
        figures[f"{name} covers"] = min(float(np.mean(part)) if part else np.nan for part in covered[name])
    return figures
