"""Machines that meet through a file: present, missing and foreign machines; real launchers on loopback."""

import json
import re
import signal
import socket
import stat
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from helpers.doctors import RECORD, store
from helpers.ranks import free_port
from helpers.waiting import wait_until
from machines import ONE, Start, all_end, working

from reagent_lite.config.rendezvous import RendezvousConfig
from reagent_lite.distributed import network
from reagent_lite.distributed.key_value_store import connect, reach
from reagent_lite.distributed.meeting import Rendezvous, _Arrivals
from reagent_lite.distributed.meeting_file import MeetingFile, Record
from reagent_lite.distributed.membership import Heartbeats
from reagent_lite.distributed.nodes import Node
from reagent_lite.errors import ConfigError, RendezvousError
from reagent_lite.folder_identity import FolderIdentity

TOKEN = "ab" * 32
OLD = json.dumps(RECORD)
EPOCHS = {"config": {"epochs": 1, "seed": 1}}


def declared(folder: Path, node: int) -> None:
    """Waits until a machine is known to node 0's store."""
    file = MeetingFile(folder / "run.rdzv")
    wait_until(lambda: isinstance(file.read(), Record), lambda: "no record")
    record: Any = file.read()
    link = connect(record.address, record.port, record.token, 15.0)
    wait_until(lambda: link.get(f"node/{node}") is not None, lambda: f"node {node} never declared itself")


def rendezvous_of(index: int, init_method: str | None, **settings: Any) -> Rendezvous:
    return Rendezvous(Node(index, 2), init_method, RendezvousConfig(**{"interface": "lo", **settings}), ONE)


@pytest.mark.parametrize("before", ["no record at all", OLD])
def test_machines_meet_whatever_the_file_was(tmp_path: Path, start: Start, before: str) -> None:
    """Arbitrary text, and a stale record with a closed port; ranks are prefix sums of uneven process counts."""
    (tmp_path / "run.rdzv").write_text(before)
    last = start(1, processes=2, versions={"torch": "2.13.1"})
    time.sleep(0.5)
    first = start(0, processes=1, versions={"torch": "2.13.0"})  # node 0 last
    all_end([first, last], 0)
    # ranks 1 + 2 + 3
    assert (first.communicate()[0], last.communicate()[0]) == ("6 attempt 0 node 0 of 2 local 0\n", "")
    assert (tmp_path / "out" / "sum_2").read_text() == "6 attempt 0 node 1 of 2 local 1"
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]
    assert ("run old of host elsewhere" in first.said) == (before == OLD)
    assert "torch is 2.13.0 on node 0" in last.said


@pytest.mark.parametrize("silent", [True, False])
def test_what_listens_where_the_old_store_was_is_not_joined(monkeypatch: pytest.MonkeyPatch, silent: bool) -> None:
    """A server that accepts and stays silent; and another run's store."""
    monkeypatch.setattr("reagent_lite.distributed.key_value_store._OPEN_SECONDS", 1.0)
    with store() as other, socket.create_server(("127.0.0.1", 0)) as server:
        other.set("nonce", "another run's")
        port = server.getsockname()[1] if silent else other.port
        assert reach(Record.model_validate(RECORD | {"port": port})) is None
        assert other.list_keys() == ["nonce"]


