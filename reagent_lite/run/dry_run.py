"""The dry run: steps, data and memory of a run, found without training or writing anything.

config ─► processes ─┬─► files and environment ─► widths ─┬─► DryRun: steps, memory ─┬─► lines of --dry_run
                     └─► free memory ─────────────────────┘                          └─► rows of the doctor
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from reagent_lite.config import WorkflowConfig
from reagent_lite.config.embedding_config import id_features
from reagent_lite.config.paths import show_paths
from reagent_lite.data.copy.location import CopyManifest
from reagent_lite.distributed.gpus import list_gpus, used_gpus
from reagent_lite.distributed.group import ProcessRanks
from reagent_lite.distributed.launcher import Processes
from reagent_lite.distributed.meeting_file import MeetingFile
from reagent_lite.errors import ConfigError, NoCompilerError, ReagentLiteError, needing, pluralize
from reagent_lite.memory import free_bytes, size_text
from reagent_lite.run.agents import AgentType, agent_types
from reagent_lite.run.memory_needs import Need, networks, simulation_memory
from reagent_lite.run.normalization import normalization_files, read_normalizations
from reagent_lite.run.roles.published_policies import most_env_steps_ahead
from reagent_lite.run.simulated import simulated_plan
from reagent_lite.sim.backend import Backend
from reagent_lite.sim.cpu import CpuBackend
from reagent_lite.sim.env import VectorEnv
from reagent_lite.sim.gymnasium_backend import GymnasiumBackend
from reagent_lite.sim.gymnasium_env import open_envs
from reagent_lite.sim.kernel_sources import find_environment
from reagent_lite.sim.spec import EnvSpec
from reagent_lite.training.trackers import require_trackers
from reagent_lite.types import Embedding, SourceSpec
from reagent_lite.whole_files import scratch_folder

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedInput:
    """Training data of a run on this machine, as far as it is known before it is read.

    Attributes:
        files: number of files.
        bytes: size of those files.
        rows: number of their rows, or None if the rows must be counted.
        events: whether the rows are events without a training copy.
        copy: manifest of the training copy, or None if there is no copy yet.
    """

    files: int = 0
    bytes: int = 0
    rows: int | None = None
    events: bool = False
    copy: CopyManifest | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Discounts:
    """Sentences of a plan about discounts by time_diff, from the first rows of the logs; empty without these discounts.

    Attributes:
        lines: the median discount of each path.
        warnings: problems of their unit of time.
    """

    lines: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """Processes, data and memory of a run that has not started.

    Attributes:
        config: the run's config; node_index and num_nodes are those of this machine. It has a minibatch if it gives
            one or if the number of rows is known.
        ranks: ranks of this process if another launcher started it, else None.
        world: number of processes on all machines.
        processes: processes on this machine.
        data: training data on this machine.
        rows: number of rows of all machines, if the others have as many as this one; None if it is not known.
        types: types of agents of the environment.
        spec: numbers of features and choices, or None if they are known only after the data is read.
        needs: memory of one process, by purpose.
        free: free memory for one process in bytes, or None if the driver does not report it.
        free_of: description of the memory that `free` is a part of.
        troubles: messages about missing information.
    """

    config: WorkflowConfig
    ranks: ProcessRanks | None
    world: int
    processes: Processes
    data: LoggedInput
    rows: int | None
    types: tuple[AgentType, ...]
    spec: SourceSpec | None
    needs: tuple[Need, ...]
    free: int | None
    free_of: str
    troubles: tuple[str, ...]

    @property
    def minibatch(self) -> int | None:
        """Number of rows of a minibatch over all processes; None if it follows rows that are not counted yet."""
        return self.config.minibatch_over(self.world) if self.config.has_minibatch else None

    @property
    def memory(self) -> int:
        """Bytes that one process needs."""
        return sum(need.bytes for need in self.needs)

    @property
    def suffices(self) -> bool:
        """Whether enough memory is free; true if the free memory is not known."""
        return self.free is None or self.memory <= self.free


def dry_run(config: WorkflowConfig, processes: Processes) -> DryRun:
    """Returns the plan of a run; problems that may be specific to this machine are in `troubles`.

    Args:
        config: the run's config; node_index and num_nodes are those of this machine.
        processes: processes on this machine.

    Raises:
        KernelBuildError, SimulationError, ConfigError, BundleError: the run would fail on every machine: the
            environment is unknown or does not compile, or lacks parameters or types of agents that the config names.
    """
    troubles: list[str] = []

    def result_of(find_out: Callable[[], T], error: type[ReagentLiteError] = ReagentLiteError) -> T | None:
        """Returns the result, or None after recording the error: other machines may have what this one lacks."""
        try:
            return find_out()
        except error as trouble:
            troubles.append(str(trouble))
            return None

    if config.simulation is not None and not config.simulation.in_python:
        find_environment(config.simulation.env)
    data = result_of(lambda: _logged_input(config)) or LoggedInput()
    env = None if config.simulation is None else result_of(lambda: _environment(config), NoCompilerError)
    types = () if env is None else agent_types(config, env.spec)
    spec = result_of(lambda: _spec(config, data.copy, None if env is None else env.spec))
    if not config.node_index:  # only rank 0 has trackers
        result_of(lambda: require_trackers(config), ConfigError)
    if config.num_nodes > 1 and (config.init_method or "").startswith("file:"):
        result_of(lambda: MeetingFile.of(str(config.init_method)).require_usable(writable=not config.node_index))
    ranks = ProcessRanks.read()
    world = processes.count * config.num_nodes if ranks is None else ranks.world_size
    needs = [] if env is None else _simulation_needs(config, env, types, world)
    if spec is not None:
        needs.append(networks(config, spec, sum(agent_type.learns for agent_type in types) or 1))
    if data.copy is not None and processes.device_type == "cuda" and config.data.residency == "device":
        size = int(data.copy.files.get("state.npy", {}).get("size", 0))
        needs.append(Need(name="rows on the GPU", bytes=size, formula="at least the states of this machine"))
    rows = None if data.rows is None else data.rows * (config.num_nodes if _is_part(config, data) else 1)
    free, free_of = _free(processes)
    return DryRun(
        config=config if rows is None else config.with_length_for(rows, rows, world),
        ranks=ranks,
        world=world,
        processes=processes,
        data=data,
        rows=rows,
        types=types,
        spec=spec,
        needs=tuple(needs),
        free=free,
        free_of=free_of,
        troubles=tuple(troubles),
    )


def require_first_rows(config: WorkflowConfig) -> Discounts:
    """Checks that training can read the first rows of the logs that this machine has, and returns their discounts.

    Raises:
        DataError: a file cannot be read, or its first rows have faults; with file and line.
    """
    paths = [path for path in (config.training_data_path, config.eval_data_path) if path]
    discounts = Discounts()
    if not paths or (config.timeline is not None and config.timeline.on_refused != "error"):
        return discounts
    with needing("data", "training_data_path"):
        from reagent_lite.data.copy.first_look import first_rows
        from reagent_lite.data.sampling.discounts import TimeDiscounts, suggested_unit
        from reagent_lite.run.stages import items_of, log_of
    items = items_of(config)
    for path in paths:
        log = log_of(config, path, items, config.node_index or 0, config.num_nodes)
        try:
            _ = log.files
        except ReagentLiteError:  # another machine may have the files: a warning, see `dry_run`
            continue
        refuses = config.timeline is None or config.timeline.on_refused == "error"
        first = first_rows(log, refuses=refuses)
        if config.rl.use_seq_num_diff_as_time_diff:
            unit = config.rl.time_diff_unit_length
            of_path = TimeDiscounts.of(first.time_diff, unit_length=unit, gamma=config.rl.gamma)
            if of_path is not None:
                discounts.lines.append(f"{log.name}: {of_path}, in the first {pluralize(first.rows, 'row')}")
                if problem := of_path.problem(log.name, suggested_unit(of_path.time_diff)):
                    discounts.warnings.append(f"the run ends with this error if other rows are alike: {problem}")
    return discounts


def _is_part(config: WorkflowConfig, data: LoggedInput) -> bool:
    """Whether the rows that are known are those of this machine among several."""
    layout = config.data.layout
    return layout == "shards" or (layout == "split" and data.copy is not None)


def _logged_input(config: WorkflowConfig) -> LoggedInput:
    if not config.training_data_path:
        return LoggedInput()
    with needing("data", "training_data_path"):
        from reagent_lite.data.copy.first_look import rows_by_metadata, standing_copy
        from reagent_lite.run.stages import items_of, log_of
    log = log_of(config, config.training_data_path, items_of(config), config.node_index or 0, config.num_nodes)
    size = sum(file.size for file in log.files)
    standing = standing_copy(log)
    copy = None if standing is None else standing[1]
    rows = rows_by_metadata(log.files) if copy is None else copy.rows
    events = copy is None and (config.timeline is not None or log.holds_events)
    return LoggedInput(files=len(log.files), bytes=size, rows=None if events else rows, events=events, copy=copy)


def _spec(config: WorkflowConfig, copy: CopyManifest | None, env: EnvSpec | None) -> SourceSpec | None:
    """Returns the network's widths if they are known; without a normalization file each feature is one column wide."""
    widths: dict[str, int] = {}
    embeddings: dict[str, tuple[Embedding, ...]] = {"state": (), "action": ()}
    if env is not None:
        widths = {"state": env.observation_size, "action": env.action_feature_size}
    elif copy is not None:
        of_sides = {"state": copy.state_ids, "action": copy.action_ids}
        widths = {side: len(ids) for side, ids in of_sides.items()}
        embeddings = {side: _largest_tables(config, ids, copy.rows) for side, ids in of_sides.items()}
    for side, spec in read_normalizations(normalization_files(config)).items():
        widths[side] = spec.width
        embeddings[side] = spec.embeddings
    if not config.parametric:
        widths["action"] = 0
        embeddings["action"] = ()
    if len(widths) < 2:
        return None
    names = () if config.parametric else config.actions or (() if env is None else env.action_names)
    image = None if config.data.image is None else config.data.image.image
    return SourceSpec(
        num_state_features=widths["state"],
        num_action_features=widths["action"],
        action_names=names,
        state_embeddings=embeddings["state"],
        action_embeddings=embeddings["action"],
        image=image if env is None else env.image,
    )


