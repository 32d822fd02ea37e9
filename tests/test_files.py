"""Folders that are replaced, at no step of which a reader finds a part of one, and folders that are locked."""

import fcntl
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO, Any
from unittest.mock import DEFAULT, Mock

import pytest
from helpers.disks import small_disk, unmount
from helpers.runs import ROOT

from reagent_lite import console, disk_room, whole_files
from reagent_lite.disk_room import require_writable
from reagent_lite.errors import ConfigError, FolderInUseError, UnavailableError
from reagent_lite.folder_identity import FolderIdentity, wait_for
from reagent_lite.folder_lock import alone_in
from reagent_lite.whole_files import appearing_file, appearing_folder, write_whole

CHANGES = ("mkdir", "rename", "symlink", "rmdir", "unlink", "fsync")
can_exchange = pytest.mark.parametrize("exchanges", [True, False])


@pytest.fixture
def model(tmp_path: Path, exchanges: bool, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that was written once, on a filesystem that can exchange two names or, as NFS, cannot."""
    if not exchanges:
        monkeypatch.setattr(whole_files, "_exchange", lambda *names: False)
    write(tmp_path / "model", "old")
    return tmp_path / "model"


def write(target: Path, word: str) -> None:
    with appearing_folder(target, served=True) as folder:
        for name in ("a", "b"):
            (folder / name).write_bytes(word.encode())


def words(folder: Path) -> list[str]:
    return [(folder / name).read_text() for name in ("a", "b")]


@can_exchange
def test_a_folder_is_whole_between_any_two_steps_of_its_writer(model: Path) -> None:
    contents = []
    for step in range(100):
        child = os.fork()
        if not child:
            kill_before(step)
            write(model, "new")
            os._exit(0)
        _, status = os.waitpid(child, 0)
        contents.append(words(model))
        if not status:
            break
    before = contents.count(["old", "old"])
    assert 0 < before < len(contents) < 100
    assert contents == [["old", "old"]] * before + [["new", "new"]] * (len(contents) - before)
    write(model, "next")
    assert words(model) == ["next", "next"]


def kill_before(step: int) -> None:
    """Ends this process before its step-th call that changes a folder."""
    calls = itertools.count()

    def before(*arguments: Any, **options: Any) -> Any:
        if next(calls) == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return DEFAULT  # the call itself

    for module, name in [*((os, name) for name in CHANGES), (whole_files, "_exchange")]:
        setattr(module, name, Mock(wraps=getattr(module, name), side_effect=before))


def test_what_killed_writers_left_of_a_file_goes_after_a_day(tmp_path: Path) -> None:
    for pid in (1, 2):
        (tmp_path / f".log[1].{pid}-a.tmp").touch()
    os.utime(tmp_path / ".log[1].1-a.tmp", (0, 0))
    write_whole(tmp_path / "log[1]", b"")
    assert sorted(os.listdir(tmp_path)) == [".log[1].2-a.tmp", "log[1]"]


KILLED = """
import os, signal, sys
from pathlib import Path
from reagent_lite.whole_files import appearing_file, appearing_folder, scratch_folder
folder = Path(sys.argv[1])
with scratch_folder(), appearing_folder(folder / "model") as model, appearing_file(folder / "log") as log:
    (model / "part").write_bytes(b"1")
    if sys.argv[2] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_left_goes_with_the_next_run(tmp_path: Path) -> None:
    for name in ("tmp", "out"):
        (tmp_path / name).mkdir()
    environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp"), "PYTHONPATH": str(ROOT)}
    for how, names in (("kill", 3), ("end", 2)):
        subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "out"), how], env=environment, check=False)
        assert len([*tmp_path.glob("*/*")]) == names
    assert sorted(tmp_path.glob("*/*")) == [tmp_path / "out" / "log", tmp_path / "out" / "model"]


def test_what_a_living_process_and_other_machines_have_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    living, dead = whole_files.process_mark(), ended_pid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: dead)
        abandoned = whole_files.process_mark()
        patch.setattr(socket, "gethostname", lambda: "another")
        elsewhere = whole_files.process_mark()
    for mark in (living, abandoned, elsewhere):
        (tmp_path / f".model.{mark}.tmp").mkdir()
    write(tmp_path / "model", "new")
    assert {*os.listdir(tmp_path)} == {f".model.{living}.tmp", f".model.{elsewhere}.tmp", "model"}


