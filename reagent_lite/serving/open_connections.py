"""Open connections of a worker: their number, and the times of a TLS handshake and of the head of a request.

connection ─► admitted, or answered with 503 and closed ─► head within request_seconds ─► Limits reads the body
        with TLS: admitted, or closed ─► handshake within request_seconds ─┘

uvicorn limits none of them: a connection without a request would stay open for ever. It does not even know of one whose
handshake is incomplete: asyncio makes the handshake first, in up to 60 s, and a flood of them takes all descriptors.
"""

import asyncio
import json
import socket
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict
from http import HTTPStatus
from typing import Any, Protocol

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from reagent_lite.config.serve_config import ServeConfig
from reagent_lite.errors import Problem
from reagent_lite.serving.refusals import TRY_LATER
from reagent_lite.serving.server_figures import ServerFigures


class Connection(Protocol):
    """A connection that is counted."""

    client_address: str

    def abort(self) -> None:
        """Closes it at once."""


class OpenConnections:
    """The connections of a worker.

    Args:
        config: the server's config.
        figures: counters of the worker.
        open_files: largest number of files that the process may open.
    """

    def __init__(self, config: ServeConfig, figures: ServerFigures, open_files: int) -> None:
        self.head_seconds = config.request_seconds
        self._most = max(1, min(config.max_connections, open_files - 100))  # the others: database, model, libraries
        self._most_of_client = config.max_client_connections
        self._figures = figures
        self._clients: dict[str, dict[Connection, None]] = {}
        self._count = 0
        self._incomplete: dict[Connection, None] = {}  # the oldest first
        self.handshakes: dict[int, Handshake] = {}  # by descriptor

    def protocol(self, **arguments: Any) -> "GuardedProtocol":
        """Returns the protocol of a new connection, for uvicorn."""
        return GuardedProtocol(self, **arguments)

    def admit(self, connection: Connection, client: str) -> bool:
        """Counts a new connection, in place of an incomplete one if there are too many; else returns false."""
        of_client = self._clients.setdefault(client, {})
        is_full = len(of_client) >= self._most_of_client and not self._replace(of_client)
        if is_full or (self._count >= self._most and not self._replace(self._incomplete)):
            self._figures.connections.labels("refused").inc()
            self._forget_empty(client)
            return False
        self._clients.setdefault(client, of_client)[connection] = None
        self._count += 1
        self._incomplete[connection] = None
        return True

    def remove(self, connection: Connection, client: str) -> None:
        """Ends the count of a connection."""
        self._incomplete.pop(connection, None)
        of_client = self._clients.get(client, {})
        if connection in of_client:
            del of_client[connection]
            self._count -= 1
            self._forget_empty(client)

    def set_incomplete(self, connection: Connection, is_incomplete: bool) -> None:
        """Notes whether a connection waits for the rest of a request."""
        if not is_incomplete:
            self._incomplete.pop(connection, None)
        elif connection not in self._incomplete:
            self._incomplete[connection] = None

    def count_late(self) -> None:
        """Counts a connection whose handshake or head did not arrive in time."""
        self._figures.connections.labels("late").inc()

    def _replace(self, candidates: Iterable[Connection]) -> bool:
        """Closes the oldest incomplete connection; returns false if there is none."""
        oldest = next((connection for connection in candidates if connection in self._incomplete), None)
        if oldest is None:
            return False
        self._figures.connections.labels("replaced").inc()
        self.remove(oldest, oldest.client_address)
        oldest.abort()
        return True

    def _forget_empty(self, client: str) -> None:
        if not self._clients.get(client, True):
            del self._clients[client]