def _largest_tables(config: WorkflowConfig, ids: Sequence[int | str], rows: int) -> tuple[Embedding, ...]:
    """Returns the embeddings of features with columns `ids`, whose tables list as many ids as so many rows can have."""
    names = set(map(str, ids))
    sections = config.data.embeddings
    values = Counter[str]()
    for name, section in sections.items():
        values[section.table or name] += rows * section.length
    return tuple(
        section.form(str(feature.feature), min(section.max_ids, values[section.table or name]))
        for (name, section), feature in zip(sections.items(), id_features(sections), strict=True)
        if not names.isdisjoint(map(str, feature.columns))
    )


def _environment(config: WorkflowConfig) -> VectorEnv:
    """Returns one environment of the config's simulation on the CPU, without keeping the compiled code.

    Raises:
        SimulationError, KernelBuildError: see sim.backend.open_backend.
    """
    settings = config.environments
    with scratch_folder() as folder:
        built: dict[str, Any] = {"optimization": "-O0", "cache": folder}
        if settings.in_python:
            backend: Backend = GymnasiumBackend(settings.env, settings.env_parameters, **built)
        else:
            path = find_environment(settings.env)
            backend = CpuBackend(path, settings.env_parameters, settings.math, threads=1, **built)
        return open_envs(backend, num_envs=1, time_limit=settings.time_limit, parametric=config.parametric)


