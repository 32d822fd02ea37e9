"""Checkpoints on a disk that fails: what is written, what is found again, what is set aside; and warm starts."""

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles.batches import random_batch
from oracles.disks import small_disk
from torch import nn

from reagent_lite.algorithms.dqn import DQN, DQNSettings
from reagent_lite.config.training import OPTIMIZERS
from reagent_lite.distributed.group import Group, Place
from reagent_lite.errors import BundleError, ConfigError
from reagent_lite.models.q_networks import NetworkSettings, build_q_network
from reagent_lite.models.value_heads import ScalarHead
from reagent_lite.training.checkpoint import CheckpointFolder, Checkpoints
from reagent_lite.training.loop import Optimization, Position, Running
from reagent_lite.training.resume import find_unfinished, restore
from reagent_lite.training.warm_start import warm_start
from reagent_lite.types import SourceSpec, TransitionBatch

ALONE = Group(Place(), torch.device("cpu"))


class Numbered:
    """A source and evaluators of nothing but a number."""

    def __init__(self) -> None:
        self.number = 0

    def __next__(self) -> TransitionBatch:
        raise NotImplementedError

    def learned(self, row_errors: torch.Tensor) -> None:
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number, "deep": {"half": self.number / 2}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = int(state["number"])
        assert float(state["deep"]["half"]) == self.number / 2


