"""Parts of machines: every row in exactly one, whole episodes, the same whatever the order of files and threads."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from helpers.event_files import small_blocks
from helpers.events import event
from helpers.logs import episode_code, random_rows, split_mix, write_lines
from helpers.shards import multiset, names, rows_of, stage, table, write
from hypothesis import given, settings
from hypothesis import strategies as st

from reagent_lite.config.shard_config import ShardConfig
from reagent_lite.data import shard_files
from reagent_lite.data.copy.prepared_copy import prepare_training_copy
from reagent_lite.data.copy.training_copy import TrainingCopy
from reagent_lite.data.logs import Log
from reagent_lite.data.partition import Partition
from reagent_lite.data.shard_files import log_of_shard, write_shard
from reagent_lite.data.stage_folder import StageManifest
from reagent_lite.errors import DataError, NoRowsError

LENGTHS = [3, 1, 9, 4, 4, 17, 2, 6, 1, 1, 8, 5]


def made(
    path: Path, folder: Path, num_nodes: int, **keys: Any
) -> tuple[list[list[dict[str, Any]]], tuple[StageManifest, ...]]:
    """Returns the rows of each machine, and the manifests."""
    folders = [folder / str(node) for node in range(num_nodes)]
    manifests = []
    for node, part in enumerate(folders):
        part.mkdir(parents=True)
        tree = {"training_data_path": str(path), "num_nodes": num_nodes, "node_index": node, **keys}
        config = ShardConfig(**tree)
        manifests.append(write_shard(config, log_of_shard(config), part))
    return [rows_of(part) for part in folders], tuple(manifests)


@pytest.fixture
def staged(tmp_path: Path) -> StageManifest:
    """The manifest of a timeline of six files, in."""
    for number in range(6):
        write(tmp_path / f"in/{number}.parquet", table(LENGTHS[2 * number : 2 * number + 2], first=2 * number))
    return stage(tmp_path / "in")


@pytest.fixture
def scattered(tmp_path: Path) -> Path:
    """A log whose episodes run side by side."""
    rows = table(LENGTHS).take(pa.array(np.random.default_rng(0).permutation(sum(LENGTHS)))).sort_by("sequence_number")
    return write(tmp_path / "in/log.parquet", rows).parent


def test_whole_files_by_hand(tmp_path: Path) -> None:
    """100 rows in files of 40, 30, 20 and 10, the largest first to the machine with the fewest rows."""
    for rows in (40, 30, 20, 10):
        write(tmp_path / f"{rows}.parquet", table([5] * (rows // 5), first=rows))
    stage(tmp_path)
    log = Log(str(tmp_path))

    def divided(nodes: int) -> list[list[str]] | None:
        parts = [
            Partition(num_nodes=nodes, node=node, seed=0).files_of(log.files, log.manifest) for node in range(nodes)
        ]
        if any(file.selection for part in parts for file in part):
            assert all([file.name for file in part] == [file.name for file in log.files] for part in parts)
            return None
        return [sorted(file.name[:2] for file in part) for part in parts]

    assert [divided(nodes) for nodes in (1, 2, 3, 5)] == [
        [["10", "20", "30", "40"]], [["10", "40"], ["20", "30"]],
        None, None,  # 40 rows are more than a tenth above 33.3
    ]  # fmt: skip


def test_rows_go_to_the_machine_that_the_hash_of_their_episode_names(tmp_path: Path, scattered: Path) -> None:
    """The hash by other means: BLAKE2b of the name, SplitMix64's finalizer before and after the salt of seed 1."""
    shards, _ = made(scattered, tmp_path / "out", 3, seed=1)
    machines = {
        name: split_mix(episode_code(name) ^ split_mix(1 << 32)) % 3
        for name in [f"e{number}" for number in range(len(LENGTHS))]
    }
    assert {name: number for number, shard in enumerate(shards) for name in names(shard)} == machines


def test_the_number_of_threads_changes_no_byte_and_the_seed_does(
    tmp_path: Path, scattered: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = []
    for cores, seed in (({0, 1, 2, 3}, 0), ({0}, 0), ({0}, 1)):  # as many threads as cores
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: cores)
        _, manifests = made(scattered, tmp_path / f"out-{len(digests)}", 2, seed=seed)
        digests.append([manifest.digest for manifest in manifests])
    assert digests[0] == digests[1] != digests[2]


IDS: dict[str, Callable[[pa.Array], pa.Array]] = {
    "all": lambda names: names,
    # every third row is an episode of its own
    "some": lambda names: pc.if_else(pa.array(np.arange(len(names)) % 3 == 0), pa.scalar(None, pa.string()), names),
    "integers": lambda names: pc.utf8_slice_codeunits(names, 1).cast(pa.int64()),
    "dictionary": lambda names: names.dictionary_encode(),
}


