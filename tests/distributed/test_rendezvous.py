"""Machines that meet through a file: who comes, who does not, who should not; real launchers on loopback."""

import errno
import json
import os
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from machines import Machine, appears, machines

from reagent_lite.config.rendezvous import RendezvousConfig
from reagent_lite.distributed import network
from reagent_lite.distributed.link import connect
from reagent_lite.distributed.meeting_file import MeetingFile, Record
from reagent_lite.distributed.nodes import Node
from reagent_lite.distributed.rendezvous import Rendezvous
from reagent_lite.distributed.verdict import Declaration
from reagent_lite.errors import ConfigError, RendezvousError
from reagent_lite.files import FolderIdentity

Start = Callable[..., Machine]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with machines(tmp_path) as starter:
        yield starter


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def declared(folder: Path, node: int) -> None:
    """Waits until a machine is known to node 0's store."""
    deadline = time.monotonic() + 40
    while not isinstance(found := MeetingFile(folder / "run.rdzv").read(), Record):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    store = connect(found.address, found.port, found.token)
    while store.peek(f"info/{node}") is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def record(**changes: object) -> str:
    fields = {
        "nonce": "0" * 32, "run": "old", "attempt": 0, "address": "127.0.0.1", "interface": "lo", "port": 1,
        "num_nodes": 2, "host": "elsewhere", "pid": 77, "started": "2026-01-01T00:00:00+00:00",
    }  # fmt: skip
    return json.dumps({"schema_version": 1, **fields, **changes})


@pytest.mark.parametrize(
    "before",
    [None, record(), *(pytest.param(text, marks=pytest.mark.slow) for text in ("", "no record at all"))],
)
def test_machines_meet_whatever_the_file_was(tmp_path: Path, start: Start, before: str | None) -> None:
    """No file, an empty one, rubbish, and a stale record whose port is dead; uneven processes: ranks by prefix sums."""
    file = tmp_path / "run.rdzv"
    if before is not None:
        file.write_text(before)
    last = start(1, processes=2)
    time.sleep(0.5)
    first = start(0, processes=1)  # node 0 last
    assert (first.ended(), last.ended()) == (0, 0), first.log + last.log
    assert first.output() == "6 attempt 0 node 0 of 2 local 0\n"  # ranks 1 + 2 + 3
    assert last.output() == ""
    assert (tmp_path / "out" / "sum_2").read_text() == "6 attempt 0 node 1 of 2 local 1"
    assert not file.exists()
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".")] == []
    assert ("is left from run old of host elsewhere, pid 77" in first.log) == (before == record())


