"""The command line of training, which starts one process per GPU and meets the other machines.

config ─► processes ─┬─► one: trains in this process
                     └─► several: rendezvous with the other machines, then workers that run the same command
"""

import argparse
import contextlib
import json
import os
import platform
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from reagent_lite import __version__
from reagent_lite.cli import Command, add_node_index, config_of, guarded, message_of, options_of, parser_of
from reagent_lite.config import WorkflowConfig, resolved
from reagent_lite.config.paths import logs_of
from reagent_lite.console import logger
from reagent_lite.data.formats.files import list_input
from reagent_lite.distributed.declarations import Declaration, check_compatibility, digest_of_code, shared_keys
from reagent_lite.distributed.gpus import used_gpus
from reagent_lite.distributed.group import Group, ProcessRanks, joined
from reagent_lite.distributed.launcher import Processes, choose_processes, launch
from reagent_lite.distributed.membership import GLOO_VARIABLE, LaunchError
from reagent_lite.distributed.network import address_for
from reagent_lite.distributed.nodes import Node, find_node, job_name
from reagent_lite.distributed.rendezvous import Rendezvous, meeting_place
from reagent_lite.distributed.worker import end_with_parent, is_worker, report_failure
from reagent_lite.errors import NoRowsError, Preempted, ReagentLiteError, needing
from reagent_lite.files import FolderIdentity
from reagent_lite.run.dry_run import dry_run, lines_of, require_first_rows, warnings_of
from reagent_lite.run.train import train
from reagent_lite.training.stop import StopSignal

if TYPE_CHECKING:
    from reagent_lite.run.roles.collect import Collected


def main(module: str, model: type[WorkflowConfig], example: str, arguments: list[str] | None = None) -> int:
    """Runs a training workflow and returns its exit code.

    Args:
        module: the workflow's module, as in `python -m <module>`.
        model: class of the config.
        example: path of a sample config for the help text.
        arguments: arguments of the command line; None means those of this process.
    """
    end_with_parent()
    command = Command(
        module=module,
        model=model,
        example=example,
        settings="--set training.learning_rate=0.01 --set num_processes_per_node=2",
        outcome="model, decision, steps, rows, rows_per_second, seconds, scores; with publish_if, not_published",
        codes=(
            "0  done",
            "1  unexpected error, or training diverged",
            "2  config or data error",
            "3  rendezvous failed",
            "4  a peer failed, or a folder of the run was not mounted, read-only or full for ten minutes",
            "5  model_output_path is in use by another run",
            "75 stopped by a signal, run again to continue",
        ),
    )
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = parser_of(command)
    add_node_index(parser)
    parser.add_argument(
        "--force", action="store_true", help="stop another run that uses the file of init_method, and use the file"
    )
    # torch.distributed.launch adds it, and sets LOCAL_RANK, which is read
    parser.add_argument("--local-rank", "--local_rank", type=int, help=argparse.SUPPRESS)
    options = options_of(parser, arguments)
    return guarded(command, options, lambda: _reported(lambda: _run(command, options, arguments)))


def _reported(run: Callable[[], int]) -> int:
    """Returns the exit code of a run; a worker reports its error to the launcher, which logs one error for all."""
    try:
        with StopSignal(last=True):
            return run()
    except LaunchError as error:
        logger.error(error)
        return error.exit_code
    except (Exception, Preempted) as error:
        if not is_worker():
            raise
        report_failure(error, message_of(error))
        return error.exit_code if isinstance(error, ReagentLiteError | Preempted) else 4


def _run(command: Command[WorkflowConfig], options: argparse.Namespace, arguments: list[str]) -> int:
    config = config_of(command, options)
    index = config.node_index if options.node_index is None else options.node_index
    node = find_node(index=index, count=config.num_nodes, environment=os.environ)
    config = config.model_copy(update={"node_index": node.index, "num_nodes": node.count})
    processes = choose_processes(config)
    ranks = ProcessRanks.read()
    if ranks is None and node.count > 1:
        meeting_place(config.init_method, config.rendezvous, node.count)
    if options.dry_run:
        _describe(config, processes)
        return 0
    if ranks is None and processes.count * node.count > 1:
        _log_choice(processes)
        rendezvous = prepare_rendezvous(config, node, processes, force=options.force)
        output = FolderIdentity.of(config.folder)
        worker = [sys.executable, "-m", command.module, *arguments]
        folder = None if node.index else output
        launch(worker, processes.count, rendezvous, restarts=config.restarts, folder=folder)
        return 0
    ranks = ranks or ProcessRanks()
    if ranks.num_nodes > 1 and not is_worker():
        _choose_interface(config)
    if ranks.rank == 0 and not is_worker():
        _log_choice(processes)
    device = processes.device(ranks.local_rank)
    wait = config.rendezvous.startup_timeout_seconds
    with (
        contextlib.redirect_stdout(sys.stderr),
        joined(ranks, device, wait, gpus=processes.gpus) as group,
    ):
        try:
            if group.num_nodes > 1 and not is_worker():
                _require_fit(config, node, processes, group)
            outcome = _collect(config, group) if config.collects else train(config, group)
        except Exception as error:  # reported first: it may take long to end the process group without peers
            if is_worker():
                report_failure(error, message_of(error))
            raise
    if ranks.rank == 0:
        print(outcome.line(), flush=True)
    return 0


