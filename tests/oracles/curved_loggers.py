"""Logs without propensities whose logger is curved in features that are in the log, and so is the reward."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from .gridworld import Array
from .hidden_loggers import behavior_of
from .regimes import LogOfRegime, drawn, page_of, softmax

_LEVELS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvedLogger:
    """A kind of log.

    Attributes:
        curve: function of the features that logger and reward depend on: "linear", "square", "product" (of two
            features), "threshold" (of one), "corner" (two features are large), "category" (a slope of a number that
            depends on a category), "wave" (a sine of 1.5 periods).
        rows: of the log.
        model: models of the reward: "good" (off by 0.3 of their spread), "linear" (a regression on the features), or
            "none" (a column of numbers).
        strength: of the logger's dependence on the curve.
        actions: to choose from.
        features: numbers in the log, besides the category.
        outcome: "normal" or "event".
        rate: of events.
        gain: added to the mean reward, or relative to it, times the evaluated policy's probability.
        known: evaluates with the true propensities instead.
    """

    curve: str
    rows: int = 4_000
    model: str = "good"
    strength: float = 1.0
    actions: int = 2
    features: int = 3
    outcome: str = "normal"
    rate: float = 0.1
    gain: float = 0.0
    known: bool = False
    horizon = 1

    def draw(self, rng: np.random.Generator) -> LogOfRegime:
        """Draws a log; the evaluated policy prefers some actions everywhere, a little more in some states."""
        tables = _Tables(self, rng)
        state, mu, pi, mean = tables.rows(self.rows, rng)
        at = np.arange(self.rows), drawn(mu, rng)
        noise = rng.normal(size=self.rows)
        reward = mean[at] + noise if self.outcome == "normal" else (rng.random(self.rows) < mean[at]).astype(float)
        propensity, calibration, predicted = mu[at], None, None
        if not self.known:
            behavior = behavior_of(state, at[1], np.arange(self.rows), self.actions, reward)
            propensity, calibration = behavior.propensity.astype(float), behavior.calibration
            predicted = torch.from_numpy(behavior.reward)
        model = self._modeled(state, at[1], reward, mean, rng)
        expected = (pi * model).sum(1)
        columns = (pi[at], propensity, reward, model[at], expected, np.zeros(self.rows))
        _, mu, pi, mean = tables.rows(60 * self.rows, rng)
        return LogOfRegime(
            page=replace(page_of(*(column[:, None] for column in columns)), predicted_reward=predicted),
            value=float((pi * mean).sum(1).mean()),
            logged=float((mu * mean).sum(1).mean()),
            calibration=calibration,
            modeled=self.model != "none",
        )

    def _modeled(self, state: Array, action: np.ndarray, reward: Array, mean: Array, rng: np.random.Generator) -> Array:
        if self.model == "good":
            return mean + 0.3 * mean.std() * rng.normal(size=mean.shape)
        features = np.concatenate((state, np.ones((self.rows, 1)), np.eye(self.actions)[action][:, 1:]), 1)
        weights = np.linalg.lstsq(features, reward, rcond=None)[0]
        base = features[:, : state.shape[1] + 1] @ weights[: state.shape[1] + 1]
        return np.asarray(base[:, None] + np.concatenate(([0.0], weights[state.shape[1] + 1 :])))


class _Tables:
    def __init__(self, regime: CurvedLogger, rng: np.random.Generator) -> None:
        self.regime = regime
        self.prefers = rng.normal(size=(regime.features, regime.actions)) / regime.features**0.5
        self.by_curve = np.linspace(-1, 1, regime.actions)
        rng.shuffle(self.by_curve)
        self.slopes = np.linspace(-1.5, 1.5, _LEVELS)
        self.likes = rng.normal(size=(regime.features, regime.actions)) / regime.features**0.5

    def rows(self, count: int, rng: np.random.Generator) -> tuple[Array, Array, Array, Array]:
        """Returns states, the probabilities of both policies, and mean rewards."""
        regime = self.regime
        number = rng.normal(size=(count, regime.features))
        level = rng.integers(_LEVELS, size=count)
        state = np.concatenate((number, np.eye(_LEVELS)[level][:, : _LEVELS * (regime.curve == "category")]), 1)
        curve = {
            "linear": number[:, 0],
            "square": (number[:, 0] ** 2 - 1) / 2**0.5,
            "product": number[:, 0] * number[:, 1],
            "threshold": 2.0 * (number[:, 0] > 0.4) - 0.7,
            "corner": 3.0 * ((number[:, 0] > 0) & (number[:, 1] > 0)) - 0.75,
            "category": self.slopes[level] * number[:, 0],
            "wave": 1.4 * np.sin(3 * number[:, 0]),
        }[regime.curve]
        mu = softmax(0.5 * number @ self.prefers + regime.strength * np.outer(curve, self.by_curve))
        mu = 0.8 * mu + 0.2 / regime.actions
        pi = 0.4 * mu + 0.6 * softmax(1.5 * self.by_curve + 0.5 * number @ self.likes)
        base = curve + 0.5 * number[:, -1]
        if regime.outcome == "normal":
            return state, mu, pi, base[:, None] + regime.gain * pi
        mean = np.clip(regime.rate * np.exp(0.6 * base - 0.25)[:, None] * (1 + regime.gain * pi), 0.0, 0.9)
        return state, mu, pi, mean
