"""--dry_run: what the declared world would do, from the config and what can be known without touching anything.

config ─► machines, meeting ─┬─► known of data ──────┐
                             └─► known of simulation ─┴─► steps, memory ─► lines
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from reagent_lite.config import ParametricDqnConfig, WorkflowConfig
from reagent_lite.data.copy.first_look import holds_events, rows_by_metadata, standing_copy
from reagent_lite.data.copy.place import CopyManifest
from reagent_lite.data.features.normalization import read_normalization
from reagent_lite.data.stage import data_files
from reagent_lite.distributed.group import Place
from reagent_lite.distributed.inspection import list_gpus, used_gpus
from reagent_lite.distributed.launcher import Processes
from reagent_lite.errors import ReagentLiteError, counted
from reagent_lite.memory import size_text
from reagent_lite.run.dry_run_memory import (
    Need,
    World,
    environment,
    free_here,
    network_needs,
    page_need,
    simulation_needs,
)
from reagent_lite.run.simulated import simulated_plan
from reagent_lite.sim.env import VectorEnv
from reagent_lite.sim.sources import find_environment
from reagent_lite.types import SourceSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What is known of a run's experience before it starts.

    Attributes:
        files, bytes: of the training data on this machine.
        rows: of it; None where they must be counted.
        events: the rows are events, of which transitions are made first.
        copy: description of its training copy that stands, or None.
        env: one environment, or None without a simulation.
        spec: what the network must fit, or None where only reading the data tells.
        troubles: sentences on what could not be found out.
    """

    files: int = 0
    bytes: int = 0
    rows: int | None = None
    events: bool = False
    copy: CopyManifest | None = None
    env: VectorEnv | None = None
    spec: SourceSpec | None = None
    troubles: tuple[str, ...] = ()


def look(config: WorkflowConfig) -> Known:
    """Returns what is known of the config's data and environment; what cannot be found out is said.

    Raises:
        SimulationError: there is no such environment.
    """
    known, troubles = Known(), []
    if config.simulation is not None:
        find_environment(config.simulation.env)
    for find_out in (_look_at_data, _look_at_simulation, _look_at_widths):
        try:
            known = find_out(config, known)
        except ReagentLiteError as error:
            troubles.append(str(error))
    return replace(known, troubles=tuple(troubles))


def _look_at_data(config: WorkflowConfig, known: Known) -> Known:
    if not config.training_data_path:
        return known
    files = data_files(config.training_data_path, config.data.columns)
    standing = standing_copy(
        config.training_data_path, config.actions or None, config.data.training_copy_dir, config.data.columns
    )
    copy = None if standing is None else standing[1]
    rows = rows_by_metadata(files) if copy is None else copy.rows
    events = config.timeline is not None or (
        copy is None and holds_events(config.training_data_path, config.data.columns)
    )
    size = sum(file.size for file in files)
    return replace(known, files=len(files), bytes=size, rows=None if events else rows, events=events, copy=copy)


def _look_at_simulation(config: WorkflowConfig, known: Known) -> Known:
    return known if config.simulation is None else replace(known, env=environment(config))


def _look_at_widths(config: WorkflowConfig, known: Known) -> Known:
    """Finds the widths of the network; without a normalization file each feature counts as one column."""
    state = action = None
    if known.env is not None:
        state, action = known.env.spec.observation_size, known.env.spec.action_feature_size
    elif known.copy is not None:
        state, action = len(known.copy.state_ids), len(known.copy.action_ids)
    if config.state_norm_data_path is not None:
        state = read_normalization(config.state_norm_data_path).width
    if config.action_norm_data_path is not None:
        action = read_normalization(config.action_norm_data_path).width
    if isinstance(config, ParametricDqnConfig):
        names: tuple[str, ...] = ()
    else:
        names, action = config.actions or (() if known.env is None else known.env.spec.action_names), 0
    if state is None or action is None:
        return known
    return replace(known, spec=SourceSpec(num_state_features=state, num_action_features=action, action_names=names))


def plan(config: WorkflowConfig, processes: Processes, known: Known) -> Iterator[str]:
    """Yields the lines of the plan; node_index and num_nodes of the config are this machine's."""
    place = Place.read()
    size = processes.count * config.num_nodes if place is None else place.world_size
    world = World.of(processes, size)
    yield from _machines(config, world, place)
    yield from _experience(config, world, known)
    every = config.checkpoint
    cadence = " and ".join(
        ([f"every {every.every_steps} steps"] if every.every_steps else [])
        + ([f"every {every.every_minutes:g} minutes"] if every.every_minutes else [])
    )
    yield (f"checkpoints: {cadence or 'one at the end'}, the newest {every.keep} stay; begins again at most "
           f"{counted(config.restarts, 'time')} after a failure")  # fmt: skip
    yield from _memory(config, world, known)
    yield from (f"warning: {trouble}" for trouble in known.troubles)


