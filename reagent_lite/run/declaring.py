"""The declaration of a machine before a run, and the comparison of all machines' declarations."""

import os
import platform
import socket
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import torch

from reagent_lite import __version__
from reagent_lite.config import WorkflowConfig, expand_config
from reagent_lite.config.paths import logs_of
from reagent_lite.console import logger
from reagent_lite.data.formats.input_files import list_input
from reagent_lite.distributed.declarations import Declaration, check_compatibility, digest_of_code, shared_keys
from reagent_lite.distributed.gpus import used_gpus
from reagent_lite.distributed.group import Group
from reagent_lite.distributed.launcher import Processes
from reagent_lite.distributed.meeting import Rendezvous
from reagent_lite.distributed.membership import GLOO_VARIABLE
from reagent_lite.distributed.network import address_for
from reagent_lite.distributed.nodes import Node, job_name
from reagent_lite.errors import DataError, NoRowsError, ReagentLiteError, needing

_SPLIT = (
    "Mount or copy the data on every machine, as each reads all rows with data.layout split; or give each machine its "
    "part (workflows.shard) and set data.layout to shards"
)


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


def require_fit(config: WorkflowConfig, node: Node, processes: Processes, group: Group) -> None:
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


def choose_interface(config: WorkflowConfig) -> None:
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
        config=shared_keys(expand_config(config)),
        problem=problem,
        exit_code=code,
        job=job_name(config.rendezvous.job, config.model_output_path, os.environ),
    )


def _find_data(config: WorkflowConfig) -> None:
    for key in ("training_data_path", "eval_data_path"):
        for path in logs_of(getattr(config, key) or ()):
            with needing("data", key):
                from reagent_lite.data.formats.format_table import READERS
            try:
                list_input(path, tuple(READERS))
            except NoRowsError:  # the ranks find out whether others have rows
                continue
            except DataError as error:
                if config.data.layout != "split":
                    raise
                raise DataError([replace(problem, todo=_SPLIT) for problem in error.problems]) from error


def _versions(processes: Processes) -> dict[str, str]:
    versions = {"python": platform.python_version()}
    versions |= {"reagent-lite": __version__} | {name: version(name) for name in ("torch", "numpy")}
    versions["reagent-lite's code"] = digest_of_code(Path(__file__).parents[1])
    if processes.device_type == "cuda":
        versions["cuda"] = str(torch.version.cuda)
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return versions
