"""Launchers and their workers: their number, causes of their end, every launcher's log, and restarts of a run."""

import os
import re
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.interpreters import Interpreter
from helpers.waiting import runs
from machines import ONE, Start, all_end, working

from reagent_lite import memory
from reagent_lite.config import DqnConfig
from reagent_lite.config.rendezvous import RendezvousConfig
from reagent_lite.config.training import TrainingConfig
from reagent_lite.distributed import launcher
from reagent_lite.distributed.gpus import used_gpus
from reagent_lite.distributed.launcher import Processes, choose_processes
from reagent_lite.distributed.meeting import Rendezvous
from reagent_lite.distributed.membership import Failure, Membership
from reagent_lite.distributed.nodes import Node
from reagent_lite.errors import ConfigError, Preempted

RANK_1 = "rank 1 of 2 (node 1, local rank 0): "


@pytest.mark.parametrize(("visible", "index"), [(4, 3), (1, 0)])
def test_a_process_that_sees_one_gpu_takes_it(visible: int, index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the third of four that Slurm starts with --gpus-per-task=1."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    assert Processes(4, "cuda").device(3) == torch.device("cuda", index)
    assert Processes(4, "cpu").device(3) == torch.device("cpu")


def test_gpus_are_those_that_torch_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA may count the fastest first where nvidia-smi counts slots: on a machine of mixed cards they differ."""
    uuids = ["bbbb", "aaaa"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(uuids))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=uuids[index]))
    assert (used_gpus(1), used_gpus(4)) == (("GPU-bbbb",), ("GPU-bbbb", "GPU-aaaa"))


@pytest.mark.parametrize(
    ("keys", "gpus", "expected"),
    [
        # their number, their device, and whether a note says why it is no GPU
        ({"use_all_avail_gpus": True}, 4, (4, "cuda", False)),
        ({}, 4, (1, "cuda", False)),
        ({"use_all_avail_gpus": True, "num_processes_per_node": 2}, 4, (2, "cuda", False)),
        ({"use_all_avail_gpus": True, "use_gpu": False}, 4, (1, "cpu", False)),
        ({"use_all_avail_gpus": True}, 0, (1, "cpu", True)),
        ({"use_all_avail_gpus": True, "num_processes_per_node": 3}, 0, (3, "cpu", True)),
        ({"use_gpu": False, "num_processes_per_node": 2}, 0, (2, "cpu", False)),
    ],
)
def test_choose_processes(
    monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], gpus: int, expected: tuple[int, str, bool]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    chosen = choose_processes(DqnConfig.model_construct(**keys))
    assert (chosen.count, chosen.device_type, bool(chosen.note)) == expected


def test_more_gpu_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="at most the 2 GPUs"):
        choose_processes(DqnConfig.model_construct(num_processes_per_node=3))


@pytest.mark.parametrize("keys", [{"num_processes_per_node": 2}, {"num_nodes": 2}])
def test_batch_normalization_over_cpu_processes_is_refused_before_any_starts(keys: dict[str, Any]) -> None:
    config = DqnConfig.model_construct(use_gpu=False, training=TrainingConfig(use_batch_norm=True), **keys)
    with pytest.raises(ConfigError, match="use_batch_norm: expected false with several CPU processes"):
        choose_processes(config)


def test_a_worker_that_the_system_ended_for_lack_of_memory_is_named_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    (tmp_path / "memory.events").write_text("oom_kill 1\n")
    command = ["sh", "-c", f"echo oom_kill 2 > {tmp_path}/memory.events; kill -9 $$"]
    alone = Rendezvous(Node(), None, RendezvousConfig(), ONE).join()
    failure = launcher.Attempt(command, 1, alone, 9.0, launcher.StopRequest()).run(None)
    alone.finish()
    assert re.match(r"rank 0 of 1: .*signal 9 \(SIGKILL\) by the system, because the memory limit", failure.reason)


@pytest.mark.parametrize(("parent", "code", "output"), [("os.getppid()", 0, "goes on\n"), (1, -signal.SIGKILL, "")])
def test_a_worker_whose_launcher_died_while_it_imported_ends(
    tmp_path: Path, parent: object, code: int, output: str
) -> None:
    program = (
        f"import os; os.environ['REAGENT_LITE_LAUNCHER_PID'] = str({parent})\n"
        "from reagent_lite.distributed.worker import end_with_parent; end_with_parent(); print('goes on')"
    )
    variables = {"REAGENT_LITE_WORKER_FOLDER": str(tmp_path), "OMP_NUM_THREADS": "1"}
    worker = Interpreter(["-c", program], env=os.environ | variables)
    assert (worker.wait(60), worker.communicate()[0]) == (code, output)


def test_a_signal_while_a_run_waits_to_begin_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rendezvous = Rendezvous(Node(), None, RendezvousConfig(), ONE)
    joins = [rendezvous.join()]

    def join(_: Rendezvous) -> Membership:
        if not joins:  # the others have not come back yet
            os.kill(os.getpid(), signal.SIGTERM)
            rendezvous.interrupted()
        return joins.pop()

    monkeypatch.setattr(Rendezvous, "join", join)
    monkeypatch.setattr(launcher.Attempt, "run", lambda self, folder: Failure(reason="node 1 went away"))
    monkeypatch.setattr(Membership, "leave", lambda self, restart: restart)
    with pytest.raises(Preempted, match="SIGTERM: run the same command again"):
        launcher.launch([], 1, rendezvous, restarts=3)


# ---- runs of two machines


@pytest.mark.parametrize(
    ("work", "code", "words"),
    [
        ("stop", 4, RANK_1 + "expected a running worker"),
        ("hang", 2, RANK_1 + "file.json:3: "),
    ],
)
def test_every_launcher_logs_why(start: Start, tmp_path: Path, work: str, code: int, words: str) -> None:
    both = working(start, tmp_path, work=work, steps=1000)
    all_end(both, code)
    assert [machine.said.count(words) for machine in both] == [1, 1]


@pytest.mark.parametrize(("victim", "number"), [(0, 9), (1, signal.SIGSTOP)])
def test_a_launcher_that_is_killed_or_stopped_is_lost(start: Start, tmp_path: Path, victim: int, number: int) -> None:
    """Its workers end with it; the other machine names it, and a stopped launcher notices it when it continues."""
    both = working(start, tmp_path, steps=1000)
    failed = time.monotonic()
    both[victim].send_signal(number)
    all_end([both[1 - victim]], 4)
    assert time.monotonic() - failed < 15
    words = "lost node 0: run " if victim == 0 else f"node 1 (host host1, pid {both[1].pid}): no heartbeat"
    assert words in both[1 - victim].said
    if number == signal.SIGSTOP:
        both[victim].send_signal(signal.SIGCONT)
        all_end([both[victim]], 4)
    assert not runs(int((tmp_path / "out" / f"pid_{victim}").read_text()))


@pytest.mark.parametrize(("machines", "work"), [(1, "stop"), (2, "sleep")])
def test_a_rank_that_hangs_is_named_by_all_and_not_those_who_wait_for_it(
    start: Start, machines: int, work: str
) -> None:
    """The launcher does not look for stopped processes here: it would name them after lost_after_seconds."""
    settings = {"lost_after_seconds": 60.0 if machines == 1 else 2.0}
    options = {"processes": 3 - machines, "steps": 9, "work": work, "wait": 3, "settings": settings}
    begun = [start(index, machines, **options) for index in range(machines)]
    all_end(begun, 4)
    where = "" if machines == 1 else r" \(node 1, local rank 0\)"
    for machine in begun:
        blamed = re.findall(r"(?m)^rank .*", machine.said)[0]
        assert re.match(rf"rank 1 of 2{where}: expected progress within 3 s.*after step 3", blamed)
        assert "rank 0 of 2" in machine.said  # what it met


def test_node_0_that_is_started_again_is_joined_again(start: Start, tmp_path: Path) -> None:
    options = {"steps": 2000, "restarts": 2}
    first, other = working(start, tmp_path, **options)
    first.kill()
    other.logs("restart 1 of at most 2")
    (tmp_path / "out" / "end").touch()
    all_end([start(0, **options), other], 0)


def test_a_run_begins_again_without_the_share(start: Start, tmp_path: Path) -> None:
    """The folder is missing from before the loss until the end: node 0's store outlives the attempt."""
    share = tmp_path / "share"
    share.mkdir()
    both = working(start, tmp_path, steps=2000, restarts=1, init_method=f"file://{share}/run.rdzv")
    share.rename(tmp_path / "away")
    os.kill(int((tmp_path / "out" / "pid_1").read_text()), signal.SIGKILL)
    both[0].logs("restart 1 of at most 1")
    (tmp_path / "out" / "end").touch()
    all_end(both, 0)
    assert both[0].communicate()[0] == "3 attempt 1 node 0 of 2 local 0\n"


@pytest.mark.parametrize(
    ("work", "code", "words"),
    [
        ("late end", 4, "got ended by signal 9 (SIGKILL)"),
        ("late signal", 75, "stopped by a signal; "),  # the run is not marked as ended yet
    ],
)
def test_nothing_begins_again_once_the_model_is_saved(
    start: Start, tmp_path: Path, work: str, code: int, words: str
) -> None:
    """Rank 1 is killed or stopped between rank 0's report that the model is saved and the end of rank 0."""
    both = [start(index, work=work, restarts=3) for index in (0, 1)]
    all_end(both, code)
    assert ("\nThe model was already saved" in both[0].said) == (code == 4)
    assert [(words in machine.said, "restart 1" in machine.said) for machine in both] == [(True, False)] * 2


@pytest.mark.parametrize("listening", [False, True])
def test_a_signal_to_one_launcher_ends_the_run_with_75(start: Start, tmp_path: Path, listening: bool) -> None:
    """A worker killed by the signal does not restart the run: the other machine would wait in vain."""
    sign, work = ("step", "sum") if listening else ("pid", "late start")
    both = working(start, tmp_path, sign, work=work, steps=2000, restarts=3)
    both[1].send_signal(signal.SIGTERM)
    all_end(both, 75)
    assert listening or "ended by signal 15 (SIGTERM)\nstopped by a signal" in both[0].said


def test_a_run_does_not_begin_again_below_the_mount_point_of_a_share_that_is_gone(start: Start, tmp_path: Path) -> None:
    (tmp_path / "share").mkdir()
    machine = start(0, 1, work="unmount", victim=0, steps=9, restarts=1, folder=str(tmp_path / "share"), away=3.0)
    assert machine.ended() == 4
    assert f"got {tmp_path / 'share'} is no longer the folder" in machine.said
    assert not any((tmp_path / "share").iterdir())


def test_a_run_begins_again_once_its_share_is_mounted_again(start: Start, tmp_path: Path) -> None:
    """As another device; the run made its folder after the launcher had begun."""
    share = tmp_path / "share"
    share.mkdir()
    machine = start(0, 1, work="unmount", victim=0, steps=9, restarts=1, folder=str(share), output="out")
    machine.logs("restart 1 of at most 1")
    time.sleep(2)
    assert machine.poll() is None, machine.said
    share.rmdir()  # it is empty
    shutil.copytree(tmp_path / "share.gone", share)
    assert machine.ended() == 0, machine.said
    assert (tmp_path / "out" / "sum_0").read_text().startswith("1 attempt 1 ")