def test_a_silent_service_at_the_address_of_node_0_takes_no_longer_than_an_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("reagent_lite.distributed.meeting.ANSWER_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        begun = time.monotonic()
        with pytest.raises(RendezvousError, match=f"{address} is not a run"):
            rendezvous_of(1, f"tcp://{address}", join_timeout_seconds=1).join()
        assert time.monotonic() - begun < 10  # torch would connect again for 15 s


def test_the_file_is_private_and_names_who_listens(tmp_path: Path, start: Start) -> None:
    first = start(0)
    first.logs("listens at")
    file = tmp_path / "run.rdzv"
    record: Any = MeetingFile(file).read()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert (record.address, record.interface, record.num_nodes, record.pid) == ("127.0.0.1", "lo", 2, first.pid)
    listening = [each.laddr for each in psutil.net_connections("tcp4") if each.status == psutil.CONN_LISTEN]
    assert [address.ip for address in listening if address.port == record.port] == ["127.0.0.1"]
    file.unlink()
    first.logs("was removed while machines meet")
    first.send_signal(signal.SIGTERM)
    assert (first.ended(), file.exists()) == (75, False)


def test_without_node_0_the_others_log_what_they_found(tmp_path: Path) -> None:
    (tmp_path / "run.rdzv").write_text(OLD)
    with pytest.raises(RendezvousError, match="within 1 s, got run old of host elsewhere, pid 77"):
        rendezvous_of(1, f"file://{tmp_path}/run.rdzv", join_timeout_seconds=1).join()


def test_machines_of_a_number_that_is_taken_or_beyond_the_count(start: Start, tmp_path: Path) -> None:
    """Only they get an error: node 0 does not see the second, and the run is not disturbed."""
    came = [start(0, 3), start(1, 3, host="alpha")]
    declared(tmp_path, 1)
    beta, beyond = start(1, 3, host="beta"), start(3, 4)
    all_end([beta, beyond], 3)
    assert f"taken by host alpha, pid {came[1].pid}; " in beta.said
    assert "num_nodes: expected 3 as on node 0 (host " in beyond.said
    all_end([*came, start(2, 3)], 0)


@pytest.mark.parametrize(("victim", "number"), [(1, 9), (1, signal.SIGSTOP), (0, 9)])
def test_a_machine_that_is_gone_or_silent_while_machines_meet(
    start: Start, tmp_path: Path, victim: int, number: int
) -> None:
    """A killed machine starts again: its number is free, or its new store is found. A stopped one is accepted again."""
    both = [start(0, 3), start(1, 3)]
    declared(tmp_path, 1)
    both[victim].send_signal(number)
    both[1 - victim].logs("its number is free again" if victim else "polling again")
    if number == signal.SIGSTOP:
        both[victim].send_signal(signal.SIGCONT)
    else:
        both[victim] = start(victim, 3)
    all_end([*both, start(2, 3)], 0)


def test_two_jobs_on_one_file(start: Start, tmp_path: Path) -> None:
    running = working(start, tmp_path, steps=2000)
    second = start(0)
    assert second.ended() == 3
    assert re.search(rf"pid {running[0].pid}, at 127.0.0.1:(.|\n)*--force", second.said)
    forced = start(0, force=True)
    all_end(running, 4)
    assert all(re.search(rf"pid {forced.pid}.*by --force|by --force.*pid {forced.pid}", each.said) for each in running)
    all_end([start(1), forced], 0)


@pytest.mark.parametrize("by_address", [False, True])
def test_machines_of_two_jobs_never_mix(start: Start, by_address: bool) -> None:
    """Both jobs have the same config. Machine 1 of the second job ends with a message; those of the first meet."""
    method = {"init_method": f"tcp://localhost:{free_port()}"} if by_address else {}
    first = start(0, job="first", **method)
    first.logs("listens at")
    other = start(1, job="second", **method)
    assert other.ended(25) == 3
    assert re.search(rf"job 'second', got job 'first' \(run .*pid {first.pid}", other.said)
    all_end([start(1, job="first", **method), first], 0)


def test_two_jobs_that_start_in_the_same_instant(start: Start) -> None:
    """Both find no file and publish a record; the job whose record was replaced ends, the other job's machines meet."""
    jobs = [start(0), start(0)]
    wait_until(lambda: any(job.poll() is not None for job in jobs), lambda: jobs[0].said + jobs[1].said, 60)
    loser, winner = sorted(jobs, key=lambda job: job.poll() is None)
    assert loser.ended() == 3
    assert re.search(rf"pid {winner.pid}(.|\n)*Give each job its own file", loser.said)
    all_end([start(1), winner], 0)


@pytest.mark.parametrize(
    ("machines", "code", "words"),
    [
        ([EPOCHS, {"config": {"epochs": 2, "seed": 1}}], 3, "config key epochs: expected 1 as on node 0 (host host0"),
        ([EPOCHS, {**EPOCHS, "problem": "data.json: expected rows"}], 2, "data.json: expected rows"),
        ([EPOCHS, {**EPOCHS, "count": 3}], 3, "num_nodes: expected 2 as on node 0 (host "),
        ([{}, {"python": "/no/such/python"}], 4, "node 1: expected a machine that can start its workers"),
        ([{"count": 3, "settings": {"join_timeout_seconds": 2}}, {"index": 2, "count": 3}], 3,
         "all of them within 2 s, got no sign of node 1"),
    ],
)  # fmt: skip
def test_why_machines_do_not_run_together_is_said_by_all(
    start: Start, machines: list[dict[str, Any]], code: int, words: str
) -> None:
    started = [start(**{"index": number, **options}) for number, options in enumerate(machines)]
    all_end(started, code)
    assert [(words in machine.said, "config key seed" in machine.said) for machine in started] == [(True, False)] * 2


def test_by_address_without_a_file(start: Start) -> None:
    options = {"init_method": f"tcp://localhost:{free_port()}", "work": "kill", "steps": 5, "restarts": 1}
    both = [start(index, **options) for index in (1, 0)]
    all_end(both, 0)
    assert "restart 1 of at most 1" in both[1].said  # which listens at the same port again


@pytest.mark.parametrize(
    ("index", "init_method", "settings", "code", "words"),
    [
        (0, "tcp://no.such.host.invalid:3000", {}, 3, "host name 'no.such.host.invalid'"),
        (0, "tcp://192.0.2.200:3000", {}, 3, "expected an address of node 0"),
        (0, "tcp://localhost", {}, 2, "got 'tcp://localhost'"),
        (0, "tcp://localhost:3000", {"port": 4000}, 2, "rendezvous.port: expected 0"),
        (0, "env://", {}, 2, "env:// is for torchrun"),
        (0, "file://share/run", {}, 2, "Three slashes"),
        (0, "file:///no/such/folder/run", {}, 3, "share /no/such/folder: expected"),
        (0, "file:///proc/self/run", {}, 3, "/proc/self: expected a folder"),
        (0, "file:///tmp", {}, 3, "init_method /tmp: expected a file"),
        (0, None, {}, 2, "for 2 machines, got nothing"),
        (0, "file:///tmp/run", {"interface": "no0"}, 3, "an interface or address of this machine: "),
        (1, "file:///tmp/run", {"interface": "no0"}, 3, "lo (127.0.0.1)"),
    ],
)
def test_places_where_machines_cannot_meet(
    index: int, init_method: str | None, settings: dict[str, Any], code: int, words: str
) -> None:
    with pytest.raises((RendezvousError, ConfigError), match=re.escape(words)) as caught:
        rendezvous_of(index, init_method, **settings).preflight()
    assert caught.value.exit_code == code


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as holder,
        pytest.raises(RendezvousError, match="Choose another rendezvous"),
    ):
        rendezvous_of(0, f"file://{tmp_path}/run.rdzv", port=holder.getsockname()[1]).join()