@settings(max_examples=25, deadline=None)
@given(
    files=st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=15), min_size=1, max_size=4),
    chunk_bytes=st.sampled_from([0, 1 << 13, 1 << 27]),
    num_nodes=st.integers(1, 6),
    seed=st.integers(0, 3),
    spread=st.booleans(),
    ids=st.sampled_from([*IDS]),
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
        rows = rows.set_column(0, "mdp_id", IDS[ids](rows["mdp_id"].combine_chunks()))
        tables.append(rows.sort_by("sequence_number") if spread else rows)
        write(folder / "in" / f"{number}.parquet", tables[-1])
    if timeline:  # whose files never share an episode
        stage(folder / "in")
    whole = pa.concat_tables(tables)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_files, "CHUNK_BYTES", chunk_bytes)
        shards, manifests = made(folder / "in", folder / "out", num_nodes, seed=seed)
    assert multiset([row for shard in shards for row in shard]) == multiset(whole.to_pylist())
    kept = pd.DataFrame([row | {"shard": number} for number, shard in enumerate(shards) for row in shard])
    episodes = kept.dropna(subset=["mdp_id"]).groupby("mdp_id")
    assert (episodes["shard"].nunique() == 1).all()
    assert episodes["sequence_number"].is_monotonic_increasing.all()  # rows keep the order of the input
    assert [manifest.rows for manifest in manifests] == [len(shard) for shard in shards]
    assert {manifest.columns["of_our_own"] for manifest in manifests if manifest.rows} == {"int64"}


