"""Check of the connections between machines, on ports like those of workers.

before workers start    listen on a free port ─► addresses of all ─► connect to some others ─► pairs without connection
after a peer was lost   connect to all others at once ─► pairs that lost their connection while node 0 still hears both
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from socket import socket
from typing import Any

from reagent_lite.console import logger
from reagent_lite.distributed.key_value_store import LostError
from reagent_lite.distributed.membership import Membership
from reagent_lite.distributed.network import Address, connection_error, listening
from reagent_lite.errors import Problem

_MOST_FULLY_CONNECTED = 32  # largest number of machines that all connect to each other
_ATTEMPT_SECONDS = 5.0
_AGAIN_SECONDS = 3.0
_LOG_SECONDS = 10.0
_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


def peers(node: int, count: int) -> list[int]:
    """Returns the machines that a machine connects to before workers start.

    Up to 32 machines these are all others. With more, a machine connects to those whose numbers are larger by 1, 2, 4,
    8, ...: each has log2(count) outgoing and as many incoming connections.
    """
    if count <= _MOST_FULLY_CONNECTED:
        return [other for other in range(count) if other != node]
    return [(node + 2**power) % count for power in range((count - 1).bit_length())]


class Connections:
    """This machine's connections to others, from the start of an attempt to its end.

    Args:
        membership: membership of this machine.
    """

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._address: Address | None = membership.worker_address if len(membership.declarations) > 1 else None
        self._server: socket | None = None
        self._endpoints: list[Any] = []  # address, interface, port and range of ports of each machine

    def close(self) -> None:
        """Stops listening."""
        if self._server is not None:
            self._server.close()

    def find_unreached(self, seconds: float, patience: float) -> list[Problem]:
        """Returns the pairs of machines that cannot connect, the same on every machine.

        Args:
            seconds: seconds for which each machine tries.
            patience: further seconds to wait for the other machines.

        Raises:
            LostError: others did not take part.
            RendezvousError: this machine cannot listen.
        """
        address = self._address
        if address is None:
            return []
        # the kernel completes connections without an accept
        self._server = listening(address.address, 0)
        endpoint = [address.address, address.interface, self._server.getsockname()[1], _port_range()]
        self._endpoints = self._membership.exchange("place", endpoint, patience)
        deadline = time.monotonic() + seconds
        table = self._unreached_of(
            peers(self._membership.node, len(self._endpoints)),
            lambda other: _connect(address.address, other, self._endpoints[other], deadline),
        )
        tables = self._membership.exchange("unreached", table, patience + seconds + _ATTEMPT_SECONDS)
        return self._problems(tables)

    def try_again(self) -> None:
        """Connects to all others once, and sends the list of those that it did not reach to all machines."""

        def error_of(other: int) -> str:
            address, _, port, _ = self._endpoints[other]
            return connection_error(address, port, _AGAIN_SECONDS)

        others = [other for other in range(len(self._endpoints)) if other != self._membership.node]
        with suppress(LostError):
            self._membership.give("disconnected", self._unreached_of(others, error_of))

    def find_disconnected(self) -> list[Problem]:
        """Returns the pairs of machines without a connection, according to every machine's `try_again`."""
        with suppress(LostError):
            return self._problems([table or {} for table in self._membership.read_values("disconnected")])
        return []

    def _unreached_of(self, others: list[int], error_of: Callable[[int], str]) -> dict[str, str]:
        with ThreadPoolExecutor(max_workers=32) as pool:
            errors = list(pool.map(error_of, others))
        return {str(other): error for other, error in zip(others, errors, strict=True) if error}

    def _problems(self, tables: list[dict[str, str]]) -> list[Problem]:
        return [
            _problem(node, int(other), self._endpoints, why)
            for node, table in enumerate(tables)
            for other, why in table.items()
        ]


def _connect(from_address: str, other: int, endpoint: list[Any], deadline: float) -> str:
    """Returns "" once the other machine is reached, or the reason why it was not by the deadline."""
    address, interface, port, _ = endpoint
    if (":" in address) != (":" in from_address):
        return "one machine has an IPv4 address, the other only an IPv6 address"
    logged = time.monotonic()
    while why := connection_error(address, port, _ATTEMPT_SECONDS):
        now = time.monotonic()
        if now > deadline:
            return why
        if now - logged > _LOG_SECONDS:
            logged = now
            left = f"{deadline - now:.0f} s left"
            logger.info(f"connections: node {other} is not reached at {address}:{port} ({interface}): {why}; {left}")
        time.sleep(min(1.0, max(deadline - now, 0.0)))
    return ""


def _problem(node: int, other: int, endpoints: list[Any], why: str) -> Problem:
    from_address, from_interface, _, _ = endpoints[node]
    address, interface, port, ports = endpoints[other]
    return Problem(
        f"node {node} ({from_address}, {from_interface})",
        f"a connection to node {other} ({address}:{port}, {interface})",
        why,
        f"Open TCP ports {ports} between all machines (net.ipv4.ip_local_port_range there), or choose a common network "
        "with rendezvous.interface",
    )


def _port_range() -> str:
    try:
        return "-".join(_PORTS.read_text().split())
    except OSError:
        return "of any number"
