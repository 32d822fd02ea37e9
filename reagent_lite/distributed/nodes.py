"""Which machine this is, and among how many: said on the command line, in the JSON, or by a scheduler.

scheduler                        number                   count
srun, one task a machine         SLURM_NODEID             SLURM_STEP_NUM_NODES
Kubernetes indexed job           JOB_COMPLETION_INDEX     (num_nodes in the JSON)
Kubeflow's PyTorchJob            PET_NODE_RANK            PET_NNODES
SkyPilot                         SKYPILOT_NODE_RANK       SKYPILOT_NUM_NODES
torchrun, accelerate launch      GROUP_RANK               GROUP_WORLD_SIZE, which start the workers themselves
"""

from collections.abc import Mapping
from dataclasses import dataclass

from reagent_lite.distributed.group import Place
from reagent_lite.errors import ConfigError, Problem

_INDEX = ("SLURM_NODEID", "JOB_COMPLETION_INDEX", "PET_NODE_RANK", "SKYPILOT_NODE_RANK")
_COUNT = ("SLURM_STEP_NUM_NODES", "PET_NNODES", "SKYPILOT_NUM_NODES")


@dataclass(frozen=True, slots=True)
class Node:
    """This machine among the machines of a run."""

    index: int = 0
    count: int = 1


def find_node(*, index: int | None, count: int, environment: Mapping[str, str]) -> Node:
    """Returns this machine's number and the count of machines.

    Args:
        index: `--node_index`, else the JSON's node_index, else None.
        count: the JSON's num_nodes; 1 leaves the word to a scheduler.
        environment: variables of this process.

    Raises:
        ConfigError: two sources contradict each other, a variable is no number, the number is not below the count, or a
            scheduler started several processes on this machine.
    """
    place = Place.read(environment)
    if place is not None:
        _agree("node_index", index, "GROUP_RANK", place.node)
        _agree("num_nodes", None if count == 1 else count, "GROUP_WORLD_SIZE", place.num_nodes)
        return Node(place.node, place.num_nodes)
    _require_one_task_a_machine(environment)
    said = None if count == 1 else ("num_nodes", count)
    name, total = _one(
        "num_nodes", said, {key: _number(environment, key) for key in _COUNT if _is_said(environment, key)}
    )
    if total == 1:
        _refuse_lone_process(environment)
        if index not in (None, 0):
            raise ConfigError(
                Problem("node_index", "0 while num_nodes is 1", str(index), "Set num_nodes to the count of machines")
            )
        return Node()
    given = None if index is None else ("node_index", index)
    named = {key: _number(environment, key) for key in _INDEX if _is_said(environment, key)}
    if given is None and not named:
        raise ConfigError(
            Problem("node_index", f"0 to {total - 1}, as {name} is {total}", "nothing",
                    f"Give --node_index on each machine; under a scheduler it is read from {', '.join(_INDEX)}")
        )  # fmt: skip
    key, number = _one("node_index", given, named)
    if not 0 <= number < total:
        raise ConfigError(Problem(key, f"0 to {total - 1}, as {name} is {total}", str(number)))
    return Node(number, total)


def _require_one_task_a_machine(environment: Mapping[str, str]) -> None:
    # asked of the step, not of the task: where only second tasks refuse, first ones train on in a step that has failed
    names = ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES")
    tasks, machines = (_number(environment, name) if _is_said(environment, name) else 1 for name in names)
    if tasks > machines:
        raise ConfigError(
            Problem(names[0], f"{machines}: one task a machine", str(tasks),
                    "Start with srun --ntasks-per-node=1; the workflow starts a process for each GPU itself")
        )  # fmt: skip


def _refuse_lone_process(environment: Mapping[str, str]) -> None:
    """Refuses what would be one training on each machine, each taken for the whole.

    accelerate 1.15 with --cpu starts one process a machine and tells it nothing of the others; it says MASTER_ADDR only
    where it was asked for several.
    """
    if _is_said(environment, "ACCELERATE_USE_CPU") and _is_said(environment, "MASTER_ADDR"):
        raise ConfigError(
            Problem("accelerate launch", "RANK and WORLD_SIZE beside MASTER_ADDR", "MASTER_ADDR alone",
                    "Replace --cpu by --multi_gpu, which numbers the processes, without GPUs too where use_gpu is "
                    "false; or start the workflow itself")
        )  # fmt: skip


def _is_said(environment: Mapping[str, str], key: str) -> bool:
    # a shell inside a Slurm allocation has SLURM_NODEID too; only srun makes a step with a task on every machine
    return bool(environment.get(key)) and (not key.startswith("SLURM_") or "SLURM_STEP_ID" in environment)


def _number(environment: Mapping[str, str], key: str) -> int:
    text = environment[key]
    least, _, most = text.partition(":")  # PET_NNODES may be a range
    if not least.isdigit() or (most and most != least):
        raise ConfigError(Problem(f"environment variable {key}", "a fixed number", repr(text)))
    return int(least)


def _one(key: str, said: tuple[str, int] | None, found: dict[str, int]) -> tuple[str, int]:
    """Returns the one value that all sources give, with the name of a source."""
    sources = ([said] if said else []) + list(found.items())
    if not sources:
        return key, 1 if key == "num_nodes" else 0
    first = sources[0]
    for other in sources[1:]:
        _agree(*first, *other)
    return first


def _agree(key: str, value: int | None, other_key: str, other: int) -> None:
    if value is not None and value != other:
        raise ConfigError(
            Problem(key, f"{other}, as {other_key} says", str(value), f"Remove {key}, or unset {other_key}")
        )
