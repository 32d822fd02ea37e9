"""Returns of policies in simulation: one episode in each environment, played in parallel.

Only the first episode of every environment counts, so that short episodes are not overrepresented.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from reagent_lite.sim.env import VectorEnv, require_finite_returns
from reagent_lite.sim.experience import Actor, Observer, Step, play_step

_CHECK_EVERY = 16  # steps; checking whether all episodes are over waits for the device


class _FirstEpisodes(Observer):
    """Sums of the first episode of each environment, on the device."""

    def __init__(self, env: VectorEnv, gamma: float) -> None:
        shape = (env.num_envs, env.spec.agents)
        self._env = env
        self._gamma = gamma
        self._factor = torch.ones((), dtype=torch.float64, device=env.device)
        self.total = torch.zeros(shape, dtype=torch.float64, device=env.device)
        self.discounted = torch.zeros_like(self.total)
        self.length = torch.zeros(env.num_envs, dtype=torch.int64, device=env.device)
        self.terminated = torch.zeros_like(self.length, dtype=torch.bool)
        self.running = ~self.terminated

    def after(self) -> None:
        """Adds the step to the episodes that are not over."""
        env = self._env
        reward = env.reward.view_as(self.total).double() * self.running.unsqueeze(1)
        self.total.add_(reward)
        self.discounted.add_(self._factor * reward)
        self.length.add_(self.running)
        self.terminated.logical_or_(self.running & env.terminated)
        self.running.logical_and_(env.ended == 0)
        self._factor.mul_(self._gamma)

    def table(self, actor: Actor) -> Tensor:
        """Returns an actor's table of results, as documented in `play`."""
        earned = torch.stack((self.total, self.discounted)).flatten(1)
        rows = earned if actor.rows is None else earned[:, actor.rows]
        means = rows.view(2, len(self.length), -1).mean(2)
        return torch.stack((*means, self.length.double(), (~self.terminated).double())).cpu()


@torch.no_grad()
def play(
    env: VectorEnv,
    actors: Sequence[Actor],
    *,
    gamma: float,
    on_step: Callable[[int], None] = lambda ended: None,
    capture: Callable[[Step], Step] = lambda step: step,
) -> tuple[Tensor, ...]:
    """Plays one episode in every environment, from a fresh start, and returns a table of each actor's results.

    A table is [4, E] float64 on the CPU: return, discounted return, length, and whether the time limit ended the
    episode, for E episodes. A return is a sum of rewards; if an actor plays several agents, it is the mean of theirs.

    Args:
        env: the environments; they are reset.
        actors: a single actor, or one for each agent type.
        gamma: discount per step.
        on_step: called every few steps with the number of episodes that have ended.
        capture: turns a step on fixed buffers into one that is replayed on the device.

    Raises:
        SimulationError: an action that the environment does not have, or returns that are not finite.
    """
    env.reset()
    count = env.num_envs
    results = _FirstEpisodes(env, gamma)
    active: Tensor | None = None  # environments that the policies act in; None for all
    step_all = partial(play_step, env, actors, results, step=env.advance)
    whole_step = capture(step_all)
    for step in range(env.time_limit):
        if active is None:
            whole_step()
        else:  # not captured: the number of environments changes
            step_all(envs=active)
        if step % _CHECK_EVERY == 0:
            left = int(results.running.sum())
            on_step(count - left)
            if not left:
                break
            if 2 * left < (count if active is None else len(active)):  # few long episodes are left
                active = results.running.nonzero()[:, 0]  # the policies take most of the time
    env.check()
    require_finite_returns(results.total, env.spec.name)
    on_step(count)
    return tuple(results.table(actor) for actor in actors)
