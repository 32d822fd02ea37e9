"""Ranks of a run: collectives, gradients for any division of rows, and joint decisions."""

import atexit
import gc
import itertools
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
from helpers.batches import make_batch
from helpers.ranks import call_on_ranks
from safetensors.torch import load_file, save_file
from torch import nn

from reagent_lite.algorithms.dqn import DQN, DQNSettings
from reagent_lite.algorithms.learners import Learners, learners_of
from reagent_lite.config.checkpoint import CheckpointConfig
from reagent_lite.config.rendezvous import RendezvousConfig
from reagent_lite.data.sampling.plan import ReadPlan
from reagent_lite.distributed import agreement as agreement_module
from reagent_lite.distributed.agreement import Agreed, StepAgreement, steps_between
from reagent_lite.distributed.group import Group, ProcessRanks
from reagent_lite.errors import PeerError, RendezvousError
from reagent_lite.evaluation.entropy import SoftmaxRows
from reagent_lite.models.q_networks import NetworkSettings, build_q_network
from reagent_lite.models.value_heads import ScalarHead
from reagent_lite.sim.replay.sampling import importance_weights
from reagent_lite.training.checkpoint_folder import CheckpointFolder, Checkpoints, CheckpointSchedule, checksum
from reagent_lite.training.loop import Optimization, Running, fit
from reagent_lite.training.stop import StopSignal
from reagent_lite.types import SourceSpec, TransitionBatch

SHARES = {"one": (1,), "even": (1, 1), "uneven": (3, 1), "three": (1, 1, 1), "agents": (1,), "agents of two": (3, 1)}
PLACE = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


def results(function: Any, folder: Path, world: int) -> list[Any]:
    """Returns what function(group, folder) returns on each rank."""
    runs = call_on_ranks(function, [str(folder)], [folder], [world])
    assert [run.code for run in runs] == [0] * world, "".join(run.err for run in runs)
    return [run.outcome for run in runs]


# ---- in the processes of a run