def test_an_address_that_only_this_machine_reaches_is_given_only_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listed = [network.Address("eth0", "169.254.7.1"), network.Address("lo", "127.0.0.1")]
    monkeypatch.setattr(network, "addresses", lambda: listed)
    with pytest.raises(RendezvousError, match=r"got eth0 .*, lo \("):
        network.local_address(None)
    assert network.local_address("lo") == listed[1]


def test_the_store_ends_with_the_run() -> None:
    membership = Rendezvous(Node(), None, RendezvousConfig(), ONE).join()
    where = (membership.record.address, membership.record.port)
    socket.create_connection(where, timeout=1).close()
    membership.finish()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(where, timeout=1)


# ---- the file


@pytest.mark.parametrize("stays", [False, True])
def test_a_file_that_cannot_be_read_may_be_a_live_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stays: bool
) -> None:
    """Like a stale handle on NFS: open fails although the folder lists the file. Reading is tried again for a while."""
    file = tmp_path / "run.rdzv"
    file.symlink_to(file)

    def wait(seconds: float, sleep: Callable[[float], None] = time.sleep) -> None:
        if file.is_symlink() and not stays:
            file.unlink()
            file.write_text(OLD)
        sleep(min(seconds, 0.05))

    monkeypatch.setattr(time, "sleep", wait)
    got = "got Too many" if stays else "no sign of node 1"  # it got past the error, and waited
    with pytest.raises(RendezvousError, match=got):
        rendezvous_of(0, f"file://{file}", join_timeout_seconds=1).join()
    assert file.is_symlink() == stays


