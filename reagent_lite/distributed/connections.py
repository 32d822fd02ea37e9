"""Checks that every machine reaches every other one on ports such as workers open, before workers are started.

listen on a free port ─► addresses of all ─► connect to each ─► who does not reach whom, the same on every machine
"""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from reagent_lite.console import logger
from reagent_lite.distributed.membership import Membership
from reagent_lite.distributed.network import connection_error, listening
from reagent_lite.errors import Problem

_ONE_SECONDS = 5.0
_LOG_SECONDS = 10.0
_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


def unreached_machines(membership: Membership, seconds: float, patience: float) -> list[Problem]:
    """Returns the pairs of machines that cannot connect, the same on every machine.

    Args:
        membership: the membership of this machine.
        seconds: how long each machine tries.
        patience: seconds by which other machines may be late.

    Raises:
        LostError: others did not take part.
    """
    own = membership.worker_address
    if len(membership.declarations) == 1 or own is None:
        return []
    # the kernel completes connections by itself: nobody has to accept them
    with listening(own.address, 0) as server:
        place = [own.address, own.interface, server.getsockname()[1], _port_range()]
        places = membership.exchange("place", place, patience)
        others = [i for i in range(len(places)) if i != membership.node]
        deadline = time.monotonic() + seconds
        with ThreadPoolExecutor(max_workers=32) as pool:
            found = list(pool.map(lambda i: _connect(own.address, i, places[i], deadline), others))
        unreached = {str(i): why for i, why in zip(others, found, strict=True) if why}
        tables = membership.exchange("unreached", unreached, patience + seconds + _ONE_SECONDS)
    return [_problem(i, int(other), places, why) for i, table in enumerate(tables) for other, why in table.items()]


def _connect(own: str, other: int, place: list[Any], deadline: float) -> str:
    """Returns "" once the other machine is reached, or the reason why it was not by the deadline."""
    address, interface, port, _ = place
    if (":" in address) != (":" in own):
        return "one has an IPv4 address there, the other an IPv6 address only"
    logged = time.monotonic()
    while why := connection_error(address, port, _ONE_SECONDS):
        now = time.monotonic()
        if now > deadline:
            return why
        if now - logged > _LOG_SECONDS:
            logged = now
            left = f"{deadline - now:.0f} s left"
            logger.info(f"connections: node {other} is not reached at {address}:{port} ({interface}): {why}; {left}")
        time.sleep(min(1.0, max(deadline - now, 0.0)))
    return ""


def _problem(node: int, other: int, places: list[Any], why: str) -> Problem:
    (own, interface, _, _), (address, there, port, ports) = places[node], places[other]
    return Problem(
        f"node {node} ({own}, {interface})",
        f"a connection to node {other} ({address}:{port}, {there})",
        why,
        f"Open TCP ports {ports} between all machines (net.ipv4.ip_local_port_range there), or choose a common network "
        "with rendezvous.interface",
    )


def _port_range() -> str:
    try:
        return "-".join(_PORTS.read_text().split())
    except OSError:
        return "of any number"
