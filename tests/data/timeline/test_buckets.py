"""Rows by a hash: groups of whole hashes in order, whatever memory there is."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from reagent_lite.data.logs import Log
from reagent_lite.data.timeline import buckets


@pytest.mark.parametrize("memory_bytes", [1 << 10, 1 << 16, 1 << 20])
def test_groups_have_all_rows_of_a_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory_bytes: int) -> None:
    """256 KiB of rows on the disk, in part or not at all: in each group all rows of a hash, in the order they came."""
    monkeypatch.setattr(buckets, "_CHUNK_BYTES", 1 << 12)
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 1 << 10)
    table = pa.table(
        {
            "hash": np.random.default_rng(1).permutation(
                np.random.default_rng(0).integers(0, buckets.HASHES, 1 << 11).repeat(8)
            ),
            "row": np.arange(1 << 14),
        }
    )
    pq.write_table(table, tmp_path / "log.parquet")
    held = buckets.Buckets(tmp_path, Log(str(tmp_path)).files, memory_bytes)
    for part in table.to_batches(max_chunksize=500):
        held.add(pa.Table.from_batches([part]), part["hash"].to_numpy())
    groups = [pa.concat_tables(group.tables()) for group in held.groups(1 << 13)]
    assert max(group.nbytes for group in groups) <= 1 << 14
    assert pa.concat_tables(buckets.reordered_rows([group], pc.sort_indices(group["hash"])) for group in groups).equals(
        table.take(pc.sort_indices(table["hash"]))
    )
    assert [file.name for file in tmp_path.iterdir()] == ["log.parquet"]