def batches(plan: ReadPlan, rank: int, shares: tuple[int, ...]) -> Iterator[TransitionBatch]:
    """Rows of a table in the order of a plan, like data.source with files; ranks read parts by their shares."""
    rng = torch.Generator().manual_seed(0)
    state, after = torch.randn(2, 203, 3, generator=rng)
    reward = torch.randn(203, generator=rng)
    of_rank = range(sum(shares[:rank]), sum(shares[: rank + 1]))
    for step in itertools.count():
        parts = [part for number in of_rank for part in plan.parts(step, number)]
        rows = torch.from_numpy(plan.permutation(step // plan.steps_per_epoch)[parts[0][0] : parts[-1][1]].astype(int))
        weight = torch.full((len(rows),), len(shares) / plan.rows_of_step(step))
        yield make_batch(state[rows], after[rows], rows % 2, reward[rows], weight=weight)


def dqn() -> DQN:
    spec = SourceSpec(num_state_features=3, action_names=("a", "b"))
    network = build_q_network(spec, NetworkSettings(hidden=(16,), activations=("relu",)))
    return DQN(network, ScalarHead(), DQNSettings(gamma=0.9, target_update_rate=0.1))


def ready(group: Group, job: str) -> tuple[Running, ReadPlan]:
    """Training of one agent, or of two types with opposite rewards."""
    agents, shares = "agents" in job, SHARES[job]
    plan = ReadPlan(shards=(203,), minibatch=16, epochs=4, reads=(0,) * sum(shares))
    torch.manual_seed(group.rank)  # initial weights differ: the first rank's count
    learner = Learners({"tagger": dqn(), "runner": dqn()}) if agents else dqn()
    trained = [[*part.q_network.parameters()] for part in learners_of(learner).values()]
    optimizer = torch.optim.Adam([p for each in trained for p in each], lr=1e-3)
    optimization = Optimization(optimizer=optimizer, clip_norm=0.5 if agents else None, clipped=trained)
    source = MagicMock(state_dict=lambda: {"step": 0})
    source.__next__.side_effect = (
        {"tagger": batch, "runner": replace(batch, reward=-batch.reward)} if agents else batch
        for batch in batches(plan, group.rank, shares)
    )
    return Running(learner=learner, optimization=optimization, source=source, evaluators=source), plan


def learn(group: Group, job: str, folder: str | Path) -> int:
    running, plan = ready(group, job)
    for _ in fit(running, plan, group):
        pass
    save_file(running.learner.state_dict(), Path(folder) / f"{job}_{group.rank}.safetensors")
    return running.position.step


def collectives(group: Group) -> dict[str, Any]:
    with patch.object(group, "enter_collective") as entered:
        total = int(group.all_reduce(torch.tensor([group.rank + 1])))
        most = int(group.all_reduce_max(torch.tensor([group.rank])))
    own = torch.nan if group.rank == group.world_size - 1 else 1.0
    largest = group.all_reduce_max(torch.tensor([own, 2.0 * group.rank, -torch.inf]))
    scores = torch.tensor([[own, 0.0]])
    rarity = torch.tensor([own, 1.0])
    weights = importance_weights(rarity, group.all_reduce_max(rarity.amax()), 1.0)
    last = group.broadcast_bytes(bytes([group.rank]), group.world_size - 1)[0]
    matrix = torch.full((group.rank, 2, 3 - group.rank), group.rank).transpose(0, 1)  # none, and not contiguous
    return {
        "reduced": [total, most, entered.call_count],
        "largest": list(map(str, largest.tolist())),
        "of a rank's NaN": [
            str(SoftmaxRows([(scores, torch.ones(1, 2).bool())], group).temperature(0.3)),
            str(weights[1].item()),
        ],
        "sent": [group.broadcast_text("héllo" if group.is_first else None), last],
        "texts": group.gather_text("é" * group.rank),
        "bytes": [entry.decode() for entry in group.gather_bytes(b"b" * group.rank)],
        "part": group.scatter_bytes(iter([b"0", b"", b"22"]) if group.is_first else None).decode(),
        "tensors": [
            [entry.tolist() for entry in group.gather(column)] for column in (matrix, matrix == 1, matrix.double())
        ],
    }


def agree(group: Group) -> dict[str, Any]:
    """Rank 2 is asked to stop, rank 0's clock asks for a checkpoint; each rank returns when it learnt of it."""
    clock = itertools.count(0.0, 0.001).__next__  # a step takes 1 ms, and so does reading the clock
    saves = []
    with patch.object(agreement_module, "time", SimpleNamespace(perf_counter=clock)):
        agreement = StepAgreement(group)
        for done in range(1, 10_000):
            clock()
            agreed = agreement.after_step(done, stop=group.rank == 2 and done >= 700, save=done == 1 or group.rank == 1)
            saves += [done] if agreed.save else []
            if agreed.stop:
                return {"stopped": done, "saves": saves}
    return {}


def diverge(group: Group, folder: str) -> dict[str, Any]:
    """A bit of rank 1's parameters flips before step 4; ranks compare every 5 steps and save every 2."""
    running, plan = ready(group, "three")
    document = {"run": "r", "serial": 0, "world": {"processes": group.world_size}}
    schedule = CheckpointSchedule(
        CheckpointConfig(every_steps=2),
        RendezvousConfig(step_timeout_seconds=60, startup_timeout_seconds=60, checksum_every_steps=5),
        Checkpoints(CheckpointFolder(Path(folder) / "checkpoints"), group, running, document, keep=9),
        StopSignal(),
    )

    def flip(step: int) -> None:
        if step == 4 and group.rank == 1:
            next(running.learner.q_network.parameters()).data.view(-1).view(torch.int32)[0] ^= 1

    with pytest.raises(PeerError, match="differ between ranks: 1 from 0, 2"):
        list(schedule.after_step() for _ in fit(running, plan, group, collect=flip))
    return {"step": running.position.step, "kept": sorted(os.listdir(Path(folder, "checkpoints")))}


def end_without_threads() -> None:
    """Ends with status 1 if a thread of the group lives as long as the interpreter, which may abort it."""
    if any("gloo" in file.read_text() for file in Path("/proc/self/task").glob("*/comm")):
        os._exit(1)


def of_three(group: Group, folder: str) -> dict[str, Any]:
    atexit.register(end_without_threads)
    return {"collectives": collectives(group), "agree": agree(group), "diverge": diverge(group, folder)}


def of_two(group: Group, folder: str) -> list[int]:
    """Trains; leaves a module that outlives its group, at whose end no other thread gets Python's lock."""
    steps = [learn(group, job, folder) for job in ("even", "uneven", "agents of two")]
    outliving = [group.wrap(nn.Linear(1, 1))]
    outliving[0](torch.ones(1, 1)).sum().backward()
    gc.freeze()  # collecting takes long enough for torch's thread, which has still to let go of what it averaged
    sys.setswitchinterval(60)
    atexit.register(outliving.clear)  # one that lives when the interpreter ends may abort the process
    return steps


# ---- what they return

AT_FIRST = {
    "bytes": ["", "b", "bb"],
    "tensors": [
        [[[[kind(rank == 1 if kind is bool else rank)] * (3 - rank)] * rank] * 2 for rank in range(3)]
        for kind in (int, bool, float)
    ],
}
"""Tensors of rank r contain r, or whether r is 1, and have shape [2, r, 3 - r]; those of rank 0 are empty."""
ELSEWHERE = {"bytes": [], "tensors": [[], [], []]}


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results of three ranks, by job."""
    return results(of_three, tmp_path_factory.mktemp("three"), 3)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (PLACE, ProcessRanks(3, 4, 1, 2, node=1, num_nodes=2)),
        ({**PLACE, "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "3"}, ProcessRanks(3, 4, 1, 2, node=0, num_nodes=3)),
        ({}, None),
    ],
)
def test_place_is_read(variables: dict[str, str], expected: ProcessRanks | None) -> None:
    assert ProcessRanks.read(variables) == expected


def test_a_place_in_part_is_refused() -> None:
    with pytest.raises(RendezvousError, match="LOCAL_WORLD_SIZE: expected an integer"):
        ProcessRanks.read({**PLACE, "LOCAL_WORLD_SIZE": "two"})


def test_a_world_of_one_does_nothing() -> None:
    group, module = Group(ProcessRanks(), torch.device("cpu")), nn.Linear(1, 1)
    assert group.all_reduce(torch.tensor([2.0])).tolist() == [2.0]
    assert [part.tolist() for part in group.gather(torch.tensor([[1], [2]]))] == [[[1], [2]]]
    assert (group.broadcast_text("naïve"), list(group.gather_bytes(b""))) == ("naïve", [b""])
    assert group.wrap(module) is module
    group.barrier()
    agreement = StepAgreement(group)  # which costs nothing, so it is asked at every step
    assert [agreement.after_step(done, stop=done == 3, save=done == 2) for done in (1, 2, 3)] == [
        Agreed(), Agreed(save=True), Agreed(stop=True),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        ("collectives", [
            {"reduced": [1 + 2 + 3, 2, 2], "largest": ["nan", "4.0", "-inf"], "sent": ["héllo", 2],
             "of a rank's NaN": ["1.0", "nan"], "texts": ["", "é", "éé"], "part": part, **gathered}
            for part, gathered in (("0", AT_FIRST), ("", ELSEWHERE), ("22", ELSEWHERE))
        ]),
        # checks follow steps 1, 2, 169, 336, 667 and 998; rank 1's clock does not count
        ("agree", [{"stopped": 998, "saves": [1]}] * 3),
        # nothing is saved of what differs
        ("diverge", [{"step": 5, "kept": ["LATEST", "step_000002", "step_000004"]}] * 3),
    ],
)  # fmt: skip
def test_what_three_ranks_do_together(job: str, expected: list[Any], three: list[dict[str, Any]]) -> None:
    assert [rank[job] for rank in three] == expected


def test_two_processes_equal_one_after_52_steps(tmp_path: Path) -> None:
    """Half the batch each, or 3 : 1 rows: parameters, target and optimizer's effect agree to 1e-6; of two types too.

    A wrapped module may outlive its group; otherwise a run that fails between two steps could wait forever.
    """
    alone = Group(ProcessRanks(), torch.device("cpu"))
    assert [learn(alone, job, tmp_path) for job in ("one", "agents")] == [52, 52]
    assert results(of_two, tmp_path, 2) == [[52] * 3] * 2
    one, agents = (load_file(tmp_path / f"{job}_0.safetensors") for job in ("one", "agents"))
    assert len([name for name, tensor in one.items() if name.startswith("q_network") and tensor.abs().sum() > 0]) == 4
    for job, rank in itertools.product(("even", "uneven", "agents of two"), (0, 1)):
        learned = load_file(tmp_path / f"{job}_{rank}.safetensors")
        torch.testing.assert_close(learned, agents if "agents" in job else one, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("step", "check", "steps"),
    [
        (0.001, 0.0003, 100),  # 0.3 ms every 100 ms is 0.3 percent
        (0.001, 0.1, 1000),  # that would be every 33 s: a second is prompter
        (2.0, 0.001, 1),
        (0.1, 0.0012, 4),
    ],
)
def test_checks_are_cheap_and_prompt(step: float, check: float, steps: int) -> None:
    assert steps_between(step, check) == steps


def test_a_checksum_sees_every_bit() -> None:
    module = nn.Linear(3, 2)
    before = checksum(module)
    flat = module.weight.data.view(-1).view(torch.int32)
    for bit in range(32):
        flat[2] ^= (1 << bit) - (1 << 32) * (bit == 31)
        assert checksum(module) != before
        flat[2] ^= (1 << bit) - (1 << 32) * (bit == 31)
    assert checksum(module) == before