@can_exchange
def test_a_folder_of_a_failed_writer_vanishes_and_the_older_one_stays(model: Path) -> None:
    write(model, "old")
    before = set(model.parent.iterdir())
    assert {path.resolve() for path in before} == {model.resolve()}  # and what a link leads to
    with pytest.raises(AttributeError):
        write(model, None)  # type: ignore[arg-type] # fails inside the block
    assert (words(model), set(model.parent.iterdir())) == (["old", "old"], before)


@pytest.mark.parametrize("exchanges", [False])
def test_a_users_link_is_followed_and_stays(model: Path, tmp_path: Path) -> None:
    link = tmp_path / "elsewhere" / "current"
    link.parent.mkdir()
    link.symlink_to(model)
    write(link, "new")
    assert (link.readlink(), words(link), words(model)) == (model, ["new", "new"], ["new", "new"])


def test_a_folder_of_before_becomes_a_link_where_names_cannot_be_exchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "model", "old")
    monkeypatch.setattr(whole_files, "_exchange", lambda *names: False)
    write(tmp_path / "model", "new")
    assert (words(tmp_path / "model"), (tmp_path / "model").is_symlink()) == (["new", "new"], True)
    assert len(os.listdir(tmp_path)) == 2


def ended_pid() -> int:
    with subprocess.Popen(["true"]) as process:
        return process.pid


@contextmanager
def locked(folder: Path, host: str, pid: int) -> Iterator[IO[str]]:
    """Locks the folder as a run of a host's process would, and yields the file whose closing gives the lock back."""
    (folder / ".lock").write_text(json.dumps({"host": host, "pid": pid, "since": "2026-11-22T00:00:00+00:00"}))
    with (folder / ".lock").open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


