"""SIGTERM at any moment ends a run with 75, or it ends with 0; so does a terminal that closes, but for nohup."""

import os
import pty
import select
import signal
import time
from pathlib import Path
from threading import Timer

import psutil
import pytest
from helpers.interpreters import Interpreter, python_path
from helpers.resuming import checkpoints, end, logged
from helpers.runs import ALONE, ROOT, with_config
from helpers.waiting import wait_until

from reagent_lite.config import DqnConfig, check
from reagent_lite.errors import Preempted
from reagent_lite.export import load_bundle
from reagent_lite.run.runner import train


def ends(folder: Path, *, after: float) -> bool:
    """Trains with SIGTERM after so many seconds, if it takes that long; returns whether it came to its end."""
    config = check(DqnConfig, {**logged(folder), "epochs": 1, "model_output_path": str(folder / "out")})

    timer = Timer(after, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    try:
        train(config, ALONE)
    except Preempted:
        return False
    finally:
        timer.cancel()
    return True


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a file between open() and its owner
@pytest.mark.parametrize("points", [4, pytest.param(100, marks=pytest.mark.slow)])
def test_a_signal_at_any_moment_is_no_error(tmp_path: Path, points: int) -> None:
    ends(tmp_path / "first", after=600)  # imports and the exporter's own preparations
    begin = time.monotonic()
    assert ends(tmp_path / "whole", after=600)
    seconds = time.monotonic() - begin
    for point in range(points):
        out = tmp_path / f"{point}" / "out"
        ended = ends(out.parent, after=seconds * (point + 0.5) / points)
        assert not (ended and point == 0)
        assert not list(out.glob(".model*"))
        if ended or (out / "model").exists():
            load_bundle(out / "model").check_golden()


# ---- a terminal that closes

ON_TERMINAL = """
import os, runpy, sys
os.setsid()
terminal = os.open(sys.argv.pop(1), os.O_RDWR)  # becomes that of the session
for number in (0, 1, 2):
    os.dup2(terminal, number)
runpy.run_module("workflows.dqn", run_name="__main__", alter_sys=True)
"""
UNDER_NOHUP = """
import runpy, signal
signal.signal(signal.SIGHUP, signal.SIG_IGN)
runpy.run_module("workflows.dqn", run_name="__main__", alter_sys=True)
"""
SLOW = "fail:rank=0,step=0,kind=slow,seconds=0.1"


def start_on(folder: Path, program: str, *arguments: str, fault: str = SLOW, **keys: int) -> Interpreter:
    tree = {**logged(folder), "model_output_path": str(folder / "out"), "checkpoint": {}, **keys}
    variables = {**os.environ, "PYTHONPATH": python_path(ROOT), "XDG_CACHE_HOME": str(folder / "cache"),
                 "OMP_NUM_THREADS": "1", "TERM": "xterm", "REAGENT_LITE_FAULT": fault}  # fmt: skip
    return Interpreter(["-c", program, *arguments, *with_config(folder, tree)], env=variables)


def steps(folder: Path) -> int:
    file = folder / "out" / "metrics.jsonl"
    return file.read_text().count("\n") if file.exists() else 0


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_terminal_that_is_closed_costs_nothing(tmp_path: Path, processes: int) -> None:
    """Its kernel sends SIGHUP to the first process of the session; whatever is written to it from then on fails."""
    terminal, other_end = pty.openpty()
    run = start_on(tmp_path, ON_TERMINAL, os.ttyname(other_end), num_processes_per_node=processes)
    shown = bytearray()

    def trains() -> bool:  # an epoch of 7 steps is over; the bar is drawn by a thread of its own
        while select.select([terminal], [], [], 0)[0]:
            shown.extend(os.read(terminal, 1 << 16))
        return steps(tmp_path) > 0

    wait_until(trains, lambda: shown.decode(errors="replace"))
    os.close(other_end)
    os.close(terminal)
    assert run.wait(60) == 75, shown
    assert b"training" in shown
    (saved,) = checkpoints(tmp_path)
    again = end(start_on(tmp_path, UNDER_NOHUP, fault="", num_processes_per_node=processes))
    assert (again.code, f"resuming from checkpoints/{saved}" in again.err) == (0, True), again.err
    assert again.outcome["rows"] == 600


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_under_nohup_a_run_outlives_its_terminal(tmp_path: Path, processes: int) -> None:
    run = start_on(tmp_path, UNDER_NOHUP, num_processes_per_node=processes)
    wait_until(lambda: steps(tmp_path) > 0)
    run.send_signal(signal.SIGHUP)
    for child in psutil.Process(run.pid).children():
        child.send_signal(signal.SIGHUP)
    ended = end(run)
    assert (ended.code, "resuming" in ended.err) == (0, False), ended.err
    assert ended.outcome["rows"] == 600


def test_a_hangup_before_workers_listen_ends_with_75(tmp_path: Path) -> None:
    run = start_on(tmp_path, ON_TERMINAL, os.devnull, num_processes_per_node=2)
    wait_until(lambda: len(psutil.Process(run.pid).children()) == 2)
    os.killpg(run.pid, signal.SIGHUP)
    assert run.wait(30) == 75
