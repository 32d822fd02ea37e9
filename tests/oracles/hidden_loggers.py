"""Logs whose propensities are known here and hidden from the evaluation, which estimates them."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import norm

from reagent_lite.data.rows.hashes import mix
from reagent_lite.data.sampling.shards import Shards
from reagent_lite.data.sampling.source import FeatureColumns, LoggedRows
from reagent_lite.evaluation.behavior import Behavior, estimated_behavior
from reagent_lite.evaluation.estimates import ALONE
from reagent_lite.evaluation.scored_episodes import TrainEvalLogs
from reagent_lite.types import SourceSpec

from .regimes import Array, LogOfRegime, drawn, page_of, softmax

FEATURES = 5
TRUTH = 60  # times as many rows as are scored, so that the truth's error is an eighth of an estimate's


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenLogger:
    """A kind of log without propensities.

    Attributes:
        logger: "softmax" and "steep" (three times the scale) of a linear function of the features, "uniform", "greedy"
            (its largest value in 90 % of the rows), "certain" (in 99.9 %), "network" (softmax of a tanh network),
            "hidden" (softmax that also depends on a feature that the log lacks), "confounded" (the same, and that
            feature changes the reward), "secret" (the logged features see uniform choices, but they follow a hidden
            feature that changes the reward; the evaluated policy prefers the first action).
        episodes: scored; the log has twice as many.
        actions: to choose from.
        near: share of the logging policy in the evaluated one; the rest is a softmax of another linear function.
        outcome: "normal", or "event", about 10 % of the rows.
        horizon: rows of an episode, each with a reward.
        gain: added to the mean reward times the evaluated policy's probability; 0: what is done makes no difference.
        known: evaluates with the true propensities instead.
    """

    logger: str
    episodes: int = 1_000
    actions: int = 4
    near: float = 0.5
    outcome: str = "normal"
    horizon: int = 1
    gain: float = 0.0
    known: bool = False

    def draw(self, rng: np.random.Generator) -> LogOfRegime:
        """Draws tables and a log; the models are off by 0.3 of their spread."""
        tables = _Tables(self, rng)
        shape = (2 * self.episodes, self.horizon)
        state, mu, pi, mean = tables.rows(shape[0] * shape[1], rng)
        at = np.arange(len(mu)), drawn(mu, rng)
        reward = rng.random(len(mu)) < mean[at] if self.outcome == "event" else mean[at] + rng.normal(size=len(mu))
        propensity, calibration = mu[at], None
        if not self.known:
            episode = np.repeat(np.arange(shape[0]), self.horizon)
            behavior = behavior_of(state, at[1], episode, self.actions, reward.astype(float))
            propensity, calibration = behavior.propensity.astype(float), behavior.calibration
        model = tables.modeled(state, pi)
        model = model + 0.3 * model.std() * rng.normal(size=model.shape)
        expected = (pi * model).sum(1)
        columns = (pi[at], propensity, reward.astype(float), model[at], expected)
        scored = (column.reshape(shape)[: self.episodes] for column in columns)
        page = page_of(*scored, expected.mean() * np.arange(self.horizon)[::-1])
        _, mu, pi, mean = tables.rows(TRUTH * self.episodes * self.horizon, rng)
        value, logged = (self.horizon * float((policy * mean).sum(1).mean()) for policy in (pi, mu))
        return LogOfRegime(page=page, value=value, logged=logged, calibration=calibration)


class _Tables:
    def __init__(self, regime: HiddenLogger, rng: np.random.Generator) -> None:
        def weights(rows: int, columns: int) -> Array:
            return rng.normal(size=(rows, columns)) / rows**0.5

        self.regime = regime
        self.prefers = weights(FEATURES, regime.actions)
        self.bias = 0.5 * rng.normal(size=regime.actions)
        self.hidden_prefers = rng.normal(size=regime.actions) * (regime.logger in ("hidden", "confounded"))
        self.layers = 2 * weights(FEATURES, 8), 2 * weights(8, regime.actions)
        self.likes = 3 * weights(FEATURES, regime.actions)
        self.pays = weights(FEATURES, 1)
        # equally likely values of the hidden feature, where it has an effect
        count = 8 if regime.logger in ("hidden", "confounded", "secret") else 1
        self.nodes = norm.ppf((np.arange(count) + 0.5) / count)

    def rows(self, count: int, rng: np.random.Generator) -> tuple[Array, Array, Array, Array]:
        """Returns states, the probabilities of both policies, and mean rewards."""
        state, hidden = rng.normal(size=(count, FEATURES)), rng.normal(size=(count, 1))
        pi = self.evaluated(state)
        return state, self.logging(state, hidden), pi, self.mean(state, hidden, pi)

    def logging(self, state: Array, hidden: Array) -> Array:
        """Returns the logging policy's probabilities."""
        logger, actions = self.regime.logger, self.regime.actions
        linear = state @ self.prefers + self.bias + hidden * self.hidden_prefers
        share = {"greedy": 0.9, "certain": 0.999, "uniform": 0.0, "secret": 0.6}.get(logger)
        if share is not None:
            return (
                share * np.eye(actions)[self.quantile(hidden) if logger == "secret" else linear.argmax(1)]
                + (1 - share) / actions
            )
        if logger == "network":
            return softmax(2 * np.tanh(state @ self.layers[0]) @ self.layers[1])
        return softmax(linear * (3 if logger == "steep" else 1))

    def quantile(self, hidden: Array) -> NDArray[np.int64]:
        """Returns in which of as many equal parts as actions the hidden feature is."""
        return (norm.cdf(hidden[:, 0]) * self.regime.actions).astype(np.int64)

    def evaluated(self, state: Array) -> Array:
        """Returns the evaluated policy's probabilities; it does not see the hidden feature."""
        mu = np.mean([self.logging(state, np.full((len(state), 1), node)) for node in self.nodes], axis=0)
        bonus = 2.0 * (np.arange(self.regime.actions) == 0) * (self.regime.logger == "secret")
        return np.asarray(self.regime.near * mu + (1 - self.regime.near) * softmax(state @ self.likes + bonus))

    def modeled(self, state: Array, pi: Array) -> Array:
        """Returns the mean reward of each action in the log, which a model is fitted to without the hidden feature."""
        hidden = [np.full((len(state), 1), node) for node in self.nodes]
        shares = np.stack([self.logging(state, hidden_state) for hidden_state in hidden])
        means = np.stack([np.broadcast_to(self.mean(state, hidden_state, pi), pi.shape) for hidden_state in hidden])
        return np.asarray((shares * means).sum(0) / shares.sum(0))

    def mean(self, state: Array, hidden: Array, pi: Array) -> Array:
        base = state @ self.pays + 0.5 * hidden * (self.regime.logger == "confounded")
        base = base + (self.quantile(hidden) == 0)[:, None] * (self.regime.logger == "secret")
        if self.regime.outcome == "normal":
            return base + self.regime.gain * pi
        return np.clip(0.1 * np.exp(0.7 * base - 0.245) * (1 + self.regime.gain * pi), 0.0, 1.0)


