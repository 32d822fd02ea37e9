"""Ranks of a run: collectives, gradients for any division of rows, and joint decisions."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles.ranks import run_ranks
from rank import learn
from safetensors.torch import load_file
from torch import nn

from reagent_lite.distributed.agreement import Agreed, StepAgreement, steps_between
from reagent_lite.distributed.group import Group, ProcessRanks
from reagent_lite.errors import RendezvousError
from reagent_lite.training.checkpoint import checksum

RANK = str(Path(__file__).with_name("rank.py"))


def results(folder: Path, world: int, *jobs: str) -> dict[str, list[Any]]:
    """Returns the results of each rank, by job."""
    runs = run_ranks([RANK, str(folder), *jobs], [folder], [world])
    assert [run.code for run in runs] == [0] * world, "".join(run.err for run in runs)
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]
    return {job: [rank[job] for rank in ranks] for job in ranks[0]}


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, list[Any]], Path]:
    """Results of three ranks, and their folder."""
    folder = tmp_path_factory.mktemp("three")
    return results(folder, 3, "collectives", "agree", "diverge"), folder


def test_place_is_read_whole_or_refused() -> None:
    variables = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert ProcessRanks.read(variables) == ProcessRanks(3, 4, 1, 2, node=1, num_nodes=2)
    named = {**variables, "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "3"}
    assert ProcessRanks.read(named) == ProcessRanks(3, 4, 1, 2, node=0, num_nodes=3)
    assert ProcessRanks.read({}) is None
    with pytest.raises(RendezvousError, match="LOCAL_WORLD_SIZE: expected an integer"):
        ProcessRanks.read({**variables, "LOCAL_WORLD_SIZE": "two"})


def test_a_world_of_one_does_nothing() -> None:
    group = Group(ProcessRanks(), torch.device("cpu"))
    assert group.all_reduce(torch.tensor([2.0])).tolist() == [2.0]
    assert group.broadcast_text("naïve") == "naïve"
    assert [part.tolist() for part in group.gather(torch.tensor([[1], [2]]))] == [[[1], [2]]]
    assert list(group.gather_bytes(b"")) == [b""]
    module = nn.Linear(1, 1)
    assert group.wrap(module) is module
    group.barrier()
    agreement = StepAgreement(group)  # which costs nothing, so it is asked at every step
    assert [agreement.after_step(done, stop=done == 3, save=done == 2) for done in (1, 2, 3)] == [
        Agreed(), Agreed(save=True), Agreed(stop=True),
    ]  # fmt: skip


def test_collectives_of_three_ranks(three: tuple[dict[str, list[Any]], Path]) -> None:
    """Tensors of rank r contain r, or whether r is 1, and have shape [2, r, 3 - r]; those of rank 0 are empty."""

    def tensors(kind: type) -> list[object]:
        return [[[[kind(rank == 1 if kind is bool else rank)] * (3 - rank)] * rank] * 2 for rank in range(3)]

    for rank, returned in enumerate(three[0]["collectives"]):
        assert returned["sum"] == [1 + 2 + 3, "héllo", 2]
        assert returned["texts"] == ["", "é", "éé"]
        assert returned["part"] == ["0", "", "22"][rank]
        assert returned["bytes"] == (["", "b", "bb"] if rank == 0 else [])
        assert returned["tensors"] == ([tensors(kind) for kind in (int, bool, float)] if rank == 0 else [[], [], []])


def test_two_processes_equal_one_after_104_steps(tmp_path: Path) -> None:
    """Half the batch each, or 3 : 1 rows: parameters, target and optimizer's effect agree to 1e-6; of two types too.

    A wrapped module may outlive its group; otherwise a run that fails between two steps could wait forever.
    """
    assert learn("one", Group(ProcessRanks(), torch.device("cpu")), tmp_path) == 104
    assert learn("agents", Group(ProcessRanks(), torch.device("cpu")), tmp_path) == 104
    jobs = ("even", "uneven", "agents of two")
    assert results(tmp_path, 2, *jobs, "outlive") == {job: [104, 104] for job in jobs}
    alone = load_file(tmp_path / "one_0.safetensors")
    assert len([name for name, tensor in alone.items() if name.startswith("q_network") and tensor.abs().sum() > 0]) == 4
    for file in ("even_0", "even_1", "uneven_0", "uneven_1"):
        for name, tensor in load_file(tmp_path / f"{file}.safetensors").items():
            torch.testing.assert_close(tensor, alone[name], rtol=0, atol=1e-6)
    types = load_file(tmp_path / "agents_0.safetensors")
    assert len(types) == 2 * len(alone)
    for rank in range(2):
        for name, tensor in load_file(tmp_path / f"agents of two_{rank}.safetensors").items():
            torch.testing.assert_close(tensor, types[name], rtol=0, atol=1e-6)


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


def test_all_ranks_stop_and_save_at_the_same_step(three: tuple[dict[str, list[Any]], Path]) -> None:
    results_of_ranks = three[0]["agree"]
    # checks follow steps 1, 2, 169, 336, 667 and 998
    assert [result["stopped"] for result in results_of_ranks] == [998] * 3
    assert [result["saves"] for result in results_of_ranks] == [[1], [1], [1]]  # rank 1's clock does not count


def test_a_rank_with_other_numbers_is_named_on_all(three: tuple[dict[str, list[Any]], Path]) -> None:
    for result in three[0]["diverge"]:
        assert result["step"] == 5
        assert "differ between ranks: 1 from 0, 2" in result["error"]
    kept = sorted(path.name for path in (three[1] / "checkpoints").glob("step_*"))
    assert kept == ["step_000002", "step_000004"]  # nothing is saved of what differs


def test_a_checksum_sees_every_bit_and_the_order() -> None:
    module = nn.Linear(3, 2)
    before = checksum(module)
    flat = module.weight.data.view(-1).view(torch.int32)
    for bit in range(32):
        flat[2] ^= 1 << bit if bit < 31 else -(1 << 31)
        assert checksum(module) != before
        flat[2] ^= 1 << bit if bit < 31 else -(1 << 31)
    assert checksum(module) == before
    same = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert checksum(same) != checksum(nn.Sequential(same[1], same[0]))
