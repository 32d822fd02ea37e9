"""Hand-made batches for tests of learners."""

from typing import Any

import torch
from torch import Tensor, nn

from reagent_lite.types import Actions, TransitionBatch


def make_batch(
    state: Any, next_state: Any, action: Any, reward: Any, *, num_choices: int = 2, **other: Any
) -> TransitionBatch:
    """A batch of B rows, all choices allowed, one step each, equal weights that sum to 1; `other` replaces fields."""
    state = torch.as_tensor(state, dtype=torch.float32)
    rows = len(state)
    every = Actions(mask=torch.ones(rows, num_choices, dtype=torch.bool))
    usual: dict[str, Any] = {
        "state": state,
        "actions": every,
        "action": torch.as_tensor(action),
        "reward": torch.as_tensor(reward, dtype=torch.float32),
        "steps": torch.ones(rows),
        "bootstrap": torch.ones(rows),
        "next_state": torch.as_tensor(next_state, dtype=torch.float32),
        "next_actions": every,
        "next_action": torch.zeros(rows, dtype=torch.int64),
        "propensity": torch.ones(rows),
        "metrics": torch.zeros(rows, 0),
        "weight": torch.full((rows,), 1 / rows),
    }
    return TransitionBatch(**usual | other)


def random_batch(rows: int, num_state: int, num_choices: int, seed: int, num_features: int = 0) -> TransitionBatch:
    """Rows drawn at random; candidates with features where num_features is given."""
    rng = torch.Generator().manual_seed(seed)

    def choices() -> Actions:
        mask = (torch.rand(rows, num_choices, generator=rng) < 0.7) | (torch.arange(num_choices) == 0)
        features = torch.randn(rows, num_choices, num_features, generator=rng) * mask.unsqueeze(2)
        return Actions(mask=mask, features=features if num_features else None)

    now, after = (choices() for _ in range(2))
    return make_batch(
        torch.randn(rows, num_state, generator=rng),
        torch.randn(rows, num_state, generator=rng),
        torch.zeros(rows, dtype=torch.int64),
        torch.randn(rows, generator=rng),
        actions=now,
        next_actions=after,
        bootstrap=(torch.rand(rows, generator=rng) < 0.8).float(),
    )


def uniform(state: Tensor, actions: Actions) -> Tensor:
    """Probabilities of the policy that takes all allowed choices alike."""
    return actions.mask / actions.mask.sum(1, keepdim=True).clamp(min=1)


class StateValues(nn.Module):
    """Outputs read off the state itself: some of its columns, times a parameter."""

    needs_candidate_list = False

    def __init__(self, scale: float = 1.0, columns: slice = slice(None)) -> None:
        super().__init__()
        self.columns = columns
        self.scale = nn.Parameter(torch.tensor(scale))

    def forward(self, state: Tensor, mask: Tensor, features: Tensor | None = None) -> Tensor:
        return (state[:, self.columns] * self.scale).unsqueeze(2)
