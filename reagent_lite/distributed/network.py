"""Addresses of this machine: the address it gives to others, and the interface that reaches a peer."""

import ipaddress
import socket
from contextlib import suppress
from dataclasses import dataclass

import psutil

from reagent_lite.errors import Problem, RendezvousError

_VIRTUAL = ("docker", "br-", "virbr", "veth", "cni", "flannel", "cali")
_ELSEWHERE = "192.0.2.1"  # RFC 5737: in no network, so packets to it take the default route
_ANY_PORT = 9


@dataclass(frozen=True, slots=True)
class Address:
    """A numeric address of this machine and the interface that has it."""

    interface: str
    address: str

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        return ipaddress.ip_address(self.address).is_loopback

    @property
    def is_routable(self) -> bool:
        """Whether it is neither a loopback nor a link-local address."""
        return not (self.is_loopback or ipaddress.ip_address(self.address).is_link_local)


def addresses() -> list[Address]:
    """Returns the addresses of interfaces that are up: the default route's first, IPv4 before IPv6.

    Link-local IPv6 addresses are left out, as they are useless without the peer's interface.
    """
    states = psutil.net_if_stats()
    default = _source_address(_ELSEWHERE, _ANY_PORT)
    listed = [
        Address(interface, entry.address.partition("%")[0])
        for interface, entries in psutil.net_if_addrs().items()
        if interface not in states or states[interface].isup
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6) and not entry.address.startswith("fe80")
    ]
    routed = next((address.interface for address in listed if address.address == default), None)
    return sorted(
        listed,
        key=lambda a: (
            a.is_loopback,
            not a.is_routable,
            a.interface != routed,
            a.interface.startswith(_VIRTUAL),
            ":" in a.address,
        ),
    )


def local_address(wanted: str | None) -> Address:
    """Returns the address that this machine gives to other machines.

    Args:
        wanted: an interface, a numeric address of this machine, or None for the address of the default route.

    Raises:
        RendezvousError: no such interface or address, or with None no address that other machines could reach; the
            message lists the addresses of this machine.
    """
    candidates = addresses()
    for address in candidates:
        if wanted in (address.interface, address.address) or (wanted is None and address.is_routable):
            return address
    listed = ", ".join(f"{a.interface} ({a.address})" for a in candidates) or "none"
    if wanted is None:
        todo = "Connect it to their network; or name the interface in rendezvous.interface"
        raise RendezvousError(Problem("addresses of this machine", "one that other machines reach", listed, todo))
    expected = f"an interface or address of this machine: {listed}"
    raise RendezvousError(Problem("rendezvous.interface", expected, repr(wanted)))


def resolve_host(host: str, port: int) -> str:
    """Returns the numeric address of a host name.

    Raises:
        RendezvousError: the name does not resolve.
    """
    try:
        entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        todo = "Use a numeric address, or add the name to DNS or /etc/hosts of every machine"
        problem = Problem(f"host name {host!r}", "a name that this machine resolves", str(error), todo)
        raise RendezvousError(problem) from error
    return str(min(entries, key=lambda entry: entry[0] != socket.AF_INET)[4][0])


def route_to(address: str, port: int) -> Address | None:
    """Returns the source address of this machine's packets to a peer; None without a route."""
    source = _source_address(address, port)
    if source is None:
        return None
    return next((a for a in addresses() if a.address == source), Address("", source))


def address_for(host: str, port: int, wanted: str | None) -> Address | None:
    """Returns the address that this machine gives to the peers of a host; None without a route.

    If the host's name resolves to a loopback address, as a machine's own name does on Debian, the address is that of
    the default route.

    Args:
        host: name or numeric address of node 0.
        port: port on which node 0 listens.
        wanted: an interface or address of this machine to use instead, or None.

    Raises:
        RendezvousError: the name does not resolve, or this machine does not have the wanted interface or address.
    """
    if wanted is not None:
        return local_address(wanted)
    address = resolve_host(host, port)
    source = route_to(address, port)
    if source is not None and source.is_loopback and host != address:
        with suppress(RendezvousError):  # a machine without a network: all processes are on this machine
            return local_address(None)
    return source


def _source_address(address: str, port: int) -> str | None:
    with socket.socket(_family(address), socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, port))  # sends no packet
        except OSError:
            return None
        return str(probe.getsockname()[0])


def listening(address: str, port: int, interface: str | None = None) -> socket.socket:
    """Returns a socket that listens on a single address, or on all addresses of a single interface.

    Args:
        address: numeric address of this machine.
        port: port to listen on; 0 takes a free port.
        interface: used instead of the address if the system can bind sockets to interfaces.

    Raises:
        RendezvousError: the port is taken, or the address is not this machine's.
    """
    if interface is not None:
        with suppress(OSError):
            return _bind("::", port, interface)
    try:
        return _bind(address, port)
    except OSError as error:
        todo = "Choose another rendezvous.port (0 takes a free one), or end the process that listens there"
        expected = "a free port on an address of this machine"
        got = error.strerror or str(error)
        raise RendezvousError(Problem(f"{address}:{port}", expected, got, todo)) from error


def connection_error(address: str, port: int, seconds: float) -> str:
    """Returns why no connection can be made to an address, or "" if it can."""
    try:
        socket.create_connection((address, port), timeout=seconds).close()
    except OSError as error:
        return error.strerror or str(error) or type(error).__name__
    return ""


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _bind(address: str, port: int, interface: str | None = None) -> socket.socket:
    server = socket.socket(_family(address), socket.SOCK_STREAM)
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if interface is not None:
            server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            server.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, interface.encode())
        server.bind((address, port))
        server.listen(1024)
    except OSError:
        server.close()
        raise
    return server
