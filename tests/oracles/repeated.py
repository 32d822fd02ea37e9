"""Many logs of the same gridworld policy, each with a model that is wrong in its own way: for shares and mean errors.

All logs are simulated at once, which is faster than one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from helpers.pages import gridworld_page
from helpers.tables import estimates
from oracles import gridworld

from reagent_lite.evaluation.evaluation_rows import tables_of
from reagent_lite.rl.bootstrap import resamples
from reagent_lite.rl.estimators import magic
from reagent_lite.rl.sums import EpisodeSums, EpisodeTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """What is repeated.

    Attributes:
        behavior, evaluated: epsilon of the logging and of the evaluated policy.
        num_episodes: of each log.
        start: [25] probabilities of the first state.
        model_error: standard deviation of the errors of q and of the reward model, drawn anew for each table entry and
            each repetition; None for a model that says 0 everywhere.
    """

    behavior: float
    evaluated: float
    num_episodes: int
    start: gridworld.Array
    model_error: float | None

    @property
    def policy(self) -> gridworld.Array:
        """[25, 4] the evaluated policy."""
        return gridworld.epsilon_greedy(self.evaluated)

    @property
    def mean_return(self) -> float:
        """Exact: what sequential forms estimate."""
        return float(self.start @ gridworld.policy_values(self.policy))

    @property
    def mean_reward(self) -> float:
        """Exact: what one-step forms estimate, the evaluated policy's reward in the states of the log's rows."""
        return float(
            gridworld.row_shares(gridworld.epsilon_greedy(self.behavior), self.start)
            @ (self.policy * gridworld.rewards()).sum(1)
        )


def repetitions(study: Study, count: int, rng: np.random.Generator) -> Iterator[EpisodeTable]:
    """Yields `count` logs with their models."""
    n, policy = study.num_episodes, study.policy
    log = gridworld.simulate(gridworld.epsilon_greedy(study.behavior), n * count, rng, start=study.start)
    for part in np.split(log, np.searchsorted(log.episode, np.arange(n, n * count, n))):
        reward = _wrong(gridworld.rewards(), study.model_error, rng)
        page = gridworld_page(part, policy, _wrong(gridworld.policy_q(policy), study.model_error, rng))
        page = replace(page, reward_model=torch.from_numpy(reward[part.state]).unsqueeze(2))
        yield tables_of(page, gridworld.GAMMA)[0]


def _wrong(exact: gridworld.Array, size: float | None, rng: np.random.Generator) -> gridworld.Array:
    errors = rng.standard_normal(exact.shape) * gridworld.allowed()
    return np.zeros_like(exact) if size is None else np.asarray(exact + size * errors)


def resample_counts(num_episodes: int, num_resamples: int, generator: torch.Generator) -> torch.Tensor:
    """All blocks of resamples at once, [1 + num_resamples, num_episodes] float64; row 0 is the sample itself."""
    return torch.cat(list(resamples(num_episodes, num_resamples, generator).blocks())).double()


def step_returns(episodes: EpisodeTable, counts: torch.Tensor) -> torch.Tensor:
    """The j-step returns that MAGIC blends, [R, m], of samples of episodes."""
    blended: list[torch.Tensor] = []

    def keep(returns: torch.Tensor, sums: EpisodeSums, outcome: int) -> torch.Tensor:
        blended.append(returns)
        return returns[:, -1]

    estimates(replace(magic, finish=keep), episodes, counts)
    return blended[0]
