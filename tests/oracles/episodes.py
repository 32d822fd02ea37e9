"""Episodes for tests: ours in bulk, and Gymnasium's one by one, under the same rules of thumb."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from reagent_lite.sim.cpu import CpuBackend
from reagent_lite.sim.env import ObservationPolicy, VectorEnv
from reagent_lite.sim.sources import find_environment

Array = NDArray[np.float64]
Rule = Callable[[NDArray[np.float32]], NDArray[np.int64]]  # observations [N, S] -> actions [N]


def environments(
    name: str,
    num_envs: int,
    *,
    first_env: int = 0,
    seed: int = 0,
    stream: int = 0,
    time_limit: int | None = None,
    parametric: bool = False,
    parameters: dict[str, float] | None = None,
    math: Literal["exact", "fast"] = "exact",
) -> VectorEnv:
    """Environments on the CPU, already reset."""
    backend = CpuBackend(find_environment(name), parameters or {}, math)
    env = VectorEnv(
        backend,
        num_envs=num_envs,
        first_env=first_env,
        seed=seed,
        stream=stream,
        time_limit=time_limit,
        parametric=parametric,
    )
    env.reset()
    return env


@dataclass(frozen=True, slots=True, kw_only=True)
class Episodes:
    """Returns, lengths and whether they came to their own end; [N] each."""

    returns: Array
    lengths: Array
    terminated: NDArray[np.bool_]


def first_episodes(env: VectorEnv, policy: ObservationPolicy | None, epsilon: float = 0.0) -> Episodes:
    """The first episode of every environment, each played to its end so that short ones are not preferred."""
    chance = torch.tensor([epsilon])
    returns, lengths = torch.zeros(env.num_envs), torch.zeros(env.num_envs)
    terminated = torch.zeros(env.num_envs, dtype=torch.bool)
    running = torch.ones(env.num_envs, dtype=torch.bool)
    while running.any():
        q = None if policy is None else policy(env.observation, env.mask, env.features)
        env.act(q, epsilon=chance)
        env.step()
        over = running & (env.ended != 0)
        returns[over] = env.last_return[over]
        lengths[over] = env.last_length[over].float()
        terminated[over] = env.terminated[over]
        running &= ~over
    env.check()
    return Episodes(returns=returns.double().numpy(), lengths=lengths.double().numpy(), terminated=terminated.numpy())


def as_policy(rule: Rule, num_actions: int) -> ObservationPolicy:
    """A rule of thumb as a policy: q is 1 for its action, else 0."""

    def policy(observation: torch.Tensor, mask: torch.Tensor | None, features: torch.Tensor | None) -> torch.Tensor:
        action = torch.from_numpy(rule(observation.numpy()))
        return torch.nn.functional.one_hot(action, num_actions).float()

    return policy


def gymnasium_episodes(name: str, physical: list[object], rule: Rule, epsilon: float, num: int, seed: int) -> Episodes:
    """Episodes of Gymnasium under an epsilon-greedy rule; `physical` is what Gymnasium calls each of our actions."""
    import gymnasium  # tests on a GPU do without it

    env = gymnasium.make(name, disable_env_checker=True)
    rng = np.random.default_rng(seed)
    rows = []
    for episode in range(num):
        observation, _ = env.reset(seed=seed + episode)
        total, length, terminated, truncated = 0.0, 0, False, False
        while not (terminated or truncated):
            greedy = rng.random() >= epsilon
            action = int(rule(observation[None])[0]) if greedy else int(rng.integers(len(physical)))
            observation, reward, terminated, truncated, _ = env.step(physical[action])
            total, length = total + float(reward), length + 1
        rows.append((total, length, terminated))
    env.close()
    returns, lengths, ends = np.array(rows).T
    return Episodes(returns=returns, lengths=lengths, terminated=ends.astype(bool))
