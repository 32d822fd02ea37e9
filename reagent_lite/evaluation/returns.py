"""Returns of policies in simulation: one episode in each environment, played in parallel.

Only the first episode of every environment counts, so that short episodes are not overrepresented.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from reagent_lite.evaluation.interval import Interval
from reagent_lite.rl.bootstrap import percentile_interval
from reagent_lite.rl.bootstrap import resamples as draw_resamples
from reagent_lite.sim.env import VectorEnv, require_finite_returns
from reagent_lite.sim.rollout import Player, Step, act

_CHECK_EVERY = 16  # steps; checking whether all episodes are over waits for the device


@dataclass(frozen=True, slots=True, kw_only=True)
class Returns:
    """Results of E episodes.

    Attributes:
        total: [E] float64, sum of rewards; with several agents, the mean over agents.
        discounted: [E] float64, sum of gamma^t r_t.
        length: [E] int64 steps.
        terminated: [E] bool, false if the time limit ended the episode.
    """

    total: Tensor
    discounted: Tensor
    length: Tensor
    terminated: Tensor

    @property
    def table(self) -> Tensor:
        """[4, E] float64 on the CPU: return, discounted return, length, whether the time limit ended the episode."""
        return torch.stack((self.total, self.discounted, self.length.double(), (~self.terminated).double())).cpu()


@torch.no_grad()
def play(
    env: VectorEnv,
    players: Sequence[Player],
    *,
    gamma: float,
    on_step: Callable[[int], None] = lambda ended: None,
    capture: Callable[[Step], Step] = lambda step: step,
) -> tuple[Returns, ...]:
    """Plays one episode in every environment, from a fresh start, and returns the results of each player.

    Args:
        env: the environments; they are reset.
        players: a single player, or one for each agent type.
        gamma: discount of `Returns.discounted`.
        on_step: called every few steps with the number of episodes that have ended.
        capture: turns a step on fixed buffers into one that is replayed on the device.

    Raises:
        SimulationError: an action that the environment does not have, or returns that are not finite.
    """
    env.reset()
    count = env.num_envs
    device = env.device
    total, discounted = torch.zeros(2, count, env.spec.agents, dtype=torch.float64, device=device).unbind()
    length = torch.zeros(count, dtype=torch.int64, device=device)
    terminated = torch.zeros_like(length, dtype=torch.bool)
    running = torch.ones_like(length, dtype=torch.bool)
    factor = torch.ones((), dtype=torch.float64, device=device)
    active: Tensor | None = None  # environments that the policies act in; None for all

    def play_step() -> None:
        act(env, players, envs=active)
        env.advance()
        reward = env.reward.view(count, -1).double() * running.unsqueeze(1)
        total.add_(reward)
        discounted.add_(factor * reward)
        length.add_(running)
        terminated.logical_or_(running & env.terminated)
        running.logical_and_(env.ended == 0)
        factor.mul_(gamma)

    whole_step = capture(play_step)
    for step in range(env.time_limit):
        if active is None:
            whole_step()
        else:  # of another size each time
            play_step()
        if step % _CHECK_EVERY == 0:
            left = int(running.sum())
            on_step(count - left)
            if not left:
                break
            if 2 * left < (count if active is None else len(active)):  # few long episodes are left
                active = running.nonzero()[:, 0]  # the policies take most of the time
    env.check()
    require_finite_returns(total, env.spec.name)
    on_step(count)

    def mean(earned: Tensor, player: Player) -> Tensor:
        """Returns the mean over the player's agents, [E]."""
        return (earned if player.rows is None else earned.flatten()[player.rows].view(count, -1)).mean(1)

    return tuple(
        Returns(total=mean(total, player), discounted=mean(discounted, player), length=length, terminated=terminated)
        for player in players
    )


def estimates(samples: Tensor, *, level: float, resamples: int, seed: int) -> tuple[Interval, ...]:
    """Returns the column means of episodes' results [E, C], all on the same resamples of episodes.

    Intervals are those of the percentile bootstrap: they stay within the range of episodes' results, and returns need
    not be normally distributed. Efron & Tibshirani (1993), An Introduction to the Bootstrap, section 13.3.
    """
    values = samples.double().cpu()
    first = values[:1]  # sums of differences from it, so that equal values have an interval of width 0
    drawn = draw_resamples(len(values), resamples, torch.Generator().manual_seed(seed))
    sums = torch.cat([counts.double() @ (values - first) for counts in drawn.blocks()])
    means = first + sums / len(values)
    bounds = (percentile_interval(column, level) for column in means[1:].T)
    return tuple(
        Interval(value=mean, low=low, high=high) for mean, (low, high) in zip(means[0].tolist(), bounds, strict=True)
    )
