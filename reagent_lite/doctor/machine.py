"""The doctor's checks of a single machine: processes, network, disks, data, environments, versions."""

import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from reagent_lite import __version__
from reagent_lite.config import ParametricDqnConfig, WorkflowConfig
from reagent_lite.config.paths import DataPath, show_paths
from reagent_lite.data.copy.location import locations_of
from reagent_lite.data.features.normalization_files import left_out_features, read_normalization
from reagent_lite.disk_room import free_disk_bytes, is_writable
from reagent_lite.distributed.gpus import list_gpus, used_gpus
from reagent_lite.distributed.launcher import Processes
from reagent_lite.distributed.meeting import host_and_port
from reagent_lite.distributed.network import addresses, listening, local_address, resolve_host
from reagent_lite.distributed.nodes import Node
from reagent_lite.doctor.checks import CheckResult, fail, of_error, ok, skip, warning
from reagent_lite.errors import ConfigError, DataError, NoRowsError, needing, pluralize
from reagent_lite.folder_identity import nearest_existing
from reagent_lite.memory import size_text
from reagent_lite.run.agents import agent_types
from reagent_lite.run.dry_run import DryRun, memory_lines, warnings_of
from reagent_lite.run.memory_needs import networks
from reagent_lite.run.normalization import NormalizationFiles, normalization_files
from reagent_lite.sim.backend import open_backend
from reagent_lite.sim.cuda_build import cuda_problem
from reagent_lite.sim.kernel_sources import find_environment
from reagent_lite.training.trackers import require_trackers
from reagent_lite.types import SourceSpec

if TYPE_CHECKING:
    from reagent_lite.data.copy.first_look import FirstRows

_COPY_RATIO = 2.0  # size of a training copy and its temporary files, relative to uncompressed input
_PACKED_COPY_RATIO = 10.0  # the same, relative to compressed input
_MODEL_COPIES = 4  # ONNX, TorchScript, weights, and the previous folder until the new one replaces it


def check_versions() -> CheckResult:
    """Reports the installed versions."""
    parts = [f"python {sys.version.split()[0]}", f"torch {torch.__version__}", f"CUDA {torch.version.cuda or 'none'}"]
    if torch.cuda.is_available():
        parts.append("NCCL " + ".".join(map(str, torch.cuda.nccl.version())))  # type: ignore[no-untyped-call]
    return ok("versions", ", ".join([f"reagent-lite {__version__}", *parts]))


def devices(processes: Processes) -> Iterator[CheckResult]:
    """Reports the processes and the GPUs they will use."""
    count = pluralize(processes.count, f"{processes.device_type} process")
    if processes.note:
        todo = "Set use_gpu to false to use the CPU; else check nvidia-smi, CUDA_VISIBLE_DEVICES and torch's CUDA build"
        yield warning("processes", f"{count}: {processes.note}", todo)
    else:
        yield ok("processes", count)
    if processes.device_type != "cuda":
        return
    used = used_gpus(processes.count * processes.gpus)
    gpus = [gpu for gpu in list_gpus() if gpu.uuid in used]
    if not gpus:
        yield warning("GPUs", f"nvidia-smi does not list {', '.join(used)}", "Their free memory is not known")
    for gpu in gpus:
        detail = f"{gpu.name}, {gpu.uuid}, {size_text(gpu.free)} of {size_text(gpu.total)} free, driver {gpu.driver}"
        in_use = warning("GPUs", detail, "End the process that uses it, or choose other GPUs with CUDA_VISIBLE_DEVICES")
        yield in_use if gpu.total and gpu.free < gpu.total / 2 else ok("GPUs", detail)


