"""SIGTERM at any moment of a run: exit code 75, or the end of the run with 0; never a traceback."""

import os
import signal
import time
from pathlib import Path
from types import FrameType

import pytest
import torch
from oracles.resuming import end, logged, start, until

from reagent_lite.config import DqnConfig, check
from reagent_lite.distributed.group import Group, Place
from reagent_lite.errors import Preempted
from reagent_lite.export import load_bundle
from reagent_lite.run.train import train

ALONE = Group(Place(), torch.device("cpu"))


def ends(folder: Path, *, after: float) -> bool:
    """Trains with SIGTERM after so many seconds, if it takes that long; returns whether it came to its end."""
    config = check(DqnConfig, {**logged(folder), "epochs": 1, "model_output_path": str(folder / "out")})

    def strike(number: int, frame: FrameType | None) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGALRM, strike)
    signal.setitimer(signal.ITIMER_REAL, after)
    try:
        train(config, ALONE)
    except Preempted:
        return False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return True


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a file between open() and its owner
@pytest.mark.parametrize("points", [4, pytest.param(100, marks=pytest.mark.slow)])
def test_a_signal_at_any_moment_is_no_error(tmp_path: Path, points: int) -> None:
    ends(tmp_path / "first", after=600)  # imports and the exporter's own preparations
    begin = time.monotonic()
    assert ends(tmp_path / "whole", after=600)
    seconds, outcomes = time.monotonic() - begin, []
    for point in range(points):
        folder = tmp_path / f"{point}"
        ended = ends(folder, after=seconds * (point + 0.5) / points)
        outcomes.append(ended)
        assert not list((folder / "out").glob(".model*"))
        if ended or (folder / "out" / "model").exists():
            load_bundle(folder / "out" / "model").check_golden()
    assert not outcomes[0]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("processes", [1, 2])
def test_a_signal_at_any_moment_of_a_command(tmp_path: Path, processes: int) -> None:
    tree = {**logged(tmp_path), "epochs": 1, "num_processes_per_node": processes}
    begin = time.monotonic()
    run = start(tmp_path, tree)
    assert end(run).code == 0
    seconds, codes = time.monotonic() - begin, []
    for point in range(30):
        run = start(tmp_path, tree, f'model_output_path="{tmp_path / f"out{point}"}"')
        until(lambda run=run: bool(run.said))  # type: ignore[misc] # it listens from before its first line on
        strike = time.monotonic() + 1.1 * seconds * point / 30
        while run.poll() is None and time.monotonic() < strike:
            time.sleep(0.02)
        run.send_signal(signal.SIGTERM)
        ended = end(run)
        codes.append(ended.code)
        assert ended.code in (0, 75), ended.err
        assert "Traceback" not in ended.err
    assert 75 in codes
