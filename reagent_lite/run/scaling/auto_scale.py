"""Chooses the number of environments and the minibatch by measurement before a run begins: simulation.auto_scale.

memory, replay, length of the run ─► limit ─► num_envs ─► minibatch_size ─► num_envs ─► smallest of the fastest, cached
                                               └ each probe: this machine's processes, run/scaling/probe.py

Rank 0 searches on its machine while the other ranks wait. Sizes are per process, so that a choice is valid for any
number of processes. The ratio of learned rows to environment steps stays as configured: with more environments a round
learns from more rows. They are one minibatch while num_envs is searched, and then as many as cost no speed.
Fewer and larger optimizer steps teach less, so the minibatch grows only as long as a run has enough steps.
"""

import json
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from reagent_lite import __version__
from reagent_lite.config import WorkflowConfig, expand_config
from reagent_lite.console import logger
from reagent_lite.distributed.gpus import list_gpus, used_gpus
from reagent_lite.distributed.group import Group
from reagent_lite.distributed.worker import Reports
from reagent_lite.errors import ConfigError, Problem, pluralize
from reagent_lite.memory import free_bytes, size_text
from reagent_lite.run.agents import agent_types
from reagent_lite.run.environments import compile_environment
from reagent_lite.run.memory_needs import simulation_memory
from reagent_lite.run.scaling.search import search, smallest
from reagent_lite.run.simulated import simulated_plan
from reagent_lite.shipped import user_cache
from reagent_lite.sim.backend import Backend
from reagent_lite.sim.cache import machine, make_key
from reagent_lite.sim.env import VectorEnv
from reagent_lite.sim.kernel_sources import built_from, find_environment
from reagent_lite.training.checkpoint_folder import CheckpointFolder
from reagent_lite.training.resume import find_unfinished
from reagent_lite.whole_files import scratch_folder, write_whole

_KEY = "simulation.auto_scale"
# Smallest numbers of rounds and optimizer steps of a scaled run; fewer steps if fewer are configured. Measured on
# CartPole, on which 16 environments reach a return of 500: 140 steps in 140 rounds reach 112; 5000 steps in 586 rounds
# reach 412 to 476; 10 000 steps reach 404 in 140 rounds, and 499 to 500 in 293 or 586 rounds.
_FEWEST_ROUNDS = 500
_FEWEST_STEPS = 10_000
_MEMORY_SHARE = 0.9
_PROBE_SECONDS = 120.0
_SEARCH_SHARE = 0.25  # of startup_timeout_seconds, for which the other ranks wait
_POLL_SECONDS = 0.05


