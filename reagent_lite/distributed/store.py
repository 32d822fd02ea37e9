"""Node 0's key-value store: signed texts by key, and calls that end at a deadline whatever the store's machine does.

torch's TCPStore waits without end for a machine that accepts connections and stays silent (measured: its timeout
covers the wait for a key, not for an answer). Calls therefore run on a thread of their own, whose connection is shut
down when it hangs: a thread that returned to Python while the process exits would abort it.
"""

import hmac
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import psutil
import torch.distributed as dist

from reagent_lite.distributed.meeting_file import Record
from reagent_lite.distributed.network import connection_error
from reagent_lite.errors import Problem, RendezvousError, first_line

T = TypeVar("T")
ANSWER_SECONDS = 5.0
"""How long a store may take for one answer."""

_OPEN_SECONDS = 15.0  # torch asks for the name of the store's address, 10 s where a name server drops packets
_CONNECT_SECONDS = 2.0
_CLOSE_SECONDS = 0.2
_MAC_CHARS = 64
_ATTEMPT = "attempt"
_ABSENT = "-"  # no text of ours: each begins with a proof of _MAC_CHARS characters


class LostError(Exception):
    """The store does not answer any more; the text has the reason."""


class Store:
    """Texts by key in node 0's TCPStore, each with a proof that its writer knows the run's token.

    Anyone who reaches the port can list, read and replace keys of a TCPStore. The token itself is never sent, and a
    value that was written without it, or copied from another key, counts as absent.

    Args:
        client: torch's TCPStore.
        token: the token of the run, from the meeting file; "" protects nothing.
        attempt: the attempt that the keys belong to; None for the one that node 0 has reached.

    Attributes:
        attempt: the attempt that the keys belong to.
    """

    def __init__(self, client: Any, token: str, attempt: int | None = None) -> None:
        self._client = client
        self._token = token
        self.attempt = int(self._get(_ATTEMPT) or 0) if attempt is None else attempt

    def begin(self, attempt: int, texts: Mapping[str, str]) -> "Store":
        """Returns the store of a new attempt with its first texts; clients that connect from here on read this one."""
        begun = Store(self._client, self._token, attempt)
        for key, text in texts.items():
            begun.set(key, text)
        self._client.set(_ATTEMPT, self._signed(_ATTEMPT, str(attempt)))
        return begun

    def set(self, key: str, text: str) -> None:
        """Replaces the text of a key."""
        key = self._full(key)
        self._client.set(key, self._signed(key, text))

    def get(self, key: str) -> str | None:
        """Returns a key's text, or None; never waits for it."""
        return self._get(self._full(key))

    def set_once(self, key: str, text: str) -> str:
        """Sets a key unless it has a text; returns the text that it has afterwards."""
        key = self._full(key)
        found = b""
        signed = self._signed(key, text)
        while True:
            found = self._client.compare_set(key, found, signed)
            verified = self._verified(key, found)
            if verified is not None:
                return verified

    def delete(self, key: str) -> None:
        """Removes a key."""
        self._client.delete_key(self._full(key))

    def _full(self, key: str) -> str:
        return f"{self.attempt}/{key}"

    def _get(self, key: str) -> str | None:
        # in one request: between `check` and `get` the key may be deleted, and `get` would wait for it
        found = self._client.compare_set(key, _ABSENT, _ABSENT)
        return None if found == _ABSENT.encode() else self._verified(key, found)

    def _signed(self, key: str, text: str) -> bytes:
        return self._mac(key, text.encode()) + text.encode()

    def _verified(self, key: str, value: bytes) -> str | None:
        mac = value[:_MAC_CHARS]
        text = value[_MAC_CHARS:]
        return text.decode() if hmac.compare_digest(mac, self._mac(key, text)) else None

    def _mac(self, key: str, text: bytes) -> bytes:
        return hmac.new(self._token.encode(), key.encode() + b"\0" + text, "sha256").hexdigest().encode()


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
    return Store(_open(address, port, _OPEN_SECONDS, is_master=True, master_listen_fd=server.detach()), token, 0)


def connect(address: str, port: int, token: str, seconds: float) -> Store:
    """Returns a client of the store at an address; waits without end if a silent service listens there.

    Args:
        address: numeric.
        port: on which it listens.
        token: see Store.
        seconds: how long a connection that fails is tried again.

    Raises:
        RendezvousError: no store opened there.
    """
    return Store(_open(address, port, seconds, is_master=False), token)


