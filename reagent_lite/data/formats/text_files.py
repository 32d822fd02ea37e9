"""Files of text as blocks of whole rows: decompressed, hashed on the way, and cut at line ends.

stored bytes ─► sha256 ─► decompressed ─► cut after the last whole row ─► parsed in threads
                                          the rest begins the next block
"""

from __future__ import annotations

import codecs
import hashlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import IO, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from reagent_lite.data.formats.blocks import MOST_THREADS, Block, InputFile, Position
from reagent_lite.data.formats.input_files import COMPRESSIONS, damage_reported, require_format, require_text
from reagent_lite.data.formats.schema import item_values
from reagent_lite.errors import DataError, Problem

FIRST_BLOCK_BYTES = 1 << 18
BLOCK_BYTES = 1 << 22
TABLE_BYTES = 1 << 24
"""Memory of a block's table, including absent values, which dominate in wide tables, and features of items."""
LONGEST_ROW_BYTES = 1 << 28
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_text(
    file: InputFile,
    position: Position,
    end_of_rows: Callable[[bytes], int],
    parse: Callable[[bytes, int], Block],
    table_bytes: Callable[[bytes], int] = len,
) -> Iterator[Callable[[], Block]]:
    """Yields a function for each block of a text file, which parses it; the first block is small and parsed at once.

    Args:
        file: a plain or compressed file.
        position: kept up to date while the file is read.
        end_of_rows: returns the offset after the last whole row of a text; 0 if there is none.
        parse: given the text of some rows and its first line, returns their block; called in any thread and order.
        table_bytes: returns about how many bytes the table of the first block would take. It may grow by the square of
            the block, as sparse rows have a column for each key of any row.

    Raises:
        DataError: damaged compression, a row that is too long.
    """
    sizes: list[int] = []  # for each block: bytes of text whose table would take TABLE_BYTES

    def parse_block(number: int, text: bytes, line: int) -> Block:
        block = parse(text, line)
        num_bytes = block.table.nbytes + 4 * item_values(block.table, file.items)
        sizes[number] = min(BLOCK_BYTES, TABLE_BYTES * len(text) // max(1, num_bytes))
        return block

    def parsing(text: bytes, line: int) -> Callable[[], Block]:
        sizes.append(BLOCK_BYTES)
        later = partial(parse_block, len(sizes) - 1, text, line)
        if line > 1:
            return later
        block = later()
        return lambda: block

    rest = b""
    line = 1
    with file.open() as stored:
        hashed = _Hashed(stored, position)
        require_format(file, stored)
        plain: _Readable = hashed
        if file.compression:
            plain = pa.CompressedInputStream(hashed, COMPRESSIONS[file.compression])
        if file.extension == ".csv" and file.csv.encoding != "utf-8":
            plain = _AsUtf8(file, plain)
        while True:
            # Only blocks that are parsed by now with any number of threads count, so all machines cut the same blocks.
            size = min(sizes[: max(1, len(sizes) - MOST_THREADS - 1)], default=FIRST_BLOCK_BYTES)
            end = end_of_rows(rest[:size]) if sizes else 0  # more than one block is left of a first one that is wide
            text = rest
            if not end:
                with damage_reported(file, file.compression or file.extension):
                    piece = plain.read(max(size, len(rest), FIRST_BLOCK_BYTES >> 6))
                if not piece:
                    break
                if line == 1 and not rest:
                    require_text(file, piece)
                    piece = piece.removeprefix(BYTE_ORDER_MARK)
                text = rest + piece
                end = end_of_rows(text)
            if not sizes and end and (estimate := table_bytes(text[:end])) > TABLE_BYTES:
                end = end_of_rows(text[: int(end * math.sqrt(TABLE_BYTES / estimate))]) or end
            if end:
                yield parsing(text[:end], line)
            elif len(text) > LONGEST_ROW_BYTES:
                got = f"no end of a row in {len(text)} bytes from here"
                raise DataError(Problem(f"{file.path}:{line}", f"rows of at most {LONGEST_ROW_BYTES} bytes", got))
            line += int(np.count_nonzero(np.frombuffer(text, np.uint8, end) == ord("\n")))
            rest = text[end:]
        if rest:
            yield parsing(rest, line)


class _Readable(Protocol):
    def read(self, size: int = -1, /) -> bytes: ...


class _AsUtf8:
    """Text of another encoding as UTF-8, without a byte order mark."""

    def __init__(self, file: InputFile, stream: _Readable) -> None:
        self._file = file
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder(file.csv.encoding)()

    def read(self, size: int = -1, /) -> bytes:
        while True:
            piece = self._stream.read(size)
            try:
                text = self._decoder.decode(piece, final=not piece)
            except UnicodeError as error:
                encoding = self._file.csv.encoding
                raise DataError(
                    Problem(self._file.path, f"text in {encoding}, as csv.encoding says", str(error))
                ) from None
            if text or not piece:
                return text.encode("utf-8", "surrogatepass").removeprefix(BYTE_ORDER_MARK)


class _Hashed:
    """The stored bytes of a file, counted and hashed as they are read."""

    closed = False

    def __init__(self, stream: IO[bytes], position: Position) -> None:
        self._stream = stream
        self._position = position
        self._digest = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        piece = self._stream.read(size)
        self._digest.update(piece)
        self._position.bytes_read += len(piece)
        if not piece:
            self._position.sha256 = self._digest.hexdigest()
        return piece

    def close(self) -> None:
        """Does nothing: `read_text` closes the file."""


def contains(text: bytes, pattern: str) -> bool:
    """Whether bytes contain a pattern of RE2, which is searched without the GIL and in bounded memory."""
    offsets = np.array([0, len(text)], np.int32)
    without_copy = pa.Array.from_buffers(pa.binary(), 1, [None, pa.py_buffer(offsets), pa.py_buffer(text)])
    return bool(pc.match_substring_regex(without_copy, pattern)[0].as_py())