def _choose_interface(config: WorkflowConfig) -> None:
    """Makes gloo use the interface that reaches node 0 if another launcher has started this process.

    By default gloo takes the address of this machine's name, which is 127.0.0.1 if the name does not resolve.

    Raises:
        RendezvousError: MASTER_ADDR does not resolve, or rendezvous.interface does not exist.
    """
    host = os.environ.get("MASTER_ADDR", "")
    port = os.environ.get("MASTER_PORT", "")
    if GLOO_VARIABLE in os.environ or not host or not port.isdigit():
        return
    address = address_for(host, int(port), config.rendezvous.interface)
    if address is not None and address.interface:
        os.environ[GLOO_VARIABLE] = address.interface


def _require_fit(config: WorkflowConfig, node: Node, processes: Processes, group: Group) -> None:
    """Compares the machines if another launcher has started their processes; our launcher compares them earlier.

    Raises:
        RendezvousError: the machines do not fit together; raised on all ranks.
    """
    declaration = ""
    if group.is_first_on_node:
        processes_here = replace(processes, count=group.ranks.local_world_size)
        declaration = _declaration(config, node, processes_here).model_dump_json()
    declared = [Declaration.model_validate_json(text) for text in group.gather_text(declaration) if text]
    compatibility = check_compatibility(declared)
    for warning in compatibility.warnings if group.is_first else ():
        logger.warning(warning)
    compatibility.require_fit()


def _collect(config: WorkflowConfig, group: Group) -> "Collected":
    with needing("data", "simulation.mode"):
        from reagent_lite.run.roles.collect import collect
    return collect(config, group)


def _describe(config: WorkflowConfig, processes: Processes) -> None:
    _log_choice(processes)
    discounts = require_first_rows(config)
    run = dry_run(config, processes)
    for line in (*lines_of(run), *discounts.lines):
        logger.info(line)
    for trouble in (*warnings_of(run), *discounts.warnings):
        logger.warning(trouble)
    print(json.dumps(resolved(run.config), indent=2))


def prepare_rendezvous(config: WorkflowConfig, node: Node, processes: Processes, *, force: bool) -> Rendezvous:
    """Returns this machine's rendezvous after checking that it can be used and that the data can be found.

    A problem with the data is declared in the rendezvous, so that every machine ends with the same message.

    Raises:
        ConfigError, RendezvousError: the file or address of init_method cannot be used.
    """
    rendezvous = Rendezvous(
        node=node,
        init_method=config.init_method,
        settings=config.rendezvous,
        declaration=_declaration(config, node, processes),
        force=force,
    )
    rendezvous.preflight()
    return rendezvous


def _declaration(config: WorkflowConfig, node: Node, processes: Processes) -> Declaration:
    problem = ""
    code = 0
    if node.count > 1:
        try:
            _find_data(config)
        except ReagentLiteError as error:
            problem = str(error)
            code = error.exit_code
    return Declaration(
        node=node.index,
        host=socket.gethostname(),
        pid=os.getpid(),
        processes=processes.count,
        device=processes.device_type,
        versions=_versions(processes),
        gpus=used_gpus(processes.count) if node.count > 1 and processes.device_type == "cuda" else (),
        config=shared_keys(resolved(config)),
        problem=problem,
        exit_code=code,
        job=job_name(config.rendezvous.job, config.model_output_path, os.environ),
    )


def _find_data(config: WorkflowConfig) -> None:
    if config.data.shards_path is not None and config.node_index:
        return  # only node 0 reads the data and writes shards
    for key in ("training_data_path", "eval_data_path"):
        for path in logs_of(getattr(config, key) or ()):
            with needing("data", key):
                from reagent_lite.data.formats.reading import READERS
            with contextlib.suppress(NoRowsError):  # the ranks find out whether others have rows
                list_input(path, tuple(READERS))


def _versions(processes: Processes) -> dict[str, str]:
    versions = {"python": platform.python_version()}
    versions |= {"reagent-lite": __version__} | {name: version(name) for name in ("torch", "numpy")}
    versions["reagent-lite's code"] = digest_of_code(Path(__file__).parents[1])
    if processes.device_type == "cuda":
        versions["cuda"] = str(torch.version.cuda)
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return versions


def _log_choice(processes: Processes) -> None:
    if processes.note:
        logger.info(processes.note)
