"""Logs whose rows share draws of the action, and logs that only look so; the policy's value is known exactly."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from reagent_lite.evaluation.segment import StateFeatures

from .gridworld import Array
from .regimes import LogOfRegime, drawn, page_of, softmax


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedDraws:
    """A kind of log; what is done makes no difference, but rewards of a unit share a mean.

    Attributes:
        kind: "user" (an arm for each user, whose rows are neighbors), "interleaved" (the same, rows in any order),
            "hour" (an arm for each hour, every row has other features), "retry" (some rows are logged several times);
            without shared draws: "independent" (of each row), "adaptive" (the logger prefers what it took last),
            "drift" (its preferences change slowly), "context" (neighbors have the same features).
        units: of the log.
        rows: mean number of rows of a unit.
        named: whether the log says which rows are a unit.
        spread: deviation of the means of units; the noise of rewards has deviation 1.
        actions: to choose from.
        outcome: "normal", "event" or "heavy" (lognormal).
    """

    kind: str
    units: int
    rows: float
    named: bool = False
    spread: float = 1.0
    actions: int = 2
    outcome: str = "normal"
    horizon = 1

    def draw(self, rng: np.random.Generator) -> LogOfRegime:
        """Draws a log."""
        unit = np.repeat(np.arange(self.units), rng.poisson(self.rows - 1, self.units) + 1)
        if self.kind == "interleaved":
            rng.shuffle(unit)
        count = len(unit)
        of_unit = self.kind in ("user", "interleaved", "retry", "context")
        state = rng.normal(size=(self.units, 2))[unit] if of_unit else rng.normal(size=(count, 2))
        prefers = rng.normal(size=(2, self.actions))
        mu = softmax(0.3 * state @ prefers) if of_unit else np.full((count, self.actions), 1 / self.actions)
        if self.kind == "drift":
            mu = softmax(np.sin(np.arange(count)[:, None] / 300 + np.arange(self.actions)))
        likes = rng.normal(size=self.actions) + state @ rng.normal(size=(2, self.actions))
        pi = 0.3 * mu + 0.7 * softmax(2 * likes)
        if self.kind in ("user", "interleaved", "hour", "retry"):
            first = np.unique(unit, return_index=True)[1]
            action = drawn(mu[first], rng)[unit]
        elif self.kind == "adaptive":
            mu, action = _adaptive(count, self.actions, rng)
        else:
            action = drawn(mu, rng)
        mean = self.spread * rng.normal(size=self.units)
        reward = self._reward(mean[unit], rng)
        if self.kind == "retry":
            reward = reward[np.unique(unit, return_index=True)[1]][unit]
        row = np.arange(count)
        columns = [pi[row, action], mu[row, action], reward, np.zeros(count), np.zeros(count), np.zeros(count)]
        page = page_of(*(column[:, None] for column in columns))
        nothing = torch.zeros(count, self.actions, 1, dtype=torch.float64)
        page = replace(
            page, action=torch.from_numpy(action), mask=torch.ones(count, self.actions, dtype=torch.bool),
            model_propensities=torch.from_numpy(pi), reward_model=nothing, q_values=nothing,
        )  # fmt: skip
        names = torch.from_numpy(unit)
        exact = self._mean()
        return LogOfRegime(
            page=replace(page, number=torch.arange(count), unit=names if self.named else None),
            value=exact,
            logged=exact,
            features=StateFeatures(names=("0", "1"), ids=(0, 1), values=np.asarray(state, np.float32)),
        )

    def _reward(self, mean: Array, rng: np.random.Generator) -> Array:
        if self.outcome == "event":
            return (rng.random(len(mean)) < 1 / (1 + np.exp(-mean))).astype(float)
        normal = mean + rng.normal(size=len(mean))
        return np.exp(normal / 2) if self.outcome == "heavy" else normal

    def _mean(self) -> float:
        """Returns the exact mean reward."""
        if self.outcome == "normal":
            return 0.0
        return 0.5 if self.outcome == "event" else float(np.exp((self.spread**2 + 1) / 8))


def _adaptive(count: int, actions: int, rng: np.random.Generator) -> tuple[Array, np.ndarray]:
    """Returns the probabilities and actions of a logger that prefers the actions that it took lately."""
    probabilities = np.zeros((count, actions))
    taken = np.zeros(count, np.int64)
    score = np.zeros(actions)
    for row in range(count):
        share = np.exp(score - score.max())
        probabilities[row] = 0.2 / actions + 0.8 * share / share.sum()
        taken[row] = drawn(probabilities[row : row + 1], rng)[0]
        score *= 0.9
        score[taken[row]] += 0.3
    return probabilities, taken
