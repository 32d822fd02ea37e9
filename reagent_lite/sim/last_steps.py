"""The last steps of each running episode, next to the buffers of environments, which have one step."""

import torch
from torch import Tensor

from reagent_lite.feature_ids import stacked_width


class LastSteps:
    """The last observations of R rows, on fixed buffers as `types.SourceSpec.history` describes them.

    Args:
        rows: R.
        size: S, numbers of an observation.
        history: number of steps, at least 2.
        device: device of the buffers.

    Attributes:
        now: [R, history * (1 + S)], ends with the current observation.
        after: [R, history * (1 + S)], ends with the observation at the end of the last transition.
    """

    def __init__(self, rows: int, size: int, history: int, device: torch.device) -> None:
        self._width = 1 + size
        self.now = torch.zeros(rows, stacked_width(size, history), device=device)
        self.after = torch.zeros_like(self.now)

    def begin(self, observation: Tensor) -> None:
        """Starts an episode in every row with its first observation [R, S]."""
        self.now.zero_()
        self.after.zero_()
        self.now[:, -self._width] = 1
        self.now[:, 1 - self._width :] = observation

    def add(self, observation: Tensor, next_observation: Tensor, ended: Tensor) -> None:
        """Adds a transition.

        Args:
            observation: [R, S] current observation, of a new episode where one ended.
            next_observation: [R, S] observation at the end of the transition.
            ended: [R] bool, whether the episode ended.
        """
        exists = torch.ones_like(self.now[:, :1])
        earlier = self.now[:, self._width :]
        self.after.copy_(torch.cat((earlier, exists, next_observation), 1))
        kept = earlier.masked_fill(ended.unsqueeze(1), 0.0)
        self.now.copy_(torch.cat((kept, exists, observation), 1))

    def replace(self, observation: Tensor) -> None:
        """Replaces the current observation [R, S]."""
        self.now[:, 1 - self._width :] = observation
