"""Where the records of CSV text begin: lines, quotation marks, cells, by the rules of RFC 4180.

A mark opens a cell only at the cell's start and closes it only at its end; inside it is doubled. Held to that, a
newline ends a record where an even number of marks stands before it, and every record's line is known.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from reagent_lite.data.formats import jsonl
from reagent_lite.data.formats.files import ByteStream
from reagent_lite.errors import DataError, Problem

_QUOTE, _NEWLINE, _RETURN = ord('"'), ord("\n"), ord("\r")
_BEFORE = np.isin(np.arange(256), [ord(one) for one in ',\r\n"'])
_CELL = re.compile(r'"((?:[^"]|"")*)"|([^,]*)')


@dataclass(slots=True)
class BlockSize:
    """Bytes of the next block."""

    bytes: int = field(default_factory=lambda: jsonl.FIRST_BLOCK_BYTES)


def whole_records(stream: ByteStream, path: str, block: BlockSize) -> Iterator[tuple[bytes, int]]:
    """Yields (text of whole records, line where it begins); the first text is small, the last may lack its newline.

    Args:
        stream: of the file.
        path: named in errors.
        block: size of the next text.

    Raises:
        DataError: the file ends inside a quoted cell, or a record is longer than any that makes sense.
    """
    pieces: list[bytes] = []
    size, wanted, line, first = 0, block.bytes, 1, True
    for piece in stream.pieces(block.bytes):
        pieces.append(piece)
        size += len(piece)
        if size < wanted:
            continue
        text = b"".join(pieces)
        end = _end_of_records(text)
        if not end:
            lines_of(text, line, path)  # a mark out of place is the likelier reason
            if size > jsonl.LONGEST_LINE_BYTES:
                raise DataError(Problem(f"{path}:{line}", "a record", f"no end of it in {size} bytes"))
            pieces, wanted = [text], 2 * size
            continue
        whole = text[:end]
        yield _without_mark(whole, first), line
        line += whole.count(b"\n")
        pieces, size, wanted, first = [text[end:]], len(text) - end, block.bytes, False
    if rest := b"".join(pieces):
        rest = _without_mark(rest, first)
        if rest.count(b'"') % 2:
            starts, lines = lines_of(rest, line, path)
            cell = int(lines[-1]) if len(starts) else line
            raise DataError(Problem(f"{path}:{cell}", "records whose quoted cells end", "a file that ends inside a "
                            "quoted cell of the record that begins here", "Copy the file again"))  # fmt: skip
        yield rest, line


def _without_mark(text: bytes, first: bool) -> bytes:
    return text.removeprefix(b"\xef\xbb\xbf") if first else text


def _end_of_records(text: bytes) -> int:
    """Returns the offset after the last newline that ends a record, 0 where there is none."""
    marks = text.count(b'"')
    end = len(text)
    while (at := text.rfind(b"\n", 0, end)) >= 0:
        marks -= text.count(b'"', at, end)
        if marks % 2 == 0:
            return at + 1
        end = at
    return 0


def lines_of(text: bytes, line: int, path: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns ([n] offsets where records begin, [n] their lines) of text that begins in `line`; blank lines are none.

    Raises:
        DataError: a quotation mark that neither opens nor closes a cell, or a carriage return alone, with the line.
    """
    data = np.frombuffer(text, np.uint8)
    marks, newlines = np.flatnonzero(data == _QUOTE), np.flatnonzero(data == _NEWLINE)
    if len(marks):
        _require_in_place(data, marks, newlines, line, path)
    if b"\r" in text:
        _require_with_newline(data, marks, newlines, line, path)
    ends = newlines[np.searchsorted(marks, newlines) % 2 == 0] if len(marks) else newlines
    starts = np.concatenate(([0], ends + 1))
    stops = np.concatenate((ends, [len(text)]))
    returned = (stops > starts) & (data[np.maximum(stops - 1, 0)] == _RETURN) if len(text) else np.zeros(1, bool)
    starts = starts[stops - returned > starts]
    return starts, line + np.searchsorted(newlines, starts)


def _require_in_place(
    data: NDArray[np.uint8], marks: NDArray[np.int64], newlines: NDArray[np.int64], line: int, path: str
) -> None:
    opening, closing = marks[::2], marks[1::2]
    before = np.where(opening > 0, data[np.maximum(opening - 1, 0)], _NEWLINE)
    after = np.where(closing + 1 < len(data), data[np.minimum(closing + 1, len(data) - 1)], _NEWLINE)
    wrong = np.concatenate((opening[~_BEFORE[before]], closing[~_BEFORE[after]]))
    if not len(wrong):
        return
    at = int(wrong.min())
    start = int(marks[np.searchsorted(marks, at) - 1]) if at in closing else at
    begins, here = (int(line + np.searchsorted(newlines, one)) for one in (start, at))
    shown = data[max(0, at - 20) : at + 20].tobytes().decode(errors="replace")
    where = "" if begins == here else f", of a cell that begins in line {begins}"
    raise DataError(Problem(f"{path}:{here}", "quotation marks around whole cells, doubled inside them",
                            f"one in the middle of {shown!r}{where}"))  # fmt: skip


def _require_with_newline(
    data: NDArray[np.uint8], marks: NDArray[np.int64], newlines: NDArray[np.int64], line: int, path: str
) -> None:
    """Refuses a carriage return alone outside quoted cells: other readers of CSV end a record there."""
    returns = np.flatnonzero(data[:-1] == _RETURN)
    alone = returns[data[returns + 1] != _NEWLINE]
    alone = alone[np.searchsorted(marks, alone) % 2 == 0]
    if len(alone):
        where = f"{path}:{line + int(np.searchsorted(newlines, alone[0]))}"
        todo = "End lines by a newline, with or without a carriage return, and quote cells that have one"
        raise DataError(Problem(where, "lines that end by a newline", "a carriage return alone", todo))


def cells_of(record: str) -> list[str]:
    """Returns the cells of one record, with or without its line end."""
    record = record.rstrip("\r\n")
    cells, at = [], 0
    while True:
        match = _CELL.match(record, at)
        assert match is not None  # the empty cell matches everywhere
        cells.append(match[2] if match[1] is None else match[1].replace('""', '"'))
        at = match.end() + 1
        if at > len(record):
            return cells
