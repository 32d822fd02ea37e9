"""Workers of one machine: counts, failures with their reason, and gradients that do not depend on the division."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from oracles.doctors import RECORD
from safetensors.torch import load_file

from reagent_lite import memory
from reagent_lite.config.rendezvous import RendezvousConfig
from reagent_lite.distributed import launcher
from reagent_lite.distributed.group import Group, Place
from reagent_lite.distributed.launcher import choose_processes
from reagent_lite.distributed.link import Link
from reagent_lite.distributed.meeting_file import Record
from reagent_lite.distributed.membership import Abort, Membership
from reagent_lite.distributed.nodes import Node
from reagent_lite.distributed.rendezvous import Rendezvous
from reagent_lite.distributed.verdict import Declaration
from reagent_lite.distributed.workers import Workers
from reagent_lite.errors import ConfigError, Preempted, RendezvousError

WORKER = Path(__file__).parent / "worker.py"


PROGRAM = """
import sys
from reagent_lite.console import logging_to_stderr
from reagent_lite.config.rendezvous import RendezvousConfig
from reagent_lite.distributed.launcher import LaunchError, launch
from reagent_lite.distributed.nodes import Node
from reagent_lite.distributed.rendezvous import Rendezvous
from reagent_lite.distributed.verdict import Declaration
count = int(sys.argv[1])
alone = Declaration(node=0, host="here", pid=1, processes=count, device="cpu")
rendezvous = Rendezvous(Node(), None, RendezvousConfig(), alone)
try:
    with logging_to_stderr():
        launch([sys.executable, *sys.argv[2:]], count, rendezvous, restarts=0)
except LaunchError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""
ALONE = Membership(
    Link(lambda: None), Record(**RECORD), 0, (Declaration(node=0, host="here", pid=1, processes=1, device="cpu"),),
    RendezvousConfig(), lambda: None,
)  # fmt: skip
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{WORKER.parents[2]}:{WORKER.parents[1]}"}


def launched(task: str, count: int, out: Path) -> subprocess.CompletedProcess[str]:
    """Runs worker.py's task in `count` processes, by a launcher in a process of its own."""
    command = [sys.executable, "-c", PROGRAM, str(count), str(WORKER), task, str(out)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=ENVIRONMENT, check=False)


@pytest.mark.parametrize(
    ("use_gpu", "use_all", "explicit", "gpus", "expected"),
    [
        (True, True, None, 4, (4, "cuda")),
        (True, False, None, 4, (1, "cuda")),
        (True, True, 2, 4, (2, "cuda")),
        (False, True, None, 4, (1, "cpu")),
        (True, True, None, 0, (1, "cpu")),
        (True, True, 3, 0, (3, "cpu")),
        (False, False, 2, 0, (2, "cpu")),
    ],
)
def test_choose_processes(
    use_gpu: bool, use_all: bool, explicit: int | None, gpus: int, expected: tuple[int, str]
) -> None:
    chosen = choose_processes(use_gpu=use_gpu, use_all=use_all, explicit=explicit, gpus=gpus)
    assert (chosen.count, chosen.device_type) == expected
    assert bool(chosen.note) == (use_gpu and gpus == 0)


def test_more_gpu_processes_than_gpus_are_refused() -> None:
    with pytest.raises(ConfigError, match="at most the 2 GPUs"):
        choose_processes(use_gpu=True, use_all=True, explicit=3, gpus=2)


