"""Blocks of whole lines in memory that is used again, however the bytes come."""

from __future__ import annotations

import gzip
import hashlib
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from reagent_lite.data.formats import jsonl
from reagent_lite.data.formats import lines as lines_module
from reagent_lite.data.formats.blocks import Position
from reagent_lite.data.formats.files import ByteStream, Fill, list_input
from reagent_lite.data.formats.lines import LineReader
from reagent_lite.data.formats.reading import READERS
from reagent_lite.errors import DataError


def filling(data: bytes, most: int) -> Fill:
    """Gives `most` bytes at a time, fewer than it may."""
    left = [data[at : at + most] for at in range(0, len(data), most)]

    def fill(view: memoryview) -> int:
        if not left:
            return 0
        found = left[0][: len(view)]
        view[: len(found)] = found
        left[0] = left[0][len(found) :]
        if not left[0]:
            left.pop(0)
        return len(found)

    return fill


def parsed(data: bytes, wanted: int, most: int = 1 << 20, *, held: int = 0) -> Iterator[tuple[int, list[bytes]]]:
    """Yields (first line, lines) of each block as they are when `held` more blocks have been read."""
    waiting = []
    for block in LineReader(filling(data, most), "a.json", 1 << 20).blocks(lambda: wanted):
        waiting.append(block)
        if len(waiting) > held:
            yield _taken(waiting.pop(0))
    yield from map(_taken, waiting)


def _taken(block: lines_module.Lines) -> tuple[int, list[bytes]]:
    lines = [bytes(block.text[start:stop]) for start, stop in itertools.pairwise(block.bounds.tolist())]
    assert block.bounds[-1] == len(block.text)
    block.give_back()
    return block.first, lines


@given(
    st.lists(st.binary(max_size=9).map(lambda line: line.replace(b"\n", b"x") + b"\n"), max_size=40),
    st.binary(max_size=5).map(lambda line: line.replace(b"\n", b"x")),
    st.integers(1, 60),
    st.integers(1, 30),
    st.integers(0, 3),
)
def test_every_line_comes_once_and_in_order(whole: list[bytes], last: bytes, wanted: int, most: int, held: int) -> None:
    lines = [*whole, last] if last else whole
    assume(not b"".join(lines).startswith(b"\xef\xbb\xbf"))
    first = 1
    found: list[bytes] = []
    for line, block in parsed(b"".join(lines), wanted, most, held=held):
        assert line == first
        assert block
        found += block
        first += len(block)
    assert found == lines


def test_a_block_has_as_many_whole_lines_as_fit() -> None:
    # lines of 4 bytes, 10 bytes wanted: 2 lines and 2 bytes over, which begin the next block
    data = b"".join(b"%03d\n" % number for number in range(7))
    assert list(parsed(data, 10)) == [
        (1, [b"000\n", b"001\n"]),
        (3, [b"002\n", b"003\n"]),
        (5, [b"004\n", b"005\n"]),
        (7, [b"006\n"]),
    ]


def test_a_line_may_be_longer_than_a_block() -> None:
    assert list(parsed(b"x" * 30 + b"\ny\n", 4)) == [(1, [b"x" * 30 + b"\n"]), (2, [b"y\n"])]
    assert list(parsed(b"x" * 30, 4)) == [(1, [b"x" * 30])]


def test_the_mark_of_an_encoding_is_no_part_of_the_first_line() -> None:
    assert list(parsed(b"\xef\xbb\xbfa\nb", 99)) == [(1, [b"a\n", b"b"])]


def test_memory_is_used_again_only_once_it_is_given_back() -> None:
    blocks = LineReader(filling(b"aaaa\nbbbb\ncccc\n", 99), "a.json", 99).blocks(lambda: 6)
    one, two = next(blocks), next(blocks)
    assert (bytes(one.text), bytes(two.text)) == (b"aaaa\n", b"bbbb\n")
    assert np.shares_memory(np.asarray(one.text), np.asarray(two.text)) is False
    two.give_back()
    three = next(blocks)
    assert (bytes(one.text), bytes(three.text)) == (b"aaaa\n", b"cccc\n")
    assert np.shares_memory(np.asarray(two.text), np.asarray(three.text))


def test_what_is_left_of_a_file_is_shared_by_the_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "FIRST_BLOCK_BYTES", 100)
    monkeypatch.setattr(jsonl, "BLOCK_BYTES", 400)
    monkeypatch.setattr(jsonl, "LAST_BLOCK_BYTES", 50)
    file = tmp_path / "a.json"
    file.write_bytes(b'{"a": 12}\n' * 130)
    (found,) = list_input(str(file), (".json",))
    blocks = READERS[".json"](found, 0, Position(bytes_in_all=1300, threads=2))
    # 1300 - 100 = 1200: half is above 400; 800 / 2 = 400; 400 / 2 = 200; 200 / 2 = 100; 100 / 2 = 50; 50
    assert [parse().table.num_rows for parse in blocks] == [10, 40, 40, 20, 10, 5, 5]


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_a_stream_fills_memory_and_hashes_what_is_stored(tmp_path: Path, name: str) -> None:
    data = bytes(range(256)) * 5
    (tmp_path / name).write_bytes(gzip.compress(data, mtime=0) if name.endswith(".gz") else data)
    (file,) = list_input(str(tmp_path / name), (".json",))
    stream, view, found = ByteStream(file), memoryview(bytearray(100)), b""
    with stream.filling() as fill:
        while count := fill(view):
            found += bytes(view[:count])
    assert found == data
    assert stream.position == file.size
    assert stream.digest.hexdigest() == hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()


def test_a_packed_file_that_ends_early_says_so(tmp_path: Path) -> None:
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(b"x" * 1000)[:-9])
    (file,) = list_input(str(tmp_path / "a.json.gz"), (".json",))
    with ByteStream(file).filling() as fill, pytest.raises(DataError, match="ends early"):
        _ = [fill(memoryview(bytearray(100))) for _ in range(12)]
