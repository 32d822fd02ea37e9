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
from cluster.hosts import INTERFACE, Host, Hosts, Names

SEES = """
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
SUMS = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
print(dist.all_reduce(total := torch.tensor([dist.get_rank() + 1.0])) or total.item(), flush=True)
dist.destroy_process_group()
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


def python(host: Host, program: str, *words: object, seconds: float = 30) -> str:
    started = host.start([sys.executable, "-c", program, *map(str, words)])
    assert started.wait(seconds) == 0, started.stderr
    return started.stdout.strip()


def wait_for(condition: Callable[[], bool], seconds: float) -> float:
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds
        time.sleep(0.02)
    return time.monotonic() - start


@pytest.fixture
def server(hosts: Hosts) -> Iterator[None]:
    """Something on node 1 that accepts connections."""
    started = hosts[1].start([sys.executable, "-c", SERVES, hosts[1].address])
    wait_for(lambda: started.stdout == "ready\n", 10)
    yield
    started.kill()
    assert started.wait(10) == -signal.SIGKILL


def reaches(host: Host, other: Host, seconds: float = 5) -> str:
    return python(host, SEES, other.address, seconds)


@pytest.mark.usefixtures("server")
def test_hosts_reach_each_other_and_nothing_else(hosts: Hosts) -> None:
    assert reaches(hosts[0], hosts[1]) == "connected"
    started = hosts[0].start(["ip", "route", "show"])
    assert started.wait(10) == 0
    assert started.stdout.strip() == f"10.83.0.0/24 dev {INTERFACE} proto kernel scope link src 10.83.0.1"
    assert python(hosts[0], "import socket; print(socket.gethostname())") == "node0"
    assert python(hosts[1], "import socket; print(socket.gethostname())") == "node1"
    assert python(hosts[0], SEES, "192.0.2.1", 5) == "OSError"  # no route to the world


def test_disks_are_private_under_one_path(hosts: Hosts) -> None:
    hosts[0].write("train/rows.jsonl", b"zero")
    hosts[1].write("train/rows.jsonl", b"one")
    assert (hosts[0].read("train/rows.jsonl"), hosts[1].read("train/rows.jsonl")) == (b"zero", b"one")
    path = hosts[0].data / "train" / "rows.jsonl"
    assert python(hosts[1], "import sys; print(open(sys.argv[1]).read())", path) == "one"
    assert not path.exists()


def test_a_renamed_file_appears_on_the_other_host(hosts: Hosts, record_property: Callable[[str, object], None]) -> None:
    """Listed, then opened, as the address book is polled; its absence has been seen before."""
    polls = (
        "import os, sys, time\n"
        "folder, name = os.path.split(sys.argv[1])\n"
        "assert not os.path.exists(sys.argv[1])\n"
        "print('absent', flush=True)\n"
        "while name not in os.listdir(folder):\n"
        "    time.sleep(0.05)\n"
        "print(open(sys.argv[1]).read())\n"
    )
    path = hosts.share / "run.rdzv"
    other = hosts[1].start([sys.executable, "-c", polls, str(path)])
    wait_for(lambda: other.stdout == "absent\n", 10)
    hosts[0].start(["sh", "-c", f"echo -n record > {path}.new && mv {path}.new {path}"])
    start = time.monotonic()
    assert other.wait(10) == 0, other.stderr
    took = time.monotonic() - start
    record_property("seconds_until_visible", took)
    assert other.stdout == "absent\nrecord\n"
    assert took < 5


@pytest.mark.usefixtures("server")
def test_a_cut_link_heals(hosts: Hosts) -> None:
    hosts[1].cut("link")
    assert reaches(hosts[0], hosts[1], 1) != "connected"
    assert reaches(hosts[1], hosts[0], 1) == "OSError"  # network unreachable: the host knows
    hosts[1].heal()
    assert reaches(hosts[0], hosts[1]) == "connected"


@pytest.mark.usefixtures("server")
def test_a_silent_cut_heals(hosts: Hosts) -> None:
    hosts[1].cut("silent")
    assert reaches(hosts[0], hosts[1], 1) == "TimeoutError"
    hosts[1].heal()
    assert reaches(hosts[0], hosts[1]) == "connected"


@pytest.mark.usefixtures("server")
def test_packets_are_lost_in_one_direction(hosts: Hosts) -> None:
    hosts[0].lose_packets_to(hosts[1])
    assert reaches(hosts[0], hosts[1], 1) == "TimeoutError"
    assert reaches(hosts[1], hosts[1]) == "connected"
    hosts[0].heal()
    assert reaches(hosts[0], hosts[1]) == "connected"


@pytest.mark.parametrize(
    ("names", "seen"), [("known", "10.83.0.1"), ("loopback", "127.0.1.1"), ("unknown", "gaierror")]
)
def test_host_names(names: Names, seen: str) -> None:
    looks_up = (
        "import socket\ntry: print(socket.gethostbyname('node0'))\nexcept OSError as error: print(type(error).__name__)"
    )
    with Hosts(2, share="bind", names=names) as two:
        assert python(two[0], looks_up) == seen
        assert python(two[1], looks_up) == ("gaierror" if names == "unknown" else "10.83.0.1")


def test_gloo_sums_between_hosts(hosts: Hosts) -> None:
    common = {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29500", "WORLD_SIZE": "2"}
    common |= {"GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1"}
    ranks = [host.start([sys.executable, "-c", SUMS], {**common, "RANK": str(host.index)}) for host in hosts]
    for rank in ranks:
        assert rank.wait(60) == 0, rank.stderr
        assert rank.stdout == "3.0\n"  # 1 + 2


def test_a_loss_of_power_ends_one_host_alone(hosts: Hosts) -> None:
    (hosts[0].seen_from_here(hosts.share) / "kept").write_text("shared")
    hosts[0].write("kept", b"private")
    parents = [host.start(["sh", "-c", "sleep 600 & sleep 600"]) for host in hosts]
    wait_for(lambda: all(len(parent.tree()) == 2 for parent in parents), 5)
    assert set(parents[0].tree()) < set(hosts[0].processes())
    hosts[0].kill_all()
    assert parents[0].wait(5) == -signal.SIGKILL
    assert hosts[0].processes() == []
    assert parents[1].running
    assert len(parents[1].tree()) == 2
    again = hosts[0].start(["cat", str(hosts.share / "kept"), "kept"])
    assert again.wait(10) == 0, again.stderr
    assert again.stdout == "sharedprivate"
    parents[1].kill()
    for pid in hosts[1].processes():
        if b"sleep" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)


@pytest.mark.usefixtures("need_hosts")
@pytest.mark.parametrize("silent", [False, True])
def test_a_peer_hears_of_a_loss_of_power_or_not(silent: bool) -> None:
    """A kernel that lives on closes the connection of a killed process; a machine without power does not."""
    waits = (
        "import socket, sys\n"
        "with socket.create_connection((sys.argv[1], 7000)) as peer:\n"
        "    print('connected', flush=True)\n"
        "    print(peer.recv(1), flush=True)\n"
    )
    holds = SERVES.replace("server.accept()[0].close()", "held = server.accept()")
    with Hosts(2, share="bind") as two:
        server = two[1].start([sys.executable, "-c", holds, two[1].address])
        wait_for(lambda: server.stdout == "ready\n", 10)
        client = two[0].start([sys.executable, "-c", waits, two[1].address])
        wait_for(lambda: client.stdout == "connected\n", 10)
        two[1].kill_all(silent=silent)
        if silent:
            time.sleep(0.5)
            assert client.running
            assert client.stdout == "connected\n"
        else:
            assert client.wait(5) == 0
            assert client.stdout == "connected\nb''\n"
        assert two[1].start(["ip", "-brief", "link", "show", INTERFACE]).wait(5) == 0  # it starts again, plugged in
        client.kill()
        again = two[1].start([sys.executable, "-c", SERVES, two[1].address])
        wait_for(lambda: again.stdout == "ready\n", 10)
        assert reaches(two[0], two[1]) == "connected"


def test_a_frozen_host_goes_on(hosts: Hosts) -> None:
    counts = hosts[0].start([sys.executable, "-c", "import time\nwhile True: print(1, flush=True); time.sleep(0.01)"])
    wait_for(lambda: len(counts.stdout) > 10, 10)
    hosts[0].freeze()
    frozen = len(counts.stdout)
    time.sleep(0.2)
    assert len(counts.stdout) == frozen
    hosts[0].thaw()
    wait_for(lambda: len(counts.stdout) > frozen, 5)
    counts.kill()


@pytest.mark.parametrize(("fault", "said"), [("readonly", "Read-only file system"), ("full", "No space left")])
def test_the_share_fails_and_heals(hosts: Hosts, fault: str, said: str) -> None:
    """The first write of a full share succeeds, since the client holds it back; fsync reports it."""
    path = hosts.share / fault
    python(hosts[0], WRITES, path, 1)
    hosts.share_fault("readonly" if fault == "readonly" else "full")
    try:
        started = hosts[0].start([sys.executable, "-c", WRITES, str(path), str(1 << 20)])
        started.wait(20)
        assert said in started.stdout + started.stderr
    finally:
        hosts.share_heal()
    assert python(hosts[1], WRITES, path, 1 << 20) == ""


def test_the_share_hangs_and_goes_on(hosts: Hosts) -> None:
    hosts.share_fault("hangs")
    started = hosts[0].start([sys.executable, "-c", WRITES, str(hosts.share / "hangs"), "10"])
    time.sleep(1)
    assert started.running
    hosts.share_heal()
    assert started.wait(20) == 0, started.stderr


@pytest.mark.usefixtures("need_hosts")
def test_nothing_is_left_behind() -> None:
    with Hosts(1, share="bind") as one:
        lab, host = one.share.parent, one[0]
        sleeps = host.start(["sh", "-c", "sleep 600 & sleep 600"])
        wait_for(lambda: len(sleeps.tree()) == 2, 5)
        pids = [host.pid, *host.processes()]
        assert len(pids) == 4
    assert sleeps.wait(5) == -signal.SIGKILL
    assert not lab.exists()
    assert [pid for pid in pids if Path(f"/proc/{pid}/ns/net").exists() and not zombie(pid)] == []


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
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() and not zombie(pid) for pid in pids), 10)


def zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"


@pytest.mark.nfs
@pytest.mark.usefixtures("need_nfs")
def test_two_machines_share_by_nfs() -> None:
    job = (
        "mount | grep ' on /mnt/share '\n"
        "echo from $NODE > note$NODE.new && mv note$NODE.new note$NODE\n"
        "other=note$((1 - NODE))\n"
        "until ls | grep -qx $other; do sleep 0.05; done\n"
        "cat $other\n"
        f"{sys.executable} -c 'import sys; print(sys.version_info[:2])'\n"
        "exit $((NODE + 3))\n"
    )
    ended = nfs_lab.run_on_two_machines(job, 60)
    for node in (0, 1):
        assert ended[node].code == node + 3
        mounted, note, version = ended[node].output.splitlines()
        assert " type nfs4 (rw,relatime,vers=4.2," in mounted
        assert note == f"from {1 - node}"
        assert version == str(tuple(sys.version_info[:2]))


@pytest.mark.nfs
@pytest.mark.usefixtures("need_nfs")
def test_a_machine_that_dies_is_named_with_what_it_said() -> None:
    with pytest.raises(AssertionError, match=r"node 1 did not come to the job's end[\s\S]*last words"):
        nfs_lab.run_on_two_machines('[ "$NODE" = 1 ] || exit 0; echo last words; busybox poweroff -f', 60)
