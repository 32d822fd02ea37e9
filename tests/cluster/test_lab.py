"""The laboratories themselves: what the other tests here rest on."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster import nfs_lab
from cluster.hosts import Host, Hosts, Names
from cluster.share import Fault
from oracles.waiting import runs, wait_until

CONNECTS = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 7000), float(sys.argv[2])).close()
    print("connected")
except OSError as error:
    print(type(error).__name__)
"""
SERVES = """
import socket, sys
with socket.create_server((sys.argv[1], 7000)) as server:
    print("ready", flush=True)
    while True:
        server.accept()[0].close()
"""
LOOKS_UP = """
import socket
try:
    print(socket.gethostbyname("node0"))
except OSError as error:
    print(type(error).__name__)
"""
WRITES = """
import os, sys
file = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY)
try:
    os.write(file, b"x" * int(sys.argv[2]))
    os.fsync(file)
except OSError as error:
    print(os.strerror(error.errno))
"""


@pytest.fixture
def hosts(two_hosts: Hosts) -> Hosts:
    return two_hosts


def python(host: Host, program: str, *words: object) -> str:
    started = host.start([sys.executable, "-c", program, *map(str, words)])
    assert started.wait(30) == 0, started.stderr
    return started.stdout.strip()


@pytest.fixture
def server(hosts: Hosts) -> Iterator[None]:
    """Something on node 1 that accepts connections."""
    started = hosts[1].start([sys.executable, "-c", SERVES, hosts[1].address])
    wait_until(lambda: started.stdout == "ready\n")
    yield
    started.kill()
    assert started.wait(10) == -signal.SIGKILL


def reaches(host: Host, other: Host, seconds: float = 5) -> str:
    return python(host, CONNECTS, other.address, seconds)


@pytest.mark.usefixtures("server")
def test_hosts_reach_each_other_and_nothing_else(hosts: Hosts) -> None:
    assert reaches(hosts[0], hosts[1]) == "connected"
    assert [python(host, "import socket; print(socket.gethostname())") for host in hosts] == ["node0", "node1"]
    assert python(hosts[0], CONNECTS, "192.0.2.1", 5) == "OSError"  # no route to the world


def test_disks_are_private_under_one_path(hosts: Hosts) -> None:
    hosts[0].write("train/rows.jsonl", b"zero")
    hosts[1].write("train/rows.jsonl", b"one")
    assert (hosts[0].read("train/rows.jsonl"), hosts[1].read("train/rows.jsonl")) == (b"zero", b"one")
    path = hosts[0].data / "train" / "rows.jsonl"
    assert python(hosts[1], "import sys; print(open(sys.argv[1]).read())", path) == "one"
    assert not path.exists()


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize(
    ("cut", "there", "back"),
    [
        (lambda hosts: hosts[1].cut("link"), "TimeoutError OSError", "OSError"),  # the host knows
        (lambda hosts: hosts[1].cut("silent"), "TimeoutError OSError", "TimeoutError OSError"),
        (lambda hosts: hosts[0].lose_packets_to(hosts[1]), "TimeoutError", None),
    ],
    ids=["link", "silent", "one direction"],
)
def test_a_cut_network_heals(hosts: Hosts, cut: Callable[[Hosts], None], there: str, back: str | None) -> None:
    cut(hosts)
    assert reaches(hosts[0], hosts[1], 1) in there.split()
    assert back is None or python(hosts[1], CONNECTS, hosts[0].address, 1) in back.split()
    for host in hosts:
        host.heal()
    assert reaches(hosts[0], hosts[1]) == "connected"


@pytest.mark.parametrize(
    ("names", "seen"), [("known", "10.83.0.1"), ("loopback", "127.0.1.1"), ("unknown", "gaierror")]
)
def test_host_names(need_hosts: None, names: Names, seen: str) -> None:
    with Hosts(2, share="bind", names=names) as two:
        assert python(two[0], LOOKS_UP) == seen
        assert python(two[1], LOOKS_UP) == ("gaierror" if names == "unknown" else "10.83.0.1")


def test_a_loss_of_power_ends_one_host_alone(hosts: Hosts) -> None:
    """Its disk and the share keep what they have; it starts again."""
    (hosts[0].seen_from_here(hosts.share) / "kept").write_text("shared")
    hosts[0].write("kept", b"private")
    parents = [host.start(["sh", "-c", "sleep 600 & sleep 600"]) for host in hosts]
    wait_until(lambda: all(len(parent.tree()) == 2 for parent in parents))
    hosts[0].kill_all()
    assert parents[0].wait(5) == -signal.SIGKILL
    assert hosts[0].processes() == []
    assert len(parents[1].tree()) == 2
    again = hosts[0].start(["cat", str(hosts.share / "kept"), "kept"])
    assert again.wait(10) == 0, again.stderr
    assert again.stdout == "sharedprivate"
    for pid in (*parents[1].tree(), parents[1].pid):
        os.kill(pid, signal.SIGKILL)


def test_a_frozen_host_goes_on(hosts: Hosts) -> None:
    counts = hosts[0].start([sys.executable, "-c", "import time\nwhile True: print(1, flush=True); time.sleep(0.01)"])
    wait_until(lambda: len(counts.stdout) > 10)
    hosts[0].freeze()
    frozen = len(counts.stdout)
    time.sleep(0.2)
    assert len(counts.stdout) == frozen
    hosts[0].thaw()
    wait_until(lambda: len(counts.stdout) > frozen)
    counts.kill()


@pytest.mark.parametrize(
    ("fault", "words"), [("readonly", "Read-only file system"), ("full", "No space left"), ("hangs", None)]
)
def test_the_share_fails_and_heals(hosts: Hosts, fault: Fault, words: str | None) -> None:
    """The first write of a full share succeeds, since the client holds it back; fsync reports it."""
    path = hosts.share / fault
    python(hosts[0], WRITES, path, 1)
    hosts.share_fault(fault)
    try:
        started = hosts[0].start([sys.executable, "-c", WRITES, str(path), str(1 << 20)])
        if words is None:
            time.sleep(1)
            assert started.running
        else:
            started.wait(20)
            assert words in started.stdout + started.stderr
    finally:
        hosts.share_heal()
    started.wait(20)
    assert python(hosts[1], WRITES, path, 1 << 20) == ""


@pytest.mark.usefixtures("need_hosts")
def test_nothing_runs_on_when_the_test_is_killed(tmp_path: Path) -> None:
    program = (
        "import os\n"
        "from cluster.hosts import Hosts\n"
        "with Hosts(2, share='bind') as hosts:\n"
        "    pids = [pid for host in hosts for pid in (host.pid, host.start(['sleep', '600']).pid)]\n"
        "    print(*pids, flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[1])}
    killed = subprocess.run([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, check=False)
    assert killed.returncode == -signal.SIGKILL
    pids = [int(word) for word in killed.stdout.split()]
    assert len(pids) == 4
    wait_until(lambda: not any(runs(pid) for pid in pids))


@pytest.mark.nfs
@pytest.mark.usefixtures("need_nfs")
def test_a_machine_that_dies_is_named_with_its_last_output() -> None:
    with pytest.raises(AssertionError, match=r"node 1 did not come to the job's end[\s\S]*last words"):
        nfs_lab.run_on_two_machines('[ "$NODE" = 1 ] || exit 0; echo last words; busybox poweroff -f', 60)
