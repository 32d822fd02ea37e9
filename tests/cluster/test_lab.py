"""The laboratories themselves: what the other tests here rest on."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cluster.hosts import Host, Hosts, Names
from oracles.waiting import runs, wait_until

CONNECTS = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 7000), float(sys.argv[2])).close()
    print("connected")
except OSError as error:
    print(type(error).__name__)
"""
NAMES = "import socket, sys; print(socket.gethostname(), open(sys.argv[1]).read())"
LOOKS_UP = """
import socket
try:
    print(socket.gethostbyname("node0"))
except OSError as error:
    print(type(error).__name__)
"""


def python(host: Host, program: str, *words: object) -> str:
    started = host.start([sys.executable, "-c", program, *map(str, words)])
    assert started.wait(30) == 0, started.stderr
    return started.stdout.strip()


def test_hosts_have_names_and_disks_of_their_own_and_no_way_out(two_hosts: Hosts) -> None:
    for host in two_hosts:
        host.write("own", host.name.encode())
        assert python(host, NAMES, host.data / "own") == f"{host.name} {host.name}"
    assert not (two_hosts[0].data / "own").exists()
    assert python(two_hosts[0], CONNECTS, "192.0.2.1", 5) == "OSError"  # no route to the world


@pytest.mark.parametrize(
    ("names", "seen"), [("known", "10.83.0.1"), ("loopback", "127.0.1.1"), ("unknown", "gaierror")]
)
def test_host_names(need_hosts: None, names: Names, seen: str) -> None:
    with Hosts(2, share="bind", names=names) as two:
        assert python(two[0], LOOKS_UP) == seen
        assert python(two[1], LOOKS_UP) == ("gaierror" if names == "unknown" else "10.83.0.1")


def test_a_loss_of_power_ends_one_host_alone(two_hosts: Hosts) -> None:
    """Its disk and the share keep what they have; it starts again."""
    (two_hosts[0].seen_from_here(two_hosts.share) / "kept").write_text("shared")
    two_hosts[0].write("kept", b"private")
    parents = [host.start(["sh", "-c", "sleep 600 & sleep 600"]) for host in two_hosts]
    wait_until(lambda: all(len(parent.tree()) == 2 for parent in parents))
    two_hosts[0].kill_all()
    assert parents[0].wait(5) == -signal.SIGKILL
    assert two_hosts[0].processes() == []
    assert len(parents[1].tree()) == 2
    again = two_hosts[0].start(["cat", str(two_hosts.share / "kept"), "kept"])
    assert again.wait(10) == 0, again.stderr
    assert again.stdout == "sharedprivate"
    for pid in (*parents[1].tree(), parents[1].pid):
        os.kill(pid, signal.SIGKILL)


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
