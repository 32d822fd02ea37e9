"""Logs of users with several decisions each, whose rewards resemble each other; nothing later depends on a decision."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .regimes import CONTEXTS, LogOfRegime, drawn, page_of, softmax


@dataclass(frozen=True, slots=True, kw_only=True)
class Users:
    """A kind of log.

    The reward is the user's own mean, a deviation of 1 between users, and noise of deviation 1. A user has one context.
    The evaluated policy is half the logging policy.

    Attributes:
        users: of the log.
        rows: of each.
        together: whether the rows of a user are an episode, evaluated with gamma 0; else each is one of its own.
        gain: added to the mean reward times the evaluated policy's probability; 0: what is done makes no difference.
    """

    users: int
    rows: int
    together: bool
    gain: float = 0.0
    horizon = 1

    def draw(self, rng: np.random.Generator) -> LogOfRegime:
        """Draws tables and a log."""
        count = self.users * self.rows
        mu = softmax(rng.normal(size=(CONTEXTS, 4)))
        pi = 0.5 * mu + 0.5 * softmax(3 * rng.normal(size=(CONTEXTS, 4)))
        mean = self.gain * pi
        user = np.repeat(rng.normal(size=self.users), self.rows)
        context = np.repeat(rng.integers(CONTEXTS, size=self.users), self.rows)
        action = drawn(mu[context], rng)
        reward = user + mean[context, action] + rng.normal(size=count)
        shape = (self.users, self.rows) if self.together else (count, 1)
        columns = (pi[context, action], mu[context, action], reward, mean[context, action], (pi * mean).sum(1)[context])
        return LogOfRegime(
            page=page_of(*(column.reshape(shape) for column in columns), np.zeros(shape)),
            value=float((pi * mean).sum(1).mean()),
            logged=float((mu * mean).sum(1).mean()),
            gamma=0.0 if self.together else 1.0,
        )
