"""Experience from environments: act, step, store, and draw batches from what is stored.

 policy ─► act ─► step ─► replay ring ─► sample ─► TransitionBatch
   ▲ observation   └► episodes' returns

Every rank has its own environments, numbered through over all ranks, and its own ring.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from reagent_lite.errors import Problem, SimulationError
from reagent_lite.sim.env import Policy, VectorEnv
from reagent_lite.sim.replay.ring import ReplayRing
from reagent_lite.types import EnvStep, TransitionBatch

Step = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exploration:
    """How actions are drawn while learning.

    Attributes:
        start, end: share of uniform draws before and after the decay.
        decay_steps: environment steps of all ranks over which it falls linearly.
        temperature: above 0 draws from softmax(q / temperature) instead.
    """

    start: float
    end: float
    decay_steps: int
    temperature: float = 0.0

    def epsilon(self, steps: int) -> float:
        """Returns the share of uniform draws after so many environment steps of learning."""
        return self.start + (self.end - self.start) * min(steps / self.decay_steps, 1.0)


class Rollout:
    """A policy in environments.

    Args:
        env: this rank's environments; started here.
        policy: values of the choices on the environments' device.
        ring: where transitions go.
        device: of the ring; environments may run elsewhere.
        temperature: of the softmax policy; 0 for epsilon-greedy.
        capture: turns a step on fixed buffers into one that is replayed on the device.
        unit_reward: refuse rewards outside [0, 1], of which a cross-entropy makes no sense.
    """

    def __init__(
        self,
        env: VectorEnv,
        policy: Policy,
        ring: ReplayRing,
        *,
        device: torch.device,
        temperature: float = 0.0,
        capture: Callable[[Step], Step] = lambda step: step,
        unit_reward: bool = False,
    ) -> None:
        self.env = env
        self._unit_reward = unit_reward
        self._strange_rewards = torch.zeros((), dtype=torch.int64, device=env.device)
        self._device = device
        self._policy, self._ring, self._temperature = policy, ring, temperature
        self._epsilon = torch.ones(1, device=env.device)
        self._finished = torch.zeros(3, dtype=torch.float64, device=env.device)
        env.reset()
        # what the policy saw: a step overwrites it before the transition is complete
        self._seen = tuple(None if t is None else t.clone() for t in self._choices())
        self._informed = capture(lambda: self._step(informed=True))

    def explore(self, epsilon: float) -> None:
        """Sets the share of uniform draws."""
        self._epsilon.fill_(epsilon)

    def run(self, steps: int, *, informed: bool = True) -> None:
        """Takes steps in every environment.

        Args:
            steps: of each.
            informed: act by the policy; false draws uniformly.
        """
        for _ in range(steps):
            if informed:
                self._informed()
            else:
                self._step(informed=False)

    def finished(self) -> Tensor:
        """Returns [3] float64 and starts anew: episodes ended, the sum of their returns, the sum of their lengths.

        Raises:
            SimulationError: see `check`.
        """
        self.check()
        totals = self._finished.clone()
        self._finished.zero_()
        return totals

    def check(self) -> None:
        """Waits for the device and raises the errors of the environments.

        Raises:
            SimulationError: an environment was given an action it does not have, or paid a reward that the loss cannot
                take.
        """
        self.env.check()
        strange = int(self._strange_rewards)
        if strange:
            raise SimulationError(
                Problem(
                    f"rewards of {self.env.spec.name}",
                    "numbers from 0 to 1 for rl.q_network_loss bce_with_logits",
                    f"{strange} others",
                    "Use mse or huber",
                )
            )

    def state_dict(self) -> dict[str, Any]:
        """Returns the environments' state and the counts that are not reported yet."""
        return {"env": self.env.state_dict(), "finished": self._finished, "strange_rewards": self._strange_rewards}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a `state_dict`, in the middle of its episodes."""
        self.env.load_state_dict(state["env"])
        self._finished.copy_(state["finished"])
        self._strange_rewards.copy_(state["strange_rewards"])

    def _choices(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        env = self.env
        # features that all rows share need no copy of their own
        return env.observation, env.mask, env.features if env.spec.candidates else None

    @torch.no_grad()
    def _step(self, *, informed: bool) -> None:
        env = self.env
        for kept, now in zip(self._seen, self._choices(), strict=True):
            if kept is not None and now is not None:
                kept.copy_(now)
        q = self._policy(env.observation, env.mask, env.features) if informed else None
        env.act(q, epsilon=self._epsilon, temperature=self._temperature if informed else 0.0)
        env.step()
        observation, mask, features = self._seen
        assert observation is not None
        step = EnvStep(
            observation=observation,
            action=env.action,
            reward=env.reward,
            terminated=env.terminated,
            truncated=env.truncated,
            next_observation=env.next_observation,
            propensity=env.propensity,
            mask=mask,
            next_mask=env.next_mask,
            features=features,
            next_features=env.next_features if features is not None else None,
        )
        self._ring.write(step.to(self._device))
        if self._unit_reward:
            self._strange_rewards += (~((env.reward >= 0) & (env.reward <= 1))).sum()
        over = env.ended != 0
        self._finished += torch.stack(
            (over.sum().double(), (env.last_return * over).sum().double(), (env.last_length * over).sum().double())
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSchedule:
    """When environments step and when the learner does.

    Attributes:
        num_envs: over all ranks.
        warmup: steps of every environment by uniform draws before learning.
        steps: of every environment in a rollout.
        updates: optimizer steps after each rollout.
        num_updates: optimizer steps of the run.
        beta: exponent of importance weights at the start; 1 at the end.
    """

    num_envs: int
    warmup: int
    steps: int
    updates: int
    num_updates: int
    beta: float

    def env_steps(self, step: int) -> int:
        """Returns the environment steps of all ranks before optimizer step `step`, without the warm-up."""
        return (step // self.updates) * self.steps * self.num_envs


class RolloutSource:
    """Batches of simulated transitions for this rank.

    Args:
        rollout: collects them.
        ring: keeps them.
        exploration: share of uniform draws over time.
        schedule: when to collect.
        rows: of a minibatch of this rank.
        scale: what a ring's weights, importance over rows, are multiplied by to be shares of an optimizer step's loss.
        transform: raw features to what the network reads.
    """

    def __init__(
        self,
        rollout: Rollout,
        ring: ReplayRing,
        exploration: Exploration,
        schedule: UpdateSchedule,
        *,
        rows: int,
        scale: float,
        transform: Callable[[TransitionBatch, float], TransitionBatch],
        device: torch.device,
    ) -> None:
        self.rollout = rollout
        self._ring, self._exploration, self._schedule = ring, exploration, schedule
        self._rows, self._scale, self._transform = rows, scale, transform
        self._beta = torch.full((1,), schedule.beta, device=device)
        self._index = torch.empty(0, dtype=torch.int64)
        self._step = 0
        self._warm = False

    def collect(self, step: int) -> None:
        """Steps the environments if the schedule wants it before optimizer step `step`."""
        schedule, self._step = self._schedule, step
        if not self._warm:
            self.rollout.run(schedule.warmup, informed=False)
            self.rollout.check()
            self._warm = True
        if step % schedule.updates == 0:
            self.rollout.explore(self._exploration.epsilon(schedule.env_steps(step)))
            self.rollout.run(schedule.steps)
        self._beta.fill_(schedule.beta + (1 - schedule.beta) * step / max(schedule.num_updates, 1))

    def __next__(self) -> TransitionBatch:
        drawn = self._ring.sample(self._rows, beta=self._beta)
        self._index = drawn.index
        return self._transform(drawn.batch, self._scale)

    def learned(self, row_errors: Tensor) -> None:
        """Sets the priorities of the last batch's rows."""
        self._ring.update_priorities(self._index, row_errors)

    @property
    def env_steps(self) -> int:
        """Environment steps of all ranks so far, warm-up included."""
        schedule = self._schedule
        return schedule.warmup * schedule.num_envs + schedule.env_steps(self._step + schedule.updates)

    def state_dict(self) -> dict[str, Any]:
        """Returns ring, environments and the number of the next optimizer step."""
        parts = {"ring": self._ring.state_dict(), "rollout": self.rollout.state_dict()}
        return {"step": self._step, "warm": self._warm, **parts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a `state_dict`."""
        self._step, self._warm = int(state["step"]), bool(state["warm"])
        self._ring.load_state_dict(state["ring"])
        self.rollout.load_state_dict(state["rollout"])


def regrouped(states: Sequence[dict[str, Any]], rank: int, first: int, stop: int) -> dict[str, Any]:
    """Returns the state of a RolloutSource for another range of a run's environments.

    Args:
        states: of all ranks that saved, whose environments follow each other by global number.
        rank: for whom; it goes on with the draws of the rank of that number, if there was one.
        first: global number of the first environment it has now.
        stop: the number after its last one.
    """
    rings, rollouts = [state["ring"] for state in states], [state["rollout"] for state in states]
    envs = [rollout["env"] for rollout in rollouts]
    identity = torch.tensor([stop - first, first, *envs[0]["identity"][2:].tolist()])
    names = envs[0].keys() - {"identity", "fault"}
    env = {name: _slice([each[name] for each in envs], int(name == "state"), first, stop) for name in names}
    ring = {name: _slice([each[name] for each in rings], 1, first, stop) for name in rings[0].keys() - _WHOLE_RING}
    ring |= {name: rings[0][name] for name in ("head", "filled")}
    ring["shape"] = torch.tensor([int(rings[0]["shape"][0]), stop - first])
    if "largest_priority" in rings[0]:
        ring["largest_priority"] = torch.stack([each["largest_priority"] for each in rings]).amax(0)
    if rank < len(rings):
        ring["generator"] = rings[rank]["generator"]
    totals = {name: sum(rollout[name] for rollout in rollouts) for name in ("finished", "strange_rewards")}
    if rank:  # they are summed over ranks
        totals = {name: torch.zeros_like(total) for name, total in totals.items()}
    rollout = {"env": {**env, "identity": identity, "fault": torch.zeros_like(envs[0]["fault"])}, **totals}
    return {"step": states[0]["step"], "warm": states[0]["warm"], "ring": ring, "rollout": rollout}


_WHOLE_RING = {"shape", "head", "filled", "generator", "largest_priority"}


def _slice(parts: Sequence[Tensor], axis: int, first: int, stop: int) -> Tensor:
    """Returns [first, stop) along an axis of the concatenated parts without concatenating all of them."""
    taken, begin = [], 0
    for part in parts:
        size = part.shape[axis]
        low, high = max(first - begin, 0), min(stop - begin, size)
        if high > low:
            taken.append(part.narrow(axis, low, high - low))
        begin += size
    return torch.cat(taken, axis)
