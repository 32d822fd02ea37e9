"""What hosts lose: network, power, time, the share; launchers with small workers, so that seconds are the run's own."""

import json
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from cluster.hosts import Fault, Host, Hosts, cluster_of
from helpers.interpreters import FORKED_WORKERS, Interpreter
from helpers.runs import ROOT
from helpers.waiting import wait_until

ENVIRONMENT = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1",
               FORKED_WORKERS: "1"}  # fmt: skip
LOST_AFTER = 4.0


@dataclass
class Run:
    """A run of hosts whose launchers log to files of their own."""

    hosts: Hosts
    started: list[Interpreter] = field(default_factory=list)
    settings: dict[str, Any] = field(
        default_factory=lambda: {"interface": None, "lost_after_seconds": LOST_AFTER, "heartbeat_seconds": 0.5}
    )
    options: dict[str, Any] = field(default_factory=dict)

    def start(self, host: Host, *wrapper: str, **options: Any) -> Interpreter:
        given = {
            "index": host.index, "count": len(self.hosts), "host": host.name, "out": str(host.data),
            "init_method": f"file://{self.hosts.share}/run.rdzv", "settings": self.settings, **self.options, **options,
        }  # fmt: skip
        command = [*wrapper, sys.executable, "-m", "distributed.machines", json.dumps(given)]
        self.started.append(host.start(command, env=ENVIRONMENT))
        return self.started[-1]

    def all(self, **options: Any) -> list[Interpreter]:
        self.options = options
        return [self.start(host) for host in self.hosts]

    def under_way(self, **options: Any) -> list[Interpreter]:
        """Starts all and returns when their workers have summed."""
        started = self.all(**options)
        for host in self.hosts:
            wait_until(host.seen_from_here(host.data / f"step_{host.index}").exists, self.logs)
        return started

    def logs(self) -> str:
        return "\n".join(f"== {i}\n{machine.said}" for i, machine in enumerate(self.started))

    def ends_well(self, attempt: int = 0) -> None:
        """Asserts that those started last end with 0, and that node 0 summed in this attempt."""
        assert [machine.wait(90) for machine in self.started[-len(self.hosts) :]] == [0] * len(self.hosts), self.logs()
        assert self.hosts[0].read("sum_0").decode() == f"3 attempt {attempt} node 0 of {len(self.hosts)} local 0"


@pytest.fixture
def run(two_hosts: Hosts) -> Iterator[Run]:
    started = Run(two_hosts)
    yield started
    for host in two_hosts:
        host.heal()
    two_hosts.share_heal()
    for machine in started.started:
        machine.close()
    for host in two_hosts:
        host.run("find", host.data, "-type", "f", "-delete")


def all_end(machines: list[Interpreter], code: int, words: str, within: float) -> None:
    """Asserts that every launcher ends with the code and the words, in time: 30 s are promised."""
    deadline = time.monotonic() + within
    for machine in machines:
        assert machine.wait(max(deadline - time.monotonic(), 0.1)) == code, machine.said
        assert words in machine.said


@pytest.mark.parametrize("how", ["silent", pytest.param("link", marks=pytest.mark.slow)])
def test_a_cut_network_ends_both_sides_with_the_reason(run: Run, how: Literal["link", "silent"]) -> None:
    both = run.under_way(steps=2000)
    run.hosts[1].cut(how)
    all_end(both[:1], 4, f"node 1 (host node1, pid {both[1].pid}): no heartbeat for 4 s", 20)
    all_end(both[1:], 4, "lost node 0: run ", 20)


@pytest.mark.slow
@pytest.mark.parametrize("heals", [True, False])
def test_a_network_that_is_cut_while_machines_meet(run: Run, heals: bool) -> None:
    """Healed they meet; else both log what is missing. The share is behind the same network: the kernel lets a process
    that waits for it end only when it answers, which the reason does not wait for."""
    run.settings["join_timeout_seconds"] = 60 if heals else 15
    first = run.start(run.hosts[0])
    wait_until(lambda: "listens at" in first.said, run.logs)
    run.hosts[1].cut("silent")
    second = run.start(run.hosts[1])
    time.sleep(6)
    if not heals:
        all_end([first], 3, "got no sign of node 1", 40)
        wait_until(lambda: "got no answer for 20 s (the share hangs)" in second.said, run.logs, 60)
    run.hosts[1].heal()
    if heals:
        run.ends_well()
    else:
        assert second.wait(60) == 3


