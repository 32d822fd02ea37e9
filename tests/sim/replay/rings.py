"""Small rings of transitions, and steps to write into them."""

from typing import Any

import torch

from reagent_lite.sim.replay.ring import ReplayRing, ReplaySettings
from reagent_lite.types import EnvStep

GOES_ON, TERMINATED, TRUNCATED = range(3)  # how a step ends; both ends in one row are 3


def ring_of(device: str = "cpu", **given: Any) -> ReplayRing:
    """A ring for one environment with 8 slots, unless something else is given."""
    settings = {"num_envs": 1, "observation_size": 1, "num_actions": 4, "slots": 8, "gamma": 0.5, "seed": 3}
    return ReplayRing(ReplaySettings(**settings | given), torch.device(device))


def plain_columns(envs: int) -> dict[str, torch.Tensor]:
    zeros = torch.zeros(envs)
    return {"observation": zeros[:, None], "next_observation": zeros[:, None], "action": zeros, "reward": zeros,
            "terminated": zeros.bool(), "truncated": zeros.bool(), "propensity": torch.ones(envs)}  # fmt: skip


def plain_step(envs: int = 1, **columns: Any) -> EnvStep:
    """A step of environments that goes on, all zeros but for what is given; propensity 1."""
    return EnvStep(**(plain_columns(envs) | columns))
