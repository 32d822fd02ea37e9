"""Logs of a policy whose value is known exactly, over kinds of rewards, actions, logging and horizons.

Each of 20 contexts has a probability for every action under the logging and under the evaluated policy and a mean
outcome; contexts are drawn anew at every step. The tables are drawn anew for each log.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import scipy.special
import torch
from numpy.typing import NDArray

from reagent_lite.config.evaluation import EvaluationConfig
from reagent_lite.evaluation.calibration import Calibration
from reagent_lite.evaluation.cpe import MODELED, evaluate_page
from reagent_lite.evaluation.decision import Choice, Evidence, compare_with_log, decide_findings
from reagent_lite.evaluation.evaluation_rows import EvaluationRows
from reagent_lite.evaluation.segment import StateFeatures
from reagent_lite.evaluation.verdict import Verdict

from .gridworld import Array

CONTEXTS = 20
CONFIG = EvaluationConfig(max_episodes=2**40, bootstrap_resamples=100)
ROUNDING = 1e-9
FEWEST_TRUSTED = 40  # logs, from which a share is meant to say something
LOSS = 0.2

softmax = partial(scipy.special.softmax, axis=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """A kind of log.

    Attributes:
        episodes: scored.
        actions: to choose from.
        logging: "uniform", "softmax", or "greedy": one action in 90 % of the rows of a context.
        policy: "equal" to the logging policy, "near" it (80 % of it, or what `near` says), "far" from it (nearly one
            action a context), "one" (one action a context).
        outcome: "event" (0 or 1), "cost" (0 or -1), "normal", "heavy" (lognormal), "heavy cost", "purchase" (an event
            that earns a lognormal amount), "loss" (normal; what the policy likes earns LOSS more, which a rare
            lognormal loss takes back on average).
        rate: of events; of losses where the policy is certain.
        horizon: rows of an episode; an event comes with its last row, other rewards with every row.
        gain: factor of the mean outcome of actions that the policy likes; 1: what is done makes no difference.
        near: share of the logging policy in a near one.
        sigma: deviation of the logarithm of a lognormal amount.
    """

    episodes: int
    actions: int = 34
    logging: str = "uniform"
    policy: str = "one"
    outcome: str = "event"
    rate: float = 0.02
    horizon: int = 1
    gain: float = 1.0
    near: float = 0.8
    sigma: float = 1.2

    def draw(self, rng: np.random.Generator) -> LogOfRegime:
        """Draws tables and a log; models are off by a third of an event's rate, or by 0.3."""
        likes, prefers = rng.normal(size=(2, CONTEXTS, self.actions))
        mu = {
            "uniform": np.full(prefers.shape, 1 / self.actions),
            "softmax": softmax(prefers),
            "greedy": 0.9 * np.eye(self.actions)[prefers.argmax(1)] + 0.1 / self.actions,
        }[self.logging]
        pi = {
            "equal": mu,
            "near": self.near * mu + (1 - self.near) * softmax(3 * likes),
            "far": softmax(5 * likes),
            "one": np.eye(self.actions)[likes.argmax(1)],
        }[self.policy]
        of_context = 0.5 * rng.normal(size=(CONTEXTS, 1))
        better = (self.gain - 1) * pi
        rates = np.clip(self.rate * np.exp(of_context - 0.125) * (1 + better), 0.0, 1.0)
        mean = rates if self.sparse else of_context + better
        context = rng.integers(CONTEXTS, size=(self.episodes, self.horizon))
        action = drawn(mu[context], rng)
        pays = np.arange(self.horizon) >= (self.horizon - 1) * self.sparse
        reward = np.where(pays, _rewards(self, mean[context, action], rng), 0.0)
        if self.outcome == "loss":
            taken = pi[context, action]
            size = rng.lognormal(np.log(LOSS / self.rate) - self.sigma**2 / 2, self.sigma, reward.shape)
            reward += LOSS * taken - size * (rng.random(reward.shape) < self.rate * taken)
        lognormal = np.exp(self.sigma**2 / 2)
        amount = lognormal if self.outcome == "purchase" else 1.0
        exact = self.sign * (amount * mean + (lognormal if self.outcome.startswith("heavy") else 0.0))
        error = rng.normal(size=mean.shape)
        model = exact * (1 + error / 3) if self.sparse else exact + 0.3 * error
        expected = (pi * model).sum(1)
        later = pays[::-1].cumsum()[::-1] - pays
        columns = (reward, np.where(pays, model[context, action], 0.0), np.where(pays, expected[context], 0.0))
        return LogOfRegime(
            page=page_of(pi[context, action], mu[context, action], *columns, later * expected.mean()),
            value=float(pays.sum() * (pi * exact).sum(1).mean()),
            logged=float(pays.sum() * (mu * exact).sum(1).mean()),
        )

    @property
    def sparse(self) -> bool:
        """Whether only the last row of an episode has an outcome."""
        return self.outcome in ("event", "cost", "purchase")

    @property
    def sign(self) -> float:
        """-1 for costs."""
        return -1.0 if "cost" in self.outcome else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOfRegime:
    """A log: its page, the exact returns of evaluated and logging policy, and the calibration of its propensities.

    Unless it is modeled, there are no models of the reward. With gamma 0 the exact values are those of a row.
    """

    page: EvaluationRows
    value: float
    logged: float
    calibration: Calibration | None = None
    gamma: float = 1.0
    features: StateFeatures | None = None
    modeled: bool = True


