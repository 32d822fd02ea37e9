"""Checkpoints on a disk that fails: what is written, what is found again, what is set aside; and warm starts."""

import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.batches import random_batch
from helpers.disks import small_disk, unmount
from helpers.runs import ALONE
from safetensors.torch import load_file, save
from torch import nn

from reagent_lite.algorithms.dqn import DQN, DQNSettings
from reagent_lite.config.checkpoint import CheckpointConfig
from reagent_lite.config.training import OPTIMIZERS
from reagent_lite.errors import BundleError, ConfigError
from reagent_lite.manifest import CHECKPOINT, read_document, seal_folder
from reagent_lite.models.q_networks import NetworkSettings, build_q_network
from reagent_lite.models.value_heads import ScalarHead
from reagent_lite.training.checkpoint_folder import CheckpointFolder, Checkpoints
from reagent_lite.training.loop import Optimization, Running, RunPosition
from reagent_lite.training.resume import find_unfinished, restore
from reagent_lite.training.warm_start import warm_start
from reagent_lite.types import SourceSpec


class Numbered:
    """State of a source and of evaluators: nothing but a number."""

    number = 0

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number, "deep": {"part": self.number / 7}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = int(state["number"])
        assert float(state["deep"]["part"]) == self.number / 7


def running(optimizer: str = "Adam", *, hidden: int = 8, step: int = 0, rate: float | torch.Tensor = 0.01) -> Running:
    spec = SourceSpec(num_state_features=3, action_names=("a", "b"))
    network = build_q_network(spec, NetworkSettings(hidden=(hidden,), activations=("relu",)))
    learner = DQN(network, ScalarHead(), DQNSettings(gamma=0.9, target_update_rate=0.1))
    made = getattr(torch.optim, optimizer)(learner.q_network.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.ExponentialLR(made, 0.5)
    return Running(
        learner=learner, optimization=Optimization(optimizer=made, schedule=schedule), source=Numbered(),
        evaluators=Numbered(), position=RunPosition(step=step, rows=10 * step),
        reported=lambda: {"lines": 0, "figures": {}},
    )  # fmt: skip


def steps(run: Running, *seeds: int) -> None:
    for seed in seeds:
        run.learner(random_batch(8, 3, 2, seed))[0].backward()
        run.optimization.step()
        run.learner.after_step()
        run.optimization.schedule.step()
        run.position.step += 1
        run.position.rows += 10
        run.source.number = run.position.step


def checkpoints(
    folder: Path, run: Running, *, name: str = "r", serial: int = 0, since: str | None = None
) -> Checkpoints:
    document = {"run": name, "serial": serial, "world": {"processes": 1}, "config": {}, "identity": {},
                "versions": {}, "order": {}, "steps_per_epoch": 1, "rows_per_epoch": 10}  # fmt: skip
    return Checkpoints(CheckpointFolder(folder), ALONE, run, document, keep=2, since=since)


def saved(folder: Path, *at: int, **other: Any) -> Checkpoints:
    """Checkpoints after so many steps, the newest last."""
    run = running()
    made = checkpoints(folder, run, **other)
    for step in at:
        steps(run, *range(run.position.step, step))
        assert made.save() == ""
    return made


def unfinished(folder: Path) -> str | None:
    """The checkpoint to continue from; damaged ones are set aside, as by a run that has read its input."""
    there, before = CheckpointFolder(folder), names(folder)
    name = (there.find_unfinished() or {"name": None})["name"]
    assert names(folder) == before  # the run may still be refused
    there.set_damaged_aside(name)
    return name


def state_to_continue(folder: Path, *, wanted: bool = True) -> Any:
    return find_unfinished(CheckpointConfig(resume=wanted), CheckpointFolder(folder), ALONE)


def restored(folder: Path, run: Running) -> Running:
    """The run, which continues from the newest checkpoint."""
    restore(state_to_continue(folder), CheckpointFolder(folder), run, ALONE, None)
    return run


def rate_of(run: Running) -> Any:
    return run.optimization.optimizer.param_groups[0]["lr"]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def weights(module: nn.Module) -> list[list[float]]:
    return [tensor.flatten().tolist() for tensor in module.state_dict().values()]


def flip(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values())
def test_a_restored_run_goes_on_bit_for_bit(tmp_path: Path, optimizer: str) -> None:
    first = running(optimizer)
    steps(first, 1, 2, 3)
    assert checkpoints(tmp_path, first).save() == ""
    drawn = torch.rand(3).tolist()
    steps(first, 4, 5)

    assert state_to_continue(tmp_path).items() >= {"name": "step_000003", "step": 3, "rows": 30, "parent": None}.items()
    second = restored(tmp_path, running(optimizer))
    assert torch.rand(3).tolist() == drawn
    assert (second.source.number, rate_of(second)) == (3, 0.01 * 0.5 * 0.5 * 0.5)
    steps(second, 4, 5)
    assert (weights(second.learner), rate_of(second)) == (weights(first.learner), rate_of(first))


def test_a_learning_rate_that_a_graph_reads_is_saved_as_a_number(tmp_path: Path) -> None:
    run = running(rate=torch.tensor(0.25))
    checkpoints(tmp_path, run).save()
    assert state_to_continue(tmp_path)["optimizer"]["groups"][0]["lr"] == 0.25
    rate_of(run).fill_(0.5)
    assert rate_of(restored(tmp_path, run)).equal(torch.tensor(0.25))  # a tensor still


def test_the_newest_two_stay_earlier_runs_make_way_and_what_others_put_there_is_left(tmp_path: Path) -> None:
    for file in ("step_notes/mine.txt", "step_000007/mine.txt"):
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).write_text("mine")
    (tmp_path / "step_000009").write_text("a file")
    others = names(tmp_path)
    saved(tmp_path, 20, name="old")
    assert names(tmp_path) == sorted([*others, "LATEST", "step_000020"])
    made = saved(tmp_path, 5, 10, 15, name="new")
    assert names(tmp_path) == sorted([*others, "LATEST", "step_000010", "step_000015"])
    assert (tmp_path / "LATEST").read_text() == f"{made.latest}\n" == "step_000015\n"
    assert state_to_continue(tmp_path).items() >= {"parent": "step_000010", "serial": 3, "finished": False}.items()
    assert (state_to_continue(tmp_path, wanted=False), names(tmp_path)) == (None, others)  # removes what stands


