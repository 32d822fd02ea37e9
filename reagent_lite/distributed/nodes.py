"""Number of this machine and count of machines, from the command line, the JSON or a scheduler.

scheduler                        number                   count                     job
srun, one task per machine       SLURM_NODEID             SLURM_STEP_NUM_NODES      SLURM_JOB_ID
Kubernetes indexed job           JOB_COMPLETION_INDEX     (num_nodes in the JSON)
Kubeflow's PyTorchJob            PET_NODE_RANK            PET_NNODES                PET_RDZV_ID
SkyPilot                         SKYPILOT_NODE_RANK       SKYPILOT_NUM_NODES        SKYPILOT_TASK_ID
torchrun, accelerate launch      GROUP_RANK               GROUP_WORLD_SIZE          (they start the workers themselves)
"""

from collections.abc import Mapping
from dataclasses import dataclass

from reagent_lite.distributed.group import ProcessRanks
from reagent_lite.errors import ConfigError, Problem

_INDEX = ("SLURM_NODEID", "JOB_COMPLETION_INDEX", "PET_NODE_RANK", "SKYPILOT_NODE_RANK")
_COUNT = ("SLURM_STEP_NUM_NODES", "PET_NNODES", "SKYPILOT_NUM_NODES")
_JOB = ("SLURM_JOB_ID", "PET_RDZV_ID", "SKYPILOT_TASK_ID")


@dataclass(frozen=True, slots=True)
class Node:
    """Number of this machine, and count of machines of the run."""

    index: int = 0
    count: int = 1


def find_node(*, index: int | None, count: int, environment: Mapping[str, str]) -> Node:
    """Returns this machine's number and the count of machines.

    Args:
        index: `--node_index`, else the JSON's node_index, else None.
        count: the JSON's num_nodes; if it is 1, a scheduler may set another count.
        environment: environment variables of this process.

    Raises:
        ConfigError: two sources contradict each other, a variable is not a number, the number is not below the count,
            or a scheduler started several processes on this machine.
    """
    given = {} if index is None else {"node_index": index}
    total_given = {} if count == 1 else {"num_nodes": count}
    ranks = ProcessRanks.read(environment)
    if ranks is not None:
        _common(given | {"GROUP_RANK": ranks.node})
        _common(total_given | {"GROUP_WORLD_SIZE": ranks.num_nodes})
        return Node(ranks.node, ranks.num_nodes)
    _require_single_task(environment)
    name, total = _common(total_given | _numbers(environment, _COUNT) or {"num_nodes": 1})
    if total == 1:
        _refuse_lone_process(environment)
        if index not in (None, 0):
            todo = "Set num_nodes to the count of machines"
            raise ConfigError(Problem("node_index", "0 while num_nodes is 1", str(index), todo))
        return Node()
    expected = f"0 to {total - 1}, as {name} is {total}"
    indices = given | _numbers(environment, _INDEX)
    if not indices:
        todo = f"Give --node_index on each machine; under a scheduler it is read from {', '.join(_INDEX)}"
        raise ConfigError(Problem("node_index", expected, "nothing", todo))
    key, number = _common(indices)
    if not 0 <= number < total:
        raise ConfigError(Problem(key, expected, str(number)))
    return Node(number, total)


def job_name(given: str | None, output: str, environment: Mapping[str, str]) -> str:
    """Returns a name that all machines of a job have in common, and that differs between jobs.

    Args:
        given: the config's rendezvous.job.
        output: the config's model_output_path, which differs between jobs.
        environment: environment variables of this process; a scheduler's job number precedes the path.
    """
    numbered = (f"{name}={environment[name]}, {output}" for name in _JOB if _is_set(environment, name))
    return given or next(numbered, output)


def _common(values: dict[str, int]) -> tuple[str, int]:
    """Returns the value that all sources agree on, with the name of the first source.

    Raises:
        ConfigError: two sources have different values.
    """
    (key, value), *others = values.items()
    for other_key, other in others:
        if value != other:
            todo = f"Remove {key}, or unset {other_key}"
            raise ConfigError(Problem(key, f"{other}, as {other_key} says", str(value), todo))
    return key, value


def _numbers(environment: Mapping[str, str], names: tuple[str, ...]) -> dict[str, int]:
    """Returns the values of the variables that are set."""
    numbers = {}
    for name in names:
        if _is_set(environment, name):
            least, _, most = environment[name].partition(":")  # PET_NNODES may be a range
            if not least.isdigit() or (most and most != least):
                raise ConfigError(Problem(f"environment variable {name}", "a fixed number", repr(environment[name])))
            numbers[name] = int(least)
    return numbers


def _is_set(environment: Mapping[str, str], name: str) -> bool:
    # a shell in a Slurm allocation has SLURM_NODEID as well; only srun makes a step with a task on every machine
    return bool(environment.get(name)) and (not name.startswith("SLURM_") or "SLURM_STEP_ID" in environment)


def _require_single_task(environment: Mapping[str, str]) -> None:
    # checked for the step, not for the task: if only second tasks failed, first tasks would continue in a failed step
    tasks_name = "SLURM_STEP_NUM_TASKS"
    machines_name = "SLURM_STEP_NUM_NODES"
    numbers = _numbers(environment, (tasks_name, machines_name))
    tasks = numbers.get(tasks_name, 1)
    machines = numbers.get(machines_name, 1)
    if tasks > machines:
        todo = "Start with srun --ntasks-per-node=1; the workflow starts a process for each GPU itself"
        raise ConfigError(Problem(tasks_name, f"{machines}: one task per machine", str(tasks), todo))


def _refuse_lone_process(environment: Mapping[str, str]) -> None:
    """Refuses to start if every machine would train separately.

    With --cpu, accelerate 1.15 starts one process per machine without numbering them. It sets MASTER_ADDR only if it
    was asked for several machines.
    """
    if _is_set(environment, "ACCELERATE_USE_CPU") and _is_set(environment, "MASTER_ADDR"):
        todo = (
            "Replace --cpu by --multi_gpu, which numbers the processes (without GPUs as well if use_gpu is false), or "
            "start the workflow itself"
        )
        raise ConfigError(Problem("accelerate launch", "RANK, WORLD_SIZE and MASTER_ADDR", "only MASTER_ADDR", todo))
