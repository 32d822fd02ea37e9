"""What happens before work is replayed as a CUDA graph, with stand-ins for the few functions of torch.cuda."""

import contextlib
import re
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import pytest
import torch
from oracles.batches import random_batch
from torch import Tensor

from reagent_lite.errors import SimulationError
from reagent_lite.training.capture import Captured, FixedBatches
from reagent_lite.types import TransitionBatch


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done with graphs, as it comes; a graph that was recorded replays nothing."""
    notes: list[str] = []

    @contextlib.contextmanager
    def recording(graph: object, **options: object) -> Iterator[None]:
        notes.append("recorded")
        yield

    graph = types.SimpleNamespace(replay=lambda: notes.append("replayed"))
    mode = {"value": 0}
    stand_ins: dict[str, Any] = {
        "CUDAGraph": lambda: graph,
        "graph": recording,
        "current_stream": lambda: None,
        "get_sync_debug_mode": lambda: mode["value"],
        "set_sync_debug_mode": lambda value: mode.update(value=value),
    }
    for name, value in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return notes


def waiting(work: Callable[[], None]) -> Callable[[], None]:
    """Work with a call at which torch warns as it does where a call waits for the GPU."""

    def waits() -> None:
        work()
        if torch.cuda.get_sync_debug_mode() == "warn":
            warnings.warn("called a synchronizing CUDA operation (Triggered internally at x.cpp:1.)", stacklevel=1)

    return waits


def test_work_is_run_three_times_and_then_recorded_once(graphs: list[str]) -> None:
    done: list[int] = []
    captured = Captured(lambda: done.append(len(done)))
    for _ in range(6):
        captured()
    assert done == [0, 1, 2, 3]  # the fourth is the recording, which computes nothing on a GPU
    assert graphs == ["recorded", "replayed", "replayed", "replayed"]
    assert torch.cuda.get_sync_debug_mode() == 0


def test_work_that_waits_is_done_whole_and_never_recorded(graphs: list[str], caplog: pytest.LogCaptureFixture) -> None:
    done: list[int] = []
    captured = Captured(waiting(lambda: done.append(len(done))))
    for _ in range(6):
        captured()
    assert done == [0, 1, 2, 3, 4, 5]
    assert graphs == []
    (record,) = caplog.records
    where = rf"{re.escape(__file__)}:\d+ `warnings.warn\(.*\)`: "
    assert re.match(where, record.getMessage())
    assert "simulation.cuda_graph" in record.getMessage()


def test_work_that_cannot_be_recorded_names_the_key(graphs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch.cuda.synchronize(), at which torch does not warn."""

    def work() -> None:
        if "recorded" in graphs:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore")

    captured = Captured(work)
    for _ in range(3):
        captured()
    with pytest.raises(SimulationError, match=r"CUDA error: .*simulation.cuda_graph"):
        captured()


class Listed:
    """A source of given batches."""

    def __init__(self, batches: list[TransitionBatch]) -> None:
        self._batches, self._state = iter(batches), {"step": 0}
        self.errors: list[float] = []

    def __next__(self) -> TransitionBatch:
        return next(self._batches)

    def learned(self, row_errors: Tensor) -> None:
        self.errors = row_errors.tolist()

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state = state


def test_batches_keep_their_addresses_and_short_ones_have_rows_of_weight_0() -> None:
    given = [random_batch(rows, 4, 2, seed) for seed, rows in enumerate((3, 3, 1))]
    source = Listed(given)
    fixed = FixedBatches(source, 3)
    addresses = set()
    for batch in given:
        fixed.fill()
        held = next(fixed)
        assert len(held) == 3
        addresses.add((held.state.data_ptr(), held.actions.mask.data_ptr(), held.weight.data_ptr()))
        given_rows = next(held.split([len(batch), 3 - len(batch)]))
        for field in fields(batch):
            expected, copied = getattr(batch, field.name), getattr(given_rows, field.name)
            pair = (expected.mask, copied.mask) if field.name.endswith("actions") else (expected, copied)
            assert torch.equal(*pair), field.name
    assert len(addresses) == 1
    assert held.weight.tolist() == [given[2].weight.item(), 0.0, 0.0]
    assert held.state.isfinite().all()
    fixed.load_state_dict({"step": 7})
    assert fixed.state_dict() == {"step": 7}
    fixed.learned(torch.ones(3))
    assert source.errors == [1.0, 1.0, 1.0]