def network(config: WorkflowConfig, node: Node) -> Iterator[CheckResult]:
    """Checks addresses, the host's name, and the configured port."""
    settings = config.rendezvous
    method = config.init_method or ""
    listed = ", ".join(f"{candidate.interface} {candidate.address}" for candidate in addresses()) or "none"
    if node.count == 1:
        yield skip("network", f"not needed by one machine, which has {listed}")
        return
    address = local_address(settings.interface)
    text = f"{address.interface} {address.address} of {listed}"
    if not address.is_loopback:
        yield ok("network", text)
    else:
        yield warning("network", text, "Other machines cannot reach it: set rendezvous.interface to another interface")
    yield _host_name()
    if method.startswith("file:") and settings.port and node.index == 0:
        listening(address.address, settings.port).close()
        yield ok("port", f"{address.address}:{settings.port} is free")
    elif method.startswith("tcp:"):
        yield _meeting_point(method, node)


def _meeting_point(method: str, node: Node) -> CheckResult:
    host, port = host_and_port(method)
    address = resolve_host(host, port)
    if node.index == 0:
        listening(address, port).close()
    is_free = "" if node.index else f", whose port {port} is free here"
    return ok("port", f"{host} is {address}{is_free}")


def _host_name() -> CheckResult:
    name = socket.gethostname()
    try:
        resolved_to = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)})
    except OSError as error:
        todo = "Training uses numeric addresses and does not need it. If other programs do, add it to /etc/hosts"
        return warning("host name", f"{name} does not resolve: {error.strerror or error}", todo)
    return ok("host name", f"{name} is {', '.join(resolved_to)}")


def check_model_folder(config: WorkflowConfig, node: Node, spec: SourceSpec | None) -> CheckResult:
    """Checks the folder of the model and of checkpoints."""
    name = "model_output_path"
    if node.index:
        return skip(name, "only node 0 writes there")
    folder = config.folder
    existing = nearest_existing(folder)
    todo = "Choose a folder that this user can write, or free some space"
    if not existing.is_dir():
        return fail(name, f"{existing} is a file", todo)
    with tempfile.TemporaryFile(dir=existing) as probe:
        probe.write(b"probe")
    free = free_disk_bytes(existing)
    state = "writable" if existing == folder else f"not there yet; {existing}, where it will be made, is writable"
    text = f"{folder}: {state}, {size_text(free)} free"
    if spec is None:  # the size of the model is known only after the data has been read
        return ok(name, text)
    need = networks(config, spec).bytes * (config.checkpoint.keep + 1 + _MODEL_COPIES)
    text += f"; {size_text(need)} for checkpoints and model, without replay"
    return ok(name, text) if free > need else fail(name, text, todo)


def dataset_folder(config: WorkflowConfig) -> CheckResult:
    """Checks the folder shared by collectors and learners."""
    folder = Path(config.environments.shared.path).expanduser()
    text = f"{folder}: {size_text(free_disk_bytes(nearest_existing(folder)))} free"
    if is_writable(folder):
        return ok("simulation.dataset", f"{text}, writable")
    return fail("simulation.dataset", text, "Choose a folder that this user can write, and that all machines see")


def copy_folder(config: WorkflowConfig, path: DataPath) -> CheckResult:
    """Checks the folder for the training copy of a path."""
    name = "training copy"
    try:
        with needing("data", name):
            from reagent_lite.data.copy.first_look import standing_copy
            from reagent_lite.run.stages import items_of, log_of
        log = log_of(config, path, items_of(config), config.node_index or 0, config.num_nodes)
        files = log.files
    except (ConfigError, DataError):
        return skip(name, "there is no data to copy")
    standing = standing_copy(log)
    if standing is not None:
        return ok(name, f"up to date in {standing[0]}: {pluralize(standing[1].rows, 'row')}")
    folders = [location.parent for location in locations_of(log)]
    writable = [folder for folder in folders if is_writable(folder)]
    todo = "Set data.training_copy_dir to a folder on a local disk of this machine with enough room"
    if not writable:
        return fail(name, f"none of {', '.join(map(str, folders))} can be written", todo)
    packed = sum(file.size for file in files if file.compression or file.extension == ".parquet")
    need = _COPY_RATIO * (sum(file.size for file in files) - packed) + _PACKED_COPY_RATIO * packed
    need /= 1 if log.partition is None else log.partition.num_nodes
    free = free_disk_bytes(writable[0])
    text = f"{writable[0]}: {size_text(free)} free, roughly {size_text(need)} needed"
    return ok(name, text) if free > need else warning(name, text, todo)