def _machines(config: WorkflowConfig, world: World, place: Place | None) -> Iterator[str]:
    per_process = config.training.minibatch_size
    rows = config.data.global_minibatch_size or per_process * world.size
    yield (f"{counted(world.size, f'{world.device_type} process')}, {rows} rows a minibatch over all: "
           f"{rows / world.size:g} each")  # fmt: skip
    if place is not None:
        yield f"machines: as the launcher of these processes has it; rank {place.rank} on node {place.node}"
    elif config.num_nodes > 1:
        node = config.node_index or 0
        first = node * world.here
        ranks = f"rank {first}" if world.here == 1 else f"ranks {first} to {first + world.here - 1}"
        yield (f"machines: {config.num_nodes} x {counted(world.here, 'process')}, if the others start as many as this "
               f"one; this is node {node}, {ranks}; node 0 saves the model")  # fmt: skip
        port = config.rendezvous.port or "a free port"
        by_file = (config.init_method or "").startswith("file:")
        yield (
            f"meeting: {config.init_method or 'init_method is missing'}, all within "
            f"{config.rendezvous.join_timeout_seconds:g} s"
            + (f"; node 0 listens on {config.rendezvous.interface or 'the default route'}, {port}" if by_file else "")
        )


def _experience(config: WorkflowConfig, world: World, known: Known) -> Iterator[str]:
    minibatch = config.data.global_minibatch_size or config.training.minibatch_size * world.size
    if not config.training_data_path:
        steps = simulated_plan(config, minibatch)
        assert config.simulation is not None
        yield (
            f"steps: {steps.num_steps:,} after {config.warmup_rounds * config.simulation.num_envs:,} of "
            f"{config.simulation.total_steps:,} environment steps, evaluated every {steps.steps_per_epoch:,}"
        )
        return
    several = config.num_nodes > 1
    if not known.files:
        return
    own = {"shards": "its own part of the rows", "replicas": "all rows"}[config.data.layout]
    where = f"; layout {config.data.layout}: each machine has {own}" if several else ""
    yield f"data: {config.training_data_path}: {counted(known.files, 'file')}, {size_text(known.bytes)} here{where}"
    if known.events:
        yield "stages: transitions are made of the events first, unless they stand"
    if config.data.shards_path is not None:
        yield (f"stages: node 0 divides the rows at {config.data.shards_path} by layout {config.data.layout}, each "
               "machine fetches its part to its own disk")  # fmt: skip
    if known.rows is None:
        yield "rows: counted at the start, steps with them"
        return
    yield (f"rows: {known.rows:,} here, by " + ("the files' metadata" if known.copy is None else "the training copy"))
    shares = config.num_nodes if config.data.layout == "shards" else 1
    logged = minibatch - round(minibatch * config.simulated_share) or minibatch
    steps_per_epoch = -(-known.rows * shares // (logged * config.training.minibatches_per_step))
    provided = " if the other machines have as many rows" if shares > 1 else " if all can be learned from"
    yield f"steps: {steps_per_epoch:,} an epoch, {steps_per_epoch * config.epochs:,} in all{provided}"


def _memory(config: WorkflowConfig, world: World, known: Known) -> Iterator[str]:
    needs = [] if known.env is None else simulation_needs(config, known.env, world)
    if known.spec is None:
        yield "memory: the network's is known when the data has been read"
    else:
        needs += network_needs(config, known.spec)
    if known.copy is not None:
        size = sum(int(one["size"]) for one in known.copy.files.values())
        state = int(known.copy.files.get("state.npy", {}).get("size", 0))
        yield f"memory: training copy of {size_text(size)} is mapped from disk, not counted"
        page = page_need(config, known.copy)
        if page is not None:
            yield f"memory of rank 0, not counted: {page.name} {size_text(page.bytes)} = {page.formula}"
        if world.device_type == "cuda" and config.data.residency == "device":
            needs.append(Need(name="rows on the GPU", bytes=state, formula="at least the states of this machine"))
    for need in needs:
        yield f"memory of a process: {need.name} {size_text(need.bytes)} = {need.formula}"
    gpus = list_gpus() if world.device_type == "cuda" else ()
    chosen = used_gpus(gpus, world.here)
    free = free_here(world, tuple(gpu for gpu in gpus if gpu.uuid in chosen))
    total = sum(need.bytes for need in needs)
    if free is None:
        yield f"memory of a process: {size_text(total)} in all; what is free on the GPU is not known"
        return
    yield f"memory of a process: {size_text(total)} in all, {size_text(free[0])} free ({free[1]})"
    if total > free[0]:
        largest = max(needs, key=lambda need: need.bytes)
        yield f"warning: memory does not suffice; most is for {largest.name}: {size_text(largest.bytes)}"
