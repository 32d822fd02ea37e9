"""Logs of users of known kinds, in which the effect of a policy on every kind of user is known."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from reagent_lite.config.evaluation import EvaluationConfig
from reagent_lite.evaluation.evaluation_rows import EvaluationRows
from reagent_lite.evaluation.segment import StateFeatures
from reagent_lite.evaluation.segment_effects import EffectSettings, SegmentChange, effects_by_segment
from reagent_lite.evaluation.verdict import Verdict

from .gridworld import Array
from .regimes import drawn

LEVELS = (5, 8, 3, 4)  # of age, country, device and day
CELLS = int(np.prod(LEVELS))
AGE, COUNTRY, DEVICE, DAY = np.indices(LEVELS).reshape(4, CELLS)
LOSERS = (COUNTRY == 3) | ((COUNTRY == 5) & (AGE >= 2))
POPULATION = 400_000  # rows whose mean effects are the truth of candidates
CARRIED = 0.5  # share of an action's reward that comes with the next row of an episode


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentRegime:
    """A kind of log.

    Attributes:
        effect: "null": what is done makes no difference; "loser": what the policy likes is better for most users and
            worse for a fifth of them; "gain": it is better for all.
        choices: "actions", or "candidates" whose quality is drawn anew in every row.
        outcome: "event" of this mean, "normal" (deviation 1) or "heavy" (lognormal).
        logger: "uniform", or "uneven": 85 % for one action, which depends on the kind of user.
        policy: "sure" of its action, "soft": 70 % for it, or "near" the logger: 30 % more for it.
        rows: scored, of all episodes.
        actions: number of choices.
        rate: mean outcome.
        size: effect, in units of the rate.
        horizon: rows of an episode; half of an action's effect comes a row later.
    """

    effect: str
    choices: str = "actions"
    outcome: str = "normal"
    logger: str = "uniform"
    policy: str = "soft"
    rows: int = 6_000
    actions: int = 3
    rate: float = 1.0
    size: float = 0.5
    horizon: int = 1

    def tables(self, cell: NDArray[np.int64], quality: Array) -> tuple[Array, Array, Array]:
        """Returns probabilities of logger and policy, and mean outcomes, [n, actions] each.

        Args:
            cell: [n] kind of user.
            quality: [n, actions] quality of candidates, which the policy likes; not used for actions.
        """
        fixed = np.random.default_rng(7)
        likes = quality if self.choices == "candidates" else fixed.normal(size=(CELLS, self.actions))[cell]
        prefers = fixed.integers(self.actions, size=CELLS)[cell]
        liked = np.eye(self.actions)[likes.argmax(1)]
        even = np.full(likes.shape, 1 / self.actions)
        logger = even if self.logger == "uniform" else 0.85 * np.eye(self.actions)[prefers] + 0.15 * even
        policy = {"sure": liked, "soft": 0.7 * liked + 0.3 * even, "near": 0.3 * liked + 0.7 * logger}[self.policy]
        sign = {"null": np.zeros(len(cell)), "gain": np.ones(len(cell)), "loser": np.where(LOSERS[cell], -1.0, 1.0)}
        base = 1 + 0.3 * (AGE[cell] - 2) / 2
        mean = self.rate * (base[:, None] + self.size * sign[self.effect][:, None] * liked)
        return logger, policy, mean

    @property
    def discounted_rows(self) -> float:
        """Expected effects of an action in an episode, with what comes a row later, gamma 1."""
        return self.horizon + CARRIED * (self.horizon - 1)


@lru_cache(maxsize=2)
def effects_of_cells(regime: SegmentRegime) -> Array:
    """Returns the effect on each kind of user, [CELLS]: of a row, or of an episode's return."""
    rng = np.random.default_rng(11)
    repeats = 1 if regime.choices == "actions" else POPULATION // CELLS
    cell = np.arange(CELLS).repeat(repeats)
    logger, policy, mean = regime.tables(cell, rng.normal(size=(len(cell), regime.actions)))
    effect = ((policy - logger) * mean).sum(1).reshape(CELLS, repeats).mean(1)
    return np.asarray(effect * regime.discounted_rows)