def _open(address: str, port: int, seconds: float, **role: Any) -> Any:
    try:
        client = dist.TCPStore(  # type: ignore[attr-defined]
            address, port, wait_for_workers=False, timeout=timedelta(seconds=seconds), **role
        )
    except dist.DistError as error:
        problem = Problem(
            f"store at {address}:{port}",
            f"one that opens within {seconds:g} s",
            first_line(error),
            "Look at the network and the name servers of this machine",
        )
        raise RendezvousError(problem) from error
    client.set_timeout(timedelta(seconds=ANSWER_SECONDS))
    return client


class Background:
    """A daemon thread that makes calls one after the other, so that a caller need not wait for their end."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="background", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], T]) -> "Future[T]":
        """Queues a call; the future ends with its result, or with its error."""
        future: Future[T] = Future()
        self._calls.put((work, future))
        return future

    def call(self, work: Callable[[], T], seconds: float) -> T:
        """Returns the result of a call, or raises its error.

        Raises:
            LostError: it takes longer.
        """
        future = self.submit(work)
        try:
            return future.result(seconds)
        except TimeoutError as error:
            if future.done():
                raise
            raise LostError(f"no answer for {seconds:.0f} s") from error

    def close(self, seconds: float = 0.0) -> bool:
        """Ends the thread after the queued calls, waits up to `seconds` for it, and returns whether it has ended."""
        self._calls.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            work, future = item
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)
            del item, work, future  # the last reference to node 0's store may be among them


class Link:
    """Calls to one store in the background; their errors are LostError.

    Args:
        open_store: opens the store; called in the background as well.
        peer: address and port of the store if it is in another process; only the link has connections to it.
    """

    def __init__(self, open_store: Callable[[], Store], peer: tuple[str, int] | None = None) -> None:
        self._background = Background()
        self._peer = peer
        self._opened: Future[Store] | None = self._background.submit(open_store)

    @classmethod
    def to(cls, address: str, port: int, token: str, seconds: float) -> "Link":
        """Returns a link to the store at another process's address; see `connect`."""
        return cls(lambda: connect(address, port, token, seconds), (address, port))

    def submit(self, work: Callable[[Store], T]) -> "Future[T]":
        """Queues a call; the future ends with its result, or with its error."""
        return self._background.submit(lambda: self._done(work))

    def call(self, work: Callable[[Store], T], seconds: float = ANSWER_SECONDS) -> T:
        """Returns the result of a call; raises LostError without an answer within `seconds`."""
        return self._background.call(lambda: self._done(work), seconds)

    def close(self) -> None:
        """Releases the store after the queued calls, or shuts down the connections of a call that hangs."""
        deadline = time.monotonic() + _OPEN_SECONDS + ANSWER_SECONDS  # a store that is opened connects again and again
        while not self._background.close(_CLOSE_SECONDS) and self._peer is not None and time.monotonic() < deadline:
            _shut_connections(*self._peer)
        self._opened = None

    def _done(self, work: Callable[[Store], T]) -> T:
        if self._opened is None:
            raise LostError("closed")
        try:
            return work(self._opened.result())
        except Exception as error:
            raise LostError(first_line(error) or type(error).__name__) from error


def _shut_connections(address: str, port: int) -> None:
    """Shuts down this process's connections to a peer, as torch gives no access to the sockets of its stores."""
    for one in psutil.Process().net_connections("tcp"):
        if one.raddr and one.raddr.port == port and one.raddr.ip.removeprefix("::ffff:") == address:
            with suppress(OSError), socket.socket(fileno=os.dup(one.fd)) as connection:
                if connection.getpeername()[:2] == one.raddr:  # not another one's number by now
                    connection.shutdown(socket.SHUT_RDWR)


def reach(record: Record) -> tuple[Link, Record] | None:
    """Returns a link to the very store that a record names, and the record of its present attempt and address.

    Returns None if nothing answers at its addresses, or another store does.
    """
    for address in (record.address, *record.others):
        if connection_error(address, record.port, _CONNECT_SECONDS):
            continue
        link = Link.to(address, record.port, record.token, _OPEN_SECONDS)
        found = None
        try:
            with suppress(LostError):
                nonce, attempt = link.call(lambda store: (store.get("nonce"), store.attempt), _OPEN_SECONDS)
                if nonce == record.nonce:
                    found = link, record.model_copy(update={"attempt": attempt, "address": address})
        finally:
            if found is None:
                link.close()
        return found
    return None
