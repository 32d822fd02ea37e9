"""Logs whose propensities are known here and hidden from the evaluation, which estimates them."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import norm

from reagent_lite.data.rows.hashes import mix
from reagent_lite.data.sampling.shards import Shards
from reagent_lite.data.sampling.source import FeatureColumns, LoggedRows
from reagent_lite.evaluation.behavior import Behavior, estimated_behavior
from reagent_lite.evaluation.episodes import TrainEvalLogs
from reagent_lite.evaluation.estimates import ALONE
from reagent_lite.types import SourceSpec

from .regimes import LogOfRegime, page_of, softmax

Array = NDArray[np.float64]

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
        tables = _Tables.of(self, rng)
        count, length = 2 * self.episodes, self.horizon
        state, hidden = tables.contexts(count * length, rng)
        mu = tables.logging(state, hidden)
        pi = tables.evaluated(state)
        mean = tables.mean(state, hidden, pi)
        action = (mu.cumsum(1) < rng.random((len(mu), 1))).sum(1).clip(max=self.actions - 1)
        row = np.arange(len(mu))
        taken = mean[row, action]
        reward = (
            (rng.random(len(taken)) < taken).astype(float)
            if self.outcome == "event"
            else taken + rng.normal(size=len(taken))
        )
        propensity = mu[row, action]
        calibration = None
        if not self.known:
            behavior = behavior_of(state, action, np.repeat(np.arange(count), length), self.actions)
            propensity = behavior.propensity.astype(float)
            calibration = behavior.calibration
        model = tables.modelled(state, pi)
        model = model + 0.3 * model.std() * rng.normal(size=model.shape)
        value = (pi * model).sum(1)
        rest = float(value.mean()) * (length - 1 - np.arange(length))

        def shaped(values: Array) -> Array:
            return values.reshape(count, length)[: self.episodes]

        page = page_of(
            shaped(pi[row, action]), shaped(propensity), shaped(reward), shaped(model[row, action]), shaped(value), rest
        )
        state, hidden = tables.contexts(TRUTH * self.episodes * length, rng)
        mu = tables.logging(state, hidden)
        pi = tables.evaluated(state)
        mean = tables.mean(state, hidden, pi)
        return LogOfRegime(
            page=page,
            value=length * float((pi * mean).sum(1).mean()),
            logged=length * float((mu * mean).sum(1).mean()),
            calibration=calibration,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tables:
    regime: HiddenLogger
    prefers: Array
    bias: Array
    hidden_prefers: Array
    layers: tuple[Array, Array]
    likes: Array
    pays: Array

    @classmethod
    def of(cls, regime: HiddenLogger, rng: np.random.Generator) -> _Tables:
        def weights(rows: int, columns: int) -> Array:
            return rng.normal(size=(rows, columns)) / rows**0.5

        return cls(
            regime=regime,
            prefers=weights(FEATURES, regime.actions),
            bias=0.5 * rng.normal(size=regime.actions),
            hidden_prefers=rng.normal(size=regime.actions),
            layers=(2 * weights(FEATURES, 8), 2 * weights(8, regime.actions)),
            likes=3 * weights(FEATURES, regime.actions),
            pays=weights(FEATURES, 1)[:, 0],
        )

    @staticmethod
    def contexts(count: int, rng: np.random.Generator) -> tuple[Array, Array]:
        return rng.normal(size=(count, FEATURES)), rng.normal(size=(count, 1))

    def logging(self, state: Array, hidden: Array) -> Array:
        """Returns the logging policy's probabilities."""
        actions = self.regime.actions
        linear = state @ self.prefers + self.bias
        share = {"greedy": 0.9, "certain": 0.999}.get(self.regime.logger)
        if self.regime.logger == "uniform":
            return np.full((len(state), actions), 1 / actions)
        if self.regime.logger == "secret":
            return 0.6 * np.eye(actions)[self.quantile(hidden)] + 0.4 / actions
        if share is not None:
            return share * np.eye(actions)[linear.argmax(1)] + (1 - share) / actions
        if self.regime.logger == "network":
            return softmax(2 * np.tanh(state @ self.layers[0]) @ self.layers[1])
        if self.regime.logger in ("hidden", "confounded"):
            linear = linear + hidden * self.hidden_prefers
        return softmax(linear * (3 if self.regime.logger == "steep" else 1))

    def quantile(self, hidden: Array) -> NDArray[np.int64]:
        """Returns in which of as many equal parts as actions the hidden feature is."""
        return (norm.cdf(hidden[:, 0]) * self.regime.actions).astype(np.int64)

    @property
    def nodes(self) -> Array:
        """Equally likely values of the hidden feature, where it has an effect."""
        count = 8 if self.regime.logger in ("hidden", "confounded", "secret") else 1
        return np.asarray(norm.ppf((np.arange(count) + 0.5) / count))

    def evaluated(self, state: Array) -> Array:
        """Returns the evaluated policy's probabilities; it does not see the hidden feature."""
        mu = np.mean([self.logging(state, np.full((len(state), 1), node)) for node in self.nodes], axis=0)
        bonus = 2.0 * (np.arange(self.regime.actions) == 0) * (self.regime.logger == "secret")
        return np.asarray(self.regime.near * mu + (1 - self.regime.near) * softmax(state @ self.likes + bonus))

    def modelled(self, state: Array, pi: Array) -> Array:
        """Returns the mean reward of each action in the log, which a model is fitted to without the hidden feature."""
        hidden = [np.full((len(state), 1), node) for node in self.nodes]
        shares = np.stack([self.logging(state, hidden_state) for hidden_state in hidden])
        means = np.stack([np.broadcast_to(self.mean(state, hidden_state, pi), pi.shape) for hidden_state in hidden])
        return np.asarray((shares * means).sum(0) / shares.sum(0))

    def mean(self, state: Array, hidden: Array, pi: Array) -> Array:
        base = (state @ self.pays)[:, None]
        if self.regime.logger == "confounded":
            base = base + 0.5 * hidden
        if self.regime.logger == "secret":
            base = base + (self.quantile(hidden) == 0)[:, None]
        if self.regime.outcome == "normal":
            return base + self.regime.gain * pi
        return np.clip(0.1 * np.exp(0.7 * base - 0.245) * (1 + self.regime.gain * pi), 0.0, 1.0)


def behavior_of(state: Array, action: NDArray[np.int64], episode: NDArray[np.int64], actions: int) -> Behavior:
    """Returns the estimated behaviour policy of rows with features [R, S] and logged actions [R]."""
    count = len(action)
    names = tuple(f"a{number}" for number in range(actions))
    rows = LoggedRows(
        state=FeatureColumns(values=torch.from_numpy(state).float(), width=state.shape[1]),
        next_index=torch.arange(count),
        scalars=torch.ones(count, 4),
        choices=torch.from_numpy(np.stack((action, action), 1)),
        masks=None,
        candidates=None,
        num_choices=actions,
        metrics=torch.zeros(count, 0),
        usable=None,
    )
    hashes = mix(np.arange(int(episode.max()) + 1, dtype=np.uint64))
    copy: Any = SimpleNamespace(action=action, episode=episode, episode_hash=hashes, action_names=names, counts={})
    sides = TrainEvalLogs(train=cast("Any", copy), held_out=None, same=True, shards=Shards.alone(ALONE))
    spec = SourceSpec(num_state_features=state.shape[1], num_action_features=0, action_names=names, metric_names=())
    return estimated_behavior(sides, rows, spec)
