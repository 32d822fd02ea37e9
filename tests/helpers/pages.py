"""Evaluation pages for tests: of simulated gridworld logs, and by hand."""

import dataclasses
from typing import Any

import numpy as np
import torch
from oracles import gridworld

from reagent_lite.config.evaluation import EvaluationConfig
from reagent_lite.evaluation.cpe import CPEResult, Estimate, PageSettings, evaluate_page
from reagent_lite.evaluation.evaluation_rows import EvaluationRows


def gridworld_page(log: gridworld.Log, policy: gridworld.Array, q: gridworld.Array) -> EvaluationRows:
    """The page of a log for a policy [25, 4] with values q [25, 4]; the reward model is exact."""
    return EvaluationRows(
        names=("Reward",),
        episode=torch.from_numpy(log.episode),
        action=torch.from_numpy(log.action),
        mask=torch.from_numpy(gridworld.allowed()[log.state]),
        steps=torch.ones(len(log.state), dtype=torch.float64),
        bootstrap=torch.from_numpy(1.0 - log.terminal),
        propensity=torch.from_numpy(log.propensity),
        model_propensities=torch.from_numpy(policy[log.state]),
        outcomes=torch.from_numpy(log.reward).unsqueeze(1),
        reward_model=torch.from_numpy(gridworld.rewards()[log.state]).unsqueeze(2),
        q_values=torch.from_numpy(q[log.state]).unsqueeze(2),
        next_value=torch.from_numpy((policy * q).sum(1)[log.next_state] * (1.0 - log.terminal)).unsqueeze(1),
    )


def noisy_q(policy: gridworld.Array, size: float, rng: np.random.Generator) -> gridworld.Array:
    """The policy's exact action values, each off by a normal error: a model as wrong as a fitted one."""
    return np.asarray(gridworld.policy_q(policy) + size * rng.standard_normal((25, 4)) * gridworld.allowed())


def bandit_page(
    reward: list[float],
    *,
    episode: list[int] | None = None,
    propensity: float = 0.5,
    model_propensity: float = 0.5,
    metric: list[float] | None = None,
) -> EvaluationRows:
    """Rows of two choices of which the first is logged; models predict 0. One episode per row unless given."""
    n = len(reward)
    outcomes = [reward] if metric is None else [reward, metric]
    pi = torch.tensor([model_propensity, 1 - model_propensity], dtype=torch.float64)
    return EvaluationRows(
        names=("Reward",) if metric is None else ("Reward", "clicks"),
        episode=torch.tensor(episode or list(range(n))),
        action=torch.zeros(n, dtype=torch.int64),
        mask=torch.ones(n, 2, dtype=torch.bool),
        steps=torch.ones(n, dtype=torch.float64),
        bootstrap=torch.zeros(n, dtype=torch.float64),
        propensity=torch.full((n,), propensity, dtype=torch.float64),
        model_propensities=pi.expand(n, 2).clone(),
        outcomes=torch.tensor(outcomes, dtype=torch.float64).T.contiguous(),
        reward_model=torch.zeros(n, 2, len(outcomes), dtype=torch.float64),
        q_values=torch.zeros(n, 2, len(outcomes), dtype=torch.float64),
        next_value=torch.zeros(n, len(outcomes), dtype=torch.float64),
    )


def weighing(page: EvaluationRows, weights: list[float]) -> EvaluationRows:
    """The page with these weights of rows, 0 to 2; the log chose with probability 1/2."""
    probability = torch.tensor(weights, dtype=torch.float64) / 2
    return dataclasses.replace(page, model_propensities=torch.stack((probability, 1 - probability), 1))


def evaluated(page: EvaluationRows, *, gamma: float = 0.9, seed: int = 0, **keys: Any) -> CPEResult:
    """The evaluation of a page, with 200 resamples unless the config's keys say otherwise."""
    return evaluate_page(
        page,
        PageSettings(gamma=gamma, config=EvaluationConfig(**{"bootstrap_resamples": 200, **keys})),
        generator=torch.Generator().manual_seed(seed),
    )


def estimate_of(result: CPEResult, name: str, outcome: int = 0) -> Estimate:
    return next(estimate for estimate in result.outcomes[outcome].estimates if estimate.name == name)
