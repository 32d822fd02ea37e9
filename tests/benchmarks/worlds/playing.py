"""Episodes in environments of Gymnasium, for our process and for that of the peers: NumPy and Gymnasium only."""

from collections.abc import Callable

import gymnasium
import numpy as np


def play(env: str, decide: Callable[[np.ndarray], np.ndarray], episodes: int) -> float:
    """Returns the mean return of as many episodes, each with a seed of its own; all advance together.

    Args:
        env: id in Gymnasium's registry.
        decide: returns actions [N] for observations [N, F].
        episodes: how many, with the seeds 10 000, 10 001, ...
    """
    returns = np.zeros(episodes)
    envs = [gymnasium.make(env) for _ in range(episodes)]
    observations = {number: envs[number].reset(seed=10_000 + number)[0] for number in range(episodes)}
    while observations:
        actions = decide(np.stack(list(observations.values())))
        for number, action in zip(list(observations), actions.tolist(), strict=True):
            observations[number], reward, terminated, truncated, _ = envs[number].step(action)
            returns[number] += float(reward)
            if terminated or truncated:
                del observations[number]
    return float(returns.mean())
