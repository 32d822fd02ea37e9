"""A launcher's line to node 0's store: every call has a deadline, whatever the store's machine does.

torch's TCPStore waits without end for a machine that accepts connections and says nothing (measured: its timeout covers
waiting for a key, not for an answer), so calls run on a thread of their own and are given up, not interrupted.
"""

import hmac
import queue
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from reagent_lite.errors import Problem, RendezvousError

T = TypeVar("T")
_OPEN_SECONDS = 60.0
_CALL_SECONDS = 5.0
_MAC_CHARS = 64
_ATTEMPT = "attempt"
_ABSENT = "-"
"""No text of ours: each begins with a proof of _MAC_CHARS characters."""


class LostError(Exception):
    """The store does not answer any more; the text says why."""


class Store:
    """Texts by key in node 0's TCPStore, each with a proof that its writer knows the run's token.

    Whoever reaches the port can list, read and replace keys of a TCPStore. The token itself is never sent, and a value
    that was written without it, or copied from another key, counts as absent.

    Args:
        store: torch's client.
        token: of the run, from the meeting file; "" protects nothing.
        attempt: whose keys these are.

    Attributes:
        attempt: whose keys these are.
    """

    def __init__(self, store: Any, token: str, attempt: int) -> None:
        self._store, self._token, self.attempt = store, token.encode(), attempt

    @classmethod
    def of_current_attempt(cls, store: Any, token: str) -> "Store":
        """Returns the keys of the attempt that node 0 has reached."""
        return cls(store, token, int(cls(store, token, 0)._peek(_ATTEMPT) or 0))

    def begin(self, attempt: int, texts: Mapping[str, str]) -> "Store":
        """Returns the keys of a new attempt, with some texts to begin with; who connects from here on comes to them."""
        begun = Store(self._store, self._token.decode(), attempt)
        for key, text in texts.items():
            begun.set(key, text)
        self._store.set(_ATTEMPT, self._signed(_ATTEMPT, str(attempt)))
        return begun

    def set(self, key: str, text: str) -> None:
        """Replaces the text of a key."""
        key = self._full(key)
        self._store.set(key, self._signed(key, text))

    def peek(self, key: str) -> str | None:
        """Returns a key's text, or None; never waits for it."""
        return self._peek(self._full(key))

    def set_once(self, key: str, text: str) -> str:
        """Sets a key that has no text yet; returns the text that stands."""
        key = self._full(key)
        standing, signed = b"", self._signed(key, text)
        while True:
            standing = self._store.compare_set(key, standing, signed)
            verified = self._verified(key, standing)
            if verified is not None:
                return verified

    def delete(self, key: str) -> None:
        """Removes a key."""
        self._store.delete_key(self._full(key))

    def _full(self, key: str) -> str:
        return f"{self.attempt}/{key}"

    def _peek(self, key: str) -> str | None:
        # in one request: between `check` and `get` the key may be deleted, and `get` would wait for it
        found = self._store.compare_set(key, _ABSENT, _ABSENT)
        return None if found == _ABSENT.encode() else self._verified(key, found)

    def _signed(self, key: str, text: str) -> bytes:
        return self._mac(key, text.encode()) + text.encode()

    def _verified(self, key: str, value: bytes) -> str | None:
        mac, text = value[:_MAC_CHARS], value[_MAC_CHARS:]
        return text.decode() if hmac.compare_digest(mac, self._mac(key, text)) else None

    def _mac(self, key: str, text: bytes) -> bytes:
        return hmac.new(self._token, key.encode() + b"\0" + text, "sha256").hexdigest().encode()


def serve(server: socket.socket, address: str, token: str) -> Store:
    """Returns node 0's store, listening on the given socket only; it ends with its last reference.

    Args:
        server: a listening socket, which the store takes over.
        address: at which it is reached.
        token: see Store.

    Raises:
        RendezvousError: the store did not open.
    """
    port = server.getsockname()[1]
    return _open(address, port, token, is_master=True, master_listen_fd=server.detach())


def connect(address: str, port: int, token: str) -> Store:
    """Returns a client of the store at an address; waits without end where something silent listens there.

    Raises:
        RendezvousError: no store opened there.
    """
    return _open(address, port, token, is_master=False)


def _open(address: str, port: int, token: str, **role: Any) -> Store:
    # torch asks for the name of the peer's address, which takes 10 s where a name server drops packets
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            address, port, wait_for_workers=False, timeout=timedelta(seconds=_OPEN_SECONDS), **role
        )
    except dist.DistError as error:
        raise RendezvousError(
            Problem(f"store at {address}:{port}", f"one that opens within {_OPEN_SECONDS:g} s",
                    str(error).splitlines()[0], "Look at the network and the name servers of this machine")
        ) from error  # fmt: skip
    store.set_timeout(timedelta(seconds=_CALL_SECONDS))
    return Store.of_current_attempt(store, token)


class Link:
    """Calls to one store, one after the other.

    Args:
        open_store: called on the link's own thread; returns the store.
    """

    def __init__(self, open_store: Callable[[], Any]) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[Any], Any], Future[Any]]] = queue.SimpleQueue()
        # the thread alone holds the store: node 0's ends with it
        self._thread = threading.Thread(target=self._work, args=(open_store,), name="store", daemon=True)
        self._thread.start()

    def send(self, work: Callable[[Any], T]) -> "Future[T]":
        """Queues a call; the future ends with its result, or with what went wrong."""
        future: Future[T] = Future()
        self._calls.put((work, future))
        return future

    def ask(self, work: Callable[[Any], T], seconds: float) -> T:
        """Returns the result of a call.

        Raises:
            LostError: no answer within `seconds`, or the connection broke.
        """
        return answer(self.send(work), seconds)

    def close(self, seconds: float = 0.0) -> None:
        """Ends the thread after the calls that are queued, and waits so long for it; one that hangs is left behind."""
        self._calls.put((_end, Future()))
        self._thread.join(seconds)

    def _work(self, open_store: Callable[[], Any]) -> None:
        store, fault = None, None
        try:
            store = open_store()
        except Exception as error:
            fault = error
        del open_store
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


def _end(store: Any) -> None:
    """Marks the end of the queue."""
