"""Shards at a place, and the fetch of one: nothing unverified, nothing half, nothing twice."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
from oracles.disks import small_disk
from oracles.shards import multiset, rows_of, stage, table, write

from reagent_lite.config.shard import ShardConfig
from reagent_lite.data.shards.fetch import fetch_shard
from reagent_lite.data.shards.partition import make_shards, settings
from reagent_lite.data.shards.store import Pointer, Store, describe
from reagent_lite.data.stage import data_files
from reagent_lite.errors import DataError
from reagent_lite.manifest import SHARDS, opened, sealed

ROWS = table([4, 3, 5, 2, 6, 4] * 6)


@pytest.fixture(params=["folder", "bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "share") if request.param == "folder" else f"memory://{tmp_path.name}-{os.getpid()}/shards"


def publish_shards(store: Store, folder: Path, num_nodes: int = 2) -> Pointer:
    """Makes shards of a timeline, in files of whole episodes (24 rows each), and publishes them."""
    source = folder / "in"
    if not source.exists():
        for number in range(len(ROWS) // 24):
            write(source / f"part-{number:05d}.parquet", ROWS.slice(24 * number, 24))
        stage(source)
    with store.replacing() as built:
        config = ShardConfig(training_data_path=str(source), num_nodes=num_nodes)
        return describe(built, make_shards(config, built), settings(config))


def change(place: str, name: str, edit: Callable[[bytes], bytes]) -> None:
    with fsspec.open(f"{place}/{name}", "rb") as stream:
        data = stream.read()
    with fsspec.open(f"{place}/{name}", "wb") as stream:
        stream.write(edit(data))


def test_shards_go_to_a_place_and_come_back(tmp_path: Path, place: str) -> None:
    store = Store(place)
    assert store.pointer() is None
    pointer = publish_shards(store, tmp_path)
    assert Store(place).pointer() == pointer
    assert store.is_whole(pointer)
    rows = []
    for number, shard in enumerate(pointer.shards):
        fetched = fetch_shard(store, shard, tmp_path / "disk" / str(number))
        assert sorted(fetched) == sorted(shard.files)
        rows += rows_of(tmp_path / "disk" / str(number))
    assert multiset(rows) == multiset(ROWS.to_pylist())
    assert not [file for file in (tmp_path / "disk").rglob(".*") if not file.name.endswith(".lock")]


def test_shards_take_the_place_of_older_ones(tmp_path: Path, place: str) -> None:
    """Who has read the older shards.json gets nothing of the newer shards: their files have another sha256."""
    store = Store(place)
    first = publish_shards(store, tmp_path)
    second = publish_shards(store, tmp_path, 3)
    assert store.pointer() == second != first
    assert store.is_whole(second)
    assert not store.is_whole(first)
    assert first.generation != second.generation
    with pytest.raises(DataError, match=r"shards\.json says"):
        fetch_shard(store, first.shards[0], tmp_path / "too_late")
    assert not (tmp_path / "too_late").exists()
    assert publish_shards(store, tmp_path, 3) == second
    assert store.is_whole(second)
    if "://" not in place:
        assert [file.name for file in Path(place).iterdir()] == ["shards"]


def test_only_what_is_missing_or_wrong_is_fetched(tmp_path: Path, place: str) -> None:
    store = Store(place)
    shard, other = publish_shards(store, tmp_path).shards
    target = tmp_path / "disk"
    fetch_shard(store, shard, target)

    def stamps() -> dict[str, tuple[int, int]]:
        return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in (target, *target.iterdir())}

    before = stamps()
    assert fetch_shard(store, shard, target) == ()
    assert stamps() == before
    part = target / "part-00001.parquet"
    part.write_bytes(part.read_bytes()[:20] + b"?" + part.read_bytes()[21:])
    assert fetch_shard(store, shard, target) == ("part-00001.parquet",)
    (target / "part-00000.parquet").unlink()
    assert fetch_shard(store, shard, target) == ("part-00000.parquet",)
    (target / "manifest.json").write_bytes(b"{")
    assert fetch_shard(store, shard, target) == ("manifest.json",)
    (target / "part-00009.parquet").write_bytes(b"of another shard")
    assert fetch_shard(store, shard, target) == ()
    assert {file.name for file in target.iterdir()} == set(shard.files)
    part.rename(tmp_path / "elsewhere")
    part.symlink_to(tmp_path / "elsewhere")  # which readers of the folder refuse
    assert fetch_shard(store, shard, target) == ("part-00001.parquet",)
    assert not part.is_symlink()
    # another shard takes its place
    assert sorted(fetch_shard(store, other, target)) == sorted(other.files)
    assert {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in target.iterdir()} == {
        name: entry["sha256"] for name, entry in other.files.items()
    }


@pytest.mark.parametrize("name", ["part-00000.parquet", "manifest.json"])
def test_an_altered_shard_is_refused(tmp_path: Path, place: str, name: str) -> None:
    store = Store(place)
    shard = publish_shards(store, tmp_path).shards[0]
    change(place, f"shards/{shard.folder}/{name}", lambda data: data[:9] + bytes([data[9] ^ 1]) + data[10:])
    digest = shard.files[name]["sha256"]
    with pytest.raises(DataError, match=rf"{shard.folder}/{name}: expected .*{digest}.*, got .*sha256"):
        fetch_shard(store, shard, tmp_path / "disk")
    if name == "manifest.json":
        assert not (tmp_path / "disk").exists()
    else:
        with pytest.raises(DataError, match=f"{name}: expected .* got no such file"):
            data_files(str(tmp_path / "disk"))  # readers refuse what is there


def planted(data: bytes) -> bytes:
    document = opened(data, "", SHARDS)
    document["shards"][0]["files"] = {"../planted": {"size": 0, "sha256": ""}}
    return sealed(document)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda data: data.replace(b'"num_nodes": 2', b'"num_nodes": 3'), "the manifest's own SHA-256 .*Remove it"),
        (planted, r"expected names of files in its own folder .*, got '../planted'\. Remove it"),
    ],
)
def test_an_altered_pointer_is_refused(tmp_path: Path, edit: Callable[[bytes], bytes], message: str) -> None:
    store = Store(str(tmp_path / "share"))
    publish_shards(store, tmp_path)
    change(store.where, "shards/shards.json", edit)
    with pytest.raises(DataError, match=rf"shards\.json: .*{message}"):
        store.pointer()


def test_files_that_are_missing_make_shards_not_whole(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "share"))
    pointer = publish_shards(store, tmp_path)
    (tmp_path / "share/shards" / pointer.shards[1].folder / "part-00000.parquet").unlink()
    assert not store.is_whole(pointer)
    assert publish_shards(store, tmp_path) == pointer  # the same content, put in its place
    assert store.is_whole(pointer)


def test_a_link_stays_and_its_folder_is_replaced_on_its_own_disk(tmp_path: Path) -> None:
    store, target, disk = Store(str(tmp_path / "share")), tmp_path / "shard", tmp_path / "big" / "disk"
    disk.mkdir(parents=True)
    target.symlink_to(disk)
    for shard in publish_shards(store, tmp_path).shards:
        fetch_shard(store, shard, target)
        assert target.is_symlink()
        assert {file.name for file in disk.iterdir()} == set(shard.files)
        assert sorted(path.name for path in disk.parent.iterdir()) == [".disk.lock", "disk"]


@pytest.mark.parametrize("what", ["file", "folder", "input"])
def test_other_things_are_not_replaced(tmp_path: Path, what: str) -> None:
    """Nor is the input, a stage's folder, which may hold files of a shard's names and bytes."""
    store = Store(str(tmp_path / "share"))
    shard = publish_shards(store, tmp_path, 1).shards[0]
    target = tmp_path / "in" if what == "input" else tmp_path / "mine"
    if what == "file":
        target.write_text("thesis")
    elif what == "folder":
        write(target / "log.parquet", ROWS)

    def content() -> list[bytes]:
        return [file.read_bytes() for file in ([target] if what == "file" else sorted(target.iterdir()))]

    before = content()
    with pytest.raises(DataError, match=f"{target.name}: expected nothing, or a shard"):
        fetch_shard(store, shard, target)
    assert content() == before


def test_a_disk_that_is_full_and_a_place_that_is_no_folder(tmp_path: Path) -> None:
    """What was there stays; with enough free bytes the fetch goes on where it was."""
    store = Store(str(tmp_path / "share"))
    shard = publish_shards(store, tmp_path).shards[0]
    assert sum(entry["size"] for entry in shard.files.values()) > 12_000
    with small_disk(tmp_path / "disk", size="64k", files=64) as disk:
        block = disk / "other"
        block.write_bytes(bytes(65_536 - 4096 * 3))
        with pytest.raises(DataError, match="No space left on device"):
            fetch_shard(store, shard, disk / "shard")
        with pytest.raises(DataError, match=r"no such file|none among"):
            data_files(str(disk / "shard"))  # readers refuse what is there
        block.unlink()
        assert fetch_shard(store, shard, disk / "shard")
        assert {file.name for file in (disk / "shard").iterdir()} == set(shard.files)
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="folder for the shard that can be"):
        fetch_shard(store, shard, tmp_path / "file" / "shard")
