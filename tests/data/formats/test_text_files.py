"""Text in blocks: every row once and with its line, whatever the sizes, packing and threads."""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracles.event_files import EXTENSIONS, blocks_of, lines_of, problems_of, small_blocks, values_of

from reagent_lite.data.formats import reading, text_files
from reagent_lite.data.formats.blocks import Block, Position
from reagent_lite.data.formats.files import InputFile, list_input
from reagent_lite.data.formats.reading import read_blocks


def whole_lines(file: InputFile, size: int, position: Position) -> list[tuple[int, list[bytes]]]:
    """Blocks of `size` bytes as (first line, lines)."""
    blocks: list[tuple[int, list[bytes]]] = []

    def parse(text: bytes, line: int) -> Block:
        blocks.append((line, text.splitlines(keepends=True)))
        return Block(file=file, file_number=0, table=pa.table({"": pa.nulls(1)}), lines=np.array([line]))

    with pytest.MonkeyPatch.context() as patch:
        small_blocks(patch, size)
        for block in text_files.read_text(file, position, lambda text: text.rfind(b"\n") + 1, parse):
            block()
    return blocks


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    lines=st.lists(st.binary(max_size=9).map(lambda line: line.translate(None, b"\n\r") + b"\n"), max_size=40),
    last=st.sampled_from([b"", b"x", b"xyz"]),
    size=st.integers(3, 60),
    packed=st.booleans(),
)
def test_every_line_comes_once_with_its_number(
    tmp_path: Path, lines: list[bytes], last: bytes, size: int, packed: bool
) -> None:
    lines = [b"first\n", *lines, *([last] if last else [])]
    data = b"\xef\xbb\xbf" + b"".join(lines)
    path = tmp_path / ("a.json.gz" if packed else "a.json")
    path.write_bytes(gzip.compress(data) if packed else data)
    position = Position()
    blocks = whole_lines(list_input(str(path), EXTENSIONS)[0], size, position)
    assert [line for _, block in blocks for line in block] == lines
    assert [first for first, _ in blocks] == np.cumsum([1, *(len(block) for _, block in blocks)])[:-1].tolist()
    assert position == Position(path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())


def test_marks_line_ends_and_blank_lines(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\r\n  \n{"a": 2}\n\n{"a": 3}')
    blocks = blocks_of(tmp_path / "a.json")
    assert (values_of(blocks, "a"), lines_of(blocks)) == ([1, 2, 3], [1, 4, 6])
    assert blocks[-1].where(0) == f"{tmp_path}/a.json:6"


def test_a_line_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "LONGEST_ROW_BYTES", 1000)
    monkeypatch.setattr(text_files, "FIRST_BLOCK_BYTES", 100)
    (tmp_path / "a.json").write_bytes(b'{"a": "' + b"x" * 5000)
    words = "a.json:1: expected rows of at most 1000 bytes, got no end of a row in 1600"
    assert words in str(problems_of(tmp_path / "a.json")[0])


def test_wide_rows_make_small_blocks_on_any_number_of_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch, 2000, 12_000)
    monkeypatch.setattr(text_files, "TABLE_BYTES", 50_000)
    # First rows of one id, then of 40, one in each row of 18 bytes: 8 * 40 * 12 000 / 18 = 213 000 bytes in 12 000.
    # 50 000 allow blocks of some 2800 bytes, 160 rows.
    lines = ['{"s": {"%d": 1.0}}\n' % (number % 40 * (number > 9000)) for number in range(18_000)]  # noqa: UP031
    (tmp_path / "a.json").write_text("".join(lines))
    sizes = set()
    for threads in (1, 3, 8):
        monkeypatch.setattr(reading, "num_threads", lambda threads=threads: threads)
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
    assert (calls[-1], sorted(calls)) == ((4500, 4500), calls)
    assert len(calls) > 2
