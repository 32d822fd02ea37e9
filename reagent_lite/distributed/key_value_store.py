"""Node 0's key-value store: signed strings by key, and deadlines of calls that hold even if the store's machine hangs.

torch's TCPStore waits forever for a machine that accepts connections and stays silent (measured: its timeout covers
the wait for a key, not for an answer). Calls therefore run on a separate thread, and the connection of a call that
hangs is shut down: a thread that returned to Python while the process exits would abort it.
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
"""Seconds that a store may take for an answer."""

_OPEN_SECONDS = 15.0  # torch resolves the name of the store's address, 10 s if a name server drops packets
_CONNECT_SECONDS = 2.0
_CLOSE_SECONDS = 0.2
_MAC_CHARS = 64
_ATTEMPT = "attempt"
_ABSENT = "-"  # not a signed text, which begins with a proof of _MAC_CHARS characters


class LostError(Exception):
    """The store no longer answers; the text has the reason."""


class SignedStore:
    """Texts by key in node 0's TCPStore, each with a proof that its writer knows the run's token.

    Anyone who reaches the port can list, read and replace keys of a TCPStore. The token itself is never sent. A value
    that was written without the token, or copied from another key, counts as absent.

    Args:
        client: torch's TCPStore.
        token: token of the run, from the meeting file; "" protects nothing.
        attempt: attempt that the keys belong to; None for node 0's current attempt.

    Attributes:
        attempt: attempt that the keys belong to.
    """

    def __init__(self, client: Any, token: str, attempt: int | None = None) -> None:
        self._client = client
        self._token = token
        self.attempt = int(self._get(_ATTEMPT) or 0) if attempt is None else attempt

    def begin(self, attempt: int, texts: Mapping[str, str]) -> "SignedStore":
        """Returns the store of a new attempt with its first texts; clients that connect later read this attempt."""
        store = SignedStore(self._client, self._token, attempt)
        for key, text in texts.items():
            store.set(key, text)
        self._client.set(_ATTEMPT, self._sign(_ATTEMPT, str(attempt)))
        return store

    def set(self, key: str, text: str) -> None:
        """Replaces the text of a key."""
        key = self._full(key)
        self._client.set(key, self._sign(key, text))

    def get(self, key: str) -> str | None:
        """Returns a key's text, or None; does not wait for another machine to set it."""
        return self._get(self._full(key))

    def set_once(self, key: str, text: str) -> str:
        """Sets a key unless it has a text; returns its text afterwards."""
        key = self._full(key)
        current = b""
        signed = self._sign(key, text)
        while True:
            current = self._client.compare_set(key, current, signed)
            verified = self._verify(key, current)
            if verified is not None:
                return verified

    def delete(self, key: str) -> None:
        """Removes a key."""
        self._client.delete_key(self._full(key))

    def _full(self, key: str) -> str:
        return f"{self.attempt}/{key}"

    def _get(self, key: str) -> str | None:
        # a single request: the key may be deleted between `check` and `get`, and `get` would wait for it
        value = self._client.compare_set(key, _ABSENT, _ABSENT)
        return None if value == _ABSENT.encode() else self._verify(key, value)

    def _sign(self, key: str, text: str) -> bytes:
        return self._mac(key, text.encode()) + text.encode()

    def _verify(self, key: str, value: bytes) -> str | None:
        mac = value[:_MAC_CHARS]
        text = value[_MAC_CHARS:]
        return text.decode() if hmac.compare_digest(mac, self._mac(key, text)) else None

    def _mac(self, key: str, text: bytes) -> bytes:
        return hmac.new(self._token.encode(), key.encode() + b"\0" + text, "sha256").hexdigest().encode()


def serve_store(server: socket.socket, address: str, token: str) -> SignedStore:
    """Returns node 0's store, which listens only on the given socket and ends with its last reference.

    Args:
        server: a listening socket, which the store takes over.
        address: address of the socket.
        token: see SignedStore.

    Raises:
        RendezvousError: the store did not open.
    """
    port = server.getsockname()[1]
    return SignedStore(_open(address, port, _OPEN_SECONDS, is_master=True, master_listen_fd=server.detach()), token, 0)