class TLSListening(socket.socket):
    """A listening socket, for asyncio's own loop, that counts connections as it accepts them."""

    connections: OpenConnections

    @classmethod
    def of(cls, listening: socket.socket, connections: OpenConnections) -> "TLSListening":
        """Returns the same socket as one that counts."""
        counting = cls(listening.family, listening.type, listening.proto, listening.detach())
        counting.connections = connections
        return counting

    def accept(self) -> tuple[socket.socket, Any]:
        """Returns the next connection and its address, admitted.

        Raises:
            ConnectionAbortedError: there are too many; asyncio goes on with the next.
        """
        accepted, address = super().accept()
        handshake = Handshake(accepted.family, accepted.type, accepted.proto, accepted.detach())
        handshake.begin(self.connections, address[0])
        return handshake, address


class Handshake(socket.socket):
    """A connection that is counted as incomplete until its TLS handshake ends, and then in the name of its protocol."""

    def begin(self, connections: OpenConnections, client: str) -> None:
        """Counts the connection, and starts its time.

        Raises:
            ConnectionAbortedError: there are too many; it is closed.
        """
        self.client_address = client
        self._connections = connections
        self._timer = asyncio.get_running_loop().call_later(connections.head_seconds, self._close_late)
        connections.handshakes[self.fileno()] = self
        if not connections.admit(self, client):
            self.close()
            raise ConnectionAbortedError

    def end(self) -> None:
        """Ends the count and the time."""
        self._timer.cancel()
        self._connections.handshakes.pop(self.fileno(), None)
        self._connections.remove(self, self.client_address)

    def abort(self) -> None:
        """Lets asyncio, whose handshake it is, find the end of the connection and close it."""
        with suppress(OSError):  # the client was first
            self.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the connection."""
        self.end()
        super().close()

    def _close_late(self) -> None:
        self._connections.count_late()
        self.abort()


class GuardedProtocol(H11Protocol):
    """uvicorn's protocol for a connection, within the limits of `OpenConnections`."""

    def __init__(self, connections: OpenConnections, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._connections = connections
        self._head_timer: asyncio.TimerHandle | None = None
        self.client_address = ""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Admits or refuses a new connection."""
        super().connection_made(transport)
        handshake = self._connections.handshakes.get(transport.get_extra_info("socket").fileno())
        if handshake is not None:
            handshake.end()
        self.client_address = self.client[0] if self.client else ""
        if self._connections.admit(self, self.client_address):
            self._watch()
        else:
            self._refuse(503, Problem("connections", "fewer connections", "too many", TRY_LATER))

    def connection_lost(self, exc: Exception | None) -> None:
        """Forgets a connection."""
        self._stop_timer()
        self._connections.remove(self, self.client_address)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Passes bytes on."""
        if not self.transport.is_closing():
            super().data_received(data)
            self._watch()

    def on_response_complete(self) -> None:
        """Goes on with the next request."""
        super().on_response_complete()
        self._watch()

    def abort(self) -> None:
        """Closes the connection at once."""
        self.transport.abort()

    def timeout_keep_alive_handler(self) -> None:
        """Closes a connection that is idle, or that does not take its answer."""
        super().timeout_keep_alive_handler()
        if self.transport.get_write_buffer_size():
            self.transport.abort()

    def _watch(self) -> None:
        """Starts the time of a head that is incomplete, and ends that of one that is complete."""
        if self.transport.is_closing():
            self._stop_timer()
            return
        state = self.conn.their_state
        is_first = self.cycle is None
        lacks_head = state is h11.IDLE and (is_first or bool(self.conn.trailing_data[0]))
        self._connections.set_incomplete(self, lacks_head or state is h11.SEND_BODY)
        if not lacks_head:
            self._stop_timer()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self._connections.head_seconds, self._close_late)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _close_late(self) -> None:
        self._connections.count_late()
        if self.conn.trailing_data[0]:
            expected = f"a whole head within {self._connections.head_seconds:g} s"
            self._refuse(408, Problem("request", expected, "a part of it"))
        else:
            self.transport.close()

    def _refuse(self, status: int, problem: Problem) -> None:
        """Answers before there is a request, in the form of all refusals, and closes the connection."""
        self._stop_timer()
        body = json.dumps({"problems": [asdict(problem)]}).encode()
        head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(head.encode() + body)
        self.transport.close()
