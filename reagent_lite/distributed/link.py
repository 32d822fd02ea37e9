"""A launcher's line to node 0's store: every call has a deadline, whatever the store's machine does.

torch's TCPStore waits without end for a machine that accepts connections and says nothing (measured: its timeout covers
waiting for a key, not for an answer), so calls run on a thread of their own and are given up, not interrupted.
"""

import queue
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

Store = Any  # torch ships no types for its stores
T = TypeVar("T")
_CONNECT_SECONDS = 5.0


class LostError(Exception):
    """The store does not answer any more; the text says why."""


def serve(server: socket.socket, seconds: float) -> Store:
    """Returns node 0's store, listening on the given socket only; it ends with the last reference to it.

    Args:
        server: a listening socket, which the store takes over.
        seconds: that a call of node 0 itself may take.
    """
    address, port = server.getsockname()[:2]
    return dist.TCPStore(  # type: ignore[attr-defined]
        address, port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach(),
        timeout=timedelta(seconds=seconds),
    )  # fmt: skip


def connect(address: str, port: int) -> Store:
    """Returns a client of the store at an address; waits without end where something silent listens there."""
    return dist.TCPStore(  # type: ignore[attr-defined]
        address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=_CONNECT_SECONDS)
    )


class Link:
    """Calls to one store, one after the other.

    Args:
        open_store: called on the link's own thread; returns the store.
    """

    def __init__(self, open_store: Callable[[], Store]) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[Store], Any], Future[Any]]] = queue.SimpleQueue()
        self._open = open_store
        self._thread = threading.Thread(target=self._work, name="store", daemon=True)
        self._thread.start()

    def send(self, work: Callable[[Store], T]) -> "Future[T]":
        """Queues a call; the future ends with its result, or with what went wrong."""
        future: Future[T] = Future()
        self._calls.put((work, future))
        return future

    def ask(self, work: Callable[[Store], T], seconds: float) -> T:
        """Returns the result of a call.

        Raises:
            LostError: no answer within `seconds`, or the connection broke.
        """
        return answer(self.send(work), seconds)

    def close(self, seconds: float = 0.0) -> None:
        """Ends the thread after the calls that are queued, and waits so long for it; one that hangs is left behind."""
        self._calls.put((_end, Future()))
        self._thread.join(seconds)

    def _work(self) -> None:
        store, fault = None, None
        try:
            store = self._open()
        except Exception as error:
            fault = error
        while True:
            work, future = self._calls.get()
            if work is _end:
                return
            try:
                if fault is not None:
                    raise fault
                future.set_result(work(store))
            except Exception as error:
                future.set_exception(error)


def answer(future: "Future[T]", seconds: float) -> T:
    """Returns what a queued call came to; see Link.ask."""
    try:
        return future.result(seconds)
    except TimeoutError as error:
        raise LostError(f"no answer for {seconds:.0f} s") from error
    except Exception as error:
        raise LostError(str(error).splitlines()[0] if str(error) else type(error).__name__) from error


def _end(store: Store) -> None:
    """Marks the end of the queue."""
