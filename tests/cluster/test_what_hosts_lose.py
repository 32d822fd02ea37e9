"""What hosts lose: network, power, time, the share; launchers with small workers, so that seconds are the run's own."""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster.hosts import Host, Hosts
from cluster.machine import Started

ROOT = Path(__file__).resolve().parents[2]
MACHINE = ROOT / "tests" / "distributed" / "machine.py"
LOST_AFTER = 4.0


class Run:
    """A run of two hosts whose launchers print on files of their own."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self.options: dict[str, Any] = {}
        self.started: list[Started] = []

    def start(self, host: Host, *wrapper: str, **options: Any) -> Started:
        given = {
            "index": host.index, "count": 2, "host": host.name, "out": str(host.data),
            "init_method": f"file://{self.hosts.share}/run.rdzv",
            "settings": {"interface": None, "lost_after_seconds": LOST_AFTER, "heartbeat_seconds": 0.5},
            **self.options, **options,
        }  # fmt: skip
        environment = {
            "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        self.started.append(host.start([*wrapper, sys.executable, MACHINE, json.dumps(given)], env=environment))
        return self.started[-1]

    def both(self, **options: Any) -> list[Started]:
        self.options = options
        return [self.start(host) for host in self.hosts]

    def under_way(self) -> None:
        """Waits until both hosts' workers have summed."""
        deadline = time.monotonic() + 40
        for host in self.hosts:
            while not host.seen_from_here(host.data / f"step_{host.index}").exists():
                logs = "\n".join(machine.stderr for machine in self.started)
                assert time.monotonic() < deadline, f"no step on {host.name}:\n{logs}"
                time.sleep(0.05)


@pytest.fixture
def run(two_hosts: Hosts) -> Iterator[Run]:
    for host in two_hosts:
        host.heal()
        for file in host.seen_from_here(host.data).iterdir():
            file.unlink() if file.is_file() else None
    here = Run(two_hosts)
    yield here
    for host in two_hosts:
        host.thaw()
        host.heal()
    two_hosts.share_heal()
    for machine in here.started:
        for pid in (*machine.tree(), machine.pid) if machine.running else ():
            os.kill(pid, signal.SIGKILL)


def said(machines: list[Started], code: int, words: str, within: float) -> None:
    """Every launcher ends with the code and the words, in time."""
    deadline = time.monotonic() + within
    for machine in machines:
        assert machine.wait(max(deadline - time.monotonic(), 0.1)) == code, machine.stderr
        assert words in machine.stderr


SLOW = pytest.mark.slow


@pytest.mark.parametrize("how", ["silent", pytest.param("link", marks=SLOW)])
def test_a_cut_network_ends_both_sides_with_the_reason(run: Run, how: str) -> None:
    both = run.both(steps=2000)
    run.under_way()
    run.hosts[1].cut(how)  # type: ignore[arg-type]
    said(both[:1], 4, f"node 1 (host node1, pid {both[1].pid}): no sign of life for 4 s", LOST_AFTER + 8)
    said(both[1:], 4, "lost node 0: run ", LOST_AFTER + 8)


@SLOW
@pytest.mark.parametrize("heals", [True, False])
def test_a_network_that_is_cut_while_machines_meet(run: Run, heals: bool) -> None:
    """Healed they meet; else both say what is missing. The share is behind the same network: the kernel lets a process
    that waits for it end only when it answers, which the reason does not wait for."""
    settings = {"interface": None, "lost_after_seconds": LOST_AFTER, "heartbeat_seconds": 0.5,
                "join_timeout_seconds": 60 if heals else 15}  # fmt: skip
    run.options = {"settings": settings}
    first = run.start(run.hosts[0])
    deadline = time.monotonic() + 30
    while "listens at" not in first.stderr:
        assert time.monotonic() < deadline, first.stderr
        time.sleep(0.05)
    run.hosts[1].cut("silent")
    second = run.start(run.hosts[1])
    time.sleep(6)
    if heals:
        run.hosts[1].heal()
        assert [machine.wait(90) for machine in (first, second)] == [0, 0], first.stderr + second.stderr
        return
    said([first], 3, "got no sign of node 1", 40)
    deadline = time.monotonic() + 60
    while "got no answer for 20 s (the share hangs)" not in second.stderr:
        assert time.monotonic() < deadline, second.stderr
        time.sleep(0.2)
    run.hosts[1].heal()
    assert second.wait(60) == 3