def test_nothing_is_written_below_the_mount_point_of_a_share_that_is_gone(tmp_path: Path) -> None:
    share, run = tmp_path / "share", running()
    share.mkdir()
    made = checkpoints(share / "checkpoints", run)
    steps(run, 1)
    assert made.save() == ""
    unmount(share)
    steps(run, 2)
    assert all(said.startswith(f"{share} is no longer the folder") for said in (made.save(), made.finish()))
    share.rmdir()  # it is empty
    shutil.copytree(tmp_path / "unmounted", share)  # mounted again, as another device with other inodes
    assert (made.save(), made.finish()) == ("", "")
    assert names(share / "checkpoints") == ["LATEST", "step_000001", "step_000002"]


def test_the_order_of_writing_counts_not_the_step(tmp_path: Path) -> None:
    """After a change of the minibatch a later checkpoint may have a lower step."""
    saved(tmp_path, 20)
    low = running(step=7)
    checkpoints(tmp_path, low, serial=1, since="step_000020").save()
    assert unfinished(tmp_path) == "step_000020"  # saved at its step already: what it began with stands
    checkpoints(tmp_path, low, serial=1).save()
    assert unfinished(tmp_path) == "step_000007"


def test_a_finished_run_is_not_continued(tmp_path: Path) -> None:
    assert (saved(tmp_path, 5, 10).finish(), names(tmp_path)) == ("", ["LATEST", "step_000005", "step_000010"])
    assert unfinished(tmp_path) is None  # the one at step 5 belongs to the same run
    checkpoints(tmp_path, running(step=3), name="next").save()
    assert unfinished(tmp_path) == "step_000003"


