"""Two runs with one model_output_path: the second is refused, by name, until the first has ended, however it ends."""

import json
import re
import socket
from pathlib import Path

from oracles.resuming import Tree, checkpoints, end, logged, start
from oracles.waiting import wait_until

from reagent_lite.config import DqnConfig
from reagent_lite.files import alone_in
from reagent_lite.run.launch import main

SLOW = "fail:rank=0,step=0,kind=slow,seconds=1"


def test_a_second_run_is_refused_until_the_first_is_killed(tmp_path: Path) -> None:
    """Then it has the folder, and goes on where the first one was."""
    tree = logged(tmp_path)
    first = start(tmp_path, tree, REAGENT_LITE_FAULT=SLOW)
    wait_until(lambda: len(checkpoints(tmp_path)) > 0)
    second = end(start(tmp_path, tree))
    assert second.code == 5, second.err  # a scheduler must not take it for a wrong config
    holder = rf"host {socket.gethostname()}, pid {first.pid}, since \d{{4}}-"
    assert re.search(rf"model_output_path: .* got {tmp_path}/out, in use by .*{holder}", second.err), second.err
    assert "Traceback" not in second.err
    assert first.poll() is None
    first.kill()
    third = end(start(tmp_path, tree))
    assert third.code == 0, third.err
    assert "resuming from checkpoints/step_" in third.err
    assert third.outcome["rows"] == 600


def test_a_dry_run_does_not_ask_for_the_folder(small: Tree, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "c.json").write_text(json.dumps(small))
    with alone_in(tmp_path / "out", "model_output_path"):
        assert main("workflows.dqn", DqnConfig, "x.json", ["--config", f"{tmp_path}/c.json", "--dry_run"]) == 0
