"""Where a training copy lies, when it is built again, and what damage does."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import fsspec
import pytest
from helpers.cases import cases
from helpers.disks import small_disk
from helpers.event_files import data_of, small_blocks
from helpers.logs import write_lines

from reagent_lite.data.copy import build as build_module
from reagent_lite.data.copy.prepared_copy import prepare_training_copy
from reagent_lite.data.copy.training_copy import TrainingCopy, open_training_copy
from reagent_lite.data.formats.format_table import read_blocks
from reagent_lite.data.formats.input_files import list_input
from reagent_lite.data.logs import Log
from reagent_lite.errors import DataError
from reagent_lite.manifest import TRAINING_COPY, read_document, seal

ACTIONS = ("left", "right")


def row(**changes: Any) -> dict[str, Any]:
    return {"state_features": {"0": 1.0}, "action": 0, "reward": 1.0, "next_action": None, **changes}


def written(folder: Path, *rows: dict[str, Any]) -> str:
    return str(write_lines(folder / "log.json", rows))


@pytest.mark.parametrize(("where", "name"), [(build_module, "build"), (Path, "rename"), (shutil, "rmtree")])
def test_of_two_equal_builds_at_once_the_first_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: Any, name: str
) -> None:
    """Machines that share the folder build at the same time: what the first one reads from must not go away."""
    path = written(tmp_path, row(), row())
    opened: list[TrainingCopy] = []
    original = getattr(where, name)
    if name == "rmtree":  # of a damaged copy in their place
        (prepare_training_copy(Log(path, actions=ACTIONS)).folder / "reward.npy").unlink()

    def overtaken(first: Any, *others: Any, **options: Any) -> Any:
        if name == "rmtree":
            original(first, **options)
        if name != "rename" or first.is_dir():
            monkeypatch.undo()
            opened.append(prepare_training_copy(Log(path, actions=ACTIONS)))  # another machine is quicker
        return None if name == "rmtree" else original(first, *others)

    monkeypatch.setattr(where, name, overtaken)
    second = prepare_training_copy(Log(path, actions=ACTIONS))
    assert [copy.folder for copy in opened] == [second.folder] == [*second.folder.parent.iterdir()]


def test_a_copy_is_built_once_and_again_when_the_data_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = Mock(wraps=build_module.build)
    monkeypatch.setattr(build_module, "build", built)
    path = written(tmp_path, row(), row())
    first = prepare_training_copy(Log(path, actions=ACTIONS))
    assert prepare_training_copy(Log(path, actions=ACTIONS)).folder == first.folder
    os.utime(path, (1, 1))  # touched, not changed
    assert len(prepare_training_copy(Log(path, actions=ACTIONS))) == 2
    assert built.call_count == 1
    assert [entry["modified_ns"] for entry in read_document(first.folder, TRAINING_COPY)["inputs"]] == [10**9]
    written(tmp_path, row(reward=2.0), row())  # same size
    assert prepare_training_copy(Log(path, actions=ACTIONS)).reward.tolist() == [2, 1]
    prepare_training_copy(Log(path, actions=("right", "left")))
    assert built.call_count == 3
    # The copy that was replaced is gone, and the arrays opened before still read.
    assert (first.folder.exists(), len([*first.folder.parent.iterdir()]), first.reward.tolist()) == (False, 2, [1, 1])


@pytest.mark.parametrize(
    ("name", "form"), [("log.jsonl", "jsonl"), ("log.parquet", "map.parquet"), ("log.arrow", "arrow")]
)
def test_a_log_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, form: str
) -> None:
    """And one that takes its name with the same size and time before the reading has ended is not read."""
    small_blocks(monkeypatch, 64)
    file = tmp_path / name
    old, new = (data_of([row(reward=reward)] * 12, form) for reward in (1.0, 2.0))
    file.write_bytes(old)
    files, hashes = list_input(str(file), (file.suffix,)), list[str]()

    def replace(done: int, total: int) -> None:
        (tmp_path / "new").write_bytes(new)
        os.utime(tmp_path / "new", ns=(0, files[0].modified_ns))
        os.replace(tmp_path / "new", file)

    rewards = read_blocks(
        files, lambda block: block.table.column("reward").unique().to_pylist(), replace, hashes=hashes
    )
    assert all(values == [1.0] for values in rewards)
    assert hashes == [hashlib.sha256(old).hexdigest()]
    with pytest.raises(DataError, match=f"{name}: expected a file that stays"):
        prepare_training_copy(Log(str(file), actions=ACTIONS), progress=lambda *_: file.write_bytes(old))
    assert prepare_training_copy(Log(str(file), actions=ACTIONS)).reward.tolist() == [1.0] * 12


def planted(**changes: Any) -> Callable[[Path], object]:
    """Returns what changes a copy's manifest and seals it again."""
    return lambda folder: (folder / "manifest.json").write_bytes(
        seal({**read_document(folder, TRAINING_COPY), **changes})
    )


