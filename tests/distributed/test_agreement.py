"""Ranks agree at the same step, seldom enough; a rank that holds other numbers is named on all."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles.ranks import end_ranks, start_ranks
from torch import nn

from reagent_lite.distributed.agreement import Agreed, Agreement, steps_between
from reagent_lite.distributed.group import Group, Place
from reagent_lite.training.checkpoint import checksum

WORKER = str(Path(__file__).with_name("agreement_worker.py"))


@pytest.mark.parametrize(
    ("step", "check", "steps"),
    [
        (0.001, 0.0003, 100),  # 0.3 ms every 100 ms is 0.3 percent
        (0.001, 0.1, 1000),  # that would be every 33 s: a second is prompter
        (2.0, 0.001, 1),
        (0.1, 0.0001, 1),
        (0.1, 0.0012, 4),
    ],
)
def test_checks_are_cheap_and_prompt(step: float, check: float, steps: int) -> None:
    assert steps_between(step, check) == steps


def test_a_process_alone_looks_every_time() -> None:
    agreement = Agreement(Group(Place(), torch.device("cpu")))
    assert [agreement.after_step(done, stop=done == 3, save=done == 2) for done in (1, 2, 3)] == [
        Agreed(), Agreed(save=True), Agreed(stop=True),
    ]  # fmt: skip


def results(task: str, folder: Path) -> list[dict[str, Any]]:
    ranks = start_ranks(3, [WORKER, task, str(folder)], folder)
    assert end_ranks(ranks) == [0, 0, 0], (folder / "err_0").read_text()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(3)]


def test_all_ranks_stop_and_save_at_the_same_step(tmp_path: Path) -> None:
    found = results("agree", tmp_path)
    stopped = {result["stopped"] for result in found}
    assert len(stopped) == 1
    assert 700 <= stopped.pop() <= 700 + 2 / found[0]["step"]  # about a second, with a second to spare
    assert [result["saves"] for result in found] == [[1], [1], [1]]  # rank 1's clock is not looked at


def test_a_rank_with_other_numbers_is_named_on_all(tmp_path: Path) -> None:
    found = results("diverge", tmp_path)
    for result in found:
        assert result["step"] == 5
        assert "step 5: expected the same parameters on all ranks" in result["error"]
        assert "parameters differ between ranks: 1 from 0, 2" in result["error"]
    kept = sorted(path.name for path in (tmp_path / "checkpoints").glob("step_*"))
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
    swapped = nn.Sequential(same[1], same[0])
    assert checksum(same) != checksum(swapped)
