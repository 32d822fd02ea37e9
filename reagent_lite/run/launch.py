"""What a machine says of itself before it trains with others, and what it checks before anyone waits for it."""

import os
import platform
import socket
import subprocess
from importlib.metadata import version

import torch

from reagent_lite.config import WorkflowConfig, resolved
from reagent_lite.data.formats.files import list_input
from reagent_lite.data.formats.reading import READERS
from reagent_lite.distributed.launcher import Processes
from reagent_lite.distributed.nodes import Node
from reagent_lite.distributed.rendezvous import Rendezvous
from reagent_lite.distributed.verdict import Declaration, flat
from reagent_lite.errors import ReagentLiteError

_RESTARTS = 3


def prepare_rendezvous(config: WorkflowConfig, node: Node, processes: Processes, *, force: bool) -> Rendezvous:
    """Returns the rendezvous of this machine, after a look at what would fail later.

    What is wrong with this machine's data is declared, so that the other machines end with the same words.

    Raises:
        ConfigError, RendezvousError: the meeting place itself cannot be used.
    """
    problem, code = "", 0
    if node.count > 1:
        try:
            _find_data(config)
        except ReagentLiteError as error:
            problem, code = str(error), error.exit_code
    rendezvous = Rendezvous(
        node=node,
        init_method=config.init_method,
        settings=config.rendezvous,
        declaration=Declaration(
            node=node.index,
            host=socket.gethostname(),
            pid=os.getpid(),
            processes=processes.count,
            device=processes.device_type,
            versions=_versions(processes),
            gpus=_gpus(processes) if node.count > 1 else (),
            config=flat(resolved(config)),
            problem=problem,
            exit_code=code,
        ),
        force=force,
    )
    rendezvous.preflight()
    return rendezvous


def restarts(config: WorkflowConfig) -> int:
    """Returns how often the run may begin again."""
    given = config.rendezvous.max_restarts
    return given if given is not None else _RESTARTS if config.checkpoint.periodic else 0


def _find_data(config: WorkflowConfig) -> None:
    if config.data.shards_path is not None and config.node_index:
        return  # node 0 divides the data; nobody else need see it
    for path in (config.training_data_path, config.eval_data_path):
        if path:
            list_input(path, tuple(READERS))


def _versions(processes: Processes) -> dict[str, str]:
    versions = {"python": platform.python_version()}
    versions |= {name: version(name) for name in ("reagent-lite", "torch", "numpy")}
    if processes.device_type == "cuda":
        versions["cuda"] = str(torch.version.cuda)
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return versions


def _gpus(processes: Processes) -> tuple[str, ...]:
    """Returns the UUIDs of the GPUs this machine will use, as far as nvidia-smi tells; no CUDA context is made."""
    if processes.device_type != "cuda":
        return ()
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ()
    return used_gpus(done.stdout.split(), os.environ.get("CUDA_VISIBLE_DEVICES"), processes.count)


def used_gpus(uuids: list[str], visible: str | None, count: int) -> tuple[str, ...]:
    """Returns the first `count` of a machine's GPUs that CUDA_VISIBLE_DEVICES shows, by UUID.

    Args:
        uuids: of all GPUs of the machine, in order.
        visible: the variable's text: numbers or UUIDs; None shows all.
        count: processes, one for each GPU.
    """
    if visible is None:
        return tuple(uuids[:count])
    names = [name.strip() for name in visible.split(",") if name.strip()]
    shown = [uuids[int(name)] if name.isdigit() and int(name) < len(uuids) else name for name in names]
    return tuple(shown[:count])
