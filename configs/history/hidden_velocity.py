"""CartPole of Gymnasium whose policies see positions only: gymnasium:hidden_velocity:HiddenVelocity-v0.

No function of position and angle alone balances the pole for long; from two steps the velocities are known.
"""

from typing import Any

import gymnasium
import numpy as np


class Positions(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Observes position of the cart and angle of the pole, without their velocities."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        limits = np.array([4.8, 0.419], np.float32)
        self.observation_space = gymnasium.spaces.Box(-limits, limits)

    def observation(self, observation: Any) -> Any:
        """Returns position and angle."""
        return np.asarray(observation, np.float32)[[0, 2]]


def _hidden(**settings: Any) -> gymnasium.Env[Any, Any]:
    return Positions(gymnasium.make("CartPole-v1", **settings).unwrapped)


gymnasium.register("HiddenVelocity-v0", _hidden, max_episode_steps=200)