def test_place_is_read_whole_or_refused() -> None:
    variables = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert Place.read(variables) == Place(3, 4, 1, 2, node=1, num_nodes=2)
    named = {**variables, "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "3"}
    assert Place.read(named) == Place(3, 4, 1, 2, node=0, num_nodes=3)
    assert Place.read({}) is None
    with pytest.raises(RendezvousError, match="LOCAL_WORLD_SIZE: expected an integer"):
        Place.read({**variables, "LOCAL_WORLD_SIZE": "two"})


def test_a_world_of_one_does_nothing() -> None:
    group = Group(Place(), torch.device("cpu"))
    assert group.sum(torch.tensor([2.0])).tolist() == [2.0]
    assert group.broadcast_text("naïve") == "naïve"
    assert [one.tolist() for one in group.gather(torch.tensor([[1], [2]]))] == [[[1], [2]]]
    module = torch.nn.Linear(1, 1)
    assert group.wrap(module) is module
    group.barrier()


def test_workers_sum_and_send_text(tmp_path: Path) -> None:
    done = launched("talk", 3, tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(file.read_text() for file in tmp_path.iterdir()) == ["6 héllo 2"] * 3
    assert done.stdout == "rank 0\n"


def test_the_first_failure_is_the_reason(tmp_path: Path) -> None:
    done = launched("raise", 2, tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("file.json:3: expected a number, got text") == 1
    assert "rank 1 of 2" in done.stderr


def test_a_killed_worker_ends_all(tmp_path: Path) -> None:
    start = time.monotonic()
    done = launched("kill", 2, tmp_path)
    assert done.returncode == 4
    assert "rank 1 of 2: expected a worker that trains to the end, got ended by signal 9" in done.stderr
    assert time.monotonic() - start < 60


def test_a_worker_that_the_system_ended_for_lack_of_memory_is_named_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    (tmp_path / "memory.events").write_text("oom_kill 1\n")
    (tmp_path / "reasons").mkdir()
    workers = Workers(["sh", "-c", f"echo oom_kill 2 > {tmp_path}/memory.events; kill -9 $$"], 1, ALONE,
                      tmp_path / "reasons", lost_after=9)  # fmt: skip
    while not workers.done:
        time.sleep(0.01)
    failure = workers.failure()
    assert failure is not None
    assert failure.message == (
        "rank 0 of 1: expected a worker that trains to the end, got ended by signal 9 (SIGKILL) by the system, for the "
        "memory limit of its control group was reached. Give the job more memory, or start fewer processes "
        "(num_processes_per_node)"
    )


def test_told_to_end_while_waiting_to_begin_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rendezvous = Rendezvous(Node(), None, RendezvousConfig(), ALONE.declarations[0])
    met: list[Membership] = []

    def join() -> Membership:
        if met:  # the others have not come back yet
            os.kill(os.getpid(), signal.SIGTERM)
            rendezvous.interrupted()
        met.append(ALONE)
        return ALONE

    abort = Abort(reason="node 1 went away", exit_code=4, restart=True)
    monkeypatch.setattr(Rendezvous, "join", lambda self: join())
    monkeypatch.setattr(launcher, "_attempt", lambda *arguments: abort)
    monkeypatch.setattr(Membership, "leave", lambda self, restart: restart)
    with pytest.raises(Preempted, match="SIGTERM: the last checkpoint stands: run the same command again to continue"):
        launcher.launch([], 1, rendezvous, restarts=3)


def test_workers_end_with_their_launcher(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, "2", str(WORKER), "wait", str(tmp_path)]
    launcher = subprocess.Popen(command, env=ENVIRONMENT)
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("pid_*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    pids = [int(file.read_text()) for file in tmp_path.glob("pid_*")]
    assert len(pids) == 2
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in pids)


def test_a_worker_whose_launcher_died_while_it_imported_ends(tmp_path: Path) -> None:
    program = "from reagent_lite.distributed.workers import end_with_parent; end_with_parent(); print('goes on')"
    for parent, code, said in ((os.getpid(), 0, "goes on\n"), (os.getppid(), -signal.SIGKILL, "")):
        variables = {"REAGENT_LITE_FAILURE_FILE": str(tmp_path / "0.json"), "REAGENT_LITE_LAUNCHER_PID": str(parent)}
        done = subprocess.run([sys.executable, "-c", program], env={**ENVIRONMENT, **variables}, capture_output=True,
                              text=True, check=False)  # fmt: skip
        assert (done.returncode, done.stdout) == (code, said), done.stderr


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("task", ["even", "uneven"])
def test_two_processes_equal_one_after_100_steps(tmp_path: Path, task: str) -> None:
    """Half the batch each, or 3 : 1 rows: parameters, target and optimizer's effect agree to 1e-6."""
    assert launched("one", 1, tmp_path / "one").returncode == 0
    done = launched(task, 2, tmp_path / task)
    assert done.returncode == 0, done.stderr
    one = load_file(tmp_path / "one" / "rank0.safetensors")
    for rank in range(2):
        for name, tensor in load_file(tmp_path / task / f"rank{rank}.safetensors").items():
            torch.testing.assert_close(tensor, one[name], rtol=0, atol=1e-6)
    moved = [name for name, tensor in one.items() if name.startswith("q_network") and tensor.abs().sum() > 0]
    assert len(moved) == 4
