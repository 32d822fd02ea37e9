"""Catch, an environment of Gymnasium with images: a ball falls, and a paddle at the bottom has to be below it.

As in bsuite (Osband et al., 2020): the paddle moves left, stays or moves right, and the last step earns 1 if the ball
is caught, else -1. Importing the module registers `Catch-v0`.
"""

from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete
from numpy.typing import NDArray

BALL = 255
PADDLE = 128


class Catch(gymnasium.Env[NDArray[np.uint8], int]):
    """A board of `cells` x `cells`, each of `pixels` x `pixels`; layout "hw", or "hwc" or "chw" with one channel."""

    def __init__(self, cells: int = 10, pixels: int = 2, layout: Literal["hw", "hwc", "chw"] = "hwc") -> None:
        self.cells = cells
        self.pixels = pixels
        side = cells * pixels
        shape = {"hw": (side, side), "hwc": (side, side, 1), "chw": (1, side, side)}[layout]
        self.observation_space = Box(0, 255, shape, np.uint8)
        self.action_space = Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[NDArray[np.uint8], dict[str, Any]]:
        """Starts an episode with ball and paddle in random columns."""
        super().reset(seed=seed)
        self.row = 0
        self.ball, self.paddle = self.np_random.integers(self.cells, size=2).tolist()
        return self.picture(), {}

    def step(self, action: int) -> tuple[NDArray[np.uint8], float, bool, bool, dict[str, Any]]:
        """Moves the paddle by action - 1, and the ball by a row."""
        self.paddle = min(max(self.paddle + int(action) - 1, 0), self.cells - 1)
        self.row += 1
        over = self.row == self.cells - 1
        reward = (1.0 if self.ball == self.paddle else -1.0) if over else 0.0
        return self.picture(), reward, over, False, {}

    def picture(self) -> NDArray[np.uint8]:
        """Returns the board in the space's shape."""
        board = np.zeros((self.cells, self.cells), np.uint8)
        board[-1, self.paddle] = PADDLE
        board[self.row, self.ball] = BALL
        drawn = board.repeat(self.pixels, 0).repeat(self.pixels, 1)
        return drawn.reshape(self.observation_space.shape)


gymnasium.register("Catch-v0", Catch, max_episode_steps=100)