def test_what_dead_runs_left_is_removed_or_put_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path, 5, 10)
    torn = tmp_path / ".step_000015.77.tmp"
    torn.mkdir()
    (torn / "learner.safetensors").write_bytes(b"half")
    # killed between the two renames of a checkpoint that takes the place of another one
    (tmp_path / "step_000010").rename(tmp_path / ".step_000010.77.old")
    assert (state_to_continue(tmp_path)["name"], caplog.messages) == ("step_000010", [])
    assert names(tmp_path) == ["LATEST", "step_000005", "step_000010"]


def test_a_flipped_byte_in_any_file_sets_the_newest_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path / "whole", 5, 10)
    files = names(tmp_path / "whole" / "step_000010")
    assert files == ["evaluators.safetensors", "learner.safetensors", "manifest.json", "optimizer.safetensors",
                     "rank_0000.safetensors", "state.json"]  # fmt: skip
    for name in files:
        folder = shutil.copytree(tmp_path / "whole", tmp_path / name)
        (folder / "quarantine_step_000010").mkdir()
        flip(folder / "step_000010" / name)
        caplog.clear()
        assert unfinished(folder) == "step_000005"
        (note,) = caplog.messages
        assert re.search(
            rf"step_000010 is damaged.*{name}.*quarantine_step_000010\.1; continuing from step_000005", note
        )


def test_a_missing_file_and_an_empty_folder_are_damage_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path, 5, 10)
    (tmp_path / "step_000010" / "rank_0000.safetensors").unlink()
    for name in ("step_000012", "step_000013"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_000013" / "learner.safetensors").touch()
    os.mkfifo(tmp_path / "step_000013" / "manifest.json")
    assert (unfinished(tmp_path), len(caplog.messages)) == ("step_000005", 3)
    (tmp_path / "step_000005" / "state.json").write_text("{}")
    before = names(tmp_path)
    with pytest.raises(BundleError, match="step_000005: expected a complete"):
        unfinished(tmp_path)
    assert names(tmp_path) == before  # a person may still put it right


def test_a_full_disk_keeps_what_stands(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", size="4m", files=64) as disk:
        run = running()
        made = checkpoints(disk / "c", run)
        assert made.save() == ""
        (disk / "filler").write_bytes(bytes(3 << 20))
        steps(run, 1)
        assert re.search("it needs 1,.* are free in", made.save())  # the spare MiB is most of it
        (disk / "filler").unlink()
        while os.statvfs(disk).f_ffree > 3:  # a checkpoint is a folder and six files
            (disk / f"filler_{os.statvfs(disk).f_ffree}").touch()
        assert made.save().startswith(os.strerror(errno.ENOSPC))
        assert made.latest == unfinished(disk / "c") == "step_000000"
        assert names(disk / "c") == ["LATEST", "step_000000"]
        for path in disk.glob("filler_*"):
            path.unlink()
        assert (made.save(), made.latest) == ("", "step_000001")


def resealed(folder: Path, file: str, change: Callable[[Any], object], name: str | None = None) -> Path:
    """Changes a file of a checkpoint, and its name, and seals it again, as another release might have written it."""
    path = folder / file
    content = json.loads(path.read_text()) if file == "state.json" else load_file(path)
    change(content)
    path.write_bytes(json.dumps(content).encode() if file == "state.json" else save(content))
    document = read_document(folder, CHECKPOINT)
    path.rename(folder / (name or file))
    seal_folder(folder, document, {entry: {} for entry in names(folder) if entry != "manifest.json"})
    return folder


@pytest.mark.parametrize(
    "change",
    [
        *(
            lambda state, key=key: state.pop(key)
            for key in ("run", "step", "rows", "reported", "optimizer", "schedule", "world")
        ),
        lambda state: state.clear(),
        lambda state: state.update(run=None),
        lambda state: state.update(step="1"),
        lambda state: state.update(step=-1),
        lambda state: state.update(finished="no"),
        lambda state: state.update(world=1),
        lambda state: state.update(versions=["torch"]),
        lambda state: state["optimizer"].pop("groups"),
    ],
)
def test_a_state_that_no_run_has_is_damage_also_where_its_hash_is_right(
    tmp_path: Path, change: Callable[[Any], object]
) -> None:
    saved(tmp_path, 1)
    resealed(tmp_path / "step_000001", "state.json", change)
    with pytest.raises(BundleError, match=r"state\.json"):
        state_to_continue(tmp_path)
    made = running()
    with pytest.raises(BundleError, match=r"state\.json"):
        warm_start(str(tmp_path), made.learner, made.optimization.optimizer, ALONE)


def test_a_checkpoint_of_before_is_continued(tmp_path: Path) -> None:
    """What was reported had another key in state.json, and the evaluators' file another name."""
    saved(tmp_path, 1)
    folder = resealed(tmp_path / "step_000001", "evaluators.safetensors", lambda _: None, "judge.safetensors")
    resealed(folder, "state.json", lambda state: state.update(told=state.pop("reported")))
    assert state_to_continue(tmp_path)["reported"] == {"lines": 0, "figures": {}}
    torch.testing.assert_close(
        dict(restored(tmp_path, running()).learner.state_dict()),
        load_file(folder / "learner.safetensors"),
        rtol=0,
        atol=0,
    )


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("learner.safetensors", lambda tensors: tensors.clear()),
        ("learner.safetensors", lambda tensors: tensors.update({name: torch.zeros(2, 3, 4) for name in tensors})),
        ("learner.safetensors", lambda tensors: tensors.update(x=torch.zeros(1))),
        ("optimizer.safetensors", lambda tensors: tensors.update(x=torch.zeros(1))),
        ("evaluators.safetensors", lambda tensors: tensors.clear()),
        ("evaluators.safetensors", lambda tensors: tensors.update(number=torch.zeros(2))),
        ("rank_0000.safetensors", lambda tensors: tensors.clear()),
        ("rank_0000.safetensors", lambda tensors: tensors.update({"rng/cpu": torch.zeros(1)})),
    ],
)
def test_tensors_that_no_run_has_are_refused_in_words(
    tmp_path: Path, file: str, change: Callable[[Any], object]
) -> None:
    saved(tmp_path, 1)
    resealed(tmp_path / "step_000001", file, change)
    assert state_to_continue(tmp_path)["name"] == "step_000001"
    with pytest.raises(BundleError, match="step_000001: expected"):
        restored(tmp_path, running())