@cases(
    "damage",
    {
        "truncated": lambda folder: os.truncate(folder / "reward.npy", 130),
        "removed": lambda folder: (folder / "reward.npy").unlink(),
        "a link": lambda folder: (folder / "reward.npy").symlink_to(
            (folder / "reward.npy").rename(folder.parent.parent / "elsewhere.npy")
        ),
        "cut manifest": lambda folder: os.truncate(folder / "manifest.json", 90),
        "version": planted(schema_version=2),
        "files": planted(files={"unknown.npy": {"size": 1, "sha256": ""}}),
        "counts": planted(counts={"rows": "1"}),
        "names": planted(action_names=["left", 1]),
        "build": planted(build="build-0"),
    },
)
def test_a_damaged_copy_is_refused_and_built_again(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    path = written(tmp_path, row(), row())
    folder = prepare_training_copy(Log(path, actions=ACTIONS)).folder
    damage(folder)
    with pytest.raises(DataError, match=str(folder)):
        open_training_copy(folder)
    assert prepare_training_copy(Log(path, actions=ACTIONS)).reward.tolist() == [1, 1]
    assert not (open_training_copy(folder).folder / "reward.npy").is_symlink()


def test_a_copy_is_read_only_and_a_failed_build_leaves_none(tmp_path: Path) -> None:
    copy = prepare_training_copy(Log(written(tmp_path, row()), actions=ACTIONS))
    assert not copy.reward.flags.writeable
    assert copy.num_bytes == sum(file.stat().st_size - 128 for file in copy.folder.glob("*.npy"))
    with pytest.raises(DataError):
        prepare_training_copy(Log(written(tmp_path / "bad", row(reward=None)), actions=ACTIONS))
    assert not (tmp_path / "bad" / ".reagent-lite").exists()


@pytest.mark.parametrize(("blocks", "files"), [(0, 200), (20, 200), (1000, 4), (1000, 20)])
def test_a_full_disk_is_named_and_leaves_nothing(tmp_path: Path, blocks: int, files: int) -> None:
    path = written(tmp_path, *(row(mdp_id=str(i), sequence_number=0) for i in range(2000)))
    words = (
        r"expected room for the training copy, more than [\d,]+ bytes, got .+: [\d,]+ bytes free before, [\d,]+ now. "
        "Make room, or let data.training_copy_dir"
    )
    with small_disk(tmp_path / "disk", size=f"{(1 + blocks) * 4096}", files=files) as disk:
        with pytest.raises(DataError, match=words):
            prepare_training_copy(Log(path, actions=ACTIONS, directory=str(disk / "copies")))
        assert not [file for file in disk.rglob("*") if file.is_file()]


def test_places_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = written(tmp_path / "data", row())
    fsspec.filesystem("memory").pipe("/copies/log.json", Path(path).read_bytes())
    copies = [
        prepare_training_copy(Log(path, actions=ACTIONS, directory=place)) for place in (None, str(tmp_path / "chosen"))
    ]
    shutil.rmtree(tmp_path / "data/.reagent-lite")
    (tmp_path / "data").chmod(0o555)  # root may write there all the same
    copies += [prepare_training_copy(Log(log, actions=ACTIONS)) for log in (path, "memory://copies/log.json")]
    assert [str(copy.folder.parent.relative_to(tmp_path)) for copy in copies] == [
        "data/.reagent-lite", "chosen", "cache/reagent-lite", "cache/reagent-lite",
    ]  # fmt: skip
    assert copies[-1].source_line(0) == "memory://copies/log.json:1"
    with pytest.raises(DataError, match=f"{path}/in: .* can be written"):
        prepare_training_copy(Log(path, actions=ACTIONS, directory=f"{path}/in"))
