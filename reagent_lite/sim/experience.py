"""Experience from environments: act, step, store, and sample batches.

 policy ─► act ─► step ─► replay ring ─► sample ─► TransitionBatch
   ▲ observation   └► episodes' returns

Every rank has its own ring and its own environments, whose numbers continue from rank to rank. With several types of
agents, each type has a policy, and each type that learns has a ring of its rows.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from reagent_lite.errors import Problem, SimulationError
from reagent_lite.sim.env import ObservationPolicy, VectorEnv, require_finite_returns
from reagent_lite.sim.replay.ring import ReplayRing
from reagent_lite.types import EnvStep, TransitionBatch

Step = Callable[[], None]

ONLY = ""
"""Name of the type of agents if there is only one type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exploration:
    """Settings of exploration while learning.

    Attributes:
        start, end: share of uniform draws before and after the decay.
        decay_steps: environment steps of all ranks over which the share falls linearly.
        temperature: if positive, draws are from softmax(q / temperature) instead.
    """

    start: float
    end: float
    decay_steps: int
    temperature: float = 0.0

    def epsilon(self, steps: int) -> float:
        """Returns the share of uniform draws after a number of environment steps of learning."""
        return self.start + (self.end - self.start) * min(steps / self.decay_steps, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Actor:
    """Policy and exploration of the agents of one type.

    Attributes:
        policy: values of the choices on the environments' device; None draws uniformly.
        epsilon: [1] share of uniform draws.
        temperature: if positive, draws are from softmax(q / temperature) instead.
        ring: ring of its transitions; None for a type that does not learn.
        rows: [R] numbers of this type's rows in the environments; None means all rows.
    """

    policy: ObservationPolicy | None
    epsilon: Tensor
    temperature: float = 0.0
    ring: ReplayRing | None = None
    rows: Tensor | None = None

    def rows_in(self, env: VectorEnv, envs: Tensor | None) -> Tensor | None:
        """Returns this type's rows in some environments [n]; None means all, as in `rows`."""
        if envs is None:
            return self.rows
        every = torch.arange(env.num_rows, device=envs.device) if self.rows is None else self.rows
        return every.view(env.num_envs, -1)[envs].flatten()


class Observer:
    """Reads the buffers of environments around each step; this one reads nothing."""

    def before(self) -> None:
        """Reads the observation columns before the step overwrites them."""

    def after(self) -> None:
        """Reads actions, rewards and next observations."""


def play_step(
    env: VectorEnv,
    actors: Iterable[Actor],
    observer: Observer,
    *,
    step: Callable[[], None] | None = None,
    envs: Tensor | None = None,
) -> None:
    """Draws the actions of all agents by the policies of their types and takes them; the order of types is irrelevant.

    Rollouts, recorded episodes, returns and pictures all use it. Call it under torch.no_grad().

    Args:
        env: the environments.
        actors: a single actor, or the actors of all types of agents.
        observer: called before and after the step.
        step: takes the actions in the environments; None means `env.step`.
        envs: [n] the environments whose actions are needed, or None for all; policies are not evaluated in the others.
    """
    observer.before()
    drawn = []
    for actor in actors:
        q = None
        if actor.policy is not None:
            needed = actor.rows_in(env, envs)
            columns: tuple[Tensor | None, ...] = (env.observation, env.mask, env.features)
            if needed is not None:
                columns = tuple(None if column is None else column[needed] for column in columns)
            observation, mask, features = columns
            assert observation is not None
            q = actor.policy(observation, mask, features)
            if needed is not None:
                q = q.new_zeros(env.num_rows, q.shape[1]).index_copy_(0, needed, q)
        env.act(q, epsilon=actor.epsilon, temperature=0.0 if q is None else actor.temperature)
        if actor.rows is not None:
            drawn.append((actor.rows, env.action[actor.rows], env.propensity[actor.rows]))
    for rows, action, propensity in drawn:
        env.action.index_copy_(0, rows, action)
        env.propensity.index_copy_(0, rows, propensity)
    (step or env.step)()
    observer.after()


class Experience(Protocol):
    """Source of a RolloutSource's rows: environments of this process, or files of other processes.

    Attributes:
        actors: the actors of each type of agents, by its name.
        rings: the rings of the types that learn, by name.
        device: the device of the rings.
    """

    device: torch.device

    @property
    def actors(self) -> Mapping[str, Any]: ...  # noqa: D102
    @property
    def rings(self) -> Mapping[str, ReplayRing]: ...  # noqa: D102

    def explore(self, epsilon: float) -> None:
        """Sets the share of uniform draws."""
        ...

    def run(self, steps: int, *, follow_policy: bool = True) -> None:
        """Writes the rows of `steps` steps of every environment into the rings.

        Args:
            steps: number of steps of each environment.
            follow_policy: whether types that learn act by their policies; otherwise they draw uniformly.
        """
        ...

    def check(self) -> None:
        """Raises the errors of the written rows."""
        ...

    def take_finished(self) -> Tensor:
        """Returns and resets [2 + actors] float64.

        Number of ended episodes, sum of their steps, and for each type the sum of its agents' mean returns.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a later start."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a `state_dict`."""
        ...


class Rollout(Observer):
    """Policies in environments.

    Args:
        env: this rank's environments, which are reset.
        actors: the actors of each type of agents, by its name.
        device: the device of the rings; environments may run elsewhere.
        capture: turns a step on fixed buffers into one that is replayed on the device.
        unit_reward: whether to refuse rewards outside [0, 1], for which cross-entropy is not defined.

    Attributes:
        env, actors, device: as given.
        rings: the rings of the types that learn, by name.
    """

    def __init__(
        self,
        env: VectorEnv,
        actors: Mapping[str, Actor],
        *,
        device: torch.device,
        capture: Callable[[Step], Step] = lambda step: step,
        unit_reward: bool = False,
    ) -> None:
        self.env = env
        self.actors = dict(actors)
        self.rings = {name: actor.ring for name, actor in actors.items() if actor.ring is not None}
        self._unit_reward = unit_reward
        self._out_of_range_rewards = torch.zeros((), dtype=torch.int64, device=env.device)
        self.device = device
        self._finished = torch.zeros(2 + len(actors), dtype=torch.float64, device=env.device)
        env.reset()
        # copies, as a step overwrites the columns before the transition is complete
        self._before = {name: tensor.clone() for name, tensor in self._observation_columns().items()}
        self._uniform = [actor if actor.ring is None else replace(actor, policy=None) for actor in actors.values()]
        self._informed = capture(lambda: play_step(env, self.actors.values(), self))

    def explore(self, epsilon: float) -> None:
        """Sets the share of uniform draws of the types that learn."""
        for name in self.rings:
            self.actors[name].epsilon.fill_(epsilon)

    @torch.no_grad()
    def run(self, steps: int, *, follow_policy: bool = True) -> None:
        """Takes steps in every environment.

        Args:
            steps: number of steps of each environment.
            follow_policy: whether types that learn act by their policies; otherwise they draw uniformly.
        """
        for _ in range(steps):
            if follow_policy:
                self._informed()
            else:
                play_step(self.env, self._uniform, self)

    def take_finished(self) -> Tensor:
        """Returns and resets [2 + actors] float64.

        Number of ended episodes, sum of their steps, and for each type the sum of its agents' mean returns.

        Raises:
            SimulationError: an action was invalid, or a reward is not finite or outside the range of the loss.
        """
        self.check()
        totals = self._finished.clone()
        require_finite_returns(totals, self.env.spec.name)
        self._finished.zero_()
        return totals

    def check(self) -> None:
        """Waits for the device and raises the errors of the environments.

        Raises:
            SimulationError: an action was invalid, or a reward is outside the range of the loss.
        """
        self.env.check()
        require_rewards_in_range(int(self._out_of_range_rewards), self.env.spec.name)

    def state_dict(self) -> dict[str, Any]:
        """Returns the environments' state and the counts since the last report."""
        return {
            "env": self.env.state_dict(),
            "finished": self._finished,
            "out_of_range_rewards": self._out_of_range_rewards,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a `state_dict` after the rings; environments that can do so continue within their episodes."""
        self.env.load_state_dict(state["env"])
        if self.env.restarts:
            for ring in self.rings.values():
                ring.end_episodes()
        self._finished.copy_(state["finished"])
        self._out_of_range_rewards.copy_(state["out_of_range_rewards"])

    def _observation_columns(self) -> dict[str, Tensor]:
        env = self.env
        # features that all rows share are not copied
        features = env.features if env.spec.candidates else None
        columns = {"observation": env.observation, "mask": env.mask, "features": features, "present": env.in_game}
        return {name: tensor for name, tensor in columns.items() if tensor is not None}

    def before(self) -> None:
        """Copies the observation columns."""
        for name, column in self._observation_columns().items():
            self._before[name].copy_(column)

    def after(self) -> None:
        """Writes the step into the rings and counts ended episodes."""
        env = self.env
        step = EnvStep(
            action=env.action,
            reward=env.reward,
            terminated=env.row_terminated,
            truncated=env.row_truncated,
            next_observation=env.next_observation,
            propensity=env.propensity,
            next_mask=env.next_mask,
            next_features=env.next_features if "features" in self._before else None,
            **self._before,
        ).to(self.device)
        for name, ring in self.rings.items():
            rows = self.actors[name].rows
            ring.write(step if rows is None else step.rows(rows.to(self.device)))
        if self._unit_reward:
            self._out_of_range_rewards += (~((env.reward >= 0) & (env.reward <= 1))).sum()
        over = env.ended != 0
        earned = (env.last_return.view(env.num_envs, -1) * over.unsqueeze(1)).flatten()
        by_type = [earned if actor.rows is None else earned[actor.rows] for actor in self.actors.values()]
        returns = [rows.sum(dtype=torch.float64) * (env.num_envs / len(rows)) for rows in by_type]
        episodes, steps = (value.sum(dtype=torch.float64) for value in (over, env.last_length * over))
        self._finished += torch.stack((episodes, steps, *returns))


def require_rewards_in_range(count: int, environment: str) -> None:
    """Checks the number of rewards outside [0, 1], for which cross-entropy is not defined.

    Raises:
        SimulationError: `count` is not 0.
    """
    if count:
        expected = "numbers from 0 to 1 for rl.q_network_loss bce_with_logits"
        raise SimulationError(Problem(f"rewards of {environment}", expected, f"{count} others", "Use mse or huber"))


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSchedule:
    """Schedule of environment steps and optimizer steps.

    Attributes:
        num_envs: number of environments over all ranks.
        warmup: steps of every environment with uniform draws before learning.
        steps: steps of every environment in a rollout.
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
    """Batches of simulated transitions for this rank, with the same number of rows for each type that learns.

    Args:
        rollout: collects the transitions.
        exploration: share of uniform draws over time.
        schedule: schedule of environment steps.
        rows: number of rows of this rank's minibatch.
        scale: factor that turns a ring's weights into shares of an optimizer step's loss.
        transform: maps raw features to the network's input.
    """

    def __init__(
        self,
        rollout: Experience,
        exploration: Exploration,
        schedule: UpdateSchedule,
        *,
        rows: int,
        scale: float,
        transform: Callable[[TransitionBatch, float], TransitionBatch],
    ) -> None:
        self.rollout = rollout
        self._exploration = exploration
        self._schedule = schedule
        self._rows = rows
        self._scale = scale
        self._transform = transform
        self._beta = torch.full((1,), schedule.beta, device=rollout.device)
        self._index: dict[str, Tensor] = {}
        self._step = 0
        self._warm = False

    def collect(self, step: int) -> None:
        """Steps the environments if they are due before optimizer step `step`."""
        schedule = self._schedule
        self._step = step
        if not self._warm:
            self.rollout.run(schedule.warmup, follow_policy=False)
            self.rollout.check()
            self._warm = True
        if step % schedule.updates == 0:
            self.rollout.explore(self._exploration.epsilon(schedule.env_steps(step)))
            self.rollout.run(schedule.steps)
        self._beta.fill_(schedule.beta + (1 - schedule.beta) * step / max(schedule.num_updates, 1))

    def __next__(self) -> Any:
        """Returns a TransitionBatch or, with several types of agents, a batch for each type that learns, by name."""
        drawn = {name: ring.sample(self._rows, beta=self._beta) for name, ring in self.rollout.rings.items()}
        self._index = {name: sample.index for name, sample in drawn.items()}
        batches: dict[str, Any] = {name: self._transform(sample.batch, self._scale) for name, sample in drawn.items()}
        return batches.get(ONLY, batches)

    def record_errors(self, row_errors: Tensor | Mapping[str, Tensor]) -> None:
        """Sets the priorities of the last batch's rows."""
        errors = {ONLY: row_errors} if isinstance(row_errors, Tensor) else row_errors
        for name, ring in self.rollout.rings.items():
            ring.update_priorities(self._index[name], errors[name])

    def at_end(self, step: int) -> None:
        """Does nothing: only a learner with collectors has something to do after the last optimizer step."""

    def partition(self, states: Sequence[dict[str, Any]], rank: int, world: int) -> dict[str, Any]:
        """Returns the state of a rank's environments, by their numbers over all ranks.

        Args:
            states: states of all ranks that saved.
            rank: current rank.
            world: current number of ranks.
        """
        envs = sum(int(state["rollout"]["env"]["identity"][0]) for state in states)
        return regroup_source(states, rank, envs * rank // world, envs * (rank + 1) // world)

    @property
    def env_steps(self) -> int:
        """Environment steps of all ranks so far, warm-up included."""
        schedule = self._schedule
        return schedule.warmup * schedule.num_envs + schedule.env_steps(self._step + schedule.updates)

    def state_dict(self) -> dict[str, Any]:
        """Returns rings, environments and the number of the next optimizer step."""
        parts = {ring_key(name): ring.state_dict() for name, ring in self.rollout.rings.items()}
        return {"step": self._step, "warm": self._warm, **parts, "rollout": self.rollout.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a `state_dict`."""
        self._step = int(state["step"])
        self._warm = bool(state["warm"])
        for name, ring in self.rollout.rings.items():
            ring.load_state_dict(state[ring_key(name)])
        self.rollout.load_state_dict(state["rollout"])


def ring_key(name: str) -> str:
    """Returns the key of a type's ring in a source's state."""
    return f"ring.{name}".removesuffix(".")


def regroup_source(states: Sequence[dict[str, Any]], rank: int, first: int, stop: int) -> dict[str, Any]:
    """Returns the state of a RolloutSource for another range of a run's environments.

    Args:
        states: the states of all ranks that saved, whose environments follow each other by global number.
        rank: number of the rank; it continues the draws of the saved rank with that number, if there was one.
        first: global number of its first environment.
        stop: global number after its last environment.
    """
    rollouts = [state["rollout"] for state in states]
    envs = [rollout["env"] for rollout in rollouts]
    saved = sum(int(env["identity"][0]) for env in envs)

    def part(tensors: Sequence[Tensor], axis: int) -> Tensor:
        """Returns the environments' rows along an axis with one or more rows per environment."""
        rows_per_env = sum(tensor.shape[axis] for tensor in tensors) // saved
        return _slice(tensors, axis, first * rows_per_env, stop * rows_per_env)

    identity = torch.tensor([stop - first, first, *envs[0]["identity"][2:].tolist()])
    names = envs[0].keys() - {"identity", "fault"}
    env = {name: part([saved_env[name] for saved_env in envs], int(name == "state")) for name in names}
    rings = {}
    ring_keys = [key for key in states[0] if key.split(".")[0] == "ring"]
    for key in ring_keys:
        saved_rings = [state[key] for state in states]
        rings[key] = {  # tensors of one dimension are the same on all ranks, except those below
            name: part([ring[name] for ring in saved_rings], 1) if value.dim() > 1 else value
            for name, value in saved_rings[0].items()
            if name != "generator"
        }
        slots, columns = saved_rings[0]["shape"].tolist()
        rings[key]["shape"] = torch.tensor([slots, (stop - first) * columns // int(envs[0]["identity"][0])])
        if "largest_priority" in saved_rings[0]:
            rings[key]["largest_priority"] = torch.stack([ring["largest_priority"] for ring in saved_rings]).amax(0)
        if rank < len(saved_rings):
            rings[key]["generator"] = saved_rings[rank]["generator"]
    counts = {name: partitioned_count(states, rank, name) for name in ("finished", "out_of_range_rewards")}
    rollout = {"env": {**env, "identity": identity, "fault": torch.zeros_like(envs[0]["fault"])}, **counts}
    return {"step": states[0]["step"], "warm": states[0]["warm"], **rings, "rollout": rollout}


def partitioned_count(states: Sequence[dict[str, Any]], rank: int, name: str) -> Tensor:
    """Returns a rank's part of a count that is summed over ranks: the total for rank 0, zeros for the others."""
    total = torch.stack([state["rollout"][name] for state in states]).sum(0)
    return torch.zeros_like(total) if rank else total


def _slice(parts: Sequence[Tensor], axis: int, first: int, stop: int) -> Tensor:
    """Returns [first, stop) along an axis of the concatenated parts without concatenating all of them."""
    overlaps = []
    begin = 0
    for part in parts:
        size = part.shape[axis]
        low, high = max(first - begin, 0), min(stop - begin, size)
        if high > low:
            overlaps.append(part.narrow(axis, low, high - low))
        begin += size
    return torch.cat(overlaps, axis)