def running(optimizer: str = "Adam", hidden: int = 8, step: int = 0) -> Running:
    network = build_q_network(
        SourceSpec(num_state_features=3, action_names=("a", "b")),
        NetworkSettings(hidden=(hidden,), activations=("relu",)),
    )
    learner = DQN(network, ScalarHead(), DQNSettings(gamma=0.9, target_update_rate=0.1))
    made = getattr(torch.optim, optimizer)(learner.q_network.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(made, 0.5)
    return Running(
        learner=learner, optimization=Optimization(optimizer=made, schedule=schedule), source=Numbered(),
        evaluators=Numbered(), position=Position(step=step, rows=10 * step),
    )  # fmt: skip


def steps(run: Running, *seeds: int) -> None:
    for seed in seeds:
        run.learner(random_batch(8, 3, 2, seed))[0].backward()
        run.optimization.step()
        run.learner.after_step()  # type: ignore[operator]
        assert run.optimization.schedule is not None
        run.optimization.schedule.step()
        run.position.step += 1
        run.position.rows += 10
        run.source.number = run.position.step  # type: ignore[attr-defined]


def checkpoints(folder: Path, run: Running, *, name: str = "r", keep: int = 2, serial: int = 0) -> Checkpoints:
    document = {"run": name, "serial": serial, "world": {"processes": 1}}
    return Checkpoints(CheckpointFolder(folder), ALONE, run, document, keep=keep)


def saved(folder: Path, *at: int, **other: Any) -> Checkpoints:
    """Checkpoints after so many steps, the newest last."""
    run = running()
    made = checkpoints(folder, run, **other)
    for step in at:
        steps(run, *range(run.position.step, step))
        assert made.save() == ""
    return made


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def weights(module: nn.Module) -> list[list[float]]:
    return [tensor.flatten().tolist() for tensor in module.state_dict().values()]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_restored_run_goes_on_bit_for_bit(tmp_path: Path, optimizer: str, caplog: pytest.LogCaptureFixture) -> None:
    first, second = running(optimizer), running(optimizer)
    steps(first, 1, 2, 3)
    assert checkpoints(tmp_path, first).save() == ""
    torch.manual_seed(5)
    before = torch.rand(3).tolist()
    steps(first, 4, 5)

    state = find_unfinished(CheckpointFolder(tmp_path), ALONE, wanted=True)
    assert state is not None
    assert (state["name"], state["step"], state["rows"], state["parent"]) == ("step_000003", 3, 30, None)
    assert caplog.messages == []
    restore(state, CheckpointFolder(tmp_path), second, ALONE, None)
    assert second.source.number == 3  # type: ignore[attr-defined]
    assert second.optimization.optimizer.param_groups[0]["lr"] == 0.01 * 0.5 * 0.5 * 0.5
    steps(second, 4, 5)
    assert weights(second.learner) == weights(first.learner)
    rates = [group["lr"] for run in (first, second) for group in run.optimization.optimizer.param_groups]
    assert rates[0] == rates[1]
    assert before != torch.rand(3).tolist()


def test_the_state_of_the_generator_is_part_of_it(tmp_path: Path) -> None:
    run = running()
    torch.manual_seed(3)
    checkpoints(tmp_path, run).save()
    drawn = torch.rand(4).tolist()
    state = find_unfinished(CheckpointFolder(tmp_path), ALONE, wanted=True)
    assert state is not None
    torch.manual_seed(99)
    restore(state, CheckpointFolder(tmp_path), running(), ALONE, None)
    assert torch.rand(4).tolist() == drawn


def test_the_newest_two_stay_and_earlier_runs_make_way(tmp_path: Path) -> None:
    saved(tmp_path, 900, name="old")
    assert names(tmp_path) == ["LATEST", "step_000900"]
    made = saved(tmp_path, 5, 10, 15, name="new")
    assert names(tmp_path) == ["LATEST", "step_000010", "step_000015"]
    assert made.latest == "step_000015"
    assert (tmp_path / "LATEST").read_text() == "step_000015\n"
    state = json.loads((tmp_path / "step_000015" / "state.json").read_text())
    assert (state["parent"], state["serial"], state["finished"]) == ("step_000010", 3, False)


def test_nothing_is_written_below_the_mount_point_of_a_share_that_is_gone(tmp_path: Path) -> None:
    share = tmp_path / "share"
    share.mkdir()
    run = running()
    made = checkpoints(share / "checkpoints", run)
    steps(run, 1)
    assert made.save() == ""
    share.rename(tmp_path / "unmounted")
    share.mkdir()
    steps(run, 2)
    gone = f"{share} is not the folder any more that it was when the run began: its share is not mounted, or the "
    assert made.save().startswith(gone)
    assert made.finish().startswith(gone)
    assert list(share.iterdir()) == []
    share.rmdir()
    (tmp_path / "unmounted").rename(share)  # mounted again
    assert made.save() == ""
    assert made.finish() == ""


def test_the_order_of_writing_counts_not_the_step(tmp_path: Path) -> None:
    """After a change of the minibatch a later checkpoint may have a lower step."""
    saved(tmp_path, 20)
    low = running(step=7)
    folder = CheckpointFolder(tmp_path)
    Checkpoints(folder, ALONE, low, {"run": "r", "serial": 1, "world": {}}, keep=2, since="step_000020").save()
    low.position.step = 9
    found = folder.unfinished()
    assert found is not None
    assert found["name"] == "step_000020"  # saved at its step already: what it began with stands
    later = Checkpoints(folder, ALONE, running(step=7), {"run": "r", "serial": 1, "world": {}}, keep=2)
    later.save()
    found = folder.unfinished()
    assert found is not None
    assert found["name"] == "step_000007"


def test_a_finished_run_is_not_continued(tmp_path: Path) -> None:
    made = saved(tmp_path, 5, 10)
    before = (tmp_path / "step_000010" / "learner.safetensors").read_bytes()
    assert made.finish() == ""
    assert names(tmp_path) == ["LATEST", "step_000005", "step_000010"]
    assert (tmp_path / "step_000010" / "learner.safetensors").read_bytes() == before
    folder = CheckpointFolder(tmp_path)
    assert folder.unfinished() is None  # the one at step 5 belongs to the same run
    (tmp_path / "LATEST").write_text("step_000005\n")
    assert folder.unfinished() is None
    run = running(step=3)
    checkpoints(tmp_path, run, name="next").save()
    found = folder.unfinished()
    assert found is not None
    assert found["name"] == "step_000003"


def test_resume_false_removes_what_stands(tmp_path: Path) -> None:
    saved(tmp_path, 5)
    assert find_unfinished(CheckpointFolder(tmp_path), ALONE, wanted=False) is None
    assert names(tmp_path) == []


def test_what_others_put_there_is_neither_removed_nor_a_checkpoint(tmp_path: Path) -> None:
    for name in ("step_notes", "step_000007"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.txt").write_text("mine")
    (tmp_path / "step_000009").write_text("a file")
    others = names(tmp_path)
    saved(tmp_path, 5, 10, 15)
    assert names(tmp_path) == sorted([*others, "LATEST", "step_000010", "step_000015"])
    assert find_unfinished(CheckpointFolder(tmp_path), ALONE, wanted=True) is not None
    assert find_unfinished(CheckpointFolder(tmp_path), ALONE, wanted=False) is None
    assert names(tmp_path) == others


def test_what_dead_runs_left_is_removed_or_put_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path, 5, 10)
    torn = tmp_path / ".step_000015.77.tmp"
    torn.mkdir()
    (torn / "learner.safetensors").write_bytes(b"half")
    # killed between the two renames of a checkpoint that takes the place of another one
    (tmp_path / "step_000010").rename(tmp_path / ".step_000010.77.old")
    state = find_unfinished(CheckpointFolder(tmp_path), ALONE, wanted=True)
    assert state is not None
    assert (state["name"], caplog.messages) == ("step_000010", [])
    assert names(tmp_path) == ["LATEST", "step_000005", "step_000010"]


def test_a_flipped_byte_in_any_file_sets_the_newest_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path, 5, 10)
    files = sorted(path.name for path in (tmp_path / "step_000010").iterdir())
    assert files == ["judge.safetensors", "learner.safetensors", "manifest.json", "optimizer.safetensors",
                     "rank_0000.safetensors", "state.json"]  # fmt: skip
    for number, name in enumerate(files):
        file = tmp_path / "step_000010" / name
        data = file.read_bytes()
        altered = bytearray(data)
        altered[len(data) // 2] ^= 1
        file.write_bytes(bytes(altered))
        caplog.clear()
        found = CheckpointFolder(tmp_path).unfinished()
        assert found is not None
        assert found["name"] == "step_000005"
        aside = "quarantine_step_000010" + (f".{number}" if number else "")
        (note,) = caplog.messages
        assert name in note
        assert "checkpoint step_000010 is damaged" in note
        assert f"set aside as {aside}; continuing from step_000005" in note
        (tmp_path / aside / name).write_bytes(data)
        (tmp_path / aside).rename(tmp_path / "step_000010")
        (tmp_path / f"quarantine_step_000010{f'.{number}' if number else ''}").mkdir()


def test_a_missing_file_and_an_empty_folder_are_damage_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path, 5, 10)
    (tmp_path / "step_000010" / "rank_0000.safetensors").unlink()
    (tmp_path / "step_000012").mkdir()
    (tmp_path / "step_000013").mkdir()
    (tmp_path / "step_000013" / "learner.safetensors").touch()
    os.mkfifo(tmp_path / "step_000013" / "manifest.json")
    found = CheckpointFolder(tmp_path).unfinished()
    assert found is not None
    assert found["name"] == "step_000005"
    assert len(caplog.messages) == 3
    (tmp_path / "step_000005" / "state.json").write_text("{}")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(BundleError, match=r"step_000005: expected a whole checkpoint of the unfinished run"):
        CheckpointFolder(tmp_path).unfinished()
    assert sorted(tmp_path.iterdir()) == before  # a person may still put it right