def connect(address: str, port: int, token: str, seconds: float) -> SignedStore:
    """Returns a client of the store at an address; waits forever if a silent service listens there.

    Args:
        address: numeric address of the store.
        port: port of the store.
        token: see SignedStore.
        seconds: seconds for which a failed connection is tried again.

    Raises:
        RendezvousError: no store opened at this address.
    """
    return SignedStore(_open(address, port, seconds, is_master=False), token)


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
            "Check the network and the name servers of this machine",
        )
        raise RendezvousError(problem) from error
    client.set_timeout(timedelta(seconds=ANSWER_SECONDS))
    return client


class Background:
    """A daemon thread that makes calls one after another, so that the caller need not wait for them."""

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
            LostError: the call takes longer than `seconds`.
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
            del item, work, future  # one of them may have the last reference to node 0's store


class Link:
    """Calls to a store in the background; their errors are LostError.

    Args:
        open_store: opens the store; called in the background as well.
        peer: address and port of the store if it is in another process; only the link connects to it.
    """

    def __init__(self, open_store: Callable[[], SignedStore], peer: tuple[str, int] | None = None) -> None:
        self._background = Background()
        self._peer = peer
        self._opened: Future[SignedStore] | None = self._background.submit(open_store)

    @classmethod
    def to(cls, address: str, port: int, token: str, seconds: float) -> "Link":
        """Returns a link to the store at another process's address; see `connect`."""
        return cls(lambda: connect(address, port, token, seconds), (address, port))

    def submit(self, work: Callable[[SignedStore], T]) -> "Future[T]":
        """Queues a call; the future ends with its result, or with its error."""
        return self._background.submit(lambda: self._run(work))

    def call(self, work: Callable[[SignedStore], T], seconds: float = ANSWER_SECONDS) -> T:
        """Returns the result of a call; raises LostError without an answer within `seconds`."""
        return self._background.call(lambda: self._run(work), seconds)

    def close(self) -> None:
        """Releases the store after the queued calls, or shuts down the connections of a call that hangs."""
        deadline = time.monotonic() + _OPEN_SECONDS + ANSWER_SECONDS  # while a store opens, it connects repeatedly
        while not self._background.close(_CLOSE_SECONDS) and self._peer is not None and time.monotonic() < deadline:
            _shut_connections(*self._peer)
        self._opened = None

    def _run(self, work: Callable[[SignedStore], T]) -> T:
        if self._opened is None:
            raise LostError("closed")
        try:
            return work(self._opened.result())
        except Exception as error:
            raise LostError(first_line(error) or type(error).__name__) from error


def _shut_connections(address: str, port: int) -> None:
    """Shuts down this process's connections to a peer, as torch gives no access to the sockets of its stores."""
    for entry in psutil.Process().net_connections("tcp"):
        if entry.raddr and entry.raddr.port == port and entry.raddr.ip.removeprefix("::ffff:") == address:
            with suppress(OSError), socket.socket(fileno=os.dup(entry.fd)) as connection:
                if connection.getpeername()[:2] == entry.raddr:  # the descriptor may have been reused meanwhile
                    connection.shutdown(socket.SHUT_RDWR)


def reach(record: Record) -> tuple[Link, Record] | None:
    """Returns a link to the store of a record, and the record with its current attempt and address.

    Returns None if nothing answers at its addresses, or another store answers.
    """
    for address in (record.address, *record.others):
        if connection_error(address, record.port, _CONNECT_SECONDS):
            continue
        link = Link.to(address, record.port, record.token, _OPEN_SECONDS)
        reached = None
        try:
            with suppress(LostError):
                nonce, attempt = link.call(lambda store: (store.get("nonce"), store.attempt), _OPEN_SECONDS)
                if nonce == record.nonce:
                    reached = link, record.model_copy(update={"attempt": attempt, "address": address})
        finally:
            if reached is None:
                link.close()
        return reached
    return None
