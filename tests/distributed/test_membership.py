"""Requests of a machine to node 0's store, however many machines there are."""

import json
from unittest.mock import Mock

from helpers.doctors import RECORD
from machines import ONE

from reagent_lite.config.rendezvous import RendezvousConfig
from reagent_lite.distributed.declarations import check_compatibility
from reagent_lite.distributed.key_value_store import Link
from reagent_lite.distributed.meeting_file import Record
from reagent_lite.distributed.membership import Membership

MACHINES = 300


def test_values_of_all_machines_are_gathered_by_node_0_and_fetched_at_once() -> None:
    """Node 0 reads 300 keys; each other machine writes its own and reads one: 598 requests of them, not 90 000."""
    texts = {f"exchange/place/{node}": json.dumps(10 * node) for node in range(1, MACHINES)}
    declarations = tuple(ONE.model_copy(update={"node": number}) for number in range(MACHINES))
    store = Mock(**{"get.side_effect": texts.get, "set.side_effect": texts.__setitem__})
    for node, requests in ((0, 1 + MACHINES + 1), (7, 2)):
        store.reset_mock()
        member = Membership(Link(lambda: store), Record.model_validate(RECORD), node, declarations, RendezvousConfig())
        assert member.exchange("place", 10 * node, 5.0) == [10 * other for other in range(MACHINES)]
        assert len(store.mock_calls) == requests


def test_what_all_machines_are_sent_before_they_begin_has_no_copy_of_the_config_for_each() -> None:
    compatibility = check_compatibility([ONE.model_copy(update={"node": n, "config": {"seed": 1}}) for n in range(3)])
    assert [declaration.node for declaration in compatibility.declarations] == [0, 1, 2]
    assert "seed" not in compatibility.model_dump_json()
