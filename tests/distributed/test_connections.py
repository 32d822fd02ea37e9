"""Connections between machines before workers start, and the address at which others reach this machine."""

import pytest

from reagent_lite.distributed import network
from reagent_lite.distributed.connections import peers
from reagent_lite.distributed.network import Address, address_for


def test_up_to_32_machines_each_connects_to_each_other() -> None:
    assert peers(1, 4) == [0, 2, 3]
    assert all(len(peers(node, 32)) == 31 for node in range(32))


@pytest.mark.parametrize(("count", "each"), [(33, 6), (64, 6), (256, 8), (257, 9), (1000, 10)])
def test_of_more_machines_each_connects_to_as_many_as_connect_to_it(count: int, each: int) -> None:
    """To machines with numbers larger by 1, 2, 4, ... below `count`; no pair twice, none with itself."""
    assert peers(0, count) == [2**power for power in range(each)]
    pairs = {(node, other) for node in range(count) for other in peers(node, count)}
    assert len(pairs) == count * each
    assert all(node != other for node, other in pairs)
    for node in range(count):
        assert sum(first == node for first, _ in pairs) == sum(other == node for _, other in pairs) == each


def test_the_address_that_peers_of_node_0_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    loopback = Address("lo", "127.0.0.1")
    ethernet = Address("eth0", "10.0.0.2")
    monkeypatch.setattr(network, "addresses", lambda: [ethernet, loopback])
    assert address_for("127.0.0.1", 1, None) == loopback  # all on one machine
    assert address_for("localhost", 1, None) == ethernet  # a name of this machine, which others reach otherwise
    assert address_for("127.0.0.1", 1, "eth0") == ethernet
    monkeypatch.setattr(network, "addresses", lambda: [loopback])
    assert address_for("localhost", 1, None) == loopback
