"""Shards at a place, and the fetch of one: nothing unverified, nothing half, nothing twice."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
from oracles.disks import small_disk
from oracles.shards import multiset, rows_of, stage, table, write

from reagent_lite.config.shard_config import ShardConfig
from reagent_lite.data.shards.fetch import fetch_shard
from reagent_lite.data.shards.partition import make_shards, settings
from reagent_lite.data.shards.store import Pointer, Store, describe
from reagent_lite.data.stage_folder import data_files
from reagent_lite.errors import DataError
from reagent_lite.manifest import SHARDS, open_sealed, seal

ROWS = table([4, 3, 5, 2, 6, 4] * 6)


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """A shared folder, or a bucket if the test asks for one."""
    bucket = f"memory://{tmp_path.name}-{os.getpid()}/shards"
    return Store(bucket if getattr(request, "param", "") == "bucket" else str(tmp_path / "share"))


both_places = pytest.mark.parametrize("store", ["folder", "bucket"], indirect=True)


def publish_shards(store: Store, folder: Path, num_nodes: int = 2) -> Pointer:
    """Makes shards of a timeline, in files of whole episodes (24 rows each), and publishes them."""
    if not (folder / "in").exists():
        for number in range(len(ROWS) // 24):
            write(folder / f"in/part-{number:05d}.parquet", ROWS.slice(24 * number, 24))
        stage(folder / "in")
    with store.replacing() as built:
        config = ShardConfig(training_data_path=str(folder / "in"), num_nodes=num_nodes)
        return describe(built, make_shards(config, built), settings(config))


def change(store: Store, name: str, edit: Callable[[bytes], bytes]) -> None:
    filesystem, path = fsspec.url_to_fs(f"{store.where}/{name}")
    filesystem.pipe(path, edit(filesystem.cat(path)))


def names_in(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


@both_places
def test_shards_go_to_a_place_and_come_back_and_take_the_place_of_older_ones(tmp_path: Path, store: Store) -> None:
    """Who has read the older shards.json gets nothing of the newer shards: their files have another sha256."""
    assert store.pointer() is None
    first = publish_shards(store, tmp_path)
    assert (Store(store.where).pointer(), store.is_whole(first)) == (first, True)
    folders = [tmp_path / "disk" / str(number) for number in range(2)]
    fetched = [sorted(fetch_shard(store, shard, folder)) for shard, folder in zip(first.shards, folders, strict=True)]
    assert fetched == [sorted(shard.files) for shard in first.shards]
    assert multiset([row for folder in folders for row in rows_of(folder)]) == multiset(ROWS.to_pylist())
    assert all(file.name.endswith(".lock") for file in (tmp_path / "disk").rglob(".*"))
    second = publish_shards(store, tmp_path, 3)
    assert publish_shards(store, tmp_path, 3) == store.pointer() == second
    assert (store.is_whole(first), store.is_whole(second)) == (False, True)
    assert first.generation != second.generation
    with pytest.raises(DataError, match=r"shards\.json says"):
        fetch_shard(store, first.shards[0], tmp_path / "too_late")
    assert not (tmp_path / "too_late").exists()
    assert "://" in store.where or names_in(Path(store.where)) == {"shards"}


@both_places
def test_only_what_is_missing_or_wrong_is_fetched(tmp_path: Path, store: Store) -> None:
    shard, other = publish_shards(store, tmp_path).shards
    target = tmp_path / "disk"
    fetch_shard(store, shard, target)
    first, second, manifest = (
        target / f"{name}" for name in ("part-00000.parquet", "part-00001.parquet", "manifest.json")
    )
    before = [(path.stat().st_ino, path.stat().st_mtime_ns) for path in (target, first, second, manifest)]
    assert fetch_shard(store, shard, target) == ()
    assert [(path.stat().st_ino, path.stat().st_mtime_ns) for path in (target, first, second, manifest)] == before
    second.write_bytes(second.read_bytes()[:20] + b"?" + second.read_bytes()[21:])
    first.unlink()
    assert fetch_shard(store, shard, target) == (first.name, second.name)
    manifest.write_bytes(b"{")
    (target / "part-00009.parquet").write_bytes(b"of another shard")
    assert (fetch_shard(store, shard, target), names_in(target)) == ((manifest.name,), set(shard.files))
    second.symlink_to(second.rename(tmp_path / "elsewhere"))  # which readers of the folder refuse
    assert (fetch_shard(store, shard, target), second.is_symlink()) == ((second.name,), False)
    assert sorted(fetch_shard(store, other, target)) == sorted(other.files)  # another shard takes its place
    assert {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in target.iterdir()} == {
        name: entry["sha256"] for name, entry in other.files.items()
    }


@both_places
@pytest.mark.parametrize("name", ["part-00000.parquet", "manifest.json"])
def test_an_altered_shard_is_refused(tmp_path: Path, store: Store, name: str) -> None:
    shard = publish_shards(store, tmp_path).shards[0]
    change(store, f"shards/{shard.folder}/{name}", lambda data: data[:9] + bytes([data[9] ^ 1]) + data[10:])
    digest = shard.files[name]["sha256"]
    with pytest.raises(DataError, match=rf"{shard.folder}/{name}: expected .*{digest}.*, got .*sha256"):
        fetch_shard(store, shard, tmp_path / "disk")
    # readers refuse what is there
    words = "nothing at this path" if name == "manifest.json" else f"{name}: expected .* got no such file"
    with pytest.raises(DataError, match=words):
        data_files(str(tmp_path / "disk"))


def planted(data: bytes) -> bytes:
    document = open_sealed(data, "", SHARDS)
    files = {"../planted": {"size": 0, "sha256": ""}}
    return seal({**document, "shards": [{**entry, "files": files} for entry in document["shards"]]})


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda data: data.replace(b'"num_nodes": 2', b'"num_nodes": 3'), "the manifest's own SHA-256 .*Remove it"),
        (planted, r"expected names of files in its own folder .*, got '../planted'\. Remove it"),
    ],
)
def test_what_was_altered_or_removed_at_the_place_is_noticed(
    tmp_path: Path, store: Store, edit: Callable[[bytes], bytes], message: str
) -> None:
    pointer = publish_shards(store, tmp_path)
    (tmp_path / "share/shards" / pointer.shards[1].folder / "part-00000.parquet").unlink()
    assert not store.is_whole(pointer)
    # the same content, put in its place
    assert (publish_shards(store, tmp_path), store.is_whole(pointer)) == (pointer, True)
    change(store, "shards/shards.json", edit)
    with pytest.raises(DataError, match=rf"shards\.json: .*{message}"):
        store.pointer()


def test_a_link_stays_and_its_folder_is_replaced_on_its_own_disk(tmp_path: Path, store: Store) -> None:
    target, disk = tmp_path / "shard", tmp_path / "big" / "disk"
    disk.mkdir(parents=True)
    target.symlink_to(disk)
    for shard in publish_shards(store, tmp_path).shards:
        fetch_shard(store, shard, target)
        assert (target.is_symlink(), names_in(disk), names_in(disk.parent)) == (
            True, set(shard.files), {".disk.lock", "disk"},
        )  # fmt: skip


def test_other_things_are_not_replaced(tmp_path: Path, store: Store) -> None:
    """Nor is the input, a stage's folder, which may hold files of a shard's names and bytes."""
    (shard,) = publish_shards(store, tmp_path, 1).shards
    (tmp_path / "file").write_text("thesis")
    write(tmp_path / "folder/log.parquet", ROWS)
    before = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("[!.]*")}
    for name, words in (
        ("file", "file: expected nothing, or a shard"),
        ("folder", "folder: expected nothing, or a shard"),
        ("in", "in: expected nothing, or a shard"),
        ("file/shard", "folder for the shard that can be"),
    ):
        with pytest.raises(DataError, match=words):
            fetch_shard(store, shard, tmp_path / name)
    assert {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("[!.]*")} == before


def test_a_disk_that_is_full(tmp_path: Path, store: Store) -> None:
    """What was there stays; with enough free bytes the fetch goes on where it was."""
    shard = publish_shards(store, tmp_path).shards[0]
    with small_disk(tmp_path / "disk", size="64k", files=64) as disk:
        (disk / "other").write_bytes(bytes(65_536 - 4096 * 3))
        with pytest.raises(DataError, match="No space left on device"):
            fetch_shard(store, shard, disk / "shard")
        with pytest.raises(DataError, match=r"no such file|none among"):
            data_files(str(disk / "shard"))  # readers refuse what is there
        (disk / "other").unlink()
        assert fetch_shard(store, shard, disk / "shard")
        assert names_in(disk / "shard") == set(shard.files)
