"""How many buckets rows need, by their files and the memory there is; groups of whole hashes in order."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from reagent_lite.data import buckets
from reagent_lite.data.stage import data_files


@pytest.mark.parametrize("suffix", [".parquet", ".feather"])
def test_size_in_memory_is_estimated_from_the_largest_file(tmp_path: Path, suffix: str) -> None:
    """A file of one row is mostly header; blocks of Arrow IPC are parts of a larger batch."""
    rows = 100_000
    table = pa.table({f"c{number}": np.random.default_rng(number).normal(size=rows) for number in range(10)})
    write = pq.write_table if suffix == ".parquet" else pyarrow.feather.write_feather
    write(table.slice(0, 1), tmp_path / f"a{suffix}")
    write(table, tmp_path / f"b{suffix}")
    assert buckets._arrow_bytes(data_files(str(tmp_path))) == pytest.approx(rows * 80, rel=0.1)


@pytest.mark.parametrize(("memory_bytes", "largest"), [(1 << 12, 1 << 19), (1 << 18, 1 << 14), (1 << 22, 1 << 14)])
def test_more_memory_makes_smaller_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory_bytes: int, largest: int
) -> None:
    """1 MiB of rows on the disk, in part or not at all: in each group all rows of a hash, in the order they came."""
    sizes = {"BUCKET_BYTES": 1 << 12, "_FEW_BUCKETS": 4, "_PIECE_BYTES": 1 << 8, "_CHUNK_BYTES": 1}
    for name, value in sizes.items():
        monkeypatch.setattr(buckets, name, value)
    hashes = np.random.default_rng(0).integers(0, buckets.HASHES, 1 << 13).repeat(8)
    table = pa.table({"hash": np.random.default_rng(1).permutation(hashes), "row": np.arange(1 << 16)})
    pq.write_table(table, tmp_path / "log.parquet")
    held = buckets.Buckets(tmp_path, data_files(str(tmp_path)), memory_bytes)
    for part in table.to_batches(max_chunksize=500):
        held.add(pa.Table.from_batches([part]), part["hash"].to_numpy())
    groups = [pa.concat_tables(group.tables()) for group in held.groups(1 << 13)]
    assert max(group.nbytes for group in groups) <= largest
    found = pa.concat_tables(buckets.in_order([group], pc.sort_indices(group["hash"])) for group in groups)
    assert found.equals(table.take(pc.sort_indices(table["hash"])))
    assert [file.name for file in tmp_path.iterdir()] == ["log.parquet"]
