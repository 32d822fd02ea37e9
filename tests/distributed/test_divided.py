"""Batches divided over devices: losses, gradients and row errors of the whole batch."""

import copy
from typing import Any

import pytest
import torch
from helpers.batches import random_batch
from torch import Tensor, nn

from reagent_lite.distributed.divided import DividedOverGpus, divide_inputs
from reagent_lite.types import TransitionBatch

CPU = torch.device("cpu")


class Fit(nn.Module):
    """Weighted squared errors of a linear value of the state against the reward."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 1)

    def forward(self, batch: TransitionBatch) -> tuple[Tensor, dict[str, Tensor]]:
        errors = self.line(batch.state).squeeze(1) - batch.reward
        self.row_errors = errors.abs().detach()
        return batch.weight.dot(errors.square()), {"weight": batch.weight.sum()}


def test_rows_are_divided_in_order() -> None:
    batch = random_batch(7, 3, 2, seed=0)
    parts = divide_inputs((batch, torch.arange(7.0)), [CPU] * 3)
    assert torch.equal(torch.cat([part.state for part, _ in parts]), batch.state)
    assert [values.tolist() for _, values in parts] == [[0, 1], [2, 3], [4, 5, 6]]
    by_type = divide_inputs(({"tagger": batch, "runner": random_batch(5, 3, 2, seed=1)},), [CPU] * 2)
    assert [{name: len(part) for name, part in parts_by_type.items()} for (parts_by_type,) in by_type] == [
        {"tagger": 3, "runner": 2}, {"tagger": 4, "runner": 3},
    ]  # fmt: skip
    assert [len(part) for (part,) in divide_inputs((random_batch(2, 3, 2, seed=0),), [CPU] * 4)] == [1, 1]


def test_parts_of_a_batch_learn_what_the_whole_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this test replicas share the parameters and run one after another."""
    monkeypatch.setattr(nn.DataParallel, "replicate", lambda self, module, ids: [copy.copy(module) for _ in ids])
    monkeypatch.setattr(
        nn.DataParallel, "parallel_apply",
        lambda self, replicas, inputs, kwargs: [replica(*rows) for replica, rows in zip(replicas, inputs, strict=True)],
    )  # fmt: skip
    learner = Fit()
    wrapped: Any = DividedOverGpus(learner, [CPU] * 3)
    # torch found no GPU
    vars(wrapped).update(device_ids=[0, 1, 2], src_device_obj=CPU, output_device=0)
    learned = []
    for module in (learner, wrapped):
        learner.zero_grad()
        loss, metrics = module(random_batch(7, 3, 2, seed=1))
        loss.backward()
        learned.append([loss.detach(), metrics["weight"], learner.line.weight.grad, learner.row_errors])
    torch.testing.assert_close(learned[1], learned[0])
    assert learned[1][1].item() == pytest.approx(1.0)