def test_a_warm_start_takes_learner_and_optimizer(tmp_path: Path) -> None:
    first, second = (running() for _ in range(2))
    steps(first, 1, 2, 3)
    checkpoints(tmp_path, first).save()
    assert "learner and optimizer" in warm_start(str(tmp_path), second.learner, second.optimization.optimizer, ALONE)
    for run in (first, second):
        run.optimization.optimizer.param_groups[0]["lr"] = 0.01
        steps(run, 99)
    assert weights(first.learner) == weights(second.learner)


def test_what_no_run_can_start_from(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    (tmp_path / "model.pt").write_bytes(b"x")
    flip(shutil.copytree(tmp_path / "step_000001", tmp_path / "damaged" / "step_000001") / "learner.safetensors")
    learner = running().learner
    for path, kind, match, given, optimizer in [
        (tmp_path, ConfigError, r"warm_start_model_path: .*layers\.0\.bias \[8\] instead of \[9\]",
         running(hidden=9).learner, None),
        (tmp_path, ConfigError, "of SGD, got that of Adam", learner, torch.optim.SGD(learner.parameters(), lr=0.1)),
        (tmp_path / "nowhere", ConfigError, "got nothing", learner, None),
        (tmp_path / "model.pt", ConfigError, "Pickled models", learner, None),
        (tmp_path / "damaged", BundleError, r"learner\.safetensors", learner, None),
    ]:  # fmt: skip
        with pytest.raises(kind, match=match):
            warm_start(str(path), given, optimizer, ALONE)