@pytest.mark.parametrize("block_bytes", [3000, 1 << 20])
def test_json_lines_with_columns_of_mixed_types(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    """A name in one row and an index in another, a column that begins late, ints and floats: all are kept.

    Objects that are empty in every row are JSON texts, as Parquet has no type of objects without keys.
    """
    small_blocks(monkeypatch, block_bytes)
    rows = [
        {**row, "action": row["action"] if n >= 200 else n % 2, "reward": row["reward"] if n >= 100 else n,
         "next": [], "empty": [{}], **({"metrics": {"clicks": 1.5}} if n > 350 else {})}
        for n, row in enumerate(random_rows(400))
    ]  # fmt: skip
    shards, _ = made(write_lines(tmp_path / "in" / "log.jsonl", rows), tmp_path / "out", 3)
    by_key = {(row["mdp_id"], row["sequence_number"]): row for shard in shards for row in shard}
    assert len(by_key) == 400
    for row in rows:
        kept = by_key[row["mdp_id"], row["sequence_number"]]
        assert json.loads(kept["action"]) == row["action"]
        assert (kept.get("metrics") or None) == row.get("metrics")
        assert (kept["reward"], kept["next"], kept["empty"]) == (row["reward"], [], "[{}]")


def test_replicas_are_whole_and_in_orders_of_their_own(tmp_path: Path, scattered: Path) -> None:
    copies, _ = made(scattered, tmp_path / "out", 3, layout="replicas")
    for copy in copies:
        # each episode in one piece
        assert (multiset(copy), len(names(copy))) == (multiset(rows_of(scattered)), len(LENGTHS))
    assert len({tuple(names(copy)) for copy in copies}) == 3
    assert made(scattered, tmp_path / "again", 3, layout="replicas")[0] == copies


def test_more_machines_than_episodes(tmp_path: Path) -> None:
    write(tmp_path / "in" / "log.parquet", table([4, 4]))
    shards, manifests = made(tmp_path / "in", tmp_path / "out", 5)
    folders = [tmp_path / "out" / str(node) for node in range(5)]
    assert [StageManifest.read(str(folder)) for folder in folders] == list(manifests)
    assert sum(map(len, shards)) == 8
    empty = folders[shards.index([])]
    assert [file.name for file in empty.iterdir()] == ["manifest.json"]
    with pytest.raises(NoRowsError, match="none, as its manifest"):
        _ = Log(str(empty)).files


def test_the_part_of_a_stage_knows_its_parent(tmp_path: Path, staged: StageManifest) -> None:
    _, manifests = made(tmp_path / "in", tmp_path / "out", 2)
    sums = {name: entry["sha256"] for name, entry in staged.files.items()}
    for manifest in manifests:
        assert (manifest.parent, manifest.state_ids, manifest.metric_names, manifest.rows) in [
            (staged.digest, (0, 1), ("m",), rows)
            for rows in (31, 30)  # 21 + 8 + 2 and 13 + 13 + 4
        ]
        assert {file.name: file.sha256 for file in manifest.inputs} == sums  # of files that it did not read, too


def copies(path: Path, folder: Path, nodes: int, **keys: Any) -> list[TrainingCopy]:
    parts = [Partition(num_nodes=nodes, node=node, seed=0) for node in range(nodes)] if nodes > 1 else [None]
    return [
        prepare_training_copy(Log(str(path), actions=("a", "b"), directory=str(folder), partition=part, **keys))
        for part in parts
    ]


@pytest.mark.parametrize("kind", ["transitions", "events", "timeline"])
def test_copies_of_machines_are_the_rows_of_one(tmp_path: Path, kind: str) -> None:
    """Each array of the whole copy, row by row, is in the copy of the machine that has the row's episode."""
    path = tmp_path / "in"
    if kind == "events":
        lengths = [n % 4 + 1 for n in range(30)]
        write_lines(path / "log.jsonl", [
            event(f"e{n}", k, float(k), float(n), action="ab"[k % 2], possible_actions=["a", "b"],
                  terminal=k == last - 1)
            for n, last in enumerate(lengths) for k in range(last)
        ])  # fmt: skip
    else:
        for number in range(6):
            write(path / f"{number}.parquet", table(LENGTHS[2 * number : 2 * number + 2], first=2 * number))
    if kind == "timeline":
        stage(path)
    (whole,) = copies(path, tmp_path / "copies", 1)
    parts = copies(path, tmp_path / "copies", 2)
    assert min(map(len, parts)) > 0
    columns = ("action", "next_action", "reward", "bootstrap", "time_diff", "sequence", "origin_line")

    def rows(copy: TrainingCopy) -> list[Any]:
        hashes = copy.episode_hash[copy.episode]
        following = copy.state[copy.next_index]
        files = [Path(copy.files[number]).name for number in copy.origin_file]
        values = zip(*(getattr(copy, name).tolist() for name in columns), strict=True)
        return sorted(
            zip(hashes.tolist(), files, values, copy.state[: len(copy)].tolist(), following.tolist(), strict=True)
        )

    assert sorted(row for part in parts for row in rows(part)) == rows(whole)
    assert not {*parts[0].episode_hash.tolist()} & {*parts[1].episode_hash.tolist()}
    if kind == "timeline":
        assert sorted(file for part in parts for file in part.files) == sorted(whole.files)
    folders = [part.folder for part in parts]
    assert [part.folder for part in copies(path, tmp_path / "copies", 2)] == folders  # up to date
    assert copies(path, tmp_path / "copies", 1)[0].folder == whole.folder


def test_single_decisions_and_illegal_ids_go_to_one_machine_each(tmp_path: Path) -> None:
    """Rows without an mdp_id are episodes of their own; the machine that gets a row with an illegal one reports it."""
    rows = [{"state_features": {"0": float(n)}, "action": "a", "reward": float(n)} for n in range(40)]
    parts = copies(write_lines(tmp_path / "in/log.jsonl", rows), tmp_path / "copies", 3)
    assert sorted(np.concatenate([part.reward for part in parts]).tolist()) == [float(n) for n in range(40)]
    assert all(len(part) for part in parts)
    broken = write_lines(
        tmp_path / "broken.jsonl",
        [event("e", 0, 0.0, mdp_id={"no": "id"}, terminal=True, action="a", possible_actions=["a"])],
    )
    found = []
    for node in range(3):
        part = Partition(num_nodes=3, node=node, seed=0)
        log = Log(str(broken), actions=("a", "b"), directory=str(tmp_path / "copies"), partition=part)
        with pytest.raises(DataError) as error:
            prepare_training_copy(log)
        found.append("mdp_id" in str(error.value))
    assert sorted(found) == [False, False, True]


OWN = {
    "A": pa.array(range(5), pa.float16()),
    "a": pa.array(range(5), pa.duration("ms")),
    "hash of the episode": pa.array([b"x", None] * 2 + [b""], pa.large_binary()),
    "pairs": pa.array([[("k", 1), ("k", 2)]] * 5, pa.map_(pa.string(), pa.int16())),
}


def test_columns_of_any_type_stay(tmp_path: Path) -> None:
    """Names that only their case tells apart, a key twice in a map, and types that few tools know."""
    rows = table([2, 3])
    rows = pa.table({name: rows[name] for name in rows.column_names} | OWN)
    made(write(tmp_path / "in" / "log.parquet", rows), tmp_path / "out", 1)
    (file,) = Log(str(tmp_path / "out" / "0")).files
    assert pq.ParquetFile(file.path).read().sort_by([("mdp_id", "ascending"), ("sequence_number", "ascending")]).select(
        [*OWN]
    ) == rows.select([*OWN])


@pytest.mark.parametrize(("place", "words"), [(8, "expected"), (-12, "expected"), (None, "a symbolic link")])
def test_an_input_that_is_not_as_its_manifest_says_is_refused(
    tmp_path: Path, staged: StageManifest, place: int | None, words: str
) -> None:
    """A bit of a value or of the footer differs, or the file is a link."""
    file = tmp_path / "in" / "3.parquet"
    data = bytearray(file.read_bytes())
    if place is None:
        file.symlink_to(file.rename(tmp_path / "outside.parquet"))
    else:
        data[place] ^= 1
        file.write_bytes(data)
    with pytest.raises(DataError, match=r"3\.parquet: " + words):
        made(tmp_path / "in", tmp_path / "out", 2)


@pytest.mark.parametrize("layout", ["shards", "replicas"])
def test_an_input_without_rows_is_refused(tmp_path: Path, layout: str) -> None:
    write(tmp_path / "in" / "log.parquet", table([]))
    with pytest.raises(NoRowsError, match="expected rows of data, got none"):
        made(tmp_path / "in", tmp_path / "out", 2, layout=layout)
