"""CUDA graphs: work on fixed buffers is recorded once and replayed without launches from the host.

torch.compile may fuse the kernels beforehand. Values that change between replays (counters, epsilon, learning rate, the
head of a ring) are in device memory.
https://docs.pytorch.org/docs/stable/torch.compiler.html
https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
"""

import functools
import gc
import linecache
import logging
import warnings
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from reagent_lite.console import logger
from reagent_lite.errors import Problem, SimulationError, first_line
from reagent_lite.types import Actions, BatchSource, TransitionBatch

_WARM_UPS = 3  # lazy allocations and autotuning happen in the first runs
_WAITS = "called a synchronizing CUDA operation"


def eager(work: Callable[[], None]) -> Callable[[], None]:
    """Returns the work unchanged; used on a CPU."""
    return work


@functools.cache
def can_compile(device: torch.device) -> bool:
    """Returns whether torch.compile works for a device on this machine; if not, logs the reason as a warning."""
    try:
        torch.compile(lambda tensor: tensor + 1)(torch.zeros(1, device=device))
    except Exception as error:  # no Triton, no C compiler, no header files of Python: each library has its own errors
        todo = "Updates have more kernels without it. Often a C compiler or Python's header files are missing"
        logger.warning(Problem("torch.compile", f"kernels for {device}", first_line(error), todo))
        return False
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)  # it warns about markers for profilers that it removes
    return True


class Captured:
    """Work that is run a few times, then recorded, then replayed.

    If the work waits for the device in the last run before the recording, it is not recorded, and a warning names the
    call.

    Args:
        work: reads and writes buffers with fixed addresses, and never waits for the device.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._runs = 0
        self._replay: Callable[[], None] | None = None

    def __call__(self) -> None:
        """Runs the work once on the current stream.

        Raises:
            SimulationError: the work cannot be recorded.
        """
        if self._replay is not None:
            self._replay()
            return
        self._runs += 1
        if self._runs < _WARM_UPS:
            self._work()
        elif self._runs == _WARM_UPS:
            if waits := _waits_of(self._work):
                expected = "no call that waits for the GPU, so that the work can be replayed as a CUDA graph"
                todo = "Kernels are launched one by one; set training.cuda_graph to false to silence this warning"
                logger.warning(Problem(waits[0], expected, f"{len(waits)} of them", todo))
                self._replay = self._work
        else:
            self._replay = self._record().replay
            self._replay()

    def _record(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        collecting = gc.isenabled()
        gc.disable()  # a tensor freed by the collector during capture would end it
        try:
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
                self._work()
        except RuntimeError as error:
            todo = "Set training.cuda_graph to false"
            raise SimulationError(
                Problem("CUDA graph", "work that can be recorded", first_line(error), todo)
            ) from error
        finally:
            if collecting:
                gc.enable()
        return graph


def _waits_of(work: Callable[[], None]) -> list[str]:
    """Runs the work and returns the lines of its calls that wait for the device."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")  # "error" would leave the work half done
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    waits = []
    for warning in caught:
        if _WAITS in str(warning.message):
            line = linecache.getline(warning.filename, warning.lineno).strip()
            waits.append(f"{warning.filename}:{warning.lineno} `{line}`")
    return waits


class FixedBatches:
    """Batches of a source in buffers with fixed addresses, which a graph can read.

    Args:
        source: batches of at most `rows` rows of named actions.
        rows: number of rows of each batch here; rows that the source does not fill have weight 0.
    """

    def __init__(self, source: BatchSource, rows: int) -> None:
        self._source = source
        self._rows = rows
        self._batch: TransitionBatch | None = None

    def fill(self) -> None:
        """Copies the source's next batch into the buffers."""
        batch = next(self._source)
        if self._batch is None:  # all rows come from the source, so that rows of weight 0 are finite as well
            self._batch = self._buffers(batch)
        self._batch.weight.zero_()
        for buffer, rows in zip(_tensors(self._batch), _tensors(batch), strict=True):
            buffer[: len(batch)].copy_(rows)

    def __next__(self) -> TransitionBatch:
        assert self._batch is not None
        return self._batch

    def record_errors(self, row_errors: Tensor) -> None:
        """See BatchSource."""
        self._source.record_errors(row_errors)

    def state_dict(self) -> dict[str, Any]:
        """See BatchSource."""
        return self._source.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See BatchSource."""
        self._source.load_state_dict(state)

    def _buffers(self, batch: TransitionBatch) -> TransitionBatch:
        def buffer(rows: Tensor) -> Tensor:
            return rows[:1].expand(self._rows, *rows.shape[1:]).clone()

        buffers: dict[str, Any] = {}
        for field in fields(batch):
            column = getattr(batch, field.name)
            buffers[field.name] = Actions(mask=buffer(column.mask)) if isinstance(column, Actions) else buffer(column)
        return TransitionBatch(**buffers)


def _tensors(batch: TransitionBatch) -> list[Tensor]:
    """Returns the columns of a batch of named actions."""
    columns = [getattr(batch, field.name) for field in fields(batch)]
    return [column.mask if isinstance(column, Actions) else column for column in columns]
