"""The command line of training, which starts one process per GPU and meets the other machines.

config ─► processes ─┬─► one: trains in this process
                     └─► several: rendezvous with the other machines, then workers that run the same command
"""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from reagent_lite.cli import (
    Command,
    add_node_index,
    config_of,
    message_of,
    options_of,
    parser_of,
    print_config,
    run_guarded,
)
from reagent_lite.config import DqnConfig, ParametricDqnConfig, WorkflowConfig, has_named_actions
from reagent_lite.console import logger
from reagent_lite.distributed.group import Group, ProcessRanks, join_group
from reagent_lite.distributed.launcher import Processes, choose_processes, launch
from reagent_lite.distributed.meeting import meeting_place
from reagent_lite.distributed.membership import LaunchError
from reagent_lite.distributed.nodes import find_node
from reagent_lite.distributed.worker import end_with_parent, is_worker, report_failure, write_error
from reagent_lite.errors import Preempted, ReagentLiteError, needing
from reagent_lite.folder_identity import FolderIdentity
from reagent_lite.run.declaring import choose_interface, prepare_rendezvous, require_fit
from reagent_lite.run.dry_run import dry_run, lines_of, require_first_rows, warnings_of
from reagent_lite.run.runner import train
from reagent_lite.training.stop import StopSignal

if TYPE_CHECKING:
    from reagent_lite.run.roles.collect import Collected

WORKFLOWS: dict[str, type[WorkflowConfig]] = {"dqn": DqnConfig, "parametric_dqn": ParametricDqnConfig}


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
    return run_guarded(command, options, lambda: _report(lambda: _run(command, options, arguments)))


def choose_workflow(path: str, overrides: list[str]) -> str:
    """Returns the workflow of a config file."""
    try:
        tree = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
        named = has_named_actions(tree, (override.partition("=")[0] for override in overrides))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return "dqn"  # load_config reports what is wrong with the file
    return "dqn" if named else "parametric_dqn"


def _report(run: Callable[[], int]) -> int:
    """Returns the exit code of a run; a worker reports its error to the launcher, which logs one error for all."""
    try:
        with StopSignal(last=True):
            return run()
    except LaunchError as error:
        logger.error(error)
        write_error(str(error))
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
    config = config.on_node(node.index, node.count)
    processes = choose_processes(config)
    ranks = ProcessRanks.read()
    if ranks is None and node.count > 1:
        meeting_place(config.init_method, config.rendezvous, node.count)
    if options.dry_run:
        _describe(config, processes, options)
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
        choose_interface(config)
    if ranks.rank == 0 and not is_worker():
        _log_choice(processes)
    device = processes.device(ranks.local_rank)
    wait = config.rendezvous.startup_timeout_seconds
    with (
        contextlib.redirect_stdout(sys.stderr),
        join_group(ranks, device, wait, gpus=processes.gpus) as group,
    ):
        try:
            if group.num_nodes > 1 and not is_worker():
                require_fit(config, node, processes, group)
            outcome = _collect(config, group) if config.collects else train(config, group)
        except Exception as error:  # reported first: it may take long to end the process group without peers
            if is_worker():
                report_failure(error, message_of(error))
            raise
    if ranks.rank == 0:
        print(outcome.line(), flush=True)
    return 0


def _collect(config: WorkflowConfig, group: Group) -> "Collected":
    with needing("data", "simulation.mode"):
        from reagent_lite.run.roles.collect import collect
    return collect(config, group)


def _describe(config: WorkflowConfig, processes: Processes, options: argparse.Namespace) -> None:
    discounts = require_first_rows(config)
    run = dry_run(config, processes)
    print_config(run.config, options)
    _log_choice(processes)
    for line in (*lines_of(run), *discounts.lines):
        logger.info(line)
    for trouble in (*warnings_of(run), *discounts.warnings):
        logger.warning(trouble)


def _log_choice(processes: Processes) -> None:
    if processes.note:
        logger.info(processes.note)
