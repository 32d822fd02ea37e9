"""Logs that hardly try what the policy does in a small segment of their rows; the policy's value is known exactly."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .regimes import LogOfRegime, page_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A kind of log: the policy takes another action than the logger's usual one in a segment only.

    Attributes:
        episodes: scored.
        explored: the logger's probability of another action than its usual one, in the segment.
        share: of rows in the segment.
        actions: to choose from; the logger takes the unusual ones with equal probability.
        outcome: "event" (0 or 1), "cost" (0 or -1) or "normal" (deviation 1).
        rate: mean outcome, or cost, of all rows but those of the segment.
        usual, other: mean outcome, or cost, of the usual and of the policy's action in the segment.
        elsewhere: the logger's probability of another action outside the segment, where the policy divides its choices
            equally between two of them; 0: policy and logger do the same there.
        horizon: rows of an episode.
    """

    episodes: int
    explored: float
    share: float
    actions: int = 2
    outcome: str = "event"
    rate: float = 0.1
    usual: float = 0.1
    other: float = 0.5
    elsewhere: float = 0.0
    horizon: int = 1

    def draw(self, rng: np.random.Generator) -> LogOfRegime:
        """Draws a log; models predict the usual outcome."""
        shape = (self.episodes, self.horizon)
        segment = rng.random(shape) < self.share
        explored = np.where(segment, self.explored, self.elsewhere)
        unusual = rng.random(shape) < explored
        wanted = unusual & (rng.integers(self.actions - 1, size=shape) == 0)
        propensity = np.where(unusual, explored / (self.actions - 1), 1 - explored)
        of_other = np.where(segment, 1.0, 0.5 if self.elsewhere else 0.0)
        taken = np.where(wanted, of_other, np.where(unusual, 0.0, 1 - of_other))
        mean = np.where(segment, np.where(wanted, self.other, self.usual), self.rate)
        reward = mean + rng.normal(size=shape) if self.outcome == "normal" else (rng.random(shape) < mean).astype(float)
        sign = -1.0 if self.outcome == "cost" else 1.0
        later = sign * self.rate * np.arange(self.horizon - 1, -1, -1)
        model = np.full(shape, sign * self.rate)
        logged_in_segment = self.explored / (self.actions - 1)
        return LogOfRegime(
            page=page_of(taken, propensity, sign * reward, model, model, later),
            value=sign * self.horizon * ((1 - self.share) * self.rate + self.share * self.other),
            logged=sign
            * self.horizon
            * (
                (1 - self.share) * self.rate
                + self.share * (logged_in_segment * self.other + (1 - logged_in_segment) * self.usual)
            ),
        )
