"""Coming late, falling silent and coming back before all machines are there: node 0's store in this process."""

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from pydantic import ValidationError

from reagent_lite.config.rendezvous import RendezvousConfig
from reagent_lite.distributed.entering import Entry
from reagent_lite.distributed.link import Link, connect
from reagent_lite.distributed.membership import Abort, Pulse
from reagent_lite.distributed.nodes import Node
from reagent_lite.distributed.verdict import Declaration

TOKEN = "ab" * 32
SETTINGS = RendezvousConfig(heartbeat_seconds=0.1, lost_after_seconds=0.6, join_timeout_seconds=20.0)


class LeaveError(Exception):
    """Ends a wait."""


class Waiting(threading.Thread):
    """A machine that has taken its number and waits for the others, until it is asked to leave."""

    def __init__(self, index: int, link: Link) -> None:
        super().__init__()
        self._left = threading.Event()
        self._entry = entry(index, link, interrupted=self._leave)
        self._entry.claim()
        self._entry.declare()
        self.start()

    def run(self) -> None:
        with suppress(LeaveError):
            self._entry.wait(time.monotonic() + 20)

    def leave(self) -> None:
        self._left.set()
        self.join()

    def _leave(self) -> None:
        if self._left.is_set():
            raise LeaveError


def entry(
    index: int,
    link: Link,
    *,
    interrupted: Callable[[], None] = lambda: None,
) -> Entry:
    who = Declaration(node=index, host=f"host{index}", pid=index, processes=1, device="cpu")
    return Entry(link, Node(index, 3), who, f"run{index}", SETTINGS, interrupted=interrupted)


@pytest.fixture
def store() -> Any:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))


def link(port: int, token: str = TOKEN) -> Link:
    return Link(lambda: connect("127.0.0.1", port, token))


def holds(store: Any, *keys: str) -> bool:
    return all(store.check([key]) for key in keys)


def test_who_comes_late_keeps_the_place_before_the_first_sign_of_life(
    store: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Node 0 looks every 0.1 s, several times between this machine's number and a first beat, which never comes."""
    first = Waiting(0, link(store.port))
    late = entry(1, link(store.port))
    time.sleep(1.0)  # longer than lost_after_seconds, with nobody at place 1
    late.claim()
    late.declare()
    time.sleep(0.3)
    kept = holds(store, "0/node/1", "0/info/1")
    deadline = time.monotonic() + 10
    while holds(store, "0/node/1") and time.monotonic() < deadline:
        time.sleep(0.05)
    first.leave()
    assert kept
    assert not holds(store, "0/node/1")  # 0.6 s of silence are a loss
    assert caplog.messages == [
        "rendezvous: node 1 (host host1, pid 1) went away before all had come; its place is free again"
    ]


def test_a_place_that_was_given_up_is_taken_again(store: Any) -> None:
    """What node 0 does to a machine that was silent, which then goes on."""
    slept = Waiting(1, link(store.port))
    for key in ("0/node/1", "0/info/1"):
        store.delete_key(key)
    deadline = time.monotonic() + 10
    while not holds(store, "0/node/1", "0/info/1") and time.monotonic() < deadline:
        time.sleep(0.05)
    slept.leave()
    assert json.loads(store.get("0/node/1")[64:])["run"] == "run1"
    assert json.loads(store.get("0/info/1")[64:])["host"] == "host1"


@pytest.mark.parametrize("every", [0.2, 3.0])
def test_silence_is_noticed_however_seldom_one_looks(every: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look every 3 s is no pause of the one who looks; after 10 s without a beat the machine is lost."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    pulse = Pulse([1], 10.0, looked_at_every=every)
    while now[0] < 109.0:
        now[0] += every
        pulse.note({1: "1"})
    assert pulse.lost() == []
    while now[0] < 114.0:
        now[0] += every
        pulse.note({1: "1"})
    assert pulse.lost() == [1]
    now[0] += every + 2.5  # whoever looks has slept: the silence may be its own
    pulse.note({1: "1"})
    assert pulse.lost() == []


def test_what_a_stranger_writes_counts_as_absent(store: Any) -> None:
    """Who reaches the port can list, read, copy and write, but does not know the token."""
    ours = link(store.port)
    ours.ask(lambda one: one.set("beat/1", "join.run1.1"), 5)
    assert TOKEN.encode() not in store.get("0/beat/1")
    store.set("0/go", store.get("0/beat/1"))
    store.set("0/abort", '{"reason": "r", "exit_code": 0, "restart": false}')
    link(store.port, "").ask(lambda one: one.set("node/1", "stranger"), 5)
    assert [ours.ask(lambda one, key=key: one.peek(key), 5) for key in ("beat/1", "go", "abort", "node/1")] == [
        "join.run1.1", None, None, None
    ]  # fmt: skip
    assert ours.ask(lambda one: one.set_once("abort", "first"), 5) == "first"
    assert ours.ask(lambda one: one.set_once("abort", "second"), 5) == "first"


def test_a_run_that_ends_early_has_no_exit_code_0() -> None:
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        Abort(reason="r", exit_code=0, restart=False)