def _simulation_needs(config: WorkflowConfig, env: VectorEnv, types: tuple[AgentType, ...], world: int) -> list[Need]:
    """Returns the memory for environments and replay of the process that has the most environments."""
    settings = config.environments
    if not config.simulated_share:
        return []
    learners = 0 if config.collects else sum(agent_type.learns for agent_type in types)
    memory = simulation_memory(config, env, learners, world)
    num_envs = -(-settings.num_envs // world)
    several = f" x {learners} types of agents" if learners > 1 else ""
    replay = Need(
        name="replay",
        bytes=memory.replay,
        formula=f"{settings.replay.capacity:,} rows x {memory.row:,} bytes{several} / {pluralize(world, 'process')}",
    )
    environments = Need(
        name="environments",
        bytes=round(num_envs * memory.per_env),
        formula=f"{num_envs:,} environments x {round(memory.per_env):,} bytes, with the rows learned from for each",
    )
    return [replay, environments] if learners else [environments]


def _free(processes: Processes) -> tuple[int | None, str]:
    """Returns the free bytes for one process, or None if they are not known, and the memory they are part of."""
    count = processes.count
    if processes.device_type == "cpu":
        return free_bytes(torch.device("cpu")) // count, f"this machine's free memory / {pluralize(count, 'process')}"
    used = used_gpus(count * processes.gpus)
    free = [gpu.free for gpu in list_gpus() if gpu.uuid in used and gpu.total]
    return min(free, default=None), "the fullest GPU's free memory"


def lines_of(run: DryRun) -> Iterator[str]:
    """Yields the lines that --dry_run prints, without the warnings."""
    checkpoint = run.config.checkpoint
    steps = [f"every {checkpoint.every_steps} steps"] if checkpoint.every_steps else []
    minutes = [f"every {checkpoint.every_minutes:g} minutes"] if checkpoint.every_minutes else []
    yield from _machine_lines(run)
    if run.config.simulation is not None and run.config.simulation.auto_scale:
        yield "auto-scaling: the search for num_envs and minibatch_size starts from the values shown here"
    yield from _step_lines(run)
    if not run.config.collects:
        yield (
            f"checkpoints: {' and '.join(steps + minutes) or 'one at the end'}, the newest {checkpoint.keep} are kept; "
            f"at most {pluralize(run.config.restarts, 'restart')} after a failure"
        )
    yield from (f"memory per process: {line}" for line in memory_lines(run))


def warnings_of(run: DryRun) -> Iterator[str]:
    """Yields warnings about too little memory and about missing information."""
    if not run.suffices:
        largest = max(run.needs, key=lambda need: need.bytes)
        yield f"there is not enough memory; most of it is for the {largest.name}: {size_text(largest.bytes)}"
    yield from run.troubles


def memory_lines(run: DryRun) -> Iterator[str]:
    """Yields the memory of a process by purpose, then the total and the free memory."""
    if run.spec is None:
        yield "networks: not known before the data is read"
    if run.data.copy is not None:
        size = sum(int(file["size"]) for file in run.data.copy.files.values())
        yield f"training copy of {size_text(size)}: mapped from disk, not counted"
    for need in run.needs:
        yield f"{need.name} {size_text(need.bytes)} = {need.formula}"
    free = "not known" if run.free is None else size_text(run.free)
    total = f"{size_text(run.memory)} in total; " if run.needs else ""
    yield f"{total}free: {free} ({run.free_of})"


def _machine_lines(run: DryRun) -> Iterator[str]:
    config = run.config
    ranks = run.ranks
    processes = run.processes.count
    total = pluralize(run.world, f"{run.processes.device_type} process")
    if not config.takes_steps:
        yield f"{total}; the first one fits the reward model; there are no optimizer steps"
    elif run.minibatch is None:
        yield f"{total}; training.minibatch_size follows the number of rows, known after the data is read"
    else:
        yield f"{total}, {run.minibatch} rows per minibatch, {run.minibatch / run.world:g} on each"
        yield f"parallel {config.parallel}: {_batch_contract(run, run.minibatch)}"
    if ranks is not None:
        yield f"machines: set by the launcher of these processes; rank {ranks.rank} on node {ranks.node}"
    elif config.num_nodes > 1:
        node = config.node_index or 0
        first = node * processes
        shown = f"rank {first}" if processes == 1 else f"ranks {first} to {first + processes - 1}"
        yield (
            f"machines: {config.num_nodes} x {pluralize(processes, 'process')}, if the others start as many as this "
            f"one; this is node {node}, {shown}; node 0 saves the model"
        )
        port = config.rendezvous.port or "a free port"
        listens = ""
        if (config.init_method or "").startswith("file:"):
            listens = f"; node 0 listens on {config.rendezvous.interface or 'the default route'}, {port}"
        yield (
            f"rendezvous: {config.init_method or 'init_method is missing'}, all machines within "
            f"{config.rendezvous.join_timeout_seconds:g} s{listens}"
        )


def _batch_contract(run: DryRun, minibatch: int) -> str:
    """Returns how processes and GPUs divide the rows of a minibatch and combine their gradients."""
    rows = f"{minibatch / run.world:g} rows"
    if run.config.parallel == "dp":
        return (
            f"one process draws {rows} and divides them among {pluralize(run.processes.gpus, 'GPU')}, "
            f"{minibatch / run.processes.gpus:g} each; the losses are summed on the first"
        )
    if run.config.parallel == "none":
        return f"one process draws {rows} and computes the gradient alone"
    return f"each process draws {rows}; gradients are averaged over all {minibatch} rows"


def _step_lines(run: DryRun) -> Iterator[str]:
    config = run.config
    data = run.data
    minibatch = run.minibatch
    if len(run.types) > 1:
        yield f"policies: {', '.join(map(str, run.types))}"
    if not config.training_data_path:
        plan = simulated_plan(config, config.minibatch_over(run.world))
        if config.follows or config.collects:
            mode = config.environments.mode
            shared = config.environments.shared
            yield (
                f"simulation.mode {mode}: episodes in {shared.path}; collectors pause about "
                f"{most_env_steps_ahead(config.environments):,} environment steps ahead of the learner"
            )
        if config.collects:
            return
        yield (
            f"steps: {plan.num_steps:,} after {config.warmup_rounds * config.environments.num_envs:,} of "
            f"{config.environments.total_steps:,} environment steps, evaluated every {plan.steps_per_epoch:,}"
        )
        return
    several = config.num_nodes > 1
    if not data.files:
        return
    part = {
        "shards": "its own part of the rows",
        "replicas": "all rows",
        "split": "all rows, and keeps its own episodes",
    }[config.data.layout]
    where = f"; layout {config.data.layout}: each machine has {part}" if several else ""
    size = f"{pluralize(data.files, 'file')}, {size_text(data.bytes)} here{where}"
    yield f"data: {show_paths(config.training_data_path)}: {size}"
    if data.events:
        yield "events: transitions are made from them as they are read"
    if data.rows is None or run.rows is None or minibatch is None:
        yield "rows and steps: not known before the data is read"
        return
    source = "the files' metadata" if data.copy is None else "the training copy"
    split = several and config.data.layout == "split" and not _is_part(config, data)
    yield f"rows: {data.rows:,} {'on all machines together' if split else 'on this machine'}, from {source}"
    if not config.takes_steps:
        return
    logged = minibatch - round(minibatch * config.simulated_share) or minibatch
    steps_per_epoch = -(-run.rows // (logged * config.training.minibatches_per_step))
    is_part = several and _is_part(config, data)
    condition = "the other machines have as many rows" if is_part else "every row can be learned from"
    scored = "" if config.learns_from_scored else "; scored episodes are not learned from"
    total = steps_per_epoch * config.num_epochs
    yield f"steps: {steps_per_epoch:,} per epoch, {total:,} in total, if {condition}{scored}"