def drawn(probabilities: Array, rng: np.random.Generator) -> NDArray[np.int64]:
    """Returns an action for each row of probabilities [..., actions]."""
    return np.asarray(
        (probabilities.cumsum(-1) < rng.random((*probabilities.shape[:-1], 1)))
        .sum(-1)
        .clip(max=probabilities.shape[-1] - 1)
    )


def _rewards(regime: Regime, mean: Array, rng: np.random.Generator) -> Array:
    if regime.outcome in ("normal", "loss"):
        return mean + rng.normal(size=mean.shape)
    lognormal = rng.lognormal(0.0, regime.sigma, size=mean.shape)
    if regime.outcome.startswith("heavy"):
        return regime.sign * (mean + lognormal)
    events = (rng.random(mean.shape) < mean).astype(float)
    return events * lognormal if regime.outcome == "purchase" else regime.sign * events


def page_of(
    taken: Array, propensity: Array, reward: Array, model: Array, expected: Array, rest: Array
) -> EvaluationRows:
    """Returns a page of two choices, the logged action and all others together; arguments [episodes, horizon]."""
    episodes, horizon = reward.shape

    def flat(values: Array) -> torch.Tensor:
        return torch.from_numpy(np.broadcast_to(values, reward.shape).reshape(-1).copy())

    def both(of_taken: Array, of_policy: Array) -> torch.Tensor:
        others = np.where(taken < 1, (of_policy - taken * of_taken) / np.where(taken < 1, 1 - taken, 1.0), 0.0)
        return torch.stack((flat(of_taken), flat(others)), 1).unsqueeze(2)

    count = episodes * horizon
    return EvaluationRows(
        names=("Reward",),
        episode=torch.arange(episodes).repeat_interleave(horizon),
        action=torch.zeros(count, dtype=torch.int64),
        mask=torch.ones(count, 2, dtype=torch.bool),
        steps=torch.ones(count, dtype=torch.float64),
        bootstrap=flat(np.where(np.arange(horizon) == horizon - 1, 0.0, 1.0)),
        propensity=flat(propensity),
        model_propensities=torch.stack((flat(taken), flat(1 - taken)), 1),
        outcomes=flat(reward).unsqueeze(1),
        reward_model=both(model, expected),
        q_values=both(model + rest, expected + rest),
        next_value=torch.zeros(count, 1, dtype=torch.float64),
    )


def outcome_of(regime: Any, seed: int) -> tuple[dict[str, tuple[bool, ...]], str]:
    """Returns on which sides the intervals of each trustworthy estimate miss, and the decision.

    Intervals of the value above and below the truth, then intervals of the difference. A regime has a `horizon` of
    rewards that its value adds up, and `draw(rng)` returns a LogOfRegime.
    """
    log = regime.draw(np.random.default_rng(seed))
    result = evaluate_page(
        log.page,
        gamma=log.gamma,
        config=CONFIG,
        generator=torch.Generator().manual_seed(seed),
        calibration=log.calibration,
        features=log.features,
        missing={} if log.modeled else dict.fromkeys(MODELED, "a column of numbers"),
    )
    families = [(result.outcomes[0].one_step, regime.horizon), (result.outcomes[0].sequential, 1)]
    misses = {
        estimate.name: tuple(
            side
            for figure, truth in ((estimate.figure, log.value), (estimate.difference, log.value - log.logged))
            for side in (figure.low > truth / rows + ROUNDING, figure.high < truth / rows - ROUNDING)
        )
        for family, rows in families[: 2 if log.gamma > 0 else 1]
        for estimate in family.estimates
        if estimate.verdict is Verdict.TRUSTWORTHY
    }
    return misses, decide_findings(Evidence(result=result, comparisons=tuple(compare_with_log(result)))).choice


def measure(regime: Any, logs: int, seed: int) -> dict[str, float]:
    """Returns the figures of a regime."""
    results, choices = zip(*(outcome_of(regime, seed + number) for number in range(logs)), strict=True)
    misses = {name: [result[name] for result in results if name in result] for name in set().union(*results)}
    enough = [missed for missed in misses.values() if len(missed) >= min(FEWEST_TRUSTED, logs // 2)]
    shares = np.array([np.mean(missed, axis=0) for missed in enough] or [[np.nan] * 4])
    cover = 1 - (shares[:, ::2] + shares[:, 1::2]).max(0)
    worst = shares.max(0)
    return {
        "trusted": np.mean([bool(result) for result in results]),
        "cover": cover[0],
        "low": worst[0],
        "high": worst[1],
        "cover difference": cover[1],
        "difference low": worst[2],
        "difference high": worst[3],
        "ship": choices.count(Choice.SHIP) / logs,
        "do not ship": choices.count(Choice.DO_NOT_SHIP) / logs,
    }