@pytest.mark.parametrize("holder", ["another machine", "one of the same name", "a container of the same name and pid"])
def test_a_machine_that_may_be_dead_is_waited_for(
    tmp_path: Path, holder: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lock is given back by the server, here by the other process, a moment after the holder was named."""
    host = "elsewhere" if holder == "another machine" else socket.gethostname()
    pid = ended_pid() if holder == "one of the same name" else os.getpid()
    with locked(tmp_path, host, pid) as other:
        monkeypatch.setattr(time, "sleep", lambda seconds: other.close())
        with alone_in(tmp_path, "model_output_path"):
            assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()
    (text,) = caplog.messages
    assert f"{tmp_path} is in use by the run of host {host}, pid {pid}, since 2026-11-22T00:00:00+00:00; wait" in text


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds of all waits so far, which are over at once; the clock goes on by nothing else."""
    seconds: list[float] = []
    monkeypatch.setattr(time, "sleep", seconds.append)
    monkeypatch.setattr(time, "monotonic", lambda: sum(seconds))
    return seconds


def test_a_living_process_of_this_machine_is_refused_soon(tmp_path: Path, waits: list[float]) -> None:
    """After the 5 seconds that a killed process takes to end, not after the 120 that a server keeps its lock."""
    refused = pytest.raises(FolderInUseError, match=f"pid {os.getppid()}")
    with locked(tmp_path, socket.gethostname(), os.getppid()), refused, alone_in(tmp_path, "model_output_path"):
        pass
    assert 5 <= sum(waits) < 6


def test_what_cannot_be_locked_is_found_and_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A folder of the lock's name is what root, too, cannot open for writing."""
    (tmp_path / ".lock").mkdir()
    with alone_in(tmp_path, "model_output_path"):
        (text,) = caplog.messages
    assert text.startswith(f"{tmp_path / '.lock'} cannot be locked (Is a directory): make sure")


@pytest.mark.parametrize("content", ["important", '{"host": "mine"}', "[]"])
@pytest.mark.parametrize("linked", [True, False])
def test_files_of_others_are_not_taken_for_a_lock(tmp_path: Path, content: str, linked: bool) -> None:
    other = tmp_path / "other" if linked else tmp_path / ".lock"
    other.write_text(content)
    if linked:
        (tmp_path / ".lock").symlink_to(other)
    with pytest.raises(ConfigError, match=r"log: expected .*\.lock to be a lock file, got"), alone_in(tmp_path, "log"):
        pass
    assert (other.read_text(), sorted(os.listdir(tmp_path))) == (content, sorted({".lock", other.name}))


def test_a_lock_is_no_link_to_a_new_file_and_no_pipe(tmp_path: Path) -> None:
    (tmp_path / ".lock").symlink_to(tmp_path / "new")
    with pytest.raises(ConfigError, match="to be a lock file"), alone_in(tmp_path, "log"):
        pass
    (tmp_path / ".lock").unlink()
    os.mkfifo(tmp_path / ".lock")
    with pytest.raises(ConfigError, match="to be a lock file"), alone_in(tmp_path, "log"):
        pass
    assert os.listdir(tmp_path) == [".lock"]


def test_a_lock_without_content_and_one_of_an_ended_run_are_used(tmp_path: Path) -> None:
    (tmp_path / ".lock").touch()
    for _ in range(2):
        with alone_in(tmp_path, "log"):
            assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()


def test_a_probe_writes_into_no_file_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link of the probe's name, and the name of the probe of earlier versions."""
    other = tmp_path / "other"
    other.write_text("important")
    monkeypatch.setattr(disk_room, "process_mark", lambda: "7-mark")
    for name in (f".writable.{os.getpid()}", ".writable.7-mark.tmp"):
        (tmp_path / name).symlink_to(other)
    with pytest.raises(ConfigError, match="File exists"):
        require_writable(tmp_path, "log")
    assert (other.read_text(), (tmp_path / ".writable.7-mark.tmp").is_symlink()) == ("important", True)


def test_the_folder_is_free_again_after_an_error(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), alone_in(tmp_path, "model_output_path"):
            _ = 1 // 0  # refused, the second time would be a ConfigError


def test_a_folder_is_known_again_on_another_device_and_an_empty_one_is_not(tmp_path: Path) -> None:
    """Before a run makes its folder, that is the folder above, by device and inode; then a marker counts."""
    share, folder = tmp_path / "share", tmp_path / "share" / "runs" / "out"
    share.mkdir()
    early = FolderIdentity.of(folder)
    early.require()
    folder.mkdir(parents=True)
    (folder / "file").touch()
    identity = FolderIdentity.mark(folder)
    assert identity == FolderIdentity.mark(folder)

    def require_known() -> None:
        for each in (early, identity):
            each.require()
        assert {*identity.names()} == {"file", identity.marker}

    require_known()
    unmount(share)
    for ask in (early.require, identity.require, identity.names):
        with pytest.raises(OSError, match=f"{share}.* its share is not mounted"):
            ask()
    share.rmdir()
    with pytest.raises(OSError, match="its share is not mounted"):
        identity.names()
    shutil.copytree(tmp_path / "unmounted", share)
    require_known()


@pytest.mark.parametrize("appearing", [appearing_file, appearing_folder])
def test_what_appears_within_a_folder_does_not_make_one_for_a_share_that_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, appearing: Callable[..., AbstractContextManager[Any]]
) -> None:
    folder = tmp_path / "share" / "data"
    folder.mkdir(parents=True)
    within = FolderIdentity.mark(folder)
    with appearing(folder / "first", within=within):
        pass
    monkeypatch.setattr(FolderIdentity, "require", lambda self: unmount(folder.parent))  # right behind the check
    with pytest.raises(FileNotFoundError), appearing(folder / "second", within=within):
        pass
    assert {path.relative_to(tmp_path) for path in tmp_path.rglob("*")} == {
        *map(Path, ("share", "unmounted", "unmounted/data", "unmounted/data/first", f"unmounted/data/{within.marker}"))
    }


def test_two_processes_that_mark_a_folder_at_the_same_moment_both_find_it_again(tmp_path: Path) -> None:
    first = FolderIdentity.mark(tmp_path)
    (tmp_path / ".folder-000000000000").touch()  # by another one that had listed the folder before
    second = FolderIdentity.mark(tmp_path)
    assert first != second
    first.require()
    second.require()


def test_a_folder_that_is_away_is_waited_for_and_named_at_the_end(
    tmp_path: Path, waits: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "out").write_text("a file")
    with pytest.raises(UnavailableError) as caught:
        require_writable(tmp_path / "out", "model_output_path", again=True)
    assert 600 <= sum(waits) < 603
    (problem,) = caught.value.problems
    assert (problem.where, caught.value.exit_code) == ("model_output_path", 4)
    assert f"{problem.got}; waited 12 s so far" in caplog.text
    ask = Mock(side_effect=[OSError(116, "Stale file handle"), OSError("not mounted"), 7])
    assert wait_for(ask, tmp_path, "model_output_path") == 7


def test_a_disk_that_is_full_at_a_restart_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_disk(tmp_path / "disk", size="2m", files=20) as disk:
        filler = disk / "filler"
        filler.write_bytes(bytes((2 << 20) - (64 << 10)))
        monkeypatch.setattr(console.time, "sleep", lambda seconds: filler.unlink())
        require_writable(disk, "model_output_path", again=True)
        assert os.listdir(disk) == []