def draw(regime: SegmentRegime, seed: int) -> tuple[EvaluationRows, StateFeatures, NDArray[np.int64]]:
    """Draws a log: its page, the features of its rows, and the kind of user of each row."""
    rng = np.random.default_rng(seed)
    horizon = regime.horizon
    cell = rng.integers(CELLS, size=regime.rows // horizon).repeat(horizon)
    n = len(cell)
    logger, policy, mean = regime.tables(cell, rng.normal(size=(n, regime.actions)))
    action = drawn(logger, rng)
    row = np.arange(n)
    of_action = mean[row, action]
    if horizon > 1:
        later = np.roll(of_action, 1)
        later[::horizon] = 0.0
        of_action = of_action + CARRIED * later
    reward = {
        "normal": lambda: of_action + rng.normal(size=n),
        "event": lambda: (rng.random(n) < of_action).astype(float),
        "heavy": lambda: of_action * rng.lognormal(-0.72, 1.2, size=n),
    }[regime.outcome]()
    values = np.stack((20 + 10 * AGE[cell], COUNTRY[cell], DEVICE[cell], DAY[cell], rng.normal(size=n)), 1)
    values[rng.random(n) < 0.1, 2] = np.nan
    if horizon > 1:
        values[:, 2:] = values[row // horizon * horizon, 2:]
    features = StateFeatures(
        names=("age", "country", "device", "day", "noise"),
        values=values.astype(np.float32),
        texts={1: {float(code): f"c{code}" for code in range(LEVELS[1])}},
    )

    def column(array: Array) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float64))

    zeros = torch.zeros(1, 1, 1, dtype=torch.float64).expand(n, regime.actions, 1)
    page = EvaluationRows(
        names=("Reward",),
        episode=torch.from_numpy(row // horizon),
        action=torch.from_numpy(action),
        mask=torch.ones(n, regime.actions, dtype=torch.bool),
        steps=torch.ones(n, dtype=torch.float64),
        bootstrap=column((row + 1) % horizon != 0),
        propensity=column(logger[row, action]),
        model_propensities=column(policy),
        outcomes=column(reward)[:, None],
        reward_model=zeros,
        q_values=zeros,
        next_value=torch.zeros(n, 1, dtype=torch.float64),
        number=torch.from_numpy(row),
    )
    return page, features, cell


def outcome_of(regime: SegmentRegime, seed: int) -> dict[str, float]:
    """Returns what the segments of one log say, beside the truth.

    The truth of a segment is the mean effect on users like those of its rows: the effect on each kind of user is known,
    and the shares of the kinds are those of the rows.
    """
    page, features, cell = draw(regime, seed)
    segments = effects_by_segment(page, features, EffectSettings(gamma=1.0, config=EvaluationConfig(), seed=seed))
    assert segments is not None
    truth = effects_of_cells(regime)[cell]
    effects = segments.effects
    truths = [float(truth[segments.segment == number].mean()) for number in range(len(effects))]
    whole = float(truth[segments.segment >= 0].mean())
    trusted = [effect.verdict is Verdict.TRUSTWORTHY for effect in effects]
    held = [
        not trust or not effect.difference.excludes(value)
        for trust, effect, value in zip(trusted, effects, truths, strict=True)
    ]
    standings = [effect.standing for effect in effects]
    true_standings = [
        SegmentChange.GAINS if value > 1e-9 else SegmentChange.LOSES if value < -1e-9 else SegmentChange.UNDECIDED
        for value in truths
    ]
    pairs = list(zip(standings, true_standings, strict=True))
    false = [standing not in (SegmentChange.UNDECIDED, true) for standing, true in pairs]
    losers = [standing is SegmentChange.LOSES for standing, true in pairs if true is SegmentChange.LOSES]
    gainers = [standing is SegmentChange.GAINS for standing, true in pairs if true is SegmentChange.GAINS]
    return {
        "segments": len(effects),
        "trusted": float(np.mean(trusted)),
        "all hold": float(all(held)),
        "total holds": float(not segments.total.excludes(whole)),
        "false gain": float(any(wrong and s is SegmentChange.GAINS for wrong, s in zip(false, standings, strict=True))),
        "false loss": float(any(wrong and s is SegmentChange.LOSES for wrong, s in zip(false, standings, strict=True))),
        "losers found": float(np.mean(losers)) if losers else np.nan,
        "gainers found": float(np.mean(gainers)) if gainers else np.nan,
    }


def measure(regime: SegmentRegime, logs: int, seed: int) -> dict[str, float]:
    """Returns the mean figures of a regime's logs."""
    figures = [outcome_of(regime, seed + number) for number in range(logs)]
    means = {}
    for name in figures[0]:
        values = np.array([figure[name] for figure in figures])
        means[name] = float(values[~np.isnan(values)].mean()) if (~np.isnan(values)).any() else np.nan
    return means
