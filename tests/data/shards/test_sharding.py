"""Shards: every row in exactly one, whole episodes, the same whatever the order of files and threads."""

import errno
import hashlib
import json
import os
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.event_files import small_blocks
from oracles.logs import random_rows, write_lines
from oracles.shards import multiset, names, rows_of, stage, table, write

from reagent_lite.config.shard import ShardConfig
from reagent_lite.data.shards import partition
from reagent_lite.data.shards.partition import make_shards
from reagent_lite.data.stage import StageManifest, data_files
from reagent_lite.errors import DataError, NoRowsError

LENGTHS = [3, 1, 9, 4, 4, 17, 2, 6, 1, 1, 8, 5]
Kind = Literal["shards", "replicas"]


def made(
    path: Path, folder: Path, num_nodes: int, *, seed: int = 0, layout: Kind = "shards"
) -> tuple[list[list[dict[str, Any]]], tuple[StageManifest, ...]]:
    """Returns the rows of each shard, and the manifests."""
    folder.mkdir(parents=True)
    config = ShardConfig(training_data_path=str(path), layout=layout, num_nodes=num_nodes, seed=seed)
    manifests = make_shards(config, folder)
    return [rows_of(folder / f"shard-{number:05d}") for number in range(num_nodes)], manifests


def many_files(folder: Path) -> Path:
    for number in range(6):
        write(folder / f"{number}.parquet", table(LENGTHS[2 * number : 2 * number + 2], first=2 * number))
    return folder


def scattered(folder: Path) -> Path:
    rows = table(LENGTHS)
    order = np.random.default_rng(0).permutation(rows.num_rows)
    order = order[np.argsort(rows["sequence_number"].to_numpy()[order], kind="stable")]
    write(folder / "log.parquet", rows.take(pa.array(order)))
    return folder


