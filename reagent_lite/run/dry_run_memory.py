"""Memory that a run takes, from its config and what is known of its data, before anything is allocated."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from reagent_lite.config import ParametricDqnConfig, WorkflowConfig
from reagent_lite.data.copy.place import CopyManifest
from reagent_lite.data.replay.ring import ReplaySettings
from reagent_lite.distributed.inspection import Gpu
from reagent_lite.distributed.launcher import Processes
from reagent_lite.errors import counted
from reagent_lite.memory import free_bytes
from reagent_lite.run.learner import build_learner
from reagent_lite.sim.cpu import CpuBackend
from reagent_lite.sim.env import VectorEnv
from reagent_lite.sim.sources import find_environment
from reagent_lite.types import SourceSpec

# numbers that torch's optimizers keep for each parameter, as built here; those of Adam's kind keep two
_STATES = {"SGD": 0, "Adagrad": 1, "RMSprop": 1, "ASGD": 1, "Adafactor": 1}
_ADAM_STATES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Memory for one purpose.

    Attributes:
        name: of the purpose.
        bytes: of one process.
        formula: how they come about.
    """

    name: str
    bytes: int
    formula: str


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Processes of a run.

    Attributes:
        size: of all machines.
        here: of this machine.
        device_type: "cuda" or "cpu".
    """

    size: int
    here: int
    device_type: str

    @classmethod
    def of(cls, processes: Processes, size: int) -> "World":
        """Returns the world of `size` processes, of which this machine has `processes`."""
        return cls(size=size, here=processes.count, device_type=processes.device_type)


def environment(config: WorkflowConfig) -> VectorEnv:
    """Returns one environment of the config's simulation on the CPU; nothing of its compilation is kept.

    Raises:
        SimulationError, KernelBuildError: see sim.backend.open_backend.
    """
    settings = config.simulation
    assert settings is not None
    path = find_environment(settings.env)
    with _compiled_elsewhere():
        backend = CpuBackend(path, settings.env_parameters, settings.math, threads=1, optimization="-O0")
        return VectorEnv(backend, num_envs=1, parametric=isinstance(config, ParametricDqnConfig))


def network_needs(config: WorkflowConfig, spec: SourceSpec) -> list[Need]:
    """Returns what the networks of one process take, gradients and optimizer among them."""
    with torch.device("meta"):
        learner = build_learner(config, spec, torch.device("meta"))
    weights = sum(p.numel() * p.element_size() for p in learner.parameters())
    trained = sum(p.numel() * p.element_size() for p in learner.parameters() if p.requires_grad)
    name = config.training.optimizer_class
    assert name is not None
    states = _STATES.get(name, _ADAM_STATES)
    count = trained // 4
    return [
        Need(name="networks", bytes=weights,
             formula=f"{count:,} trained parameters and {(weights - trained) // 4:,} of the target, 4 bytes each"),
        Need(name="gradients and optimizer", bytes=trained * (1 + states),
             formula=f"{count:,} parameters x 4 bytes x (1 gradient + {states} of {name})"),
    ]  # fmt: skip


def simulation_needs(config: WorkflowConfig, env: VectorEnv, world: World) -> list[Need]:
    """Returns what environments and replay of one process take: the largest part that a process gets."""
    settings = config.simulation
    assert settings is not None
    if not config.simulated_share:
        return []
    spec, parametric = env.spec, isinstance(config, ParametricDqnConfig)
    own = -(-settings.num_envs // world.size)
    ring = ReplaySettings(
        num_envs=own,
        observation_size=spec.observation_size,
        num_actions=spec.num_actions,
        action_feature_size=spec.action_feature_size if parametric else 0,
        slots=settings.replay.capacity // settings.num_envs,
        gamma=config.rl.gamma,
        masked=spec.masked,
        candidates=spec.candidates,
        prioritized=settings.replay.prioritized,
    )
    rows, share = ring.slots * own, f"{own:,} of {settings.num_envs:,} environments"
    return [
        Need(name="replay ring", bytes=rows * ring.row_bytes,
             formula=f"{ring.slots:,} steps x {share} x {ring.row_bytes:,} bytes"),
        Need(name="environments", bytes=own * env.bytes_per_env,
             formula=f"{own:,} environments x {env.bytes_per_env:,} bytes"),
    ]  # fmt: skip


def page_need(config: WorkflowConfig, copy: CopyManifest) -> Need | None:
    """Returns what the evaluation takes on rank 0: scored rows of all machines, and as much again for the estimates.

    None where only reading tells: eval data, or lists of candidates.

    Args:
        config: of the run.
        copy: of the training data on this machine; other machines with shards are taken to have as many rows.
    """
    episodes = copy.counts.get("episodes", 0) * (config.num_nodes if config.data.layout == "shards" else 1)
    if config.eval_data_path is not None or not copy.action_names or not episodes:
        return None
    settings, choices, outcomes = config.evaluation, len(copy.action_names), 1 + len(copy.metric_names)
    scored = min(round(episodes * settings.held_out_share), settings.max_episodes)
    length = copy.rows / copy.counts["episodes"]
    # columns of EvaluationPage; the mask has 1 byte each
    row = 8 * (5 + choices + 2 * outcomes + 2 * choices * outcomes) + choices
    return Need(name="evaluation", bytes=round(2 * scored * length * row),
                formula=f"2 x {scored:,} episodes x {length:g} rows x {row:,} bytes")  # fmt: skip


def free_here(world: World, gpus: tuple[Gpu, ...]) -> tuple[int, str] | None:
    """Returns bytes that are free for one process and where; None where the driver does not tell.

    Args:
        world: of the run.
        gpus: that this machine's processes will use, in order.
    """
    if world.device_type == "cpu":
        return free_bytes(torch.device("cpu")) // world.here, (
            f"this machine's free memory / {counted(world.here, 'process')}"
        )
    known = [gpu.free for gpu in gpus if gpu.total]
    return (min(known), "the fullest GPU's free memory") if known else None


@contextmanager
def _compiled_elsewhere() -> Iterator[None]:
    """Keeps compilations in a folder that is removed, instead of the user's cache."""
    name = "REAGENT_LITE_CACHE"
    before = os.environ.get(name)
    with tempfile.TemporaryDirectory(prefix="reagent_lite_") as folder:
        os.environ[name] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before