@pytest.mark.parametrize("seconds", [LOST_AFTER + 3, pytest.param(LOST_AFTER / 2, marks=pytest.mark.slow)])
def test_a_cut_that_heals(run: Run, seconds: float) -> None:
    """A short one is survived, after a longer one the run begins again."""
    longer = seconds > LOST_AFTER
    both = run.under_way(steps=2000, restarts=2)
    run.hosts[1].cut("silent")
    time.sleep(seconds)
    run.hosts[1].heal()
    run.hosts[0].write("end", b"")  # workers end after their next step
    run.ends_well(int(longer))
    assert ["restart 1 of at most 2" in machine.said for machine in both] == [longer] * 2


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("silent", [False, True])
def test_a_host_without_power_is_named_and_may_come_back(run: Run, victim: int, silent: bool) -> None:
    """Node 0's new start begins with attempt 0; the other one's makes node 0 begin attempt 1."""
    both = run.under_way(steps=2000, restarts=1)
    host, other = run.hosts[victim], both[1 - victim]
    host.kill_all(silent=silent)
    run.hosts[0].write("end", b"")  # workers end after their next step, in later attempts as well
    assert (run.start(host).wait(90), other.wait(90)) == (0, 0), run.logs()
    assert ("lost node 0: run " if victim == 0 else f"node 1 (host node1, pid {both[1].pid})") in other.said
    assert run.hosts[0].read("sum_0") == f"3 attempt {victim} node 0 of 2 local 0".encode()


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("readonly", "expected a folder that every machine reaches"),
        ("full", "No space left on device"),
        pytest.param("hangs", "(the share hangs)", marks=pytest.mark.slow),
    ],
)
def test_a_share_that_cannot_be_used(run: Run, fault: Fault, words: str) -> None:
    run.hosts.share_fault(fault)
    machine = run.start(run.hosts[0])
    wait_until(lambda: words in machine.said, run.logs, 45)
    run.hosts.share_heal()  # a process ends when its last call to a share that hangs does: the kernel's rule
    all_end([machine], 3, "share", 20)


def test_a_clock_an_hour_off(run: Run, need_faketime: None) -> None:
    run.start(run.hosts[1], "faketime", "-f", "+1h")
    run.start(run.hosts[0])
    run.ends_well()


@pytest.mark.slow
@pytest.mark.parametrize("machines", [1, 2])
def test_a_name_server_that_loses_packets_delays_a_run_and_no_more(need_hosts: None, machines: int) -> None:
    """torch asks for names of addresses; each question is given up after 10 s."""
    with cluster_of(machines, kind="bind", names="silent") as hosts:
        run = Run(hosts)
        run.all(processes=3 - machines)
        run.ends_well()


@pytest.mark.slow
def test_two_machines_that_do_not_reach_each_other_are_named_before_workers_start(need_hosts: None) -> None:
    """Both reach node 0; all three launchers name the two, their addresses and what to open."""
    with cluster_of(3, kind="bind") as hosts:
        hosts[1].lose_packets_to(hosts[2])
        machines = Run(hosts).all()
        all_end(machines, 3, "a connection to node 2 (10.83.0.3:", 110)
        for machine in machines:
            assert re.search(r"(?s)a connection to node 1 \(10\.83\.0\.2:.*Open TCP ports 32768-60999", machine.said)


@pytest.mark.slow
def test_two_machines_that_a_firewall_parts_are_named(need_hosts: None) -> None:
    """Both reach node 0, so that heartbeats go on; workers wait 8 s for each other."""
    with cluster_of(3, kind="bind") as hosts:
        machines = Run(hosts).under_way(steps=2000, wait=8)
        hosts[1].lose_packets_to(hosts[2])
        all_end(machines, 4, "a connection to node 2 (10.83.0.3:", 8 + 20)
        assert all(machine.said.index("node 1 (10.83.0.2") < machine.said.index("rank ") for machine in machines)


@pytest.mark.parametrize("kinds", [["-6", "-6"], pytest.param(["-4", "-6"], marks=pytest.mark.slow)])
def test_a_machine_without_ipv4(need_hosts: None, kinds: list[str]) -> None:
    """Node 0 has both kinds of address and the other machine finds it by IPv6; gloo takes IPv4 there, as logged."""
    with cluster_of(2, kind="bind") as hosts:
        for host, kind in zip(hosts, kinds, strict=True):
            host.run("ip", "-6", "address", "add", f"fd83::{host.index + 1}/64", "dev", "eth0", "nodad")
            if kind == "-6":
                host.run("ip", "-4", "address", "flush", "dev", "eth0")
        run = Run(hosts)
        run.all()
        if kinds == ["-4", "-6"]:
            all_end(run.started, 3, "a connection to node 1 (fd83::2:", 60)
        else:
            run.ends_well()