@SLOW
def test_a_short_cut_is_survived(run: Run) -> None:
    both = run.both(steps=120, restarts=0)
    run.under_way()
    run.hosts[1].cut("silent")
    time.sleep(LOST_AFTER / 2)
    run.hosts[1].heal()
    assert [machine.wait(60) for machine in both] == [0, 0], both[0].stderr + both[1].stderr


def test_after_a_longer_cut_the_run_begins_again(run: Run) -> None:
    both = run.both(steps=60, restarts=2)
    run.under_way()
    run.hosts[1].cut("silent")
    time.sleep(LOST_AFTER + 3)
    run.hosts[1].heal()
    assert [machine.wait(90) for machine in both] == [0, 0], both[0].stderr + both[1].stderr
    for machine in both:
        assert "restart 1 of at most 2" in machine.stderr


@pytest.mark.parametrize(
    ("victim", "silent"),
    [(0, False), *(pytest.param(*case, marks=SLOW) for case in ((1, True), (0, True), (1, False)))],
)
def test_a_host_without_power_is_named_and_may_come_back(run: Run, victim: int, silent: bool) -> None:
    both = run.both(steps=60, restarts=1)
    run.under_way()
    host, other = run.hosts[victim], both[1 - victim]
    host.kill_all(silent=silent)
    again = run.start(host)
    assert (again.wait(90), other.wait(90)) == (0, 0), again.stderr + other.stderr
    words = "lost node 0: run " if victim == 0 else f"node 1 (host node1, pid {both[1].pid})"
    assert words in other.stderr
    assert (run.hosts[0].read("sum_0"), run.hosts[1].read("sum_1")[:1]) == (
        b"3 attempt 1 node 0 of 2 local 0",
        b"3",
    ) or (victim == 0 and run.hosts[0].read("sum_0") == b"3 attempt 0 node 0 of 2 local 0")


@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=SLOW)])
def test_a_frozen_host_is_lost_and_ends_when_it_thaws(run: Run, victim: int) -> None:
    both = run.both(steps=2000)
    run.under_way()
    run.hosts[victim].freeze()
    words = "lost node 0: run " if victim == 0 else "node 1 (host node1"
    said([both[1 - victim]], 4, words, LOST_AFTER + 8)
    run.hosts[victim].thaw()
    said([both[victim]], 4, "", 20)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("readonly", "expected a folder that every machine reaches and node 0 can write, got "),
        ("full", "No space left on device"),
        pytest.param("hangs", "(the share hangs)", marks=SLOW),
    ],
)
def test_a_share_that_cannot_be_used(run: Run, fault: str, words: str) -> None:
    run.hosts.share_fault(fault)  # type: ignore[arg-type]
    machine = run.start(run.hosts[0])
    deadline = time.monotonic() + 45
    while words not in machine.stderr:
        assert time.monotonic() < deadline, machine.stderr
        time.sleep(0.1)
    run.hosts.share_heal()  # a process ends when its last call to a share that hangs does: the kernel's rule
    said([machine], 3, "share", 20)


@SLOW
def test_a_share_that_hangs_later_does_not_matter(run: Run) -> None:
    both = run.both(steps=60)
    run.under_way()
    run.hosts.share_fault("hangs")
    deadline = time.monotonic() + 60
    while not run.hosts[0].seen_from_here(run.hosts[0].data / "sum_0").exists():
        assert time.monotonic() < deadline, both[0].stderr
        time.sleep(0.1)
    run.hosts.share_heal()
    assert [machine.wait(60) for machine in both] == [0, 0], both[0].stderr + both[1].stderr