class Scale(NamedTuple):
    """Sizes of one process, which the search chooses.

    Attributes:
        num_envs: number of environments.
        minibatch_size: rows of a minibatch.
        updates: optimizer steps after each rollout.
    """

    num_envs: int
    minibatch_size: int
    updates: int

    @classmethod
    def of(cls, config: WorkflowConfig, world: int) -> "Scale":
        """Returns the scale of each of `world` processes that run a config."""
        settings = config.environments
        return cls(
            num_envs=-(-settings.num_envs // world),
            minibatch_size=config.minibatch_over(1),
            updates=settings.updates_per_rollout,
        )

    def rows(self, num_envs: int) -> int:
        """Returns the rows to learn from after one step of `num_envs` environments, at this scale's ratio."""
        return max(round(self.minibatch_size * self.updates * num_envs / self.num_envs), 1)

    def with_minibatch(self, num_envs: int, minibatch: int, fewest: int = 1) -> "Scale":
        """Returns the scale with `num_envs` environments.

        Args:
            num_envs: number of environments.
            minibatch: largest number of rows of a minibatch.
            fewest: smallest number of updates.
        """
        rows = self.rows(num_envs)
        updates = max(-(-rows // minibatch), fewest)
        return Scale(num_envs=num_envs, minibatch_size=-(-rows // updates), updates=updates)

    def apply_to(self, config: WorkflowConfig, world: int) -> WorkflowConfig:
        """Returns the config for `world` processes of this scale."""
        scaled = config.with_environments(num_envs=self.num_envs * world, updates_per_rollout=self.updates)
        return scaled.with_minibatch(self.minibatch_size)


class Limit(NamedTuple):
    """The largest number of environments of a process, and the reason for it."""

    num_envs: int
    reason: str


class SearchResult(BaseModel):
    """The result of a search, as stored in the cache.

    Attributes:
        lines: lines of the table of measurements.
        choice: the scale to use, or None if no probe ran.
        measured: time of the measurement in ISO 8601.
    """

    model_config = ConfigDict(frozen=True, strict=True)

    lines: tuple[str, ...]
    choice: Scale | None
    measured: str


def auto_scaled(config: WorkflowConfig, group: Group, folder: Path) -> WorkflowConfig:
    """Returns the config with the scale that is fastest on this machine; every rank calls it.

    An unfinished run keeps its scale.

    Args:
        config: the run's config, with simulation.auto_scale.
        group: the ranks.
        folder: folder of the run's checkpoints.

    Raises:
        ConfigError: no probe ran; with the table of measurements.
    """
    state = find_unfinished(config.checkpoint, CheckpointFolder(folder), group)
    if state is not None:
        saved = state["config"]["simulation"]
        rows = state["config"]["training"]["minibatch_size"]
        if saved is None:
            return config  # the unfinished run has no environments: History.find refuses to continue it
        kept = Scale(num_envs=saved["num_envs"], minibatch_size=rows, updates=saved["updates_per_rollout"])
        return kept.apply_to(config, world=1)
    backend = compile_environment(config.environments, group)
    text = _cached_or_measured(config, group, backend).model_dump_json() if group.is_first else None
    result = SearchResult.model_validate_json(group.broadcast_text(text))
    if result.choice is None:
        raise ConfigError(
            Problem(
                _KEY,
                "a number of environments that runs on this machine",
                "none:\n" + "\n".join(result.lines) + "\n",
                "Lower simulation.num_envs, training.minibatch_size or simulation.replay.capacity, from which the "
                "search starts",
            )
        )
    choice = result.choice
    world = group.world_size
    scaled = choice.apply_to(config, world)
    logger.info(
        f"auto-scaling chose simulation.num_envs={choice.num_envs * world}, training.minibatch_size="
        f"{choice.minibatch_size}, simulation.updates_per_rollout={choice.updates}: "
        f"{simulated_plan(scaled, 1).num_steps:,} optimizer steps instead of {simulated_plan(config, 1).num_steps:,}"
        "; a run with these values and auto_scale=false is the same"
    )
    return scaled


def _cached_or_measured(config: WorkflowConfig, group: Group, backend: Backend) -> SearchResult:
    """Returns the cached result of an earlier run's search, or else searches."""
    limit = largest(config, group, backend)
    file = user_cache() / "auto_scale" / f"{_identity(config, group, backend)}.json"
    with suppress(OSError, ValidationError):
        result = SearchResult.model_validate_json(file.read_text())
        if result.choice is not None and result.choice.num_envs <= limit.num_envs:
            logger.info(f"auto-scaling: measured {result.measured}; delete {file} to measure again")
            for line in result.lines:
                logger.info(line)
            return result
    probes = Probes(config, group)
    result = find_scale(config, limit, probes)
    if result.choice is not None and not probes.out_of_time:
        with suppress(OSError):  # the next run measures again
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, result.model_dump_json().encode())
    return result


def find_scale(config: WorkflowConfig, limit: Limit, probes: "Probes") -> SearchResult:
    """Returns the smallest scale within 3 % of the fastest, and logs a table with a line for each measurement.

    A choice is measured again before it is kept, and the lower of both rates counts, because the best of many noisy
    measurements is biased upwards.

    A minibatch that exceeds a cache is slow with any number of environments. The minibatch is therefore searched with
    the largest number of environments, with which stepping takes little time compared to learning. Then num_envs is
    searched again with that minibatch.

    Args:
        config: gives the smallest scale, and the ratio of learned rows to environment steps.
        limit: largest number of environments.
        probes: measures a scale.
    """
    first = Scale.of(config, probes.world)
    ratio = first.minibatch_size * first.updates / first.num_envs
    lines: list[str] = []
    rates: dict[Scale, float] = {}
    steps = min(_FEWEST_STEPS, simulated_plan(config, 1).num_steps)

    def add(line: str) -> None:
        lines.append(line)
        logger.info(line)

    def with_minibatch(num_envs: int, minibatch: int) -> Scale:
        rounds = simulated_plan(Scale(num_envs, 1, 1).apply_to(config, probes.world), 1).num_steps
        return first.with_minibatch(num_envs, minibatch, fewest=-(-steps // max(rounds, 1)))

    def measure(scale: Scale) -> float:
        value, failure = probes.rate(scale)
        result = failure or f"{value:,.0f}"
        add(f"{scale.num_envs:>12,} {scale.minibatch_size:>12,} {scale.updates:>12,} {result:>16}")
        return value

    def rate(num_envs: int, minibatch: int) -> float:
        scale = with_minibatch(num_envs, minibatch)
        if scale not in rates:
            rates[scale] = measure(scale)
        return rates[scale]

    def result_of(choice: Scale | None) -> SearchResult:
        return SearchResult(lines=tuple(lines), choice=choice, measured=datetime.now(UTC).isoformat(timespec="seconds"))

    add(
        f"auto-scaling {config.environments.env} on {probes.hardware}: each line is a run of a few seconds, with the "
        f"sizes of one process and {ratio:g} learned rows per environment step"
    )
    add(
        f"searching num_envs up to {limit.num_envs:,} ({limit.reason}) with at least {steps:,} optimizer steps in the "
        "run, then minibatch_size with most environments, then num_envs with that minibatch:"
    )
    add(f"{'environments':>12} {'minibatch':>12} {'updates':>12} {'env steps/s':>16}")
    tried = search(lambda size: rate(size, first.rows(size)), first.num_envs, limit.num_envs)
    fewest = smallest(tried)
    if fewest is None:
        return result_of(None)
    most = max(size for size, speed in tried.items() if speed)
    rows = with_minibatch(most, first.rows(most)).minibatch_size
    sizes = search(lambda size: rate(most, size), min(first.minibatch_size, rows), rows)
    minibatch = smallest(sizes) or rows
    first_size = max(fewest, min(math.ceil(minibatch / ratio), most))  # whose rows fill such a minibatch
    search(lambda num_envs: rate(num_envs, minibatch), first_size, limit.num_envs)
    add("measured again before it is kept:")
    measured_again: set[Scale] = set()
    while (choice := smallest(rates)) is not None and choice not in measured_again and not probes.out_of_time:
        measured_again.add(choice)
        again = measure(choice)
        if not probes.out_of_time:  # else the first measurement stands
            rates[choice] = min(rates[choice], again)
    return result_of(choice)


def largest(config: WorkflowConfig, group: Group, backend: Backend) -> Limit:
    """Returns the largest number of environments of a process, limited by memory, replay and the run's length."""
    settings = config.environments
    world = group.world_size
    first = Scale.of(config, world)
    env = VectorEnv(backend, num_envs=1, parametric=config.parametric)
    learners = sum(agent_type.learns for agent_type in agent_types(config, env.spec))
    memory = simulation_memory(config, env, learners, world)
    free = free_bytes(group.device) / (group.ranks.local_world_size if group.device.type == "cpu" else 1)
    left = _MEMORY_SHARE * free - memory.replay
    limits = {
        f"{size_text(left)} of memory besides replay, {size_text(memory.per_env)} each": int(left / memory.per_env),
        f"simulation.replay.capacity holds {config.fewest_slots} steps": (
            settings.replay.capacity // (config.fewest_slots * env.spec.agents * world)
        ),
        f"simulation.total_steps is {_FEWEST_ROUNDS} rounds": (
            settings.total_steps // (_FEWEST_ROUNDS * settings.steps_per_rollout * world)
        ),
    }
    reason = min(limits, key=lambda name: limits[name])
    if limits[reason] <= first.num_envs:
        return Limit(num_envs=first.num_envs, reason=f"simulation.num_envs, as {reason}")
    return Limit(num_envs=limits[reason], reason=reason)


def _identity(config: WorkflowConfig, group: Group, backend: Backend) -> str:
    """Returns a hash of everything that affects the speed of a scale: hardware, software and config."""
    settings = config.environments
    count = group.ranks.local_world_size
    gpus = list_gpus() if group.device.type == "cuda" else ()
    used = used_gpus(count) if gpus else ()
    parts = [machine(), str(group.cores), *(f"{gpu.name} {gpu.driver} {gpu.total}" for gpu in gpus if gpu.uuid in used)]
    inputs = ("simulation", "state_norm_data_path", "action_norm_data_path", "parallel")
    sections = ("algorithm", config.algorithm, "rl", "rainbow", "training", *inputs)
    tree = {name: value for name, value in expand_config(config).items() if name in sections}
    world = [group.world_size, count, group.device.type, backend.device.type]
    software = [torch.__version__, __version__, str(_FEWEST_STEPS)]
    return make_key(
        (
            *parts,
            *software,
            json.dumps([type(config).__name__, world, tree]),
            *built_from(find_environment(settings.env), settings.env_parameters),
        )
    )


class Probes:
    """Measures scales by runs of a few seconds in as many processes as the run has on this machine.

    Attributes:
        world: number of processes of the run.
        hardware: description of the hardware for the log.
    """

    def __init__(self, config: WorkflowConfig, group: Group) -> None:
        self.world = group.world_size
        self._config = config
        self._count = group.ranks.local_world_size
        name = torch.cuda.get_device_name(group.device) if group.device.type == "cuda" else "the CPU"
        several = f", {pluralize(self._count, 'process')} of this machine at once" if self._count > 1 else ""
        self.hardware = f"{name}{several}"
        self._deadline = time.monotonic() + _SEARCH_SHARE * config.rendezvous.startup_timeout_seconds

    @property
    def out_of_time(self) -> bool:
        """Whether no time of the search is left."""
        return time.monotonic() >= self._deadline

    def rate(self, scale: Scale) -> tuple[float, str]:
        """Returns environment steps per second of this machine and "", or 0 and the reason why the probe failed."""
        seconds = min(_PROBE_SECONDS, self._deadline - time.monotonic())
        if seconds <= 0:
            return 0.0, "the search has taken too long"
        with scratch_folder() as folder:
            task = folder / "probe.json"
            task.write_text(json.dumps(self._task(scale, folder)))
            reports = Reports(folder, self._count)
            processes = [
                subprocess.Popen(
                    [sys.executable, "-m", "reagent_lite.run.scaling.probe", str(task)],
                    env=variables,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
                for variables in self._variables(reports)
            ]
            try:
                failure = _wait(processes, reports, seconds)
            finally:
                for process in processes:
                    process.kill()
                    process.wait()
            return (0.0, failure) if failure else (json.loads((folder / "rate.json").read_text()), "")

    def _task(self, scale: Scale, folder: Path) -> dict[str, object]:
        config = scale.apply_to(self._config, self._count)
        settings = config.environments
        capacity = max(settings.replay.capacity * self._count // self.world, config.fewest_slots * settings.num_envs)
        config = config.with_environments(
            auto_scale=False,
            pictures=False,
            warmup_steps=1,
            num_evaluations=1,
            replay=settings.replay.model_copy(update={"capacity": capacity}),
            total_steps=2**30 * settings.num_envs * settings.steps_per_rollout,  # longer than any probe
        )
        alone = {"model_output_path": str(folder / "run"), "num_nodes": 1, "node_index": None, "init_method": None}
        return {"parametric": config.parametric, "config": expand_config(config.model_copy(update=alone))}

    def _variables(self, reports: Reports) -> Iterator[dict[str, str]]:
        """Yields the environment variables of each process, which form a group without other machines."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        of_the_run = ("TORCHELASTIC_", "GROUP_", "ROLE_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(of_the_run)}
        shared = {
            "WORLD_SIZE": self._count,
            "LOCAL_WORLD_SIZE": self._count,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "GLOO_SOCKET_IFNAME": "lo",
        }
        for rank in range(self._count):
            ranks = {name: str(value) for name, value in {**shared, "RANK": rank, "LOCAL_RANK": rank}.items()}
            yield {**kept, **reports.variables, **ranks}


def _wait(processes: list[subprocess.Popen[bytes]], reports: Reports, seconds: float) -> str:
    """Waits for the processes and returns "" if all succeed, or the reason why one failed."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if failures := reports.failures:
            return str(min(failures.values(), key=lambda failure: failure["at"])["message"]).strip().splitlines()[-1]
        if failed := [code for code in codes if code]:
            return f"killed by signal {-failed[0]}" if failed[0] < 0 else f"ended with exit code {failed[0]}"
        if None not in codes:
            return ""
        time.sleep(_POLL_SECONDS)
    return f"not done in {seconds:.0f} s"
