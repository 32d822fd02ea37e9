"""CartPole of Gymnasium without velocities: gymnasium:hidden_velocity:HiddenVelocity-v0.

A policy sees where cart and pole are, and its last action. No function of these balances the pole for long; from two
steps the velocities are known: Gymnasium moves by the velocities before the last action, which changes them.
"""

from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleEnv


class HiddenVelocity(CartPoleEnv):
    """Observes position, angle and the last action: -1 left, 1 right, 0 at the start."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        limits = np.array([4.8, 0.419, 1.0], np.float32)
        self.observation_space = gymnasium.spaces.Box(-limits, limits)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begins an episode."""
        state, info = super().reset(seed=seed, options=options)
        return _seen(state, 0.0), info

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Pushes the cart."""
        state, *results = super().step(action)
        return _seen(state, 2.0 * action - 1.0), *results


def _seen(state: Any, last_action: float) -> Any:
    return np.array([state[0], state[2], last_action], np.float32)


gymnasium.register("HiddenVelocity-v0", HiddenVelocity, max_episode_steps=200)
