"""Which machine this is, and among how many: by the command line, the JSON, or a scheduler.

scheduler                        number                   count                     job
srun, one task a machine         SLURM_NODEID             SLURM_STEP_NUM_NODES      SLURM_JOB_ID
Kubernetes indexed job           JOB_COMPLETION_INDEX     (num_nodes in the JSON)
Kubeflow's PyTorchJob            PET_NODE_RANK            PET_NNODES                PET_RDZV_ID
SkyPilot                         SKYPILOT_NODE_RANK       SKYPILOT_NUM_NODES        SKYPILOT_TASK_ID
torchrun, accelerate launch      GROUP_RANK               GROUP_WORLD_SIZE, which start the workers themselves
"""

from collections.abc import Mapping
from dataclasses import dataclass

from reagent_lite.distributed.group import Place
from reagent_lite.errors import ConfigError, Problem

_INDEX = ("SLURM_NODEID", "JOB_COMPLETION_INDEX", "PET_NODE_RANK", "SKYPILOT_NODE_RANK")
_COUNT = ("SLURM_STEP_NUM_NODES", "PET_NNODES", "SKYPILOT_NUM_NODES")
_JOB = ("SLURM_JOB_ID", "PET_RDZV_ID", "SKYPILOT_TASK_ID")


@dataclass(frozen=True, slots=True)
class Node:
    """This machine among the machines of a run."""

    index: int = 0
    count: int = 1


def find_node(*, index: int | None, count: int, environment: Mapping[str, str]) -> Node:
    """Returns this machine's number and the count of machines.

    Args:
        index: `--node_index`, else the JSON's node_index, else None.
        count: the JSON's num_nodes; 1 leaves it to a scheduler.
        environment: variables of this process.

    Raises:
        ConfigError: two sources contradict each other, a variable is no number, the number is not below the count, or a
            scheduler started several processes on this machine.
    """
    given = {} if index is None else {"node_index": index}
    total_given = {} if count == 1 else {"num_nodes": count}
    place = Place.read(environment)
    if place is not None:
        _common(given | {"GROUP_RANK": place.node})
        _common(total_given | {"GROUP_WORLD_SIZE": place.num_nodes})
        return Node(place.node, place.num_nodes)
    _require_one_task_a_machine(environment)
    name, total = _common(total_given | _numbers(environment, _COUNT) or {"num_nodes": 1})
    if total == 1:
        _refuse_lone_process(environment)
        if index not in (None, 0):
            todo = "Set num_nodes to the count of machines"
            raise ConfigError(Problem("node_index", "0 while num_nodes is 1", str(index), todo))
        return Node()
    expected = f"0 to {total - 1}, as {name} is {total}"
    known = given | _numbers(environment, _INDEX)
    if not known:
        todo = f"Give --node_index on each machine; under a scheduler it is read from {', '.join(_INDEX)}"
        raise ConfigError(Problem("node_index", expected, "nothing", todo))
    key, number = _common(known)
    if not 0 <= number < total:
        raise ConfigError(Problem(key, expected, str(number)))
    return Node(number, total)


def job_name(given: str | None, output: str, environment: Mapping[str, str]) -> str:
    """Returns the name that all machines of a job share, and machines of another job do not.

    Args:
        given: the config's rendezvous.job.
        output: its model_output_path, of which two jobs have one each.
        environment: variables of this process; a scheduler's number of the job comes before the path.
    """
    numbered = (f"{name}={environment[name]}, {output}" for name in _JOB if _is_set(environment, name))
    return given or next(numbered, output)


def _common(values: dict[str, int]) -> tuple[str, int]:
    """Returns the one value that all sources give, with the name of the first."""
    (key, value), *others = values.items()
    for other_key, other in others:
        if value != other:
            todo = f"Remove {key}, or unset {other_key}"
            raise ConfigError(Problem(key, f"{other}, as {other_key} says", str(value), todo))
    return key, value


def _numbers(environment: Mapping[str, str], names: tuple[str, ...]) -> dict[str, int]:
    """Returns the values of those variables that are set."""
    found = {}
    for name in names:
        if _is_set(environment, name):
            least, _, most = environment[name].partition(":")  # PET_NNODES may be a range
            if not least.isdigit() or (most and most != least):
                raise ConfigError(Problem(f"environment variable {name}", "a fixed number", repr(environment[name])))
            found[name] = int(least)
    return found


def _is_set(environment: Mapping[str, str], name: str) -> bool:
    # a shell inside a Slurm allocation has SLURM_NODEID too; only srun makes a step with a task on every machine
    return bool(environment.get(name)) and (not name.startswith("SLURM_") or "SLURM_STEP_ID" in environment)


def _require_one_task_a_machine(environment: Mapping[str, str]) -> None:
    # asked of the step, not of the task: where only second tasks refuse, first ones train on in a step that has failed
    tasks_name = "SLURM_STEP_NUM_TASKS"
    machines_name = "SLURM_STEP_NUM_NODES"
    found = _numbers(environment, (tasks_name, machines_name))
    tasks = found.get(tasks_name, 1)
    machines = found.get(machines_name, 1)
    if tasks > machines:
        todo = "Start with srun --ntasks-per-node=1; the workflow starts a process for each GPU itself"
        raise ConfigError(Problem(tasks_name, f"{machines}: one task a machine", str(tasks), todo))


def _refuse_lone_process(environment: Mapping[str, str]) -> None:
    """Refuses what would be a training of its own on each machine.

    accelerate 1.15 with --cpu starts one process a machine that knows of no others; it sets MASTER_ADDR only where it
    was asked for several.
    """
    if _is_set(environment, "ACCELERATE_USE_CPU") and _is_set(environment, "MASTER_ADDR"):
        todo = (
            "Replace --cpu by --multi_gpu, which numbers the processes, without GPUs too where use_gpu is false; or "
            "start the workflow itself"
        )
        raise ConfigError(
            Problem("accelerate launch", "RANK and WORLD_SIZE beside MASTER_ADDR", "MASTER_ADDR alone", todo)
        )