def test_a_silent_server_where_the_old_store_was_is_no_store(tmp_path: Path, start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as foreign:
        (tmp_path / "run.rdzv").write_text(record(port=foreign.getsockname()[1]))
        other = start(1)
        time.sleep(1.0)  # it has asked the silent one
        first = start(0)
        assert (first.ended(), other.ended()) == (0, 0), first.log + other.log


def test_another_store_where_the_old_one_was_is_not_joined(tmp_path: Path, start: Start) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
    server.set("nonce", "another run's")
    (tmp_path / "run.rdzv").write_text(record(port=server.port))
    other, first = start(1), start(0)
    assert (first.ended(), other.ended()) == (0, 0), first.log + other.log
    assert server.list_keys() == ["nonce"]


def test_the_file_is_private_and_names_who_listens(tmp_path: Path, start: Start) -> None:
    first = start(0)
    first.says("listens at")
    file = tmp_path / "run.rdzv"
    found = MeetingFile(file).read()
    assert isinstance(found, Record)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert (found.address, found.interface, found.num_nodes, found.pid) == ("127.0.0.1", "lo", 2, first.process.pid)
    listening = [line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines() if " 0A " in line]
    assert f"0100007F:{found.port:04X}" in listening
    assert f"00000000:{found.port:04X}" not in listening
    first.process.send_signal(signal.SIGTERM)
    assert first.ended() == 75
    assert not file.exists()


def test_a_missing_machine_is_named_by_all_who_came(start: Start) -> None:
    came = [start(index, 3, settings={"join_timeout_seconds": 4}) for index in (0, 2)]
    for machine in came:
        assert machine.ended() == 3
        assert "rendezvous of 3 machines: expected all of them within 4 s, got no sign of node 1" in machine.log


def test_without_node_0_the_others_say_what_they_looked_for(tmp_path: Path, start: Start) -> None:
    (tmp_path / "run.rdzv").write_text(record())
    other = start(1, settings={"join_timeout_seconds": 2})
    assert other.ended() == 3
    assert "expected node 0 within 2 s, got run old of host elsewhere, pid 77, at 127.0.0.1:1 since " in other.log
    assert "which does not answer" in other.log


def test_two_machines_of_one_number(start: Start, tmp_path: Path) -> None:
    first = start(0, 3)
    one = start(1, 3, host="alpha")
    declared(tmp_path, 1)
    two = start(1, 3, host="beta")
    assert two.ended() == 3
    assert f"taken by host alpha, pid {one.process.pid}; this is host beta, pid {two.process.pid}" in two.log
    third = start(2, 3)  # the run is not disturbed
    assert [machine.ended() for machine in (first, one, third)] == [0, 0, 0]


def test_a_place_is_free_again_after_its_machine_went_away(start: Start, tmp_path: Path) -> None:
    first = start(0, 3)
    gone = start(1, 3)
    declared(tmp_path, 1)
    gone.process.kill()
    first.says("node 1 (host host1")
    assert "went away before all had come; its place is free again" in first.log
    others = [start(1, 3), start(2, 3)]
    assert [machine.ended() for machine in (first, *others)] == [0, 0, 0]


def test_a_machine_that_was_silent_while_waiting_is_taken_back(start: Start, tmp_path: Path) -> None:
    first, silent = start(0, 3), start(1, 3)
    declared(tmp_path, 1)
    silent.process.send_signal(signal.SIGSTOP)
    first.says("its place is free again")
    silent.process.send_signal(signal.SIGCONT)
    machines_ = (first, silent, start(2, 3))
    assert [machine.ended(120.0) for machine in machines_] == [0, 0, 0], first.log + silent.log


def test_node_0_is_silent_while_it_waits(start: Start, tmp_path: Path) -> None:
    """What one machine took for lost answers again: it is entered after all, the run is the same."""
    first, other = start(0, 3), start(1, 3)
    declared(tmp_path, 1)
    first.process.send_signal(signal.SIGSTOP)
    other.says("looking again")
    first.process.send_signal(signal.SIGCONT)
    machines_ = (first, other, start(2, 3))
    assert [machine.ended(120.0) for machine in machines_] == [0, 0, 0], first.log + other.log


def test_node_0_is_killed_while_it_waits(start: Start, tmp_path: Path) -> None:
    """Its record and the others' places go with it; what it publishes when started again is a new store."""
    first, other = start(0, 3), start(1, 3)
    declared(tmp_path, 1)
    first.process.kill()
    other.says("looking again")
    machines_ = (start(0, 3), other, start(2, 3))
    assert [machine.ended(120.0) for machine in machines_] == [0, 0, 0], machines_[0].log + other.log


def test_two_jobs_on_one_file(start: Start, tmp_path: Path) -> None:
    running = [start(index, work="sum", steps=2000) for index in (0, 1)]
    appears(tmp_path / "out" / "step_1")
    second = start(0)
    assert second.ended() == 3
    assert f"expected a file that no live run uses, got run " in second.log  # noqa: F541
    assert f"pid {running[0].process.pid}, at 127.0.0.1:" in second.log
    assert "--force" in second.log
    forced = start(0, force=True)
    for machine in running:
        assert machine.ended() == 4
        assert f"ended by --force from host {socket.gethostname()}, pid {forced.process.pid}" in machine.log
    assert start(1).ended() == 0
    assert forced.ended() == 0


def test_two_jobs_that_start_in_the_same_instant(start: Start, tmp_path: Path) -> None:
    """Both find no file and publish; the one whose record was replaced ends, the other meets its machines."""
    jobs = [start(0), start(0)]
    deadline = time.monotonic() + 60
    while all(job.process.poll() is None for job in jobs):
        assert time.monotonic() < deadline, jobs[0].log + jobs[1].log
        time.sleep(0.05)
    loser = next(job for job in jobs if job.process.poll() is not None)
    winner = next(job for job in jobs if job is not loser)
    assert loser.ended() == 3
    assert f"pid {winner.process.pid}" in loser.log
    assert "Give each job a file of its own" in loser.log
    assert start(1).ended() == 0
    assert winner.ended() == 0


def test_node_0_is_killed_before_it_publishes(start: Start, tmp_path: Path) -> None:
    first = start(0, publish_after=30.0)
    other = start(1)
    first.says("about to join")
    first.process.kill()
    assert not (tmp_path / "run.rdzv").exists()
    again = start(0)
    assert [again.ended(), other.ended()] == [0, 0], again.log + other.log


def test_a_meeting_file_that_is_removed_while_machines_meet_is_written_again(start: Start, tmp_path: Path) -> None:
    first = start(0)
    appears(tmp_path / "run.rdzv")
    (tmp_path / "run.rdzv").unlink()
    first.says("is gone while machines meet: written again")
    assert [start(1).ended(), first.ended()] == [0, 0]


def test_a_handle_that_went_stale_is_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """NFS answers ESTALE where a file was replaced between its name's lookup and its opening."""
    file = MeetingFile(tmp_path / "run.rdzv")
    file.path.write_text(record())
    opened, times = Path.open, []

    def stale_once(self: Path, *args: object, **kwargs: object) -> object:
        if self == file.path and not times:
            times.append(1)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return opened(self, *args, **kwargs)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", stale_once)
    assert file.read() == os.strerror(errno.ESTALE)
    assert isinstance(file.read(), Record)
    times.clear()
    one = Declaration(node=0, host="h", pid=1, processes=1, device="cpu")
    settings = RendezvousConfig(interface="lo", join_timeout_seconds=1)
    node_0 = Rendezvous(Node(0, 2), f"file://{file.path}", settings, one)
    with pytest.raises(RendezvousError, match="no sign of node 1"):  # it got past the stale handle, and waited
        node_0.join()
    assert any("does not answer: replaced" in line for line in caplog.messages)


@pytest.mark.parametrize(
    ("mine", "code", "words"),
    [
        ({"config": {"epochs": 2, "seed": 1}}, 3, "config key epochs: expected 1 as on node 0 (host host0, pid"),
        pytest.param(
            {"versions": {"torch": "2.12.0"}},
            3,
            "version of torch: expected 2.13.0+cpu as on node 0",
            marks=pytest.mark.slow,
        ),
        pytest.param({"gpus": ["GPU-a"]}, 3, "GPU GPU-a: expected used by node 0", marks=pytest.mark.slow),
        ({"problem": "data.json: expected rows, got none"}, 2, "data.json: expected rows, got none"),
        ({"count": 3}, 3, "num_nodes: expected 2 as on node 0"),
    ],
)
def test_machines_that_do_not_fit_together(start: Start, mine: dict[str, object], code: int, words: str) -> None:
    base = {"config": {"epochs": 1, "seed": 1}, "versions": {"torch": "2.13.0+cpu"}, "gpus": ["GPU-a"]}
    count = mine.pop("count", 2)
    settings = {"join_timeout_seconds": 8}
    first = start(0, 2, **base, settings=settings)
    other = start(1, count, **{**base, "gpus": [], **mine}, settings=settings)
    assert other.ended() == code
    assert words in other.log
    if count == 2:
        assert first.ended() == code
        assert words in first.log
        assert "config key seed" not in first.log
    assert first.ended() in (2, 3)


@pytest.mark.slow
def test_a_patch_version_is_a_warning(start: Start) -> None:
    both = [start(index, versions={"torch": f"2.13.{index}"}) for index in (0, 1)]
    assert [machine.ended() for machine in both] == [0, 0]
    assert "warning: torch is 2.13.0 on node 0" in both[1].log


@pytest.mark.parametrize(
    ("work", "code", "words"),
    [
        ("kill", 4, "rank 1 of 2 (node 1, local rank 0): expected a worker that trains to the end, got ended by "
                    "signal 9 (SIGKILL)"),
        ("stop", 4, "rank 1 of 2 (node 1, local rank 0): expected a running worker, got stopped"),
        ("raise", 2, "rank 1 of 2 (node 1, local rank 0): file.json:3: expected a number, got text"),
        ("hang", 2, "rank 1 of 2 (node 1, local rank 0): file.json:3: expected a number, got text"),
        pytest.param("crash", 4, "ValueError('something unexpected')", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_every_launcher_says_why(start: Start, tmp_path: Path, work: str, code: int, words: str) -> None:
    both = [start(index, work=work, steps=1000) for index in (0, 1)]
    appears(tmp_path / "out" / "step_1")
    failed = time.monotonic()
    for machine in both:
        assert machine.ended(30.0) == code
        assert machine.log.count(words) == 1
    assert time.monotonic() - failed < 25


def test_a_stranger_at_the_port_does_not_end_the_run(start: Start, tmp_path: Path) -> None:
    both = [start(index, steps=60) for index in (0, 1)]
    appears(tmp_path / "out" / "step_1")
    found = MeetingFile(tmp_path / "run.rdzv").read()
    assert isinstance(found, Record)
    stranger = dist.TCPStore(found.address, found.port, is_master=False, wait_for_workers=False)
    assert not any(found.token.encode() in stranger.get(key) for key in stranger.list_keys() if key.startswith("0/"))
    stranger.set("0/abort", '{"reason": "r", "exit_code": 0, "restart": false}')
    assert [machine.ended() for machine in both] == [0, 0], both[0].log + both[1].log
    assert both[0].output() == "3 attempt 0 node 0 of 2 local 0\n"


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_launcher_that_is_killed_takes_its_workers_along_and_the_other_says_so(
    start: Start, tmp_path: Path, victim: int
) -> None:
    both = [start(index, steps=1000) for index in (0, 1)]
    appears(tmp_path / "out" / f"step_{victim}")
    worker = int((tmp_path / "out" / f"pid_{victim}").read_text())
    both[victim].process.kill()
    other = both[1 - victim]
    assert other.ended(30.0) == 4
    words = "lost node 0: run " if victim == 0 else "node 1 (host host1, pid"
    assert words in other.log
    assert not runs(worker)


@pytest.mark.parametrize(("machines", "work"), [(1, "stop"), (2, "sleep")])
def test_a_rank_that_hangs_is_named_by_all_and_not_those_who_wait_for_it(
    start: Start, machines: int, work: str
) -> None:
    """A stopped process is no longer looked for: its launcher would name it after lost_after_seconds."""
    settings = {"lost_after_seconds": 60.0 if machines == 1 else 3.0}
    options = {"processes": 3 - machines, "steps": 9, "work": work, "wait": 4, "settings": settings}
    begun = [start(index, machines, **options) for index in range(machines)]
    assert [machine.ended(120.0) for machine in begun] == [4] * machines
    where = "" if machines == 1 else " (node 1, local rank 0)"
    for machine in begun:
        blamed = next(line for line in machine.log.splitlines() if line.startswith("rank "))
        assert blamed.startswith(f"rank 1 of 2{where}: expected a process that goes on within 4 s, got no sign for ")
        assert blamed.endswith(" s, after step 3; the others wait for it")
        assert "rank 0 of 2" in machine.log  # what it met


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_launcher_that_stops_is_lost(start: Start, tmp_path: Path, victim: int) -> None:
    both = [start(index, steps=1000) for index in (0, 1)]
    appears(tmp_path / "out" / f"step_{victim}")
    time.sleep(0.5)
    stopped = time.monotonic()
    both[victim].process.send_signal(signal.SIGSTOP)
    other = both[1 - victim]
    assert other.ended(30.0) == 4
    assert time.monotonic() - stopped < 15
    words = "lost node 0: run " if victim == 0 else f"node 1 (host host1, pid {both[1].process.pid}): no sign of life"
    assert words in other.log
    both[victim].process.send_signal(signal.SIGCONT)
    assert both[victim].ended(30.0) == 4


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_machine_that_is_started_again_joins_again(start: Start, tmp_path: Path, victim: int) -> None:
    options = {"steps": 150, "restarts": 2}
    both = [start(index, **options) for index in (0, 1)]
    appears(tmp_path / "out" / f"step_{victim}")
    both[victim].process.kill()
    again = start(victim, **options)
    other = both[1 - victim]
    assert (again.ended(), other.ended()) == (0, 0), again.log + other.log
    assert (tmp_path / "out" / "sum_1").exists()
    assert "restart 1 of at most 2" in other.log


def test_a_run_begins_again_without_the_share(start: Start, tmp_path: Path) -> None:
    """The folder is gone from before the loss to the end: node 0's store outlives the attempt."""
    share = tmp_path / "share"
    share.mkdir()
    both = [start(index, steps=100, restarts=1, init_method=f"file://{share}/run.rdzv") for index in (0, 1)]
    appears(tmp_path / "out" / "step_1")
    share.rename(tmp_path / "away")
    os.kill(int((tmp_path / "out" / "pid_1").read_text()), signal.SIGKILL)
    assert [machine.ended() for machine in both] == [0, 0], both[0].log + both[1].log
    assert both[0].output() == "3 attempt 1 node 0 of 2 local 0\n"


@pytest.mark.slow
def test_restarts_end(start: Start, tmp_path: Path) -> None:
    """The victim is killed in the first attempt only, so that one restart is enough; with none the run ends."""
    both = [start(index, work="kill", steps=20, restarts=1) for index in (0, 1)]
    assert [machine.ended() for machine in both] == [0, 0], both[0].log
    assert both[0].output() == "3 attempt 1 node 0 of 2 local 0\n"


def test_nothing_begins_again_once_the_model_stands(start: Start, tmp_path: Path) -> None:
    """Rank 1 is killed between rank 0's word that the model is saved and the end of rank 0."""
    both = [start(index, work="late end", restarts=3) for index in (0, 1)]
    assert [machine.ended(120.0) for machine in both] == [4, 4]
    assert "ended by signal 9 (SIGKILL)\nThe model had been saved before" in both[0].log
    for machine in both:
        assert "rank 1 of 2 (node 1, local rank 0): expected a worker that trains to the end" in machine.log
        assert "restart 1" not in machine.log
    assert (tmp_path / "out" / "sum_0").read_text().startswith("3 attempt 0 ")


def test_told_to_end_before_workers_listen(start: Start, tmp_path: Path) -> None:
    """A worker that dies of the signal is not begun again on the other machine, which would wait in vain."""
    both = [start(index, work="late start", restarts=3) for index in (0, 1)]
    appears(tmp_path / "out" / "pid_1")
    both[0].says("start of 2 processes: waiting for rank 1; ")
    both[1].process.send_signal(signal.SIGTERM)
    assert [machine.ended(120.0) for machine in both] == [75, 75], both[0].log + both[1].log
    assert "ended by signal 15 (SIGTERM)\ntold to end" in both[0].log


def test_a_run_does_not_begin_again_below_the_mount_point_of_a_share_that_is_gone(start: Start, tmp_path: Path) -> None:
    (tmp_path / "share").mkdir()
    machine = start(0, 1, work="unmount", victim=0, steps=9, restarts=1, folder=str(tmp_path / "share"))
    assert machine.ended() == 4
    assert f"got {tmp_path / 'share'} is not the folder any more that it was when the run began" in machine.log
    assert list((tmp_path / "share").iterdir()) == []


def test_a_machine_that_cannot_start_workers_says_so_to_all(start: Start) -> None:
    both = [start(0), start(1, python="/no/such/python")]
    assert [machine.ended(120.0) for machine in both] == [4, 4]
    for machine in both:
        words = "node 1: expected a machine that can start its workers, got [Errno 2] No such file or directory"
        assert words in machine.log


@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_told_to_end(start: Start, tmp_path: Path, victim: int) -> None:
    both = [start(index, steps=2000, restarts=3) for index in (0, 1)]
    for rank in (0, 1):
        appears(tmp_path / "out" / f"step_{rank}")
    both[victim].process.send_signal(signal.SIGTERM)
    assert [machine.ended(30.0) for machine in both] == [75, 75], both[0].log + both[1].log


def test_by_address_without_a_file(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    options = {"init_method": f"tcp://localhost:{port}", "work": "kill", "steps": 5, "restarts": 1}
    both = [start(index, **options) for index in (1, 0)]
    assert [machine.ended(120.0) for machine in both] == [0, 0], both[0].log + both[1].log
    assert "restart 1 of at most 1" in both[1].log  # which listens at the same port again


@pytest.mark.parametrize(
    ("init_method", "code", "words"),
    [
        ("tcp://no.such.host.invalid:3000", 3, "host name 'no.such.host.invalid': expected a name that this machine"),
        ("tcp://192.0.2.200:3000", 3, "expected an address of node 0, which has "),
        ("tcp://localhost", 2, "expected file:///share/name.rdzv or tcp://host:port, got 'tcp://localhost'"),
        ("tcp://localhost:3000", 2, "rendezvous.port: expected 0 beside tcp://host:port, got 4000"),
        ("env://", 2, "env:// is for torchrun and accelerate launch"),
        ("file://share/run", 2, "Three slashes"),
        ("file:///no/such/folder/run", 3, "share /no/such/folder: expected a folder that every machine reaches"),
        (None, 2, "init_method: expected file:///share/name.rdzv where 2 machines meet, got nothing"),
    ],
)
def test_meeting_places_that_are_none(start: Start, init_method: str | None, code: int, words: str) -> None:
    settings = {"port": 4000} if init_method == "tcp://localhost:3000" else {}
    machine = start(0, init_method=init_method, settings=settings)
    assert machine.ended() == code
    assert words in machine.log


def test_the_store_ends_with_the_run() -> None:
    alone = Declaration(node=0, host="here", pid=1, processes=1, device="cpu")
    membership = Rendezvous(Node(), None, RendezvousConfig(), alone).join()
    where = (membership.record.address, membership.record.port)
    socket.create_connection(where, timeout=1).close()
    membership.finish()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(where, timeout=1)


def test_a_file_that_cannot_be_read_may_be_a_live_run(tmp_path: Path) -> None:
    """As a stale handle that stays: open fails, though the folder lists the file."""
    file = MeetingFile(tmp_path / "run.rdzv")
    file.path.symlink_to(file.path)
    one = Declaration(node=0, host="here", pid=1, processes=1, device="cpu")
    rendezvous = Rendezvous(Node(0, 2), f"file://{file.path}", RendezvousConfig(interface="lo"), one)
    with pytest.raises(RendezvousError, match=r"run.rdzv: expected a file that can be read, or none, got Too many"):
        rendezvous.join()
    assert file.path.is_symlink()


@pytest.mark.parametrize("index", [0, 1])
def test_an_interface_that_is_not_there(start: Start, index: int) -> None:
    machine = start(index, settings={"interface": "nosuch0"})
    assert machine.ended() == 3
    assert "rendezvous.interface: expected an interface or address of this machine: " in machine.log
    assert "lo (127.0.0.1)" in machine.log


def test_an_address_that_only_this_machine_reaches_is_told_only_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = [network.Address("eth0", "169.254.7.1"), network.Address("lo", "127.0.0.1")]
    monkeypatch.setattr(network, "addresses", lambda: known)
    words = (
        r"addresses of this machine: expected one that other machines reach, got eth0 \(169.254.7.1\), lo \(127.0.0.1\)"
    )
    with pytest.raises(RendezvousError, match=words):
        network.own_address(None)
    assert network.own_address("lo") == known[1]


def test_a_port_that_is_taken(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        machine = start(0, settings={"port": holder.getsockname()[1]})
        assert machine.ended() == 3
    assert "Choose another rendezvous.port" in machine.log


def test_a_share_that_cannot_be_written(start: Start, tmp_path: Path) -> None:
    if os.getuid() == 0:
        share = Path("/proc/self")  # where not even root can make a file
    else:
        share = tmp_path / "share"
        share.mkdir(mode=0o500)
    machine = start(0, init_method=f"file://{share}/run.rdzv")
    assert machine.ended() == 3
    assert f"share {share}: expected a folder that every machine reaches and node 0 can write" in machine.log


def test_a_record_is_read_while_it_is_replaced(tmp_path: Path) -> None:
    """A reader sees the old record or the new one, never a part."""
    file = MeetingFile(tmp_path / "run.rdzv")
    records = [Record.model_validate_json(record(port=port)) for port in (1, 2)]
    file.publish(records[0])
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            for one in records:
                file.publish(one)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        seen, deadline = [], time.monotonic() + 20
        while time.monotonic() < deadline and len({str(one) for one in seen}) < 2:
            seen += [file.read() for _ in range(300)]
    finally:
        stop.set()
        writer.join()
    assert {one.port for one in seen if isinstance(one, Record)} == {1, 2}
    assert [one for one in seen if not isinstance(one, Record)] == []


def test_no_record_is_written_below_the_mount_point_of_a_share_that_is_gone(tmp_path: Path) -> None:
    share = tmp_path / "share"
    share.mkdir()
    file, folder = MeetingFile(share / "run.rdzv"), FolderIdentity.of(share)
    share.rename(tmp_path / "unmounted")
    with pytest.raises(RendezvousError, match=f"share {share}: .* got OSError: {share} is not the folder any more"):
        file.publish(Record.model_validate_json(record()), folder)
    share.mkdir()
    with pytest.raises(RendezvousError, match="its share is not mounted, or the folder was replaced"):
        file.publish(Record.model_validate_json(record()), folder)
    assert list(share.iterdir()) == []


def test_only_its_own_record_is_removed(tmp_path: Path) -> None:
    file = MeetingFile(tmp_path / "run.rdzv")
    file.publish(Record.model_validate_json(record(nonce="mine")))
    file.remove("another's")
    assert file.path.exists()
    file.remove("mine")
    assert not file.path.exists()


def test_a_url_with_a_relative_path_is_refused() -> None:
    with pytest.raises(ConfigError, match="Three slashes"):
        MeetingFile.of("file:run.rdzv")