def behavior_of(
    state: Array, action: NDArray[np.int64], episode: NDArray[np.int64], actions: int, reward: Array | None = None
) -> Behavior:
    """Returns the estimated behavior policy of rows with features [R, S], logged actions [R] and rewards [R]."""
    count = len(action)
    names = tuple(f"a{number}" for number in range(actions))
    rows = LoggedRows(
        state=FeatureColumns(values=torch.from_numpy(state).float(), width=state.shape[1]),
        next_index=torch.arange(count),
        reward=torch.ones(count) if reward is None else torch.from_numpy(reward).float(),
        **dict.fromkeys(("steps", "bootstrap", "propensity"), torch.ones(count)),
        **dict.fromkeys(("action", "next_action"), torch.from_numpy(action)),
        masks=None,
        candidates=None,
        num_choices=actions,
        metrics=torch.zeros(count, 0),
        usable=None,
    )
    hashes = mix(np.arange(int(episode.max()) + 1, dtype=np.uint64))
    sides = TrainEvalLogs(
        train=SimpleNamespace(action=action, episode=episode, episode_hash=hashes, action_names=names, counts={}),
        held_out=None,
        same=True,
        shards=Shards.alone(ALONE),
    )
    return estimated_behavior(
        sides,
        rows,
        SourceSpec(num_state_features=state.shape[1], num_action_features=0, action_names=names, metric_names=()),
    )
