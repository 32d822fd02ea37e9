"""Addresses of this machine: the one others are told, and the interface that reaches a peer."""

import ipaddress
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from reagent_lite.errors import Problem, RendezvousError

_VIRTUAL = ("docker", "br-", "virbr", "veth", "cni", "flannel", "cali")


@dataclass(frozen=True, slots=True)
class Address:
    """A numeric address of this machine and the interface that has it."""

    interface: str
    address: str

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches it."""
        return ipaddress.ip_address(self.address).is_loopback

    @property
    def is_routable(self) -> bool:
        """Whether machines beyond this one and its cable may reach it."""
        return not (self.is_loopback or ipaddress.ip_address(self.address).is_link_local)


def addresses() -> list[Address]:
    """Returns the addresses of interfaces that are up: those of the default route first, IPv4 before IPv6.

    Link-local IPv6 addresses are left out: they mean nothing without the peer's interface.
    """
    states, found = psutil.net_if_stats(), []
    for interface, entries in psutil.net_if_addrs().items():
        if interface in states and not states[interface].isup:
            continue
        for entry in entries:
            if entry.family in (socket.AF_INET, socket.AF_INET6) and not entry.address.startswith("fe80"):
                found.append(Address(interface, entry.address.partition("%")[0]))
    routed = _default_route()
    return sorted(
        found,
        key=lambda a: (
            a.is_loopback,
            not a.is_routable,
            a.interface != routed,
            a.interface.startswith(_VIRTUAL),
            ":" in a.address,
        ),
    )


def own_address(wanted: str | None) -> Address:
    """Returns the address that this machine tells others.

    Args:
        wanted: an interface, a numeric address of this machine, or None for the one of the default route.

    Raises:
        RendezvousError: no such interface or address, or None and no address that other machines could reach; those
            there are are named.
    """
    known = addresses()
    for address in known:
        if wanted in (address.interface, address.address) or (wanted is None and address.is_routable):
            return address
    listed = ", ".join(f"{a.interface} ({a.address})" for a in known) or "none"
    if wanted is None:
        raise RendezvousError(
            Problem("addresses of this machine", "one that other machines reach", listed,
                    "Connect it to their network; or name the interface in rendezvous.interface")
        )  # fmt: skip
    raise RendezvousError(
        Problem("rendezvous.interface", f"an interface or address of this machine: {listed}", repr(wanted))
    )


def resolved(host: str, port: int) -> str:
    """Returns the numeric address of a host name.

    Raises:
        RendezvousError: the name does not resolve.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise RendezvousError(
            Problem(f"host name {host!r}", "a name that this machine resolves", str(error),
                    "Use a numeric address, or add the name to DNS or /etc/hosts of every machine")
        ) from error  # fmt: skip
    return str(min(found, key=lambda entry: entry[0] != socket.AF_INET)[4][0])


def toward(address: str, port: int) -> Address | None:
    """Returns the address of this machine from which packets to a peer leave; sends none.

    None where there is no route.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, port))
        except OSError:
            return None
        own = probe.getsockname()[0]
    return next((a for a in addresses() if a.address == own), Address("", own))


def listening(address: str, port: int) -> socket.socket:
    """Returns a socket that listens on one address only.

    Raises:
        RendezvousError: the port is taken, or the address is not this machine's.
    """
    server = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind((address, port))
        server.listen(1024)
    except OSError as error:
        server.close()
        raise RendezvousError(
            Problem(f"{address}:{port}", "a free port on an address of this machine", error.strerror or str(error),
                    "Choose another rendezvous.port (0 takes a free one), or end the process that listens there")
        ) from error  # fmt: skip
    return server


def listening_on_interface(own: Address, port: int) -> tuple[socket.socket, tuple[str, ...]]:
    """Returns a socket that listens on all addresses of an interface and on no other one, and the further addresses.

    Where the interface has one address, or the system does not bind sockets to interfaces, it listens on that one only.

    Raises:
        RendezvousError: see listening.
    """
    others = tuple(a.address for a in addresses() if a.interface == own.interface and a != own and a.is_routable)
    if others and not own.is_loopback:
        server = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
        try:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            server.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, own.interface.encode())
            server.bind(("::", port))
            server.listen(1024)
        except OSError:
            server.close()
        else:
            return server, others
    return listening(own.address, port), ()


def answers(address: str, port: int, seconds: float) -> str:
    """Returns "" where something accepts connections, else why not."""
    try:
        socket.create_connection((address, port), timeout=seconds).close()
    except OSError as error:
        return error.strerror or str(error) or type(error).__name__
    return ""


def _default_route() -> str:
    """Returns the interface of the default route, or "" (Linux)."""
    if sys.platform != "linux":
        return ""
    for line in Path("/proc/net/route").read_text().splitlines()[1:]:
        interface, destination, *_ = line.split()
        if destination == "00000000":
            return interface
    return ""
