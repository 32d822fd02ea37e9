"""Text in blocks: every row once and with its line, whatever the sizes, packing and threads."""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path
from unittest.mock import Mock

import pytest
from helpers.event_files import EXTENSIONS, blocks_of, lines_of, problems_of, small_blocks, values_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reagent_lite.data.formats import format_table, text_files
from reagent_lite.data.formats.format_table import read_blocks
from reagent_lite.data.formats.input_files import list_input


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    widths=st.lists(st.integers(0, 9) | st.none(), max_size=40),
    newline=st.sampled_from([b"\n", b"\r\n", b"  \n"]),
    last=st.booleans(),
    size=st.integers(3, 60),
    packed=st.booleans(),
)
def test_every_line_comes_once_with_its_number(
    tmp_path: Path, widths: list[int | None], newline: bytes, last: bool, size: int, packed: bool
) -> None:
    """Behind a mark of the byte order, beside blank lines, and whether the last one ends or not."""
    lines = [b"" if width is None else b'{"a": "%s"}' % (b"x" * width) for width in (1, *widths)]
    text = b"\xef\xbb\xbf" + newline.join(lines) + (newline if last else b"")
    path = tmp_path / ("a.json.gz" if packed else "a.json")
    path.write_bytes(gzip.compress(text) if packed else text)
    hashes: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        small_blocks(patch, size)
        blocks = list(read_blocks(list_input(str(path), EXTENSIONS), lambda block: block, hashes=hashes))
    assert values_of(blocks, "a") == ["x" * width for width in (1, *widths) if width is not None]
    assert lines_of(blocks) == [number for number, width in enumerate((1, *widths), 1) if width is not None]
    assert (hashes, blocks[0].where(0)) == ([hashlib.sha256(path.read_bytes()).hexdigest()], f"{path}:1")


def test_a_line_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "LONGEST_ROW_BYTES", 1000)
    monkeypatch.setattr(text_files, "FIRST_BLOCK_BYTES", 100)
    (tmp_path / "a.json").write_bytes(b'{"a": "' + b"x" * 5000)
    assert "a.json:1: expected rows of at most 1000 bytes, got no end of a row in 1600" in str(
        problems_of(tmp_path / "a.json")[0]
    )


def test_wide_rows_make_small_blocks_on_any_number_of_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch, 2000, 12_000)
    monkeypatch.setattr(text_files, "TABLE_BYTES", 50_000)
    # First rows of one id, then of 40, one in each row of 18 bytes: 8 * 40 * 12 000 / 18 = 213 000 bytes in 12 000.
    # 50 000 allow blocks of some 2800 bytes, 160 rows.
    lines = ['{"s": {"%d": 1.0}}\n' % (number % 40 * (number > 9000)) for number in range(18_000)]  # noqa: UP031
    (tmp_path / "a.json").write_text("".join(lines))
    sizes = set()
    for threads in (1, 3, 8):
        monkeypatch.setattr(format_table, "num_threads", lambda threads=threads: threads)
        sizes.add(tuple(block.table.num_rows for block in blocks_of(tmp_path / "a.json")))
    (of_blocks,) = sizes
    assert sum(of_blocks) == 18_000
    assert max(of_blocks[-10:]) < 200 < 600 < max(of_blocks)


def test_progress_ends_at_the_total(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch, 1000)
    (tmp_path / "a.json").write_bytes(b'{"a": 1234567}\n' * 300)
    progress = Mock()
    assert sum(read_blocks(list_input(str(tmp_path), EXTENSIONS), lambda block: block.table.num_rows, progress)) == 300
    calls = [tuple(arguments) for arguments, _ in progress.call_args_list]
    assert (calls[-1], sorted(calls), len(calls) > 2) == ((4500, 4500), calls, True)
