"""What happens before work is replayed as a CUDA graph, with stand-ins for the few functions of torch.cuda."""

import re
import warnings
from collections.abc import Callable
from dataclasses import fields
from unittest.mock import MagicMock, Mock

import pytest
import torch
from helpers.batches import random_batch

from reagent_lite.errors import SimulationError
from reagent_lite.training.capture import Captured, FixedBatches


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """A few functions of torch.cuda, whose calls are counted; a graph that was recorded replays nothing."""
    cuda = MagicMock()
    cuda.graph.return_value.__exit__.return_value = False  # an error goes on
    cuda.get_sync_debug_mode.return_value = 0
    cuda.set_sync_debug_mode.side_effect = lambda mode: cuda.get_sync_debug_mode.configure_mock(return_value=mode)
    for name in ("CUDAGraph", "graph", "current_stream", "get_sync_debug_mode", "set_sync_debug_mode"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    return cuda


def called(times: int, work: Callable[[], object]) -> None:
    """Calls captured work so many times."""
    captured = Captured(work)
    for _ in range(times):
        captured()


def test_work_is_run_three_times_and_then_recorded_once(cuda: MagicMock) -> None:
    work = Mock()
    called(6, work)
    assert work.call_count == 4  # the fourth is the recording, which computes nothing on a GPU
    assert (cuda.graph.call_count, cuda.CUDAGraph().replay.call_count) == (1, 3)
    assert torch.cuda.get_sync_debug_mode() == 0


def test_work_that_waits_is_done_whole_and_never_recorded(cuda: MagicMock, caplog: pytest.LogCaptureFixture) -> None:
    done: list[int] = []

    def work() -> None:
        done.append(len(done))
        if torch.cuda.get_sync_debug_mode() == "warn":  # as torch does where a call waits for the GPU
            warnings.warn("called a synchronizing CUDA operation (Triggered internally at x.cpp:1.)", stacklevel=1)

    called(6, work)
    assert (done, cuda.graph.call_count) == ([0, 1, 2, 3, 4, 5], 0)
    (message,) = caplog.messages
    assert re.match(rf"{re.escape(__file__)}:\d+ `warnings.warn\(.*\)`: .*training.cuda_graph", message, re.DOTALL)


def test_work_that_cannot_be_recorded_names_the_key(cuda: MagicMock) -> None:
    """As torch.cuda.synchronize(), at which torch does not warn."""
    failure = RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore")
    with pytest.raises(SimulationError, match=r"CUDA error: .*training.cuda_graph"):
        called(4, Mock(side_effect=[None, None, None, failure]))
    assert (cuda.graph.call_count, cuda.CUDAGraph().replay.call_count) == (1, 0)


def test_batches_keep_their_addresses_and_short_ones_have_rows_of_weight_0() -> None:
    given = [random_batch(rows, 4, 2, seed) for seed, rows in enumerate((3, 3, 1))]
    source = MagicMock(**{"__next__.side_effect": given})
    fixed, addresses = FixedBatches(source, 3), set()
    for batch in given:
        fixed.fill()
        held = next(fixed)
        addresses.add((held.state.data_ptr(), held.actions.mask.data_ptr(), held.weight.data_ptr()))
        copied = next(held.split([len(batch), 3 - len(batch)]))
        for field in fields(batch):
            pair = [getattr(each, field.name) for each in (batch, copied)]
            assert torch.equal(*(getattr(values, "mask", values) for values in pair)), field.name
    assert len(addresses) == 1
    assert held.weight.tolist() == [given[2].weight.item(), 0.0, 0.0]
    assert held.state.isfinite().all()
    fixed.load_state_dict({"step": 7})
    fixed.record_errors(torch.ones(3))
    assert fixed.state_dict() is source.state_dict()
    source.load_state_dict.assert_called_once_with({"step": 7})
    assert source.record_errors.call_args.args[0].tolist() == [1.0, 1.0, 1.0]
