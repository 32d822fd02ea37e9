"""Number of this machine: every scheduler's variables, and every contradiction."""

import re

import pytest

from reagent_lite.distributed.nodes import Node, find_node, job_name
from reagent_lite.errors import ConfigError

SLURM = {"SLURM_NODEID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2"}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
            "GROUP_WORLD_SIZE": "2"}  # fmt: skip
ACCELERATE_ON_CPU = {"ACCELERATE_USE_CPU": "True"}


@pytest.mark.parametrize(
    ("index", "count", "environment", "expected"),
    [
        (None, 1, {}, Node(0, 1)),
        (0, 1, {}, Node(0, 1)),
        (2, 3, {}, Node(2, 3)),
        (None, 1, SLURM, Node(1, 2)),
        (None, 2, SLURM, Node(1, 2)),
        (1, 2, SLURM, Node(1, 2)),
        # an interactive shell in an allocation of two machines: no step, so one machine
        (None, 1, {"SLURM_NODEID": "0", "SLURM_NNODES": "2", "SLURM_JOB_NUM_NODES": "2"}, Node(0, 1)),
        (None, 4, {"JOB_COMPLETION_INDEX": "3"}, Node(3, 4)),
        # an indexed job of runs that have nothing to do with each other
        (None, 1, {"JOB_COMPLETION_INDEX": "3"}, Node(0, 1)),
        (None, 1, {"PET_NODE_RANK": "1", "PET_NNODES": "2"}, Node(1, 2)),
        (None, 1, {"PET_NODE_RANK": "1", "PET_NNODES": "2:2"}, Node(1, 2)),
        (None, 1, {"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_NODES": "3"}, Node(0, 3)),
        (None, 1, {**SLURM, "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2"}, Node(1, 2)),
        (None, 1, TORCHRUN, Node(1, 2)),
        (1, 2, TORCHRUN, Node(1, 2)),
        # Accelerate
        (None, 1, {key: value for key, value in TORCHRUN.items() if not key.startswith("GROUP")}, Node(1, 2)),
        (None, 1, ACCELERATE_ON_CPU, Node(0, 1)),
        (1, 2, {**ACCELERATE_ON_CPU, "MASTER_ADDR": "10.0.0.1"}, Node(1, 2)),
    ],
)
def test_number_and_count_of_machines_by_source(
    index: int | None, count: int, environment: dict[str, str], expected: Node
) -> None:
    assert find_node(index=index, count=count, environment=environment) == expected


@pytest.mark.parametrize(
    ("given", "environment", "expected"),
    [
        (None, {}, "out"),
        (None, {"SLURM_JOB_ID": "7"}, "out"),  # an interactive shell in an allocation
        (None, {**SLURM, "SLURM_JOB_ID": "7"}, "SLURM_JOB_ID=7, out"),
        (None, {"PET_RDZV_ID": "a"}, "PET_RDZV_ID=a, out"),
        (None, {"SKYPILOT_TASK_ID": "b"}, "SKYPILOT_TASK_ID=b, out"),
        ("mine", {**SLURM, "SLURM_JOB_ID": "7"}, "mine"),
    ],
)
def test_name_of_a_job(given: str | None, environment: dict[str, str], expected: str) -> None:
    assert job_name(given, "out", environment) == expected


@pytest.mark.parametrize(
    ("index", "count", "environment", "words"),
    [
        (1, 1, {}, "node_index: expected 0 while num_nodes is 1"),
        (3, 3, {}, "node_index: expected 0 to 2"),
        (None, 2, {}, "node_index: expected 0 to 1"),
        (0, 2, SLURM, "node_index: expected 1, as SLURM_NODEID"),
        (None, 3, SLURM, "num_nodes: expected 2, as SLURM_STEP_NUM"),
        (None, 2, {**SLURM, "SLURM_STEP_NUM_TASKS": "3"}, "NUM_TASKS: expected 2"),
        (0, 1, {**SLURM, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "2"}, "srun --ntasks-per-node=1"),
        (None, 4, {"JOB_COMPLETION_INDEX": "4"}, "JOB_COMPLETION_INDEX: expected 0 to 3"),
        (None, 2, {"JOB_COMPLETION_INDEX": "one"}, "JOB_COMPLETION_INDEX: expected a fixed"),
        (None, 1, {"PET_NODE_RANK": "1", "PET_NNODES": "1:4"}, "PET_NNODES: expected a fixed number"),
        (None, 1, {**SLURM, "SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_NODES": "2"},
         "SLURM_NODEID: expected 0, as SKYPILOT"),
        (None, 1, {**ACCELERATE_ON_CPU, "MASTER_ADDR": "10.0.0.1"}, "Replace --cpu by --multi_gpu"),
        (0, 1, TORCHRUN, "node_index: expected 1, as GROUP_RANK"),
        (None, 3, TORCHRUN, "num_nodes: expected 2, as GROUP_WORLD"),
    ],
)  # fmt: skip
def test_contradictions_name_both_sides(index: int | None, count: int, environment: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        find_node(index=index, count=count, environment=environment)