@pytest.fixture
def disk_of_64_files(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", size="4m", files=64) as disk:
        yield disk


def test_a_disk_without_room_keeps_what_stands(disk_of_64_files: Path) -> None:
    run = running()
    made = checkpoints(disk_of_64_files / "c", run)
    assert made.save() == ""
    filler = disk_of_64_files / "filler"
    filler.write_bytes(bytes(3 << 20))
    steps(run, 1)
    said = made.save()
    assert "it needs 1," in said  # the spare MiB is most of it
    assert "are free in" in said
    assert made.latest == "step_000000"
    assert names(disk_of_64_files / "c") == ["LATEST", "step_000000"]
    filler.unlink()
    steps(run, 2)
    assert made.save() == ""
    assert made.latest == "step_000002"


def test_a_disk_that_fills_up_while_writing_keeps_what_stands(disk_of_64_files: Path) -> None:
    run = running()
    made = checkpoints(disk_of_64_files / "c", run)
    assert made.save() == ""
    while os.statvfs(disk_of_64_files).f_ffree > 3:  # a checkpoint is a folder and six files
        (disk_of_64_files / f"filler_{os.statvfs(disk_of_64_files).f_ffree}").touch()
    steps(run, 1)
    assert made.save().startswith(os.strerror(errno.ENOSPC))
    assert names(disk_of_64_files / "c") == ["LATEST", "step_000000"]
    found = CheckpointFolder(disk_of_64_files / "c").unfinished()
    assert found is not None
    assert found["name"] == "step_000000"


def test_a_learning_rate_that_a_graph_reads_is_saved_as_a_number(tmp_path: Path) -> None:
    run = running()
    optimizer = torch.optim.Adam(run.learner.q_network.parameters(), lr=torch.tensor(0.25))  # type: ignore[union-attr]
    fixed = Running(learner=run.learner, optimization=Optimization(optimizer=optimizer), source=run.source,
                    evaluators=run.evaluators, position=run.position)  # fmt: skip
    checkpoints(tmp_path, fixed).save()
    state = find_unfinished(CheckpointFolder(tmp_path), ALONE, wanted=True)
    assert state is not None
    assert state["optimizer"]["groups"][0]["lr"] == 0.25
    optimizer.param_groups[0]["lr"].fill_(0.5)
    restore(state, CheckpointFolder(tmp_path), fixed, ALONE, None)
    assert optimizer.param_groups[0]["lr"].equal(torch.tensor(0.25))  # a tensor still


def test_a_warm_start_takes_learner_and_optimizer(tmp_path: Path) -> None:
    first, second = running(), running()
    steps(first, 1, 2, 3)
    checkpoints(tmp_path, first).save()
    assert "learner and optimizer" in warm_start(str(tmp_path), second.learner, second.optimization.optimizer, ALONE)
    for run in (first, second):
        for group in run.optimization.optimizer.param_groups:
            group["lr"] = 0.01
        steps(run, 99)
    assert weights(first.learner) == weights(second.learner)


def test_an_altered_checkpoint_is_no_warm_start(tmp_path: Path) -> None:
    saved(tmp_path, 5)
    file = tmp_path / "step_000005" / "learner.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(BundleError, match=r"learner\.safetensors"):
        warm_start(str(tmp_path), running().learner, None, ALONE)


def test_a_warm_start_names_what_differs(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    made = running()
    with pytest.raises(ConfigError, match=r"layers\.0\.bias \[8\] instead of \[9\]"):
        warm_start(str(tmp_path), running(hidden=9).learner, None, ALONE)
    with pytest.raises(ConfigError, match=r"expected the state of SGD, got that of Adam"):
        warm_start(str(tmp_path), made.learner, torch.optim.SGD(made.learner.parameters(), lr=0.1), ALONE)
    with pytest.raises(ConfigError, match="got nothing"):
        warm_start(str(tmp_path / "nowhere"), made.learner, None, ALONE)
    (tmp_path / "model.pt").write_bytes(b"x")
    with pytest.raises(ConfigError, match="Pickled models"):
        warm_start(str(tmp_path / "model.pt"), made.learner, None, ALONE)
