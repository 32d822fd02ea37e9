"""CUDA graphs: work on fixed buffers is recorded once and replayed without the host's launches.

What changes between replays (counters, epsilon, learning rate, the head of a ring) lives in device memory.
https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
"""

import gc
from collections.abc import Callable

import torch

_WARM_UPS = 3  # lazy allocations and autotuning happen in the first runs


def eager(work: Callable[[], None]) -> Callable[[], None]:
    """Returns the work as it is: what runs on a CPU."""
    return work


class Captured:
    """Work that is run a few times, then recorded, then replayed.

    Args:
        work: reads and writes buffers that stay where they are, and never waits for the device.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._runs = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        """Does the work once on the current stream."""
        if self._graph is None and self._runs < _WARM_UPS:
            self._runs += 1
            self._work()
            return
        if self._graph is None:
            self._graph = self._record()
        self._graph.replay()

    def _record(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        collecting = gc.isenabled()
        gc.disable()  # a tensor freed by the collector during capture would end it
        try:
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
                self._work()
        finally:
            if collecting:
                gc.enable()
        return graph
