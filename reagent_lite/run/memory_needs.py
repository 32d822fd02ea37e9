"""Estimates of the memory that a process of a run needs, for dry runs, the doctor and auto-scaling."""

from dataclasses import dataclass

import torch

from reagent_lite.config import WorkflowConfig
from reagent_lite.models.embeddings import learned_tables
from reagent_lite.run.learner import build_learner
from reagent_lite.run.simulated import ring_settings
from reagent_lite.sim.env import VectorEnv
from reagent_lite.types import SourceSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Memory that a process needs for one purpose.

    Attributes:
        name: the purpose.
        bytes: size.
        formula: how the size is computed.
    """

    name: str
    bytes: int
    formula: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationMemory:
    """Memory for environments and replay in each process.

    Attributes:
        row: bytes of a replayed row.
        replay: bytes of the replay.
        per_env: bytes of an environment, of its policy's forward pass, and of its share of the rows learned from.
    """

    row: int
    replay: int
    per_env: float


def networks(config: WorkflowConfig, spec: SourceSpec, learners: int = 1) -> Need:
    """Returns the memory for networks, gradients and optimizers of a number of learners.

    Tables of listed ids count as many vectors as `spec` has, which is the most before the ids are counted.
    """
    # numbers that follow the data, before it is read; sizes do not depend on them
    scale = (0.0, 1.0) if config.rl.value_scale == "returns" else config.rl.value_scale
    config = config.with_rl(value_scale=scale, cql_alpha=config.rl.cql_alpha or 0.0)
    with torch.device("meta"):
        learner = build_learner(config, spec, torch.device("meta"))
    weights = learners * sum(p.numel() for p in learner.parameters())
    trained = learners * sum(p.numel() for p in learner.parameters() if p.requires_grad)
    vectors = sum(table.shape[0] for table in learned_tables(learner))
    of_ids = f"; {vectors:,} vectors of ids at most" if vectors else ""
    return Need(
        name="networks",
        bytes=4 * (weights + 3 * trained),
        formula=f"4 bytes x ({weights:,} parameters, and for {trained:,} trained ones a gradient and at most 2 numbers "
        f"of {config.training.optimizer_class}){of_ids}",
    )


def simulation_memory(config: WorkflowConfig, env: VectorEnv, learners: int, world: int) -> SimulationMemory:
    """Returns the memory of each process's environments and replay.

    Args:
        config: the run's config.
        env: environments of the run, one or more.
        learners: number of types of agents that learn in the process.
        world: number of processes.
    """
    spec = env.spec
    settings = config.environments
    choices = spec.num_actions if config.parametric else 1
    # forward and backward pass of the online network, forward passes of two for the next state
    activations = 4 * choices * (sum(config.training.layers[1:-1]) + spec.num_actions)
    row = ring_settings(config, spec, 1).row_bytes
    learned = config.minibatch_over(1) * settings.updates_per_rollout if config.has_minibatch else 0
    rows_per_env = learners * learned / -(-settings.num_envs // world)
    acting = env.bytes_per_env + spec.agents * (4 * spec.observation_size + 2 * activations)
    return SimulationMemory(
        row=row,
        replay=learners * row * settings.replay.capacity // world,
        per_env=acting + rows_per_env * (4 * row + 6 * activations),
    )