def data(config: WorkflowConfig, node: Node, key: str, path: DataPath) -> Iterator[CheckResult]:
    """Reads and checks the first rows of a path, and checks that normalization files cover their features."""
    with needing("data", key):
        from reagent_lite.data.copy.first_look import first_rows
        from reagent_lite.run.stages import items_of, log_of
    log = log_of(config, path, items_of(config), config.node_index or 0, config.num_nodes)
    try:
        files = log.files
        rows = first_rows(log)
    except NoRowsError as error:
        row = of_error(key, error)
        if node.count == 1 or config.data.layout != "shards":
            yield row
        else:
            yield warning(key, row.found, "This machine trains without rows; copy its shard there if it has one")
        return
    total = size_text(sum(file.size for file in files))
    read = pluralize(rows.rows, "row has", "rows have")
    yield ok(key, f"{show_paths(path)}: {pluralize(len(files), 'file')}, {total}; the first {read} no fault")
    yield from _normalization(normalization_files(config), rows)


def _normalization(files: NormalizationFiles, rows: "FirstRows") -> Iterator[CheckResult]:
    columns = [("state_norm_data_path", files["state"], rows.state_ids)]
    columns.append(("action_norm_data_path", files["action"], rows.action_ids))
    for key, path, ids in columns:
        if path is not None:
            spec = read_normalization(path)
            if sentence := left_out_features(spec, ids, where=path):
                yield warning(key, sentence, "Compute the file again from this data to use them")
                continue
            yield ok(
                key,
                f"{path}: {pluralize(len(spec.feature_ids), 'feature')} in {pluralize(spec.width, 'column')}; "
                f"covers {rows.file}",
            )


def simulation(config: WorkflowConfig, processes: Processes) -> Iterator[CheckResult]:
    """Compiles the environment, and checks the CUDA toolkit if processes have GPUs."""
    settings = config.simulation
    if settings is None:
        yield skip("environment", "the config has no simulation section")
        return
    device = processes.device(0)
    if device.type == "cuda" and settings.backend != "cpu" and not settings.in_python:
        path = find_environment(settings.env)
        problem = cuda_problem(device, path, settings.env_parameters, settings.math)
        if problem is None:
            yield ok("GPU toolkit", "PyCUDA, and nvcc or the compiled environment")
        elif settings.backend == "auto":
            yield warning("GPU toolkit", problem, "Without it environments run on the CPU")
        else:
            yield fail("GPU toolkit", problem, "Or set simulation.backend to auto: environments then run on the CPU")
            return
    backend = open_backend(settings, device)
    spec = backend.spec
    runs = "steps in Python" if settings.in_python else f"compiles for {backend.device.type}"
    text = f"{spec.name} {runs}: {pluralize(spec.observation_size, 'feature')}, {pluralize(spec.num_actions, 'choice')}"
    if spec.candidates and not isinstance(config, ParametricDqnConfig):
        yield warning("environment", f"{text}; they differ from step to step", "Train with workflows.parametric_dqn")
        return
    yield ok("environment", text)
    types = agent_types(config, spec)
    if len(types) > 1:
        yield ok("policies", ", ".join(map(str, types)))


def tracking(config: WorkflowConfig) -> CheckResult:
    """Reports whether the packages of the run's trackers are installed."""
    require_trackers(config)
    return ok("tracking", "the packages are installed; the run contacts their servers when it starts")


def memory(run: DryRun) -> CheckResult:
    """Compares the memory that a process needs with the free memory."""
    text = "\n".join(memory_lines(run))
    if not run.suffices:
        return warning("memory", text, f"{next(warnings_of(run))}; lower it, or use more machines")
    if run.spec is None:
        return skip("memory", "known only after the data has been read")
    return ok("memory", text)