@SLOW
@pytest.mark.parametrize(("fault", "seconds"), [("readonly", 8.0), ("full", 5.6), ("hangs", 20.0)])
def test_a_share_that_cannot_be_used_while_a_run_begins_again(run: Run, fault: str, seconds: float) -> None:
    both = run.both(steps=100, restarts=1)
    run.under_way()
    run.hosts.share_fault(fault)  # type: ignore[arg-type]
    os.kill(int(run.hosts[1].read("pid_1")), signal.SIGKILL)
    time.sleep(seconds)
    run.hosts.share_heal()
    assert [machine.wait(60) for machine in both] == [0, 0], both[0].stderr + both[1].stderr
    assert run.hosts[0].read("sum_0") == b"3 attempt 1 node 0 of 2 local 0"


def test_a_clock_an_hour_off(run: Run, need_faketime: None) -> None:
    other = run.start(run.hosts[1], "faketime", "-f", "+1h")
    first = run.start(run.hosts[0])
    for machine in (first, other):
        assert machine.wait(60) == 0, first.stderr + other.stderr


@SLOW
@pytest.mark.parametrize("machines", [1, 2])
def test_a_name_server_that_loses_packets_delays_a_run_and_no_more(need_hosts: None, machines: int) -> None:
    """torch asks for names of addresses; each question is given up after 10 s."""
    with Hosts(machines, share="bind", names="silent") as hosts:
        run = Run(hosts)
        started = [run.start(host, count=machines, processes=3 - machines) for host in hosts]
        assert [machine.wait(120) for machine in started] == [0] * machines, "\n".join(one.stderr for one in started)
        assert hosts[0].read("sum_0").startswith(b"3 attempt 0")


@SLOW
def test_two_machines_that_do_not_reach_each_other_are_named_before_workers_start(need_hosts: None) -> None:
    """Both reach node 0; all three launchers name the two, their addresses and what to open."""
    with Hosts(3, share="bind") as hosts:
        run = Run(hosts)
        run.options = {"count": 3}
        hosts[1].lose_packets_to(hosts[2])
        machines = [run.start(host) for host in hosts]
        said(machines, 3, "node 1 (10.83.0.2, eth0): expected a connection to node 2 (10.83.0.3:", 110)
        for machine in machines:
            assert "node 2 (10.83.0.3, eth0): expected a connection to node 1 (10.83.0.2:" in machine.stderr
            assert "Open TCP ports 32768-60999 between all machines" in machine.stderr
        assert "connections: node 2 is not reached at 10.83.0.3:" in machines[1].stderr


@pytest.mark.parametrize("kinds", [["-6", "-6"], pytest.param(["-4", "-6"], marks=SLOW)])
def test_a_machine_without_ipv4(need_hosts: None, kinds: list[str]) -> None:
    """Node 0 has both kinds of address and the other machine finds it by IPv6; gloo takes IPv4 there, which is said."""
    with Hosts(2, share="bind") as hosts:
        for host, kind in zip(hosts, kinds, strict=True):
            host.run("ip", "-6", "address", "add", f"fd83::{host.index + 1}/64", "dev", "eth0", "nodad")
            if kind == "-6":
                host.run("ip", "-4", "address", "flush", "dev", "eth0")
        both = Run(hosts).both()
        if kinds == ["-4", "-6"]:
            words = "node 0 (10.83.0.1, eth0): expected a connection to node 1 (fd83::2:"
            said(both, 3, words, 60)
            return
        assert [machine.wait(60) for machine in both] == [0, 0], both[0].stderr + both[1].stderr
        assert hosts[0].read("sum_0") == b"3 attempt 0 node 0 of 2 local 0"


@pytest.mark.parametrize("names", ["loopback", pytest.param("known", marks=SLOW)])
def test_host_names_are_not_needed(need_gluster: None, names: str) -> None:
    """Names that resolve, and Debian's own name as 127.0.1.1; in all other tests of this file names do not resolve."""
    with Hosts(2, names=names) as hosts:  # type: ignore[arg-type]
        both = Run(hosts).both()
        assert [machine.wait(60) for machine in both] == [0, 0], both[0].stderr + both[1].stderr
        assert hosts[0].read("sum_0") == b"3 attempt 0 node 0 of 2 local 0"
