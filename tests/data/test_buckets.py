"""How many buckets rows need, by their files."""

from pathlib import Path

import numpy as np
import pyarrow as pa
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
