"""Whether every machine reaches every other one on ports such as their workers will open, before workers wait for it.

listen on a free port ─► addresses of all ─► connect to each ─► who does not reach whom, the same on every machine
"""

import json
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from reagent_lite.console import logger
from reagent_lite.distributed.link import LostError
from reagent_lite.distributed.membership import Membership
from reagent_lite.distributed.network import Address, addresses, answers, listening, own_address, toward
from reagent_lite.errors import Problem

CONNECT_SECONDS = 60.0
"""How long machines try to reach each other before workers start."""

GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"
_ROUND_SECONDS = 0.02
_ANSWER_SECONDS = 10.0
_ONE_SECONDS = 5.0
_SAY_SECONDS = 10.0
_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


class Talk:
    """Words between the machines, each under a key of its own in node 0's store.

    Args:
        membership: of the meeting.
        count: machines.
        seconds: how long one waits for the others' words.
    """

    def __init__(self, membership: Membership, count: int, seconds: float) -> None:
        self._membership, self.count, self.seconds = membership, count, seconds
        self.node = membership.node

    def say(self, key: str, word: object) -> None:
        """Puts this machine's word down."""
        text = json.dumps(word)
        self._membership.ask(lambda store: store.set(f"talk/{key}/{self.node}", text), _ANSWER_SECONDS)

    def word(self, key: str, node: int) -> Any:
        """Returns one machine's word, None while it is not there."""
        text = self._membership.ask(lambda store: store.peek(f"talk/{key}/{node}"), _ANSWER_SECONDS)
        return None if text is None else json.loads(text)

    def heard(self, key: str) -> list[Any]:
        """Returns each machine's word, None for one that is not there yet."""
        keys = [f"talk/{key}/{i}" for i in range(self.count)]
        texts = self._membership.ask(lambda store: [store.peek(one) for one in keys], _ANSWER_SECONDS)
        return [None if text is None else json.loads(text) for text in texts]

    def exchange(self, key: str, word: object, *, later: float = 0.0) -> list[Any]:
        """Says a word and returns those of all.

        Args:
            key: of the word.
            word: of this machine.
            later: seconds by which others may be behind.

        Raises:
            LostError: some did not say theirs in time; they are named.
        """
        self.say(key, word)
        deadline = time.monotonic() + self.seconds + later
        while True:
            words = self.heard(key)
            absent = [str(i) for i, one in enumerate(words) if one is None]
            if not absent:
                return words
            if time.monotonic() > deadline:
                raise LostError(f"node {', '.join(absent)} said nothing for {self.seconds:g} s")
            time.sleep(_ROUND_SECONDS)


def worker_address(membership: Membership) -> Address | None:
    """Returns the address of this machine that its workers tell the others; None where there is no route.

    gloo takes the first address of an interface, IPv4 before IPv6.
    """
    wanted, record = membership.own_interface, membership.record
    reach = own_address(wanted) if wanted else toward(record.address, record.port)
    name = os.environ.get(GLOO_VARIABLE, "" if reach is None else reach.interface)
    return next((one for one in addresses() if one.interface == name), reach)


def find_unreached(talk: Talk, own: Address, seconds: float) -> list[Problem]:
    """Connects to every other machine; all machines learn of all pairs. Returns those that failed.

    Args:
        talk: with the others.
        own: address to listen on.
        seconds: how long each machine tries.

    Raises:
        LostError: others did not take part.
    """
    with _Listener(own) as listener:
        places = talk.exchange("place", [own.address, own.interface, listener.port, _port_range()])
        others = [i for i in range(talk.count) if i != talk.node]
        deadline = time.monotonic() + seconds
        with ThreadPoolExecutor(max_workers=32) as pool:
            found = list(pool.map(lambda i: _connect(own, i, places[i], deadline), others))
        unreached = {str(i): why for i, why in zip(others, found, strict=True) if why}
        tables = talk.exchange("unreached", unreached, later=seconds + _ONE_SECONDS)
    return [_problem(i, int(other), places, why) for i, table in enumerate(tables) for other, why in table.items()]


def _connect(own: Address, other: int, place: list[Any], deadline: float) -> str:
    """Returns "" once another machine was reached, or why it was not until the deadline."""
    address, interface, port, _ = place
    if (":" in address) != (":" in own.address):
        return "one has an IPv4 address there, the other an IPv6 address only"
    said = time.monotonic()
    while why := answers(address, port, _ONE_SECONDS):
        now = time.monotonic()
        if now > deadline:
            return why
        if now - said > _SAY_SECONDS:
            said = now
            logger.info(f"connections: node {other} is not reached at {address}:{port} ({interface}): {why}; "
                     f"{deadline - now:.0f} s left")  # fmt: skip
        time.sleep(min(1.0, max(deadline - now, 0.0)))
    return ""


def _problem(node: int, other: int, places: list[Any], why: str) -> Problem:
    (own, interface, _, _), (address, there, port, ports) = places[node], places[other]
    return Problem(
        f"node {node} ({own}, {interface})", f"a connection to node {other} ({address}:{port}, {there})", why,
        f"Open TCP ports {ports} between all machines (net.ipv4.ip_local_port_range there), or choose a common network "
        "with rendezvous.interface",
    )  # fmt: skip


def _port_range() -> str:
    try:
        return "-".join(_PORTS.read_text().split())
    except OSError:
        return "of any number"


class _Listener:
    """A port of this machine that accepts connections and does nothing else."""

    def __init__(self, own: Address) -> None:
        self._server = listening(own.address, 0)
        self.port = int(self._server.getsockname()[1])
        threading.Thread(target=self._accept, name="listener", daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                self._server.accept()[0].close()

    def __enter__(self) -> "_Listener":
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._server.close()