def test_whole_files_by_hand(tmp_path: Path) -> None:
    """100 rows in files of 40, 30, 20 and 10, the largest first to the machine with the fewest rows."""
    for rows in (40, 30, 20, 10):
        write(tmp_path / f"{rows}.parquet", table([5] * (rows // 5), first=rows))
    parent = stage(tmp_path)

    def divided(num_nodes: int) -> list[list[str]] | None:
        whole = partition.whole_files(data_files(str(tmp_path)), parent, ShardConfig(num_nodes=num_nodes))
        return None if whole is None else [sorted(file.name[:2] for file in files) for files in whole]

    assert divided(1) == [["10", "20", "30", "40"]]
    assert divided(2) == [["10", "40"], ["20", "30"]]
    assert divided(3) is None  # 40 rows are more than a tenth above 33.3
    assert divided(5) is None
    assert made(tmp_path, tmp_path / "out", 3)[1][0].report["whole_files"] == 0


def test_rows_go_to_the_machine_that_the_hash_of_their_episode_names(tmp_path: Path) -> None:
    """The hash by other means: BLAKE2b of the name, SplitMix64's finalizer before and after the salt of seed 1."""

    def mix(value: int) -> int:
        value = (value + 0x9E3779B97F4A7C15) % 2**64
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
        return value ^ value >> 31

    def machine(name: str) -> int:
        episode = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
        return mix(episode ^ mix(1 << 32)) % 3

    shards, _ = made(scattered(tmp_path / "in"), tmp_path / "out", 3, seed=1)
    every = [f"e{number}" for number in range(len(LENGTHS))]
    assert [set(names(shard)) for shard in shards] == [{name for name in every if machine(name) == n} for n in range(3)]


def test_the_number_of_threads_changes_no_byte_and_the_seed_does(tmp_path: Path) -> None:
    path, cores = scattered(tmp_path / "in"), os.sched_getaffinity(0)
    _, manifests = made(path, tmp_path / "out", 2)
    _, other = made(path, tmp_path / "other", 2, seed=1)
    os.sched_setaffinity(0, {min(cores)})  # as many threads as cores
    try:
        _, alone = made(path, tmp_path / "alone", 2)
    finally:
        os.sched_setaffinity(0, cores)
    digests, digests_alone, other_digests = ([part.digest for part in made] for made in (manifests, alone, other))
    assert digests_alone == digests != other_digests


EPISODES = st.lists(st.integers(1, 12), min_size=1, max_size=15)


@settings(max_examples=25, deadline=None)
@given(
    files=st.lists(EPISODES, min_size=1, max_size=4),
    chunk_bytes=st.sampled_from([0, 1 << 13, 1 << 27]),
    num_nodes=st.integers(1, 6),
    seed=st.integers(0, 3),
    spread=st.booleans(),
    ids=st.sampled_from(["all", "some", "integers", "dictionary"]),
    timeline=st.booleans(),
)
def test_any_episodes_in_any_files(
    tmp_path_factory: pytest.TempPathFactory, files: list[list[int]], chunk_bytes: int, num_nodes: int, seed: int,
    spread: bool, ids: str, timeline: bool,
) -> None:  # fmt: skip
    folder = tmp_path_factory.mktemp("any")
    tables = []
    for number, lengths in enumerate(files):
        rows = table(lengths, first=100 * number)
        names_here = rows["mdp_id"].combine_chunks()
        if ids == "some":  # every third row is an episode of its own
            names_here = pa.array(
                [None if row % 3 == 0 else name for row, name in enumerate(names_here.to_pylist())], pa.string()
            )
        elif ids == "integers":
            names_here = pa.array([int(name[1:]) for name in names_here.to_pylist()], pa.int64())
        elif ids == "dictionary":
            names_here = names_here.dictionary_encode()
        rows = rows.set_column(0, "mdp_id", names_here)
        if spread:
            rows = rows.take(pa.array(np.argsort(rows["sequence_number"].to_numpy(), kind="stable")))
        write(folder / "in" / f"{number}.parquet", rows)
        tables.append(rows)
    if timeline:  # whose files never share an episode
        stage(folder / "in")
    whole = pa.concat_tables(tables)
    expected = whole.to_pylist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partition, "CHUNK_BYTES", chunk_bytes)
        shards, manifests = made(folder / "in", folder / "out", num_nodes, seed=seed)
    assert multiset([row for shard in shards for row in shard]) == multiset(expected)
    named = [[row for row in shard if row["mdp_id"] is not None] for shard in shards]
    episodes = [name for shard in named for name in {row["mdp_id"] for row in shard}]
    assert len(episodes) == len(set(episodes))
    for shard in named:  # rows keep the order of the input
        last: dict[Any, int] = {}
        for row in shard:
            assert row["sequence_number"] > last.get(row["mdp_id"], -1)
            last[row["mdp_id"]] = row["sequence_number"]
    assert [manifest.rows for manifest in manifests] == [len(shard) for shard in shards]
    assert timeline or manifests[0].columns["of_our_own"] == "int64"
    share = len(expected) / num_nodes
    assert not manifests[0].report["whole_files"] or all(len(shard) <= 1.1 * share for shard in shards)


@pytest.mark.parametrize("block_bytes", [3000, 1 << 20])
def test_json_lines_with_columns_of_mixed_types(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    """A name in one row and an index in another, a column that begins late, ints and floats: all are kept."""
    small_blocks(monkeypatch, block_bytes)
    rows = random_rows(400)
    for number, row in enumerate(rows):
        row["action"] = number % 2 if number < 200 else row["action"]
        row["reward"] = number if number < 100 else row["reward"]
        if number > 350:
            row["metrics"] = {"clicks": 1.5}
    path = write_lines(tmp_path / "in" / "log.jsonl", rows)
    shards, _ = made(path, tmp_path / "out", 3)
    by_key = {(row["mdp_id"], row["sequence_number"]): row for shard in shards for row in shard}
    assert len(by_key) == 400
    for row in rows:
        kept = by_key[row["mdp_id"], row["sequence_number"]]
        assert json.loads(kept["action"]) == row["action"]
        assert kept["reward"] == row["reward"]
        assert (kept["metrics"] or None) == row.get("metrics")


def test_objects_that_are_empty_in_every_row(tmp_path: Path) -> None:
    """They are JSON texts, as Parquet has no type of objects without keys."""
    rows = [{**row, "metrics": {}, "possible_actions": [{}], "next": []} for row in random_rows(3)]
    (shard,), _ = made(write_lines(tmp_path / "in" / "log.jsonl", rows), tmp_path / "out", 1)
    assert [(row["metrics"], row["possible_actions"], row["next"]) for row in shard] == [("{}", "[{}]", [])] * 3


def test_replicas_are_whole_and_in_orders_of_their_own(tmp_path: Path) -> None:
    path = scattered(tmp_path / "in")
    copies, _ = made(path, tmp_path / "out", 3, layout="replicas")
    expected = multiset(rows_of(path))
    for copy in copies:
        assert multiset(copy) == expected
        assert len(names(copy)) == len(LENGTHS)  # each episode in one piece
    assert len({tuple(names(copy)) for copy in copies}) == 3
    assert made(path, tmp_path / "again", 3, layout="replicas")[0] == copies


def test_more_machines_than_episodes(tmp_path: Path) -> None:
    write(tmp_path / "in" / "log.parquet", table([4, 4]))
    shards, manifests = made(tmp_path / "in", tmp_path / "out", 5)
    assert sum(len(shard) for shard in shards) == 8
    for manifest, shard, folder in zip(manifests, shards, sorted((tmp_path / "out").iterdir()), strict=True):
        assert manifest == StageManifest.read(str(folder))
        if not shard:
            assert [file.name for file in folder.iterdir()] == ["manifest.json"]
            with pytest.raises(NoRowsError, match="none, as its manifest"):
                data_files(str(folder))


def test_a_fifo_that_is_called_a_manifest_is_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "manifest.json")
    write(tmp_path / "log.parquet", table([2]))
    assert StageManifest.read(str(tmp_path)) is None
    assert [file.name for file in data_files(str(tmp_path))] == ["log.parquet"]


def test_a_link_in_the_place_of_a_stages_file_is_refused(tmp_path: Path) -> None:
    stage(many_files(tmp_path / "in"))
    file = tmp_path / "in" / "0.parquet"
    file.rename(tmp_path / "outside.parquet")
    file.symlink_to(tmp_path / "outside.parquet")
    with pytest.raises(DataError, match=r"0.parquet: .*regular.*got a link"):
        data_files(str(tmp_path / "in"))


def test_shards_of_a_stage_know_their_parent_and_hold_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = stage(many_files(tmp_path / "in"))
    _, manifests = made(tmp_path / "in", tmp_path / "out", 2)
    for manifest in manifests:
        assert (manifest.parent, manifest.state_ids, manifest.metric_names) == (parent.digest, (0, 1), ("m",))
        assert {file.name: file.sha256 for file in manifest.inputs} == {
            name: entry["sha256"] for name, entry in parent.files.items()
        }
        assert manifest.report["whole_files"] == 6  # 21 + 8 + 2 and 13 + 13 + 4 rows
    # files that stay whole are links: no byte of them is written
    inodes = {file.stat().st_ino for file in (tmp_path / "in").iterdir()}
    linked = [file for file in (tmp_path / "out").rglob("*.parquet") if file.stat().st_ino in inodes]
    assert len(linked) == 6

    def refused(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refused)
    _, (manifest,) = made(tmp_path / "in", tmp_path / "copied", 1)
    assert sorted(entry["sha256"] for entry in manifest.files.values()) == sorted(
        entry["sha256"] for entry in parent.files.values()
    )


def test_columns_of_any_type_stay(tmp_path: Path) -> None:
    """Names that only their case tells apart, a key twice in a map, and types that few tools know."""
    rows = table([2, 3])
    own = {
        "A": pa.array(range(5), pa.float16()),
        "a": pa.array(range(5), pa.duration("ms")),
        "hash of the episode": pa.array([b"x", None] * 2 + [b""], pa.large_binary()),
        "pairs": pa.array([[("k", 1), ("k", 2)]] * 5, pa.map_(pa.string(), pa.int16())),
    }
    for name, values in own.items():
        rows = rows.append_column(name, values)
    write(tmp_path / "in" / "log.parquet", rows)
    made(tmp_path / "in", tmp_path / "out", 1)
    (file,) = data_files(str(tmp_path / "out" / "shard-00000"))
    columns = pq.ParquetFile(file.path).read()
    assert {name: columns.schema.field(name).type for name in own} == {name: array.type for name, array in own.items()}
    order = [("mdp_id", "ascending"), ("sequence_number", "ascending")]
    assert columns.sort_by(order).select(list(own)).to_pylist() == rows.select(list(own)).to_pylist()


@pytest.mark.parametrize("place", ["value", "footer"])
def test_an_input_that_is_not_as_its_manifest_says_is_refused(tmp_path: Path, place: str) -> None:
    stage(many_files(tmp_path / "in"))
    file = tmp_path / "in" / "3.parquet"
    data = bytearray(file.read_bytes())
    data[8 if place == "value" else -12] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(DataError, match=r"3\.parquet: expected"):
        made(tmp_path / "in", tmp_path / "out", 2)


@pytest.mark.parametrize("layout", ["shards", "replicas"])
def test_an_input_without_rows_is_refused(tmp_path: Path, layout: Kind) -> None:
    write(tmp_path / "in" / "log.parquet", table([]))
    with pytest.raises(NoRowsError, match="expected rows of data, got none"):
        made(tmp_path / "in", tmp_path / "out", 2, layout=layout)
