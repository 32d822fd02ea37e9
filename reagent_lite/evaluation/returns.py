"""What a policy earns in simulation: one episode in each environment, played side by side.

The first episode of every environment counts and later ones do not, so that short episodes are no likelier to be seen
than long ones.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from reagent_lite.rl.bootstrap import percentile_interval, resample_counts
from reagent_lite.sim.env import Policy, VectorEnv

_STEPS_BETWEEN_LOOKS = 16  # asking the device whether all episodes are over waits for it


@dataclass(frozen=True, slots=True, kw_only=True)
class Returns:
    """Results of E episodes.

    Attributes:
        total: [E] float64, sum of rewards.
        discounted: [E] float64, sum of gamma^t r_t.
        length: [E] int64 steps.
        terminated: [E] bool, false where the time limit ended the episode.
    """

    total: Tensor
    discounted: Tensor
    length: Tensor
    terminated: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over episodes and its interval."""

    mean: float
    lower: float
    upper: float


@torch.no_grad()
def play(
    env: VectorEnv,
    policy: Policy | None,
    *,
    gamma: float,
    epsilon: float = 0.0,
    temperature: float = 0.0,
    on_step: Callable[[int], None] = lambda ended: None,
) -> Returns:
    """Plays one episode in every environment, from a fresh start.

    Args:
        env: reset here.
        policy: values of the choices; None draws uniformly.
        gamma: discount of `Returns.discounted`.
        epsilon: share of uniform draws.
        temperature: above 0 draws from softmax(q / temperature) instead.
        on_step: called now and then with the episodes that have ended.

    Raises:
        SimulationError: when the environment was given an action it does not have.
    """
    env.reset()
    count, device = env.num_envs, env.device
    total, discounted = torch.zeros(2, count, dtype=torch.float64, device=device).unbind()
    length = torch.zeros(count, dtype=torch.int64, device=device)
    terminated, running = torch.zeros_like(length, dtype=torch.bool), torch.ones_like(length, dtype=torch.bool)
    exploration = torch.tensor([epsilon], device=device)
    factor = 1.0
    for step in range(env.time_limit):
        q = None if policy is None else policy(env.observation, env.mask, env.features)
        env.act(q, epsilon=exploration, temperature=temperature)
        env.advance()
        reward = env.reward.double() * running
        total += reward
        discounted += factor * reward
        length += running
        terminated |= running & env.terminated
        running &= env.ended == 0
        factor *= gamma
        if step % _STEPS_BETWEEN_LOOKS == 0:
            left = int(running.sum())
            on_step(count - left)
            if not left:
                break
    env.check()
    on_step(count)
    return Returns(total=total, discounted=discounted, length=length, terminated=terminated)


def estimate(samples: Tensor, *, level: float, resamples: int, seed: int) -> Estimate:
    """Returns the mean of episodes' results [E] with its percentile bootstrap interval.

    Efron & Tibshirani (1993), An Introduction to the Bootstrap, section 13.3.
    """
    generator = torch.Generator().manual_seed(seed)
    values = samples.double().cpu()
    means = resample_counts(len(values), resamples, generator) @ values / len(values)
    lower, upper = percentile_interval(means[1:], level)
    return Estimate(mean=float(means[0]), lower=lower, upper=upper)
