"""Connections between machines before workers start, and the address at which others reach this machine."""

from collections import Counter

import pytest

from reagent_lite.distributed import network
from reagent_lite.distributed.connections import peers
from reagent_lite.distributed.network import Address, address_for

LOOPBACK = Address("lo", "127.0.0.1")
ETHERNET = Address("eth0", "10.0.0.2")


def test_up_to_32_machines_each_connects_to_each_other() -> None:
    assert peers(1, 4) == [0, 2, 3]
    assert all(len(peers(node, 32)) == 31 for node in range(32))


@pytest.mark.parametrize(("count", "each"), [(33, 6), (64, 6), (256, 8), (257, 9), (1000, 10)])
def test_of_more_machines_each_connects_to_as_many_as_connect_to_it(count: int, each: int) -> None:
    """To machines with numbers larger by 1, 2, 4, ... below `count`; no pair twice, none with itself."""
    assert peers(0, count) == [2**power for power in range(each)]
    pairs = {(node, other) for node in range(count) for other in peers(node, count)}
    assert all(node != other for node, other in pairs)
    assert (
        Counter(first for first, _ in pairs)
        == Counter(other for _, other in pairs)
        == dict.fromkeys(range(count), each)
    )


@pytest.mark.parametrize(
    ("host", "interface", "addresses", "expected"),
    [
        ("127.0.0.1", None, [ETHERNET, LOOPBACK], LOOPBACK),  # all on one machine
        # a name of this machine, which others reach otherwise
        ("localhost", None, [ETHERNET, LOOPBACK], ETHERNET),
        ("127.0.0.1", "eth0", [ETHERNET, LOOPBACK], ETHERNET),
        ("localhost", None, [LOOPBACK], LOOPBACK),
    ],
)
def test_the_address_that_peers_of_node_0_are_given(
    host: str, interface: str | None, addresses: list[Address], expected: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "addresses", lambda: addresses)
    assert address_for(host, 1, interface) == expected
