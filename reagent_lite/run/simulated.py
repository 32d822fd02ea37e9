"""Learning in simulation: rollout ─► replay ring ─► RolloutSource. Ranks divide the environments by their numbers."""

from dataclasses import dataclass, replace

import torch

from reagent_lite.algorithms.learners import Learner
from reagent_lite.algorithms.policy_learner import reward_boost
from reagent_lite.config import WorkflowConfig
from reagent_lite.data.sampling.plan import ReadPlan
from reagent_lite.distributed.group import Group
from reagent_lite.run.environments import TRAINING, ObservationEncoder, part_of
from reagent_lite.run.learner import rollout_capture
from reagent_lite.sim.experience import Experience, Exploration, Rollout, RolloutSource, UpdateSchedule
from reagent_lite.sim.replay.ring import ReplayRing, ReplaySettings
from reagent_lite.sim.spec import EnvSpec

RETURN = "simulation/return/mean"
"""Tag of the mean return of an evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedPlan:
    """The optimizer steps of a run in simulation. Without logged rows, an epoch is the steps between two evaluations.

    Attributes:
        num_steps, steps_per_epoch, minibatches_per_step: see training.loop.StepPlan.
        minibatch: number of simulated rows over all ranks.
        types: number of types of agents that learn, each from its own minibatch.
        logged: the plan of the logged rows in each minibatch, or None.
    """

    num_steps: int
    steps_per_epoch: int
    minibatch: int
    minibatches_per_step: int
    types: int = 1
    logged: ReadPlan | None = None

    def rows_of_step(self, step: int) -> int:
        """Returns the rows of a step over all ranks."""
        logged = 0 if self.logged is None else self.logged.rows_of_step(step)
        return self.minibatch * self.minibatches_per_step * self.types + logged


def simulated_plan(config: WorkflowConfig, minibatch: int, types: int = 1) -> SimulatedPlan:
    """Returns the plan of a run with the config's number of environment steps; the last epoch may be shorter."""
    settings = config.environments
    learning = settings.total_steps - config.warmup_rounds * settings.num_envs
    updates = learning // (settings.num_envs * settings.steps_per_rollout) * settings.updates_per_rollout
    return SimulatedPlan(
        num_steps=updates,
        steps_per_epoch=-(-updates // settings.num_evaluations),
        minibatch=minibatch,
        minibatches_per_step=config.training.minibatches_per_step,
        types=types,
    )


def ring_settings(config: WorkflowConfig, spec: EnvSpec, num_envs: int, agents: int = 1) -> ReplaySettings:
    """Returns the settings of a process's replay ring.

    Args:
        config: the run's config.
        spec: the spec of the environment.
        num_envs: environments of the process.
        agents: number of agents of each environment whose rows it keeps.
    """
    settings = config.environments
    parametric = config.parametric
    return ReplaySettings(
        num_envs=num_envs * agents,
        observation_size=spec.observation_size,
        observation_dtype=spec.observation_dtype,
        num_actions=spec.num_actions,
        action_feature_size=spec.action_feature_size if parametric else 0,
        action_features=spec.action_features if parametric and not spec.candidates else None,
        slots=settings.replay.capacity // (settings.num_envs * agents),
        n_step=config.rl.multi_steps or 1,
        gamma=config.rl.gamma,
        masked=spec.masked,
        candidates=spec.candidates,
        prioritized=settings.replay.prioritized,
        alpha=settings.replay.alpha,
        absences=spec.agents > 1,
        needs_next_action=not config.rl.maxq_learning,
        boost=reward_boost(config),
    )


def open_ring(settings: ReplaySettings, config: WorkflowConfig, group: Group) -> ReplayRing:
    """Returns this rank's replay ring, whose random draws depend on the config's seed and the rank."""
    seed = config.seed + group.rank
    torch.manual_seed(seed)
    seeded = replace(settings, seed=None if group.device.type == "cuda" else seed)
    return ReplayRing(seeded, group.device, over_ranks=group.all_reduce_max)


def update_schedule(config: WorkflowConfig, num_updates: int) -> UpdateSchedule:
    """Returns the schedule of environment steps and updates in a run of `num_updates` optimizer steps."""
    settings = config.environments
    return UpdateSchedule(
        num_envs=settings.num_envs,
        warmup=config.warmup_rounds,
        steps=settings.steps_per_rollout,
        updates=settings.updates_per_rollout,
        num_updates=num_updates,
        beta=settings.replay.beta,
    )


def exploration_of(config: WorkflowConfig, num_updates: int) -> Exploration:
    """Returns the exploration over a run of `num_updates` optimizer steps."""
    env_steps = update_schedule(config, num_updates).env_steps(num_updates)
    settings = config.environments
    rl = config.rl
    return Exploration(
        start=settings.epsilon_start,
        end=rl.epsilon if settings.epsilon_end is None else settings.epsilon_end,
        decay_steps=settings.epsilon_decay_steps or max(env_steps // 10, 1),
        temperature=config.temperature if settings.exploration == "softmax" else 0.0,
    )


def open_rollouts(encoder: ObservationEncoder, learner: Learner, plan: SimulatedPlan, group: Group) -> RolloutSource:
    """Returns this rank's environments as a source of minibatches.

    Args:
        encoder: converts observations of the environment to the network's input.
        learner: the learner whose policies act.
        plan: the plan of the run.
        group: ranks that divide the environments and the rows of a minibatch.
    """
    config = encoder.config
    simulation = encoder.simulation
    env = simulation.envs(*part_of(simulation.config.num_envs, group), stream=TRAINING)
    temperature = exploration_of(config, plan.num_steps).temperature
    actors = encoder.actors(env, learner, epsilon=torch.ones(1, device=env.device), temperature=temperature)
    for agent_type in simulation.types:
        if agent_type.learns:
            ring = open_ring(ring_settings(config, env.spec, env.num_envs, len(agent_type.agents)), config, group)
            actors[agent_type.name] = replace(actors[agent_type.name], ring=ring)
    rollout = Rollout(
        env,
        actors,
        device=group.device,
        capture=rollout_capture(config, env.device),
        unit_reward=config.rl.q_network_loss == "bce_with_logits",
    )
    return as_source(rollout, encoder, plan, group)


def as_source(
    experience: Experience,
    encoder: ObservationEncoder,
    plan: SimulatedPlan,
    group: Group,
    source_class: type[RolloutSource] = RolloutSource,
) -> RolloutSource:
    """Returns a source of this rank's part of the minibatches, at least one row of each, from its experience.

    Args:
        experience: fills the rings.
        encoder: converts observations of the environment to the network's input.
        plan: the plan of the run.
        group: ranks that divide the rows of a minibatch.
        source_class: class of the source, which determines the content of a checkpoint.
    """
    config = encoder.config
    first, stop = part_of(plan.minibatch, group)
    rows = max(stop - first, 1)
    scale = rows * group.world_size / (plan.minibatch * plan.minibatches_per_step) if stop > first else 0.0
    return source_class(
        experience,
        exploration_of(config, plan.num_steps),
        update_schedule(config, plan.num_steps),
        rows=rows,
        scale=scale,
        transform=encoder.batch,
    )


def tag_of(kind: str, tag: str) -> str:
    """Returns the tag of a figure for a type of agents: simulation/<type>/… for simulation/…; unchanged for ""."""
    return tag.replace("simulation/", f"simulation/{kind}/", 1) if kind else tag


def training_scalars(source: RolloutSource, group: Group) -> dict[str, float]:
    """Returns the number of environment steps so far, and figures of the episodes that ended since the last call."""
    episodes, lengths, *returns = group.all_reduce(source.rollout.take_finished().cpu()).tolist()
    figures = {"simulation/env_steps": float(source.env_steps), "simulation/episodes": episodes}
    if episodes:
        figures["simulation/training_length/mean"] = lengths / episodes
        for kind, earned in zip(source.rollout.actors, returns, strict=True):
            figures[tag_of(kind, "simulation/training_return/mean")] = earned / episodes
    return figures