def test_a_record_is_read_while_it_is_replaced(tmp_path: Path) -> None:
    """A reader sees the old or the new record, never a part; a run removes only its own record."""
    file = MeetingFile(tmp_path / "run.rdzv")
    records = [Record.model_validate(RECORD | {"nonce": nonce}) for nonce in ("mine", "another's")]
    file.publish(records[0])
    with ThreadPoolExecutor() as pool:
        writing = pool.submit(lambda: [file.publish(records[number % 2 - 1]) for number in range(101)])
        while not writing.done():
            assert file.read() in records
    for nonce, exists in (("mine", True), ("another's", False)):
        file.remove(nonce)
        assert file.path.exists() == exists


def test_no_record_is_written_below_the_mount_point_of_a_share_that_is_gone(tmp_path: Path) -> None:
    share = tmp_path / "share"
    share.mkdir()
    folder = FolderIdentity.of(share)
    share.rename(tmp_path / "unmounted")
    share.mkdir()
    with pytest.raises(RendezvousError, match=f"share {share}: .* its share is not mounted"):
        MeetingFile(share / "run.rdzv").publish(Record.model_validate(RECORD), folder)
    assert not any(share.iterdir())


# ---- the store


def test_a_claim_counts_as_a_sign_of_life(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Node 0 polls between a late machine's claim and its first beat, which never comes."""
    now, texts = [100.0], dict[str, str]()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    store: Any = SimpleNamespace(get=texts.get, set=texts.__setitem__, delete=lambda key: texts.pop(key, None))
    claim = ONE.model_copy(update={"node": 1, "host": "host1"}).model_dump_json()
    arrivals = _Arrivals(3, RendezvousConfig(heartbeat_seconds=0.1, lost_after_seconds=0.6))
    for after, claimed in ((0.1, False), (1.0, False), (0.1, True), (0.3, True), (0.5, False)):
        texts |= {"node/1": claim} if claimed else {}
        now[0] += after
        arrivals.update(store)
        assert ("node/1" in texts) == claimed
    (message,) = caplog.messages
    assert "node 1 (host host1, pid 1) went silent" in message


@pytest.mark.parametrize("every", [0.2, 3.0])
def test_silence_is_noticed_however_seldom_one_polls(every: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A poll every 3 s does not count as a pause of the poller; after 10 s without a beat the machine is lost."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    beats = Heartbeats([1], 10.0, polled_every=every)
    for until, lost in ((109.0, []), (114.0, [1])):
        while now[0] < until:
            now[0] += every
            beats.note({1: "1"})
        assert beats.find_lost() == lost
    now[0] += every + 2.5  # the polling machine has slept: the silence may be its own
    beats.note({1: "1"})
    assert beats.find_lost() == []


def test_what_a_stranger_writes_counts_as_absent() -> None:
    """Everyone who reaches the port can list, read, copy and write, but does not know the token."""
    with store() as shared:
        ours, stranger = (connect("127.0.0.1", shared.port, token, 15.0) for token in (TOKEN, ""))
        ours.set("beat/1", "join.run1.1")
        assert TOKEN.encode() not in shared.get("0/beat/1")
        shared.set("0/go", shared.get("0/beat/1"))
        shared.set("0/abort", '{"reason": "r", "exit_code": 0, "restart": false}')
        stranger.set("node/1", "stranger")
        assert [ours.get(key) for key in ("beat/1", "go", "abort", "node/1")] == ["join.run1.1", None, None, None]
        assert [ours.set_once("abort", text) for text in ("first", "second")] == ["first", "first"]
