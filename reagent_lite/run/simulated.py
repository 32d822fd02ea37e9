"""Learning in simulation: rollout ─► ring ─► RolloutSource, each rank its own environments by global number."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from reagent_lite.algorithms.dqn import DQN
from reagent_lite.config import ParametricDqnConfig, WorkflowConfig
from reagent_lite.distributed.group import Group
from reagent_lite.run.environments import TRAINING, Reader, Simulation
from reagent_lite.run.learner import reward_boost
from reagent_lite.sim.replay.ring import ReplayRing, ReplaySettings
from reagent_lite.sim.rollout import Exploration, Rollout, RolloutSource, UpdateSchedule
from reagent_lite.sim.spec import EnvSpec
from reagent_lite.training.capture import eager


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedPlan:
    """Steps of a run that only simulates; an "epoch" lies between two evaluations.

    Attributes:
        num_steps, steps_per_epoch, minibatches_per_step: see training.loop.StepPlan.
        minibatch: rows over all ranks.
    """

    num_steps: int
    steps_per_epoch: int
    minibatch: int
    minibatches_per_step: int

    def rows_of_step(self, step: int) -> int:
        """Returns the rows of every step over all ranks."""
        return self.minibatch * self.minibatches_per_step


def simulated_plan(config: WorkflowConfig, minibatch: int) -> SimulatedPlan:
    """Returns the optimizer steps that the config's environment steps give; the last evaluation may come earlier."""
    settings = config.simulation
    assert settings is not None
    learning = settings.total_steps - config.warmup_rounds * settings.num_envs
    updates = learning // (settings.num_envs * settings.steps_per_rollout) * settings.updates_per_rollout
    return SimulatedPlan(
        num_steps=updates,
        steps_per_epoch=-(-updates // settings.num_evaluations),
        minibatch=minibatch,
        minibatches_per_step=config.training.minibatches_per_step,
    )


def ring_settings(config: WorkflowConfig, spec: EnvSpec, num_envs: int) -> ReplaySettings:
    """Returns the size of a process's replay ring and how it is drawn from.

    Args:
        config: the run's config.
        spec: of the environment.
        num_envs: environments of the process.
    """
    settings = config.simulation
    assert settings is not None
    return ReplaySettings(
        num_envs=num_envs,
        observation_size=spec.observation_size,
        num_actions=spec.num_actions,
        action_feature_size=spec.action_feature_size if isinstance(config, ParametricDqnConfig) else 0,
        slots=settings.replay.capacity // settings.num_envs,
        n_step=config.rl.multi_steps or 1,
        gamma=config.rl.gamma,
        masked=spec.masked,
        candidates=spec.candidates,
        prioritized=settings.replay.prioritized,
        alpha=settings.replay.alpha,
    )


def build_source(
    config: WorkflowConfig,
    reader: Reader,
    learner: DQN,
    group: Group,
    *,
    minibatch: int,
    num_steps: int,
    capture: Callable[[Callable[[], None]], Callable[[], None]],
) -> RolloutSource:
    """Returns this rank's environments as a source of minibatches.

    Args:
        config: the run's config.
        reader: the environment, and its features to the network's.
        learner: acts.
        group: ranks share environments and rows.
        minibatch: simulated rows of one minibatch over all ranks.
        num_steps: optimizer steps of the run.
        capture: for rollouts, where environments run on the GPU.
    """
    simulation, rl, world = reader.simulation, config.rl, group.world_size
    settings = simulation.config
    env = simulation.envs(*simulation.part(settings.num_envs, group), stream=TRAINING)
    spec = env.spec
    torch.manual_seed(config.seed + group.rank)
    ring = ReplayRing(
        replace(
            ring_settings(config, spec, env.num_envs),
            seed=None if group.device.type == "cuda" else config.seed + group.rank,
            action_features=_fixed_features(simulation),
            needs_next_action=not rl.maxq_learning,
            boost=reward_boost(config),
        ),
        group.device,
        over_ranks=group.max,
    )
    temperature = rl.temperature if settings.exploration == "softmax" else 0.0
    rollout = Rollout(
        env, reader.policy(learner, env.device), ring, device=group.device, temperature=temperature,
        capture=capture if env.device.type == "cuda" else eager, unit_reward=rl.q_network_loss == "bce_with_logits",
    )  # fmt: skip
    mps = config.training.minibatches_per_step
    schedule = UpdateSchedule(
        num_envs=settings.num_envs,
        warmup=config.warmup_rounds,
        steps=settings.steps_per_rollout,
        updates=settings.updates_per_rollout,
        num_updates=num_steps,
        beta=settings.replay.beta,
    )
    whole = schedule.env_steps(num_steps)
    exploration = Exploration(
        start=settings.epsilon_start,
        end=rl.epsilon if settings.epsilon_end is None else settings.epsilon_end,
        decay_steps=settings.epsilon_decay_steps or max(whole // 10, 1),
        temperature=temperature,
    )
    first, stop = simulation.part(minibatch, group)
    rows = max(stop - first, 1)
    scale = rows * world / (minibatch * mps) if stop > first else 0.0
    return RolloutSource(
        rollout, ring, exploration, schedule, rows=rows, scale=scale, transform=reader.batch, device=group.device
    )


def _fixed_features(simulation: Simulation) -> Tensor | None:
    spec = simulation.backend.spec
    if not simulation.parametric or spec.candidates:
        return None
    return torch.tensor(spec.action_features, dtype=torch.float32)


def training_scalars(source: RolloutSource, group: Group) -> dict[str, float]:
    """Returns figures of the episodes that ended since the last call, over all ranks."""
    episodes, returns, lengths = group.sum(source.rollout.finished().cpu()).tolist()
    figures = {"simulation/env_steps": float(source.env_steps), "simulation/episodes": episodes}
    if episodes:
        figures |= {
            "simulation/training_return/mean": returns / episodes,
            "simulation/training_length/mean": lengths / episodes,
        }
    return figures
