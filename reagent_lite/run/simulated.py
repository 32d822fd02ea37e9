"""Learning in simulation: rollout ─► ring ─► RolloutSource, each rank its own environments by global number."""

from dataclasses import dataclass

import torch

from reagent_lite.algorithms.dqn import DQN
from reagent_lite.config import ParametricDqnConfig, WorkflowConfig
from reagent_lite.data.sampling.plan import ReadPlan
from reagent_lite.distributed.group import Group
from reagent_lite.run.environments import TRAINING, Reader
from reagent_lite.run.learner import capture_of, reward_boost
from reagent_lite.sim.replay.ring import ReplayRing, ReplaySettings
from reagent_lite.sim.rollout import Exploration, Rollout, RolloutSource, UpdateSchedule
from reagent_lite.sim.spec import EnvSpec
from reagent_lite.training.capture import eager


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedPlan:
    """Steps of a run that simulates; without logged rows an "epoch" lies between two evaluations.

    Attributes:
        num_steps, steps_per_epoch, minibatches_per_step: see training.loop.StepPlan.
        minibatch: simulated rows over all ranks.
        logged: the plan of the logged rows that each minibatch has as well, or None.
    """

    num_steps: int
    steps_per_epoch: int
    minibatch: int
    minibatches_per_step: int
    logged: ReadPlan | None = None

    def rows_of_step(self, step: int) -> int:
        """Returns the rows of a step over all ranks."""
        logged = 0 if self.logged is None else self.logged.rows_of_step(step)
        return self.minibatch * self.minibatches_per_step + logged


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


def ring_settings(config: WorkflowConfig, spec: EnvSpec, num_envs: int, seed: int | None = None) -> ReplaySettings:
    """Returns the size of a process's replay ring and how it is drawn from.

    Args:
        config: the run's config.
        spec: of the environment.
        num_envs: environments of the process.
        seed: of its draws, see ReplaySettings.
    """
    settings, parametric = config.simulation, isinstance(config, ParametricDqnConfig)
    assert settings is not None
    fixed = spec.action_features if parametric and not spec.candidates else None
    return ReplaySettings(
        num_envs=num_envs,
        observation_size=spec.observation_size,
        num_actions=spec.num_actions,
        action_feature_size=spec.action_feature_size if parametric else 0,
        action_features=None if fixed is None else torch.tensor(fixed, dtype=torch.float32),
        slots=settings.replay.capacity // settings.num_envs,
        n_step=config.rl.multi_steps or 1,
        gamma=config.rl.gamma,
        masked=spec.masked,
        candidates=spec.candidates,
        prioritized=settings.replay.prioritized,
        alpha=settings.replay.alpha,
        needs_next_action=not config.rl.maxq_learning,
        boost=reward_boost(config),
        seed=seed,
    )


def open_rollouts(
    config: WorkflowConfig, reader: Reader, learner: DQN, group: Group, plan: SimulatedPlan
) -> RolloutSource:
    """Returns this rank's environments as a source of minibatches.

    Args:
        config: the run's config.
        reader: the environment, and its features to the network's.
        learner: acts.
        group: ranks share environments and rows.
        plan: of the run.
    """
    simulation, rl = reader.simulation, config.rl
    settings = simulation.config
    env = simulation.envs(*simulation.part(settings.num_envs, group), stream=TRAINING)
    seed = config.seed + group.rank
    torch.manual_seed(seed)
    own = ring_settings(config, env.spec, env.num_envs, None if group.device.type == "cuda" else seed)
    ring = ReplayRing(own, group.device, over_ranks=group.max)
    schedule = UpdateSchedule(
        num_envs=settings.num_envs,
        warmup=config.warmup_rounds,
        steps=settings.steps_per_rollout,
        updates=settings.updates_per_rollout,
        num_updates=plan.num_steps,
        beta=settings.replay.beta,
    )
    exploration = Exploration(
        start=settings.epsilon_start,
        end=rl.epsilon if settings.epsilon_end is None else settings.epsilon_end,
        decay_steps=settings.epsilon_decay_steps or max(schedule.env_steps(plan.num_steps) // 10, 1),
        temperature=rl.temperature if settings.exploration == "softmax" else 0.0,
    )
    rollout = Rollout(
        env, reader.policy(learner, env.device), ring, device=group.device, temperature=exploration.temperature,
        capture=capture_of(config, group) if env.device.type == "cuda" else eager,
        unit_reward=rl.q_network_loss == "bce_with_logits",
    )  # fmt: skip
    first, stop = simulation.part(plan.minibatch, group)
    rows = max(stop - first, 1)
    scale = rows * group.world_size / (plan.minibatch * plan.minibatches_per_step) if stop > first else 0.0
    return RolloutSource(
        rollout, ring, exploration, schedule, rows=rows, scale=scale, transform=reader.batch, device=group.device
    )


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
